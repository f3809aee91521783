"""Answers of vLLM and llama.cpp as traces: every round that they tell, none that they do not, and damage told by its line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from browser import VIEWS, chromium, serving
from traces import engines

from draftproof.cli import run
from draftproof.errors import Failure
from draftproof.remote.answers import is_answer
from draftproof.remote.imports import Imported, load
from draftproof.trace.events import PrefillDone, RequestDone, RequestStarted, RoundDone, TraceStarted
from draftproof.trace.report import by_class, requests
from draftproof.trace.sinks import read_trace, to_json

ACCEPTED, DRAFTED = [2, 0, 3, 1], [3, 3, 3, 2]                   # 10 tokens in 4 drafted steps
Record = dict[str, Any]


def report(accepted: list[int] = ACCEPTED, drafted: list[int] = DRAFTED, detailed: bool = True, k: int = 3) -> Record:
    """vLLM's metrics.speculative_decoding, as its documentation describes it."""
    steps, kept, made = len(accepted), sum(accepted), sum(drafted)
    arrays = {"per_step_accepted": accepted, "per_step_drafted": drafted} if detailed else {}
    return {"mean_acceptance_length": 1 + kept / steps, "draft_acceptance_rate": kept / made,
            "acceptance_histogram": [accepted.count(n) for n in range(k + 1)], "num_spec_steps": steps,
            "num_accepted_draft_tokens": kept, "num_draft_tokens": made, "num_spec_tokens": k, **arrays}


def vllm(tokens: int = 11, name: str = "chatcmpl-1", **more: Any) -> Record:
    """A whole chat answer of vLLM with its timing metrics."""
    metrics = {"time_to_first_token_ms": 50.0, "generation_time_ms": 200.0, "queue_time_ms": 10.0, "mean_itl_ms": 20.0,
               "tokens_per_second": 42.0, "speculative_decoding": more.pop("report", report())}
    choice = {"index": 0, "message": {"role": "assistant", "content": "def add(a, b):\n    return a + b\n"}, "logprobs": None,
              "finish_reason": "stop", "stop_reason": None, **more.pop("choice", {})}
    return {"id": name, "object": "chat.completion", "created": 1_760_000_000, "model": "meta-llama/Llama-3.1-8B-Instruct",
            "choices": [choice], "usage": {"prompt_tokens": 42, "completion_tokens": tokens, "total_tokens": 42 + tokens,
                                           "prompt_tokens_details": {"cached_tokens": 16}}, "metrics": metrics, **more}


def vllm_stream(accepted: list[int] = ACCEPTED) -> list[Record]:
    """Chunks of /v1/completions with return_token_ids and include_usage: the first token, a plain step, then the drafted steps."""
    head = {"id": "cmpl-7", "object": "text_completion", "created": 1_760_000_005, "model": "m"}
    sizes, ids, chunks = [1, 1, *(n + 1 for n in accepted)], iter(range(100, 200)), []
    for number, size in enumerate(sizes):
        tokens = [next(ids) for _ in range(size)]
        done = "length" if number == len(sizes) - 1 else None
        choice = {"index": 0, "text": f" w{number}", "token_ids": tokens, "logprobs": None, "finish_reason": done}
        chunks.append({**head, "choices": [choice]})
    usage = {"prompt_tokens": 5, "completion_tokens": sum(sizes), "total_tokens": 5 + sum(sizes)}
    return [*chunks, {**head, "choices": [], "usage": usage, "metrics": {"speculative_decoding": report(accepted)}}]


def timings(predicted: int, drafted: int, accepted: int, ms: float) -> Record:
    """llama.cpp's, which names guesses only once there are some."""
    drafts = {"draft_n": drafted, "draft_n_accepted": accepted} if drafted else {}
    return {"cache_n": 4, "prompt_n": 8, "prompt_ms": 30.0, "prompt_per_token_ms": 3.75, "prompt_per_second": 266.7,
            "predicted_n": predicted, "predicted_ms": ms, "predicted_per_token_ms": ms / predicted,
            "predicted_per_second": 1e3 * predicted / ms if ms else None, **drafts}


def llamacpp(**more: Any) -> Record:
    """A whole answer of llama-server's /completion."""
    return {"index": 0, "content": "1, 2, 3, 4", "tokens": [], "id_slot": 0, "stop": True, "model": "qwen.gguf", "tokens_predicted": 12,
            "tokens_evaluated": 12, "generation_settings": {"temperature": 0.8}, "prompt": "count", "stop_type": "limit",
            "stopping_word": "", "tokens_cached": 23, "truncated": False, "timings": timings(12, 9, 6, 400.0), **more}


ROUNDS = [(1, 0, 0), (4, 5, 3), (1, 5, 0), (6, 5, 5), (1, 0, 0)]     # tokens, guesses, accepted: plain, cut, refused at once, whole, plain


def llamacpp_stream(chat: bool) -> list[Record]:
    """A stream with timings_per_token: one chunk a token, and the counts of a round on all of its chunks."""
    chunks, total, drafted, accepted, ms = [], 1, 0, 0, 0.0
    plan = [(1, 0, 0, 0.0), *((*one, 40.0 + n) for n, one in enumerate(ROUNDS))]
    for number, (emitted, guesses, kept, spent) in enumerate(plan):
        if number:
            total, drafted, accepted = total + emitted, drafted + guesses, accepted + kept
        ms += spent
        for token in range(emitted):
            said = {"timings": timings(total, drafted, accepted, ms)}
            text = f" t{total - emitted + token}"
            if chat:
                chunks.append({"choices": [{"finish_reason": None, "index": 0, "delta": {"content": text}}], "created": 1_760_000_100,
                               "id": "chatcmpl-L", "model": "qwen.gguf", "object": "chat.completion.chunk", **said})
            else:
                chunks.append({"index": 0, "content": text, "tokens": [500 + len(chunks)], "stop": False, "id_slot": -1,
                               "tokens_predicted": total, "tokens_evaluated": 12, **said})
    last = {"timings": timings(total, drafted, accepted, ms)}
    if chat:
        return [*chunks, {"choices": [{"finish_reason": "stop", "index": 0, "delta": {}}], "created": 1_760_000_100, "id": "chatcmpl-L",
                          "model": "qwen.gguf", "object": "chat.completion.chunk", **last}]
    return [*chunks, {**llamacpp(content="", stop_type="eos"), **last}]


@pytest.fixture
def imported(tmp_path: Path) -> Callable[..., Imported]:
    def of(*records: Record, engine: str = "auto") -> Imported:
        path = tmp_path / "answers.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
        return load(path, engine)
    return of


def rounds(found: Imported, request: str) -> list[RoundDone]:
    return [event for event in found.events if isinstance(event, RoundDone) and event.request == request]


def done(found: Imported, request: str) -> RequestDone:
    return next(event for event in found.events if isinstance(event, RequestDone) and event.request == request)


def shape(found: Imported, request: str) -> list[tuple[int, int, int]]:
    """(tokens, guesses, accepted) of every round."""
    return [(len(one.tokens), len(one.nodes), sum(node.fate == "accepted" for node in one.nodes)) for one in rounds(found, request)]


def test_a_detailed_answer_of_vllm_has_its_steps(imported: Callable[..., Imported]) -> None:
    found = imported(vllm())
    assert shape(found, "chatcmpl-1") == [(a + 1, d, a) for a, d in zip(ACCEPTED, DRAFTED, strict=True)] and not found.notes
    header, started, prefill = found.events[:3]
    assert isinstance(header, TraceStarted) and (header.depth, header.machine["imported"]) == ("3", "vLLM") and header.vocabulary is None
    assert isinstance(started, RequestStarted) and (started.prompt_tokens, started.cached_tokens, started.rule) == (42, 16, "ratio")
    assert isinstance(prefill, PrefillDone) and prefill.seconds == pytest.approx(0.06) and not prefill.text
    its = rounds(found, "chatcmpl-1")
    assert "".join(one.text for one in its) == its[-1].text == vllm()["choices"][0]["message"]["content"]
    assert [one.tokens[-1].role for one in its] == ["correction", "correction", "bonus", "correction"]
    assert all(one.times.score_s == 0 and one.at_s == pytest.approx(0.26) for one in its), "of single steps no time is known"
    assert done(found, "chatcmpl-1").finish == "stop"


def test_its_numbers_are_vllm_s(imported: Callable[..., Imported]) -> None:
    found, told = imported(vllm(), vllm(name="other", tokens=12)), report()
    for name, tokens in (("chatcmpl-1", 11), ("other", 12)):
        mine = requests(found.events)[name]
        assert mine.metrics() == done(found, name).metrics, "the report of the records is what the record says"
        assert mine.tally.completion_tokens == tokens and mine.tally.drafted == told["num_draft_tokens"]
        assert mine.tally.acceptance_length_drafted == pytest.approx(told["mean_acceptance_length"])
        assert mine.clock.tokens_per_s == pytest.approx(tokens / 0.26) and mine.clock.tpot_s == pytest.approx(0.2 / (tokens - 1))
    assert shape(found, "other")[-1] == (1, 0, 0) and "steps without a guess: 1," in found.notes[0]


def test_a_stop_among_accepted_guesses_and_steps_behind_the_end(imported: Callable[..., Imported]) -> None:
    cut = imported(vllm(tokens=10))
    assert shape(cut, "chatcmpl-1")[-1] == (1, 2, 1) and rounds(cut, "chatcmpl-1")[-1].tokens[-1].role == "accepted"
    late = imported(vllm(tokens=9))
    assert shape(late, "chatcmpl-1") == [(3, 3, 2), (1, 3, 0), (4, 3, 3)] and "1 of its steps ran after the end" in late.notes[0]


def test_a_stream_of_vllm_shows_when_plain_steps_ran(imported: Callable[..., Imported]) -> None:
    found = imported(*vllm_stream())
    assert shape(found, "cmpl-7") == [(1, 0, 0), *((a + 1, d, a) for a, d in zip(ACCEPTED, DRAFTED, strict=True))]
    its = rounds(found, "cmpl-7")
    assert [one.text for one in its] == [f" w{n}" for n in range(1, 6)]
    assert [token.token for one in its for token in one.tokens] == list(range(101, 112))
    unknown = found.events[0].machine["unknown_token"]  # type: ignore[union-attr]
    assert {node.token for one in its for node in one.nodes if node.fate != "accepted"} == {unknown} == {112}
    assert done(found, "cmpl-7").finish == "length"


def test_moments_of_chunks_are_the_times_of_rounds(imported: Callable[..., Imported]) -> None:
    found = imported(*({"at_s": 100 + 0.02 * n, "data": chunk} for n, chunk in enumerate(vllm_stream())))
    its = rounds(found, "cmpl-7")
    assert [one.times.score_s for one in its] == pytest.approx([0.02] * 5) and its[-1].at_s == pytest.approx(0.1)


def test_token_texts_become_a_vocabulary(imported: Callable[..., Imported]) -> None:
    words = ["a", " b", "<b>", " b", "a", "c", "d", "e", "f", "g", "h"]
    named = {"content": [{"token": word, "logprob": -0.1, "bytes": list(word.encode()), "top_logprobs": []} for word in words]}
    found = imported(vllm(choice={"logprobs": named}))
    header, its = found.events[0], rounds(found, "chatcmpl-1")
    assert isinstance(header, TraceStarted) and header.vocabulary is not None and header.vocabulary[-1] == "(not told)"
    assert [one.text for one in its] == [" b<b> b", "a", "cdef", "gh"]
    assert [header.vocabulary[token.token] for one in its for token in one.tokens] == words[1:]
    ids = imported(vllm(choice={"logprobs": {"content": [{"token": f"token_id:{n}"} for n in range(11)]}}))
    assert [token.token for one in rounds(ids, "chatcmpl-1") for token in one.tokens] == list(range(1, 11))


def test_totals_stay_totals(imported: Callable[..., Imported]) -> None:
    """vLLM at level summary, and a whole answer of llama.cpp: no round, and null for what was not told."""
    found = imported(vllm(report=report(detailed=False)), llamacpp())
    assert not [event for event in found.events if isinstance(event, RoundDone)]
    assert [note.split(";")[0] for note in found.notes] == ["line 1: totals only", "line 2: totals only"]
    reports = requests(found.events)
    mine, other = reports["chatcmpl-1"], reports["a1"]
    assert mine.metrics() == done(found, "chatcmpl-1").metrics
    told = mine.metrics()
    assert (told["drafted"], told["accepted"], told["rounds"], told["passes_saved"], told["hazard"]) == (11, 6, None, None, [])
    assert told["acceptance_length_drafted"] == 2.5 and told["tokens_per_s"] == pytest.approx(11 / 0.26)
    told = other.metrics()
    assert (told["rounds"], told["target_passes"], told["passes_saved"], told["drafted"], told["accepted"]) == (5, 6, 6, 9, 6)
    assert told["acceptance_length"] == pytest.approx(11 / 5) and told["acceptance_length_drafted"] is None
    assert told["ttft_s"] == pytest.approx(0.03) and told["tpot_s"] == pytest.approx(0.4 / 11) and told["score_s"] is None
    rows = {row.drafter: row.tally for row in by_class(reports.values())}
    assert (rows["vLLM"].drafted, rows["llama.cpp"].draft_utilisation) == (11, pytest.approx(2 / 3))
    assert found.events[2].text.startswith("def add")  # type: ignore[union-attr]


@pytest.mark.parametrize("chat", [True, False])
def test_a_stream_of_llamacpp_has_its_rounds_and_their_times(imported: Callable[..., Imported], chat: bool) -> None:
    found = imported(*llamacpp_stream(chat))
    name = "chatcmpl-L" if chat else "a0"
    its = rounds(found, name)
    assert shape(found, name) == ROUNDS and not found.notes
    assert [one.times.score_s for one in its] == pytest.approx([0.04, 0.041, 0.042, 0.043, 0.044])
    assert [one.text.count(" t") for one in its] == [tokens for tokens, *_ in ROUNDS]
    assert done(found, name).metrics == requests(found.events)[name].metrics() and done(found, name).completion_tokens == 14
    assert its[0].tokens[0].token == (501 if not chat else found.events[0].machine["unknown_token"])  # type: ignore[union-attr]


def test_missing_chunks_make_totals_of_a_stream(imported: Callable[..., Imported]) -> None:
    whole = llamacpp_stream(True)
    gap = imported(*whole[:2], *whole[8:])
    assert not rounds(gap, "chatcmpl-L") and "chunks of the stream are missing" in gap.notes[0]
    assert done(gap, "chatcmpl-L").metrics["accepted"] == 8
    late = imported(*whole[3:])
    assert not rounds(late, "chatcmpl-L") and "does not begin with its first token" in late.notes[0]
    cut = imported(*whole[:7])
    assert shape(cut, "chatcmpl-L") == ROUNDS[:3] and not [event for event in cut.events if isinstance(event, RequestDone)]


def test_raw_streams_documents_and_pairs(tmp_path: Path) -> None:
    path = tmp_path / "s"
    lines = [": ping", "event: message", *(f"data: {json.dumps(chunk)}" for chunk in vllm_stream()), "", "data: [DONE]"]
    path.write_text("\n\n".join(lines))
    assert len(rounds(load(path), "cmpl-7")) == 5 and is_answer(path)
    path.write_text(json.dumps([vllm(), llamacpp()], indent=1))
    assert is_answer(path) and len(requests(load(path).events)) == 2
    asked = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0.7, "max_tokens": 16}
    path.write_text(json.dumps({"request": asked, "response": vllm(), "class": "code"}) + "\n")
    started = load(path).events[1]
    assert is_answer(path) and isinstance(started, RequestStarted) and started.prompt_class == "code"
    assert started.sampling["temperature"] == 0.7 and started.sampling["imported"] == "chatcmpl-1"


def test_two_streams_side_by_side_and_two_answers_of_one_name(imported: Callable[..., Imported]) -> None:
    mixed = [chunk for pair in zip(vllm_stream(), [{**chunk, "id": "cmpl-8"} for chunk in vllm_stream()], strict=True) for chunk in pair]
    found = imported(*mixed)
    assert shape(found, "cmpl-7") == shape(found, "cmpl-8") and len(shape(found, "cmpl-8")) == 5
    twice = imported(vllm(), vllm())
    assert shape(twice, "chatcmpl-1") == shape(twice, "chatcmpl-1 (2)") != []


def test_what_tells_nothing_is_left_out_and_said(imported: Callable[..., Imported]) -> None:
    silent = vllm(name="silent", report=None)
    several = {**vllm(name="two"), "choices": [{"index": n, "message": {"content": "x"}, "finish_reason": "stop"} for n in (0, 1)]}
    found = imported(vllm(), silent, several, {"error": {"message": "no"}}, {"request": {}, "response": None})
    assert len(requests(found.events)) == 1
    assert [note.split(":")[0] for note in found.notes] == ["line 3", "line 4", "line 5", "line 2"]
    with pytest.raises(Failure, match="--per-request-spec-decode-metrics detailed"):
        imported(silent)
    with pytest.raises(Failure, match="timings_per_token"):
        imported(vllm(), engine="llamacpp")
    with pytest.raises(Failure, match="metrics.speculative_decoding"):
        imported(llamacpp(), engine="vllm")


@pytest.mark.parametrize(("line", "told"), [
    ("{oops}", "line 2: not JSON"), ('{"id": "x", "choices"', "line cut short"), ("7", "line 2"), ('"text"', "line 2"), ("null", "line 2"),
    ('{"some": "thing"}', "keys some"), (json.dumps({**vllm(), "choices": 5}), "line 2"),
    (json.dumps({**vllm(), "usage": {"completion_tokens": "many"}}), "line 2"), (json.dumps({**vllm(), "metrics": [1]}), "line 2"),
    (json.dumps({**vllm(), "created": "today"}), "line 2"),
    (json.dumps(vllm(report={**report(), "per_step_drafted": [3, 3, 3]})), "line 2: per_step_accepted and"),
    (json.dumps(vllm(report={**report(), "per_step_accepted": [2, 0, "3", 1]})), "line 2: per_step_accepted and"),
    (json.dumps(vllm(report=report([2, 0, 4, 1]))), "line 2: per_step_accepted and"),
    (json.dumps(vllm(report={**report(), "per_step_drafted": [3, 3, 3, 10**9]})), "line 2: per_step_accepted and"),
    (json.dumps(vllm(report={**report(), "num_draft_tokens": 5})), "line 2: num_draft_tokens is 5"),
    (json.dumps(vllm(tokens=10**12)), "line 2: an answer of"), (json.dumps(vllm(tokens=-3)), "line 2: an answer of"),
    (json.dumps(vllm()).replace("50.0", "NaN"), "line 2: time_to_first_token_ms"),
    (json.dumps(llamacpp(timings={**timings(12, 9, 6, 4.0), "predicted_ms": "soon"})), "line 2"),
    (json.dumps(llamacpp(timings={"prompt_n": 3})), "line 2"),
    (json.dumps(vllm(report={**report(detailed=False), "num_draft_tokens": None})), "line 2"),
])
def test_damage_is_told_by_its_line(tmp_path: Path, line: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text(json.dumps(vllm(name="good")) + "\n" + line + "\n")
    assert run(["view", str(path), "--import", "auto", "--terminal"]) == 1
    said = capsys.readouterr().err
    assert told in said and "Traceback" not in said and said.count("\n") == 1, said


def test_falling_counts_of_a_stream_are_damage(imported: Callable[..., Imported]) -> None:
    chunks = llamacpp_stream(True)
    chunks[4] = {**chunks[4], "timings": timings(2, 0, 0, 50.0)}
    with pytest.raises(Failure, match="line 1: "):
        imported(*chunks)


def test_traces_are_not_taken_for_answers(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    engines(path)
    assert not is_answer(path)
    for text in ("", "{}\n", "prose\n", "\x00\x01", '{"event":"trace_started"}\n', "[]"):
        path.write_text(text)
        assert not is_answer(path), text
    assert not is_answer(tmp_path / "missing")


def write_all(path: Path) -> Path:
    """One file with everything: steps, stream, totals, of both engines."""
    hostile = vllm(name="<script>document.title='owned'</script>", choice={"message": {"content": "<img src=x onerror=alert(1)>\u202e"}})
    records = [vllm(), vllm(name="summary", report=report(detailed=False)), *vllm_stream(), llamacpp(), *llamacpp_stream(True),
               *llamacpp_stream(False), hostile]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_the_command_writes_what_it_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = write_all(tmp_path / "answers.jsonl"), tmp_path / "trace.jsonl"
    assert run(["view", str(path), "--trace", str(out), "--terminal", "--html", str(tmp_path / "a.html"),
                "--perfetto", str(tmp_path / "a.json")]) == 0
    said = capsys.readouterr()
    assert "totals only" in said.err and "request chatcmpl-L" in said.out
    assert "".join(to_json(event) + "\n" for event in load(path).events) == out.read_text()
    again = requests(read_trace(out))
    assert len(again) == 7 and sum(one.tally.drafted for one in again.values()) > 40
    assert run(["view", str(out), "--import", "vllm", "--terminal"]) == 1, "a trace is no file of answers"
    assert run(["view", str(out), "--trace", str(tmp_path / "b.jsonl")]) == 2, "nothing to import"
    assert out.exists() and not (tmp_path / "b.jsonl").exists()


@pytest.mark.browser
def test_the_page_shows_imported_traces(tmp_path: Path) -> None:
    trace = tmp_path / "imported.jsonl"
    trace.write_text("".join(to_json(event) + "\n" for event in load(write_all(tmp_path / "answers.jsonl")).events))
    expected = list(requests(read_trace(trace)).values())
    with chromium() as page, serving({"imported.jsonl": trace}) as address:
        page.open(address("imported.jsonl"))
        for number, one in enumerate(expected):
            for view in VIEWS:
                page.show(view, r=number, round=1)
                page.until("document.querySelector('main').innerText.length > 30")
                assert "cannot show" not in page.text() and page.js("return document.querySelector('#notice').hidden"), view
                assert page.js("return document.title").endswith("Draftproof")
            page.show("status", r=number)
            shown = page.metrics()
            assert {name: shown[name] for name in one.metrics()} == one.metrics(), one.request
            page.show("verification", r=number, round=1)
            assert "was imported from" in page.text() or "no round" in page.text()
        page.show("status", r=1)
        assert page.metrics()["completion_tokens"] == 11 and "No round" not in page.text() and "Speculation is on" in page.text()
        page.show("gantt", r=0)
        assert "no times of single rounds" in page.text()
        page.show("acceptance", r=1)
        assert "not of which rounds" in page.text()
        page.show("compare", r=1)
        assert "cannot be said" in page.text()
        assert page.errors() == []
