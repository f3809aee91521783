"""Replay is exact: on the engine's own texts it counts what the engine counted, at any temperature, for chains and trees."""

from __future__ import annotations

import pytest
import torch

from draftproof.audition.replay import Story, replay
from draftproof.core.tally import Tally
from draftproof.drafters.base import Drafter
from draftproof.drafters.fixed import AlwaysWrong
from draftproof.drafters.model import ModelDrafter
from draftproof.drafters.ngram import NgramDrafter
from draftproof.engine.engine import Engine
from draftproof.models.fake import TableTarget
from draftproof.trace.report import requests
from draftproof.trace.sinks import Memory
from draftproof.types import Sampling

V = 9
MADE = {
    "ngram": lambda: NgramDrafter(),
    "model": lambda: ModelDrafter(TableTarget(V, order=2, seed=1, sharpness=1.5), V),
    "always-wrong": lambda: AlwaysWrong(V),
}


def target() -> TableTarget:
    return TableTarget(V, order=2, seed=1, sharpness=3.0, eos_ids=(0,))


def written(drafter: Drafter, temperature: float, depth: int, tree: int | None) -> tuple[list[Story], list[Tally]]:
    sink, sampling = Memory(), Sampling(temperature=temperature, top_p=1.0, seed=4, max_tokens=40)
    prompts = [(1, 2, 3), (4, 5), (7, 1, 7, 1, 7), (2,), (8, 8, 3)]
    with Engine(target(), drafter, depth, tree=tree, sinks=[sink]) as engine:
        done = [engine.generate(prompt, sampling) for prompt in prompts]
    stories = [Story(prompt, d.token_ids, sampling, seed=4, limit=len(prompt) + 40, end_ids=frozenset({0}))
               for prompt, d in zip(prompts, done, strict=True)]
    return stories, [report.tally for report in requests(sink.events).values()]


@pytest.mark.parametrize("tree", [None, 11])
@pytest.mark.parametrize("depth", [1, 4, 7])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("name", MADE)
def test_the_replay_counts_what_the_engine_counted(name: str, temperature: float, depth: int, tree: int | None) -> None:
    stories, expected = written(MADE[name](), temperature, depth, tree)
    for batch in (1, 3):
        assert replay(MADE[name](), stories, depth, nodes=tree, batch=batch) == expected


def test_some_texts_ended_early_and_some_guesses_stood() -> None:
    stories, tallies = written(MADE["model"](), 1.0, 4, None)
    assert any(len(s.answer) < 40 for s in stories) and any(len(s.answer) == 40 for s in stories)
    assert sum(t.accepted for t in tallies) > 10


def test_a_wrong_seed_is_noticed() -> None:
    """The test above can fail: with other noise the sampled guesses differ."""
    stories, expected = written(MADE["model"](), 1.0, 4, None)
    other = [Story(s.prompt, s.answer, s.sampling, seed=5, limit=s.limit, end_ids=s.end_ids) for s in stories]
    assert replay(MADE["model"](), other, 4) != expected


def test_a_text_of_one_token_has_no_round() -> None:
    (tally,) = replay(NgramDrafter(), [Story((1, 2), (3,), Sampling(temperature=0))], 4)
    assert tally.rounds == 0 and tally.completion_tokens == 1


def test_states_reach_the_drafter_where_the_engine_would_bring_them() -> None:
    """Rows of the prompt at the opening, then of the root and what was kept."""
    seen: list[tuple[int, int]] = []

    class Listener(NgramDrafter):
        needs = NgramDrafter.needs.__class__(taps=(0,))

        def open(self, seq, signals):  # type: ignore[no-untyped-def]
            seen.append((signals.start, signals.taps[0].shape[0]))
            return super().open(seq, signals)

        def observe(self, states, commits, signals):  # type: ignore[no-untyped-def]
            for commit, each in zip(commits, signals, strict=True):
                assert each.start == commit.start - 1 and each.taps[0].shape[0] == 1 + len(commit.kept)
                seen.append((each.start, each.taps[0].shape[0]))
            super().observe(states, commits, signals)

    story = Story((1, 2, 1), (2, 1, 2, 5, 1), Sampling(temperature=0))
    replay(Listener(), [story], 3, states=lambda ids: {0: torch.arange(len(ids), dtype=torch.float32)[:, None]})
    assert seen[0] == (0, 3)
    assert [start for start, _ in seen[1:]] == [3 + sum(n for _, n in seen[1:i]) for i in range(1, len(seen))]
