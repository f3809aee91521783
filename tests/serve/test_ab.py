"""An A/B comparison without a server: who is of which arm, percentiles and their bounds, stages and the rules that turn one back,
replays, and the watch over acceptance. False alarms are counted against what is promised, and planted faults must be found."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import product
from statistics import NormalDist

import numpy as np
import pytest

from draftproof.bench.quantiles import bounds, estimate, rate_bounds, ratio
from draftproof.config import AbConfig
from draftproof.core.tally import Tally
from draftproof.engine.port import Completion
from draftproof.errors import OptionError, SpecError
from draftproof.serve.ab import ALL, CANDIDATE, CONTROL, SAMPLE, Arm, Book, Outcome, Reservoir, arms_of, place
from draftproof.serve.drift import FIRST, Drift, quiet_run
from draftproof.serve.rollout import Rollout, Window, advance, breach, is_look
from draftproof.serve.shadow import JOBS, SIZE, TRIES, Job, Matches, Replays, Unreplayed, divergence, lasting
from draftproof.serve.versions import drafter_version, folder_mark
from draftproof.trace.events import RequestDone, RequestStarted, TraceStarted
from draftproof.trace.sinks import Memory
from draftproof.types import Sampling

# Who is of which arm


def test_arms_are_read_and_written_the_same() -> None:
    for text, candidate, control in [
        ("ngram vs off", Arm(CANDIDATE, "ngram"), Arm(CONTROL, "none")),
        ("ngram:min=1,max=2 depth=4 vs suffix+ngram depth=auto rule=ratio", Arm(CANDIDATE, "ngram:min=1,max=2", 4),
         Arm(CONTROL, "suffix+ngram", "auto", "ratio")),
        ("eagle3:/my  models/head  depth=0 vs none", Arm(CANDIDATE, "eagle3:/my  models/head", 0), Arm(CONTROL, "none")),
    ]:
        config = AbConfig(text)
        assert arms_of(config) == (candidate, control)
        assert arms_of(AbConfig(f"{candidate.text} vs {control.text}")) == (candidate, control)
    assert arms_of(AbConfig("ngram depth=2 vs off"))[0].wish == {"drafter": "ngram", "depth": 2}
    assert arms_of(AbConfig("ngram depth=2 vs off"))[1].wish == {"drafter": "none"} and Arm("served").wish is None
    assert AbConfig("ngram depth=2 vs ngram depth=6").drafters == ("ngram",) and AbConfig("off vs off").drafters == ()


@pytest.mark.parametrize(("given", "said"), [
    ({"arms": "ngram"}, "CANDIDATE vs CONTROL"), ({"arms": "a vs b vs c"}, "CANDIDATE vs CONTROL"), ({"arms": " vs off"}, "drafter spec"),
    ({"arms": "off depth=3 vs ngram"}, "or off"), ({"arms": "depth=3 vs off"}, "drafter spec"),
    ({"arms": "ngram depth=2 rule=match depth=8 vs off"}, "depth= twice; expected it once"),
    ({"share": 1.5}, "from 0 to 1"), ({"share": -0.1}, "from 0 to 1"),
    ({"stages": (0.5, 0.1)}, "rising"), ({"stages": (0.0, 0.1)}, "rising"), ({"stages": (0.1, 0.1)}, "rising"),
    ({"stages": (0.1,), "share": "shadow"}, "none with share shadow"), ({"minimum": 0}, "≥ 1"), ({"ratio": 1.0}, "> 1"),
    ({"errors": 1.0}, "below 1"), ({"alpha": 0.0}, r"in \(0, 1\)"), ({"replay": 2.0}, "from 0 to 1"), ({"wait_s": -1.0}, "≥ 0"),
])
def test_what_cannot_be_compared_is_said(given: dict[str, object], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        AbConfig(**{"arms": "ngram vs off", **given})  # type: ignore[arg-type]


@pytest.mark.parametrize(("arms", "error"), [("nonsense vs off", SpecError), ("ngram:min=x vs off", SpecError),
                                             ("ngram depth=-1 vs off", OptionError), ("ngram rule=fair vs off", OptionError)])
def test_specs_are_checked(arms: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        arms_of(AbConfig(arms))


def test_a_place_is_stable_even_and_nested() -> None:
    """Published places, so that a change of the hash does not move users unnoticed; evenness by χ² over 20 cells."""
    assert [round(place("x", "", "user", name), 12) for name in ("ada", "grace", "")] == PLACES
    places = [place("x", "tenant", "user", f"u{i}") for i in range(4000)]
    counts = np.histogram(places, 20, (0, 1))[0]
    assert float(((counts - 200) ** 2 / 200).sum()) < 43.8, "P = 0.001 at 19 degrees of freedom"
    assert {i for i, at in enumerate(places) if at < 0.1} < {i for i, at in enumerate(places) if at < 0.5}
    other = [place("y", "tenant", "user", f"u{i}") for i in range(4000)]
    assert abs(np.corrcoef(places, other)[0, 1]) < 0.06, "another experiment divides the users anew"
    assert place("x", "a", "b") != place("x", "ab", "") and place("x", "text", (1, 2), None) != place("x", "text", (12,), None)


PLACES = [0.650829695915, 0.490286508758, 0.504978051034]


def test_a_reservoir_is_a_fair_and_bounded_sample() -> None:
    hits = [0] * 50
    for seed in range(2000):
        reservoir = Reservoir(5, seed)
        for i in range(50):
            reservoir.add(float(i))
        assert len(reservoir.values) == 5 and reservoir.seen == 50
        for value in reservoir.values:
            hits[int(value)] += 1
    assert sum((count - 200) ** 2 / 200 for count in hits) < 85.4, "P = 0.001 at 49 degrees of freedom"


# Percentiles


@pytest.mark.parametrize(("n", "others", "share"), [(20, 20, 0.5), (50, 1000, 0.9), (400, 400, 0.99), (400, 1000, 0.99)])
def test_intervals_of_extreme_percentiles_hold_too(n: int, others: int, share: float) -> None:
    """1,000 samples of log-normal values; those of a bootstrap hold in 90 % at (50, 0.9) and in 91 % at (400, 0.99)."""
    rng, truth, times = np.random.default_rng(3), math.exp(NormalDist().inv_cdf(share)), 1000
    inside, ratios = 0, 0
    for _ in range(times):
        found = estimate(one := list(rng.lognormal(size=n)), share)
        over = ratio(one, list(rng.lognormal(size=others)), share)
        assert found is not None and found.low is not None and found.high is not None and found.low <= found.value <= found.high
        assert over is not None and over.low is not None and over.high is not None and over.low <= over.value <= over.high
        inside += found.low <= truth <= found.high
        ratios += over.low <= 1 <= over.high
    allowed = times * 0.95 - 3 * math.sqrt(times * 0.05 * 0.95)
    assert allowed <= inside < times and allowed <= ratios < times, (inside, ratios)


def test_an_end_that_nothing_bounds_is_open() -> None:
    few, many = estimate(list(range(10)), 0.99), estimate(list(range(400)), 0.99)
    assert few is not None and few.high is None and few.low is not None
    assert many is not None and many.high is not None and many.low is not None and many.low <= many.value <= many.high
    assert estimate([], 0.5) is None and ratio([], [1.0], 0.5) is None and ratio([1.0], [0.0], 0.5) is None


def test_intervals_and_bounds_hold_as_often_as_they_say() -> None:
    """300 samples of 60 log-normal values each: their 90th percentile is known."""
    rng, truth = random.Random(7), math.exp(1.2815515655446004)
    inside, beyond, ratios = 0, [0, 0], 0
    for _ in range(300):
        one, two = ([rng.lognormvariate(0, 1) for _ in range(60)] for _ in range(2))
        found, over = estimate(one, 0.9), ratio(one, two, 0.9)
        assert found is not None and found.low is not None and found.high is not None and over is not None
        assert over.low is not None and over.high is not None
        inside += found.low <= truth <= found.high
        ratios += over.low <= 1 <= over.high
        low, high = bounds(sorted(one), 0.9, 0.05)
        beyond[0] += low > truth
        beyond[1] += high < truth
    assert 0.88 < inside / 300 < 0.99 and 0.90 < ratios / 300, (inside, ratios)
    assert max(beyond) <= 300 * 0.05 + 3 * math.sqrt(300 * 0.05 * 0.95) and min(beyond) > 0, beyond
    assert bounds([1.0, 2.0], 0.9, 0.001) == (-math.inf, math.inf)


def test_rates_are_bounded_by_the_binomial() -> None:
    def tail(n: int, p: float, least: int) -> float:
        return sum(math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(least, n + 1))

    for n, hits, alpha in product((1, 8, 30), (0, 1, 5, 30), (0.1, 0.001)):
        if hits > n:
            continue
        low, high = rate_bounds(hits, n, alpha)
        assert 0 <= low <= hits / n <= high <= 1
        assert not low or tail(n, low, hits) <= alpha * 1.0001
        assert high == 1 or 1 - tail(n, high, hits + 1) <= alpha * 1.0001
    assert rate_bounds(0, 0, 0.1) == (0.0, 1.0)


# Stages


def config(**more: object) -> AbConfig:
    return AbConfig(**{"arms": "ngram vs off", "stages": (0.01, 0.1, 0.5), "minimum": 50, "wait_s": 10.0, **more})  # type: ignore[arg-type]


def test_every_step_of_a_roll_out() -> None:
    """All states × enough or not × a breach or not × time: it moves only as it should, and one stage at a time."""
    start = Rollout.of(config(), 0.0)
    states = [start, replace(start, at=1), replace(start, at=2), replace(start, at=2, state="holding"), replace(start, state="returned"),
              replace(start, state="ended"), Rollout.of(config(stages=(), share=0.3), 0.0),
              Rollout.of(config(stages=(), share="shadow"), 0.0), Rollout.of(None, 0.0)]
    for before, enough, wrong, now in product(states, (False, True), (None, "slow"), (5.0, 15.0)):
        after = advance(before, now, enough, wrong, 10.0)
        if before.state not in ("running", "holding"):
            assert after == before
        elif wrong:
            assert after.state == "returned" and after.share == 0 and "slow" in after.reason and after.since_s == now
        elif before.state == "holding" or not enough or now < 10:
            assert after == before
        elif before.at == 2:
            assert after.state == "holding" and after.share == 0.5
        else:
            assert after.state == "running" and after.at == before.at + 1 and after.share > before.share
    assert [state.share for state in states] == [0.01, 0.1, 0.5, 0.5, 0, 0, 0.3, 0, 0]
    assert [state.live for state in states] == [True] * 5 + [False, True, True, False]


def test_looks_are_few() -> None:
    assert [n for n in range(200) if is_look(n)] == [8, 16, 32, 64, 128]


def outcome(rng: random.Random, slower: float = 1.0, failing: float = 0.0) -> Outcome:
    if rng.random() < failing:
        return Outcome(failed=True)
    return Outcome(ttft_s=rng.lognormvariate(-2, 0.5) * slower, tpot_s=rng.lognormvariate(-4, 0.3) * slower,
                   e2e_s=rng.lognormvariate(0, 1) * slower)


def until_breach(limits: AbConfig, seed: int, requests: int, classes: int = 3, only: str | None = None, **fault: float) -> int | None:
    """Requests of the candidate before a rule was broken; only: the class that has the fault."""
    rng, window = random.Random(seed), Window(limits, classes)
    for count in range(1, requests + 1):
        name = f"c{rng.randrange(classes)}"
        assert window.add(CONTROL, name, outcome(rng)) is None
        if window.add(CANDIDATE, name, outcome(rng, **(fault if only in (None, name) else {}))) is not None:
            return count
    return None


def test_a_harmless_candidate_is_turned_back_no_oftener_than_promised() -> None:
    """Promised: alpha of roll-outs, so alpha/stages of stages, whatever the law of the times. Here alpha is large, to be seen at all."""
    limits = config(alpha=0.9, ratio=1.0001, errors=0.0, stages=(0.5,))
    wrong = sum(until_breach(limits, seed, 128, failing=0.1) is not None for seed in range(60))
    assert 0 < wrong <= 12 < 60 * 0.9, f"{wrong} of 60: rules that never err would never be broken, and bounds are on the safe side"


def test_a_harmful_candidate_is_found_and_the_worse_the_sooner() -> None:
    limits = config(alpha=0.01)
    assert all(until_breach(limits, seed, 64, slower=4.0) in (16, 32, 64) for seed in range(5))
    assert all(until_breach(limits, seed, 256, slower=2.0) is not None for seed in range(5))
    assert all(until_breach(limits, seed, 32, failing=1.0) in (8, 16, 32) for seed in range(5))
    assert all(until_breach(limits, seed, 1024, failing=0.2) is not None for seed in range(3))
    found = until_breach(limits, 3, 1024, only="c1", slower=5.0)
    assert found is not None, "a class of its own"


def test_rules_name_what_was_found() -> None:
    rng, book = random.Random(2), Book()
    for _ in range(200):
        book.add(CONTROL, "c", outcome(rng))
        book.add(CANDIDATE, "c", outcome(rng, slower=3.0))
    said = breach(book.cell(CANDIDATE), book.cell(CONTROL), config(), 0.01)
    assert said is not None and said.startswith("ttft p50 is at least 2.") and "(200 and 200 requests); 1.25 × is allowed" in said
    assert breach(book.cell(CONTROL), book.cell(CANDIDATE), config(), 0.01) is None, "being faster is allowed"
    assert breach(book.cell(CANDIDATE), book.cell(CONTROL), config(ratio=10.0), 0.01) is None
    for _ in range(60):
        book.add(CANDIDATE, "c", Outcome(failed=True))
    said = breach(book.cell(CANDIDATE), book.cell(CONTROL), config(), 0.01)
    assert said == "60 of 260 requests failed, 0 of control's 200; 0.01 more are allowed"
    assert len(book.cell(CANDIDATE).times["ttft_s"].values) == 200, "what failed has no times"


def test_texts_that_differ() -> None:
    """Where the load showed that texts do not depend on speculation, one is too many; elsewhere it must be more than chance."""
    assert Window(config(), 3).identity(0, 0, exact=True) is None and Window(config(), 3).identity(0, 5, exact=True) is None
    assert "1 texts were written differently by the candidate" in str(Window(config(), 3).identity(1, 0, exact=True))
    fair, rng, wrong = config(alpha=0.5), random.Random(3), 0
    for _ in range(200):
        window, gained, lost = Window(fair, 3), 0, 0
        for _ in range(64):
            gained, lost = (gained + 1, lost) if rng.random() < 0.5 else (gained, lost + 1)
            wrong += window.identity(gained, lost, exact=False) is not None
    assert wrong <= 200 * 0.5
    window = Window(config(), 3)
    assert any(window.identity(count, 0, exact=False) for count in range(1, 65)), "64 to none are no accident"


# Replays


def job(texts: tuple[tuple[int, ...], ...] = ((1, 2, 3),), **more: object) -> Job:
    return Job(**{"prompt": "ab", "sampling": Sampling(seed=1), "prompt_class": "c", "tenant": "", "texts": texts,  # type: ignore[arg-type]
                  "lasting": True, **more})


def test_replays_turn_their_order_and_are_bounded() -> None:
    replays = Replays()
    assert all(replays.offer(job()) for _ in range(JOBS)) and not replays.offer(job()) and replays.counts["skipped"] == 1
    firsts = [one.next for _ in range(10) if (one := replays.take())]
    assert firsts == [CONTROL, CANDIDATE] * 5 and replays.waiting == JOBS - 10
    big = Replays()
    assert [big.offer(job((tuple(range(size)),))) for size in (SIZE, SIZE - 10, 20)] == [False, True, False]
    replays.clear()
    assert replays.waiting == 0 and replays.take() is None


def test_a_replay_that_is_interrupted_begins_anew_a_few_times() -> None:
    replays = Replays()
    replays.offer(job())
    for _ in range(TRIES):
        one = replays.take()
        assert one is not None
        one.replayed[CONTROL] = ((1,),), True, Outcome()
        replays.interrupted(one)
        assert not one.replayed
    assert replays.take() is None and replays.counts["interrupted"] == TRIES


def test_what_differs_is_told_from_what_differs_anyway() -> None:
    assert divergence(((1, 2, 3),), ((1, 2, 3),)) is None and divergence(((1, 2, 3),), ((1, 9, 3),)) == 1
    assert divergence(((1, 2), (5, 6)), ((1, 2, 3), (5, 7))) == 1 and divergence(((1, 2),), ((1,),)) == 1
    matches, same, other = Matches(), ((1, 2, 3),), ((1, 2, 4),)
    for mine, theirs in product((same, other), repeat=2):
        one = job()
        one.replayed = {CANDIDATE: (mine, True, Outcome(ttft_s=0.1, tpot_s=0.02, e2e_s=1.0)),
                        CONTROL: (theirs, True, Outcome(ttft_s=0.1, tpot_s=0.01, e2e_s=2.0))}
        matches.add(one)
    assert (matches.compared, matches.identical, matches.gained, matches.lost, matches.both, matches.first) == (4, 1, 1, 1, 1, 2)
    assert matches.ratios["tpot_s"].values == [2.0] * 4 and matches.ratios["e2e_s"].values == [0.5] * 4
    for part in ("job", CANDIDATE, CONTROL):
        one = job(lasting=part != "job")
        one.replayed = {arm: (other, part != arm, Outcome()) for arm in (CANDIDATE, CONTROL)}
        matches.add(one)
    assert matches.incomparable == 3 and matches.compared == 4


def test_which_texts_follow_from_their_seed() -> None:
    def done(rule: str, drafted: int) -> Completion:
        return Completion("", (), 1, "stop", 1, 0, {"drafted": drafted}, {"rule": rule})

    assert lasting([done("match", 5)], False) and lasting([done("ratio", 0)], False) and lasting([done("ratio", 5)], True)
    assert not lasting([done("ratio", 5)], False) and not lasting([done("match", 5), done("block", 1)], False)
    assert lasting([done("lossy-typical", 5)], False), "or its texts would not be compared"


def test_replays_are_not_told_to_others() -> None:
    memory = Memory()
    sink = Unreplayed(memory)
    for name, kind in (("r0", "code"), ("r1", "(replay)"), ("r2", None)):
        sink.write(RequestStarted(name, 0.0, 3, 0, {}, 1, 0, kind))
    for name in ("r0", "r1", "r2", "r9"):
        sink.write(RequestDone(name, 1.0, "stop", 3, {}))
    assert [event.request for event in memory.events] == ["r0", "r2", "r0", "r2", "r9"]  # type: ignore[union-attr]
    sink.write(RequestStarted("r3", 0.0, 3, 0, {}, 1, 0, "(replay)"))
    sink.write(TraceStarted(1, "t", "none", "match", "auto"))
    sink.write(RequestDone("r3", 1.0, "stop", 3, {}))
    assert len(memory.events) == 7, "another engine has other requests of that name"


# Acceptance against its own past


@pytest.mark.parametrize("law", ["normal", "beta", "thirds", "coin"])
def test_false_alarms_are_as_seldom_as_said_whatever_the_law(law: str) -> None:
    """With a low limit, so that there are some: 169 requests between them, ± 30 % (about 100 alarms; their spread is 10 %)."""
    rng = random.Random(5)
    draw = {"normal": lambda: rng.gauss(0, 1), "beta": lambda: rng.betavariate(8, 2), "thirds": lambda: rng.choice((0.0, 0.5, 1.0)),
            "coin": lambda: float(rng.random() < 0.9)}[law]
    drift, judged = Drift(limit=4.0), 0
    for _ in range(22000):
        judged += drift.settled
        drift.add(draw())
    assert quiet_run(4.0) == pytest.approx(169, abs=1) and quiet_run(10.0) > 70000
    assert 0.7 < judged / drift.alarms / quiet_run(4.0) < 1.3, (judged, drift.alarms)


@pytest.mark.parametrize(("shift", "within"), [(-1.0, 90), (1.0, 90), (-2.0, 15), (3.0, 9)])
def test_a_change_is_noticed_and_named(shift: float, within: int) -> None:
    for seed in range(20):
        rng, drift = random.Random(seed), Drift(seed=seed)
        assert not any(drift.add(rng.gauss(10, 1)) for _ in range(300))
        delay, alarm = next((i, alarm) for i in range(1, within + 1) if (alarm := drift.add(rng.gauss(10 + shift, 1))))
        assert alarm.direction == ("fell" if shift < 0 else "rose") and (alarm.since - alarm.before) * shift > 0
        assert alarm.at == 300 + delay and drift.alarms == 1 and not drift.settled
        assert not any(drift.add(rng.gauss(10 + shift, 1)) for _ in range(300)), "what it is now is the new baseline"
        assert drift.settled and drift.baseline is not None and abs(drift.baseline - 10 - shift) < 0.3


def test_nothing_is_judged_by_a_baseline_that_is_too_short() -> None:
    drift = Drift()
    assert all(drift.add(value) is None for value in [1.0] * (FIRST - 1) + [0.0]) and drift.settled and drift.seen == FIRST


# Versions


def test_a_folder_has_another_mark_when_its_contents_change(tmp_path) -> None:  # type: ignore[no-untyped-def]
    folder = tmp_path / "head"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"1" * 5_000_000)
    folder_mark.cache_clear()
    before = drafter_version(f"eagle3:{folder}+ngram")
    assert before.startswith(f"eagle3:{folder}+ngram (") and drafter_version("ngram") == "ngram" and drafter_version(None) != "none"
    (folder / "model.safetensors").write_bytes(b"1" * 4_999_999 + b"2")
    folder_mark.cache_clear()
    assert drafter_version(f"eagle3:{folder}+ngram") != before
    assert folder_mark(str(tmp_path / "nowhere")) == ""


def test_first_guesses_do_not_depend_on_the_depth() -> None:
    shallow, deep = Tally(), Tally()
    for tally, depth in ((shallow, 1), (deep, 5)):
        tally.prefill()
        for i in range(10):
            stood = 0 if i % 2 else depth
            tally.round(depth, stood, int(not stood), stood + 1)
    assert Outcome(tally=shallow).first_guess == Outcome(tally=deep).first_guess == 0.5 and Outcome().first_guess is None
    assert shallow.draft_utilisation == deep.draft_utilisation and SAMPLE >= 1000 and ALL == "all"
