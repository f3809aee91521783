"""A run that is stopped, killed or slow: little is lost, nothing is half done, and how far it is is told."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from train.test_loop import Killed, NextToken, V, texts

from draftproof.commands import console
from draftproof.models.fake import TableTarget
from draftproof.train import loop
from draftproof.train.base import Features
from draftproof.train.corpus import Text
from draftproof.train.features import Tapper
from draftproof.train.loop import Plan, Shown, train
from draftproof.train.muon import Muon


def learn(folder: Path, before: Callable[[int], None] = lambda step: None, steps: int = 12, look_every: int = 5,
          served: Callable[[], float] = lambda: 1.5) -> tuple[list[Shown], list[str], dict[str, Tensor]]:
    """A run of which `before` is called before each of its steps."""
    target, shown, said, count = TableTarget(V, order=1, sharpness=4.0), [], [], itertools.count(1)
    task = NextToken(V + 1)
    folder.mkdir(exist_ok=True)

    class Counting(Tapper):
        def read(self, given: Sequence[Text]) -> list[Features]:
            before(next(count))
            return super().read(given)

    try:
        train(task, texts(), Counting(target, task.taps), Plan(steps, batch=4, lr=0.03, warmup=5, look_every=look_every), folder,
              shown.append, served=served, say=said.append)
    except (KeyboardInterrupt, Killed):
        said.append("ended")
    return shown, said, {name: tensor.clone() for name, tensor in task.module.state_dict().items()}


def ends(at: int, how: type[BaseException]) -> Callable[[int], None]:
    def before(step: int) -> None:
        if step == at:
            raise how

    return before


def test_ctrl_c_loses_no_step_and_the_same_run_says_where_it_goes_on(tmp_path: Path) -> None:
    _, said, whole = learn(tmp_path / "whole")
    assert said == []
    _, said, _ = learn(tmp_path / "torn", ends(8, KeyboardInterrupt))
    assert said == ["stopped behind step 7/12; the same command goes on from there", "ended"]
    _, said, resumed = learn(tmp_path / "torn")
    assert said == ["going on from step 7/12"] and all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_ctrl_c_while_the_weights_move_keeps_none_that_are_half_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, whole = learn(tmp_path / "whole")
    move, count = Muon.step, itertools.count(1)

    def torn(self: Muon, *given: object) -> object:
        moved = move(self, *given)  # type: ignore[arg-type]
        if next(count) == 8:
            raise KeyboardInterrupt
        return moved

    monkeypatch.setattr(Muon, "step", torn)
    _, said, _ = learn(tmp_path / "torn")
    monkeypatch.setattr(Muon, "step", move)
    assert said == ["ended"]
    _, _, resumed = learn(tmp_path / "torn")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_a_kill_costs_a_minute_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "SAVE_S", 0.0)
    learn(tmp_path, ends(8, Killed))
    assert learn(tmp_path)[1] == ["going on from step 7/12"]


def test_long_work_is_told_by_the_clock_with_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, told = [0.0], []
    monkeypatch.setattr(console, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    pace, count = console.Pace(told.append, "answers", 700), console.Pace(told.append, "texts")
    for clock[0], done in ((1.0, 500), (6.0, 525), (12.0, 555), (15.0, 570), (1000.0, 699), (2000.0, 700)):     # 500 were there
        pace(done)
    assert told == ["555/700 answers · about 29 s left", "699/700 answers · about 5 s left", "700/700 answers"]
    count(7)
    assert told[-1] == "7 texts"
    assert [console.remaining(s) for s in (240, 9000)] == ["about 4 min left", "about 2.5 h left"]


def test_a_slow_step_is_shown_and_looks_are_not_on_its_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: clock[0]))

    def passes(seconds: float) -> float:
        clock[0] += seconds
        return 1.5

    shown, _, _ = learn(tmp_path, lambda step: (passes(4.0), None)[1], served=lambda: passes(1000.0))
    assert [line.step for line in shown] == [3, 5, 8, 10, 12] and [line.served for line in shown] == [None, 1.5, None, 1.5, 1.5]
    assert [line.left_s for line in shown] == pytest.approx([36, 28, 16, 8, 0])
    assert max(line.tokens_per_s for line in shown) == pytest.approx(min(line.tokens_per_s for line in shown), rel=0.2)
