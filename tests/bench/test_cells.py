"""Cells from runs: pairs only, the right medians, and one differing token is seen."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from statistics import median

import pytest

from draftproof.bench.cells import ALL, OFF, Run, cells, middle, percentile
from draftproof.bench.run import by_class
from draftproof.errors import Failure

METRICS = {"rounds": 4, "acceptance_length": 2.25, "ttft_s": 0.1, "tpot_s": 0.01}


def runs() -> list[Run]:
    """Two classes of six prompts, three repeats: `fast` is exactly twice as fast, whatever the weather of the repeat."""
    rng, out = random.Random(0), []
    for prompt in range(12):
        for repeat in range(3):
            seconds = rng.uniform(1, 2)
            for arm, factor in ((OFF, 1.0), ("fast", 0.5)):
                kind = "code" if prompt < 6 else "data"
                out.append(Run(arm, arm, "auto", prompt, kind, 0.0, repeat, seconds * factor, tuple(range(10)), METRICS))
    return out


def test_pairs_cancel_the_weather() -> None:
    table = {(c.prompt_class, c.arm): c for c in cells(runs())}
    assert set(table) == {(name, arm) for name in ("code", "data", ALL) for arm in (OFF, "fast")}
    for name in ("code", "data", ALL):
        speedup = table[name, "fast"].speedup
        assert speedup.median == pytest.approx(2.0) and speedup.low == pytest.approx(2.0) and speedup.high == pytest.approx(2.0)
        assert table[name, OFF].speedup.median == 1.0
        assert table[name, "fast"].acceptance_length == pytest.approx(2.25)
        assert table[name, "fast"].identical


def test_what_no_drafter_hastens_is_told_apart() -> None:
    """The first token takes half of off's request: twice as fast as a whole is three times as fast after it."""
    timed = [replace(run, metrics={**METRICS, "tpot_s": run.seconds * (1 / 18 if run.arm == OFF else 1 / 27)}) for run in runs()]
    for cell in cells(timed):
        assert cell.decoding is not None and cell.decoding.median == pytest.approx(1 if cell.arm == OFF else 3)
        assert cell.decoding.low == pytest.approx(cell.decoding.high) and cell.as_json()["decoding"]["median"] == cell.decoding.median
    short = [replace(run, token_ids=(1,), metrics={**METRICS, "tpot_s": None}) for run in runs()]
    assert all(cell.decoding is None and cell.as_json()["decoding"] is None for cell in cells(short))


def test_several_temperatures_have_their_own_rows_over_all_classes_and_one_together() -> None:
    warm = [replace(run, temperature=0.8, seconds=run.seconds * (0.5 if run.arm == "fast" else 1)) for run in runs()]
    fast = {(c.prompt_class, c.temperature): c for c in cells(runs() + warm) if c.arm == "fast"}
    assert list(fast) == [*((name, t) for name in ("code", "data", ALL) for t in (0.0, 0.8)), (ALL, None)]
    assert fast[ALL, 0.0].speedup.median == pytest.approx(2) and fast[ALL, 0.8].speedup.median == pytest.approx(4)
    assert fast[ALL, None].tokens == fast[ALL, 0.0].tokens + fast[ALL, 0.8].tokens
    assert {c.temperature for c in cells(runs())} == {0.0}


def test_one_differing_token_is_seen_in_its_class_only() -> None:
    changed = runs()
    changed[1] = replace(changed[1], token_ids=(*range(9), 99))
    assert {(c.prompt_class, c.arm) for c in cells(changed) if not c.identical} == {("code", "fast"), (ALL, "fast")}


def test_a_shorter_text_is_not_identical() -> None:
    changed = runs()
    changed[1] = replace(changed[1], token_ids=tuple(range(9)))
    assert any(not c.identical for c in cells(changed))


def test_json_has_the_contract_keys() -> None:
    record = cells(runs())[0].as_json()
    assert {"arm", "drafter", "depth", "class", "concurrency", "tokens_per_s", "speedup", "decoding", "acceptance_length", "ttft_s",
            "tpot_s", "identical"} <= set(record)
    assert set(record["tokens_per_s"]) == {"median", "low", "high"} and set(record["speedup"]) == {"median", "low", "high", "min", "max"}


def test_percentile_and_interval() -> None:
    assert [percentile([1, 2, 3, 4, 5], share) for share in (0, 0.25, 0.5, 0.9, 1)] == [1, 2, 3, pytest.approx(4.6), 5]
    rng = random.Random(1)
    covered = 0
    for _ in range(60):
        values = [rng.gauss(1.5, 0.3) for _ in range(24)]
        interval = middle(values)
        assert interval.low is not None and interval.high is not None
        assert interval.low <= interval.median <= interval.high and interval.median == median(values)
        covered += interval.low <= 1.5 <= interval.high
    assert covered >= 50        # 57 expected of 60; fewer than 50 has probability 0.002 for a true 95 % interval


def test_few_prompts_have_a_range_and_no_interval() -> None:
    for few in range(1, 6):
        one = middle([float(i) for i in range(few)])
        assert one.low is one.high is None and (one.min, one.max) == (0, few - 1) and f"(range 0.00–{few - 1}.00)" in one.text
    assert middle([1.0, 3.0, 2.0, 5.0, 4.0, 6.0]).text == "3.50× (1.00–6.00)"
    short = [replace(run, prompt_class="code") for run in runs() if run.prompt < 5]
    assert all(cell.speedup.low is cell.as_json()["speedup"]["high"] is None for cell in cells(short))


@pytest.mark.parametrize("n", [6, 7, 8, 9, 12, 20, 59])
def test_an_interval_holds_as_often_as_it_says(n: int) -> None:
    """For any distribution: each value lies below the true median with probability ½, so how many do is binomial."""
    interval = middle(float(i) for i in range(n))
    assert interval.low is not None and interval.high is not None and interval.low + interval.high == n - 1
    held = [sum(math.comb(n, below) for below in range(int(low) + 1, n - int(low))) / 2**n for low in (interval.low, interval.low + 1)]
    assert held[0] >= 0.95 > held[1]


def test_prompts_by_class() -> None:
    records = [{"class": name, "prompt": f"{name}{i}"} for i in range(3) for name in ("code", "data")]
    assert [p.text for p in by_class(records, 2)] == ["code0", "code1", "data0", "data1"]
    with pytest.raises(Failure, match="prompt 1"):
        by_class([{"class": "code", "text": "x"}], 2)
