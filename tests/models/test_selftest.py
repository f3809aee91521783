"""What a load measures of Law 2, on tables that break it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from torch import Tensor

from draftproof.models.fake import TableSlot, TableTarget
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
