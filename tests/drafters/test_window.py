"""What waits for a drafter, against a range of positions and a list of those that were read."""

from __future__ import annotations

import random

import pytest
import torch

from draftproof.drafters.window import Window


def rows(start: int, end: int) -> torch.Tensor:
    """A row says its position."""
    return torch.arange(start, end, dtype=torch.float32)[:, None]


@pytest.mark.parametrize("seed", range(20))
def test_every_position_is_read_once_and_in_order(seed: int) -> None:
    dice, window, read, known = random.Random(seed), Window(), [], range(0)
    for _ in range(60):
        start = dice.randrange(max(0, known.stop - 6), known.stop + (8 if dice.random() < 0.1 else 1))
        end = start + dice.randrange(1, 7)
        gap = len(known) == 0 or start > known.stop
        assert window.take(rows(start, end), start) is gap
        if gap:
            read, known = [], range(start, end)
        known = range(known.start, max(known.stop, end))
        assert window.at == window.end - window.ahead
        assert (window.first, window.end, window.held, window.ahead) == (known.start, known.stop, len(read), len(known) - len(read))
        if window.ahead and dice.random() < 0.6:
            count = dice.randint(1, window.ahead)
            read += window.due(count)[:, 0].tolist()
            window.read(count)
            assert read == list(known)[:len(read)] and window.held == len(read)


def test_nothing_new_waits_for_nobody() -> None:
    window = Window()
    assert window.empty and window.take(rows(5, 9), 5) and not window.empty
    assert not window.take(rows(6, 8), 6) and (window.end, window.ahead) == (9, 4)
    window.close()
    assert window.empty and window.take(rows(7, 9), 7) and window.first == 7
