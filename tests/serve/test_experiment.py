"""What an experiment books and what it leaves out, with tickets that nobody serves and a clock that stands still."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from draftproof.bench.statistics import mcnemar
from draftproof.config import AbConfig
from draftproof.engine.port import Completion
from draftproof.errors import CacheFull, Failure, OptionError, PromptError
from draftproof.serve import rollout
from draftproof.serve.ab import ALL, CANDIDATE, CONTROL, SERVED
from draftproof.serve.abreport import report, snapshot
from draftproof.serve.experiment import Experiment
from draftproof.serve.refusal import Refusal
from draftproof.serve.ticket import Ticket
from draftproof.serve.translate import Order, Served
from draftproof.types import Sampling

ORDER = Order(((1, 2),), Sampling(), None, None, False)


def experiment(arms: str = "ngram vs off", *, exact: bool = False, **more: Any) -> Experiment:
    config = AbConfig(arms, **{"stages": (0.5,), "minimum": 1000, "wait_s": 0.0, "replay": 0.0, **more})
    served = Served("m", None, 100, 32, lambda token: None, "dp", config.drafters[0], exact=exact)
    return Experiment(config, served, 4, 600.0, lambda: 1.0)


def text(*tokens: int, state: str = "on", sample: int = 0) -> Completion:
    return Completion("", tokens, 1, "length", 1, sample, {"tpot_s": 0.1, "draft_bytes": 0, "kv_tokens_lost": 0, "drafted": 0},
                      {"state": state, "reason": "it broke" if state == "out of service" else "", "rule": "match"})


def ticket(samples: int = 1) -> Ticket:
    return Ticket((1, 2), Sampling(seed=1, n=samples), told=[[] for _ in range(samples)])


def end(one: Ticket, *samples: Completion, error: Exception | None = None) -> None:
    one.completions = {done.sample: done for done in samples}
    one.error, one.done = error, True
    one.news()


def ask(about: Experiment, arm: str, *samples: Completion, error: Exception | None = None) -> None:
    """One request of an arm, from its beginning to its end."""
    samples = samples or (text(7, state="on" if about.arms[arm].guesses else "off"),)
    one = ticket(len(samples))
    about.follow([one], about.arms[arm])
    end(one, *samples, error=error)


def counted(about: Experiment, arm: str) -> int:
    return about.books["served"].cell(arm, ALL).requests


def test_a_request_of_many_prompts_is_one_request() -> None:
    """Its prompts share a queue, a user and a moment: they are no independent outcomes, and one has failed if any of them has."""
    about = experiment(replay=1.0)
    prompts = [ticket() for _ in range(32)]
    about.follow(prompts, about.arms[CONTROL])
    for one in prompts[:0:-1]:
        end(one, text(7, state="off"))
        assert counted(about, CONTROL) == 0
    end(prompts[0], text(7, state="off"))
    cell = about.books["served"].cell(CONTROL, ALL)
    assert (cell.requests, cell.failed, cell.times["e2e_s"].seen, about.replays.waiting) == (1, 0, 1, 1)
    prompts = [ticket() for _ in range(3)]
    about.follow(prompts, about.arms[CONTROL])
    end(prompts[1], error=Failure("the device is lost"))
    for one in (prompts[0], prompts[2]):
        end(one, error=Refusal(499, "the client went away"))                 # as its reader does then
    assert (cell.requests, cell.failed) == (2, 1) and not about.left_out


def test_the_load_that_each_arm_met_is_told() -> None:
    """Candidate A runs from 0 to 10; control B, of two prompts, from 4 to 8; candidate C from 6 to 7."""
    about, now = experiment(), [0.0]
    about._clock = lambda: now[0]
    texts = {name: [ticket() for _ in range(count)] for name, count in (("A", 1), ("B", 2), ("C", 1))}
    steps = ((0.0, "A", CANDIDATE), (4.0, "B", CONTROL), (6.0, "C", CANDIDATE), (7.0, "C", ""), (8.0, "B", ""), (10.0, "A", ""))
    for now[0], name, arm in steps:
        if arm:
            about.follow(texts[name], about.arms[arm])
        for one in texts[name] if not arm else ():
            end(one, text(7, state="off" if name == "B" else "on"))
    cells = {one["arm"]: one for one in report(snapshot(about))["cells"] if one["class"] == ALL}
    assert cells[CANDIDATE]["beside"] == pytest.approx({"own": (0.1 + 1.0) / 2, "other": (2 * 0.4 + 2.0) / 2})
    assert cells[CONTROL]["beside"] == pytest.approx({"own": 0.0, "other": 1.25}) and cells[CONTROL]["mixed"] == 1
    ask(about, CONTROL)
    assert cells[CANDIDATE]["mixed"] == 2 and about.books["served"].cell(CONTROL, ALL).mixed == 1


@pytest.mark.parametrize("mistake", [PromptError("the prompt is empty"), OptionError("logprobs=500: expected at most 256"),
                                     CacheFull("a prompt of 9 tokens may need more than the cache has")])
def test_what_no_arm_could_write_is_held_against_none(mistake: Exception) -> None:
    """One client's mistakes, all of them of one arm, as a client is."""
    about = experiment()
    for _ in range(64):
        ask(about, CONTROL)
    for _ in range(64):
        ask(about, CANDIDATE, error=mistake)
    assert about.rollout.state == "running" and counted(about, CANDIDATE) == 0
    assert about.left_out == {"they asked for what cannot be": 64}


@pytest.mark.parametrize("fault", [OptionError("speculation drafter='ngram': this engine runs 'suffix'; expected that, or none"),
                                   OptionError("depth=4 after a prompt of 98 tokens needs 103 tokens"), Failure("the device is lost")])
def test_what_an_arm_could_not_write_is_held_against_it(fault: Exception) -> None:
    about = experiment()
    for _ in range(64):
        ask(about, CONTROL)
        ask(about, CANDIDATE, error=fault)
    assert about.rollout.state == "returned" and "requests failed" in about.rollout.reason and not about.left_out


@pytest.mark.parametrize("change", ["switch", "stage", "restart", "end"])
def test_what_began_before_a_change_is_not_booked_behind_it(change: str) -> None:
    about = experiment(stages=(0.1, 0.5), minimum=1)
    long, seen = ticket(), 0
    about.follow([long], about.arms[CANDIDATE])
    if change == "stage":
        ask(about, CANDIDATE)
        ask(about, CONTROL)
        seen = 1
        assert about.rollout.at == 1
    else:
        {"switch": lambda: about.disturbed("it was switched"), "restart": about.restart, "end": about.end}[change]()
    end(long, text(7))
    assert about.stage.cell(CANDIDATE).requests == 0 and counted(about, CANDIDATE) == seen
    assert about.left_out == {"they began before a change": 1}


def test_behind_the_end_requests_are_served_and_watched_as_without_an_experiment() -> None:
    about = experiment()
    ask(about, CANDIDATE)
    about.end()
    order, arm = about.enter(ORDER, "")
    assert order == ORDER and arm is not None and arm.name == SERVED
    one = ticket()
    about.follow([one], arm)
    end(one, text(7))
    assert (counted(about, CANDIDATE), counted(about, SERVED)) == (1, 1) and about.rollout.state == "ended"
    about.restart()
    assert {about.enter(replace(ORDER, user=f"u{i}"), "")[1] for i in range(40)} == {*about.arms.values()}


def test_only_the_candidates_own_drafter_speaks_against_it() -> None:
    """Control's goes out of service: everything to control would be everything to what is broken. It is said once."""
    about = experiment("ngram vs suffix")
    for _ in range(3):
        ask(about, CONTROL, text(7, state="out of service"))
    assert about.rollout.state == "running" and about.left_out == {"the arm did not guess": 3}
    assert [one["event"] for one in about.history] == ["control's drafter is out of service: it broke"]
    ask(about, CANDIDATE, text(7), text(8, state="out of service", sample=1))
    assert about.rollout.state == "returned" and about.rollout.reason == "at 0.5: its drafter is out of service: it broke"


def test_a_switch_is_no_failure_of_the_candidate() -> None:
    about = experiment()
    ask(about, CANDIDATE, text(7, state="off"))
    assert about.rollout.state == "running" and about.left_out == {"the arm did not guess": 1} and not about.history


def test_whoever_was_turned_back_stays_so_behind_the_end() -> None:
    about = experiment("ngram depth=4 vs suffix depth=2")
    ask(about, CANDIDATE, text(7, state="out of service"))
    assert about.rollout.state == "returned"
    about.end()
    assert about.rollout.reason == ("ended by the operator; the candidate had been turned back, so everybody keeps control "
                                    "(suffix depth=2) until a drafter is switched to")
    order, arm = about.enter(ORDER, "")
    assert order.speculation == {"drafter": "suffix", "depth": 2} and arm is not None and arm.name == SERVED
    predicted = replace(ORDER, sampling=Sampling(prediction=(1,)))
    assert about.enter(predicted, "") == (predicted, None), "which control's drafter need not read"
    about.disturbed("speculation was switched", "ngram")
    assert about.enter(ORDER, "")[0] == ORDER, "the operator has said what everybody has"


def test_an_experiment_begins_anew_only_with_its_drafters() -> None:
    about = experiment("ngram vs suffix")
    about.end()
    about.disturbed("speculation was switched", "prediction")
    with pytest.raises(Refusal, match="'ngram' is not loaded any more, 'prediction' is in its place; switch back") as refusal:
        about.restart()
    assert refusal.value.status == 409 and about.rollout.state == "ended"
    about.disturbed("speculation was switched", "ngram")
    about.restart()
    assert about.rollout.state == "running"


def replayed(about: Experiment, written: Callable[[str], Completion]) -> list[str]:
    """Everything that waits, written again: by which arms."""
    arms = []
    while (spare := about.spare()) is not None:
        arms.append(CANDIDATE if spare.speculation == about.arms[CANDIDATE].wish else CONTROL)
        end(spare, written(arms[-1]))
    return arms


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("deterministic", [True, False])
def test_other_texts_are_the_candidates_doing_whoever_wrote_the_answer(share: float, deterministic: bool) -> None:
    """It writes another text where control would not: always the same one, or one that is another every time."""
    about, rng = experiment(stages=(share,), replay=1.0), random.Random(1)

    def written(arm: str) -> Completion:
        if arm == CONTROL:
            return text(1, 2, state="off")
        return text(1, 9 if deterministic or rng.random() < 0.5 else 2)

    for _ in range(400):
        arm = CANDIDATE if rng.random() < share else CONTROL
        ask(about, arm, written(arm))
        assert len(replayed(about, written)) == (3 if arm == CANDIDATE else 2)
        if about.rollout.state == "returned":
            break
    found = about.matches[ALL]
    assert "differently by the candidate alone, 0 by control alone" in about.rollout.reason and found.compared < 100 and found.lost == 0


@pytest.mark.parametrize("share", [0.1, 0.9])
def test_a_machine_that_repeats_itself_badly_is_no_candidates_fault(share: float) -> None:
    """Either arm's text is another in a third of all cases, whoever wrote the answer: where one of them differs it is as often the one
    as the other, which is all that the test supposes."""
    about, rng = experiment(stages=(), share=share, replay=1.0), random.Random(2)

    def written(arm: str) -> Completion:
        return text(1, 9 if rng.random() < 1 / 3 else 2, state="on" if arm == CANDIDATE else "off")

    for _ in range(500):
        arm = CANDIDATE if rng.random() < share else CONTROL
        ask(about, arm, written(arm))
        replayed(about, written)
    found = about.matches[ALL]
    assert found.gained + found.lost > 150 and mcnemar(found.gained, found.lost) > 0.05


def test_where_texts_do_not_depend_on_speculation_one_is_too_many() -> None:
    about = experiment(stages=(1.0,), replay=1.0, exact=True)
    ask(about, CANDIDATE, text(1, 9))
    assert replayed(about, lambda arm: text(1, 9) if arm == CANDIDATE else text(1, 2, state="off")) == [CONTROL, CONTROL, CANDIDATE]
    assert about.rollout.state == "returned"


def test_no_look_spends_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """What all looks of a roll-out may err with, in every stage, behind the last, and however often a stage begins anew."""
    spent: list[float] = []
    monkeypatch.setattr(rollout, "breach", lambda candidate, control, limits, alpha: spent.append(alpha))
    about = experiment(stages=(0.1, 0.5), minimum=20, alpha=0.01)
    for state in ("running", "running", "holding"):
        assert about.rollout.state == state
        for _ in range(20):
            for _ in range(16):
                ask(about, CANDIDATE)
            about.disturbed("something else changed")
        for _ in range(20):
            ask(about, CANDIDATE)
            ask(about, CONTROL)
    assert len(spent) > 200 and 0.005 < sum(spent) <= 0.01
