"""Trees that a recording grows, with a recorder that hands back what it was given but is as strict as a graph, against those that grow
level by level: the same nodes, scores as near as another shape of attention leaves them, and the same learnt of them. CUDA is not here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from contract.table_rounds import SharedNoise, Text, opened
from drafters.test_recorded import Recorder, V, as_on_a_device, both, eagle2, eagle3, eagle3_whole, mtp, on_cuda, pair, same, text
from elsewhere import NAME, WAITS, elsewhere

from draftproof import Engine, LoadConfig, Sampling
from draftproof.drafters import recurrent
from draftproof.drafters.grow import Growth
from draftproof.drafters.planted import PlantedTrees
from draftproof.models.heads.recorded import Recording
from draftproof.models.load import builtin, load_target
from draftproof.types import Budget

__all__ = ["as_on_a_device"]

BUDGETS = [(4, 9), (3, 9), (6, 14), (1, 5), (5, 6), (2, 2), (0, 0), (3, 60)]
PRICES = tuple(0.12 * i for i in range(1, 15))


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin, too, grows all levels, as on a device."""
    monkeypatch.setattr(Growth, "_settled", lambda self, worth: False)


def planted(recorder: Recorder) -> list[PlantedTrees]:
    return [made for made in recorder.made if isinstance(made, PlantedTrees)]


@pytest.mark.parametrize("build", [eagle2, eagle3, eagle3_whole, mtp])
def test_planted_trees_are_those_of_the_levels(build: Callable[..., Any], whole: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """One greedy text, one sampled, five of both, of different budgets; nearly every draft is rejected, as the heads know nothing."""
    target, one, twin, recorder = pair(build, monkeypatch)
    grown: list[Any] = []
    right = type(twin)._grow
    monkeypatch.setattr(type(twin), "_grow", lambda self, *about: grown.append(self) or right(self, *about))
    for temperatures in ((0.0,), (0.8,), (0.8, 0.0, 0.8, 0.8, 0.0)):
        drafts = both(target, (one, twin), lambda each=temperatures: [text(seed, t, 5 + 3 * seed) for seed, t in enumerate(each)],
                      lambda i, n: BUDGETS[(n + i) % len(BUDGETS)])
        assert drafts > 20 * len(temperatures)
    made = planted(recorder)
    assert len(made) > 8 and {each.bucket.greedy for each in made} == {True, False} and {each.bucket.widest for each in made} > {2, 3}
    assert recorder.replays > len(recorder.made) and grown and all(drafter is twin for drafter in grown)
    assert torch.equal(torch.from_numpy(one.margins.seen), torch.from_numpy(twin.margins.seen)), "they were judged alike"
    assert torch.equal(torch.from_numpy(one.margins.hits), torch.from_numpy(twin.margins.hits)) and one.margins.seen.sum() > 100 * 20


def test_levels_that_cannot_enter_change_no_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a processor the twin stops growing when every tree is full of worthier nodes."""
    target, one, twin, recorder = pair(eagle3, monkeypatch)
    levels, right = [], Growth.finish
    monkeypatch.setattr(Growth, "finish", lambda self, name: levels.append(len(self.seen or self.levels)) or right(self, name))
    for round_ in range(12):
        texts = [text(seed + 10 * round_, temperature, 6) for seed, temperature in enumerate((0.0, 0.8, 0.8))]
        drafts = []
        for drafter in (one, twin):
            states = opened(target, drafter, texts)[0]
            drafts.append(drafter.propose(states, [Budget(6, 8, "", "")] * 3, SharedNoise()))
            for state in states:
                drafter.close(state)
        assert all(map(same, *drafts)) and all(len(draft) == 8 for draft in drafts[0])
    assert set(levels[::2]) == {6} and min(levels[1::2]) < 6 and planted(recorder)


def test_nothing_grows_behind_the_end_of_a_text(whole: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts end with other tokens, one of them with half of all."""
    target, one, twin, recorder = pair(eagle3, monkeypatch)
    ends = [frozenset(), frozenset({3}), frozenset(range(0, V, 4))]
    texts = [Text.of([5, 9, 2, 7], Sampling(temperature=heat, top_p=1.0, max_tokens=40), seed=i, end_ids=ends[i])
             for i, heat in enumerate((0, 0.8, 0.8))]
    drafts = []
    for drafter in (one, twin):
        states = opened(target, drafter, texts)[0]
        drafts.append(drafter.propose(states, [Budget(5, 20, "", "")] * 3, SharedNoise()))
    assert all(map(same, *drafts)) and planted(recorder)[0].bucket.ends == V // 4
    for draft, own in zip(drafts[0], ends, strict=True):
        tokens = draft.tokens.tolist()
        assert not any(parent >= 0 and tokens[parent] in own for parent in draft.parents)
    assert any(token in ends[2] for token in drafts[0][2].tokens.tolist())


def test_nodes_have_prices(whole: None, monkeypatch: pytest.MonkeyPatch) -> None:
    target, one, twin, recorder = pair(eagle3, monkeypatch)
    texts, drafts = [text(seed, temperature) for seed, temperature in enumerate((0.0, 0.8))], []
    for drafter in (one, twin):
        states = opened(target, drafter, texts)[0]
        drafts.append(drafter.propose(states, [Budget(4, 14, "", "", PRICES), Budget(4, 14, "", "")], SharedNoise()))
    assert all(map(same, *drafts)) and planted(recorder)
    assert 0 < len(drafts[0][0]) < len(drafts[0][1]) == 14


def test_a_recording_that_fails_leaves_the_levels(whole: None, monkeypatch: pytest.MonkeyPatch) -> None:
    target, one, twin, recorder = pair(eagle3, monkeypatch)
    tried = []

    def broken(run: Callable[[], Any]) -> Callable[[], Any]:
        tried.append(run())
        raise RuntimeError("operation not permitted when stream is capturing")

    one.recorded.record = broken
    both(target, (one, twin), lambda: [text(seed, 0.8) for seed in range(3)], lambda i, n: (4, 9))
    assert len(tried) == 1 and "capturing" in one.recorded.failed and not one.recorded.held


def test_trees_that_cannot_be_recorded_leave_chains_their_recordings(whole: None, monkeypatch: pytest.MonkeyPatch) -> None:
    target, one, twin, recorder = pair(eagle3, monkeypatch)
    made: list[Any] = []

    def record(run: Callable[[], Any]) -> Callable[[], Any]:
        made.append(run.__self__)  # type: ignore[attr-defined]
        if isinstance(made[-1], PlantedTrees):
            raise RuntimeError("operation not permitted when stream is capturing")
        return run

    one.recorded.record = record
    both(target, (one, twin), lambda: [text(seed, 0.8) for seed in range(3)], lambda i, n: (4, 9 if n % 2 else 4))
    assert [type(each) for each in made].count(PlantedTrees) == 1 < len(made), "a tree once, chains on"
    assert one.recorded.held and not one.recorded.records(PlantedTrees) and one.recorded.records(Recording)


def test_a_tree_waits_for_its_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the pretended device: texts are the processor's, and the host looks once at all levels of all trees."""
    recorder, waits, texts = Recorder(), list[list[str]](), []
    monkeypatch.setattr(recurrent, "recorder", lambda device: recorder)
    propose = recurrent.RecurrentDrafter.propose

    def watched(self: Any, *about: Any) -> Any:
        WAITS.clear()
        done = propose(self, *about)
        waits.append(list(WAITS))
        return done

    monkeypatch.setattr(recurrent.RecurrentDrafter, "propose", watched)
    sampling = [Sampling(temperature=temperature, max_tokens=16, seed=3, ignore_eos=True) for temperature in (0.8, 0.0, 0.8)]
    load = LoadConfig(device=NAME, dtype="float32", self_test=False, threads=torch.get_num_threads())
    with elsewhere():
        target = load_target(builtin("target"), load)
        for spec in ("none", "eagle3"):
            with Engine(target, spec, 0 if spec == "none" else 4, tree=None if spec == "none" else 9, load=load) as engine:
                done = engine.generate_batch(["def fib(n):", "x = [1, 2, ", "import"], sampling)
            texts.append([one.token_ids for one in done])
        assert sum(one.metrics["accepted"] for one in done) > 10
    assert texts[0] == texts[1] and planted(recorder)
    assert len(waits) > 3 and all(len(each) == 1 and "planted.py" in each[0] for each in waits), waits


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_cuda_graphs_grow_what_the_levels_grow(temperature: float) -> None:
    """Not the pretended recorder: graphs, on a device."""
    target, made = on_cuda()
    for batch in (1, 5):
        both(target, made, lambda n=batch: [text(seed, temperature, 5 + 3 * seed) for seed in range(n)],  # type: ignore[misc]
             lambda i, n: BUDGETS[(n + i) % len(BUDGETS)])
    assert made[0].recorded is not None and made[0].recorded.held and not made[0].recorded.failed
    assert any(isinstance(each, PlantedTrees) for each in made[0].recorded.held.values())
