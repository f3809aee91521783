"""benchmarks/peers.py against fake engines, its arithmetic and its verdict; its own two workers on the built-in pair."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmark_module import FOLDER, benchmark
from safetensors.torch import load_file
from transformers import AutoTokenizer

from draftproof.models.load import WEIGHTS

peers = benchmark("peers")
Told, requests = importlib.import_module("worker").Told, importlib.import_module("crew").requests
Arm, Peer, Timed, Broken = peers.Arm, peers.Peer, peers.Timed, peers.Broken
PROMPTS = [[5, 6, 7], [8, 9]]

FAKE = """
import json, sys, time
sys.path.insert(0, {folder!r})
from worker import main
kind, clock = {kind!r}, [0.0]
time.perf_counter = lambda: clock[0]          # it says how long it took, so that no load of the machine counts

def convert(source, out, bits):
    print("no such format", file=sys.stderr)
    sys.exit(kind == "dies" and 4)

def load(job):
    if kind == "never starts":
        sys.exit("not today")
    print("an engine's own words")
    asked = [0]

    def generate(request, told):
        tokens, most, left = request["max_tokens"], 1 + request["depth"], request["max_tokens"]
        asked[0] += 1
        if asked[0] > 3 and kind == "dies":
            sys.exit("out of luck")
        if asked[0] > 3 and kind == "hangs":
            time.sleep(60)
        clock[0] += 5
        while left:
            clock[0] += 1
            if kind != "silent" and (kind != "cold" or asked[0] > 1):
                told(0, min(most, left))
            left -= min(most, left)
        return [[request["seeds"][0] + i for i in range(tokens)]], tokens // 2 if request["depth"] else None

    return generate

main(load, (), convert)
"""
TELLING = """
import sys
sys.path.insert(0, {folder!r})
from worker import main
main(lambda job: lambda request, told: (["{{drafter}} {{rule}} {{tree}}".format(**request)], None), ())
"""
GARBAGE = "print('[1, 2'); input(); input()"


def fake(folder: Path, kind: str, **more: Any) -> Any:
    script = folder / f"{kind.replace(' ', '_')}.py"
    script.write_text(GARBAGE if kind == "garbage" else FAKE.format(folder=str(FOLDER / "peers"), kind=kind))
    return Peer(script, Path(sys.executable), **more)


def stopped(worker: Any) -> bool:
    """Soon: a signal takes its time."""
    for _ in range(100):
        if Path(f"/proc/{worker.process.pid}/stat").read_text("utf-8").rpartition(")")[2].split()[0] == "T":
            return True
        time.sleep(0.02)
    return False


def a_crew(folder: Path, there: dict[str, Any], arms: list[Any], **more: Any) -> Any:
    return peers.Crew(arms, there, {name: {"target": folder, "draft": folder} for name in there}, PROMPTS[0], folder, patience=4, **more)


def measure(crew: Any, repeats: int = 2) -> Any:
    return peers.measure(crew, PROMPTS, [0.0, 0.8], repeats, 12, 0, peers.Memory(1))


def test_one_that_fails_is_named_and_the_others_go_on(tmp_path: Path) -> None:
    there = {kind: fake(tmp_path, kind) for kind in ("answers", "cold", "dies", "garbage", "hangs", "never starts", "silent")}
    arms = [Arm("answers", 0), Arm("answers", 2), *(Arm(kind, 0) for kind in there if kind != "answers"), Arm("never starts", 2)]
    with a_crew(tmp_path, there, arms) as crew:
        runs, reads = measure(crew)
        assert set(crew.live) == {("answers",), ("cold",)}, "a first run without a rate is only a first run"
        worker = crew.live["answers",]
        assert stopped(worker), "it waits"
    assert worker.process.returncode == 0, "its input is closed, so it ends by itself"
    assert set(runs) == {(t, arm) for t in (0.0, 0.8) for arm in arms[:3]}
    assert all(len(each) == 2 for by_prompt in runs.values() for each in by_prompt)
    assert set(reads) == set(runs) and all(len(each) == 2 and min(each) > 0 for by_prompt in reads.values() for each in by_prompt)
    why = {str(arm): text for arm, text in crew.broken.items()}
    assert why == {"dies plain": "ended with 1: out of luck", "garbage plain": "not an answer: '[1, 2'", "hangs plain": "no answer in 4 s",
                   "never starts plain": "ended with 1: not today", "never starts K=2": "ended with 1: not today",
                   "silent plain": "12 tokens in 17.000 s, the first 12 of them in 17.000 s: no rate"}
    assert crew.versions["answers"]["python"]
    run = runs[0.8, Arm("answers", 2)][1][1]
    assert run == Timed(tuple(range(4, 16)), 9, 6, 3, 6) and run.rate == 3, "three tokens in each of three rounds after the first"


@pytest.mark.parametrize("split, keys", [("", 2), ("arm", 3), ("depth", 4)])
def test_workers_by_what_is_fixed_and_at_most_so_many(tmp_path: Path, split: str, keys: int) -> None:
    there = {"answers": fake(tmp_path, "answers", split=split), "other": fake(tmp_path, "other")}
    arms = [Arm("answers", 0), Arm("answers", 2), Arm("answers", 4), Arm("other", 0)]
    with a_crew(tmp_path, there, arms, together=1) as crew:
        assert len({crew.key(arm) for arm in arms}) == keys
        for arm in arms:
            crew.answer(arm, peers.request(arm, [1], 12, 0.0, 1), Timed.of)
            assert list(crew.live) == [crew.key(arm)]
    assert not crew.broken and not crew.live


def test_depths_that_are_the_engines_own() -> None:
    there = {"own": Peer(Path("x"), Path("y")), "own+auto": Peer(Path("x"), Path("y"), plain=False, depth=peers.AUTO)}
    arms = peers.Prepared({}, [], there, dict.fromkeys(there, {}), {}).arms([2, 4])
    assert [str(arm) for arm in arms] == ["own plain", "own K=2", "own K=4", "own+auto auto"] and arms[-1].mode == "draft"


def test_arms_of_one_engine_share_a_worker_that_is_told_the_way_each_time(tmp_path: Path) -> None:
    script = tmp_path / "telling.py"
    script.write_text(TELLING.format(folder=str(FOLDER / "peers")))
    there = {"own": Peer(script, Path(sys.executable)), "own+block": Peer(script, Path(sys.executable), rule="block", tree=3)}
    with a_crew(tmp_path, there, [Arm("own", 2), Arm("own+block", 2)]) as crew:
        for name, told in (("own", "model match 0"), ("own+block", "model block 3"), ("own", "model match 0")):
            answer = crew.answer(Arm(name, 2), peers.request(Arm(name, 2), [1], 4, 0.0, 1), dict)
            assert answer["texts"][0]["ids"] == told and list(crew.live) == [("own",)]


def test_converting(tmp_path: Path) -> None:
    source, work = tmp_path / "source", tmp_path / "work"
    source.mkdir()
    work.mkdir()
    sources, told = {"target": source, "draft": source}, []

    def digest(folder: Path) -> str:
        told.append(folder)
        return "same"

    good = fake(tmp_path, "answers", converts=True)
    for _ in range(2):
        folders = peers.converted("answers", good, sources, digest, work)
        (folders["target"] / "kept").touch()
    assert folders == {"target": work / "answers/target", "draft": work / "answers/draft"} and (folders["target"] / "kept").exists()
    assert peers.converted("answers+lookup", good, sources, digest, work) == folders and len(told) == 6, "an engine's arms share them"
    assert peers.converted("answers", fake(tmp_path, "plain only"), sources, digest, work) == sources
    with pytest.raises(Broken, match="converting the target ended with 4: no such format"):
        peers.converted("dies", fake(tmp_path, "dies", converts=True), sources, digest, work)
    with pytest.raises(Broken, match="no python in .venv-x"):
        peers.converted("x", Peer(good.script, tmp_path / ".venv-x/bin/python"), sources, digest, work)
    with pytest.raises(Broken, match="not given weights of 4 bits"):
        peers.converted("answers", good, sources, digest, work, 4)
    rounded = replace(good, bits=(16, 4))
    folders = peers.converted("answers", rounded, sources, digest, work, 4)
    assert {role: folder.name for role, folder in folders.items()} == {"target": "target-4", "draft": "draft"}


def timed(rate: float, ids: tuple[int, ...] = (1, 2, 3), accepted: int | None = None) -> Any:
    return Timed(ids, 0.5 + (len(ids) - 1) / rate, 0.5, 1, accepted)


def every(rate: float, **more: Any) -> list[list[Any]]:
    return [[timed(rate, **more)] * 2 for _ in range(3)]


def test_rates_and_ratios() -> None:
    assert timed(40.0).rate == pytest.approx(40)
    text = {"ids": [1, 2], "came": [[1, 1], [2, 1]]}
    whole = {"texts": [text], "seconds": 2}
    assert Timed.of(whole).rate == 1
    for answer in ({}, {"texts": [text | {"ids": [1]}], "seconds": 2}, {"texts": [text | {"came": [[1, 2]]}], "seconds": 2},
                   whole | {"seconds": 1}, whole | {"seconds": "x"}, {"texts": 3}, {"texts": [text] * 2, "seconds": 2},
                   {"texts": [text | {"came": []}], "seconds": 2}):
        with pytest.raises(Broken):
            Timed.of(answer)
    ratio = peers.paired([[2.0, 8.0], [6.0, 6.0], [1.0, 1.0]], [[1.0, 2.0], [2.0, 1.0], [1.0, 1.0]])
    assert (ratio["median"], ratio["min"], ratio["max"]) == (3.0, 1.0, 4.5) and ratio["low"] is ratio["high"] is None
    assert peers.shown(ratio) == "3.00 [1.00–4.50]" and "fewer than six" in peers.BRACKETS
    ratio = peers.paired([[float(i)] for i in range(1, 10)], [[1.0]] * 9)
    assert peers.shown(ratio) == "5.00 [2.00–8.00]" and ratio["max"] == 9


def test_goals_and_verdict() -> None:
    ours, on, slow = Arm("ours", 0), Arm("ours", 4), Arm("ours", 2)
    runs = {(0.0, ours): every(50), (0.0, on): every(120, accepted=1), (0.0, slow): every(70), (0.0, Arm("a", 0)): every(52),
            (0.0, Arm("b", 0)): every(40), (0.0, Arm("a", 2)): every(60), (0.0, Arm("b", 6)): every(100), (0.8, on): every(80),
            (0.8, Arm("a", 2)): every(39), (0.8, Arm("b", 6)): every(50), (0.0, Arm("ours+ngram", 4)): every(130),
            (0.0, Arm("b+lookup", 4)): every(90), (0.8, Arm("b+lookup", 4)): every(44), (0.8, Arm("a", 0)): every(30)}
    limits = {key: [[60.0, 60.0]] * 3 for key in runs}
    found = peers.goals(runs, limits)
    assert [(g["over"], g["against"], g["met"]) for g in found] == [
        ("ours plain", "a plain", True), ("ours plain", None, False), ("ours K=4", "b K=6", True),
        ("ours+ngram K=4", "b K=6", False),
        ("ours K=4", "a K=2", True), ("ours K=4", "b K=6", False), ("ours K=4", "b+lookup K=4", False), ("ours K=4", "a plain", True)]
    faster = peers.goals({**runs, (0.0, Arm("b+lookup", 4)): every(101)}, limits)
    assert [(g["against"], g["met"]) for g in faster[2:4]] == [("b K=6", True), ("b+lookup K=4", False)], "lookup has no draft model"
    assert found[1]["found"]["median"] == pytest.approx(50 / 60)
    assert [(g["over"], g["against"], g["met"]) for g in peers.goals(runs, limits, bits=4)] == [
        ("ours plain", "a plain", False), ("ours K=4", "ours plain", True)]
    result = {"cells": [peers.cell(runs, key, limits) for key in runs], "goals": found}
    assert peers.verdict(result) == 3 and peers.verdict({**result, "goals": found[:1]}) == 0
    row = result["cells"][1]
    assert row["tokens_per_pass"] == 1.5 and row["over_off"]["median"] == pytest.approx(2.4) and row["same_as_ours_off"] == "6/6"
    assert result["cells"][7]["over_off"] is None, "there is no plain run of ours at that temperature"
    alone = {key: runs[key] for key in runs if key[1].peer not in peers.OWN}
    assert [g["met"] for g in peers.goals(alone, limits)] == [None] * 8
    assert peers.verdict({"cells": [peers.cell(alone, key, limits) for key in alone], "goals": []}) == 1
    page = peers.page({**result, "command": "c", "machine": {"cpu": "x"}, "threads": 2, "date": "d", "versions": {"revision": "r"},
                       "prompt_tokens": [3], "repeats": 2, "tokens": 3, "read_gb_per_s": {"median": 60.0, "low": 50.0, "high": 70.0},
                       "pass_bytes": 10**9, "bits": 16, "floor_ms": 16.7, "not_run": {"c": "no python"}})
    assert "| 0 | ours K=4 | 120.0 (120.0–120.0) | 8.3 | 2.00 [2.00–2.00]" in page and "c: not run: no python" in page and "NO" in page


def test_how_long_the_first_token_takes() -> None:
    ours, late = Arm("ours", 0), Arm("a", 0)
    runs = {(0.0, ours): every(50), (0.0, late): [[Timed((1, 2), 2.0, 1.5, 1, None)] * 2] * 3}
    first, second = (peers.cell(runs, key, {key: [[60.0, 60.0]] * 3}) for key in runs)
    assert first["first_ms"] == 500 and first["first_over_off"]["median"] == 1
    assert second["first_ms"] == 1500 and second["first_over_off"]["median"] == 3


def test_long_prompts_are_of_the_length_asked_for() -> None:
    words = AutoTokenizer.from_pretrained(WEIGHTS / "target")
    found = benchmark("pair").long_prompts(words, 3, 900)
    assert [len(ids) for ids in found] == [900] * 3 and len({tuple(ids) for ids in found}) == 3
    with pytest.raises(SystemExit, match="99999 were asked for"):
        benchmark("pair").long_prompts(words, 99_999, 900)


def test_bytes_of_a_pass() -> None:
    tied = WEIGHTS / "target"
    assert 0.99 < benchmark("pair").pass_bytes(tied) / os.path.getsize(tied / "model.safetensors") <= 1


WAYS = {"with_draftproof": [{"drafter": "model", "rule": "match", "tree": 0}, {"drafter": "model", "rule": "block", "tree": 0},
                            {"drafter": "ngram+eagle3", "rule": "match", "tree": 6}],
        "with_transformers": [{"drafter": "model", "rule": "match", "tree": 0}]}


@pytest.mark.parametrize("name", WAYS)
def test_own_workers_on_the_built_in_pair(name: str) -> None:
    load = importlib.import_module(name).load
    generate = load({"target": str(WEIGHTS / "target"), "draft": str(WEIGHTS / "draft"), "head": str(WEIGHTS / "eagle3"), "threads": 1,
                     "bits": 16, "cache_bits": 16, "users": 2, **WAYS[name][0]})
    ids = json.loads((WEIGHTS / "prompts.jsonl").read_text("utf-8").splitlines()[0])["prompt"]
    prompt = [ord(c) % 256 + 4 for c in ids[:40]]
    told = Told(1)
    (plain,), _ = generate(peers.request(Arm(name, 0), prompt, 12, 0.0, 1) | WAYS[name][0], told)
    assert [count for _, count in told.came[0]] == [1] * 12, "one by one"
    for way in WAYS[name]:
        for temperature in (0.0, 0.8):
            told = Told(1)
            (new,), accepted = generate(peers.request(Arm(name, 2), prompt, 12, temperature, 1) | way, told)
            assert len(new) == sum(count for _, count in told.came[0]) == 12 and 0 <= accepted < 12
            assert temperature or new == plain
    if name == "with_draftproof":
        assert generate(peers.request(Arm(name, peers.AUTO), prompt, 12, 0.0, 1) | WAYS[name][2], Told(1))[0] == [plain]
    told = Told(3)
    texts, _ = generate(requests(Arm(name, 0), [prompt, prompt[5:], prompt], 12, 0.0, [1, 2, 3], 2) | WAYS[name][0], told)
    assert texts[0] == texts[2] == plain and len(texts[1]) == 12
    assert all(sum(count for _, count in came) == 12 and came[0][0] > begun for came, begun in zip(told.came, told.begun_s, strict=True))
    assert told.begun_s[2] >= min(told.came[0][-1][0], told.came[1][-1][0]), "two at once"


@pytest.mark.parametrize("target, taps", [("dense", [1, 6, 9]), ("moe", [1, 4, 6])])
def test_a_turned_head_reads_the_large_stream_as_the_small_one(tmp_path: Path, target: str, taps: list[int]) -> None:
    pair, inflate = benchmark("pair"), benchmark("inflate")
    folder = pair.turned_head(WEIGHTS / "eagle3", WEIGHTS / "target", pair.TARGETS[target], tmp_path / "head", 3)
    small, large = (load_file(place / "model.safetensors") for place in (WEIGHTS / "eagle3", folder))
    config = json.loads((folder / "config.json").read_text("utf-8"))
    width, wide = 384, config["target_hidden_size"]
    random = torch.Generator().manual_seed(3)
    rotation = inflate.rotation_of(wide, width, random)
    assert (rotation.T @ rotation - torch.eye(width)).abs().max() < 1e-5
    hidden = [torch.randn(5, width, generator=random) for _ in range(3)]
    stream = torch.cat([h @ rotation.T * (wide / width) ** 0.5 for h in hidden], 1)
    expected, found = torch.cat(hidden, 1) @ small["fc.weight"].float().T, stream @ large["fc.weight"].float().T
    assert (found - expected).abs().max() < 0.02 * expected.abs().max(), "but for rounding to bfloat16"
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == taps, "where layers 1, 4 and 6 of ten are"
    assert torch.equal(large["lm_head.weight"], small["lm_head.weight"]) and large["embed_tokens.weight"].shape == (4096, width)
