"""The controller in worlds whose best answer is known: what it loses against plain decoding and against the best fixed depth, and
that it never costs a token. No clock: seconds are computed."""

from __future__ import annotations

import itertools
import math
import random
from types import SimpleNamespace
from typing import Any

import pytest
from engine.engine_support import OPTIONS, alone, check_counts, foresight, table
from engine.worlds import Always, Arm, World, best_fixed, flat, pass_seconds

from draftproof import Engine, EngineConfig, Sampling
from draftproof.drafters.chain import ChainDrafter
from draftproof.drafters.fixed import AlwaysWrong, Oracle
from draftproof.drafters.ngram import NgramDrafter
from draftproof.engine import control as control_module
from draftproof.engine.control import AutoDepth, Choice
from draftproof.engine.costs import DraftCosts, PassCosts
from draftproof.engine.plans import Plan, Scene, reaching
from draftproof.engine.survival import Hazards, Kind, Survival

CHEAP, DEAR = Arm(call=0.002, level=0.0, token=0.001, lag=0.0, has=0.25), Arm(call=0.05, level=0.25, token=0.02, lag=0.004)
CLASSES = {"a": (0.05,), "b": (0.9,), "c": (0.5, 0.6)}


@pytest.fixture(autouse=True)
def _still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Worlds have a clock of their own: on it a plan takes nothing, however busy the machine is that runs the test."""
    monkeypatch.setattr(control_module, "perf_counter", lambda: 0.0)


def by_class(arm: str, kind: str, at: int) -> tuple[float, ...]:
    return CLASSES[kind]


def drifting(arm: str, kind: str, at: int) -> tuple[float, ...]:
    return (0.9,) if at // 300 % 2 else (0.03,)


WORLDS: dict[str, tuple[dict[str, Any], float, float]] = {      # settings, least auto / off, least auto / best fixed depth
    "always wrong": (dict(chance=flat(0.0)), 0.98, 0.98),
    "always wrong, 16": (dict(chance=flat(0.0), batch=16), 0.98, 0.98),
    "always wrong and dear, 16": (dict(chance=flat(0.0), batch=16, arms={"": DEAR}), 0.98, 0.98),
    "perfect": (dict(chance=flat(1.0)), 4.5, 0.98),
    "perfect, 16": (dict(chance=flat(1.0), batch=16), 3.0, 0.97),
    "middling": (dict(chance=flat(0.6)), 1.4, 0.97),
    "middling, 16": (dict(chance=flat(0.6), batch=16), 1.2, 0.97),
    "hardly worth it": (dict(chance=flat(0.2), arms={"": Arm(level=0.17)}), 0.98, 0.97),
    "mixed classes": (dict(chance=by_class, classes=("a", "b", "c")), 1.3, 1.05),
    "mixed classes, 16": (dict(chance=by_class, classes=("a", "b", "c"), batch=16), 1.1, 1.0),
    "rows are dear beyond 24, 16": (dict(chance=flat(0.7), batch=16, knee=24), 1.03, 1.03),
    "rows are dear beyond 8, 4": (dict(chance=flat(0.7), batch=4, knee=8), 1.3, 0.97),
    "drifts": (dict(chance=drifting), 1.4, 1.1),
    "seldom a guess, 16": (dict(chance=flat(0.9, 0.8), batch=16, arms={"": CHEAP}), 1.2, 0.95),
}


@pytest.mark.parametrize("noise", [0.0, 0.15])
@pytest.mark.parametrize("name", WORLDS)
def test_regret(name: str, noise: float) -> None:
    settings, least, least_of_best = WORLDS[name]
    rounds = 900 if settings.get("batch", 1) == 1 else 200
    off, best = best_fixed(rounds, depths=(0, 1, 2, 4, 8), **settings)
    world = World(noise=noise, **settings)
    control = world.auto()
    first = world.rate(control, 60)
    found = world.rate(control, rounds)
    assert first > 0.9 * off, "the beginning: a few first trials, and not of all texts at once"
    assert found > least * off, f"{found / off:.3f} of plain decoding"
    assert found > least_of_best * best, f"{found / best:.3f} of the best fixed depth"


@pytest.mark.parametrize(("batch", "knee"), [(1, math.inf), (1, 5), (1, 9), (4, 12), (8, 64)])
@pytest.mark.parametrize("level", [0.02, 0.1])
def test_a_tree_has_as_many_nodes_as_are_worth_their_rows(batch: int, knee: float, level: float) -> None:
    """Close to trees of the size and depth that are best in hindsight; a tree of all its nodes would often lose to plain decoding."""
    settings: dict[str, Any] = dict(batch=batch, knee=knee, arms={"": Arm(level=level, token=0.001)}, depth=6)
    rounds = 900 if batch == 1 else 250
    off = World(**settings).rate(Always(0), rounds)
    fixed = {(depth, nodes): World(tree=nodes, **settings).rate(Always(depth), rounds)
             for depth in (1, 2, 3, 4, 6) for nodes in (2, 4, 6, 8, 12, 24)}
    world = World(tree=24, noise=0.1, **settings)
    control = world.auto()
    world.play(control, 100)
    found = world.rate(control, rounds)
    assert found > 0.9 * max(fixed.values()) > off
    assert control.arms[0].share < 0.5


@pytest.mark.parametrize("seed", [4, 7])
def test_levels_that_no_tree_can_keep_are_not_grown(seed: int) -> None:
    """Two nodes each are worth their rows, so two levels are; a drafter takes a tenth of a pass for every level that it is granted."""
    world = World(batch=4, knee=12, arms={"": Arm(level=0.1, token=0.001)}, depth=6, tree=24, noise=0.1, seed=seed)
    control = world.auto()
    world.play(control, 100)
    depths = [depth for chosen in world.play(control, 100) for depth in chosen]
    assert 1 < sum(depths) / len(depths) < 3


@pytest.mark.parametrize(("gain", "depth"), [(1.005, 1), (1.02, 2)])
def test_a_level_more_must_win_by_more_than_its_gain_is_unsure(gain: float, depth: int) -> None:
    control, plain = AutoDepth(2, 8), Plan(None, [0], 1, 1.0, [[]])
    scene = Scene([SimpleNamespace()], [10], 1, [1.0] * 9, plain)  # type: ignore[list-item]
    levels = [0.0, 0.0, 2.3 / (1.8 * gain) - 1]               # seconds, with which two levels give `gain` times the rate of one
    depths, rate = control._best_tree(control.arms[0], scene, [[0.8, 0.5]], levels, scene.score)
    assert depths == [depth] and rate == pytest.approx(1.8 * (gain if depth == 2 else 1))


@pytest.mark.parametrize(("held", "one", "two", "best"), [
    (None, 1.01, 0.9, None), (None, 1.03, 0.9, "one"), ("one", 1.01, 0.9, "one"), ("one", 0.99, 0.9, None),      # to begin, go on, stop
    ("one", 1.1, 1.11, "one"), ("one", 1.1, 1.14, "two"), ("two", 1.1, 1.09, "two"), ("two", 1.1, 1.0, "one"), (None, 1.1, 1.11, "one")])
def test_to_begin_or_to_change_takes_a_gain_that_shows_and_to_go_on_takes_none(held: str | None, one: float, two: float, best: str | None,
                                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    control, rates = AutoDepth(2, parts=("one", "two")), {None: 0.5, "one": one, "two": two}
    arms = {arm.name: arm for arm in control.arms}
    monkeypatch.setattr(AutoDepth, "tried", True)
    monkeypatch.setattr(control, "_of", lambda arm, scene: Plan(arm, [1], rates[arm.name], 1.0, [[0.5]]))
    scene = Scene([SimpleNamespace()], [10], 1, [1.0] * 3, Plan(None, [0], 1, 1.0, [[]]))  # type: ignore[list-item]
    found = control._best(scene, arms[held] if held else None)
    assert (found.arm.name if found.arm else None) == best


@pytest.mark.parametrize("batch", [1, 8])
def test_a_chain_is_as_long_as_its_guesses_are_worth_their_rows(batch: int) -> None:
    """In a third of the rounds nearly all of a copy stands, in the others hardly any of it, and only the drafter knows which they are."""
    settings: dict[str, Any] = dict(even=True, knee=1.0, batch=batch, noise=0.1, arms={"": Arm(0.02, 0, 0.001, 0)})
    rounds = 600 if batch == 1 else 150
    off, best = best_fixed(rounds, depths=(0, 1, 2, 3, 4, 6, 8, 12), **settings)
    rates = []
    for prices in (False, True):
        world = World(**settings)
        control = world.auto(prices=prices)
        world.play(control, 100)
        rates.append(world.rate(control, rounds))
    assert rates[1] > 1.1 * max(rates[0], best) and best >= off, (off, best, rates)


def test_texts_that_join_a_plan_have_prices() -> None:
    """They are those of the texts that it was made for, as long as it lasts; a drafter that takes none has none."""
    for prices in (False, True):
        world = World(batch=8, arms={"": Arm(0.02, 0, 0.001, 0)}, chance=flat(0.9), length=1000)
        control = world.auto(prices=prices)
        world.play(control, 100)
        while not control.holds and control.rounds < 200:
            world.play(control, 1)
        assert control.holds
        control._due, rooms = control.rounds + 1, [50] * 8
        old = control.depths(world.live, rooms, world.live)
        world.live[3] = world._fresh()
        new = control.depths(world.live, rooms, world.live)
        assert new[:3] == old[:3] and new[4:] == old[4:], "the plan goes on"
        assert all(bool(choice.prices) == prices for choice in new if choice.depth) and new[3].depth
        if prices:
            assert new[3].prices == pytest.approx(old[2].prices, rel=0.35)


def test_nodes_of_a_drafter_that_nobody_has_timed_cost_their_rows_alone() -> None:
    world = World(tree=8, depth=4)
    control = world.auto()
    choice, = control.depths(world.live, [50], world.live)
    plain, *more = control.passes.curve(1, len(world.live[0].tokens), 9)
    assert "probe" in choice.reason and choice.prices == pytest.approx([(seconds - plain) / plain for seconds in more])


@pytest.mark.parametrize("batch", [1, 8])
def test_of_a_chain_the_part_that_pays_is_asked(batch: int) -> None:
    """A knows something a third of the time and costs nothing; B is good and dear: A alone is best. Where B is cheap, both."""
    chances = {"A+B": (0.7, 0.65), "A": (0.9, 0.8), "B": (0.6,)}
    dear = {"A+B": Arm(0.03, 0.15, 0.01, 0.003), "A": Arm(0.002, 0, 0.001, 0, has=0.3), "B": Arm(0.03, 0.2, 0.01, 0.003)}
    settings: dict[str, Any] = dict(chance=lambda arm, kind, at: chances[arm], arms=dear, batch=batch, noise=0.1)
    rounds = 900 if batch == 1 else 250
    off, best = best_fixed(rounds, list(dear), depths=(0, 2, 4, 8), **settings)
    world = World(**settings)
    control = world.auto()
    world.play(control, 60)
    assert world.rate(control, rounds) > 0.96 * best > 1.3 * off
    assert control._plan is not None and control._plan.arm is not None and control._plan.arm.name == "A"
    cheap = dict(dear, **{"A+B": Arm(0.003, 0.01, 0.001, 0)})
    world = World(**{**settings, "arms": cheap})
    control = world.auto()
    world.play(control, 300)
    assert control._plan is not None and control._plan.arm is not None and control._plan.arm.name is None
    assert {choice.drafter for choice in control._choices} == {None}


@pytest.mark.parametrize("chance", [0.85, 0.6])
def test_plans_that_take_long_are_made_seldom(chance: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan takes half a pass or more: rounds of half a millisecond lost a tenth of their time to plans and to learning for them."""
    plans, rates = [], []
    for seconds in (0.0, 0.6):
        ticks = itertools.count()
        monkeypatch.setattr(control_module, "perf_counter", lambda seconds=seconds, ticks=ticks: seconds * next(ticks))
        world = World(chance=flat(chance), noise=0.1, length=800)
        control, made = world.auto(), [0]

        def counted(*told: Any, best: Any = control._best, made: list[int] = made) -> Any:
            made[0] += 1
            return best(*told)

        monkeypatch.setattr(control, "_best", counted)
        world.play(control, 100)
        made[0] = 0
        rates.append(world.rate(control, 600))
        plans.append(made[0])
    assert plans[1] < 0.7 * plans[0], plans
    assert rates[1] > 0.97 * rates[0]


def test_texts_that_come_join_the_plan_where_plans_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan takes a fifth of a pass, and every second round a text ends and another comes."""
    plans, rates, early = [], [], []
    for seconds in (0.0, 0.4):
        ticks = itertools.count()
        monkeypatch.setattr(control_module, "perf_counter", lambda seconds=seconds, ticks=ticks: seconds * next(ticks))
        world = World(chance=by_class, classes=("a", "b", "c"), batch=16, length=64, prompt=20)
        control, made, ages = world.auto(), [0], dict[str, int]()

        def counted(*told: Any, best: Any = control._best, made: list[int] = made) -> Any:
            made[0] += 1
            return best(*told)

        monkeypatch.setattr(control, "_best", counted)
        world.play(control, 100)
        made[0], start, got = 0, (world.seconds, world.tokens), []
        for _ in range(300):
            texts = list(world.live)
            for one, depth in zip(texts, world.play(control, 1)[0], strict=True):
                ages[one.id] = ages.get(one.id, -1) + 1
                if ages[one.id] < 4 and one.prompt_class == "b":
                    got.append(depth)
        plans.append(made[0])
        early.append(sum(got) / len(got))
        rates.append((world.tokens - start[1]) / (world.seconds - start[0]))
    assert plans[1] < 0.3 * plans[0], plans
    assert early[1] > 0.8 * early[0], f"texts of a kind whose guesses stand are guessed from the start: {early}"
    assert rates[1] > 0.97 * rates[0], rates


@pytest.mark.parametrize(("level", "seldom"), [(0.5, True), (0.005, False)])
def test_what_is_far_from_paying_is_planned_for_seldom(level: float, seldom: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan takes a third of a pass. Between two trials of a drafter that loses much nothing is learnt; one that nearly pays may pay as
    soon as the text has grown."""
    ticks = itertools.count()
    monkeypatch.setattr(control_module, "perf_counter", lambda: 0.3 * next(ticks))
    world = World(chance=flat(0.02), arms={"": Arm(level=level)}, length=1000)
    control, plans, seen = world.auto(), list[int](), [0]

    def counted(*told: Any, best: Any = control._best) -> Any:
        plans.append(control.rounds)
        return best(*told)

    def noted(*told: Any, learn: Any = control._learn) -> Any:
        seen[0] += 1
        return learn(*told)

    monkeypatch.setattr(control, "_best", counted)
    monkeypatch.setattr(control, "_learn", noted)
    world.play(control, 100)
    plans.clear()
    seen[0] = 0
    world.play(control, 700)
    longest = max(later - plan for plan, later in itertools.pairwise(plans))
    assert (longest > 64) == seldom and longest <= (128 if seldom else 32), plans
    assert seen[0] < 300, "what a plan learns from are the last rounds before it"


@pytest.mark.parametrize("seed", [1, 9])
def test_a_plain_pass_right_after_guesses_is_not_what_plain_decoding_takes(seed: int) -> None:
    """The first plain passes after guesses take 15 % longer: judged by them, guesses that lose 7 % would seem to pay."""
    settings = dict(chance=flat(0.3), batch=16, arms={"": Arm(level=0.3, token=0.01)}, linger=0.15, noise=0.1)
    off, world = World(**settings).rate(Always(0), 200), World(seed=seed, **settings)
    control = world.auto()
    world.play(control, 60)
    assert world.rate(control, 400) > 0.96 * off


def test_levels_that_are_seldom_there_cost_seldom() -> None:
    """The deepest of some chains has a k-th level where any of them has; a tree grows all levels where there is any."""
    assert reaching([[0.9, 0.5, 0.1]], False) == [0.9, 0.5, 0.1]
    assert reaching([[0.9, 0.5, 0.1], [0.5]], False) == pytest.approx([0.95, 0.5, 0.1])
    assert reaching([[0.9, 0.5, 0.1]], True) == [0.9, 0.9, 0.9]
    assert reaching([[0.9, 0.5, 0.1], [0.5], []], True) == pytest.approx([0.95, 0.9, 0.9])
    assert all(list(reaching(none, whole)) == [] for none in ([[], []], [[]]) for whole in (False, True))


@pytest.mark.parametrize(("has", "timed"), [(1.0, True), (0.6, False)])
def test_a_pass_without_guesses_is_timed_where_there_is_none_anyway(has: float, timed: bool) -> None:
    """Rounds in which a drafter has no guess show what a plain pass takes; one in seventy-five was given away for it."""
    world = World(chance=flat(0.8), arms={"": Arm(level=0.01, has=has)}, noise=0.1)
    control = world.auto()
    world.play(control, 400)
    reasons = []
    for _ in range(400):
        world.play(control, 1)
        reasons.append(control._trial is not None and control._trial.arm is None)
    assert any(reasons) == timed


def test_what_is_off_is_asked_seldom_and_comes_back() -> None:
    world = World(chance=lambda arm, kind, at: (0.95,) if at >= 400 else (0.0,), arms={"": Arm(level=0.3)})
    control = world.auto()
    world.play(control, 60)
    before, asked = world.seconds, world.asked
    world.play(control, 300)
    assert 2 <= world.asked - asked <= 0.01 * (world.seconds - before) / 0.3 + 2, "a hundredth of the time"
    back = world.play(control, 400)
    late = [sum(depths) for depths in back[-100:]]
    assert sum(depth >= 3 for depth in late) > 90


def test_a_load_pays_for_its_own_trials() -> None:
    """Of short texts, sixteen and then one at a time in turn, that a drafter would have to read first, and which it guesses wrongly: a
    hundredth of the sixteen's time is many trials of the one's."""
    def played(auto: bool) -> tuple[float, int]:
        world, alone = World(chance=flat(0.0), batch=16, arms={"": Arm(level=0.3, lag=0.02)}), [0.0, 0]
        control = world.auto() if auto else Always(0)
        world.play(control, 60)
        for batch in (16, 1) * 20:
            for seq in world.live:
                control.forget(seq)
            world.batch, world.live = batch, [world._fresh() for _ in range(batch)]
            before, asked = world.seconds, world.asked
            world.play(control, 90)
            alone = [alone[0] + world.seconds - before, alone[1] + world.asked - asked] if batch == 1 else alone
        return alone[0], int(alone[1])

    (off, _), (taken, asked) = played(False), played(True)
    assert asked >= 3, "it is asked, too"
    assert off / taken > 0.98


def test_a_plain_round_that_is_said_to_be_followed_by_another_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same texts: a pass is begun early on that word."""
    world, said = World(chance=flat(0.1), batch=2, length=400), list[bool]()
    control = world.auto()
    learn = control.learn
    monkeypatch.setattr(control, "learn", lambda *about: (said.append(control.stays), learn(*about)))
    before, kept = (), 0
    for _ in range(500):
        texts, (depths,) = tuple(one.id for one in world.live), world.play(control, 1)
        if before == (texts, True):
            assert not any(depths)
            kept += 1
        before = texts, said[-1] and not any(depths)
    assert 300 < kept < 500


def test_of_a_crowd_only_some_are_asked_in_a_trial() -> None:
    world = World(chance=flat(0.0), batch=16)
    control = world.auto()
    for depths in world.play(control, 100):
        assert sum(depth > 0 for depth in depths) <= 4


def test_texts_that_would_have_to_be_read_first_are_left_out_where_that_does_not_pay_off() -> None:
    """Reading a prompt takes as long as ten passes; an answer of 12 tokens cannot save so much, one of 400 can."""
    short = World(chance=flat(0.7), arms={"": Arm(level=0.05, lag=0.05)}, prompt=200, length=12)
    long = World(chance=flat(0.7), arms={"": Arm(level=0.05, lag=0.05)}, prompt=200, length=400)
    for world in (short, long):
        control = world.auto()
        world.play(control, 150)
        before = world.asked
        world.play(control, 300)
        assert world.asked - before < 20 if world is short else world.asked - before > 200
    off, _ = best_fixed(450, depths=(0,), chance=flat(0.7), prompt=200, length=12)
    assert short.tokens / short.seconds > 0.9 * off


def test_every_decision_has_a_reason() -> None:
    world = World(chance=by_class, classes=("a", "b", "c"), batch=6)
    control = world.auto()
    reasons = set()
    for _ in range(300):
        world.play(control, 1)
        reasons |= {choice.reason for choice in control._choices}
    assert any("tokens expected" in r and "× the plain rate" in r for r in reasons)
    assert any("too few of this text's guesses stand" in r for r in reasons) and any("tried first" in r for r in reasons)
    assert not any("None" in r for r in reasons), "a drafter that is no chain has no parts to name"


def test_below_the_least_acceptance_nothing_is_drafted() -> None:
    world = World(chance=flat(0.4), arms={"": Arm(level=0.01)})
    free, bound = world.auto(), World(chance=flat(0.4), arms={"": Arm(level=0.01)})
    control = bound.auto(least=0.6)
    world.play(free, 200)
    bound.play(control, 200)
    assert world.asked > 150 and bound.asked < 100
    assert any("least_acceptance is 60%" in choice.reason for choice in control._choices)


def test_a_plain_pass_is_timed_again_while_guessing_pays() -> None:
    world = World(chance=flat(0.8))
    control = world.auto()
    world.play(control, 60)
    zero = [at for at, depths in enumerate(world.play(control, 500)) if depths == [0] and len(world.live[0].tokens) < 190]
    assert 2 <= len(zero) <= 12


@pytest.mark.parametrize("name", ["middling", "perfect, 16", "mixed classes", "drifts", "seldom a guess, 16"])
def test_what_waits_is_taken_in_as_if_it_had_not_waited(name: str) -> None:
    """Measurements that wait for the next plan against those taken in round by round: the same decisions, bit for bit."""
    lazy, eager = (World(noise=0.15, **WORLDS[name][0]) for _ in range(2))
    waits, settles = lazy.auto(), eager.auto()
    for _ in range(300):
        assert lazy.play(waits, 1) == eager.play(settles, 1)
        assert [choice.reason for choice in waits._choices] == [choice.reason for choice in settles._choices]
        settles._settle()
    assert list(waits.hazards.means()) == list(settles.hazards.means()) and waits.passes.weather == settles.passes.weather


def test_plans_whose_depths_waver_are_made_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """Depths about as good as each other: of texts whose guesses stand now and then, a plan changes its mind as often as it is asked."""
    plans, best = list[tuple[int, ...]](), AutoDepth._best

    def noted(control: AutoDepth, scene: Scene, held: Any) -> Plan:
        plan = best(control, scene, held)
        plans.append(tuple(plan.depths))
        return plan

    world = World(chance=flat(0.75), arms={"": Arm(call=0.02, level=0.01, token=0.002)}, length=300, noise=0.1)
    control = world.auto()
    world.play(control, 40)
    monkeypatch.setattr(AutoDepth, "_best", noted)
    world.play(control, 400)
    assert len(set(plans)) > 2 and all(map(any, plans)), "it drafts throughout, and not always as deep"
    assert len(plans) < 48


def test_without_a_profile_costs_are_learnt_while_serving() -> None:
    off, best = best_fixed(600, depths=(0, 2, 4, 8), chance=flat(0.7), batch=4)
    world = World(chance=flat(0.7), batch=4)
    control = world.auto(profiled=False)
    assert world.play(control, 1) == [[0, 0, 0, 0]]
    world.play(control, 150)
    assert world.rate(control, 400) > 0.95 * best > 1.2 * off


# Costs


def test_pass_costs_follow_rows_batch_and_context() -> None:
    passes = PassCosts()
    for _ in range(3):
        for batch in (1, 4, 16):
            for each in (1, 2, 3, 5, 9):
                passes.learn(batch, batch * each, batch * 64, pass_seconds(batch, batch * each, batch * 64, 48))
        for each in (1, 9):
            passes.learn(1, each, 1024, pass_seconds(1, each, 1024, 48))
    for batch, rows, keys in ((1, 4, 64), (1, 7, 800), (4, 10, 256), (16, 40, 1024), (16, 128, 1024)):
        curve = passes.curve(batch, keys, rows)
        assert float(curve[rows - 1]) == pytest.approx(pass_seconds(batch, rows, keys, 48), rel=0.15), (batch, rows, keys)
        assert list(curve) == sorted(curve)
    curve = passes.curve(16, 1024, 144)
    assert curve[143] - curve[47] > 5 * (curve[47] - curve[15]), "the knee"


def test_a_shape_that_is_dear_says_something_of_its_neighbours_and_nothing_of_those_far_away() -> None:
    passes, seen = PassCosts(), (1, 2, 4, 8, 16, 32, 64, 128, 256)

    def measured(times: int, dear: float) -> list[float]:
        for rows in times * seen:
            passes.learn(1, rows, 100, pass_seconds(1, rows, 100) * (dear if rows == 16 else 1.0))
        return passes.curve(1, 100, 512)

    before, after = measured(8, 1.0), measured(30, 1.3)
    few, near, here, beside, many, unseen = (after[rows - 1] / before[rows - 1] for rows in (2, 13, 16, 19, 256, 512))
    assert here > 1.15 * few and here > max(near, beside) and min(near, beside) > 1.05 * few
    assert many == pytest.approx(few, abs=0.02) and unseen == pytest.approx(few, abs=0.05)


MIXTURES = {"Mixtral": (8, 2), "gpt-oss": (32, 4), "Qwen 3": (128, 8), "DeepSeek": (256, 8)}


@pytest.mark.parametrize("alike", [1.0, 0.8])
@pytest.mark.parametrize("name", MIXTURES)
def test_pass_costs_of_a_mixture_of_experts(name: str, alike: float) -> None:
    """First rows are dear, as each reads experts of its own, and later ones cheap; also where neighbours agree, as no law says."""
    experts = *MIXTURES[name], alike
    passes = PassCosts(experts=MIXTURES[name])
    shapes = [(batch, batch * each, batch * 64) for batch in (1, 4, 64) for each in (1, 2, 3, 5, 9, 17)]
    for shape in 2 * shapes:
        passes.learn(*shape, pass_seconds(*shape, experts=experts))
    for batch in (1, 4, 64):
        curve, plain = passes.curve(batch, batch * 64, 13 * batch), pass_seconds(batch, batch, batch * 64, experts=experts)
        for rows in (batch + 1, batch + 3, 2 * batch, 3 * batch, 5 * batch, 8 * batch, 13 * batch):
            worth = pass_seconds(batch, rows, batch * 64, experts=experts) / plain
            assert curve[rows - 1] / curve[batch - 1] == pytest.approx(worth, rel=0.1), (batch, rows)


@pytest.mark.parametrize("noise", [0.0, 0.15])
@pytest.mark.parametrize(("batch", "chance"), [(1, 0.3), (1, 0.75), (1, 0.9), (4, 0.6), (4, 0.9), (32, 0.75)])
@pytest.mark.parametrize("name", MIXTURES)
def test_regret_with_a_mixture_of_experts(name: str, batch: int, chance: float, noise: float) -> None:
    """Never below plain decoding, where a first row more takes half a pass; and near the best depth, where eight more take two."""
    settings: dict[str, Any] = dict(batch=batch, chance=flat(chance), experts=(*MIXTURES[name], 1.0), length=200,
                                    arms={"": Arm(call=0.01, level=0.05, token=0.001, lag=0.0)})
    rounds = {1: 600, 4: 300, 32: 80}[batch]
    off, best = best_fixed(rounds, depths=(0, 1, 2, 4, 8, 12), **settings)
    world = World(noise=noise, **settings)
    control = world.auto()
    first = world.rate(control, rounds // 2)
    found = world.rate(control, rounds)
    assert first > 0.96 * off and found > 0.98 * off, f"{first / off:.3f} and {found / off:.3f} of plain decoding"
    assert found > 0.9 * best, f"{found / best:.3f} of the best fixed depth"


def test_weather_moves_all_costs_and_no_decision() -> None:
    passes = PassCosts()
    for _ in range(10):
        for rows in (1, 5, 9):
            passes.learn(1, rows, 100, pass_seconds(1, rows, 100))
    before = passes.curve(1, 100, 9)
    for _ in range(100):
        passes.learn(1, 5, 100, 2 * pass_seconds(1, 5, 100))              # everything is twice as slow, but only one shape is seen
    after = passes.curve(1, 100, 9)
    assert passes.weather == pytest.approx(math.log(2), abs=0.15)
    assert after[4] / after[0] == pytest.approx(before[4] / before[0], rel=0.1)
    passes.learn(1, 5, 100, 500.0)
    assert passes.curve(1, 100, 9)[4] / after[4] < 1.1, "a pause is not a cost"
    passes.learn(1, 5, 100, 0.0)                                           # a clock that did not move


@pytest.mark.parametrize("slow", [0.3, 1.0, 3.0, 14.0, 100.0])
@pytest.mark.parametrize("unread", [2, 28, 300])
def test_a_slow_first_call_is_soon_forgotten(slow: float, unread: int) -> None:
    """A drafter whose first call met a cold machine, and that finds nothing in its first calls: what levels, tokens and reading cost is
    not known yet, and must not be believed to be as slow as that call was. All true costs are a quarter of a millisecond."""
    costs = DraftCosts()
    costs.learn(0, 0, unread, slow * 2.5e-4 * (1 + unread / 100))
    for _ in range(2):
        costs.learn(0, 0, 1, 2.5e-4)
    assert 1e-4 < costs.seconds([], 0, 1) < 5e-4
    assert costs.seconds([1.0] * 2, 2, 4) < 5e-3 and costs.seconds([1.0] * 2, 2, 100) < 1e-2
    for _ in range(2):
        costs.learn(2, 2, 4, 7.5e-4)
    assert 3e-4 < costs.seconds([1.0] * 2, 2, 4) < 2e-3


def test_cold_calls_do_not_outweigh_warm_ones() -> None:
    """The calls that a trial begins with find the caches cold, and were believed for hundreds of rounds."""
    costs = DraftCosts()
    for cold in (20.0, 4.0, 3.0):
        costs.learn(4, 4, 8, cold * 1e-4)
    for _ in range(6):
        costs.learn(4, 4, 8, 1e-4)
    assert 0.7e-4 < costs.seconds([1.0] * 4, 4, 8) < 1.7e-4


def test_draft_costs() -> None:
    costs = DraftCosts()
    for _ in range(20):
        for levels, tokens, unread in ((2, 2, 10), (4, 16, 20), (6, 6, 0), (1, 1, 300)):
            costs.learn(levels, tokens, unread, 0.1 + 0.2 * levels + 0.01 * tokens + 0.002 * unread)
    assert costs.seconds([1.0] * 5, 10, 50) == pytest.approx(0.1 + 1.0 + 0.1 + 0.1, rel=0.1)
    assert costs.levels([1.0] * 3) == [0.0, *(pytest.approx(costs.seconds([1.0] * n, 0, 0)) for n in (1, 2, 3))]
    assert costs.levels([0.5, 0.5])[2] == pytest.approx(costs.seconds([0.5, 0.5], 0, 0)), "levels that are seldom there"


def test_what_is_found_costs_more_than_nothing_and_depth_need_not() -> None:
    """n-grams: a call that finds nothing is cheap, and one that finds two tokens costs what one that finds eight does. Each level of a
    draft looked as dear as a fifth of finding it, so that texts which copy for long were granted short drafts."""
    costs, dice = DraftCosts(), random.Random(1)
    for _ in range(600):
        found = dice.choice((0, 2, 2, 2, 8))
        costs.learn(found, found, 3, (4e-5 if found else 1.2e-5) * math.exp(dice.gauss(0, 0.2)))
    assert costs.seconds([], 0, 3) == pytest.approx(1.2e-5, rel=0.4)
    assert costs.seconds([1.0] * 16, 16, 3) < 2 * costs.seconds([1.0] * 2, 2, 3)


# Survival


def seq(name: str, kind: str | None = None, greedy: bool = True, written: int = 1) -> Any:
    """Of a prompt of two tokens, behind which so many are written."""
    return SimpleNamespace(id=name, prompt_class=kind, sampling=SimpleNamespace(greedy=greedy), prompt=(1, 2), tokens=[3] * (2 + written))


def learn(survival: Survival, of: Any, at: int, granted: int, drafted: int, accepted: int) -> None:
    survival.learn(of, len(of.tokens), at, granted, drafted, accepted)


def test_hazards() -> None:
    hazards = Hazards(3, 1.0)
    for _ in range(50):
        hazards.learn(3, 3, 1)
        hazards.learn(3, 3, 3)
    first, second, third = hazards.means()
    assert first > 0.98 and second == pytest.approx(0.5, abs=0.02) and third > 0.95
    for _ in range(100):
        hazards.learn(3, 0, 0)
    assert hazards.offers() == pytest.approx(0.5, abs=0.01) and next(hazards.means()) == first, "no draft is no refusal"
    for _ in range(100):
        hazards.learn(3, 1, 1)                                             # a draft that ends early has not stood further on
    assert list(hazards.means())[1] < 0.3


def test_survival_per_class_sequence_and_position() -> None:
    survival = Survival(4)
    for at in range(60):
        learn(survival, seq(f"code{at}", "code"), at, 4, 4, 4)
        learn(survival, seq(f"prose{at}", "prose"), at, 4, 4, 0)
        learn(survival, seq(f"sampled{at}", "code", False), at, 4, 4, 1)
    new = [seq("n1", "code"), seq("n2", "prose"), seq("n3", "code", False), seq("n4", "unheard of")]
    (code, prose, sampled, other), shares = survival.of(new, 60, [4, 4, 4, 2])
    assert code[3] > 0.8 and prose[0] < 0.15 and sampled[0] > 0.85 and sampled[1] < 0.25
    assert prose[0] < other[0] < code[0] and len(other) == 2 and shares[0] == pytest.approx([1.0] * 4, abs=0.02)
    mine = seq("mine", "prose")
    for at in range(60, 70):
        learn(survival, mine, at, 4, 4, 4)
    (own,), _ = survival.of([mine], 70, [4])
    (later,), _ = survival.of([mine], 500, [4])
    assert own[0] > 0.6, "its own guesses count more than its class's"
    assert later[0] < own[0], "for a while"
    survival.forget(mine)
    assert survival.of([mine], 70, [4])[0][0][0] < own[0]


def test_survival_per_age_of_the_answer() -> None:
    survival = Survival(4)
    for at in range(60):
        learn(survival, seq(f"young{at}", "code"), at, 4, 4, 0)
        learn(survival, seq(f"old{at}", "code", written=100), at, 4, 4, 4)
        learn(survival, seq(f"prose{at}", "prose", written=100), at, 4, 4, 1)
    texts = [seq("young", "code"), seq("old", "code", written=200), seq("between", "code", written=30), seq("oldest", "code", written=300)]
    (young, old, between, oldest), _ = survival.of(texts, 60, [4] * 4)
    assert young[0] < 0.15 and old[3] > 0.8, "what is known of an age counts more than what is known of its class"
    assert young[0] < between[0] < old[0] and oldest == between, "an age that nobody has seen is taken to be like its class"
    late = seq("late", "code", written=100)
    for at in range(60, 70):
        survival.learn(late, 3, at, 4, 4, 0)
    assert survival.of([seq("next", "code", written=100)], 70, [4])[0][0][3] > 0.8, "learnt of the time when it was drafted, not of now"


def test_how_long_drafts_are() -> None:
    """A share of the drafts that were granted a k-th token has one; where none was granted it, as many as one before."""
    kind, short, new = Kind(4), Kind(4), Kind(4)
    for _ in range(200):
        kind.learn(1, 4, 4, 4)
        kind.learn(1, 4, 2, 2)
        kind.learn(1, 4, 0, 0)                                             # none: of the lengths of drafts it says nothing
        short.learn(1, 2, 1, 0)
        short.learn(1, 2, 2, 2)
    assert kind.lengths() == pytest.approx([1.0, 1.0, 0.5, 0.5], abs=0.02)
    assert short.lengths() == pytest.approx([1.0, 0.5, 0.5, 0.5], abs=0.02) and new.lengths() == [1.0] * 4


def test_a_change_is_believed_at_once() -> None:
    kind = Kind(2)
    for _ in range(500):
        kind.learn(1, 2, 2, 0)
    assert next(kind.long.means()) < 0.01
    for _ in range(4):
        kind.learn(20, 2, 2, 2)
    assert next(kind.long.means()) > 0.4
    assert kind.ages[0].apply(0, 0.8) == pytest.approx(0.8, abs=0.05), "what all guesses did is not held against those of one age"
    for _ in range(500):
        kind.learn(20, 2, 2, 2)
    assert next(kind.long.means()) > 0.98
    for _ in range(4):
        kind.learn(20, 2, 2, 0)
    assert next(kind.long.means()) < 0.6, "for the worse, too"


def test_many_classes_take_bounded_memory() -> None:
    survival = Survival(2)
    for at in range(1000):
        learn(survival, seq("one", f"class {at}"), at, 2, 2, 1)
    assert len(survival._kinds) <= 65


# In the engine


def test_a_fixed_depth_is_only_lowered_by_the_end_of_the_text() -> None:
    target = table()
    with Engine(target=target, drafter=AlwaysWrong(11), depth=5) as engine:
        out = engine.generate([1, 2], Sampling(seed=1, max_tokens=30, ignore_eos=True))
    emitted = 1
    for event in out.trace:
        if event.event == "round_done":
            assert event.depth == min(5, 30 - emitted - 1) == len(event.nodes)
            assert event.reason == ("fixed" if event.depth == 5 else "the end of the text is near")
            emitted += len(event.tokens)


@pytest.mark.parametrize("profile_s", [0.0, 1.0])
def test_auto_says_why_and_keeps_the_text(profile_s: float) -> None:
    target = table()
    want = alone(target, [1, 2], OPTIONS["ignore_eos"])
    oracle = Oracle(foresight([[1, 2, *want.token_ids]]))
    for drafter in (AlwaysWrong(11), oracle, ChainDrafter(NgramDrafter(1, 2), oracle)):
        for tree in (None, 10):
            with Engine(target=target, drafter=drafter, tree=tree, config=EngineConfig(profile_s=profile_s)) as engine:
                assert engine._passes.known == bool(profile_s) and not target.open_slots
                out = engine.generate([1, 2], OPTIONS["ignore_eos"])
            assert out.token_ids == want.token_ids
            check_counts(out)
            reasons = [event.reason for event in out.trace if event.event == "round_done"]
            assert all(reasons) and any(reason.startswith("auto: ") for reason in reasons)
            assert any(event.nodes for event in out.trace if event.event == "round_done")


class Scripted(AutoDepth):
    """Asks every part of a chain in turn."""

    def depths(self, batch: Any, rooms: Any, whole: Any) -> list[Choice]:
        return [Choice(3, "in turn", self.arms[(self.rounds + i) % len(self.arms)].name) for i in range(len(batch))]


def test_the_part_of_a_chain_that_was_chosen_is_the_one_that_guesses() -> None:
    target = table()
    options = Sampling(seed=1, max_tokens=60, ignore_eos=True, temperature=0)
    want = [alone(target, [1, 2, i], options).token_ids for i in range(3)]
    ahead = foresight([[1, 2, i, *text] for i, text in enumerate(want)])
    chain = ChainDrafter(AlwaysWrong(11, ahead), ChainDrafter(NgramDrafter(1, 2), Oracle(ahead)))
    with Engine(target=target, drafter=chain, config=EngineConfig(profile_s=0)) as engine:
        names = [arm.name for arm in engine.speculation.control.arms]  # type: ignore[attr-defined]
        assert names == [None, "always-wrong", "ngram", "oracle"]
        engine.speculation.control = Scripted(8, parts=names[1:])
        outs = engine.generate_batch([[1, 2, i] for i in range(3)], options)
        arms = {arm.name: arm for arm in engine.speculation.control.arms}
    assert [out.token_ids for out in outs] == want
    rounds = [event for out in outs for event in out.trace if event.event == "round_done" and event.nodes]
    for event in rounds:
        if event.drafter in ("always-wrong", "oracle"):
            assert (len(event.tokens) > 1) == (event.drafter == "oracle")
    assert {"always-wrong", "oracle"} <= {event.drafter for event in rounds}
    assert next(arms["oracle"].survival.common.means()) > 0.9 and next(arms["always-wrong"].survival.common.means()) < 0.2
