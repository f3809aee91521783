"""An audition counts what the engine counted, however it is cut into blocks, processes and sittings; and says what is exact."""

from __future__ import annotations

import json
import resource
import shutil
import signal
import time
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
from vector_heads import VECTOR_HEADS

from draftproof.audition import run as audition
from draftproof.audition.counts import Counts, best_depths
from draftproof.audition.replay import Story, copied, granted, replay
from draftproof.audition.run import Arm, Work
from draftproof.audition.stories import Reader
from draftproof.audition.workers import _worker, run
from draftproof.cli import run as command
from draftproof.commands.audition import _begin
from draftproof.config import EngineConfig
from draftproof.core.tally import Tally
from draftproof.drafters.base import Drafter
from draftproof.drafters.fixed import AlwaysWrong
from draftproof.drafters.model import ModelDrafter
from draftproof.drafters.ngram import NgramDrafter
from draftproof.drafters.recycle import RecycleDrafter
from draftproof.drafters.suffix import SuffixDrafter
from draftproof.engine.engine import Engine
from draftproof.errors import Failure, OptionError
from draftproof.models.fake import TableTarget
from draftproof.serve.versions import folder_mark
from draftproof.trace.sinks import Jsonl
from draftproof.types import Sampling

V = 9
PROMPTS = [(1, 2, 3), (4, 5), (7, 1, 7, 1, 7), (2,), (8, 8, 3), (3, 1), (5, 5, 5), (6, 2)]


def target() -> TableTarget:
    return TableTarget(V, order=2, seed=1, sharpness=3.0, eos_ids=(0,))


def drafter(name: str) -> Drafter:
    return {"ngram": NgramDrafter, "suffix": SuffixDrafter, "recycle": RecycleDrafter, "wrong": lambda: AlwaysWrong(V),
            "model": lambda: ModelDrafter(TableTarget(V, order=2, seed=1, sharpness=1.5), V)}[name]()


def write(folder: Path, name: str, depth: int, temperature: float, traced: bool = False) -> tuple[Path, dict[str, Any]]:
    """A log that the engine wrote, and the engine's own counts. depth 0: one that changes from round to round."""
    log, trace = folder / "log.jsonl", folder / "trace.jsonl"
    sink = Jsonl(trace)
    with Engine(target(), drafter(name), depth or 6, config=EngineConfig(trace="full"), sinks=[sink]) as engine:
        with log.open("w") as out:
            for i, prompt in enumerate(PROMPTS):
                (handle,) = engine.submit(prompt, Sampling(temperature=temperature, top_p=1.0, seed=i, max_tokens=40),
                                          prompt_class="even" if i % 2 == 0 else "odd")
                steps = 0
                while not handle.done:
                    if not depth:
                        engine.set_speculation(depth_cap=(6, 0, 2, 5, 1)[steps % 5])
                    engine.step()
                    steps += 1
                done = handle.completion()
                out.write(json.dumps({"prompt_token_ids": prompt, "token_ids": done.token_ids, "max_tokens": 40,
                                      "finish_reason": done.finish_reason, "class": "even" if i % 2 == 0 else "odd"}) + "\n")
        metrics = engine.stats()["metrics"]
    sink.close()
    return trace if traced else log, metrics


def work(log: Path, name: str, depth: int | None) -> Work:
    made = name in ("model", "wrong", "recycle")
    spec = "custom:a.b:C" if name == "wrong" else name
    return Work(str(log), (Arm(spec, depth),), Reader.of(target()), target() if made else None, lambda spec: drafter(name))


def counts(cell: dict[str, Any]) -> tuple[Any, ...]:
    return cell["rounds"], cell["drafted"], cell["accepted"], cell["acceptance_length"], cell["hazard"]


def same(cell: dict[str, Any], metrics: dict[str, Any]) -> bool:
    return counts(cell) == counts(metrics)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name, depth", [("ngram", 3), ("ngram", 7), ("suffix", 5), ("wrong", 2)])
def test_a_minimal_log_gives_the_engines_counts(name: str, depth: int, temperature: float, tmp_path: Path) -> None:
    log, metrics = write(tmp_path, name, depth, temperature)
    result = run(work(log, name, depth))
    cells = {cell["class"]: cell for cell in result.cells()}
    assert set(cells) == {"even", "odd", "all"} and same(cells["all"], metrics)
    assert cells["even"]["rounds"] + cells["odd"]["rounds"] == metrics["rounds"]
    assert result.log()["requests"] == len(PROMPTS) and cells["all"]["figure"] == "exact"


@pytest.mark.parametrize("name", ["ngram", "suffix", "model"])
@pytest.mark.parametrize("depth", [4, 0])
def test_our_traces_are_exact_at_any_temperature_and_depth(name: str, depth: int, tmp_path: Path) -> None:
    """Depth 0 stands for a depth that changed from round to round."""
    log, metrics = write(tmp_path, name, depth, 0.8, traced=True)
    (whole,) = [cell for cell in run(work(log, name, depth or None)).cells() if cell["class"] == "all"]
    assert same(whole, metrics) and whole["figure"] == "exact" and metrics["accepted"] > 5


def test_remembered_rows_are_read_from_the_target_again(tmp_path: Path) -> None:
    """What was likely in an answer is nowhere in a log; its noise is in our trace."""
    log, metrics = write(tmp_path, "recycle", 4, 0.8, traced=True)
    (whole,) = [cell for cell in run(work(log, "recycle", 4)).cells() if cell["class"] == "all"]
    assert same(whole, metrics) and whole["figure"] == "exact" and metrics["accepted"] > 40


@pytest.mark.parametrize("name", ["medusa", "hydra-prefix", "mlp"])
def test_heads_are_exact_with_the_states_of_a_prefill(name: str, tmp_path: Path) -> None:
    model, trace = target(), tmp_path / "trace.jsonl"
    sink = Jsonl(trace)
    with Engine(model, VECTOR_HEADS[name](model, model), 3, config=EngineConfig(trace="full"), sinks=[sink]) as engine:
        engine.generate_batch(PROMPTS, Sampling(temperature=0.8, top_p=1.0, seed=3, max_tokens=30))
        metrics = engine.stats()["metrics"]
    sink.close()
    job = Work(str(trace), (Arm(f"{name.partition('-')[0]}:x", 3),), Reader.of(model), model, lambda spec: VECTOR_HEADS[name](model, model))
    (whole,) = run(job).cells()
    assert same(whole, metrics) and whole["figure"] == "exact" and metrics["accepted"] > 0 and not model.open_slots


def test_a_sampled_log_without_its_noise_is_named_as_greedy(tmp_path: Path) -> None:
    log, metrics = write(tmp_path, "model", 4, 0.8)
    (whole,) = [cell for cell in run(work(log, "model", 4)).cells() if cell["class"] == "all"]
    assert whole["figure"] == "greedy" and not same(whole, metrics)
    greedy, metrics = write(tmp_path, "model", 4, 0.0)
    (whole,) = [cell for cell in run(work(greedy, "model", 4)).cells() if cell["class"] == "all"]
    assert same(whole, metrics)


def test_the_lean_path_is_the_replay() -> None:
    stories = [Story(p, tuple((7 * i + len(p) * j) % 5 for j in range(60)), Sampling(temperature=0), limit=limit, depths=((0, 3), (40, 1)))
               for i, p in enumerate(PROMPTS) for limit in (None, 90)]
    for depths in ((1, 3, 9), (9,), (2, 1), (None,)):
        for kind in (NgramDrafter, SuffixDrafter):
            lean = kind()
            found = list(zip(*(copied(lean, story, depths) for story in stories), strict=True))
            for depth, tallies in zip(depths, found, strict=True):
                assert list(tallies) == replay(kind(), stories, depth, batch=1)
    assert [granted(stories[0], at) for at in (0, 39, 40, 99)] == [3, 3, 1, 1]


def test_a_text_on_which_nobody_was_asked_is_not_remembered() -> None:
    """Two tokens leave no room for a guess: the engine's store never hears of them."""
    stories = [Story(prompt, answer, Sampling(temperature=0)) for prompt, answer in (((1, 2, 3), (4, 5)), ((9, 2, 3), (4, 5, 6, 7, 8)))]
    lean = SuffixDrafter()
    found = [copied(lean, story, (3,))[0] for story in stories]
    assert found == replay(SuffixDrafter(), stories, 3, batch=1) and not found[1].drafted


@pytest.fixture
def blocks_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audition, "BLOCK", 2)


@pytest.mark.usefixtures("blocks_of_two")
@pytest.mark.parametrize("name", ["ngram", "suffix"])
def test_shares_add_up_to_the_whole(name: str, tmp_path: Path) -> None:
    """Each half of a suffix store's work has learnt what the other counted."""
    log, metrics = write(tmp_path, name, 5, 0.8)
    job, result = work(log, name, 5), audition.Result((Arm(name, 5),))
    for index in range(2):
        for part in job.parts(audition.Share((0,), index, 2), audition.Skipped()):
            result.add(part)
    assert same(result.cells()[-1], metrics)


@pytest.mark.usefixtures("blocks_of_two")
@pytest.mark.parametrize("name", ["ngram", "suffix", "wrong"])
def test_a_killed_run_goes_on_where_it_was(name: str, tmp_path: Path) -> None:
    log, metrics = write(tmp_path, name, 5, 0.8)
    kept = tmp_path / "kept.jsonl"
    job = work(log, name, 5)

    def die(part: audition.Part) -> None:
        if part.block == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(job, partial=kept, progress=die)
    kept.write_bytes(kept.read_bytes() + b'{"arm": 0, "blo')
    seen: list[int] = []
    result = run(job, partial=kept, progress=lambda part: seen.append(part.block))
    assert seen == [2, 3] and same(result.cells()[-1], metrics)
    assert same(run(job, partial=kept).cells()[-1], metrics)
    with pytest.raises(Failure, match="no partial result of this audition"):
        run(work(log, name, 6), partial=kept)


@pytest.mark.parametrize("content", [b"my precious notes\n", b"notes", b'{"a": 1}\n', b'{"a": 1}', b"\xff\xfe", b'{"format": "other"'])
def test_a_file_that_is_no_partial_result_stays_as_it_is(content: bytes, tmp_path: Path) -> None:
    log, _ = write(tmp_path, "ngram", 2, 0.0)
    kept = tmp_path / "notes.txt"
    kept.write_bytes(content)
    with pytest.raises(Failure, match="no partial result of this audition"):
        run(work(log, "ngram", 2), partial=kept)
    assert kept.read_bytes() == content


def test_a_first_line_that_was_cut_short_is_written_again(tmp_path: Path) -> None:
    log, metrics = write(tmp_path, "ngram", 2, 0.0)
    kept, job = tmp_path / "kept.jsonl", work(log, "ngram", 2)
    run(job, partial=kept)
    whole = kept.read_bytes()
    header = whole.split(b"\n")[0]
    for begun in (b"", header[:9], header):
        kept.write_bytes(begun)
        assert same(run(job, partial=kept).cells()[-1], metrics) and kept.read_bytes() == whole


def test_what_is_no_part_is_told(tmp_path: Path) -> None:
    log, _ = write(tmp_path, "ngram", 2, 0.0)
    kept, job = tmp_path / "kept.jsonl", work(log, "ngram", 2)
    run(job, partial=kept)
    kept.write_bytes(kept.read_bytes() + b'{"arm": 0}\n')
    with pytest.raises(Failure, match=r"line 3: no part of an audition"):
        run(job, partial=kept)


def test_a_disk_that_fills_leaves_what_was_counted(tmp_path: Path) -> None:
    log, metrics = write(tmp_path, "ngram", 2, 0.0)
    kept, job = tmp_path / "kept", work(log, "ngram", 2)
    run(job, partial=kept)
    most = kept.stat().st_size - 20
    kept.unlink()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        with pytest.raises(Failure, match=r"kept: File too large; .*goes on from there"):
            run(job, partial=kept)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert kept.stat().st_size == most and same(run(job, partial=kept).cells()[-1], metrics)


@pytest.mark.parametrize(("kept", "words"), [("log.jsonl", "that is the file of LOG"), ("none/kept", "the folder does not exist")])
def test_a_partial_result_that_cannot_be_kept_is_told_at_once(kept: str, words: str, tmp_path: Path,
                                                              capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text('{"prompt_token_ids": [1, 2], "token_ids": [3, 4]}\n')
    assert command(["audition", str(log), "--partial", str(tmp_path / kept)]) == 2 and words in capsys.readouterr().err


def test_a_partial_result_of_another_target_is_refused(tiny_pair: tuple[Path, Path], tmp_path: Path,
                                                       capsys: pytest.CaptureFixture[str]) -> None:
    log, kept, target = tmp_path / "log.jsonl", tmp_path / "kept.jsonl", tmp_path / "target"
    log.write_text(json.dumps({"prompt": "one two one two", "completion": " one two one two"}) + "\n")
    shutil.copytree(tiny_pair[0], target)
    arguments = ["audition", str(log), "--drafter", "ngram", "--depth", "2", "--partial", str(kept), "--target"]
    assert command([*arguments, str(target)]) == 0 and command([*arguments, str(target)]) == 0
    whole = kept.read_bytes()
    with (target / "config.json").open("a") as file:        # the same name, other contents
        file.write(" ")
    folder_mark.cache_clear()
    capsys.readouterr()
    assert command([*arguments, str(target)]) == 1 and "no partial result of this audition" in capsys.readouterr().err
    assert command(arguments[:-1]) == 1 and kept.read_bytes() == whole


def test_a_class_named_all_is_not_the_whole_log(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps({"prompt_token_ids": [1, 2, 1], "token_ids": [2, 1, 2, 1] * repeat, "class": name}) + "\n"
                           for name, repeat in (("all", 1), ("chat", 5), ("all", 2))))
    cells = run(work(log, "ngram", 2)).cells()
    assert [(c["class"], c["requests"]) for c in cells] == [("chat", 1), ("other", 2), ("all", 3)]


def test_processes_count_the_same(tmp_path: Path) -> None:
    log, metrics = write(tmp_path, "suffix", 5, 0.8)
    job = Work(str(log), (Arm("suffix", 5),), Reader())
    assert run(job, processes=2).cells() == run(job).cells() and same(run(job).cells()[-1], metrics)


def test_processes_load_early_where_they_will_be_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []
    monkeypatch.setattr("draftproof.audition.processes.begin", lambda: begun.append(1))
    log = tmp_path / "log.jsonl"
    log.write_text("x" * 99)
    cases = [(("ngram", "suffix:max=8"), 2, 1000, 1), (("ngram",), None, 1000, 1), (("ngram",), None, 9, 2), (("ngram",), 1, 9, 2),
             (("ngram", "model"), 2, 9, 2), (("ngram+model",), 2, 9, 2)]
    for specs, processes, small, expected in cases:
        monkeypatch.setattr("draftproof.commands.audition.SMALL", small)
        _begin(log, specs, processes)
        assert len(begun) == expected


def test_the_command_with_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, metrics = write(tmp_path, "suffix", 4, 0.8)
    assert command(["audition", str(log), "--drafter", "suffix", "--depth", "4,2", "--processes", "2", "--json"]) == 0
    cells = [c for c in json.loads(capsys.readouterr().out.splitlines()[-1])["cells"] if c["class"] == "all"]
    assert [c["depth"] for c in cells] == [4, 2] and same(cells[0], metrics)


def test_what_fails_in_a_worker_is_told(tmp_path: Path) -> None:
    log, said = tmp_path / "log.jsonl", Queue[Any]()
    log.write_text('{"prompt": "text without a tokenizer", "completion": "x"}\n')
    _worker(Work(str(log), (Arm("ngram", 5),), Reader()), audition.Share((0,)), 3, said)
    kind, number, error = said.get()
    assert (kind, number) == ("error", 3) and isinstance(error, Failure) and "no tokenizer" in str(error)


def test_the_command_prints_the_contracts_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, metrics = write(tmp_path, "ngram", 4, 0.8)
    with log.open("a") as out:
        out.write('{"prompt_token_ids": [1, 2\n{"prompt_token_ids": [1], "token_ids": []}\n')
    assert command(["audition", str(log), "--drafter", "ngram", "--drafter", "suffix", "--depth", "4", "--depth", "2", "--json"]) == 0
    said = capsys.readouterr()
    document = json.loads(said.out.splitlines()[-1])
    assert document["log"]["requests"] == 8 and document["log"]["skipped"] == 2 and document["log"]["retokenised"] == 0
    assert len(document["cells"]) == 3 * 4 and "line 9" in said.err
    keys = {"drafter", "depth", "class", "rounds", "drafted", "accepted", "acceptance_length", "hazard"}
    assert all(keys <= set(c) for c in document["cells"])
    (found,) = [c for c in document["cells"] if (c["drafter"], c["depth"], c["class"]) == ("ngram", 4, "all")]
    assert same(found, metrics)
    assert command(["audition", str(log), "--drafter", "ngram"]) == 0 and "acceptance length" in capsys.readouterr().out


def test_text_is_tokenised_again_and_counted(tiny_pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log.jsonl"
    pair = {"request": {"messages": [{"role": "user", "content": "count"}], "temperature": 0},
            "response": {"choices": [{"message": {"content": "one two one two one two one two"}, "finish_reason": "stop"}],
                         "usage": {"completion_tokens": 60}}}
    log.write_text(json.dumps(pair) + "\n" + json.dumps({"text": "def f():\n    return 1\n" * 6}) + "\n")
    arguments = ["audition", str(log), "--target", str(tiny_pair[0]), "--depth", "3", "--json"]
    assert command([*arguments, "--drafter", "ngram", "--drafter", f"model:{tiny_pair[1]}"]) == 0
    said = capsys.readouterr()
    document = json.loads(said.out.splitlines()[-1])
    assert document["log"]["retokenised"] == 2 and "tokenised again" in said.err
    by = {c["drafter"]: c for c in document["cells"]}
    assert by["ngram"]["figure"] == "retokenised" and by["ngram"]["exact_requests"] == 0 and by["ngram"]["accepted"] > 10
    assert by[f"model:{tiny_pair[1]}"]["figure"] == "mixed"          # greedy request: exact but for its ids; document: nobody knows
    assert "exact for 0 of 2 requests, and for 1 but for their ids; the others" in said.err
    assert "usage.completion_tokens" in said.err and "completion_tokens" in document["log"]["remarks"][0]


@pytest.mark.parametrize("arguments, says", [
    (["--drafter", "none"], "nothing to count"), (["--drafter", "ngrm"], "unknown drafter"), (["--depth", "0"], "integers ≥ 1"),
    (["--depth", "traced", "--drafter", "ngram"], "expected a trace of ours")])
def test_wrong_wishes_are_one_line(arguments: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text('{"prompt_token_ids": [1, 2], "token_ids": [3, 4]}\n')
    assert command(["audition", str(log), *arguments]) == 2 and says in capsys.readouterr().err


def test_an_empty_log_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text("nothing\n")
    assert command(["audition", str(log), "--drafter", "ngram"]) == 1 and "line 1: not a JSON object" in capsys.readouterr().err


def test_the_interval_covers_a_ratio_over_requests() -> None:
    import random

    rng, covered = random.Random(3), 0
    for _ in range(200):
        counts = Counts()
        for _ in range(40):
            one = Tally()
            one.prefill()
            easy = rng.random() < 0.5
            for _ in range(rng.randint(5, 15)):
                stood = int(rng.random() < (0.9 if easy else 0.1))
                one.round(1, stood, 1 - stood, 1 + stood)
            counts.add(one, True, 3)
        interval = counts.spread.interval()
        assert interval is not None
        covered += interval[0] <= 1.5 <= interval[1]
    assert 180 <= covered <= 199         # 190 expected
    assert Counts.from_dict(json.loads(json.dumps(counts.as_dict()))) == counts and Counts().spread.interval() is None


def test_counts_of_two_parts_are_those_of_the_whole() -> None:
    whole, parts = Counts(), [Counts(), Counts()]
    for i, (stood, passes) in enumerate(((3, 1), (0, 2), (2, 1), (1, 3), (3, 2))):
        one = Tally()
        one.prefill(passes)
        for _ in range(passes):
            one.round(3, stood, int(stood < 3), stood + 1)
        for counts in (whole, parts[i % 2]):
            counts.add(one, i % 3 == 0, 5 + i, (one.rounds - 0.5, one.rounds + 0.25), i == 4)
    assert parts[0] + parts[1] == whole and whole.spread.interval() is not None
    assert (whole.spread.n, whole.spread.e, whole.spread.r, whole.prompt_tokens, whole.exact, whole.near) == (5, 23, 9, 35, 2, 0)


def test_the_best_depth_follows_from_the_cost() -> None:
    cells = [{"drafter": "d", "class": "c", "depth": k, "rounds": 100, "drafted": 100 * k,
              "acceptance_length": 1 + sum(0.7 ** i for i in range(1, k + 1))}
             for k in range(1, 9)]
    assert best_depths(cells, 0.0)[0]["depth"] == 8 and best_depths(cells, 0.1)[0]["depth"] == 4 and best_depths(cells, 0.9)[0]["worth"] < 1


def test_a_table_shows_every_value_and_a_star_only_where_it_pays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log.jsonl"
    new = {"token_ids": list(range(50, 80)), "class": "new"}
    again = {"token_ids": [1, 2, 3] * 10, "class": "a class with quite a long name"}
    log.write_text("".join(json.dumps({"prompt_token_ids": [1, 2, 3], **one}) + "\n" for one in (new, again)))
    assert command(["audition", str(log), "--drafter", "ngram", "--depth", "4"]) == 0
    said = capsys.readouterr()
    stars = {line.split("│")[1].strip(): "4*" in line for line in said.out.splitlines() if "ngram" in line}
    assert stars == {"new": False, "a class with quite a long name": True, "all": True} and "…" not in said.out
    assert "acceptance length" in said.out
    assert "off, because at --row-cost 0.05" in said.err and "ngram of class new (1.00 at depth 4)" in said.err


def test_copying_drafters_are_heard_fast() -> None:
    """Far from the speed that is promised on a quiet machine, but far above a replay that makes tensors for every round."""
    stories = [Story((1, 2), tuple((i * i + i // 7) % 50 for i in range(2000)), Sampling(temperature=0))] * 5
    drafter, start = NgramDrafter(), time.process_time()
    for story in stories:
        copied(drafter, story, (8,))
    assert 10_000 / (time.process_time() - start) > 25_000


def test_depth_below_one_and_drafter_none_are_refused(tmp_path: Path) -> None:
    for arm in (Arm("none", 3), Arm("ngram", 0)):
        with pytest.raises(OptionError):
            Work(str(tmp_path), (arm,), Reader())


@pytest.mark.parametrize("spec", ["layer-skip:exit=4", "assistant:org/head", "ngram+layer-skip:exit=4", "grammar", "grammar+ngram"])
def test_what_a_replay_cannot_ask_is_not_counted_as_a_drafter_that_guesses_nothing(spec: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="which a replay does not have; count it where texts run"):
        Work(str(tmp_path), (Arm(spec, 4),), Reader())
