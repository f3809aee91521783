"""A plain pass that is begun before its round: the same texts, whoever ends, joins or leaves in between."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftproof import Engine, Sampling
from draftproof.config import EngineConfig, LoadConfig
from draftproof.drafters.fixed import AlwaysWrong
from draftproof.engine import ahead
from draftproof.engine.control import AutoDepth
from draftproof.engine.costs import PassCosts
from draftproof.engine.plans import Choice, Control
from draftproof.models.load import WEIGHTS, load_target
from draftproof.models.paged import PagedTarget
from draftproof.types import Scores

PROMPTS = [[5, 9, 5], [7, 7, 3, 1], [11, 2], [4, 4, 4, 4, 8]]


@pytest.fixture(scope="module")
def target(tiny_pair: tuple[Path, Path]) -> PagedTarget:
    found = load_target(tiny_pair[0], LoadConfig(device="cpu", self_test=False))
    assert isinstance(found, PagedTarget)
    return found


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Passes begin early on a CPU, too; how many rows each has."""
    rows: list[int] = []
    right = PagedTarget.begin

    def begin(self: PagedTarget, slots: list[object], roots: object) -> Scores | None:
        rows.append(len(slots))
        return right(self, slots, roots)  # type: ignore[arg-type]

    monkeypatch.setattr(PagedTarget, "begin", begin)
    monkeypatch.setattr(ahead, "OVERLAPS", {"cpu"})
    yield rows


def texts(target: PagedTarget, sampling: list[Sampling], drafter: str = "none", **more: object) -> list[tuple[int, ...]]:
    with Engine(target, drafter, config=EngineConfig(max_batch=3, **more)) as engine:       # the fourth joins when another has ended
        done = engine.generate_batch(PROMPTS, sampling, speculation={"drafter": "none"})
        assert not any(one.error for one in done)
        return [one.token_ids for one in done]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("drafter", ["none", "ngram"])
def test_texts_are_the_same(target: PagedTarget, temperature: float, drafter: str, begun: list[int],
                            monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [Sampling(temperature=temperature, seed=i, max_tokens=n, ignore_eos=True, logprobs=1) for i, n in enumerate((9, 17, 4, 12))]
    early = texts(target, asked, drafter)
    assert len(begun) > 10 and {2, 3} <= set(begun)
    monkeypatch.setattr(ahead, "OVERLAPS", set())
    count = len(begun)
    assert texts(target, asked, drafter) == early and len(begun) == count
    target.check()


def test_a_text_that_ends_unforeseen_leaves_the_others_their_rows(target: PagedTarget, begun: list[int],
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Sampling(temperature=0.9, seed=1, max_tokens=16, ignore_eos=True)
    monkeypatch.setattr(ahead, "OVERLAPS", set())
    whole = texts(target, [plain] * 4)
    asked = [plain, plain, replace(plain, stop_token_ids=(whole[2][5],)), plain]
    want = texts(target, asked)
    assert len(want[2]) <= 6 and not begun
    monkeypatch.setattr(ahead, "OVERLAPS", {"cpu"})
    assert texts(target, asked) == want and begun
    target.check()


def test_where_somebody_guesses_nothing_is_begun(target: PagedTarget, begun: list[int]) -> None:
    with Engine(target, "ngram", 3) as engine:
        engine.generate(PROMPTS[0], Sampling(temperature=0, max_tokens=12, ignore_eos=True))
        assert not begun
        engine.set_speculation(enabled=False)
        engine.generate(PROMPTS[0], Sampling(temperature=0, max_tokens=12, ignore_eos=True))
        assert len(begun) >= 8


def test_guesses_that_are_switched_on_are_scored_though_a_plain_pass_was_begun(target: PagedTarget, begun: list[int]) -> None:
    asked = Sampling(temperature=0, max_tokens=16, ignore_eos=True)
    with Engine(target, AlwaysWrong(target.vocab_size), 3) as engine:
        engine.set_speculation(enabled=False)
        want = [one.token_ids for one in engine.generate_batch(PROMPTS[:2], asked)]
        handles = [engine.submit(prompt, asked)[0] for prompt in PROMPTS[:2]]
        for _ in range(6):
            engine.step()
        count = len(begun)
        engine.set_speculation(enabled=True)
        while not all(handle.done for handle in handles):
            engine.step()
        done = [handle.completion() for handle in handles]
    assert [one.token_ids for one in done] == want and all(one.metrics["drafted"] >= 9 for one in done) and len(begun) == count > 6
    first = [next(event for event in one.trace if event.event == "round_done" and event.nodes) for one in done]
    assert [event.batch for event in first] == [2, 2], "the round has not failed, after which each text had one by itself"
    target.check()


@pytest.mark.parametrize("depth", [0, "auto"])
def test_where_guesses_rest_plain_passes_are_begun_and_none_for_nothing(target: PagedTarget, depth: int | str, begun: list[int],
                                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter that is always wrong: its depth is 0 but for trials, before which nothing is begun."""
    asked, let_go = Sampling(temperature=0, max_tokens=150, ignore_eos=True), []
    right = ahead.PendingPass.take

    def take(self: ahead.PendingPass, *about: Any) -> Scores | None:
        found = right(self, *about)
        let_go.append(found is None)
        return found

    monkeypatch.setattr(ahead.PendingPass, "take", take)
    with Engine(target, AlwaysWrong(target.vocab_size), depth, config=EngineConfig(profile_s=0)) as engine:
        out = engine.generate_batch(PROMPTS[:2], asked)
        trials = max(one.metrics["drafted"] for one in out)
    assert bool(trials) is (depth == "auto") and begun.count(2) > 60
    assert len(let_go) == begun.count(2) and not any(let_go), "what was begun is the next round's pass"
    assert [one.token_ids for one in out] == [one.token_ids for one in Engine(target).generate_batch(PROMPTS[:2], asked)]
    target.check()


class Alternating(Control):
    """Six plain rounds, four with guesses."""

    def __init__(self) -> None:
        self.rounds = 0

    @property
    def stays(self) -> bool:
        return 0 < self.rounds % 10 < 6

    def depths(self, batch: Sequence[object], rooms: object, whole: object) -> list[Choice]:
        self.rounds += 1
        return [Choice(4 if self.rounds % 10 in (7, 8, 9, 0) else 0, "its turn")] * len(batch)


def test_a_drafter_reads_of_passes_begun_early_what_it_reads_of_others(begun: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its guesses are the same, and as many stand."""
    demo = load_target(str(WEIGHTS / "target"), LoadConfig(device="cpu", self_test=False))
    asked = [Sampling(temperature=temperature, seed=3, max_tokens=n, ignore_eos=True) for temperature, n in ((0, 40), (0.8, 30), (0, 50))]
    found = []
    for kinds in ({"cpu"}, set()):
        monkeypatch.setattr(ahead, "OVERLAPS", kinds)
        with Engine(demo, f"eagle3:{WEIGHTS / 'eagle3'}", config=EngineConfig(profile_s=0)) as engine:
            engine.speculation.control = Alternating()
            out = engine.generate_batch(["Add two numbers.", "What is the capital of France?", "Count to ten."], asked)
        found.append([(one.token_ids, one.metrics["drafted"], one.metrics["accepted"]) for one in out])
    assert found[0] == found[1] and len(begun) > 12 and sum(accepted for _, _, accepted in found[0]) > 20


def test_a_round_whose_pass_ran_beside_another_costs_what_it_waited(target: PagedTarget, begun: list[int],
                                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []
    monkeypatch.setattr(ahead.PendingPass, "seconds", lambda self: 100.0)
    monkeypatch.setattr(PassCosts, "follow", lambda self, batch, rows, keys, seconds: seen.append(seconds))
    monkeypatch.setattr(PassCosts, "known", property(lambda self: False))                  # every round is looked at
    monkeypatch.setattr(AutoDepth, "stays", property(lambda self: True))
    with Engine(target, "ngram", config=EngineConfig(profile_s=0)) as engine:
        out = engine.generate_batch(PROMPTS[:2], Sampling(temperature=0, max_tokens=12, ignore_eos=True))
    assert len(begun) > 5 and len(seen) > 5 and all(0 < seconds < 50 for seconds in seen), "not what the device did while the host worked"
    assert max(one.metrics["score_s"] for one in out) > 100


@pytest.mark.parametrize("early", [False, True])
def test_a_plain_pass_that_nothing_was_beside_is_no_plain_decoding_where_passes_are_begun_early(target: PagedTarget, early: bool,
                                                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "OVERLAPS", {"cpu"} if early else set())
    with Engine(target) as engine:
        costs = engine._passes
    for _ in range(60):
        for rows, seconds in ((5, 5.5), (1, 4.4), (1, 4.0)):        # the host works while the last of them runs
            costs.follow(1, rows, 100, seconds)
    plain = costs.curve(1, 100, 1)[0]
    assert plain == pytest.approx(4.0, rel=0.01) if early else plain > 4.1
    assert costs.lingering(1) == early and costs.lingering(2) == 3


def test_a_pass_that_kept_other_layers_than_drafters_read_now_is_not_taken() -> None:
    settled: list[Any] = []
    target, roots = SimpleNamespace(settle=lambda *about: settled.append(about)), torch.tensor([4])
    seq = SimpleNamespace(slot=SimpleNamespace(length=3), tokens=[1, 2, 3, 4])
    early = ahead.PendingPass(target, [seq], [3], Scores(torch.zeros(1, 5), (0, 1)), None, [4])  # type: ignore[arg-type, list-item]
    assert early.take([seq], roots, (2,)) is None and not settled  # type: ignore[list-item]
    assert early.take([seq], roots, ()) is early.scores and settled  # type: ignore[list-item]


def test_a_pass_is_only_taken_for_the_texts_it_was_begun_for() -> None:
    """One of three may have left, another come, a slot been given back or cut, or another token stand at a text's end."""
    settled: list[Any] = []
    target = SimpleNamespace(settle=lambda slots, roots: settled.append(slots))
    seqs = [SimpleNamespace(slot=SimpleNamespace(length=2), tokens=[7, 1, i]) for i in range(3)]
    scores = Scores(torch.arange(3.0)[:, None], (0, 1, 2, 3))
    early = ahead.PendingPass(target, seqs, [2] * 3, scores, None, [0, 1, 2])  # type: ignore[arg-type]
    other = SimpleNamespace(slot=SimpleNamespace(length=2), tokens=[7, 1, 0])
    for batch in ([other], [seqs[0], other]):
        assert early.take(batch, torch.zeros(2), ()) is None  # type: ignore[arg-type]
    for name, wrong in (("slot", None), ("slot", SimpleNamespace(length=1)), ("slot", SimpleNamespace(length=3)), ("tokens", [7, 1, 5])):
        right = getattr(seqs[1], name)
        setattr(seqs[1], name, wrong)
        assert early.take(seqs, torch.zeros(3), ()) is None and not settled  # type: ignore[arg-type]
        setattr(seqs[1], name, right)
    some = early.take([seqs[2], seqs[0]], torch.zeros(2), ())  # type: ignore[list-item]
    assert some is not None and some.logits[:, 0].tolist() == [2, 0] and some.starts == (0, 1, 2)
    assert settled == [[seqs[2].slot, seqs[0].slot]]
    assert early.take(seqs, torch.zeros(3), ()) is scores  # type: ignore[arg-type]


@pytest.mark.parametrize(("start", "end", "times", "spent"), [
    (10.0, 10.5, (2.0, 3.0, 0.5), 3.5),         # begun at 4, and over by 9: what the host did from 10 on was to verify
    (8.0, 9.5, (2.0, 3.0, 0.5), 3.5),           # it came back a second too early, and waited for the device
    (4.0, 9.0, (2.0, 3.0, 0.0), 3.0)])          # it did nothing else meanwhile
def test_the_time_of_a_round_that_was_begun_early(start: float, end: float, times: tuple[float, ...], spent: float) -> None:
    marks = SimpleNamespace(spans=lambda: [2.0, 3.0, 99.0])
    pending = ahead.PendingRound([], [], [], None, marks, 4.0, ())  # type: ignore[arg-type]
    found, took = pending.seconds(start, end)
    assert (found.draft_s, found.score_s, found.verify_s, found.other_s) == (*times, 0.0) and took == spent
    pending.early = SimpleNamespace(seconds=lambda: 0.25)  # type: ignore[assignment]
    found, took = pending.seconds(start, end)
    assert (found.score_s, found.verify_s) == (3.25, max(0.0, times[2] - 0.25)) and took == spent, "the pass was waited for in verify"


def test_what_was_begun_is_let_go_when_a_request_leaves(target: PagedTarget, begun: list[int]) -> None:
    asked = Sampling(temperature=0, max_tokens=14, ignore_eos=True)
    with Engine(target) as engine:
        want = engine.generate(PROMPTS[1], asked).token_ids
        first, second = engine.submit(PROMPTS[0], asked)[0], engine.submit(PROMPTS[1], asked)[0]
        for _ in range(5):
            engine.step()
        engine.cancel(first.id)
        while not second.done:
            engine.step()
        assert second.completion().token_ids == want and begun
    target.check()
