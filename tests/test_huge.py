"""Rooms that lie together: none in another, none lost while somebody holds it, none kept when nobody does."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from draftproof import huge

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


def test_a_large_room_goes_back_to_the_system() -> None:
    if not Path("/proc/self/statm").exists():
        pytest.skip("only Linux says what a process holds")
    before = mapped()
    held = huge.room(64 * huge.PAGE // 4)
    assert mapped() - before >= 64 * huge.PAGE
    del held
    gc.collect()
    assert mapped() - before < 64 * huge.PAGE


def mapped() -> int:
    """Bytes of this process's address space."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * 4096
