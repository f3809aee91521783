"""benchmarks/crowd.py: what users feel is read from deliveries; fake engines and our own beside each other; its goals and its verdict."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmark_module import FAKE_CLOCK, FOLDER, benchmark

from draftproof.models.load import WEIGHTS

crowd = benchmark("crowd")
crew, worker = importlib.import_module("crew"), importlib.import_module("worker")

FAKE = FAKE_CLOCK + """
from worker import in_turn, main

def load(job):
    def generate(request, told):
        left = {{}}

        def step():
            clock[0] += pace
            if pace == 4 and request["depth"]:
                sys.exit("too many")
            for text in left:
                told(text, min(left[text], 1 + request["depth"]))
                left[text] -= min(left[text], 1 + request["depth"])
            ended = [text for text in left if not left[text]]
            for text in ended:
                del left[text]
            return ended

        in_turn(request, told, lambda text: left.__setitem__(text, request["max_tokens"]), step)
        return [[seed] * request["max_tokens"] for seed in request["seeds"]], None

    return generate

main(load, ())
"""


def text(came: list[tuple[float, int]], begun: float = 0.0) -> dict[str, Any]:
    return {"ids": [7] * sum(count for _, count in came), "begun_s": begun, "came": came}


def test_what_a_user_feels() -> None:
    run = crowd.Served.of({"texts": [text([(2.0, 1), (3.0, 2), (6.0, 2)], 0.5), text([(4.0, 5)])], "seconds": 8})
    assert run.texts == (crowd.Text((7,) * 5, 1.5, 1.0, 3.0), crowd.Text((7,) * 5, 4.0, 0.0, 0.0)) and run.rate == 10 / 8
    for answer in ({}, {"texts": [text([(1.0, 1)]) | {"ids": [7, 7]}], "seconds": 8}, {"texts": [text([])], "seconds": 8}, {"texts": []}):
        with pytest.raises(crew.Broken):
            crowd.Served.of(answer)


def test_the_next_prompt_begins_when_a_text_ends() -> None:
    left, most, begun = {}, [], []

    def begin(i: int) -> None:
        left[i] = 1 + i % 3
        begun.append(i)

    def step() -> list[int]:
        most.append(len(left))
        left.update({i: n - 1 for i, n in left.items()})
        return [i for i in list(left) if not left[i] and not left.pop(i)]

    told = worker.Told(7)
    worker.in_turn({"prompts": [[1]] * 7, "users": 3}, told, begin, step)
    assert begun == list(range(7)) and not left and max(most) == 3 and most[:3] == [3, 3, 3]
    assert told.begun_s == sorted(told.begun_s)


def test_engines_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, pace in (("slow", 4.0), ("idle", 5.0)):
        script = tmp_path / f"{name}.py"
        script.write_text(FAKE.format(folder=str(FOLDER / "peers"), pace=pace))
        monkeypatch.setitem(crowd.prepared.__globals__["PEERS"], name, crew.Peer(script, Path(sys.executable)))
    page = tmp_path / "page.md"
    page.write_text("Before.\n<!-- crowd: begin -->\nold\n<!-- crowd: end -->\nBehind.\n")
    monkeypatch.setattr(sys, "argv", ["crowd.py", "--as-is", "--target", str(WEIGHTS / "target"), "--draft", str(WEIGHTS / "draft"),
                                      "--head", str(WEIGHTS / "eagle3"), "--peers", "ours,ours+eagle3+auto,slow,idle", "--depths", "2",
                                      "--users", "2", "--prompts", "3", "--tokens", "6", "--repeats", "2", "--threads", "1",
                                      "--work", str(tmp_path / "work"), "--write", str(page)])
    assert crowd.main() == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    cells = {str(crew.Arm(row["peer"], row["depth"])): row for row in result["cells"]}
    assert set(cells) == {"ours plain", "ours K=2", "ours+eagle3+auto auto", "slow plain", "idle plain", "idle K=2"}
    assert result["not_run"] == {"slow K=2": "ended with 1: too many"}
    assert cells["slow plain"]["tokens_per_s"] == pytest.approx(18 / 48) and cells["idle K=2"]["tokens_per_s"] == pytest.approx(18 / 20)
    assert cells["idle K=2"]["over_own_plain"]["median"] == pytest.approx(3) and cells["idle plain"]["token_ms"]["median"] == 5000
    assert [cells[name]["same_as_ours_off"] for name in ("ours K=2", "ours+eagle3+auto auto", "idle plain")] == ["6/6", "6/6", "0/6"]
    assert cells["idle plain"]["first_ms"] == {"median": 5000, "p90": 5000}
    assert all(goal["met"] for goal in result["goals"]) and len(result["goals"]) == 3
    told = page.read_text()
    assert "old" not in told and told.startswith("Before.") and "slow K=2: not run" in told and "| yes |" in told
    for goal in result["goals"]:
        goal["met"] = False
    assert crowd.verdict(result) == 3 and crowd.verdict({**result, "cells": []}) == 1


@pytest.mark.parametrize("words, said", [(["--users", "1"], "2 or more"), (["--peers", "ours,onnx"], "prompts of one length")])
def test_what_is_not_asked(words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["crowd.py", *words])
    with pytest.raises(SystemExit):
        crowd.main()
    assert said in capsys.readouterr().err
