"""bench: workloads of every form, arms in turn, loads closed and open, and what is left behind."""

from __future__ import annotations

import csv
import json
import os
import re
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from engine.engine_support import table
from engine.letters import Letters

from draftproof.bench import report
from draftproof.bench.arms import local_arms, url_arms
from draftproof.bench.cells import Spread
from draftproof.bench.endpoint import tally_of
from draftproof.bench.load import Answer, Job, Load, Local, prompt_ids
from draftproof.bench.summary import answer_lines, is_spec_bench, rows, serving, spec_bench
from draftproof.bench.sweep import Arm, Plan, settled, speedup, sweep
from draftproof.bench.workload import MT_BENCH, SPEC_BENCH, Item, poisson, read_items, synthetic, unsent
from draftproof.cli import run
from draftproof.config import LoadConfig
from draftproof.errors import Failure, PromptError
from draftproof.view import style

QUESTIONS = [
    {"question_id": 81, "category": "writing", "turns": ["ab ab", "ba"]},
    {"question_id": 161, "category": "translation", "turns": ["abc"], "reference": ["x"]},
    {"question_id": 481, "category": "rag", "turns": ["cab" * 30]},
]


class PlainLetters(Letters):
    """Letters without a chat template; what is no letter is a space."""

    has_chat_template = False

    def encode(self, text: str) -> list[int]:
        return super().encode("".join(c if c in "abcde " else " " for c in text))


def lines(tmp_path: Path, *records: Any) -> Path:
    file = tmp_path / "workload.jsonl"
    file.write_text("\n".join(record if isinstance(record, str) else json.dumps(record) for record in records))
    return file


def answers(items: list[Item], plan: Plan, drafters: tuple[str, ...] = ("ngram",)) -> tuple[list[Answer], list[Arm]]:
    target = table(tokenizer=PlainLetters(), context=80)
    with ExitStack() as stack:
        arms = local_arms(stack, target, drafters, [3], LoadConfig())
        return list(sweep(arms, items, plan)), arms


def test_every_form_is_read(tmp_path: Path) -> None:
    items = read_items(lines(tmp_path, {"prompt": "x", "class": "code", "max_tokens": 9}, {"prompt_token_ids": [1, 2]},
                             {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "q"}]},
                                           {"role": "assistant", "content": "a"}]},
                             {"request": {"prompt": "y", "max_tokens": 5}, "response": {}},
                             {"question_id": "ab12", "category": "coding", "turns": [{"role": "user", "content": "t"}]}))
    assert [item.turns for item in items] == [("x",), ((1, 2),), ("q",), ("y",), ("t",)]
    assert [item.max_tokens for item in items] == [9, None, None, 5, None]
    assert [item.chat for item in items] == [False, False, True, False, True] and items[2].history == ({"role": "system", "content": "s"},)
    assert items[4].prompt_class == "coding", "only Spec-Bench's own file has its categories grouped"


CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": 3}'}}
TALK = [{"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "42"}]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
FORM = {"type": "json_object"}


def test_a_conversation_keeps_its_tools(tmp_path: Path) -> None:
    request = {"messages": TALK, "tools": TOOLS, "tool_choice": "required", "response_format": FORM, "top_p": 0.5, "n": 1, "temperature": 1}
    (item,) = read_items(lines(tmp_path, {"request": request}))
    job = Job("off", Load(1), 0, 0, item, 0, 4, 0.0)
    assert job.messages == [TALK[0], {**TALK[1], "content": ""}, TALK[2]], "the last one is a tool's, not a user's"
    assert item.asked == {"tools": TOOLS, "tool_choice": "required", "response_format": FORM} and item.apart == ("top_p",)
    assert unsent([item] * 2, here=False) == ["NOT SENT of what the workload's requests have: top_p (2)"]
    assert "response_format (1), tool_choice (1), tools (1), top_p (1)" in unsent([item], here=True, takes_tools=False)[0]
    assert not unsent([replace(item, asked={"tools": TOOLS, "tool_choice": "auto"}, apart=())], here=True)


def test_an_engine_here_is_told_of_tools(tmp_path: Path) -> None:
    class Template(Letters):
        has_chat_template = takes_tools = True

        def chat(self, messages: Any, tools: Any = None, answered: bool = False, told: Any = None) -> list[int]:
            self.heard = (messages, tools, told)
            if told:
                raise ZeroDivisionError("1/0")
            return [1, 2]

    tooled = {"messages": TALK, "tools": TOOLS}
    item, silent, wrong = read_items(lines(tmp_path, tooled, {**tooled, "tool_choice": "none"},
                                           {"messages": TALK, "chat_template_kwargs": {"x": 1}}))
    tokenizer: Any = Template()
    jobs = [Job("off", Load(1), 0, 0, one, 0, 4, 0.0) for one in (item, silent, wrong)]
    assert prompt_ids(jobs[0], tokenizer) == (1, 2) and tokenizer.heard == (jobs[0].messages, TOOLS, None)
    assert prompt_ids(jobs[1], tokenizer) == (1, 2) and tokenizer.heard[1] is None
    with pytest.raises(PromptError, match="refuses the conversation .ZeroDivisionError: 1/0"):
        prompt_ids(jobs[2], tokenizer)


def test_no_class_is_called_as_all_classes_together_are(tmp_path: Path) -> None:
    items = read_items(lines(tmp_path, {"prompt_token_ids": [1, 2]}, {"prompt_token_ids": [3], "class": "code"},
                             {"prompt_token_ids": [4], "class": "all"}))
    assert [item.prompt_class for item in items] == ["other", "code", "other"]
    found, arms = answers(items, Plan((Load(1), Load(2)), repeats=1, most_repeats=1, tokens=4))
    names = [(row.prompt_class, row.arm, row.load) for row in rows(found, arms)]
    assert len(set(names)) == len(names) == 12 and [row.requests for row in rows(found, arms)][::2] == [2, 1, 3] * 2


@pytest.mark.parametrize(("bad", "words"), [
    ({"messages": ["hi"]}, 'a message of type str; expected an object with "role" and "content"'),
    ({"messages": "hi"}, "messages of type str; expected a list"), ({"messages": [{"content": "x"}]}, "role None; expected text"),
    ({"messages": [{"role": "user", "content": [{"text": 5}]}]}, "a part with the text 5; expected text"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "a part of type image_url with the text None"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "c"}]}]}, "expected a list of calls, each with a function's name"),
    ({"prompt": "x", "tools": {"a": 1}}, "tools of type dict; expected a list"),
    ({"turns": "hello"}, "turns of type str; expected a list"), ({"turns": [7]}, "a turn of type int; expected text"),
    *(({"prompt": "x", "max_tokens": wrong}, f"max_tokens {re.escape(repr(wrong))}; expected an integer ≥ 1")
      for wrong in ("64", -4, 0, 6.5, True)),
    ({"request": {"prompt": "x", "max_completion_tokens": "9"}}, "max_completion_tokens '9'; expected an integer"),
    *((f'{{"prompt": "x", "arrival_s": {wrong}}}', "expected seconds") for wrong in ("NaN", "-Infinity", "1e999", "true", "1" + "0" * 400)),
])
def test_wrong_values_are_named(bad: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(Failure, match=f"line 2: .*{words}"):
        read_items(lines(tmp_path, {"prompt": "fine", "max_tokens": None}, bad))


@pytest.mark.parametrize(("bad", "word"), [
    ("{", "line 2: not JSON"), ("[1]", "a JSON list"), ({"x": 1}, "keys x"), ({"prompt": 7}, "expected"),
    ({"prompt": "x", "timestamp": "late"}, "late"), ({"prompt": "x", "arrival_s": 1}, "1 of 2"),
])
def test_bad_lines_are_named(bad: Any, word: str, tmp_path: Path) -> None:
    with pytest.raises(Failure, match=word):
        read_items(lines(tmp_path, {"prompt": "fine"}, bad))


@pytest.mark.parametrize(("bad", "words"), [
    (b'{"prompt": "caf\xe9"}', r"'\\udce9' in a text is no character; expected UTF-8"),
    (b'{"prompt": "x", "class": "\xe9"}', "expected UTF-8"),
    (b'{"messages": [{"role": "user", "content": "half \\ud83d"}]}', r"'\\ud83d' in a text is no character"), (b"[" * 200_000, "not JSON"),
])
def test_what_cannot_be_sent_is_told_before_anything_is_asked(bad: bytes, words: str, tmp_path: Path) -> None:
    file = tmp_path / "w.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"prompt": "fine"}\r\n' + bad)          # a byte order mark and \r\n, as editors on Windows leave them
    with pytest.raises(Failure, match=f"line 2: .*{words}"):
        read_items(file)


def test_arrivals(tmp_path: Path) -> None:
    items = read_items(lines(tmp_path, {"prompt": "b", "timestamp": "2026-01-01T00:00:03+00:00"},
                             {"prompt": "a", "timestamp": "2026-01-01T00:00:01+00:00"}))
    assert [(item.turns[0], item.arrival_s) for item in items] == [("a", 0.0), ("b", 2.0)]
    assert poisson(items * 500, 10.0, 0)[-1].arrival_s == pytest.approx(100, rel=0.1)
    assert len(synthetic(3, 7, 5, 0, 11)[0].turns[0]) == 7 and len(str(synthetic(1, 7, 5, 0)[0].turns[0]).split()) == 7


def test_arms_take_turns_and_agree() -> None:
    items = [Item(str(i), "ab"[i % 2], ((1, 2, 3, 1, 2, i),)) for i in range(4)]
    plan = Plan((Load(1), Load(3)), repeats=2, most_repeats=2, tokens=12)
    found, arms = answers(items, plan, ("ngram", "suffix"))
    assert Counter(a.job.arm for a in found) == dict.fromkeys(("off", "ngram", "suffix"), 16)
    firsts = [a.job.arm for a in found if a.job.load == Load(1)][::3]
    assert set(firsts) == {"off", "ngram", "suffix"}, "the arm that goes first changes"
    cells = [row.as_json() for row in rows(found, arms)]
    assert [(c["concurrency"], c["class"]) for c in cells[::3]] == [(n, name) for n in (1, 3) for name in ("a", "b", "all")]
    for cell in cells:
        assert cell["identical"] is True and cell["failed"] == 0 and cell["tokens"] == cell["requests"] * 12
        assert (cell["decoding"] is None) == (cell["arm"] == "off")
        assert (cell["speedup"] is None) == (cell["arm"] == "off") and (cell["total_tokens_per_s"] is None) == (cell["class"] != "all")
        assert cell["latency"]["ttft_s"]["p50"] <= cell["latency"]["ttft_s"]["p99"] <= cell["latency"]["e2e_s"]["p99"]
    off = next(c for c in cells if c["arm"] == "off")
    assert off["acceptance_length"] == 1.0 and off["draft_utilisation"] is None


def test_open_loop_and_failures() -> None:
    items = [Item(str(i), "a", ((1, 2, i),), arrival_s=i / 100) for i in range(4)]
    found, _ = answers(items, Plan((Load(), Load(rate=200.0)), repeats=1, most_repeats=1, tokens=6))
    assert len(found) == 16 and not any(a.error for a in found)
    recorded = sorted((a.sent_s, a.job.number) for a in found if a.job.arm == "off" and a.job.load == Load())
    assert [number for _, number in recorded] == [0, 1, 2, 3] and recorded[3][0] - recorded[0][0] >= 0.029
    with pytest.raises(Failure, match="no arrival times"):
        answers([Item("0", "a", ((1, 2),))], Plan((Load(),), repeats=1, most_repeats=1))
    bad, _ = answers([Item("0", "a", ((1, 99),))], Plan(repeats=1, most_repeats=1))
    assert all("token id 99" in str(a.error) for a in bad)


def answer(arm: str, number: int, repeat: int, seconds: float, name: str = "a", text: str = "t", tokens: int = 10) -> Answer:
    job = Job(arm, Load(1), repeat, number, Item(str(number), name, ("x",), category=name), 0, 10, 0.0, block=number * 10 + repeat)
    return Answer(job, 0.0, seconds, ((seconds / 10, 1), (seconds, tokens - 1)), text, None, tokens, 3, steps=(3, 3, 3))


def test_speed_up_is_paired_and_repeats_end_when_it_is_narrow() -> None:
    found = [answer(arm, n, r, (1 + n) * (1 + r) * (0.5 if arm == "on" else 1.0))
             for arm in ("off", "on") for n in range(6) for r in range(2)]
    spread = speedup(found, "on")
    assert spread is not None and (spread.low, spread.median, spread.high) == (2.0, 2.0, 2.0)
    after = speedup(found, "on", speed=attrgetter("decoding"))
    assert after is not None and after.median == pytest.approx(2.0)
    assert speedup([replace(a, chunks=a.chunks[:1]) for a in found], "on", speed=attrgetter("decoding")) is None
    arms = [Arm("off", "none", "0", None), Arm("on", "x", "3", None)]        # type: ignore[arg-type]
    assert settled(found, arms, 0.01)
    assert not settled([a for a in found if a.job.number], arms, 0.01), "five prompts have no interval"
    assert not settled([*found, *(answer(arm, n, 0, 4.0 if arm == "on" else 1.0) for n in (7, 8) for arm in ("off", "on"))], arms, 0.01)
    assert speedup([a for a in found if a.job.arm == "on"], "on") is None
    ticks = iter(range(0, 10**6, 100))
    for surely in (1, 3):
        found = list(sweep([Arm("off", "none", "0", Instant()), Arm("on", "x", "3", Instant())], [Item("0", "a", ("x",))],
                           Plan(repeats=5, budget_s=1.0, surely=surely), clock=lambda: float(next(ticks))))
        assert len(found) == 2 * surely, "no further repeat after the budget; these are whole"


class Instant:
    def __init__(self) -> None:
        self.jobs: list[Job] = []

    def start(self, job: Job) -> None:
        self.jobs.append(job)

    def poll(self, wait_s: float) -> list[Answer]:
        done = [Answer(job, 0.0, 1.0, ((1.0, 5),), "x", None, 5) for job in self.jobs]
        self.jobs.clear()
        return done


def test_vllms_keys() -> None:
    arms = [Arm("off", "none", "0", Instant())]
    found = serving([answer("off", n, 0, 2.0) for n in range(3)], arms[0], Load(1))
    assert found["completed"] == 3 and found["total_output_tokens"] == 30 and found["output_throughput"] == pytest.approx(5.0)
    assert found["median_e2el_ms"] == 2000 and found["mean_ttft_ms"] == pytest.approx(200) and found["mean_tpot_ms"] == pytest.approx(200)
    assert found["mean_itl_ms"] == pytest.approx(1800), "inter-chunk, not per token"


def test_totals_without_steps_cost_no_measurement() -> None:
    """A server that tells how many tokens it drafted, and not in how many rounds."""
    told = replace(answer("on", 0, 0, 2.0), tally=tally_of({"num_draft_tokens": 8, "num_accepted_draft_tokens": 4}, 10))
    found = serving([told], Arm("on", "x", "3", Instant()), Load(1))
    assert found["completed"] == 1 and "spec_decode_num_drafts" not in found


def test_time_that_failed_requests_took_is_time_in_which_the_arm_had_work() -> None:
    failed = replace(answer("off", 1, 0, 8.0), error="the stream ended in the middle")
    both = [answer("off", 0, 0, 2.0), failed]
    arms = [Arm("off", "none", "0", Instant())]
    (row,) = [row for row in rows(both, arms) if row.prompt_class == "all"]
    assert row.total_tokens_per_s == Spread(1.0, 1.0, 1.0) and serving(both, arms[0], Load(1))["output_throughput"] == 1.0


def test_spec_benchs_own_arithmetic() -> None:
    found = [answer("off", 0, 0, 2.0, "mt_bench"), answer("off", 1, 0, 5.0, "rag"), answer("on", 0, 0, 1.0, "mt_bench"),
             answer("on", 1, 0, 5.0, "rag", tokens=20)]
    table = {row["task"]: row for row in spec_bench(found, "on")}
    assert list(table) == ["mt_bench", "rag", "overall"] and is_spec_bench(found)
    assert table["overall"]["tokens_per_s"] == pytest.approx((10 + 4) / 2), "the mean over questions, not total over total"
    assert table["overall"]["speedup"] == pytest.approx(7.0 / 3.5) and table["rag"]["mean_accepted_tokens"] == 3.0
    line = answer_lines(found, "on", "m", 1.0)[1]
    assert line["question_id"] == 1 and line["choices"][0]["new_tokens"] == [20] and line["choices"][0]["accept_lengths"] == [3, 3, 3]
    assert set(line) == {"question_id", "category", "answer_id", "model_id", "choices", "tstamp"}


def test_spec_benchs_file_end_to_end(tmp_path: Path) -> None:
    items = read_items(lines(tmp_path, *QUESTIONS))
    assert [item.prompt_class for item in items] == ["mt_bench", "translation", "rag"]
    found, arms = answers(items, Plan(repeats=1, most_repeats=1, tokens=10))
    assert len(found) == 8 and not any(a.error for a in found), "two turns of the first question"
    assert isinstance(arms[0].client, Local) and arms[0].client.cut == 1, "the long prompt lost its beginning"
    document = {"cells": [row.as_json() for row in rows(found, arms)], "machine": {}, "versions": {}, "command": "x", "note": "<b>",
                "spec_bench": {"ngram": spec_bench(found, "ngram")}}
    report.write_csv(document["cells"], tmp_path / "b.csv")
    report.write_html(document, tmp_path / "b.html")
    table = list(csv.DictReader((tmp_path / "b.csv").read_text().splitlines()))
    assert len(table) == len(document["cells"]) and float(table[0]["ttft_s_p99"]) > 0
    page = re.sub("base64,[^\"']*", "", (tmp_path / "b.html").read_text())      # letters of a picture spell anything
    assert "times are p50/p99" in page
    assert "mean accepted tokens" in page and "&lt;b&gt;" in page and "http" not in page.replace("http-equiv", "")
    spoken = answer_lines(found, "ngram", "m", 1.0)
    assert [len(line["choices"][0]["turns"]) for line in spoken] == [2, 1, 1]


def its_own_report(method: Path, base: Path, task: str) -> tuple[float, float, float]:
    """(mean accepted tokens, tokens per second, speed-up) of a task, as Spec-Bench's evaluation script gets them from answer files."""
    speeds, steps = {}, []
    for file in (method, base):
        speeds[file] = []
        for record in map(json.loads, file.read_text().splitlines()):
            if task not in ("overall", "mt_bench" if record["category"] in MT_BENCH else record["category"]):
                continue
            first = record["choices"][0]
            speeds[file].append(sum(first["new_tokens"]) / sum(first["wall_time"]))
            steps += first["accept_lengths"] if file == method else []
    mine, off = fmean(speeds[method]), fmean(speeds[base])
    return fmean(steps), mine, mine / off


def asked_through_the_command(file: Path, each: int, target: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The whole file, or some of every task, and its report checked against its own arithmetic."""
    assert run(["bench", "--target", str(target), "--drafter", "ngram", "--depth", "3", "--workload", str(file), "--each", str(each),
                "--tokens", "12", "--repeats", "1", "--most-repeats", "1", "--ignore-eos", "--answers", str(folder), "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    for row in document["spec_bench"]["ngram"]:
        expected = its_own_report(folder / "ngram.jsonl", folder / "off.jsonl", row["task"])
        assert (row["mean_accepted_tokens"], row["tokens_per_s"], row["speedup"]) == pytest.approx(expected)
    assert not any(cell["failed"] for cell in document["cells"]) and all(cell["identical"] for cell in document["cells"])
    return document


def test_spec_bench_through_the_command(tiny_pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = asked_through_the_command(lines(tmp_path, *QUESTIONS), 1, tiny_pair[0], tmp_path / "answers", capsys)
    assert [row["task"] for row in document["spec_bench"]["ngram"]] == ["mt_bench", "translation", "rag", "overall"]


SPEC_BENCH_FILE = pytest.mark.skipif("DRAFTPROOF_SPEC_BENCH" not in os.environ,
                                     reason="DRAFTPROOF_SPEC_BENCH names Spec-Bench's question.jsonl")


@SPEC_BENCH_FILE
def test_the_real_spec_bench_file() -> None:
    items = read_items(os.environ["DRAFTPROOF_SPEC_BENCH"])
    assert Counter(item.prompt_class for item in items) == dict.fromkeys(SPEC_BENCH, 80) and sum(len(i.turns) for i in items) == 560
    assert {item.category for item in items if item.prompt_class == "mt_bench"} == set(MT_BENCH)


@SPEC_BENCH_FILE
def test_the_real_spec_bench_file_end_to_end(tiny_pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A few questions of every task (DRAFTPROOF_SPEC_BENCH_EACH, 80 are all of them)."""
    each = int(os.environ.get("DRAFTPROOF_SPEC_BENCH_EACH", 2))
    file = Path(os.environ["DRAFTPROOF_SPEC_BENCH"])
    document = asked_through_the_command(file, each, tiny_pair[0], tmp_path / "answers", capsys)
    rows = document["spec_bench"]["ngram"]
    assert [row["task"] for row in rows] == [*SPEC_BENCH, "overall"] and [row["questions"] for row in rows] == [each] * 6 + [6 * each]


def test_the_plot() -> None:
    pytest.importorskip("matplotlib")
    items = [Item(str(i), "a", ((1, 2, 3, 1, 2, i),)) for i in range(2)]
    found, arms = answers(items, Plan(repeats=1, most_repeats=1, tokens=8))
    cells = [row.as_json() for row in rows(found, arms)]
    assert report.plot(cells).startswith(b"\x89PNG")
    with style.sheet() as colours:
        figure = style.figure(4.2, 14.0)
        report.draw(figure, colours, cells)
        figure.draw_without_rendering()
        speed, _, depth = figure.axes
        assert all(place == round(place) for place in depth.get_xticks()), "there is no position one and a quarter"
        assert all(text.get_text().endswith("×") for text in speed.get_yticklabels())


def test_arms_of_servers() -> None:
    with ExitStack() as stack:
        arms = url_arms(stack, ["fast=http://h:1", "off=http://h:2/v1"], "m", None, (), (None,), {}, True)
        assert [(arm.name, arm.client.root) for arm in arms] == [("off", "http://h:2"), ("fast", "http://h:1")]     # type: ignore[attr-defined]


@pytest.mark.parametrize(("arguments", "words"), [
    (["bench", "--url", "http://h"], "--workload"), (["bench", "--url", "http://h", "--target", "x"], "--target"),
    (["bench", "--synthetic", "5"], "three integers"), (["bench", "--concurrency", "0"], "expected integers > 0"),
    (["bench", "--rate", "nan"], "expected numbers > 0"), (["bench", "--rate", "2,inf"], "expected numbers > 0"),
    (["bench", "--drafter", "ngram", "--drafter", "ngram"], "ngram twice"), (["bench", "--depth", "auto", "--depth", "auto"], "auto twice"),
    (["bench", "--url", "a=http://h:1", "--url", "a=http://h:2", "--workload", "w"], "a twice"),
    (["bench", "--url", "=http://h:1", "--workload", "w"], "before its ="),
    (["bench", "--most-repeats", "1"], "at least repeats"), (["bench", "--target", "./none"], "no such folder"),
    (["bench", "--csv", "no/such/x.csv"], "folder does not exist"), (["prove", "--level", "task"], "--tasks"),
    (["prove", "--baseline-url", "http://h"], "--url"), (["prove", "--margin", "2"], "margin=2"),
    (["prove", "--drafter", "none", "--depth", "3"], "name a drafter"), (["prove", "--rule", "lossy-typical"], "lossy-typical"),
])
def test_wrong_usage(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 2
    assert words in capsys.readouterr().err
