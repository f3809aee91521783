"""The trace: what is written is what is read, every reader counts the same, and a full disk stops nothing but the file."""

from __future__ import annotations

import errno
import json
import math
from pathlib import Path

import pytest
from engine.engine_support import OPTIONS, PROMPTS, table

from draftproof import Engine, EngineConfig, Failure, Jsonl, Memory, Sampling, read_trace
from draftproof.config import TraceLevel
from draftproof.engine.records import json_options
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


class Narrow(Jsonl):
    """A file that takes seven bytes at a time."""

    def _put(self, data: memoryview) -> int:
        return super()._put(data[:7])


def test_a_write_that_takes_a_part_goes_on_behind_it(tmp_path: Path) -> None:
    sink = Narrow(tmp_path / "t.jsonl")
    for event in EVENTS:
        sink.write(event)
    sink.close()
    assert list(read_trace(tmp_path / "t.jsonl")) == EVENTS and sink.error is None


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
    plain = {event.drafter for event in events if isinstance(event, RoundDone) and not event.nodes}
    assert plain == {"none", "ngram+suffix"}, "nobody guessed: the whole chain was asked"
    assert [report.drafter for report in requests(events).values()] == [*["ngram+suffix"] * len(PROMPTS), "none"]


@pytest.mark.parametrize(("own", "last", "said"), [
    ("a+b+c", "b+c", "a+b+c"), ("a+b", "other", "other"), ("a+b", "none", "none"), ("", "a", "a"), ("a", "a", "a"), ("ab", "a", "a"),
])
def test_a_drafter_that_took_over_is_named(own: str, last: str, said: str) -> None:
    started = RequestStarted("r", 0.0, 3, 0, {}, 1, 0, drafter=own)
    (report,) = requests([started, RoundDone("r", 0, 1.0, 1, 3, 0, last, "", "", (), (), "", TIMES)]).values()
    assert report.drafter == said


def told(name: str, begun: float, *rounds: tuple[float, str], prompt_class: str | None = None) -> list[Event]:
    """A request whose first token comes half a second after it began, and its rounds: when each ended, and the fates of its guesses."""
    out: list[Event] = [RequestStarted(name, begun, 3, 0, {}, 1, 0, prompt_class),
                        PrefillDone(name, begun + 0.5, 0.25, 2, TokenRecord(0, "prefill"), "")]
    for number, (at, fates) in enumerate(rounds):
        nodes = tuple(NodeRecord(i, i - 1, "accepted" if fate == "a" else "rejected") for i, fate in enumerate(fates))
        tokens = (TokenRecord(0, "plain"),) * (1 + fates.count("a"))
        out.append(RoundDone(name, number, at, 1, 4, 3, "ngram" if fates else "none", "", "",
                             nodes, tokens, "", Times(0.5, 2.0, 0.25, 0.125)))
    return out


def test_times_are_those_between_moments() -> None:
    (report,) = requests(told("r", 1.0, (2.0, "aar"), (3.0, ""))).values()
    found = report.metrics()
    assert {name: found[name] for name in ("ttft_s", "tpot_s", "tokens_per_s", "target_passes", "passes_saved", "acceptance_length")} == {
        "ttft_s": 0.5, "tpot_s": 1.5 / 4, "tokens_per_s": 2.5, "target_passes": 4, "passes_saved": 1, "acceptance_length": 2.0}
    assert [found[f"{part}_s"] for part in ("draft", "score", "verify", "other")] == [1.0, 4.0, 0.5, 0.25]
    (one,) = requests(told("r", 1.0)).values()
    assert (one.metrics()["ttft_s"], one.metrics()["tpot_s"], one.metrics()["tokens_per_s"]) == (0.5, None, 2.0)
    (ended,) = requests([*told("r", 1.0), RequestDone("r", 9.0, "stop", 1, {})]).values()
    assert ended.metrics() == one.metrics() and ended.finish == "stop"
    (none,) = requests(told("r", 1.0)[:1]).values()
    assert (none.metrics()["ttft_s"], none.metrics()["tpot_s"], none.metrics()["tokens_per_s"]) == (None, None, None)


def test_a_class_has_the_middle_of_its_requests_and_the_sum_of_their_counts() -> None:
    ends = {"a": 2.0, "b": 3.0, "c": 7.0}
    events = [event for name, at in ends.items() for event in told(name, 1.0, (at, "ar"), prompt_class="code")]
    rows = by_class(requests([*events, *told("d", 1.0)]).values())
    assert [(row.prompt_class, row.drafter, row.requests) for row in rows] == [("", "none", 1), ("code", "ngram", 3)]
    assert (rows[1].tpot_s, rows[1].tokens_per_s, rows[1].ttft_s) == (1.5 / 2, 1.5, 0.5) and rows[0].tpot_s is None
    assert (rows[1].tally.accepted, rows[1].tally.rejected, rows[1].tally.completion_tokens) == (3, 3, 9)


@pytest.mark.parametrize(("stood", "tokens", "whole"), [(2, 2, True), (2, 3, True), (2, 1, False), (2, 4, False),
                                                         (0, 0, True), (0, 2, False)])
def test_a_round_emits_what_stood_and_at_most_one_token_more(stood: int, tokens: int, whole: bool) -> None:
    nodes = tuple(NodeRecord(i, i - 1, "accepted") for i in range(stood))
    events = [*told("r", 1.0), RoundDone("r", 7, 2.0, 1, 4, 3, "ngram", "", "", nodes, (TokenRecord(0, "plain"),) * tokens, "", TIMES)]
    if whole:
        assert requests(events)["r"].tally.emitted == tokens
    else:
        with pytest.raises(Failure, match=f"round 7 of request r: accepted guesses: {stood}, tokens: {tokens};"):
            requests(events)


def test_options_are_told_as_json_has_them() -> None:
    told = json_options(Sampling(temperature=0.5, stop=("x",), bad_words=("y", "z"), stop_token_ids=(4,), bad_word_ids=((1, 2), (3,)),
                                 logit_bias={3: -math.inf, 4: 2.5, 5: 1e20}, prediction=(1, 2, 3)))
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    assert {name: told[name] for name in ("temperature", "stop", "bad_words", "stop_token_ids", "bad_word_ids", "logit_bias", "prediction")
            } == {"temperature": 0.5, "stop": ["x"], "bad_words": ["y", "z"], "stop_token_ids": [4], "bad_word_ids": [[1, 2], [3]],
                  "logit_bias": {"3": -1e9, "4": 2.5, "5": 1e9}, "prediction": 3}


def test_an_engine_that_tells_no_rounds_is_taken_at_its_word() -> None:
    """Its drafter is then the one that the header names."""
    said = {"rounds": 2, "drafted": 6, "accepted": 2, "tpot_s": 0.5}
    (report,) = requests([EVENTS[0], *told("r", 1.0), RequestDone("r", 3.0, "length", 5, said)]).values()
    assert report.metrics() == said and report.drafter == "ngram:min=1"
    assert (report.tally.drafted, report.tally.accepted, report.tally.rounds, report.tally.emitted) == (6, 2, 2, 4)
    assert report.clock.tokens_per_s == 5 / 2
