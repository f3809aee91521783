"""P-EAGLE is taught the very rows that it is served with, and learns to fill its masks."""

from __future__ import annotations

import pytest
import torch
from models import test_eagle as published

from draftproof.models.heads.cache import HeadCache, HeadPass
from draftproof.models.heads.peagle import PEagleHead
from draftproof.train.base import Features
from draftproof.train.pard import rows_of
from draftproof.train.peagle import PEagleTask

SIZE, DEPTH = 11, 4


def task(ids: torch.Tensor | None = None, **more: float) -> PEagleTask:
    torch.manual_seed(0)
    parts = published.parts()
    head = PEagleHead.fresh(parts, ids, layers=2)
    head.mask_token = published.V - 1
    return PEagleTask(head, parts, DEPTH, **more)  # type: ignore[arg-type]


def text(found: PEagleTask, answer_from: int = 3) -> Features:
    random = torch.Generator().manual_seed(1)
    taps = {tap: torch.randn(SIZE, published.HT, generator=random) for tap in found.taps}
    return Features(torch.randint(published.V - 1, (SIZE,), generator=random), torch.arange(SIZE) >= answer_from, taps)


@pytest.mark.parametrize("windows", [(), (3, None)])
def test_rows_are_those_of_a_served_pass(windows: tuple[int | None, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row, of an entry or of a mask behind it, has the output that its own pass over the text gives it."""
    found, left = task(), []
    one, head = text(found), found.module
    head.layers.windows = windows
    step = head.step
    monkeypatch.setattr(head, "step", lambda *given: left.append(step(*given).detach()) or left[-1])
    torch.manual_seed(5)
    asked = found._one(one)
    torch.manual_seed(5)
    entries, firsts = SIZE - 1, one.mask[2:].nonzero()[:, 0]
    rows = rows_of(entries, firsts, DEPTH, found.ratio, found.least)
    assert len(rows.masks) == len(left[0]) > entries
    with torch.no_grad():
        true = head.fuse(torch.cat([one.taps[tap] for tap in head.taps], -1))
        for masks, last, learnt in zip(rows.masks.tolist(), rows.last.tolist(), left[0], strict=True):
            tokens = torch.cat((one.ids[1:last + 2], torch.full((masks,), head.mask_token)))
            hidden = torch.cat((true[:last + 1], head.blank().expand(masks, -1)))
            cache = HeadCache(head.depth, head.kv_heads, head.head_dim, torch.float32, "cpu")
            served = step(tokens, hidden, torch.arange(len(tokens)), HeadPass([cache], [len(tokens)]))[-1]
            assert torch.allclose(learnt, served, atol=1e-5), (masks, last)
    # entry t behind k masks is asked for token t + k + 2
    assert [wanted for _, _, wanted in asked] == [
        sum(int(k == masks and last + k + 2 < SIZE and one.mask[last + k + 2]) for k, last in zip(rows.masks.tolist(), rows.last.tolist(),
                                                                                                  strict=True)) for masks in range(DEPTH)]


def test_a_row_is_taught_the_law_behind_its_masks() -> None:
    """Features that tell every place apart, and laws as sharp as a model's: all of it can be learnt."""
    found = task(ratio=1.0, least=1.0)
    one, losses = text(found), []
    found.parts.output.weight.data *= 8
    optimizer = torch.optim.Adam([parameter for parameter in found.module.parameters() if parameter.requires_grad], lr=3e-3)
    for _ in range(300):
        optimizer.zero_grad()
        loss, figures = found.loss([one])
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
    assert float(found.module.mask_hidden.grad.abs().sum()) > 0, "what stands for features that are not known is learnt, too"
    assert figures == {f"accuracy {i + 1}": 1.0 for i in range(DEPTH)} and losses[-1] < losses[0] / 2


def test_a_token_that_the_draft_vocabulary_lacks_is_asked_for_and_not_taught() -> None:
    found = task(torch.arange(0, published.V, 2))
    one = text(found)
    asked = found._one(one)
    assert sum(len(losses) for losses, _, _ in asked) < sum(wanted for _, _, wanted in asked)
    assert found.loss([Features(one.ids, torch.zeros_like(one.mask), one.taps)])[0].item() == 0.0, "no guess counts: nothing moves"
