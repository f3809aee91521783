"""Medusa, Hydra and MLP speculators: every published layout, with its own key names, against references written here; refusals."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from draftproof.errors import LoadError, VocabularyMismatch
from draftproof.models.heads.detect import detect
from draftproof.models.heads.files import read_files
from draftproof.models.heads.hydra import HydraHead
from draftproof.models.heads.medusa import MedusaHead
from draftproof.models.heads.mlp import MlpHead
from draftproof.models.target import TargetParts

V, H, L, B = 30, 16, 6, 5             # vocabulary, the target's width and layers, rows of a step
HEADS, KV, D, INNER = 4, 2, 4, 20     # the target's attention
Tensors = dict[str, Tensor]


def make_parts() -> TargetParts:
    torch.manual_seed(99)
    config = SimpleNamespace(hidden_size=H, num_hidden_layers=L, vocab_size=V, model_type="llama", num_attention_heads=HEADS,
                             num_key_value_heads=KV, head_dim=D, intermediate_size=INNER, rms_norm_eps=1e-5, rope_theta=500.0)
    config.get_text_config = lambda: config
    norm = nn.LayerNorm(H)
    nn.init.normal_(norm.weight)
    return TargetParts(nn.Embedding(V, H), nn.Linear(H, V, bias=False), (), config, norm)


PARTS = make_parts()


def random(*shape: int) -> Tensor:
    return torch.randn(*shape) / math.sqrt(shape[-1])


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(3)


def written(folder: Path, config: dict[str, Any], tensors: Tensors) -> Any:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return read_files(folder)


def silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


# Medusa

MEDUSA = {"medusa_num_heads": 3, "medusa_num_layers": 2, "base_model_name_or_path": "org/base", "version": "2"}


def medusa_tensors(prefix: str = "", layers: int = 2, output: bool = True) -> Tensors:
    found: Tensors = {}
    for i in range(3):
        for layer in range(layers):
            found |= {f"{prefix}{i}.{layer}.linear.weight": random(H, H), f"{prefix}{i}.{layer}.linear.bias": random(H)}
        if output:
            found[f"{prefix}{i}.{layers}.weight"] = random(V, H)
    return found


def medusa_reference(t: Tensors, x: Tensor, i: int, layers: int, output: Tensor) -> Tensor:
    for layer in range(layers):
        x = x + silu(x @ t[f"{i}.{layer}.linear.weight"].T + t[f"{i}.{layer}.linear.bias"])
    return x @ output.T


@pytest.mark.parametrize("prefix", ["", "medusa_head."])
def test_medusa_as_published(tmp_path: Path, prefix: str) -> None:
    tensors = medusa_tensors()
    files = {f"{prefix}{name}": tensor for name, tensor in tensors.items()}
    if prefix:      # Medusa-2: the whole model stands beside the heads
        files |= {"model.layers.0.mlp.up_proj.weight": random(8, H), "lm_head.weight": random(V, H)}
    config = {"model_type": "llama", "vocab_size": V} if prefix else MEDUSA
    found = written(tmp_path, config, files)
    assert detect(found) == "medusa"
    head, hidden = MedusaHead.read(found, PARTS, V), torch.randn(B, H)
    assert (head.depth, head.layers, head.ids, head.taps) == (3, 2, None, (L - 1,))
    expected = torch.stack([medusa_reference(tensors, hidden, i, 2, tensors[f"{i}.2.weight"]) for i in range(3)], 1)
    torch.testing.assert_close(head(hidden), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(head(hidden, 2), expected[:, :2], atol=1e-5, rtol=1e-5)


def test_the_number_of_heads_comes_from_the_tensors(tmp_path: Path) -> None:
    assert MedusaHead.read(written(tmp_path, MEDUSA | {"medusa_num_heads": 2}, medusa_tensors()), PARTS, V).depth == 3


def test_a_repeated_block_may_stand_there_once(tmp_path: Path) -> None:
    tensors = medusa_tensors()
    for i in range(3):
        for kind in ("weight", "bias"):
            tensors[f"{i}.1.linear.{kind}"] = tensors[f"{i}.0.linear.{kind}"]
    once = {name: tensor for name, tensor in tensors.items() if ".1.linear" not in name}
    hidden = torch.randn(B, H)
    whole, short = (MedusaHead.read(written(tmp_path / str(len(t)), MEDUSA, t), PARTS, V)(hidden) for t in (tensors, once))
    assert torch.equal(whole, short)


@pytest.mark.parametrize("variant", ["plain", "bias", "map", "map-whole", "one"])
def test_medusa_in_vllms_layout(tmp_path: Path, variant: str) -> None:
    ids = torch.tensor([1, 2, 5, 9, 20, 29])
    size = len(ids) if variant.startswith("map") else V
    config = {"model_type": "medusa", "num_heads": 3, "num_hidden_layers": 2, "hidden_size": H, "vocab_size": V,
              "truncated_vocab_size": size, "original_lm_head": variant == "one", "medusa_fc_bias": variant == "bias"}
    weights = {(i, j): random(H, H) for i in range(3) for j in range(2)}
    biases = {key: random(H) if variant == "bias" else torch.zeros(H) for key in weights}
    outputs = [random(V, H) for _ in range(3)]
    tensors = {f"medusa_heads.blocks.{i}.layers.{j}.weight": w for (i, j), w in weights.items()}
    if variant == "bias":
        tensors |= {f"medusa_heads.blocks.{i}.layers.{j}.bias": b for (i, j), b in biases.items()}
    if variant.startswith("map"):
        tensors["token_map"] = ids
    rows = {"map": ids}.get(variant, torch.arange(V))
    tensors |= {f"lm_heads.{i}.weight": outputs[i][rows] for i in range(1 if variant == "one" else 3)}
    found = written(tmp_path, config, tensors)
    assert detect(found) == "medusa"
    head, hidden = MedusaHead.read(found, PARTS, V), torch.randn(B, H)
    expected = []
    for i in range(3):
        x = hidden
        for j in range(2):
            x = x + silu(x @ weights[i, j].T + biases[i, j])
        logits = x @ outputs[0 if variant == "one" else i].T
        expected.append(logits[:, ids] if variant.startswith("map") else logits)
    torch.testing.assert_close(head(hidden), torch.stack(expected, 1), atol=1e-5, rtol=1e-5)
    assert (head.ids is None) == (not variant.startswith("map")) and (head.ids is None or head.ids.tolist() == ids.tolist())


def test_medusa_with_the_targets_own_output_matrix(tmp_path: Path) -> None:
    tensors = medusa_tensors(output=False)
    head = MedusaHead.read(written(tmp_path, MEDUSA | {"medusa_target_output": True}, tensors), PARTS, V)
    hidden, output = torch.randn(B, H), PARTS.output.weight.detach()      # type: ignore[union-attr]
    expected = torch.stack([medusa_reference(tensors, hidden, i, 2, output) for i in range(3)], 1)     # type: ignore[arg-type]
    torch.testing.assert_close(head(hidden), expected, atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(head(hidden), expected, atol=1e-5, rtol=1e-5)
    assert not any("embed" in name or name.startswith("_parts") for name in head.state_dict())


def test_a_fresh_medusa_head_guesses_what_the_target_does() -> None:
    hidden = torch.randn(B, H)
    for output in ("target", "own", "one"):
        torch.testing.assert_close(MedusaHead.fresh(PARTS, 2, 3, output)(hidden)[:, 1], PARTS.output(hidden))    # type: ignore[misc]
    ids = torch.tensor([3, 4])
    torch.testing.assert_close(MedusaHead.fresh(PARTS, 2, 1, "own", ids)(hidden)[:, 1], PARTS.output(hidden)[:, ids])  # type: ignore[misc]


# Hydra


def hydra_tensors(layers: int, grounded: bool, prefix: bool, bias: bool) -> Tensors:
    found: Tensors = {}
    for i in range(3):
        for layer in range(layers):
            at = f"hydra_mlp.{i}.{2 * layer + 1 if prefix else layer}"
            width = H * (i + 2) if grounded and not layer else H
            found |= {f"{at}.linear.weight": random(H, width), f"{at}.linear.bias": random(H)}
            if grounded and not layer:
                found |= {f"{at}.res_connection.weight": random(H, width), f"{at}.res_connection.bias": random(H)}
        out = f"hydra_lm_head.{i}.1" if prefix else f"hydra_lm_head.{i}"
        found[f"{out}.weight"] = random(V, H)
        if bias:
            found[f"{out}.bias"] = random(V)
    if prefix:
        at = "prefix_embeding_layer"
        found |= {f"{at}.embed_tokens.weight": random(V, H), f"{at}.norm.weight": 1 + 0.3 * torch.randn(H),
                  f"{at}.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(D // 2)}
        at += ".layers.0"
        found |= {f"{at}.self_attn.q_proj.weight": random(HEADS * D, H), f"{at}.self_attn.k_proj.weight": random(KV * D, H),
                  f"{at}.self_attn.v_proj.weight": random(KV * D, H), f"{at}.self_attn.o_proj.weight": random(H, HEADS * D),
                  f"{at}.mlp.gate_proj.weight": random(INNER, H), f"{at}.mlp.up_proj.weight": random(INNER, H),
                  f"{at}.mlp.down_proj.weight": random(H, INNER)}
        found |= {f"{at}.{norm}.weight": 1 + 0.3 * torch.randn(H) for norm in ("input_layernorm", "post_attention_layernorm")}
    return found


def hydra_reference(t: Tensors, layers: int, grounded: bool, prefix: bool, x: Tensor, i: int, tokens: Tensor) -> Tensor:
    """x [B, H], tokens [B, i + 1] → logits [B, V]."""
    if grounded:
        x = torch.cat([x, *(PARTS.embed(tokens[:, j]) for j in range(i + 1))], -1)      # type: ignore[misc]
    for layer in range(layers):
        at = f"hydra_mlp.{i}.{2 * layer + 1 if prefix else layer}"
        kept = x @ t[f"{at}.res_connection.weight"].T + t[f"{at}.res_connection.bias"] if grounded and not layer else x
        x = kept + silu(x @ t[f"{at}.linear.weight"].T + t[f"{at}.linear.bias"])
    out = f"hydra_lm_head.{i}.1" if prefix else f"hydra_lm_head.{i}"
    return x @ t[f"{out}.weight"].T + t.get(f"{out}.bias", torch.zeros(V))


def run_hydra(head: HydraHead, state: Tensor, tokens: Tensor) -> list[Tensor]:
    found, state = [], head.start(state)
    for i in range(head.depth):
        logits, state = head.step(i, state, tokens[:, i])
        found.append(logits)
    return found


@pytest.mark.parametrize(("layers", "grounded", "prefix", "bias"), [
    (1, True, False, True), (2, True, False, False), (2, False, False, True), (3, True, True, True), (1, False, True, True)])
def test_hydra_as_published(tmp_path: Path, layers: int, grounded: bool, prefix: bool, bias: bool) -> None:
    tensors = hydra_tensors(layers, grounded, prefix, bias)
    config = {"hydra_num_heads": 3, "hydra_num_layers": layers, "hydra_head_arch": "prefix-mlp" if prefix else "mlp",
              "grounded_heads": grounded, "hidden_state_offset": 0, "base_model_name_or_path": "org/base"}
    found = written(tmp_path, config, tensors)
    assert detect(found) == "hydra"
    head = HydraHead.read(found, PARTS, V)
    assert (head.depth, head.layers, head.grounded, head.taps) == (3, layers, grounded, (L - 1,))
    hidden, tokens = torch.randn(B, H), torch.randint(V, (B, 3))
    for i, logits in enumerate(run_hydra(head, hidden, tokens)):
        torch.testing.assert_close(logits, hydra_reference(tensors, layers, grounded, prefix, hidden, i, tokens), atol=1e-5, rtol=1e-5)


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()


def test_the_prefix_layer_is_a_llama_layer_over_the_text(tmp_path: Path) -> None:
    t = hydra_tensors(1, True, True, True)
    head = HydraHead.read(written(tmp_path, {"hydra_head_arch": "prefix-mlp"}, t), PARTS, V)
    x, n, at = torch.randn(7, H), 7, "prefix_embeding_layer.layers.0"
    a = rms(x, t[f"{at}.input_layernorm.weight"])
    q, k, v = ((a @ t[f"{at}.self_attn.{name}_proj.weight"].T).view(n, -1, D) for name in "qkv")

    def turned(y: Tensor) -> Tensor:
        out = torch.empty_like(y)
        for p in range(n):
            for j in range(D // 2):
                angle = (p + 2) / 500.0 ** (2 * j / D)
                one, two = y[p, :, j], y[p, :, j + D // 2]
                out[p, :, j] = one * math.cos(angle) - two * math.sin(angle)
                out[p, :, j + D // 2] = two * math.cos(angle) + one * math.sin(angle)
        return out

    q, k = turned(q), turned(k)
    mixed = torch.zeros(n, HEADS, D)
    for h in range(HEADS):
        scores = (q[:, h] @ k[:, h // 2].T / math.sqrt(D)).masked_fill(torch.ones(n, n).triu(1).bool(), -math.inf)
        mixed[:, h] = scores.softmax(-1) @ v[:, h // 2]
    y = x + mixed.flatten(1) @ t[f"{at}.self_attn.o_proj.weight"].T
    b = rms(y, t[f"{at}.post_attention_layernorm.weight"])
    y = y + (silu(b @ t[f"{at}.mlp.gate_proj.weight"].T) * (b @ t[f"{at}.mlp.up_proj.weight"].T)) @ t[f"{at}.mlp.down_proj.weight"].T
    expected = rms(y, t["prefix_embeding_layer.norm.weight"])

    from draftproof.models.heads.cache import HeadCache, HeadPass

    cache, found = HeadCache(1, KV, D, torch.float32, "cpu"), []
    assert head.prefix_embeding_layer is not None
    for start, stop in ((0, 4), (4, 5), (5, 7)):
        attend = HeadPass([cache], [stop - start])
        found.append(head.prefix_embeding_layer(x[start:stop], torch.arange(start, stop) + 2, attend))
        attend.done()
    torch.testing.assert_close(torch.cat(found), expected, atol=1e-5, rtol=1e-5)


def test_hidden_state_offset_reads_an_earlier_layer_without_the_norm(tmp_path: Path) -> None:
    tensors, x = hydra_tensors(1, True, False, True), torch.randn(2, H)
    last, earlier = (HydraHead.read(written(tmp_path / str(k), {"hidden_state_offset": k}, tensors), PARTS, V) for k in (0, 2))
    assert last.taps == (L - 1,) and torch.equal(last.read_target(x), PARTS.norm(x))      # type: ignore[misc]
    assert earlier.taps == (L - 3,) and torch.equal(earlier.read_target(x), x)


# MLP speculator

WIDTH = 12


def mlp_tensors(tied: bool, whole: bool = True, tables: bool = False) -> Tensors:
    found: Tensors = {}
    for i in range(3):
        if i and tied and not whole and i > 1:
            continue
        first = 0 if tied else i
        found[f"speculator.proj.{i}.weight"] = found["speculator.proj.1.weight"] if tied and i > 1 else random(WIDTH, WIDTH if i else H)
        if i and tied and not whole:
            continue
        shapes = {"emb_proj": (WIDTH, H), "head_proj": (H, WIDTH)} if tables else {"emb": (V, WIDTH), "head": (V, WIDTH)}
        for name, shape in shapes.items():
            found[f"speculator.{name}.{i}.weight"] = found.get(f"speculator.{name}.{first}.weight", random(*shape))
        for kind in ("weight", "bias"):
            found[f"speculator.ln.{i}.{kind}"] = found.get(f"speculator.ln.{first}.{kind}", torch.randn(WIDTH))
    return found


def mlp_reference(t: Tensors, hidden: Tensor, tokens: Tensor, tied: bool, scale: bool, tables: bool) -> list[Tensor]:
    state_weight = 0.5 ** (0.5 / 3)
    token_weight = math.sqrt((1 - state_weight**2) * WIDTH / 2)
    state = hidden / (hidden.square().mean(-1, keepdim=True) + 1e-6).sqrt() / math.sqrt(2) if scale else hidden
    found = []
    for i in range(3):
        own = 0 if tied else i
        if tables:
            z = PARTS.embed(tokens[:, i]) @ t[f"speculator.emb_proj.{own}.weight"].T       # type: ignore[misc]
        else:
            z = t[f"speculator.emb.{own}.weight"][tokens[:, i]]
        mixed = state @ t[f"speculator.proj.{min(i, 1) if tied else i}.weight"].T + z * (token_weight / state_weight)
        mixed = mixed / (mixed.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        mixed = mixed * t[f"speculator.ln.{own}.weight"] + t[f"speculator.ln.{own}.bias"]
        state = mixed * 0.5 * (1 + torch.erf(mixed / math.sqrt(2)))
        if tables:
            found.append(PARTS.output(state @ t[f"speculator.head_proj.{own}.weight"].T))      # type: ignore[misc]
        else:
            found.append(state @ t[f"speculator.head.{own}.weight"].T)
    return found


@pytest.mark.parametrize(("tied", "whole", "scale", "tables", "nested"), [
    (False, True, False, False, False), (False, True, True, False, True), (True, True, True, False, False),
    (True, False, True, False, True), (True, True, True, True, False), (False, True, False, True, False)])
def test_mlp_as_published(tmp_path: Path, tied: bool, whole: bool, scale: bool, tables: bool, nested: bool) -> None:
    tensors = mlp_tensors(tied, whole, tables)
    config: dict[str, Any] = {"emb_dim": H, "inner_dim": WIDTH, "n_predict": 3, "vocab_size": V, "tie_weights": tied, "scale_input": scale,
                              "top_k_tokens_per_head": [5, 4, 3], "n_candidates": 5}
    config |= {"target_tables": True} if tables else {}
    whole_config = {"architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator"}
    found = written(tmp_path, whole_config | ({"speculator_config": config} if nested else config), tensors)
    assert detect(found) == "mlp"
    head = MlpHead.read(found, PARTS, V)
    assert (head.depth, head.inner, head.tied, head.scale_input, head.tables) == (3, WIDTH, tied, scale, tables)
    hidden, tokens = torch.randn(B, H), torch.randint(V, (B, 3))
    state = head.start(hidden)
    for i, expected in enumerate(mlp_reference(tensors, hidden, tokens, tied, scale, tables)):
        logits, state = head.step(i, state, tokens[:, i])
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


# Saving, and what is refused

FRESH: dict[str, Callable[[], Any]] = {
    "medusa": lambda: MedusaHead.fresh(PARTS, 3, 2, "own"),
    "medusa-target": lambda: MedusaHead.fresh(PARTS, 3, 2),
    "medusa-one": lambda: MedusaHead.fresh(PARTS, 3, 1, "one"),
    "medusa-cut": lambda: MedusaHead.fresh(PARTS, 1, 1, "own", torch.tensor([4, 7, 8])),
    "hydra": lambda: HydraHead.fresh(PARTS, 3, 2),
    "hydra-plain": lambda: HydraHead.fresh(PARTS, 3, 2, grounded=False),
    "hydra-prefix": lambda: HydraHead.fresh(PARTS, 2, 2, prefix=True),
    "mlp": lambda: MlpHead.fresh(PARTS, 3, WIDTH, tied=False, scale_input=False),
    "mlp-tied": lambda: MlpHead.fresh(PARTS, 4, WIDTH),
    "mlp-tables": lambda: MlpHead.fresh(PARTS, 4, tables=True),
}


@pytest.mark.parametrize("name", FRESH)
def test_what_is_saved_is_read_to_the_bit(tmp_path: Path, name: str) -> None:
    head = FRESH[name]()
    for parameter in head.parameters():
        nn.init.normal_(parameter)
    head.save(tmp_path)
    files = read_files(tmp_path)
    assert detect(files) == name.partition("-")[0]
    again = type(head).read(files, PARTS, V)
    one, two = head.state_dict(), again.state_dict()
    assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)
    for what in ("depth", "layers", "taps", "scale", "grounded", "tied", "scale_input", "tables", "offset"):
        assert getattr(head, what, None) == getattr(again, what, None), what
    assert (head.ids is None and again.ids is None) or torch.equal(head.ids, again.ids)
    head.save(tmp_path / "half", torch.bfloat16)
    assert {tensor.dtype for key, tensor in read_files(tmp_path / "half").tensors.items() if key != "token_map"} == {torch.bfloat16}


def without(name: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__delitem__(name)


def cut(name: str, rows: int | None = None, columns: int | None = None) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[name] = tensors[name][:rows, :columns].contiguous()
    return change


def plus(name: str, *shape: int) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__setitem__(name, torch.zeros(*shape))


REFUSED: list[tuple[str, dict[str, Any], Callable[[Tensors], None], str]] = [
    ("medusa", {}, without("1.0.linear.weight"), r"missing tensors: blocks\.1\.0\.weight"),
    ("medusa", {}, without("1.2.weight"), r"missing tensors: outputs\.1\.weight"),
    ("medusa", {}, plus("1.2.bias", V), r"nothing reads tensor 1\.2\.bias"),
    ("medusa", {}, cut("0.2.weight", rows=V - 2), "28 rows; expected 30.*cut one needs a token_map"),
    ("medusa", {}, plus("token_map", 3), "token_map is .* expected different ids"),
    ("medusa", {}, cut("0.0.linear.weight", columns=8), "hidden states of 8; expected 16"),
    ("medusa", {"medusa_num_heads": 4}, lambda tensors: None, "speaks of 4 heads, the tensors hold 3"),
    ("medusa", {"medusa_target_output": True}, lambda tensors: None, "3 output matrices; expected none"),
    ("hydra", {}, without("hydra_mlp.1.0.res_connection.weight"), r"missing tensors: hydra_mlp\.1\.0\.res_connection\.weight"),
    ("hydra", {}, plus("hydra_other.weight", 3), r"nothing reads: hydra_other\.weight"),
    ("hydra", {}, cut("hydra_lm_head.2.weight", rows=V - 1), "29 rows, the target 30 tokens"),
    ("hydra", {"hydra_head_arch": "eagle-attn"}, lambda tensors: None, "expected mlp or prefix-mlp"),
    ("hydra", {"hydra_head_arch": "prefix-mlp"}, lambda tensors: None, "prefix_embeding_layer is missing"),
    ("hydra", {"hydra_num_heads": 5}, lambda tensors: None, "speaks of 5 heads, the tensors hold 3"),
    ("hydra", {"hidden_state_offset": 6}, lambda tensors: None, "hidden_state_offset is 6"),
    ("mlp", {}, without("speculator.proj.0.weight"), r"speculator\.proj\.0\.weight is missing"),
    ("mlp", {}, without("speculator.ln.2.bias"), r"missing tensors: ln\.2\.bias"),
    ("mlp", {}, plus("speculator.ln.2.scale", 3), r"nothing reads: ln\.2\.scale"),
    ("mlp", {}, cut("speculator.emb.1.weight", rows=V - 1), "29 rows, the target 30 tokens"),
    ("mlp", {}, cut("speculator.proj.0.weight", columns=8), "hidden states of 8; expected 16"),
    ("mlp", {"n_predict": 5}, lambda tensors: None, "speaks of 5 steps"),
    ("mlp", {"tie_weights": True}, lambda tensors: None, "tie_weights is true, and .* differs"),
]


@pytest.mark.parametrize(("family", "config", "change", "message"), REFUSED, ids=[f"{r[0]}-{i}" for i, r in enumerate(REFUSED)])
def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, family: str, config: dict[str, Any], change: Any, message: str) -> None:
    make: dict[str, Callable[[], tuple[dict[str, Any], Tensors, Any]]] = {
        "medusa": lambda: (MEDUSA, medusa_tensors(), MedusaHead),
        "hydra": lambda: ({"hydra_num_heads": 3, "hydra_num_layers": 1}, hydra_tensors(1, True, False, True), HydraHead),
        "mlp": lambda: ({"n_predict": 3, "tie_weights": False}, mlp_tensors(False), MlpHead),
    }
    settings, tensors, kind = make[family]()
    change(tensors)
    with pytest.raises(LoadError, match=message) as raised:
        kind.read(written(tmp_path, settings | config, tensors), PARTS, V)
    assert isinstance(raised.value, VocabularyMismatch) == ("rows" in message or "token_map is" in message)
