"""What a load measures of Law 2, on tables that break it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import families
import pytest
from torch import Tensor

from draftproof.config import LoadConfig
from draftproof.models.cache import PagePool
from draftproof.models.fake import TableSlot, TableTarget
from draftproof.models.load import load_target
from draftproof.models.paged import PagedTarget
from draftproof.models.selftest import FAR, ROWS, differ_far, invisible
from draftproof.types import Draft, Scores


class FarTable(TableTarget):
    """Rows that are scored together behind so many tokens are other numbers."""

    from_token = 0

    def score(self, slots: Sequence[TableSlot], roots: Tensor, drafts: Sequence[Draft]) -> Scores:
        found = super().score(slots, roots, drafts)
        if len(drafts[0]) and slots[0].length > self.from_token:
            found.logits[-1, 0] += 2.0 ** -20
        return found


@pytest.mark.parametrize("from_token, context, said", [
    (512, 4096, f"no: 2 of {ROWS} rows differ from plain decoding when scored 5 wide behind {FAR} tokens"),
    (1000, 4096, ""), (200, 512, f"no: 2 of {ROWS} rows differ from plain decoding when scored 5 wide behind {FAR // 2} tokens"),
    (200, 40, ""),
])
def test_rows_that_differ_far_from_the_beginning_are_found(from_token: int, context: int, said: str) -> None:
    target = FarTable(context=context)
    target.from_token = from_token
    assert invisible(target, 16, 64)[0] or context == 40
    assert differ_far(target) == said and not target.open_slots


def test_a_table_differs_nowhere() -> None:
    assert differ_far(TableTarget()) == ""


@pytest.mark.parametrize("page_tokens, pages", [(16, 12), (64, 8), (256, 8)])
def test_a_cache_without_room_for_it_is_told_and_loads(page_tokens: int, pages: int, tmp_path: Path) -> None:
    """A load failed, and asked for fewer sequences."""
    families.save("llama", tmp_path)
    target = load_target(tmp_path, LoadConfig(device="cpu", self_test=False))
    assert isinstance(target, PagedTarget)
    target.context = 512
    for count in (2, pages - 1, pages):
        target.pool = PagePool(page_tokens, count * page_tokens, target.device)
        passed, said = invisible(target, page_tokens, 64)
        assert not target.slots and passed == (count == pages)
        assert passed or said == (f"not measured: the cache has no room for the {pages * page_tokens} tokens of the self-test; raise "
                                  "cache_tokens (--cache-tokens)")
