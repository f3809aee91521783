"""The trace: what is written is what is read, every reader counts the same, and a full disk stops nothing but the file."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
from engine.engine_support import OPTIONS, PROMPTS, table

from draftproof import Engine, EngineConfig, Failure, Jsonl, Memory, read_trace
from draftproof.config import TraceLevel
from draftproof.trace import sinks
from draftproof.trace.events import (
    VERSION,
    Alternative,
    Event,
    NodeRecord,
    PrefillDone,
    RequestDone,
    RequestStarted,
    RoundDone,
    Times,
    TokenRecord,
    TraceStarted,
)
from draftproof.trace.report import by_class, requests
from draftproof.trace.sinks import Null, from_json, to_json

TIMES = Times(0.001, 0.1 / 3, 2e-5, 0.0)
TOKEN = TokenRecord(
    7, "correction", 0.25, -1.5, (Alternative(7, 0.25), Alternative(1, 0.1)), (Alternative(2, 1e-30),), -1.25, (Alternative(7, -1.25),)
)
EVENTS = [
    TraceStarted(VERSION, "table", "ngram:min=1", "match", "auto", {"threads": 2, "invisible": "yes: “measured”"}, ("a", "é\n")),
    RequestStarted("r0/1", 0.5, 3, 2, {"temperature": 0.5, "logit_bias": {"3": 1.0}, "stop": ["x"]}, 2**62, 1, "code", "tenant", (1, 2, 3)),
    RequestStarted("r1", 0.5, 3, 0, {}, 5, 0),
    PrefillDone("r0/1", 1.0, 0.25, 2, TOKEN, "é"),
    RoundDone(
        "r0/1",
        0,
        1.25,
        4,
        4,
        2,
        "ngram",
        'a "reason"\n',
        "",
        (
            NodeRecord(1, -1, "accepted", 0.5, 0.25, 1.5, None, 3.0),
            NodeRecord(2, 0, "rejected", coin=0.5, p=0.0),
            NodeRecord(3, -1, "discarded"),
            NodeRecord(3, -1, "discarded", score=1.5),
        ),
        (TokenRecord(1, "accepted"), TOKEN),
        "te\u2028xt",
        TIMES,
    ),
    RoundDone("r1", 3, 2.5, 1, 9, 0, "none", "off", "why", (), (TokenRecord(4, "plain"), TokenRecord(5, "plain", logprob=-0.5)), "", TIMES),
    RequestDone("r0/1", 3.0, "stop", 3, {"rounds": 1, "hazard": [1.0, 0.5], "tpot_s": None}),
    RequestDone("r1", 3.0, "error", 0, {}, "no room"),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda e: e.event)
def test_json_and_back(event: RoundDone) -> None:
    line = to_json(event)
    assert "\n" not in line and line.startswith(f'{{"event":"{event.event}"')
    assert from_json(line) == event
    record = {**json.loads(line), "later": 1}
    if "times" in record:
        record["times"]["later"] = 2
    assert from_json(json.dumps(record)) == event


@pytest.mark.parametrize(("record", "said"), [
    ({"event": []}, "with a name as"), ({"event": {}}, "with a name as"), ({"event": 5}, "with a name as"),
    ({"event": "trace_started", "version": "2", "target": "t", "drafter": "d", "rule": "match", "depth": "1"}, "trace version '2'"),
    ({"event": "trace_started", "version": None, "target": "t", "drafter": "d", "rule": "match", "depth": "1"}, "trace version None"),
])
def test_what_names_no_event_is_told(record: dict[str, object], said: str) -> None:
    with pytest.raises(Failure, match=said):
        from_json(json.dumps(record))


def run(level: TraceLevel, sinks: list[object], drafter: str = "ngram:min=1,max=2") -> Engine:
    config = EngineConfig(trace=level, max_batch=4)
    engine = Engine(target=table(), drafter=drafter, depth=3, config=config, sinks=sinks)  # type: ignore[arg-type]
    asked = zip(PROMPTS, OPTIONS.values(), strict=True)
    handles = [engine.submit(p, s, prompt_class="ab"[i % 2])[0] for i, (p, s) in enumerate(asked)]
    while not all(handle.done for handle in handles):
        engine.step()
    engine.close()
    return engine


@pytest.mark.parametrize("level", ["summary", "full"])
def test_a_file_holds_what_memory_holds(tmp_path: Path, level: TraceLevel) -> None:
    memory, file = Memory(), Jsonl(tmp_path / "t.jsonl", buffer_bytes=300)
    engine = run(level, [memory, file, Null()])
    file.close()
    events = list(read_trace(tmp_path / "t.jsonl"))
    assert events == memory.events and events[0].event == "trace_started"
    reports = requests(events)
    assert len(reports) == len(PROMPTS)
    done = {e.request: e for e in events if e.event == "request_done"}
    for name, report in reports.items():
        assert report.metrics() == done[name].metrics and report.finish == done[name].finish
    times = [e.at_s for e in events if e.event in ("prefill_done", "round_done")]
    assert times == sorted(times) and times[0] > 0
    rows = by_class(reports.values())
    assert [(r.prompt_class, r.requests) for r in rows] == [("a", 9), ("b", 8)]
    total = rows[0].tally + rows[1].tally
    assert total.as_metrics() == engine.stats()["metrics"] and total.completion_tokens == engine.stats()["completion_tokens"]
    assert all(row.tokens_per_s and row.ttft_s and row.tpot_s for row in rows)
    for e in events:
        if e.event == "round_done":
            spent = e.times.draft_s + e.times.score_s + e.times.verify_s + e.times.other_s
            assert 0 < spent < 5 and min(e.times.draft_s, e.times.score_s, e.times.verify_s, e.times.other_s) >= 0


def test_events_are_put_into_words_many_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each by itself, between two passes, finds the caches cold; and none waits for longer than it may."""
    worded: list[Event] = []
    monkeypatch.setattr(sinks, "to_json", lambda event: worded.append(event) or to_json(event))
    sink = Jsonl(tmp_path / "t.jsonl", flush_s=3600.0)
    count = 0
    while not worded:
        sink.write(EVENTS[5])
        count += 1
    assert len(worded) == count > 100 and (tmp_path / "t.jsonl").read_text().count("\n") == count
    sink.write(EVENTS[5])
    assert len(worded) == count
    sink.close()
    assert list(read_trace(tmp_path / "t.jsonl")) == [EVENTS[5]] * (count + 1)
    monkeypatch.setattr(sinks.time, "monotonic", lambda: 1e9)
    late = Jsonl(tmp_path / "late.jsonl")
    monkeypatch.setattr(sinks.time, "monotonic", lambda: 1e9 + 2)
    late.write(EVENTS[5])
    assert list(read_trace(tmp_path / "late.jsonl")) == [EVENTS[5]]
    late.close()


def test_level_none_builds_nothing() -> None:
    memory = Memory()
    run("none", [memory])
    assert memory.events == []


def test_an_observer_may_come_and_go() -> None:
    seen = Memory()
    with Engine(target=table(), drafter="none") as engine:
        engine.generate([1, 2], OPTIONS["warm"])
        leave = engine.events(seen)
        engine.generate([1, 2], OPTIONS["warm"])
        count = len(seen.events)
        leave()
        leave()
        engine.generate([1, 2], OPTIONS["warm"])
    assert seen.events[0].event == "trace_started" and seen.events[-1].event == "request_done" and len(seen.events) == count


class FullDisk(Jsonl):
    """Takes a while, then half a write, then nothing."""

    def _put(self, data: memoryview) -> int:
        if self._written + len(data) > 3000:
            super()._put(data[:10])
            raise OSError(errno.ENOSPC, "No space left on device")
        return super()._put(data)


def test_a_full_disk_ends_the_trace_and_not_the_text(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sink = FullDisk(tmp_path / "t.jsonl", buffer_bytes=500)
    run("summary", [sink])
    assert sink.error is not None and "No space left" in sink.error and sink.lost > 10 and "No space left" in caplog.text
    with pytest.raises(Failure, match="events lost"):
        sink.close()
    assert len(list(read_trace(tmp_path / "t.jsonl"))) > 2, "whole lines only"


def test_files_that_cannot_be_written_or_read(tmp_path: Path) -> None:
    with pytest.raises(Failure, match="existing folder"):
        Jsonl(tmp_path / "no" / "t.jsonl")
    with pytest.raises(Failure, match="missing"):
        list(read_trace(tmp_path / "missing.jsonl"))
    path = tmp_path / "t.jsonl"
    good = to_json(EVENTS[0])
    path.write_text(good + '\n{"event":"from_the_future","x":1}\n' + good[:20])
    assert list(read_trace(path)) == [EVENTS[0]], "a torn last line and unknown events are left out"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert list(read_trace(path)) == [EVENTS[0]], "an editor's mark before the first line is none of it"
    for bad, says in (("not json", "not a line of a trace"), ('{"event":"round_done"}', "of another form"), ("[]", "not a line"),
                      ("[" * 200_000, "not a line")):
        path.write_text(good + "\n" + bad + "\n")
        with pytest.raises(Failure, match=f"line 2: .*{says}"):
            list(read_trace(path))
    path.write_text(good.replace(f'"version":{VERSION}', '"version":99') + "\n")
    with pytest.raises(Failure, match="version 99"):
        list(read_trace(path))


def test_a_request_s_drafter_is_the_whole_chain_whichever_part_guessed_last(tmp_path: Path) -> None:
    sink = Jsonl(tmp_path / "t.jsonl")
    with Engine(table(), "ngram+suffix", 3, sinks=[sink]) as engine:
        engine.generate_batch(PROMPTS, OPTIONS["warm"])
        engine.generate(PROMPTS[0], OPTIONS["warm"], speculation={"drafter": "none"})
    sink.close()
    events = list(read_trace(tmp_path / "t.jsonl"))
    assert {event.drafter for event in events if isinstance(event, RoundDone)} > {"none", "ngram"}, "rounds name the part"
    assert [report.drafter for report in requests(events).values()] == [*["ngram+suffix"] * len(PROMPTS), "none"]


@pytest.mark.parametrize(("own", "last", "said"), [
    ("a+b+c", "b+c", "a+b+c"), ("a+b", "other", "other"), ("a+b", "none", "none"), ("", "a", "a"), ("a", "a", "a"), ("ab", "a", "a"),
])
def test_a_drafter_that_took_over_is_named(own: str, last: str, said: str) -> None:
    started = RequestStarted("r", 0.0, 3, 0, {}, 1, 0, drafter=own)
    (report,) = requests([started, RoundDone("r", 0, 1.0, 1, 3, 0, last, "", "", (), (), "", TIMES)]).values()
    assert report.drafter == said
