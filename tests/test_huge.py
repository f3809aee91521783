"""Rooms that lie together: none in another, none lost while somebody holds it, none kept when nobody does."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from draftproof import huge

LINUX = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="only Linux says what a process holds")
SIZES = [1, 15, 16, 17, 4096, huge.PAGE // 4, huge.BLOCK // 16, huge.BLOCK // 4, 3, 1]       # numbers of four bytes


def test_rooms_begin_with_a_line_and_none_lies_in_another() -> None:
    rooms = [huge.room(size).fill_(i) for i, size in enumerate(SIZES * 3)]
    for i, room in enumerate(rooms):
        assert room.dtype == torch.int32 and room.shape == (SIZES[i % len(SIZES)],)
        assert room.data_ptr() % huge.LINE == 0
        assert bool((room == i).all()), "somebody else wrote here"


def test_a_room_outlives_those_that_lay_beside_it() -> None:
    kept = huge.room(1000).fill_(7)
    for _ in range(40):
        huge.room(huge.BLOCK // 32).fill_(1)
    gc.collect()
    assert bool((kept == 7).all())


def test_no_numbers_are_no_room() -> None:
    assert huge.room(0).shape == (0,)


@LINUX
def test_a_large_room_goes_back_to_the_system() -> None:
    before = mapped()
    held = huge.room(64 * huge.PAGE // 4)
    assert mapped() - before >= 64 * huge.PAGE
    del held
    gc.collect()
    assert mapped() - before < 64 * huge.PAGE


def mapped() -> int:
    """Bytes of this process's address space."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * 4096


@LINUX
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_zeros_are_of_pages_of_their_own(dtype: torch.dtype) -> None:
    before = mapped()
    few, many = huge.zeros((3, 5), dtype), huge.zeros((9, 7, huge.PAGE // 4), dtype)
    assert few.shape == (3, 5) and many.shape == (9, 7, huge.PAGE // 4) and few.dtype == many.dtype == dtype and many.is_contiguous()
    assert not few.any() and not many.any()
    many[8, 6, -1] = 1
    held = mapped()
    assert int(many.sum()) == 1 and held - before >= many.nbytes
    del many
    gc.collect()
    assert held - mapped() >= 8 * 7 * huge.PAGE // 4 * dtype.itemsize, "but for what torch keeps for itself"
