"""P-EAGLE: one pass over the text's last entries and masks, as its head was published, against a reference of plain functions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from contract.eagle_heads import peagle
from contract.table_rounds import SharedNoise, Text, opened
from models import test_eagle as published

from draftproof import Engine, Sampling
from draftproof.drafters.peagle import PEagleDrafter
from draftproof.errors import LoadError
from draftproof.models.fake import TableTarget
from draftproof.models.heads.cache import HeadCache, HeadPass
from draftproof.models.heads.detect import detect, require
from draftproof.models.heads.files import HeadFiles, read_files
from draftproof.models.heads.peagle import PEagleHead
from draftproof.models.load import builtin, load_target
from draftproof.types import Budget

MASK = 17
SECOND = ("input_layernorm", "post_attention_layernorm")


def of_speculators() -> tuple[dict[str, Any], dict[str, torch.Tensor], dict[str, Any]]:
    config = published.speculators(architectures=["PEagleSpeculator"], speculators_model_type="peagle", mask_token_id=MASK)
    own = {"embed_tokens.weight": published.random(published.V, published.H), "mask_hidden": torch.randn(1, 1, 3 * published.HT)}
    return config, published.body("layers.0") | published.BOTH | published.layer("layers.1", published.H, SECOND) | own, {"nbr": True}


def of_vllm() -> tuple[dict[str, Any], dict[str, torch.Tensor], dict[str, Any]]:
    """A flat config, in which the mask's token may be a word."""
    config = {"architectures": ["LlamaForCausalLMEagle3"], "ptd_token_id": str(MASK), "draft_vocab_size": published.VD, **published.COMMON}
    return config, published.body("midlayer") | published.OFFSETS | {"mask_hidden": torch.randn(1, 3 * published.HT)}, {}


def of_automodel() -> tuple[dict[str, Any], dict[str, torch.Tensor], dict[str, Any]]:
    config = {"architectures": ["LlamaEagle3DraftModel"], "parallel_drafting": True, "mask_token_id": MASK, **published.COMMON}
    tensors = published.body("layers.0") | published.BOTH | {"embed_tokens.weight": published.random(published.V, published.H)}
    wrapped = {name if name in published.UNWRAPPED else f"model.{name}": tensor for name, tensor in tensors.items()}
    return config, wrapped | {"mask_hidden": torch.randn(1, 1, 3 * published.HT)}, {}


LAYOUTS = {made.__name__: made for made in (of_speculators, of_vllm, of_automodel)}


@pytest.mark.parametrize("name", LAYOUTS)
def test_masks_guess_what_the_published_network_says(name: str, tmp_path: Path) -> None:
    torch.manual_seed(len(name))
    config, tensors, facts = LAYOUTS[name]()
    files, target = HeadFiles(Path("head"), config, tensors), published.parts()
    assert detect(files) == "peagle"
    require(files, "peagle")
    head = PEagleHead.read(files, target, published.V)
    features, tokens = torch.randn(5, 3 * published.HT), [3, 17, 0, 39, 8]
    blank = tensors["mask_hidden"].reshape(-1)
    expected = published.eagle3_reference(tensors, target, [*features, blank, blank], [*tokens, MASK, MASK], facts)

    def says(head: PEagleHead) -> torch.Tensor:
        cache = HeadCache(head.depth, head.kv_heads, head.head_dim, torch.float32, "cpu")
        rows = torch.cat((head.fuse(features), head.blank().expand(2, -1)))
        out = head.step(torch.tensor([*tokens, head.mask_token, head.mask_token]), rows, torch.arange(7), HeadPass([cache], [7]))
        found: torch.Tensor = head.logits(out).detach()
        return found

    assert torch.allclose(says(head), torch.stack(expected), atol=1e-5)
    head.save(tmp_path)
    assert torch.equal(says(PEagleHead.read(read_files(tmp_path), target, published.V)), says(head))


@pytest.mark.parametrize(("token", "message"), [(None, "mask_token_id"), (40, r"in \[0, 40\)"), ("x", "mask_token_id")])
def test_a_mask_that_is_no_token_is_refused(token: Any, message: str) -> None:
    config, tensors, _ = of_speculators()
    with pytest.raises(LoadError, match=message):
        PEagleHead.read(HeadFiles(Path("head"), {**config, "mask_token_id": token}, tensors), published.parts(), published.V)


def test_it_serves_from_its_folder(tmp_path: Path) -> None:
    target = load_target(builtin("target"))
    torch.manual_seed(0)
    PEagleHead.fresh(target.parts, layers=2).save(tmp_path)
    texts = [Engine(target=str(builtin("target")), drafter=drafter, depth=depth).generate(
        "def f(", Sampling(max_tokens=24, temperature=0.0)) for drafter, depth in ((f"peagle:{tmp_path}", 4), ("none", 0))]
    assert texts[0].token_ids == texts[1].token_ids and texts[0].metrics["drafted"] > 0


def text(length: int, **more: Any) -> Text:
    return Text.of([(7 * i + i * i) % 13 for i in range(length)], Sampling(temperature=0.0, top_p=1.0, max_tokens=40, **more), seed=5)


def by_hand(drafter: PEagleDrafter, target: TableTarget, one: Text, depth: int) -> list[int]:
    """The likeliest token of the last entry and of each mask, in one pass over the whole text."""
    head, spy, left = drafter.head, peagle(target), []
    spy._keep = lambda state, rows, start: left.append(rows)  # type: ignore[method-assign, misc]
    opened(target, spy, [one])
    rows = torch.cat(left)
    cache, count = HeadCache(head.depth, head.kv_heads, head.head_dim, drafter.dtype, "cpu"), rows.shape[0]
    fed = torch.tensor([*one.tokens[1:], *[head.mask_token] * (depth - 1)])
    hidden = torch.cat((head.fuse(rows), head.blank().expand(depth - 1, -1)))
    with torch.inference_mode():
        out = head.step(fed, hidden, torch.arange(count + depth - 1), HeadPass([cache], [count + depth - 1]))
        best = head.logits(out[count - 1:]).argmax(-1)
    return best.tolist() if head.ids is None else head.ids[best].tolist()


@pytest.mark.parametrize("length", [2, 9, 1500])
def test_one_pass_drafts_all_levels(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    target = TableTarget(13, order=1, seed=1)
    drafter, one = peagle(target), text(length)
    expected = by_hand(drafter, target, one, 5)
    states, _ = opened(target, drafter, [one, text(6)])
    calls, step = [], drafter.head.step
    monkeypatch.setattr(drafter.head, "step", lambda *given: calls.append(1) or step(*given))
    draft, other = drafter.propose(states, [Budget(5, 5, "", ""), Budget(1, 1, "", "")], SharedNoise())
    assert draft.tokens.tolist() == expected and len(other) == 1
    assert len(calls) == 1, "what is more than a chunk was read before"
    again, _ = drafter.propose(states, [Budget(5, 5, "", ""), Budget(0, 0, "", "")], SharedNoise())     # with nothing new to read
    assert again.tokens.tolist() == expected
