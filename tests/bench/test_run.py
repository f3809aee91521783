"""Timed requests: nothing that one arm or repeat has read or written makes another one faster."""

from __future__ import annotations

from pathlib import Path

from draftproof import Engine, LoadConfig
from draftproof.bench.run import Arm, Prompt, measure
from draftproof.models.load import load_target
from draftproof.trace.events import RequestStarted, RoundDone
from draftproof.trace.sinks import Memory


def test_no_run_finds_the_prompt_or_the_answer_of_another(tiny_pair: tuple[Path, Path]) -> None:
    target, told = load_target(tiny_pair[0], LoadConfig(device="cpu", self_test=False)), Memory()
    assert target.tokenizer is not None
    text = target.tokenizer.decode([7 + i % 200 for i in range(600)])
    with Engine(target, "none", sinks=[told]) as off, Engine(target, "suffix", depth=4, sinks=[told]) as on:
        list(measure([Arm("off", off, "none", "0"), Arm("suffix", on, "suffix", "4")], [Prompt("code", text)], [0.0, 0.8], 2, 24, seed=1))
        assert len(target.tokenizer.encode(text)) > 300, "pages enough to be found again"
    started = [event for event in told.events if isinstance(event, RequestStarted)]
    assert len(started) == 8 and [event.cached_tokens for event in started] == [0] * 8
    drafted: dict[str, list[int]] = {}
    for event in told.events:
        if isinstance(event, RoundDone) and event.nodes:
            drafted.setdefault(event.request, []).append(len(event.nodes))
    first, again = (drafted.get(event.request) for event in started if event.tenant in ("suffix-0.0-0", "suffix-0.0-1"))
    assert first == again, "a second run guesses what the first one guessed"
