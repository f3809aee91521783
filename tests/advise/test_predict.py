"""Advice from counts and costs: the formula, the choice, the words, and its own check."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from draftproof.advise.check import check
from draftproof.advise.documents import cells_of
from draftproof.advise.measure import _costs, _line, along, beginnings, from_curve, measure, memory_plan
from draftproof.advise.predict import Cost, Forecast, Overall, forecast, overall, predict, thresholds, verdict
from draftproof.bench.cells import Spread
from draftproof.bench.profile import Point
from draftproof.cli import run as command
from draftproof.config import LoadConfig
from draftproof.drafters.ngram import NgramDrafter
from draftproof.engine.engine import Engine
from draftproof.engine.setup import draft_bytes, draft_cache_bytes
from draftproof.errors import Failure
from draftproof.models.fake import TableTarget
from draftproof.models.load import builtin, load_target
from draftproof.models.target import Target
from draftproof.remote.plan import Schedule
from draftproof.types import Sampling


def cell(name: str = "code", depth: int = 4, length: float = 3.0, nodes: float = 4.0, half: float | None = None) -> dict[str, Any]:
    return {"drafter": "ngram", "depth": depth, "class": name, "rounds": 100, "drafted": int(100 * nodes), "acceptance_length": length,
            "tokens": 101 * 10, "requests": 10, "figure": "exact",
            "acceptance_length_interval": None if half is None else {"low": length * (1 - half), "high": length * (1 + half)}}


def cost(drafter: str, depth: int, batch: int, seconds: float, noise: float = 0.0, **more: Any) -> Cost:
    return Cost(drafter, depth, batch, Spread(seconds, seconds * (1 - noise), seconds * (1 + noise)), **more)


def test_the_formula() -> None:
    one = forecast(cell(), cost("none", 0, 1, 1.0), cost("ngram", 4, 1, 1.5, nodes=4.0))
    assert one is not None and one.speedup == Spread(2.0, 2.0, 2.0) and one.concurrency == 1
    paid = forecast(cell(), cost("none", 0, 2, 1.0, start_s=50.0), cost("ngram", 4, 2, 1.5, nodes=4.0, start_s=60.0))
    assert paid is not None and paid.speedup.median == pytest.approx((100 + 100) / (120 + 50))
    longer = {**cell(), "prompt_tokens": 30.0}
    start = {"start_s": 10.0, "token_s": 0.5}
    paid = forecast(longer, cost("none", 0, 1, 1.0, **start), cost("ngram", 4, 1, 1.5, nodes=4.0, **start))
    assert paid is not None and paid.speedup.median == pytest.approx((25 + 100) / (25 + 50))
    shorter = forecast(cell(nodes=2.0), cost("none", 0, 1, 1.0), cost("ngram", 4, 1, 1.5, nodes=4.0, slope=0.125))
    assert shorter is not None and shorter.speedup.median == pytest.approx(3 / 1.25)


def test_requests_of_other_classes_run_beside() -> None:
    """Of two at a time the other is of the crowd: half of it counts for the draft lengths of a round, and its prompts are waited for as
    often as one begins."""
    crowd = {**cell("all", length=2.0, nodes=2.0), "prompt_tokens": 10.0, "tokens": 51 * 10}
    mine = {**cell(), "prompt_tokens": 40.0}
    plain, drafts = cost("none", 0, 2, 1.0, token_s=0.1), cost("ngram", 4, 2, 1.5, nodes=4.0, slope=0.1, token_s=0.2)
    one = forecast(mine, plain, drafts, crowd)
    rounds, others = 100 / 3, 50 / 2
    assert one is not None
    assert one.speedup.median == pytest.approx((4 + 2 * 1.0 + 100) / (8 + rounds / others * 2.0 + rounds * (1.5 - 0.1)))
    alone = forecast(mine, cost("none", 0, 1, 1.0), cost("ngram", 4, 1, 1.5, nodes=4.0, slope=0.1), crowd)
    assert alone is not None and alone.speedup.median == pytest.approx(2.0)


def test_classes_that_are_served_apart_share_no_round() -> None:
    """Of two at a time the other one drafts what its class does: the same as this one, or as all do."""
    cells = [cell("code"), cell("all", nodes=2.0)]
    costs = [cost("none", 0, 2, 1.0), cost("ngram", 4, 2, 1.5, nodes=4.0, slope=0.125)]
    for apart, seconds in ((True, 1.5), (False, 1.375)):
        found = next(one for one in predict(cells, costs, apart) if (one.prompt_class, one.drafter) == ("code", "ngram"))
        assert found.notes["round_cost"] == pytest.approx(seconds)


def test_rounds_of_a_long_prompt_take_longer() -> None:
    """A hundred tokens and half of the answer's stand before a round, on average."""
    rise = {"context_s": 0.01}
    one = forecast({**cell(), "prompt_tokens": 100.0}, cost("none", 0, 1, 1.0, **rise), cost("ngram", 4, 1, 1.5, nodes=4.0, **rise))
    assert one is not None and one.speedup.median == pytest.approx(3 * (1.0 + 1.5) / (1.5 + 1.5))


def test_a_class_without_rounds_has_no_forecast() -> None:
    assert forecast({**cell(), "rounds": 0, "acceptance_length": None}, cost("none", 0, 1, 1.0), cost("ngram", 4, 1, 1.0)) is None


def test_independent_sources_widen_the_interval_together() -> None:
    one = forecast(cell(half=0.03), cost("none", 0, 1, 1.0, noise=0.04), cost("ngram", 4, 1, 1.5, nodes=4.0))
    assert one is not None
    assert math.log(one.speedup.high / one.speedup.median) == pytest.approx(0.05, rel=0.01)
    assert one.speedup.low * one.speedup.high == pytest.approx(one.speedup.median ** 2)


def advised() -> list[Forecast]:
    cells = [cell("chat", 4, 1.4), cell("chat", 8, 1.5, 8.0), cell("code", 4, 3.0), cell("code", 8, 4.5, 8.0)]
    costs = [cost("none", 0, b, 1.0 + b / 100, free_rows=40) for b in (1, 16)]
    costs += [cost("ngram", d, b, (1.0 + b / 100) * (1 + d * b / 64), nodes=float(d)) for d in (4, 8) for b in (1, 16)]
    return predict(cells, costs)


def test_the_best_is_recommended_and_off_where_it_hurts() -> None:
    chosen = {(f.prompt_class, f.concurrency): (f.drafter, f.depth) for f in advised() if f.recommended}
    assert chosen == {("chat", 1): ("ngram", 8), ("chat", 16): ("none", 0), ("code", 1): ("ngram", 8), ("code", 16): ("ngram", 8)}
    assert thresholds(advised()) == {"chat": 1, "code": 16}


def judged(drafter: str, depth: int, load: int, speedup: float, name: str = "all") -> Forecast:
    return Forecast(name, load, drafter, depth, Spread(speedup, speedup, speedup), "")


def test_one_drafter_for_everything() -> None:
    """Of all requests together; where it does not gain it is off there, and a depth that loses at some load is none for all loads."""
    said = [judged("ngram", 2, 1, 1.3), judged("ngram", 8, 1, 1.9), judged("ngram", 2, 16, 1.05), judged("ngram", 8, 16, 0.7),
            judged("suffix", 4, 1, 1.8), judged("suffix", 4, 16, 1.01), judged("model", 4, 1, 3.0, "code"), judged("none", 0, 1, 1.0)]
    assert overall(said) == Overall("ngram", {1: 8, 16: 2}, 2, {1: 1.3, 16: 1.05})
    found = overall([*said, judged("model", 4, 1, 2.2), judged("model", 4, 16, 0.5)])
    assert found == Overall("model", {1: 4, 16: 0}, None, {}) and found.schedule == "1:4,16:0"
    assert overall([judged("ngram", 2, 1, 1.01), judged("ngram", 2, 4, 0.9)]) is None and overall(said[6:]) is None
    same = overall([judged("ngram", 4, load, 1.5) for load in (2, 8)])
    assert same is not None and same.schedule == "1:4"
    assert Schedule.of(found.schedule).steps == ((1, 4), (16, 0))


def test_reasons_are_words() -> None:
    by = {(f.prompt_class, f.concurrency, f.depth): f.reason for f in advised()}
    assert "verification is compute-bound beyond 40 rows, and this needs 80" in by["chat", 16, 4] and "off: the best" in by["chat", 16, 0]
    assert "4.50 tokens a round, which takes 1.12×" in by["code", 1, 8]
    said = verdict(advised())
    assert "code at 1 concurrent: ngram at depth 8" in said and "chat at 16 concurrent: off" in said
    little = forecast(cell(length=1.02), cost("none", 0, 1, 1.0), cost("ngram", 4, 1, 1.2, nodes=4.0))
    slow = forecast(cell(length=1.5), cost("none", 0, 1, 1.0), cost("ngram", 4, 1, 2.0, nodes=4.0))
    assert little is not None and "hardly any stands" in little.reason and slow is not None and "drafting takes more time" in slow.reason


def test_costs_from_a_curve() -> None:
    points = [Point(rows, context, batch, Spread(t, t, t)) for context in (16, 512) for batch in (1, 4)
              for rows, t in ((1, 1.0), (4, 1.0), (8, 1.2), (16, 2.0))]
    costs = {(c.drafter, c.batch): c for c in from_curve(points, [cell("a", 4, 3.0, 3.0), cell("b", 4, 2.0, 5.0)], 100, 0.05)}
    assert costs["none", 4].seconds.median == 1.0 and costs["none", 4].free_rows == 32
    mine = costs["ngram", 1]
    assert mine.nodes == 4 and mine.seconds.median == pytest.approx(1.05 + 0.2) and mine.slope == pytest.approx(0.05)


def test_rounds_of_the_engine_are_timed() -> None:
    """Every look at the clock is a second later, and a step takes one."""
    ticks = iter(range(10**9))
    texts = [((1, 2, 3), (4, 5) * 6), ((4, 5), (1, 2) * 6), ((2, 1, 2, 1), (3,) * 12)]
    costs, bytes_of = measure(TableTarget(7, order=2), [("ngram", 3), ("ngram", 2)], texts, [1, 2],
                             Sampling(temperature=0.0, max_tokens=40), rounds=8, clock=lambda: float(next(ticks)))
    arms = ("none", 0), ("ngram", 3), ("ngram", 2)
    assert {(c.drafter, c.depth, c.batch) for c in costs} == {(*arm, batch) for arm in arms for batch in (1, 2)}
    assert all(c.seconds.median == 1.0 for c in costs) and bytes_of == {"none": (0, 0), "ngram": (0, 0)}
    assert all((c.nodes > 0) == (c.drafter == "ngram") for c in costs)
    assert all((c.start_s, c.token_s) == (1.0, 0.0) for c in costs), "a step that reads, then the first round"


@pytest.fixture(scope="module")
def demo() -> Target:
    return load_target(builtin("target"), LoadConfig(self_test=False))


@pytest.mark.parametrize(("spec", "layers"), [("ngram", 0), ("layer-skip:exit=2", 0), ("medusa", 0), ("eagle3", 1), ("mtp", 1),
                                              ("dflash", 2), ("ngram+eagle3", 1)])
def test_a_plan_counts_what_a_drafter_keeps_of_a_text(spec: str, layers: int, demo: Target) -> None:
    """layers: of the head, with keys of their own. They had been taken for nothing."""
    with Engine(demo, spec, 4) as engine:
        drafter: Any = engine.speculation.drafter
        part = drafter.parts[-1] if "+" in spec else drafter
        config = json.loads((builtin(part.name) / "config.json").read_text()) if layers else {}
        entry = 2 * layers * config["num_key_value_heads"] * config["head_dim"] * part.dtype.itemsize if layers else 0
        assert draft_cache_bytes(drafter) == entry
        assert memory_plan(demo, draft_bytes(drafter), entry, 4, 16, 1000).draft_cache == 16 * 1000 * entry


def test_a_draft_model_keeps_the_keys_of_all_its_layers(demo: Target) -> None:
    with Engine(demo, "model", 4) as engine:
        drafter: Any = engine.speculation.drafter
        config = drafter.lm.parts.config
        keys = config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        assert draft_cache_bytes(drafter) == 2 * keys * drafter.lm.parts.embed.weight.element_size()


def test_a_drafter_that_reads_the_prompt_is_charged_for_it() -> None:
    """Its first rounds take longer than the others: that is no round's cost, and every request's."""
    now = [0.0]

    class Slow(NgramDrafter):
        name = "slow"

        def start(self, seq: Any) -> Any:
            now[0] += 5.0
            return super().start(seq)

    def clock() -> float:
        now[0] += 1.0
        return now[0]

    engines = {"none": Engine(TableTarget(7, order=2)), "slow": Engine(TableTarget(7, order=2), Slow(), 3)}
    found = beginnings(engines, [(1, 2, 1), (4, 5)], Sampling(temperature=0.0, max_tokens=9), clock)
    rounds = {spec: [count for *_, count in each] for spec, each in found.items()}
    assert rounds["none"] == [4, 4] and all(0 < count <= 4 for count in rounds["slow"])
    assert {spec: [(length, seconds - count) for length, seconds, count in each] for spec, each in found.items()} == {
        "none": [(3, 1.0), (2, 1.0)], "slow": [(3, 6.0), (2, 6.0)]}
    assert _line([(3, 7.0), (2, 7.0)]) == (7.0, 0.0) and _line([(10, 3.0), (20, 5.0), (30, 7.0), (40, 99.0)]) == pytest.approx((0.0, 0.24))
    assert _line([(10, 3.0), (20, 5.0), (30, 7.0)]) == pytest.approx((1.0, 0.2)) and _line([(5, -1.0)]) == (0.0, 0.0)


def test_rounds_are_timed_along_the_answers() -> None:
    assert sorted(along([((1,), (2, 3, 4))] * 3, 9)) == [[1], [1, 2], [1, 2, 3]] and along([((1, 2, 3), (4,))], 2) == [[2, 3]]
    ordered = [((i,), ()) for i in range(50)]
    assert sorted(along(ordered, 9)) == [[i] for i in range(50)] != along(ordered, 9), "a sorted log is not timed from one end"


def cost_of(rounds: list[tuple[float, float, float]], plain: float, drafter: str = "ngram", depth: int = 2) -> Cost:
    """Of an engine beside one without a drafter, whose every round took `plain`."""
    return _costs({("none", 0): [(plain, 0.0, 50.0)] * 3, (drafter, depth): rounds}, 1)[1]


def test_a_pause_of_the_machine_is_no_cost() -> None:
    rounds = [(1.0, 0.0, 50.0)] * 10 + [(1.5, 4.0, 50.0)] * 20 + [(40.0, 4.0, 50.0), (30.0, 0.0, 50.0)]
    one = cost_of(rounds, 7.0)
    assert one.seconds.median == pytest.approx((11 * 1.0 + 21 * 1.5) / 32) and one.nodes == pytest.approx(84 / 32)
    assert one.slope == pytest.approx(0.125) and one.seconds.high - one.seconds.low < 0.1
    assert one.at(0, 9) == pytest.approx(1.0) and one.at(4, 99) == pytest.approx(1.5), "both kinds of rounds are on the line"
    always = cost_of([(1.5, 4.0, 50.0)] * 20, 0.9)
    assert always.seconds.median == 1.5 and always.at(0, 50) == pytest.approx(0.9), "where it always drafts, a plain round stands in"


def test_rounds_take_longer_after_longer_texts() -> None:
    rounds = [(1.0 + 0.1 * nodes + 0.01 * context, nodes, context) for nodes in (0.0, 2.0) for context in (10.0, 20.0, 60.0, 90.0)] * 3
    one = cost_of(rounds, 7.0)
    assert one.context == 45.0 and one.context_s == pytest.approx(0.01) and one.slope == pytest.approx(0.1)
    assert one.at(1, 10) == pytest.approx(1.2) and one.at(1, 60) == pytest.approx(1.7)
    assert cost_of([(2.0 - 0.01 * context, 0.0, context) for context in (10.0, 50.0)] * 5, 7.0).context_s == 0.0


def test_a_machine_that_slows_down_between_two_texts_slows_all_engines_alike() -> None:
    """Seen before: of two texts the longer one met slow memory; one engine had a rise with length for it, another, by chance, had none."""
    found = _costs({("none", 0): [(1.0, 0.0, 10.0)] * 8 + [(2.0, 0.0, 20.0)] * 7,
                    ("ngram", 2): [(1.5, 2.0, 12.0)] * 7 + [(2.0, 0.0, 24.0)] * 4 + [(3.0, 2.0, 24.0)] * 4}, 1)
    assert found[0].context_s == found[1].context_s > 0


def bench(**measured: tuple[float, float]) -> dict[str, Any]:
    return {"cells": [{"arm": d, "drafter": d, "depth": str(depth), "class": "code", "concurrency": 1,
                       "speedup": {"median": mid, "low": mid - half, "high": mid + half}}
                      for (d, depth), (mid, half) in {("ngram", 4): measured["four"], ("ngram", 8): measured["eight"]}.items()]}


def test_the_check_judges_narrow_cells_only() -> None:
    forecasts = advised()
    eight = next(f.speedup.median for f in forecasts if (f.prompt_class, f.concurrency, f.depth) == ("code", 1, 8))
    found = check(forecasts, bench(four=(9.0, 3.0), eight=(eight * 1.05, 0.01)))
    assert found["judged"] == 1 and found["within_10_percent"] == 1.0 and len(found["cells"]) == 2
    (regret,) = found["regret"]
    assert regret["depth"] == 8 and regret["slower_by"] == pytest.approx(1 - eight * 1.05 / 9.0)
    few = bench(four=(9.0, 3.0), eight=(eight * 1.05, 0.01))
    for cell in few["cells"]:
        cell["speedup"] |= {"low": None, "high": None}
    assert check(forecasts, few)["judged"] == 0, "a bench of few prompts says how fast, not how surely"
    wrong = check(forecasts, bench(four=(2.0, 0.01), eight=(eight * 1.5, 0.01)))
    assert wrong["within_10_percent"] < 1 and wrong["regret"][0]["slower_by"] == 0
    for document in ({}, {"cells": []}, {"cells": [{"class": "x", "drafter": "y", "depth": "1"}]}):
        with pytest.raises(Failure):
            check(forecasts, document)


@pytest.mark.parametrize(("cells", "said"), [
    ([{"class": "code", "drafter": "ngram", "depth": "4", "concurrency": None, "rate": 2.0, "speedup": {"median": 1, "low": 1, "high": 1}}],
     "not --rate"),
    ([{"class": "code", "drafter": "ngram", "depth": "4", "concurrency": 1, "speedup": None}], "without it"),
    ([{"class": "code", "drafter": "ngram", "depth": "4", "concurrency": 1, "speedup": {"median": "fast"}}], "another form"),
    ([7], "another form"),
])
def test_a_benchmark_that_checks_nothing_is_told(cells: list[Any], said: str) -> None:
    with pytest.raises(Failure, match=said):
        check(advised(), {"cells": cells})


@pytest.mark.parametrize(("document", "said"), [
    ({}, "no cells"), ({"cells": 5}, "no cells"), ({"cells": []}, "no cells"), ({"cells": [5]}, "cell 1"),
    (bench(four=(1.0, 0.1), eight=(1.0, 0.1)), "cell 1: rounds is missing"), ({"cells": [cell() | {"rounds": "9"}]}, "rounds is '9'"),
    ({"cells": [cell() | {"acceptance_length": None}]}, "acceptance_length is None"), ({"cells": [cell(), cell()]}, "twice"),
    ({"cells": [cell() | {"acceptance_length_interval": [1, 2]}]}, "acceptance_length_interval"),
    ({"cells": [cell() | {"depth": "traced"}]}, "fixed depth"), ({"cells": [cell() | {"drafted": -3}]}, "drafted is -3"),
    ({"cells": [cell() | {"rounds": True}]}, "rounds is True"), ({"cells": [cell() | {"acceptance_length": math.inf}]}, "length is inf"),
    *(({"cells": [cell() | {"acceptance_length_interval": {"low": low, "high": 2.6}}]}, "interval is") for low in (0, None, "2", 3.0)),
    *(({"cells": [cell() | {"prompt_tokens": prompt}]}, "prompt_tokens is") for prompt in ("100", -1, math.nan)),
])
def test_what_is_no_audition_is_told(document: dict[str, Any], said: str) -> None:
    with pytest.raises(Failure, match=said) as found:
        cells_of(document)
    assert "draftproof audition" in str(found.value)


def test_an_audition_of_fixed_and_traced_depths_has_the_fixed_ones() -> None:
    empty = cell("b") | {"rounds": 0, "acceptance_length": None}
    assert cells_of({"cells": [cell(), cell() | {"depth": "traced"}, empty]}) == [cell(), empty]


def test_a_curve_without_points_is_told() -> None:
    with pytest.raises(Failure, match="no point"):
        from_curve([], [cell()], 64, 0.0)
    with pytest.raises(Failure, match="no pass of one row at context 64"):
        from_curve([Point(rows, 64, 1, Spread(1, 1, 1)) for rows in (2, 4)], [cell()], 64, 0.0)


def test_texts_that_end_at_once_are_told() -> None:
    """A round counts from the fifth of a text on: these end before."""
    said: list[str] = []
    short = Sampling(temperature=0.0, max_tokens=4)
    with pytest.raises(Failure, match="end within"):
        measure(TableTarget(7, order=2), [("ngram", 2)], [((1, 2, 3), (4, 5))] * 2, [1, 2], short, 4, progress=said.append)
    assert "no round of none at depth 0 could be timed at 1 concurrent" in "; ".join(said)


def test_a_drafter_that_ends_texts_at_once_has_no_cost_and_the_others_have() -> None:
    """It is so deep that no text takes it five rounds."""
    target = TableTarget(3, order=1, seed=2, sharpness=50.0)
    texts = [((1, 2, 1, 2, 1, 2), (1, 2) * 6), ((2, 1, 2, 1), (2, 1) * 6)]
    costs, _ = measure(target, [("ngram", 16), ("ngram", 1)], texts, [1], Sampling(temperature=0.0, max_tokens=24), 4)
    assert {(one.drafter, one.depth) for one in costs} == {("none", 0), ("ngram", 1)}


def log_of(folder: Path) -> Path:
    log = folder / "log.jsonl"
    log.write_text("".join(json.dumps({"prompt_token_ids": [5, 6, 7, i + 8], "token_ids": [5, 6, 7, 8] * 6, "max_tokens": 24,
                                       "finish_reason": "length", "class": "ab"[i % 2]}) + "\n" for i in range(6)))
    return log


def test_the_command_times_the_engine(tiny_pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["advise", str(log_of(tmp_path)), "--target", str(tiny_pair[0]), "--drafter", "ngram", "--depth", "3",
                    "--concurrency", "1,2", "--rounds", "4", "--json"]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {(c["class"], c["concurrency"], c["drafter"]) for c in document["cells"]} == {
        (name, b, d) for name in ("a", "b", "all") for b in (1, 2) for d in ("ngram", "none")}
    assert all({"mid", "low", "high"} == set(c["expected_speedup"]) and c["reason"] for c in document["cells"])
    assert document["verdict"] and document["log"]["requests"] == 6
    assert all(entry["total"] == entry["logits"] + entry["target_cache"] for entry in document["memory"])


def test_the_command_reads_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    heard, curve, measured = tmp_path / "audition.json", tmp_path / "profile.json", tmp_path / "bench.json"
    assert command(["audition", str(log_of(tmp_path)), "--drafter", "ngram", "--depth", "4", "--json"]) == 0
    heard.write_text("a line before\n" + capsys.readouterr().out)
    curve.write_text(json.dumps({"curve": [{"rows": r, "context": 64, "batch": b, "seconds": {"median": t, "low": t, "high": t}}
                                           for b in (1, 64) for r, t in ((1, 1.0), (8, 1.0 + b / 8))]}))
    measured.write_text(json.dumps({"cells": [{"class": "all", "drafter": "ngram", "depth": "4", "concurrency": 1,
                                               "speedup": {"median": 4.0, "low": 4.0, "high": 4.0}}]}))
    arguments = ["advise", "--audition", str(heard), "--profile", str(curve), "--bench", str(measured)]
    assert command([*arguments, "--json"]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["thresholds"] == {"a": 1, "b": 1, "all": 1} and "compute-bound" in document["verdict"]
    assert document["check"]["judged"] == 1
    assert command(arguments) == 0
    said = capsys.readouterr().out
    assert document["overall"]["depths"] == {"1": 4, "64": 0} and "ngram, depth by concurrent requests 4 from 1 on, off from 64 on" in said
    assert document["overall"]["export"] == "draftproof export config --to vllm --drafter ngram --depth-by-batch 1:4,64:0" in said
    assert "Verdict: " in said and "a up to 1 concurrent, b up to 1 concurrent, all up to 1 concurrent" in said
    assert command(["advise", "--audition", str(heard)]) == 2 and "no LOG" in capsys.readouterr().err
    heard.write_text("nothing")
    assert command(arguments) == 1 and "no JSON document" in capsys.readouterr().err
    heard.write_text(measured.read_text())
    assert command(arguments) == 1 and f"{heard}: cell 1" in capsys.readouterr().err
