"""EAGLE heads: every published layout, with its own key names, against a reference written here; and what is refused."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from draftproof import llama, native
from draftproof.errors import LoadError
from draftproof.models.heads import files as files_of_heads
from draftproof.models.heads.blocks import Rope, join
from draftproof.models.heads.cache import HeadCache, HeadPass
from draftproof.models.heads.detect import detect, require
from draftproof.models.heads.eagle import EagleHead
from draftproof.models.heads.eagle3 import Eagle3Head
from draftproof.models.heads.files import HeadFiles, read_files, write_files
from draftproof.models.packed import pack
from draftproof.models.target import TargetParts

V, VD, HT, L = 40, 12, 24, 16                 # vocabulary, draft vocabulary, the target's width and layers
H, INNER, HEADS, KV, D = 24, 40, 4, 2, 8      # the head
IDS = torch.tensor([0, 1, 2, 5, 6, 11, 12, 13, 20, 30, 31, 39])
OUTPUTS = [1, 7, 12]
Tensors = dict[str, Tensor]


def parts(width: int = HT) -> TargetParts:
    torch.manual_seed(99)
    config = SimpleNamespace(hidden_size=width, num_hidden_layers=L, vocab_size=V, model_type="llama")
    config.get_text_config = lambda: config
    embed, output, norm = nn.Embedding(V, width), nn.Linear(width, V, bias=False), nn.LayerNorm(width)
    nn.init.normal_(norm.weight)
    return TargetParts(embed, output, (), config, norm)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape) / math.sqrt(shape[-1])


def layer(prefix: str, width: int, norms: tuple[str, ...], hidden: int = H, **more: bool) -> Tensors:
    found = {f"{prefix}.self_attn.q_proj.weight": random(HEADS * D, width), f"{prefix}.self_attn.k_proj.weight": random(KV * D, width),
             f"{prefix}.self_attn.v_proj.weight": random(KV * D, width), f"{prefix}.self_attn.o_proj.weight": random(hidden, HEADS * D),
             f"{prefix}.mlp.gate_proj.weight": random(INNER, hidden), f"{prefix}.mlp.up_proj.weight": random(INNER, hidden),
             f"{prefix}.mlp.down_proj.weight": random(hidden, INNER)}
    found |= {f"{prefix}.{norm}.weight": 1 + 0.3 * torch.randn(hidden) for norm in norms}
    if more.get("qk"):
        found |= {f"{prefix}.self_attn.{n}_norm.weight": 1 + 0.3 * torch.randn(D) for n in "qk"}
    if more.get("bias"):
        found |= {f"{prefix}.self_attn.{n}_proj.bias": random(rows) for n, rows in (("q", HEADS * D), ("k", KV * D), ("v", KV * D))}
        found |= {f"{prefix}.mlp.down_proj.bias": random(hidden)}
    return found


FIRST = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
COMMON: dict[str, Any] = {"hidden_size": H, "num_attention_heads": HEADS, "num_key_value_heads": KV, "head_dim": D, "rms_norm_eps": 1e-5,
                          "vocab_size": V, "hidden_act": "silu", "num_hidden_layers": 1}
OFFSETS = {"d2t": IDS - torch.arange(VD)}
BOTH = OFFSETS | {"t2d": torch.zeros(V, dtype=torch.bool).index_fill(0, IDS, True)}


def body(prefix: str, taps: int = 3, size: int = VD, hidden: int = H, width: int = HT, **more: bool) -> Tensors:
    return {"fc.weight": random(hidden, taps * width), **layer(prefix, 2 * hidden, FIRST, hidden, **more),
            "norm.weight": 1 + 0.3 * torch.randn(hidden), "lm_head.weight": random(size, hidden)}


def speculators(**fields: Any) -> dict[str, Any]:
    return {"architectures": ["Eagle3Speculator"], "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"}, "speculators_model_type": "eagle3",
            "speculators_version": "0.2.0", "draft_vocab_size": VD, "target_hidden_size": None, "norm_before_residual": True,
            "eagle_aux_hidden_state_layer_ids": None, "norm_before_fc": False, "fc_norm": False, "norm_output": False,
            "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "/proving-grounds/x", "architectures": []}},
            "transformer_layer_config": {"model_type": "llama", **COMMON}, **fields}


def nested(ids: list[int] | None, **more: Any) -> dict[str, Any]:
    return {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True, **more}}


def rotary(scaling: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"architectures": ["LlamaForCausalLMEagle3"], **COMMON, "rope_scaling": scaling, **fields}


def sliding(kinds: list[str], **fields: Any) -> dict[str, Any]:
    """As `speculators` writes it: its own layers slide unless they are asked not to."""
    body = {"model_type": "llama", **COMMON, "layer_types": kinds, "sliding_window": 3, "use_sliding_window": True, **fields}
    return speculators(transformer_layer_config=body)


def without(tensors: Tensors, name: str) -> Tensors:
    return {other: tensor for other, tensor in tensors.items() if other != name}


UNWRAPPED = {"lm_head.weight", "d2t", "t2d", "mask_hidden"}
# name → (config, tensors, what a reference must know)
LAYOUTS: dict[str, Callable[[], tuple[dict[str, Any], Tensors, dict[str, Any]]]] = {
    "official": lambda: ({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "draft_vocab_size": VD, **COMMON},
                         body("midlayer") | BOTH, {}),
    "official-70B-own-embedding": lambda: ({"architectures": ["LlamaForCausalLM"], "target_hidden_size": HT, **COMMON, "hidden_size": 16},
                                           body("midlayer", hidden=16) | BOTH | {"embed_tokens.weight": random(V, 16)}, {}),
    "official-full-vocabulary": lambda: ({"architectures": ["LlamaForCausalLM"], **COMMON}, body("midlayer", size=V), {}),
    "specforge": lambda: ({"architectures": ["LlamaForCausalLMEagle3"], **COMMON, "rope_theta": 500.0, **nested([1, 5, 9])},
                          body("midlayer") | BOTH, {"taps": [1, 5, 9], "theta": 500.0}),
    "angelslim": lambda: ({"architectures": ["Eagle3LlamaForCausalLM"], "target_model_type": "qwen3", **COMMON},
                          body("midlayer", bias=True) | BOTH, {}),
    "specforge-mrope": lambda: (
        rotary({"type": "mrope", "mrope_section": [1, 1, 2]}, rope_theta=500.0), body("midlayer") | BOTH, {"theta": 500.0}),
    "rope-by-kind-of-layer": lambda: (
        rotary({"full_attention": {"rope_theta": 500.0}, "sliding_attention": {"rope_theta": 10.0}}, layer_types=["full_attention"]),
        body("layers.0") | BOTH, {"theta": 500.0}),
    "nvidia": lambda: ({"architectures": ["LlamaForCausalLMEagle3"], **COMMON,
                        **nested([1, 7, 12], use_input_layernorm_in_first_layer=True, use_last_layernorm=True, next_layer_regular=True)},
                       body("layers.0") | OFFSETS, {}),
    "nvidia-last-layer-tapped": lambda: (
        {"architectures": ["LlamaForCausalLMEagle3"], **COMMON, **nested([8, 12, L], norm_before_fc=True)},
        body("layers.0") | OFFSETS | {"input_norm.weight": 1 + 0.3 * torch.randn(3 * HT)}, {"taps": [7, 11, L - 1]}),
    "nvidia-no-taps": lambda: (
        {"architectures": ["LlamaForCausalLMEagle3"], **COMMON, **nested([], use_aux_hidden_state=False)},
        without(body("layers.0") | OFFSETS, "fc.weight"), {"taps": [L - 1], "last": True}),
    "automodel": lambda: (
        {"architectures": ["LlamaEagle3DraftModel"], "model_type": "llama", "draft_vocab_size": VD, "target_hidden_size": HT, **COMMON},
        {name if name in UNWRAPPED else f"model.{name}": tensor for name, tensor in (
            body("layers.0") | BOTH | {"embed_tokens.weight": random(V, H)}).items()}, {}),
    "output-of-the-target": lambda: (
        {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": None, **COMMON}, without(body("midlayer"), "lm_head.weight"), {}),
    "output-tied": lambda: (
        {"architectures": ["LlamaForCausalLMEagle3"], "tie_word_embeddings": True, **COMMON},
        without(body("midlayer"), "lm_head.weight") | {"embed_tokens.weight": random(V, H)}, {"tied": True}),
    "deepspec": lambda: ({"architectures": ["Qwen3Eagle3Model"], "target_layer_ids": [1, 3, 5, 7, 9], "ttt_length": 7, **COMMON},
                         body("layers.0", taps=5, size=V, qk=True) | {"embed_tokens.weight": random(V, H)}, {"taps": [1, 3, 5, 7, 9]}),
    "speculators": lambda: (speculators(), body("layers.0") | BOTH | {"embed_tokens.weight": random(V, H)}, {"nbr": True}),
    "speculators-taps-qwen": lambda: (speculators(eagle_aux_hidden_state_layer_ids=[3, 6, 14], norm_before_residual=False),
                                      body("layers.0", qk=True) | BOTH | {"embed_tokens.weight": random(V, H)}, {"taps": [2, 5, 13]}),
    "speculators-sliding": lambda: (
        sliding(["sliding_attention"]), body("layers.0") | BOTH | {"embed_tokens.weight": random(V, H)}, {"nbr": True, "windows": [3]}),
    "speculators-sliding-second": lambda: (
        sliding(["full_attention", "sliding_attention"], num_hidden_layers=2),
        body("layers.0") | BOTH | layer("layers.1", H, ("input_layernorm", "post_attention_layernorm")), {"nbr": True, "windows": [99, 3]}),
    "3.1-fc-norm-norm-output": lambda: (speculators(fc_norm=True, norm_output=True), body("layers.0") | BOTH | {
        f"fc_norm.{i}.weight": 1 + 0.3 * torch.randn(HT) for i in range(3)}, {"nbr": True, "output": True}),
    "norm-before-fc": lambda: (speculators(norm_before_fc=True), body("layers.0") | BOTH | {
        "input_norm.weight": 1 + 0.3 * torch.randn(3 * HT)}, {"nbr": True}),
    "two-layers": lambda: (speculators(), body("layers.0") | BOTH | layer("layers.1", H, ("input_layernorm", "post_attention_layernorm")),
                           {"nbr": True}),
    "two-layers-sglang": lambda: ({"architectures": ["LlamaForCausalLMEagle3"], **COMMON}, body("midlayer") | BOTH | layer(
        "additional_layers.0", H, ("hidden_norm", "post_attention_layernorm")), {}),
    "two-layers-trt": lambda: ({"architectures": ["LlamaForCausalLM"], **COMMON}, body("midlayer.0") | BOTH | layer(
        "midlayer.1", H, ("input_layernorm", "post_attention_layernorm")), {}),
}


def files_of(name: str, folder: Path | None = None) -> tuple[HeadFiles, dict[str, Any]]:
    torch.manual_seed(len(name))
    config, tensors, facts = LAYOUTS[name]()
    return HeadFiles(folder or Path("head"), json.loads(json.dumps(config)), tensors), facts


# The reference: plain functions of tensors by their published names.


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5) * weight


def turned(x: Tensor, position: int, theta: float) -> Tensor:
    """One head's vector [D], rotated pair by pair."""
    out = x.clone()
    for i in range(D // 2):
        angle = position / theta ** (2 * i / D)
        a, b = x[i], x[i + D // 2]
        out[i], out[i + D // 2] = a * math.cos(angle) - b * math.sin(angle), b * math.cos(angle) + a * math.sin(angle)
    return out


def attention(t: Tensors, at: str, xs: list[Tensor], theta: float, window: int = 99) -> list[Tensor]:
    """Causal attention over inputs xs at positions 0, 1, …, one head at a time; each sees itself and the window − 1 before it."""
    def project(kind: str, x: Tensor, heads: int) -> Tensor:
        y = t[f"{at}.self_attn.{kind}_proj.weight"] @ x
        if f"{at}.self_attn.{kind}_proj.bias" in t:
            y = y + t[f"{at}.self_attn.{kind}_proj.bias"]
        y = y.view(heads, D)
        norm = t.get(f"{at}.self_attn.{kind}_norm.weight")
        return y if norm is None else rms(y, norm)

    keys = [torch.stack([turned(k, i, theta) for k in project("k", x, KV)]) for i, x in enumerate(xs)]
    values = [project("v", x, KV) for x in xs]
    outs = []
    for i, x in enumerate(xs):
        heads = []
        for head, q in enumerate(project("q", x, HEADS)):
            shared = head // (HEADS // KV)
            q = turned(q, i, theta)
            seen = range(max(0, i + 1 - window), i + 1)
            weights = torch.stack([q @ keys[j][shared] / math.sqrt(D) for j in seen]).softmax(0)
            heads.append(sum((weight * values[j][shared] for weight, j in zip(weights, seen, strict=True)), torch.zeros(D)))
        outs.append(t[f"{at}.self_attn.o_proj.weight"] @ torch.cat(heads))
    return outs


def mlp(t: Tensors, at: str, x: Tensor) -> Tensor:
    gate, up = t[f"{at}.mlp.gate_proj.weight"] @ x, t[f"{at}.mlp.up_proj.weight"] @ x
    y = t[f"{at}.mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up)
    return y + t.get(f"{at}.mlp.down_proj.bias", torch.zeros(()))


def eagle3_reference(t: Tensors, target: TargetParts, features: list[Tensor], tokens: list[int], facts: dict[str, Any]) -> list[Tensor]:
    """Logits of every entry: len(features) true ones, then recurrences on the head's own output."""
    t = {name.removeprefix("model."): tensor for name, tensor in t.items()}
    assert target.embed is not None and target.output is not None and target.norm is not None
    first = next(name for name in ("midlayer.0", "midlayer", "layers.0") if f"{name}.hidden_norm.weight" in t)
    second = next((name for name in ("midlayer.1", "layers.1", "additional_layers.0") if f"{name}.mlp.up_proj.weight" in t), None)
    theta, hidden, windows = facts.get("theta", 10000.0), [], facts.get("windows", [99, 99])
    table = t.get("embed_tokens.weight", target.embed.weight.detach())
    output = t.get("lm_head.weight", table if facts.get("tied") else target.output.weight.detach())
    for x in features:
        if "input_norm.weight" in t:
            x = rms(x, t["input_norm.weight"])
        if "fc_norm.0.weight" in t:
            x = torch.cat([rms(x[i * HT:(i + 1) * HT], t[f"fc_norm.{i}.weight"]) for i in range(3)])
        hidden.append(target.norm(x).detach() if facts.get("last") else t["fc.weight"] @ x)
    logits: list[Tensor] = []
    while len(logits) < len(tokens):
        normed = [rms(h, t[f"{first}.hidden_norm.weight"]) for h in hidden]
        wide = [torch.cat((rms(table[token], t[f"{first}.input_layernorm.weight"]), n)) for token, n in zip(tokens, normed, strict=False)]
        ys = [(n if facts.get("nbr") else h) + a for n, h, a in zip(normed, hidden, attention(t, first, wide, theta, windows[0]),
                                                                                    strict=True)]
        ys = [y + mlp(t, first, rms(y, t[f"{first}.post_attention_layernorm.weight"])) for y in ys]
        if second:
            name = "hidden_norm" if second.startswith("additional") else "input_layernorm"
            deep = attention(t, second, [rms(y, t[f"{second}.{name}.weight"]) for y in ys], theta, windows[1])
            ys = [y + a for y, a in zip(ys, deep, strict=True)]
            ys = [y + mlp(t, second, rms(y, t[f"{second}.post_attention_layernorm.weight"])) for y in ys]
        outs = [rms(y, t["norm.weight"]) for y in ys]
        logits = [output @ out for out in outs]
        hidden = hidden + [(outs if facts.get("output") else ys)[len(hidden) - 1]]
    return logits


def served(head: Any, features: Tensor, tokens: list[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """The same through the cache: true entries in two passes, then one entry per pass on the head's own output."""
    cache = HeadCache(head.depth, head.kv_heads, head.head_dim, dtype, "cpu")
    found, true = [], features.shape[0]
    hidden = head.fuse(features)
    for rows in (range(true - 2), range(true - 2, true), *((i,) for i in range(true, len(tokens)))):
        before = hidden[list(rows)] if rows[0] < true else found[-1][-1:]
        attend = HeadPass([cache], [len(rows)])
        found.append(head.step(torch.tensor([tokens[i] for i in rows]), before, torch.tensor(list(rows)), attend))
        attend.done()
    assert cache.length == len(tokens)
    out: Tensor = head.logits(torch.cat(found)).detach()
    return out


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_computes_what_its_publisher_does(name: str) -> None:
    files, facts = files_of(name)
    assert detect(files) == "eagle3"
    target = parts()
    head = Eagle3Head.read(files, target, V)
    assert head.taps == tuple(facts.get("taps", OUTPUTS))
    torch.manual_seed(1)
    features, tokens = torch.randn(5, len(head.taps) * HT), [3, 17, 0, 39, 8, 21, 30]
    expected = eagle3_reference(dict(files.tensors), target, list(features), tokens, facts)
    assert torch.allclose(served(head, features, tokens), torch.stack(expected), atol=1e-5)
    if "d2t" in files.tensors:
        assert head.ids is not None and torch.equal(head.ids, IDS)


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_is_saved_reads_bit_equal(name: str, tmp_path: Path) -> None:
    target = parts()
    head = Eagle3Head.read(files_of(name)[0], target, V)
    head.save(tmp_path)
    files = read_files(tmp_path)
    again = Eagle3Head.read(files, target, V)
    assert again.taps == head.taps and again.config == head.config
    assert all(torch.equal(a, b) for a, b in zip(head.state_dict().values(), again.state_dict().values(), strict=True))
    assert (again.ids is None) == (head.ids is None) and (head.ids is None or torch.equal(again.ids, head.ids))
    features, tokens = torch.randn(3, len(head.taps) * HT), [3, 17, 0, 39]
    assert torch.equal(served(again, features, tokens), served(head, features, tokens))


# EAGLE-1


def eagle1(**more: bool) -> tuple[dict[str, Any], Tensors]:
    torch.manual_seed(5)
    tensors = {"fc.weight": random(H, 2 * H), **layer("layers.0", H, ("post_attention_layernorm",))}
    if more.get("bias"):
        tensors["fc.bias"] = random(H)
    if more.get("embed"):
        tensors["embed_tokens.weight"] = random(V, H)
    if more.get("norms"):
        tensors |= {f"{name}.weight": 1 + 0.3 * torch.randn(H) for name in ("embedding_layernorm", "hidden_states_layernorm")}
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **COMMON}, tensors


@pytest.mark.parametrize("more", [{}, {"bias": True, "embed": True}, {"bias": True, "norms": True}], ids=["llama-3", "llama-2", "hass"])
def test_eagle_1(more: dict[str, bool], tmp_path: Path) -> None:
    config, t = eagle1(**more)
    target = parts()
    assert target.embed is not None and target.output is not None and target.norm is not None
    files = HeadFiles(tmp_path, config, t)
    assert detect(files) == "eagle"
    head = EagleHead.read(files, target, V)
    assert head.taps == (L - 1,) and head.ids is None
    features, tokens = torch.randn(4, H), [3, 17, 0, 39, 8]
    table, hidden, logits = t.get("embed_tokens.weight", target.embed.weight.detach()), list(target.norm(features).detach()), []
    while len(logits) < len(tokens):
        xs = []
        for token, h in zip(tokens, hidden, strict=False):
            e = table[token]
            if more.get("norms"):
                e, h = rms(e, t["embedding_layernorm.weight"]), rms(h, t["hidden_states_layernorm.weight"])
            xs.append(t["fc.weight"] @ torch.cat((e, h)) + t.get("fc.bias", torch.zeros(())))
        ys = [x + a for x, a in zip(xs, attention(t, "layers.0", xs, 10000.0), strict=True)]
        ys = [y + mlp(t, "layers.0", rms(y, t["layers.0.post_attention_layernorm.weight"])) for y in ys]
        logits, hidden = [target.output(y).detach() for y in ys], [*hidden, ys[-1]]
    assert torch.allclose(served(head, features, tokens), torch.stack(logits), atol=1e-5)
    head.save(tmp_path)
    again = EagleHead.read(read_files(tmp_path), target, V)
    assert torch.equal(served(again, features, tokens), served(head, features, tokens))


def of_speculators(config: dict[str, Any], tensors: Tensors) -> tuple[dict[str, Any], Tensors]:
    """The first generation: the layer is `transformer`, and its config stands inside."""
    renamed = {re.sub(r"^layers\.0\.", "transformer.", re.sub(r"^fc\.", "fusion_fc.", name)): tensor for name, tensor in tensors.items()}
    return {"architectures": ["EagleSpeculator"], "speculators_model_type": "eagle", "transformer_layer_config": config}, renamed


def of_automodel(config: dict[str, Any], tensors: Tensors) -> tuple[dict[str, Any], Tensors]:
    return {**config, "architectures": ["LlamaEagleDraftModel"]}, {f"model.{name}": tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("wrap", [of_speculators, of_automodel])
def test_eagle_1_in_other_words(wrap: Callable[[dict[str, Any], Tensors], tuple[dict[str, Any], Tensors]]) -> None:
    config, tensors = eagle1(bias=True, embed=True)
    config |= {"rope_theta": 500.0, "num_attention_heads": HEADS, "head_dim": None}
    plain, files = HeadFiles(Path("head"), config, tensors), HeadFiles(Path("head"), *wrap(config, tensors))
    assert detect(files) == "eagle"
    one, other = (EagleHead.read(each, parts(), V) for each in (plain, files))
    features, tokens = torch.randn(4, H), [3, 17, 0, 39, 8]
    assert torch.equal(served(one, features, tokens), served(other, features, tokens))
    assert other.shape.eps == 1e-5 and torch.equal(other.rope.inv_freq, Rope({"rope_theta": 500.0}, D).inv_freq)


# To serve


def ready(head: Any) -> Any:
    """Joined and packed, as a drafter does."""
    head.requires_grad_(False).eval()
    join(head)
    pack(head)
    return head


def rounded(tensors: Tensors) -> Tensors:
    """Weights that the kernels take: all of them bfloat16."""
    return {name: tensor.bfloat16().float() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


def head_of(name: str) -> Any:
    if name.startswith("eagle-1"):
        config, tensors = eagle1(bias=True, norms=name.endswith("hass"))
        return EagleHead.read(HeadFiles(Path(name), config, rounded(tensors)), parts(), V)
    files, _ = files_of(name)
    return Eagle3Head.read(HeadFiles(files.path, files.config, rounded(dict(files.tensors))), parts(), V)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many courses each call of the compiled layers had."""
    if not native.available()[0]:
        pytest.skip("no compiler")
    found: list[int] = []

    def counted(*given: Any) -> None:
        found.append(len(given[6]))
        blocks(*given)

    blocks = llama.blocks
    monkeypatch.setattr(llama, "blocks", counted)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*(name for name in LAYOUTS if name != "speculators-sliding-second"), "eagle-1", "eagle-1-hass"])
def test_the_compiled_layers_are_the_layers(name: str, dtype: torch.dtype, calls: list[int]) -> None:
    head = head_of(name)
    features, tokens = torch.randn(5, len(head.taps) * HT).to(dtype), [3, 17, 0, 39, 8, 21, 30]
    for part in (head, *head._parts):
        for module in [part] if isinstance(part, nn.Module) else [m for m in (part.embed, part.output, part.norm) if m is not None]:
            module.to(dtype)
    head.rope.inv_freq = Rope(head.config, head.head_dim).inv_freq
    with torch.no_grad():
        plain = served(head, features, tokens, dtype)
        assert not calls
    with torch.inference_mode():
        ours = served(ready(head), features, tokens, dtype)
    assert torch.allclose(ours.float(), plain.float(), atol=1e-5 if dtype == torch.float32 else 0.1)
    assert calls == [1] * 4


def test_sequences_of_a_pass_do_not_meet_in_the_compiled_layers(calls: list[int]) -> None:
    """Texts whose entries fill pages, and outgrow the cache's room, in one pass: bit for bit what each alone computes."""
    head, counts = ready(head_of("official")), [(3, 60, 9), (70, 1, 64), (1, 130, 1)]
    size, places = [sum(of) for of in counts], []
    rows = [torch.randn(n, H) for n in size]
    with torch.inference_mode():

        def run(which: list[int]) -> list[Tensor]:
            caches, found, at = [HeadCache(1, KV, D, torch.float32, "cpu") for _ in which], [], [0] * len(which)
            for step in range(3):
                new = [counts[i][step] for i in which]
                ends = [a + n for a, n in zip(at, new, strict=True)]
                some = [rows[i][a:b] for i, a, b in zip(which, at, ends, strict=True)]
                places[:] = [p for a, b in zip(at, ends, strict=True) for p in range(a, b)]
                attend = HeadPass(caches, new)
                out = head.step(torch.tensor([p % V for p in places]), torch.cat(some), torch.tensor(places), attend)
                attend.done()
                found.append(out.split(new))
                at = ends
            return [torch.cat([step[i] for step in found]) for i in range(len(which))]

        together = run([0, 1, 2])
        assert calls == [3, 3, 3]
        for i, own in enumerate(together):
            assert torch.equal(run([i])[0], own)
            cache = HeadCache(1, KV, D, torch.float32, "cpu")
            with torch.no_grad(), torch.inference_mode(False):         # torch's way
                wanted = head.step(torch.arange(size[i]) % V, rows[i].clone(), torch.arange(size[i]), HeadPass([cache], [size[i]]))
            assert torch.allclose(wanted, own, atol=1e-5)


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("name", ["official", "speculators-sliding"])
@pytest.mark.parametrize("true", [3, 62, 130])
def test_a_tree_node_sees_its_ancestors_and_nothing_else(true: int, name: str, kernels: bool, calls: list[int]) -> None:
    """Two branches of two nodes in two masked passes give what each branch gives as a chain; at the edge of a page, too."""
    head = ready(head_of(name))
    with torch.inference_mode() if kernels else torch.no_grad():
        grow_two_branches(head, true)
    assert len(calls) == (11 if kernels else 0)


def grow_two_branches(head: Any, true: int) -> None:
    features, text, branches = torch.randn(true, 3 * HT), [i % V for i in range(true)], [[7, 8], [9, 10]]
    cache, attendances = HeadCache(1, KV, D, torch.float32, "cpu"), []
    attend = HeadPass([cache], [true])
    out = head.step(torch.tensor(text), head.fuse(features), torch.arange(true), attend)
    attend.done()
    hidden, seen = out[-1:].expand(2, -1), torch.ones(2, true, dtype=torch.bool)
    for level in range(2):
        seen = torch.cat((seen, torch.eye(2, dtype=torch.bool)), 1)
        attend = HeadPass([cache], [2], [seen])
        hidden = head.step(torch.tensor([b[level] for b in branches]), hidden, torch.full((2,), true + level), attend)
        attend.done()
        attendances.append(head.logits(hidden).detach())
    for i, branch in enumerate(branches):
        chain = served(head, features, [*text, *branch])
        assert torch.allclose(torch.stack([level[i] for level in attendances]), chain[true:], atol=1e-5)


def test_a_cache_grows_and_shrinks() -> None:
    cache, rows = HeadCache(2, KV, D, torch.float32, "cpu"), torch.randn(200, KV, D)
    for start in range(0, 200, 40):
        for at in range(2):
            keys, values = cache.write(at, rows[start:start + 40] * (at + 1), -rows[start:start + 40])
            assert torch.equal(keys, (rows[:start + 40] * (at + 1)).transpose(0, 1))
            assert torch.equal(values, -rows[:start + 40].transpose(0, 1))
        cache.advance(40)
    cache.truncate(50)
    keys, _ = cache.write(0, rows[:1], rows[:1])
    assert keys.shape == (KV, 51, D) and torch.equal(keys[:, :50], rows[:50].transpose(0, 1)) and torch.equal(keys[:, 50], rows[0])


# Refusals


def broken(name: str, change: Callable[[dict[str, Any], Tensors], None]) -> HeadFiles:
    files, _ = files_of(name)
    config, tensors = dict(files.config), dict(files.tensors)
    change(config, tensors)
    return HeadFiles(files.path, config, tensors)


REFUSED: dict[str, tuple[str, Callable[[dict[str, Any], Tensors], Any], str]] = {
    "index-style": ("official", lambda c, t: t.update(d2t=IDS.clone()), "index table"),
    "index-style, no mask": ("nvidia", lambda c, t: t.update(d2t=IDS.clone()), "index table"),
    "d2t beyond the vocabulary": ("nvidia", lambda c, t: t.update(d2t=OFFSETS["d2t"] + 5), r"expected rising ids in \[0, 40\)"),
    "tables disagree": ("official", lambda c, t: t.update(t2d=BOTH["t2d"].roll(1)), "t2d marks"),
    "no d2t": ("nvidia", lambda c, t: t.pop("d2t"), "d2t is missing"),
    "a mask alone": ("official", lambda c, t: t.pop("d2t"), "d2t is missing"),
    "no fc": ("official", lambda c, t: t.pop("fc.weight"), "fc.weight is missing"),
    "no norm": ("official", lambda c, t: t.pop("norm.weight"), "missing tensors: norm.weight"),
    "no hidden_norm": ("speculators", lambda c, t: t.pop("layers.0.hidden_norm.weight"), "missing tensors: layers.0.hidden_norm.weight"),
    "no lm_head": ("official", lambda c, t: t.pop("lm_head.weight"), "lm_head.weight is missing"),
    "no embedding of its own width": (
        "official-70B-own-embedding", lambda c, t: t.pop("embed_tokens.weight"), "embed_tokens.weight is missing"),
    "an unknown tensor": ("official", lambda c, t: t.update({"midlayer.gate.weight": torch.ones(3)}), "nothing reads: midlayer.gate"),
    "four taps for three": ("specforge", lambda c, t: c.update(nested([1, 5, 9, 11])), r"4 taps.*taps are wrong"),
    "five taps, none named": ("deepspec", lambda c, t: c.pop("target_layer_ids"), "the default"),
    "a tap beyond the target": ("specforge", lambda c, t: c.update(nested([1, 5, 16])), "expected layers from 0 to 15"),
    "the embedding as a tap": ("speculators", lambda c, t: c.update(eagle_aux_hidden_state_layer_ids=[0, 5, 9]), "outputs of layers"),
    "two lists of taps": ("specforge", lambda c, t: c.update(eagle_aux_hidden_state_layer_ids=[1, 5, 9]), "names different taps"),
    "a foreign vocabulary by mask": (
        "official", lambda c, t: t.update(t2d=torch.cat((BOTH["t2d"], BOTH["t2d"]))), "the target has 40 tokens"),
    "a foreign vocabulary by config": ("nvidia", lambda c, t: c.update(vocab_size=50), "the target has 40 tokens"),
    "a foreign vocabulary by embedding": ("speculators", lambda c, t: t.update({"embed_tokens.weight": random(41, H)}), "41 rows"),
    "a foreign width": ("official", lambda c, t: t.update({"fc.weight": random(H, 3 * 32)}), "trained for another target"),
    "a missing norm of 3.1": ("speculators", lambda c, t: c.update(fc_norm=True), "missing tensors: fc_norm.0.weight"),
    "both norms before fc": ("norm-before-fc", lambda c, t: c.update(fc_norm=True), "exclude each other"),
    "another activation": ("official", lambda c, t: c.update(hidden_act="gelu"), "expected silu"),
    "a rope that is not known": ("official", lambda c, t: c.update(rope_scaling={"type": "su", "factor": 4.0}), "rope.*'su'.*expected"),
    "a rope per kind of layer": ("official", lambda c, t: c.update(rope_parameters={
        "full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}), "for every kind of layer"),
    "a rope that lacks its factor": ("official", lambda c, t: c.update(rope_scaling={"rope_type": "linear"}), "rope.*'linear'"),
    "a window of no size": (
        "speculators-sliding", lambda c, t: c["transformer_layer_config"].pop("sliding_window"), "sliding_window is None; expected"),
    "latent attention": ("nvidia", lambda c, t: t.update({"layers.0.self_attn.kv_a_proj_with_mqa.weight": t.pop(
        "layers.0.self_attn.k_proj.weight")}), "latent attention.*kv_a_proj_with_mqa"),
    "heads that do not divide": ("official", lambda c, t: c.update(head_dim=10), "do not divide"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_head_that_does_not_fit_is_refused_with_the_reason(case: str) -> None:
    name, change, message = REFUSED[case]
    with pytest.raises(LoadError, match=message):
        Eagle3Head.read(broken(name, change), parts(), V)


@pytest.mark.parametrize(("settings", "message"), [
    ({"rms_norm_eps": "x"}, "rms_norm_eps='x'; expected a number"),
    ({"eagle_config": "x"}, "eagle_config='x'; expected an object"),
    ({"dflash_config": {"target_layer_ids": 5}}, "target_layer_ids=5; expected a list of numbers"),
    ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": ["x"]}}, r"layer_ids=\['x'\]; expected a list of numbers"),
])
def test_a_field_of_another_kind_is_named(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    config, tensors = eagle1()
    write_files(tmp_path, {**config, **settings}, tensors)
    with pytest.raises(LoadError, match=message):
        read_files(tmp_path)


def test_a_head_is_found_by_its_hub_id_where_it_was_fetched_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, tensors = eagle1()
    write_files(tmp_path, config, tensors)
    monkeypatch.setattr(files_of_heads, "cached_file", lambda name, file, **more: str(tmp_path / file) if name == "org/head" else None)
    assert read_files("org/head").path == tmp_path
    with pytest.raises(LoadError, match="hf download org/other"):
        read_files("org/other")


def test_fields_left_empty_and_numbers_in_words_are_read(tmp_path: Path) -> None:
    config, tensors = eagle1()
    write_files(tmp_path, {**config, "rms_norm_eps": "1e-05", "rope_scaling": None, "eagle_config": {"target_layer_ids": None}}, tensors)
    assert read_files(tmp_path).config["rms_norm_eps"] == "1e-05"


@pytest.mark.parametrize(("change", "message"), [
    (lambda c, t: t.update({"fc.weight": random(H, 3 * H)}), "eagle3"),
    (lambda c, t: t.pop("layers.0.mlp.gate_proj.weight"), "missing tensors: layers.0.mlp.gate_proj.weight"),
    (lambda c, t: t.update({"lm_head.weight": random(V, H)}), "nothing reads: lm_head.weight"),
    (lambda c, t: c.update(vocab_size=41), "the target has 40 tokens"),
])
def test_eagle_1_is_refused_with_the_reason(change: Callable[[dict[str, Any], Tensors], Any], message: str) -> None:
    config, tensors = eagle1()
    change(config, tensors)
    with pytest.raises(LoadError, match=message):
        EagleHead.read(HeadFiles(Path("head"), config, tensors), parts(), V)


def test_an_eagle_1_head_of_another_width_is_refused() -> None:
    config, tensors = eagle1()
    with pytest.raises(LoadError, match="its own is 32"):
        EagleHead.read(HeadFiles(Path("head"), config, tensors), parts(32), V)


# What a folder is


def flat(*names: str) -> Tensors:
    return {name: torch.zeros(2, 4) for name in names}


@pytest.mark.parametrize(("expected", "config", "tensors"), [
    ("medusa", {"medusa_num_heads": 5}, flat("0.0.linear.weight", "0.0.linear.bias", "0.1.weight")),
    ("medusa", {"architectures": ["MedusaModel"]}, flat("blocks.0.layers.0.weight", "lm_heads.0.weight")),
    ("hydra", {"hydra_num_heads": 4}, flat("hydra_mlp.0.0.linear.weight", "hydra_lm_head.0.weight")),
    ("mlp", {"model_type": "mlp_speculator"}, flat("speculator.emb.0.weight", "speculator.proj.0.weight")),
    ("dflash", {"architectures": ["DFlashDraftModel"], "dflash_config": {}},
     flat("fc.weight", "hidden_norm.weight", "layers.0.self_attn.q_proj.weight")),
    ("dflash", {"speculators_model_type": "dflash"}, flat("fc.weight", "hidden_norm.weight", "d2t", "t2d", "lm_head.weight")),
    ("dflash2", {"architectures": ["DFlash2DraftModel"], "dflash_config": {"selector_rank": 8}},
     flat("fc.weight", "hidden_norm.weight", "candidate_selector.predecessor_codebook")),
    ("dflash2", {"speculators_model_type": "dflash2"}, flat("something.weight")),
    ("dspark", {"architectures": ["Qwen3DSparkModel"]}, flat("fc.weight", "hidden_norm.weight", "markov_head.markov_w1.weight")),
    ("domino", {"architectures": ["DFlashDraftModel"], "dflash_config": {"projector_type": "domino"}},
     flat("fc.weight", "hidden_norm.weight", "prefix_gru.weight_ih_l0")),
    ("xpress", {"architectures": ["DFlashQwen3XPressModel"]}, flat("something.weight")),
    ("xpress", {"speculators_model_type": "xpress"}, flat("fc.weight", "hidden_norm.weight", "refiner_head.mix_l")),
    ("mtp", {}, flat("model.layers.61.eh_proj.weight")),
    ("mtp", {}, flat("model.mtp_block.0.mlp.up_proj.weight")),
    ("mtp", {}, flat("mtp.fc.weight", "mtp.norm.weight")),
    ("peagle", {"speculators_model_type": "peagle"}, flat("fc.weight", "layers.0.hidden_norm.weight", "mask_hidden")),
    ("pard", {"architectures": ["LlamaForCausalLM"], "pard_token": 7}, flat("model.embed_tokens.weight")),
    ("model", {"architectures": ["LlamaForCausalLM"]}, flat("model.embed_tokens.weight")),
    ("eagle", {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}, flat("fc.weight", "layers.0.self_attn.q_proj.weight")),
    ("eagle3", {"speculators_model_type": "qwen3"}, flat("fc.weight", "layers.0.hidden_norm.weight", "lm_head.weight")),
])
def test_a_folder_is_known_by_what_it_holds(expected: str, config: dict[str, Any], tensors: Tensors) -> None:
    files = HeadFiles(Path("head"), config, tensors)
    assert detect(files) == expected
    require(files, expected)
    with pytest.raises(LoadError, match=f"head for drafter {expected}"):
        require(files, "none")


def test_a_folder_of_nothing_known_is_refused(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(LoadError, match="no draft head that is known"):
        detect(read_files(tmp_path))
