"""Threads share a product's panels among them; whichever takes one, its sums are the same."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def threads_move_no_bit(made: Callable[[Tensor], Tensor], x: Tensor, got: Tensor) -> None:
    """got: what a layer made of rows x with as many threads as there are."""
    before = torch.get_num_threads()
    try:
        for threads in (2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(made(x), got) and torch.equal(made(x[-7:]), got[-7:]), f"{threads} threads"
    finally:
        torch.set_num_threads(before)
