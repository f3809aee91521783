"""benchmarks/blocks.py: what it tries, and that a layer with other blocks is the same layer. Times are a GPU's."""

from __future__ import annotations

import random
from argparse import Namespace

import pytest
import torch
from benchmark_module import benchmark

pytest.importorskip("triton")
blocks = benchmark("blocks")
from draftproof.gpu import calls  # noqa: E402

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles here, and interprets nothing")


def test_other_blocks_compute_the_same_and_the_usual_ones_come_back() -> None:
    torch.manual_seed(0)
    there = blocks.stand(blocks.Shape(64, 2, 4, 2, 96, head_dim=16), 2, 3, False, torch.device("cpu"))
    products = there.products()
    assert products == {"gate_up": (96, 64, True, 0), "qkv": (128, 64, False, 0), "down": (64, 96, False, 0), "o": (64, 64, False, 0)}
    assert list(products)[:1] == ["gate_up"] and there.weight_bytes() == 2 * (2 * 96 * 64 + 128 * 64 + 64 * 96 + 64 * 64)
    usual, plain = calls.blocks, there.run()
    with blocks.sizes({products["down"]: calls.Blocks(16, 32, 64, 2, 4)}):
        assert calls.fitting(there.x.device, 3, 64, 96, 2, False) == calls.Blocks(16, 32, 64, 2, 4)
        assert calls.fitting(there.x.device, 3, 64, 64, 2, False) == usual(3, 64, 64, 2, False)
        other = there.run()
    assert calls.blocks is usual and calls.fitting(there.x.device, 3, 64, 96, 2, False) == usual(3, 64, 96, 2, False)
    torch.testing.assert_close(other.float(), plain.float(), rtol=0.02, atol=0.02)


def test_a_product_that_turns_heads_has_sizes_of_its_own() -> None:
    """Where 3 rows are multiplied, not where 20 are, which another kernel turns."""
    shape = blocks.Shape(64, 2, 4, 2, 96, head_dim=32)
    there, many = (blocks.stand(shape, 1, rows, False, torch.device("cpu")) for rows in (3, 20))
    key = there.products()["qkv"]
    assert key == (256, 64, False, 32) and many.products()["qkv"] == (256, 64, False, 0)
    plain, asked, usual = there.run(), [], calls.heading
    found = blocks.tries(key, 2, None, random.Random(0))
    assert found and {b.outputs for b in found} == {16} and usual(32, 2) not in found
    with blocks.sizes({key: calls.Blocks(16, 16, 64, 2, 4)}):
        chosen = calls.heading
        calls.heading = lambda *given: asked.append(chosen(*given)) or asked[-1]
        other = there.run()
    assert asked == [calls.Blocks(16, 16, 64, 2, 4)] and calls.heading is usual
    torch.testing.assert_close(other.float(), plain.float(), rtol=0.02, atol=0.02)


def test_a_try_that_is_faster_is_kept_and_one_that_cannot_run_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    there = blocks.stand(blocks.Shape(64, 1, 4, 2, 96, head_dim=16), 1, 1, False, torch.device("cpu"))
    good, bad = calls.Blocks(16, 32, 64, 2, 4), calls.Blocks(16, 128, 64, 2, 4)

    def timed(_: object, chosen: dict[object, object]) -> object:
        if bad in chosen.values():
            raise RuntimeError("out of resource")
        return lambda: 1.0 - 0.1 * list(chosen.values()).count(good)

    monkeypatch.setattr(blocks, "timer", timed)
    monkeypatch.setattr(blocks, "tries", lambda *_: [bad, good, calls.Blocks(16, 16, 64, 2, 4)])
    *found, whole = blocks.search(there, Namespace(seconds=60.0, seed=0, tries=None, turns=1, gain=0.003))
    assert [one["best"] for one in found] == [list(good)] * 4 and [one["tried"] for one in found] == [2] * 4
    assert whole["ratio"] == pytest.approx(0.6)


def test_what_is_tried_fits_and_leaves_no_rest() -> None:
    found = blocks.tries(blocks.Key(4096, 14336, False), 2, None, random.Random(0))
    assert len(found) > 50 and {b.rows for b in found} == {16}
    assert all(14336 % b.inputs == 0 and b.stages * b.inputs * (b.outputs * 2 + 32) <= 220_000 for b in found)
    assert len(blocks.tries(blocks.Key(4096, 14336, True), 2, 7, random.Random(0))) == 7
    wide = blocks.tries(blocks.Key(4096, 14336, False), 2, None, random.Random(0), rows=80)
    assert len(wide) > 20 and {b.rows for b in wide} == {64, 128}
    assert all(b.stages * b.inputs * (b.outputs * 2 + 2 * b.rows) <= 220_000 for b in wide)


def test_small_changes_come_first() -> None:
    key = blocks.Key(14336, 4096, True)
    usual = calls.blocks(1, *key[:2], 2, key[2])
    found = blocks.tries(key, 2, None, random.Random(0))
    changes = [sum(a != b for a, b in zip(one, usual, strict=True)) for one in found]
    assert changes == sorted(changes) and changes[0] == 1 and changes[-1] > 3
    assert len(set(found)) == len(found) and usual not in found
