"""DFlash, DFlash 2, DSpark and XPress heads: every published layout under its own names, one pass by plain arithmetic, and refusals."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import silu

from draftproof.drafters.dflash2 import SelectedBlock
from draftproof.drafters.dspark import TiedBlock
from draftproof.drafters.slots import Slots
from draftproof.drafters.xpress import RefinedBlock
from draftproof.errors import LoadError
from draftproof.models.heads.cache import HeadCache
from draftproof.models.heads.detect import detect
from draftproof.models.heads.dflash import Anchored, Blocks, DFlash, spread
from draftproof.models.heads.dflash2 import DFlash2
from draftproof.models.heads.domino import Domino
from draftproof.models.heads.dspark import DSpark
from draftproof.models.heads.export import export_head
from draftproof.models.heads.files import read_files
from draftproof.models.heads.layout import View
from draftproof.models.heads.xpress import XPress
from draftproof.models.target import TargetParts
from draftproof.train.dflash import DFlash2Task, DFlashTask, DominoTask, DSparkTask, XPressTask

V, H, LAYERS, HEADS, KV, DIM, INNER, BLOCK, RANK, EPS = 40, 24, 6, 4, 2, 8, 32, 5, 6, 1e-6
TAPS = (1, 2, 4)
MASK = 39


def target(hidden: int = H) -> TargetParts:
    torch.manual_seed(0)
    config = SimpleNamespace(hidden_size=hidden, num_hidden_layers=LAYERS, vocab_size=V)
    config.get_text_config = lambda: config
    embed, output = nn.Embedding(V, hidden), nn.Linear(hidden, V, bias=False)
    return TargetParts(embed.requires_grad_(False), output.requires_grad_(False), (), config, nn.Identity())


def body(layers: int = 2, hidden: int = H, seed: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 0.3

    found = {"fc.weight": noise(hidden, len(TAPS) * H), "hidden_norm.weight": 1 + noise(hidden), "norm.weight": 1 + noise(hidden)}
    for i in range(layers):
        at = f"layers.{i}."
        found |= {at + "self_attn.q_proj.weight": noise(HEADS * DIM, hidden), at + "self_attn.k_proj.weight": noise(KV * DIM, hidden),
                  at + "self_attn.v_proj.weight": noise(KV * DIM, hidden), at + "self_attn.o_proj.weight": noise(hidden, HEADS * DIM),
                  at + "self_attn.q_norm.weight": 1 + noise(DIM), at + "self_attn.k_norm.weight": 1 + noise(DIM),
                  at + "input_layernorm.weight": 1 + noise(hidden), at + "post_attention_layernorm.weight": 1 + noise(hidden),
                  at + "mlp.gate_proj.weight": noise(INNER, hidden), at + "mlp.up_proj.weight": noise(INNER, hidden),
                  at + "mlp.down_proj.weight": noise(hidden, INNER)}
    return found


def qwen(layers: int = 2, **more: Any) -> dict[str, Any]:
    return {"hidden_size": H, "intermediate_size": INNER, "num_attention_heads": HEADS, "num_key_value_heads": KV, "head_dim": DIM,
            "num_hidden_layers": layers, "rms_norm_eps": EPS, "rope_theta": 5000.0, "vocab_size": V, "max_position_embeddings": 512, **more}


def z_lab() -> tuple[dict[str, Any], dict[str, Tensor]]:
    config = {"architectures": ["DFlashDraftModel"], "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "model_type": "qwen3",
              "block_size": BLOCK, "num_target_layers": LAYERS, "dflash_config": {"mask_token_id": MASK, "target_layer_ids": list(TAPS)},
              "layer_types": ["full_attention"] * 2, "sliding_window": None, **qwen()}
    return config, body()


def z_lab_inside() -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Newer: the block size inside, rotary fields of transformers 5 with a partial rotation, a mask of its own."""
    config, tensors = z_lab()
    del config["block_size"], config["rope_theta"]
    config["dflash_config"] |= {"block_size": BLOCK}
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5}
    return config, {**tensors, "mask_embedding": torch.randn(H)}


def encoder() -> tuple[dict[str, Any], dict[str, Tensor]]:
    names = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    config, tensors = z_lab()
    return config, {names.get(name, name): tensor for name, tensor in tensors.items()}


def muse() -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Muse Glimmer's assistant: a flat config of a type of its own, whose sliding layers see the whole block."""
    config, tensors = encoder()
    inner = config.pop("dflash_config")
    del config["num_target_layers"], config["auto_map"], config["vocab_size"]
    return {**config, **inner, "architectures": ["MuseGlimmerAssistantModel"], "model_type": "muse_glimmer_assistant",
            "layer_types": ["sliding_attention"] * 2, "sliding_window": 2048}, tensors


def model_opt() -> tuple[dict[str, Any], dict[str, Tensor]]:
    names = {"fc.weight": "context_proj.weight", "hidden_norm.weight": "context_norm.weight", "norm.weight": "final_norm.weight"}
    config, tensors = z_lab()
    return config, {names.get(name, name): tensor for name, tensor in tensors.items()}


KEPT = torch.tensor([0, 1, 2, 5, 6, 9, 10, 11, 12, 20, 21, 30])


def speculators(kind: str = "dflash") -> tuple[dict[str, Any], dict[str, Tensor]]:
    config = {"architectures": [f"{kind}Speculator"], "auto_map": {"": "config.X"}, "speculators_model_type": kind,
              "speculators_version": "0.5.0", "aux_hidden_state_layer_ids": [i + 1 for i in TAPS], "mask_token_id": MASK,
              "block_size": BLOCK, "draft_vocab_size": len(KEPT), "sliding_window_non_causal": False,
              "sample_from_anchor": kind == "dspark", "transformer_layer_config": qwen(model_type="qwen3")}
    t2d = torch.zeros(V, dtype=torch.bool)
    t2d[KEPT] = True
    generator = torch.Generator().manual_seed(7)
    return config, {**body(), "embed_tokens.weight": torch.randn(V, H, generator=generator),
                    "lm_head.weight": torch.randn(len(KEPT), H, generator=generator), "d2t": KEPT - torch.arange(len(KEPT)), "t2d": t2d}


def markov(kind: str = "vanilla", out: int = V, seed: int = 5) -> dict[str, Tensor]:
    shapes: dict[str, tuple[int, ...]] = {
        "markov_head.markov_w1.weight": (V, RANK), "markov_head.markov_w2.weight": (out, RANK),
        "confidence_head.proj.weight": (1, H + RANK), "confidence_head.proj.bias": (1,)}
    if kind == "gated":
        shapes |= {"markov_head.gate_proj.weight": (RANK, H + RANK), "markov_head.gate_proj.bias": (RANK,)}
    if kind == "rnn":
        shapes |= {"markov_head.joint_proj.weight": (3 * RANK, 2 * RANK + H), "markov_head.joint_proj.bias": (3 * RANK,)}
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def deep_spec(kind: str = "vanilla") -> tuple[dict[str, Any], dict[str, Tensor]]:
    config = {"architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "block_size": BLOCK, "target_layer_ids": list(TAPS),
              "mask_token_id": MASK, "num_anchors": 512, "enable_confidence_head": True, "confidence_head_with_markov": True,
              "markov_rank": RANK, "markov_head_type": kind, "num_target_layers": LAYERS, "layer_types": ["full_attention"] * 2, **qwen()}
    generator = torch.Generator().manual_seed(8)
    shipped = {"embed_tokens.weight": torch.randn(V, H, generator=generator), "lm_head.weight": torch.randn(V, H, generator=generator)}
    return config, {**body(), **shipped, **markov(kind)}


def spec_forge(prefix: str = "") -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Heads un-nested, or in an older container; everything in dflash_config; no embedding, no output matrix."""
    config, tensors = z_lab()
    config["dflash_config"] |= {"projector_type": "dspark", "shift_label": True, "use_confidence_head": True, "markov_rank": RANK}
    short = {name: name.replace("markov_head.", "").replace("confidence_head.proj", "confidence_proj") for name in markov()}
    return config, {**tensors, **{prefix + short[name]: tensor for name, tensor in markov().items()}}


Layout = Callable[[], tuple[dict[str, Any], dict[str, Tensor]]]
FLASH: dict[str, Layout] = {"z-lab": z_lab, "z-lab-inside": z_lab_inside, "encoder": encoder, "muse": muse, "model-opt": model_opt,
                            "speculators": speculators}
SPARK: dict[str, Layout] = {
    "deep-spec": deep_spec, "gated": lambda: deep_spec("gated"), "rnn": lambda: deep_spec("rnn"), "spec-forge": spec_forge,
    "logit-head": lambda: spec_forge("logit_head."),
    "speculators": lambda: (lambda c, t: (c, {**t, **markov(out=len(KEPT))}))(*speculators("dspark")),
}


CHOICES, GROUP, CONV = 7, 6, 3          # candidates of a slot, channels of a group, taps of a convolution


def local(seed: int = 6) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 0.4

    found = {"candidate_selector.predecessor_codebook": noise(V, RANK), "candidate_selector.successor_codebook": noise(V, RANK),
             "candidate_selector.hidden_projection.weight": noise(RANK, H)}
    for at in (f"layers.{i}.{kind}_conv." for i in range(2) for kind in ("attention", "mlp")):
        found |= {at + "base_kernel": noise(2, CONV, H), at + "kernel_projection.weight": noise(2 * CONV * H // GROUP, H)}
    return found


CHOOSING = {"conv_kernel_size": CONV, "conv_group_size": GROUP, "selector_rank": RANK, "selector_top_k": CHOICES}


def z_lab_2() -> tuple[dict[str, Any], dict[str, Tensor]]:
    """As its first published head: sliding layers that see the whole block, scaled and capped logits."""
    config, tensors = z_lab_inside()
    config |= {"architectures": ["DFlash2DraftModel"], "is_causal": False, "layer_types": ["sliding_attention"] * 2, "sliding_window": 2048}
    config["dflash_config"] |= {**CHOOSING, "output_multiplier": 0.5, "final_logit_softcapping": 20.0}
    del tensors["mask_embedding"]
    return config, {**tensors, **local()}


def speculators_2() -> tuple[dict[str, Any], dict[str, Tensor]]:
    config, tensors = speculators("dflash2")
    config |= {"architectures": ["DFlash2DraftModel"], "draft_vocab_size": V, "sliding_window_non_causal": True, **CHOOSING}
    del tensors["d2t"], tensors["t2d"]
    return config, {**tensors, "lm_head.weight": torch.randn(V, H, generator=torch.Generator().manual_seed(7)), **local()}


def embeddings_2() -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The codebooks as a module of transformers saves them; NVIDIA's word for the kind."""
    config, tensors = z_lab_2()
    config["dflash_config"] |= {"projector_type": "dflash2"}
    return config, {name + ".weight" * name.endswith("_codebook"): tensor for name, tensor in tensors.items()}


CHOICE: dict[str, Layout] = {"z-lab": z_lab_2, "speculators": speculators_2, "embeddings": embeddings_2}


def refiner(seed: int = 8, out: int = V, inner: int = 14) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"w1.weight": (V, RANK), "down_h.weight": (RANK, H), "down_g.weight": (RANK, H), "in_proj.weight": (RANK, 3 * RANK),
              "mix.L": (RANK, BLOCK, BLOCK), "mlp.gate_proj.weight": (inner, RANK), "mlp.up_proj.weight": (inner, RANK),
              "mlp.down_proj.weight": (RANK, inner), "w2.weight": (out, RANK)}
    return {f"xpress_head.{name}": torch.randn(shape, generator=generator) * 0.5 for name, shape in shapes.items()}


def z_lab_x() -> tuple[dict[str, Any], dict[str, Tensor]]:
    """As vLLM reads them."""
    config, tensors = z_lab()
    config |= {"architectures": ["Qwen3XPressModel"], "xpress_rank": RANK, "xpress_mlp_hidden": 14, "xpress_block_size": BLOCK}
    return config, {**tensors, **refiner()}


OWN = {"w1.": "token_embed.", "w2.": "readout.", "mix.L": "mix_l", "mlp.gate_proj.": "mlp_gate.", "mlp.up_proj.": "mlp_up.",
       "mlp.down_proj.": "mlp_down."}


def speculators_x() -> tuple[dict[str, Any], dict[str, Tensor]]:
    config, tensors = speculators("xpress")
    named = {}
    for name, tensor in refiner(out=len(KEPT)).items():
        own = name.removeprefix("xpress_head.")
        named["refiner_head." + next((new + own.removeprefix(old) for old, new in OWN.items() if own.startswith(old)), own)] = tensor
    return {**config, "architectures": ["XPressSpeculator"], "xpress_rank": RANK, "num_jacobi_passes": 6}, {**tensors, **named}


def anchored_x() -> tuple[dict[str, Any], dict[str, Tensor]]:
    config, tensors = z_lab_x()
    return {**config, "sample_from_anchor": True}, tensors


PRESS: dict[str, Layout] = {"z-lab": z_lab_x, "speculators": speculators_x, "anchored": anchored_x}


def domino(shift: bool = False) -> tuple[dict[str, Any], dict[str, Tensor]]:
    config, tensors = z_lab()
    config["dflash_config"] |= {"projector_type": "domino", "shift_label": shift, "pure_draft_prefix_len": 1, "gru_hidden_dim": 7,
                                "emb_dim": 9}
    generator = torch.Generator().manual_seed(9)
    shapes = {"prefix_gru.weight_ih_l0": (21, H), "prefix_gru.weight_hh_l0": (21, 7), "embed_proj.0.weight": (9, H + 7),
              "embed_proj.2.weight": (V, 9)}
    return config, {**tensors, **{name: torch.randn(shape, generator=generator) * 0.5 for name, shape in shapes.items()}}


GRU: dict[str, Layout] = {"fill-in": domino, "shifted": lambda: domino(True)}


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


# Plain arithmetic, of z-lab's names


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight


def turned(x: Tensor, positions: Tensor, part: float) -> Tensor:
    """Pairs (i, i + r/2) of the first r dimensions by position · 5000^(−2i/r)."""
    out, r = x.clone(), int(DIM * part)
    for i in range(r // 2):
        angle = positions.float()[:, None] * 5000.0 ** (-2 * i / r)
        a, b = x[..., i], x[..., i + r // 2]
        out[..., i], out[..., i + r // 2] = a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()
    return out


def mixed(w: dict[str, Tensor], kind: str, side: int, x: Tensor, given: Tensor) -> Tensor:
    """A local convolution, row by row and channel by channel; x is what is mixed, `given` what gives the kernels."""
    if f"{kind}_conv.base_kernel" not in w:
        return x
    base, out = w[f"{kind}_conv.base_kernel"][side], torch.zeros_like(x)
    own = (given @ w[f"{kind}_conv.kernel_projection.weight"].T).view(BLOCK, 2, CONV, H // GROUP)[:, side]
    for row in range(BLOCK):
        for channel in range(H):
            for tap in range(min(CONV, row + 1)):
                out[row, channel] += (base[tap, channel] + own[row, tap, channel // GROUP]) * x[row - tap, channel]
    return out


def reference(w: dict[str, Tensor], parts: TargetParts, taps: Tensor, anchor: int, sees: Callable[[int, int], bool] = lambda q, k: True,
              part: float = 1.0, first: int = 0, skip: int = 1) -> tuple[Tensor, Tensor]:
    """taps [n, taps · H] of positions first …; the anchor stands right behind them. Hidden states and logits of the guessing slots."""
    n = taps.shape[0]
    table = w.get("embed_tokens.weight", parts.embed.weight if parts.embed is not None else None)
    assert table is not None and parts.output is not None
    mask = w["mask_embedding"] if "mask_embedding" in w else table[MASK]
    x = torch.stack([table[anchor], *[mask] * (BLOCK - 1)])
    context = rms(taps @ w["fc.weight"].T, w["hidden_norm.weight"])
    at = torch.arange(first, first + n + BLOCK)
    for i in range(2):
        p = {name.removeprefix(f"layers.{i}."): tensor for name, tensor in w.items() if name.startswith(f"layers.{i}.")}
        normed = rms(x, p["input_layernorm.weight"])
        y = mixed(p, "attention", 0, normed, normed)
        both = torch.cat((context, y))
        q = turned(rms((y @ p["self_attn.q_proj.weight"].T).view(BLOCK, HEADS, DIM), p["self_attn.q_norm.weight"]), at[n:], part)
        k = turned(rms((both @ p["self_attn.k_proj.weight"].T).view(-1, KV, DIM), p["self_attn.k_norm.weight"]), at, part)
        v = (both @ p["self_attn.v_proj.weight"].T).view(-1, KV, DIM)
        out = torch.zeros(BLOCK, HEADS, DIM)
        for row in range(BLOCK):
            for head in range(HEADS):
                seen = [j for j in range(n + BLOCK) if sees(n + row, j)]
                weights = torch.softmax(k[seen, head // 2] @ q[row, head] / DIM**0.5, 0)
                out[row, head] = weights @ v[seen, head // 2]
        x = x + mixed(p, "attention", 1, out.reshape(BLOCK, -1) @ p["self_attn.o_proj.weight"].T, normed)
        normed = rms(x, p["post_attention_layernorm.weight"])
        z = mixed(p, "mlp", 0, normed, normed)
        z = (silu(z @ p["mlp.gate_proj.weight"].T) * (z @ p["mlp.up_proj.weight"].T)) @ p["mlp.down_proj.weight"].T
        x = x + mixed(p, "mlp", 1, z, normed)
    hidden = rms(x, w["norm.weight"])[skip:]
    return hidden, hidden @ (w["lm_head.weight"] if "lm_head.weight" in w else parts.output.weight).T


def blocks_behind(head: DFlash, taps: Tensor, first: int = 0) -> Blocks:
    """Context rows, pushed in two portions as a text does."""
    shape, n = head.shape, taps.shape[0]
    cache = HeadCache(head.depth, shape.kv_heads, shape.head_dim, torch.float32, "cpu")
    for start, stop in ((0, n // 2), (n // 2, n)):
        for layer, (k, v) in enumerate(head.keys(head.fuse(taps[start:stop]), torch.arange(first + start, first + stop))):
            cache.write(layer, k, v)
        cache.advance(stop - start)
    return Blocks(head, [cache])


def served(head: DFlash, taps: Tensor, anchor: int, first: int = 0) -> Tensor:
    """Hidden states of the block behind context rows."""
    return head.hidden(torch.tensor([anchor]), torch.tensor([first + taps.shape[0]]), blocks_behind(head, taps, first))[0]


# Layouts


@torch.no_grad()
@pytest.mark.parametrize("name", FLASH)
def test_a_published_dflash_head_computes_what_it_should(name: str, tmp_path: Path) -> None:
    config, tensors = FLASH[name]()
    files, parts = read_files(write(tmp_path, config, tensors)), target()
    assert detect(files) == "dflash"
    head = DFlash.read(files, parts, V)
    assert all(not view.causal for view in head.layout.views)
    assert (head.taps, head.block, head.reach, head.context, head.depth) == (TAPS, BLOCK, BLOCK - 1, 512, 2)
    own = {**tensors, **z_lab()[1], **{k: v for k, v in tensors.items() if "mask" in k}}
    taps = torch.randn(9, len(TAPS) * H, generator=torch.Generator().manual_seed(3))
    hidden, logits = reference(own, parts, taps, 7, part=0.5 if name == "z-lab-inside" else 1.0, first=4)
    found = served(head, taps, 7, first=4)
    assert torch.allclose(found, hidden, atol=1e-5) and torch.allclose(head.logits(found), logits, atol=1e-4)
    assert (head.ids is None) == (name != "speculators") and (head.ids is None or torch.equal(head.ids, KEPT))


@torch.no_grad()
@pytest.mark.parametrize("name", SPARK)
def test_a_published_dspark_head_computes_what_it_should(name: str, tmp_path: Path) -> None:
    config, tensors = SPARK[name]()
    files, parts = read_files(write(tmp_path, config, tensors)), target()
    assert detect(files) == "dspark"
    head = DSpark.read(files, parts, V)
    assert head.reach == BLOCK and head.taps == TAPS, "slot 0 guesses the token behind the anchor"
    taps = torch.randn(9, len(TAPS) * H, generator=torch.Generator().manual_seed(3))
    hidden, logits = reference({**body(), **tensors}, parts, taps, 7, skip=0)
    found = served(head, taps, 7)
    assert torch.allclose(found, hidden, atol=1e-5)
    kind = name if name in ("gated", "rnn") else "vanilla"
    w = markov(kind, len(KEPT) if name == "speculators" else V)
    state, told = torch.zeros(RANK), None
    for slot, previous in enumerate((7, 3, 11)):
        before = w["markov_head.markov_w1.weight"][previous]
        sure = torch.cat((hidden[slot], before)) @ w["confidence_head.proj.weight"][0] + w["confidence_head.proj.bias"][0]
        assert torch.allclose(head.confidence(found[slot:slot + 1], torch.tensor([previous])), sure, atol=1e-4)  # type: ignore[arg-type]
        if kind == "gated":
            x = torch.cat((hidden[slot], before))
            before = torch.sigmoid(x @ w["markov_head.gate_proj.weight"].T + w["markov_head.gate_proj.bias"]) * before
        if kind == "rnn":
            x = torch.cat((state, before, hidden[slot]))
            gate, candidate, out = (x @ w["markov_head.joint_proj.weight"].T + w["markov_head.joint_proj.bias"]).chunk(3)
            state = torch.sigmoid(gate) * state + (1 - torch.sigmoid(gate)) * torch.tanh(candidate)
            before = torch.tanh(out)
        expected = logits[slot] + w["markov_head.markov_w2.weight"] @ before
        tied, told = head.tie(head.logits(found[slot:slot + 1]), torch.tensor([previous]), found[slot:slot + 1], told)
        assert torch.allclose(tied[0], expected, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("name", CHOICE)
def test_a_published_dflash2_head_computes_what_it_should(name: str, tmp_path: Path) -> None:
    config, tensors = CHOICE[name]()
    files, parts = read_files(write(tmp_path, config, tensors)), target()
    assert detect(files) == "dflash2"
    head = DFlash2.read(files, parts, V)
    assert (head.taps, head.block, head.reach) == (TAPS, BLOCK, BLOCK - 1)
    scaled = name != "speculators"
    assert head.layout.views == ((View(2048, False),) * 2 if scaled else (View(),) * 2)
    taps = torch.randn(9, len(TAPS) * H, generator=torch.Generator().manual_seed(3))
    hidden, logits = reference({**body(), **local(), **tensors}, parts, taps, 7, part=0.5 if scaled else 1.0)
    logits = torch.tanh(0.5 * logits / 20) * 20 if scaled else logits
    found = served(head, taps, 7)
    assert torch.allclose(found, hidden, atol=1e-4) and torch.allclose(head.logits(found), logits, atol=1e-3)
    slots, w = SelectedBlock(head, found[None], torch.tensor([7])), local()
    gate, here, chosen = hidden @ w["candidate_selector.hidden_projection.weight"].T, torch.tensor([0]), [7, 3, 11]
    for slot, before in enumerate(chosen):
        expected = torch.full((V,), -torch.inf)
        for token in logits[slot].topk(CHOICES).indices.tolist():
            step = w["candidate_selector.predecessor_codebook"][before] * gate[slot] * w["candidate_selector.successor_codebook"][token]
            expected[token] = logits[slot, token] + step.sum()
        tied = slots.logits(slot, here, here, None if slot == 0 else torch.tensor([before]))
        assert torch.allclose(tied[0], expected, atol=1e-3)


def refined(w: dict[str, Tensor], hidden: Tensor, base: Tensor, previous: list[int]) -> Tensor:
    """Logits of a block's rows, of all hidden states and of the tokens before the rows (speculators' `block_bias`)."""
    w = {name.removeprefix("xpress_head."): tensor for name, tensor in w.items()}
    mean = (hidden @ w["down_g.weight"].T).mean(0).expand(BLOCK, -1)
    x = torch.cat((hidden @ w["down_h.weight"].T, mean, w["w1.weight"][previous]), -1) @ w["in_proj.weight"].T
    m = torch.stack([torch.stack([x[k, c] + sum(w["mix.L"][c, k, j] * x[j, c] for j in range(k + 1)) for c in range(RANK)])
                     for k in range(BLOCK)])
    m = m + (silu(m @ w["mlp.gate_proj.weight"].T) * (m @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T
    return base + m @ w["w2.weight"].T


@torch.no_grad()
@pytest.mark.parametrize("name", PRESS)
def test_a_published_xpress_head_drafts_what_its_engines_settle_on(name: str, tmp_path: Path) -> None:
    """They refine the whole block again and again, each time behind the tokens of the time before."""
    config, tensors = PRESS[name]()
    files, parts = read_files(write(tmp_path, config, tensors)), target()
    assert detect(files) == "xpress"
    head, first, anchor, before = XPress.read(files, parts, V), int(name != "anchored"), 7, 12
    assert (head.taps, head.block, head.reach) == (TAPS, BLOCK, BLOCK - first)
    taps = torch.randn(9, len(TAPS) * H, generator=torch.Generator().manual_seed(3))
    w, ids = refiner(out=len(KEPT) if name == "speculators" else V), KEPT if name == "speculators" else torch.arange(V)
    hidden, base = reference({**body(), **tensors}, parts, taps, anchor, skip=0)
    tokens = ids[base.argmax(-1)].tolist()
    for _ in range(BLOCK):
        previous = [before, anchor, *tokens[1:-1]] if first else [anchor, *tokens[:-1]]
        logits = refined(w, hidden, base, previous)
        tokens = ids[logits.argmax(-1)].tolist()
    rows = head.rows(torch.tensor([anchor]), torch.tensor([9]), blocks_behind(head, taps))
    assert torch.allclose(rows[0], hidden, atol=1e-5)
    for depth in (head.reach, 2):
        slots, here = RefinedBlock(head, rows, depth, torch.tensor([anchor]), torch.tensor([before])), torch.tensor([0])
        for level in range(depth):
            found = slots.logits(level, here, here, None if level == 0 else torch.tensor([tokens[first + level - 1]]))
            assert torch.allclose(found[0], logits[first + level], atol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("name", GRU)
def test_a_published_domino_head_computes_what_it_should(name: str, tmp_path: Path) -> None:
    """By torch's own GRU over all tokens before a slot (SGLang's `domino_greedy_rollout`)."""
    config, tensors = GRU[name]()
    files, parts = read_files(write(tmp_path, config, tensors)), target()
    assert detect(files) == "domino"
    head, first = Domino.read(files, parts, V), int(name == "fill-in")
    assert (head.taps, head.block, head.reach) == (TAPS, BLOCK, BLOCK - first)
    taps = torch.randn(9, len(TAPS) * H, generator=torch.Generator().manual_seed(3))
    hidden, base = reference({**body(), **tensors}, parts, taps, 7, skip=first)
    found = served(head, taps, 7)
    assert torch.allclose(found, hidden, atol=1e-5)
    gru = nn.GRU(H, 7, bias=False, batch_first=True)
    gru.load_state_dict({key.removeprefix("prefix_gru."): tensor for key, tensor in tensors.items() if key.startswith("prefix_gru.")})
    slots, here, chosen = TiedBlock(head, found[None], torch.tensor([7])), torch.tensor([0]), [7, 3, 11, 2]
    assert parts.embed is not None
    for slot in range(4):
        state = gru(parts.embed.weight[chosen[:slot + 1]][None])[1][0, 0]  # type: ignore[index]
        x = silu(torch.cat((hidden[slot], state)) @ tensors["embed_proj.0.weight"].T) @ tensors["embed_proj.2.weight"].T
        tied = slots.logits(slot, here, here, None if slot == 0 else torch.tensor(chosen[slot:slot + 1]))
        assert torch.allclose(tied[0], base[slot] + (x if slot else 0), atol=1e-4)


@torch.no_grad()
def test_a_fresh_dflash2_head_begins_as_a_plain_dflash() -> None:
    parts, sizes = target(), {"layers": 1, "block": 6, "mask_token": MASK, "heads": HEADS, "kv_heads": KV, "head_dim": DIM, "inner": INNER}
    torch.manual_seed(4)
    head = DFlash2.fresh(parts, **sizes)
    plain = DFlash.fresh(parts, **sizes)
    plain.load_state_dict({name: tensor for name, tensor in head.state_dict().items() if name in plain.state_dict()})
    taps = torch.randn(9, len(TAPS) * H)
    found = served(head, taps, 7)
    assert torch.equal(found, served(plain, taps, 7))
    rows = SelectedBlock(head, found[None], torch.tensor([7])).logits(0, torch.tensor([0]), torch.tensor([0]), None)[0]
    assert rows.argmax() == head.logits(found)[0].argmax() and int(rows.isfinite().sum()) == 16


WINDOWS: dict[str, tuple[dict[str, Any], tuple[View, View]]] = {
    "sliding-is-causal": ({"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}, (View(4, True), View())),
    "told-otherwise": ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 4, "is_causal": False}, (View(4), View(4))),
    "use-swa": ({"layer_types": None, "swa": {"use_swa": True, "swa_window_size": 6}}, (View(6), View(6))),
    "all-causal": ({"swa": {"causal": True}}, (View(None, True), View(None, True))),
}


@torch.no_grad()
@pytest.mark.parametrize("name", WINDOWS)
def test_windows_and_causal_layers_are_honoured(name: str, tmp_path: Path) -> None:
    (more, views), (config, tensors) = WINDOWS[name], z_lab()
    config["dflash_config"] |= more.get("swa", {})
    config |= {key: value for key, value in more.items() if key != "swa"}
    parts = target()
    head = DFlash.read(read_files(write(tmp_path / "a", config, tensors)), parts, V)
    assert head.layout.views == views
    taps = torch.randn(9, len(TAPS) * H, generator=torch.Generator().manual_seed(3))
    if views[0] == views[1]:
        window, causal = views[0].window or 999, views[0].causal
        hidden, _ = reference(tensors, parts, taps, 7, lambda q, k: abs(q - k) < window and (k <= q or not causal))
        assert torch.allclose(served(head, taps, 7), hidden, atol=1e-5)
    head.save(tmp_path / "b")
    assert DFlash.read(read_files(tmp_path / "b"), parts, V).layout == head.layout


@torch.no_grad()
@pytest.mark.parametrize("kind", [DFlash, DFlash2])
def test_a_block_in_training_sees_what_it_sees_when_served(kind: type[DFlash], tmp_path: Path) -> None:
    """And nothing of the blocks beside it."""
    config, tensors = z_lab() if kind is DFlash else z_lab_2()
    config |= {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
    head, taps = kind.read(read_files(write(tmp_path, config, tensors)), target(), V), torch.randn(12, len(TAPS) * H)
    anchors = torch.tensor([1, 5, 11])
    context = head.keys(head.fuse(taps), torch.arange(12))
    together = head.hidden(torch.tensor([7, 8, 9]), anchors, Anchored(head, context, anchors))
    for i, (anchor, token) in enumerate(zip(anchors.tolist(), (7, 8, 9), strict=True)):
        assert torch.allclose(together[i], served(head, taps[:anchor], token), atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("kind,name", [("spark", "rnn"), ("choice", "z-lab"), ("gru", "fill-in"), ("gru", "shifted"), ("press", "z-lab"),
                                       ("press", "anchored")])
def test_slots_are_tied_in_training_as_when_served(kind: str, name: str, tmp_path: Path) -> None:
    """Behind the same tokens."""
    made: dict[str, tuple[Any, type[DFlash], type[DFlashTask]]] = {
        "spark": (SPARK, DSpark, DSparkTask), "choice": (CHOICE, DFlash2, DFlash2Task), "gru": (GRU, Domino, DominoTask),
        "press": (PRESS, XPress, XPressTask)}
    forms, family, teaches = made[kind]
    head = family.read(read_files(write(tmp_path, *forms[name]())), target(), V)
    previous, first, taps = torch.tensor([[12, 7, 3, 11, 2, 5, 9, 4][:head.block]]), head.block - head.reach, torch.randn(9, len(TAPS) * H)
    rows = head.rows(previous[:, first], torch.tensor([9]), blocks_behind(head, taps))
    taught, _ = teaches(head)._losses(head.logits(rows[:, first:]), torch.randn(1, head.reach, V), rows, previous)
    here, anchor = torch.tensor([0]), previous[:, first]
    slots: Slots = (RefinedBlock(head, rows, head.reach, anchor, previous[:, 0]) if isinstance(head, XPress) else
                    (SelectedBlock if isinstance(head, DFlash2) else TiedBlock)(head, rows[:, first:], anchor))  # type: ignore[arg-type]
    for slot in range(head.reach):
        served = slots.logits(slot, here, here, None if slot == 0 else previous[:, first + slot])
        assert torch.allclose(served[0].float(), taught[0, slot].float(), atol=1e-4)


@pytest.mark.parametrize("name", [*FLASH, *(f"spark-{name}" for name in SPARK), *(f"choice-{name}" for name in CHOICE),
                                  *(f"press-{name}" for name in PRESS), *(f"gru-{name}" for name in GRU),
                                  "fresh", "fresh-spark", "fresh-choice", "fresh-press", "fresh-gru"])
def test_what_is_saved_is_read_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    parts = target()
    kinds: dict[str, type[DFlash]] = {"spark": DSpark, "choice": DFlash2, "press": XPress, "gru": Domino}
    kind = next((kind for word, kind in kinds.items() if word in name), DFlash)
    if name.startswith("fresh"):
        sizes = {"heads": HEADS, "kv_heads": KV, "head_dim": DIM, "inner": INNER}
        head = kind.fresh(parts, layers=1, block=6, mask_token=None if kind is DFlash else MASK, **sizes)
    else:
        layouts: dict[str, Layout] = {DSpark: SPARK, DFlash2: CHOICE, XPress: PRESS, Domino: GRU, DFlash: FLASH}[kind]
        head = kind.read(read_files(write(tmp_path / "a", *layouts[re.sub("^(spark|choice|press|gru)-", "", name)]())), parts, V)
    head.save(tmp_path / "b")
    again = kind.read(read_files(tmp_path / "b"), parts, V)
    assert again.layout == head.layout and again.shape == head.shape
    state, other = head.state_dict(), again.state_dict()
    assert state.keys() == other.keys() and all(torch.equal(state[key], other[key]) for key in state)
    assert (head.ids is None) == (again.ids is None) and (head.ids is None or again.ids is None or torch.equal(head.ids, again.ids))


# Refusals


def changed(**more: Any) -> Callable[[dict[str, Any], dict[str, Tensor]], None]:
    return lambda config, tensors: config.update(more)


def inside(**more: Any) -> Callable[[dict[str, Any], dict[str, Tensor]], None]:
    return lambda config, tensors: config["dflash_config"].update(more)


def without(name: str) -> Callable[[dict[str, Any], dict[str, Tensor]], None]:
    return lambda config, tensors: tensors.__delitem__(name)


def with_tensor(name: str, *shape: int) -> Callable[[dict[str, Any], dict[str, Tensor]], None]:
    return lambda config, tensors: tensors.__setitem__(name, torch.zeros(*shape))


REFUSED: dict[str, tuple[Callable[[dict[str, Any], dict[str, Tensor]], None], str]] = {
    "one-tap-less": (inside(target_layer_ids=[1, 2]), r"expected 2 × 24 columns"),
    "taps-behind-the-target": (inside(target_layer_ids=[1, 2, 6]), r"layers \[1, 2, 6\]; expected layers 0 to 5"),
    "no-taps": (inside(target_layer_ids=None), "names no layers"),
    "two-numberings-that-differ": (changed(aux_hidden_state_layer_ids=list(TAPS)), "the second to be the first plus one"),
    "another-target": (changed(num_target_layers=28), "a target of 28 layers; this one has 6"),
    "another-vocabulary": (changed(vocab_size=50), "the target has 40 tokens"),
    "no-mask": (inside(mask_token_id=None), "mask_token_id is None"),
    "mask-outside": (inside(mask_token_id=40), "mask_token_id is 40"),
    "no-block": (changed(block_size=None), "block_size is None"),
    "missing-tensor": (without("layers.1.self_attn.v_proj.weight"), r"missing tensors: layers\.1\.self_attn\.v_proj\.weight"),
    "missing-norms": (without("layers.0.self_attn.q_norm.weight"), r"q_norm\.weight is missing"),
    "unread-tensor": (with_tensor("layers.0.extra.weight", 3), r"nothing reads: layers\.0\.extra\.weight"),
    "sinks": (inside(attention_sink_bias=True), "attention sinks"),
    "sink-tensor": (with_tensor("layers.0.self_attn.attention_sink_bias", 4), "attention sinks"),
    "laguna": (with_tensor("layers.0.self_attn.g_proj.weight", 4, 4), "Laguna"),
    "domino": (with_tensor("prefix_gru.weight_ih_l0", 4, 4), "Domino head; expected drafter domino"),
    "domino-by-config": (inside(projector_type="domino"), "projector_type is 'domino'"),
    "dflash2": (with_tensor("layers.0.attention_conv.base_kernel", 2, 3, 4), "DFlash2 head; expected drafter dflash2"),
    "lilicorr": (with_tensor("lilicorr.slot_embedding", 4, 4), "LiLiCorr"),
    "xpress": (with_tensor("xpress_head.w1.weight", 4, 4), "XPress head; expected drafter xpress"),
    "latent-attention": (inside(attention_mode="mla"), "attention mode mla"),
    "interleaved": (changed(is_neox_style=False), "interleaved"),
    "quantised": (changed(quantization_config={"bits": 4}), "quantised"),
    "unknown-field": (inside(novel_trick=3), "novel_trick"),
    "sliding-without-a-window": (changed(layer_types=["sliding_attention"] * 2), "how far"),
    "linear-layers": (changed(layer_types=["linear_attention"] * 2), "layer_types"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_says_why(name: str, tmp_path: Path) -> None:
    change, why = REFUSED[name]
    config, tensors = z_lab()
    change(config, tensors)
    with pytest.raises(LoadError, match=why):
        DFlash.read(read_files(write(tmp_path, config, tensors)), target(), V)


def test_an_index_table_a_foreign_embedding_and_the_other_drafter_are_refused(tmp_path: Path) -> None:
    config, tensors = speculators()
    with pytest.raises(LoadError, match="index table"):
        DFlash.read(read_files(write(tmp_path / "a", config, {**tensors, "d2t": KEPT})), target(), V)
    with pytest.raises(LoadError, match="50 rows"):
        DFlash.read(read_files(write(tmp_path / "b", config, {**tensors, "embed_tokens.weight": torch.zeros(50, H)})), target(), V)
    with pytest.raises(LoadError, match="drafter dspark"):
        DFlash.read(read_files(write(tmp_path / "c", *deep_spec())), target(), V)
    with pytest.raises(LoadError, match="drafter dflash"):
        DSpark.read(read_files(write(tmp_path / "d", *z_lab())), target(), V)
    with pytest.raises(LoadError, match="drafter dflash2"):
        DFlash.read(read_files(write(tmp_path / "g", *z_lab_2())), target(), V)
    with pytest.raises(LoadError, match="no candidate selector.*drafter dflash"):
        DFlash2.read(read_files(write(tmp_path / "h", *z_lab())), target(), V)
    with pytest.raises(LoadError, match="DSpark head; expected drafter dspark"):
        DFlash2.read(read_files(write(tmp_path / "i", *deep_spec())), target(), V)
    config, tensors = deep_spec("gated")
    with pytest.raises(LoadError, match="markov_head_type is 'rnn'"):
        DSpark.read(read_files(write(tmp_path / "e", {**config, "markov_head_type": "rnn"}, tensors)), target(), V)
    with pytest.raises(LoadError, match="confidence head reads 5"):
        DSpark.read(read_files(write(tmp_path / "f", config, {**tensors, "confidence_head.proj.weight": torch.zeros(1, 5)})), target(), V)


SELECTORLESS: dict[str, tuple[Callable[[dict[str, Any], dict[str, Tensor]], None], str]] = {
    "no-taps": (inside(conv_kernel_size=None), "conv_kernel_size, .*, selector_top_k are None, 6, 7; expected three positive"),
    "too-many": (inside(selector_top_k=41), "at most the target's 40 tokens"),
    "groups-that-do-not-divide": (inside(conv_group_size=7), "conv_group_size is 7, and the head 24 wide"),
    "other-taps": (inside(conv_kernel_size=2), r"base_kernel is \[2, 3, 24\], expected \[2, 2, 24\]"),
    "no-projection": (without("candidate_selector.hidden_projection.weight"), r"missing tensors: candidate_selector\.hidden_projection"),
    "reduced": (lambda config, tensors: tensors.update({"d2t": KEPT - torch.arange(len(KEPT)),
                                                        "lm_head.weight": torch.zeros(len(KEPT), H)}), "reduced vocabulary"),
}


@pytest.mark.parametrize("name", SELECTORLESS)
def test_a_dflash2_head_that_is_refused_says_why(name: str, tmp_path: Path) -> None:
    change, why = SELECTORLESS[name]
    config, tensors = z_lab_2()
    change(config, tensors)
    with pytest.raises(LoadError, match=why):
        DFlash2.read(read_files(write(tmp_path, config, tensors)), target(), V)


@pytest.mark.parametrize(("change", "why"), [
    (with_tensor("xpress_head.mix.L", RANK, 4, 4), "mixes 4 rows, and block_size is 5"),
    (with_tensor("xpress_head.w1.weight", 50, RANK), "w1 has 50 rows, the target 40 tokens"),
    (without("xpress_head.mix.L"), r"tensor xpress_head\.mix\.L is missing"),
    (without("xpress_head.down_g.weight"), r"missing tensors: xpress_head\.down_g\.weight"),
])
def test_an_xpress_head_that_is_refused_says_why(change: Any, why: str, tmp_path: Path) -> None:
    config, tensors = z_lab_x()
    change(config, tensors)
    with pytest.raises(LoadError, match=why):
        XPress.read(read_files(write(tmp_path, config, tensors)), target(), V)


@pytest.mark.parametrize(("more", "why"), [
    ({"pure_draft_prefix_len": 2}, "pure_draft_prefix_len is 2"),
    ({"shift_label": None}, "shift_label None; expected 1, and true or false"),
])
def test_a_domino_head_that_is_refused_says_why(more: dict[str, Any], why: str, tmp_path: Path) -> None:
    config, tensors = domino()
    config["dflash_config"] |= more
    with pytest.raises(LoadError, match=why):
        Domino.read(read_files(write(tmp_path, config, tensors)), target(), V)


def test_vllm_gets_the_xpress_heads_that_it_reads(tmp_path: Path) -> None:
    for name in PRESS:
        folder = write(tmp_path / name, *PRESS[name]())
        if name == "z-lab":
            assert any("block_size - 1" in line for line in export_head(folder, "vllm", tmp_path / "out"))
            assert XPress.read(read_files(tmp_path / "out"), target(), V).block == BLOCK
        else:
            with pytest.raises(LoadError, match="vLLM 0.33 reads XPress heads with"):
                export_head(folder, "vllm", tmp_path / "no")
        with pytest.raises(LoadError, match="sglang runs no xpress head; xpress can be exported to hf, vllm"):
            export_head(folder, "sglang", tmp_path / "no")


def test_a_narrower_head_needs_matrices_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="of width 16"):
        DFlash.read(read_files(write(tmp_path, z_lab()[0], body(hidden=16))), target(), V)


def test_layers_are_spread_as_the_family_spreads_them() -> None:
    assert spread(36, 5) == (1, 9, 17, 25, 33) and spread(6, 3) == (1, 2, 3) and spread(2, 3) == (1,)
