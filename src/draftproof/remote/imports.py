"""What vLLM and llama.cpp tell of their answers, as a trace of ours: every round that they tell, and none that they do not.

vLLM        with --per-request-spec-decode-metrics detailed, how many guesses each drafted step had and how many stood; when a step without
            a guess ran is known only where tokens arrived one by one. At level summary totals only.
llama.cpp   a stream with `timings_per_token` counts tokens, guesses and accepted guesses at every chunk, which gives the rounds and
            their times. A whole answer has the totals.

Neither tells p and q, which guesses were refused, or how a round's time divides. An answer of which only totals are known has no
round in the trace: its `request_done` holds what was told, and null for the rest (`trace.report` reads it so).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from ..core.tally import Tally
from ..errors import Failure
from ..trace.events import VERSION, Event, PrefillDone, RequestDone, RequestStarted, TokenRecord, TraceStarted
from ..trace.report import Clock, metrics
from ..types import FinishReason, Rule
from .answers import Answer, read
from .steps import FLAG, MOST_GUESSES, MOST_TOKENS, Step, lists_of, round_of, steps_of

ENGINES: dict[str, tuple[str, Rule]] = {"vllm": ("vLLM", "ratio"), "llamacpp": ("llama.cpp", "match")}
"""Name, and the rule of ours that its verification follows: rejection sampling, or the target's own choice."""
HINTS = {
    "vllm": f"vLLM answers with metrics.speculative_decoding when it was started with {FLAG} "
            "(a stream must ask for stream_options.include_usage)",
    "llamacpp": "llama-server answers with timings (in a stream at every token, if the request says timings_per_token)",
}
FINISHES: dict[str, FinishReason] = {"length": "length", "limit": "length", "abort": "cancelled", "error": "error"}
NOT_TOLD = "(not told)"


class Imported(NamedTuple):
    """The trace's records, and what its reader should know of them, a sentence each."""

    events: list[Event]
    notes: list[str]


class Moments(NamedTuple):
    """Of one answer, seconds of the trace: asked, first token, last token; whether its steps' own times are known."""

    begin: float
    first: float
    end: float
    timed: bool


class Arrival(NamedTuple):
    """Tokens that arrived together: when (seconds of the client's clock, if it noted them), how many, their text."""

    at: float | None
    tokens: int
    text: str


@dataclass(slots=True)
class Text:
    """The tokens of one answer. ids[i] and ends: (tokens written, text that was whole by then), in order."""

    ids: list[int]
    ends: list[tuple[int, str]]

    def between(self, start: int, end: int) -> str:
        return "".join(text for at, text in self.ends if start < at <= end)


def load(path: Path, engine: str = "auto") -> Imported:
    """The trace of a file of answers. engine: "vllm", "llamacpp", or "auto". Raises Failure for a damaged or foreign file."""
    answers = read(path)
    kept: list[tuple[Answer, str]] = []
    notes = list(answers.left_out)
    for answer in answers.found:
        kind = next((name for name in ENGINES if engine in ("auto", name) and _tells(answer, name)), None)
        if kind is not None:
            kept.append((answer, kind))
        else:
            notes.append(f"line {answer.line}: the answer tells nothing of its steps, or was cut off before it did")
    if not kept:
        hints = [HINTS[engine]] if engine in HINTS else list(HINTS.values())
        raise Failure(f"{path}: no answer tells how it was written ({notes[0]}); {'; '.join(hints)}")
    try:
        found = trace_of(kept)
    except ValueError as error:
        raise Failure(f"{path}, {error}") from error
    return Imported(found.events, [*notes, *found.notes])


def _tells(answer: Answer, engine: str) -> bool:
    return (answer.report if engine == "vllm" else answer.timings) is not None


def trace_of(answers: Sequence[tuple[Answer, str]]) -> Imported:
    """Records of answers, each with its engine. Pure. Raises ValueError naming the line whose numbers contradict each other."""
    found = Imported([], [])
    words, unknown = _vocabulary([answer for answer, _ in answers])
    zero = min((answer.created for answer, _ in answers if answer.created is not None), default=0.0)
    end, header, names = 0.0, ("", ""), Counter[str]()
    for answer, engine in answers:
        if header != (engine, answer.model):
            found.events.append(_header(answer, engine, None if found.events else words, unknown))
            header = (engine, answer.model)
        names[answer.name] += 1
        request = answer.name if names[answer.name] == 1 else f"{answer.name} ({names[answer.name]})"
        begin = end if answer.created is None else answer.created - zero
        try:
            end = _add(found, answer, engine, request, begin, words, unknown)
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"line {answer.line}: {error}") from error
    return found


def _add(found: Imported, answer: Answer, engine: str, request: str, begin: float, words: Mapping[str, int] | None, unknown: int) -> float:
    """Add one answer's records and notes; returns when it ended."""
    written = _written(answer)
    arrivals = _arrivals(answer, written)
    moments = _moments(answer, arrivals, engine, begin)
    steps, notes = _steps_of_vllm(answer, arrivals, written, moments) if engine == "vllm" else _steps_of_llamacpp(answer, moments)
    found.notes.extend(f"line {answer.line}: {note}" for note in notes)
    text = _text(answer, arrivals, written, words, unknown)
    found.events.extend(_records(answer, engine, request, text, moments, steps, written, unknown))
    return moments.end


# What an answer says of itself

def _written(answer: Answer) -> int:
    """Tokens of the text."""
    totals = [piece.total for piece in answer.pieces if piece.total is not None]
    return totals[-1] if totals else sum(len(piece.ids) or len(piece.words) for piece in answer.pieces)


def _vocabulary(answers: Sequence[Answer]) -> tuple[dict[str, int] | None, int]:
    """Numbers for token texts, where every answer names the text of every token, and the id of what is not told."""
    if all(_written(answer) == sum(len(piece.words) for piece in answer.pieces) for answer in answers):
        texts = dict.fromkeys(word for answer in answers for piece in answer.pieces for word in piece.words)
        return {word: number for number, word in enumerate(texts)}, len(texts)
    return None, max((token for answer in answers for piece in answer.pieces for token in piece.ids), default=-1) + 1


def _arrivals(answer: Answer, written: int) -> list[Arrival]:
    """What arrived together, in order; all at once where nothing says how many tokens a piece has."""
    if not 0 <= written <= MOST_TOKENS:
        raise ValueError(f"an answer of {written} tokens; expected 0 to {MOST_TOKENS}")
    found, done = [], 0
    for piece in answer.pieces:
        count = piece.total - done if piece.total is not None else len(piece.ids) or len(piece.words)
        if count < 0:
            raise ValueError(f"the answer's count of tokens falls from {done} to {piece.total}")
        if piece.text and not count and piece.total is None:
            done = -1
            break
        done += count
        found.append(Arrival(piece.at, count, piece.text))
    return found if done == written else [Arrival(None, written, "".join(piece.text for piece in answer.pieces))]


def _text(answer: Answer, arrivals: Sequence[Arrival], written: int, words: Mapping[str, int] | None, unknown: int) -> Text:
    names = [word for piece in answer.pieces for word in piece.words]
    ids = [token for piece in answer.pieces for token in piece.ids] if words is None else [words[name] for name in names]
    parts = zip(accumulate(arrival.tokens for arrival in arrivals), (arrival.text for arrival in arrivals), strict=True) if words is None \
        else enumerate(names, 1)
    return Text(ids if len(ids) == written else [unknown] * written, list(parts))


def _moments(answer: Answer, arrivals: Sequence[Arrival], engine: str, begin: float) -> Moments:
    told = answer.timings if engine == "llamacpp" else answer.metrics
    names = ("prompt_ms", "predicted_ms") if engine == "llamacpp" else ("time_to_first_token_ms", "generation_time_ms")
    first, rest = (float((told or {}).get(name) or 0.0) / 1e3 for name in names)
    first += begin + float(answer.metrics.get("queue_time_ms") or 0.0) / 1e3
    if not all(map(math.isfinite, (begin, first, rest))) or min(first - begin, rest) < 0:
        raise ValueError(f"{names[0]} and {names[1]} are no times; expected milliseconds")
    seen = [arrival.at for arrival in arrivals if arrival.at is not None]
    if len(seen) == len(arrivals):
        return Moments(begin, first, first + seen[-1] - seen[0], True)
    return Moments(begin, first, first + rest, engine == "llamacpp")


# Steps, and what is to be said of them; None where only totals are known

Told = tuple[list[Step] | None, list[str]]


def _steps_of_vllm(answer: Answer, arrivals: Sequence[Arrival], written: int, moments: Moments) -> Told:
    notes = list[str]()
    listed = lists_of(answer.report or {})
    if listed is None:
        return None, [f"totals only; vLLM tells its steps when it was started with {FLAG}"]
    accepted, drafted = listed
    fit, left = 0, written - 1
    while fit < len(accepted) and left > 0:
        left -= accepted[fit] + 1
        fit += 1
    if fit < len(accepted):
        notes.append(f"{len(accepted) - fit} of its steps ran after the end of the text, and are left out")
    if left > 0 and fit and len(arrivals) == 1:
        notes.append(f"steps without a guess: {left}, which stand at the end; the answer does not say when they ran")
    pieces: list[tuple[float, int]] = []
    shift = moments.first - (arrivals[0].at or 0.0)
    for count, arrival in zip(accumulate(arrival.tokens for arrival in arrivals), arrivals, strict=True):
        new = min(arrival.tokens, count - 1)                       # the prefill's token is no step's
        if new > 0:
            pieces.append((moments.end if arrival.at is None else arrival.at + shift, new))
    return steps_of(pieces, {"per_step_accepted": accepted[:fit], "per_step_drafted": drafted[:fit]}, True), notes


def _steps_of_llamacpp(answer: Answer, moments: Moments) -> Told:
    told = [piece.timings for piece in answer.pieces if piece.timings and _counts(piece.timings)[0]]
    if len(told) < 2:
        return None, ["totals only; llama-server tells its rounds in a stream whose request says timings_per_token"]
    last = (1, 0, 0)
    if _counts(told[0]) != last:
        return None, ["totals only; the stream does not begin with its first token"]
    steps: list[Step] = []
    for timings in told[1:]:
        now = _counts(timings)
        emitted, drafted, accepted = (new - old for new, old in zip(now, last, strict=True))
        if min(emitted, drafted, accepted) < 0 or accepted > min(drafted, emitted) or drafted > MOST_GUESSES:
            raise ValueError(f"the timings contradict each other: {last}, then {now} (predicted_n, draft_n, draft_n_accepted)")
        at, last, passes = moments.first + float(timings.get("predicted_ms") or 0.0) / 1e3, now, emitted - accepted
        if passes == 1:
            steps.append(Step(at, emitted, drafted))
        elif passes and not drafted:
            steps += [Step(at, 1, 0)] * passes
        elif passes or drafted:
            return None, ["totals only; chunks of the stream are missing, so that its rounds cannot be told apart"]
    return steps, []


def _counts(timings: Mapping[str, Any]) -> tuple[int, int, int]:
    """Tokens, guesses and accepted guesses so far. llama.cpp leaves the latter two out as long as there are none."""
    return int(timings["predicted_n"]), int(timings.get("draft_n") or 0), int(timings.get("draft_n_accepted") or 0)


# Records

def _header(answer: Answer, engine: str, words: Mapping[str, int] | None, unknown: int) -> TraceStarted:
    name, rule = ENGINES[engine]
    depth = (answer.report or {}).get("num_spec_tokens")
    told = {"imported": name, "unknown_token": unknown, "probabilities": "not told", "seed": "not told"}
    return TraceStarted(VERSION, answer.model or "not told", name, rule, "not told" if depth is None else str(depth), told,
                        None if words is None else (*words, NOT_TOLD))


def _records(answer: Answer, engine: str, request: str, text: Text, moments: Moments, steps: list[Step] | None, written: int,
             unknown: int) -> Iterator[Event]:
    name, rule = ENGINES[engine]
    prompt, cached = _prompt(answer)
    asked = {key: answer.asked[key] for key in ("temperature", "top_p", "top_k", "min_p", "max_tokens") if key in answer.asked}
    # Its own name among the options: no two answers are taken for one request answered twice.
    yield RequestStarted(request, moments.begin, prompt, cached, {**asked, "imported": request}, 0, 0, answer.prompt_class,
                         prompt_ids=answer.prompt_ids, rule=rule)
    if not written:
        return
    tally, clock = Tally(), Clock(moments.begin)
    tally.prefill()
    clock.delivered(moments.first, 1)
    yield PrefillDone(request, moments.first, moments.first - moments.begin, 1, TokenRecord(text.ids[0], "prefill"),
                      text.between(0, 1 if steps is not None else written))
    done, before, guessing = 1, moments.first, any(step.drafted for step in steps or ())
    for number, step in enumerate(steps or ()):
        end = done + step.emitted
        seconds = max(0.0, step.at - before) if moments.timed else 0.0
        record = round_of(step, number, request, text.ids[done:end], prompt + done, text.between(done, end), seconds, 0.0, 1,
                          name if guessing else "none", step.drafted, f"told by {name}", unknown)
        tally.round(step.drafted, step.accepted, step.rejected, step.emitted)
        clock.delivered(step.at, step.emitted)
        clock.spent(record.times)
        yield record
        done, before = end, step.at
    if answer.finish is None:
        return
    totals: dict[str, Any] = {}
    if steps is None and written > 1:
        clock.delivered(moments.end, written - 1)
        totals = _totals(answer, engine, written)
    yield RequestDone(request, moments.end, FINISHES.get(answer.finish, "stop"), written, {**metrics(tally, clock), **totals})


def _prompt(answer: Answer) -> tuple[int, int]:
    """Prompt tokens, and how many of them were cached."""
    timings = answer.timings or {}
    cached = int(timings.get("cache_n") or (answer.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
    told = answer.usage.get("prompt_tokens")
    return int(told) if told is not None else cached + int(timings.get("prompt_n") or 0), cached


def _totals(answer: Answer, engine: str, written: int) -> dict[str, Any]:
    """The metrics of an answer without rounds. llama.cpp counts every pass: its tokens, less the accepted guesses and the first."""
    times = dict.fromkeys(("draft_s", "score_s", "verify_s", "other_s"))
    if engine == "llamacpp":
        _, drafted, accepted = _counts(answer.timings or {})
        tally = replace(Tally(), requests=1, prefill_passes=1, rounds=written - 1 - accepted, drafted=drafted, accepted=accepted,
                        emitted=written - 1)
        return {**tally.as_metrics(), **times}
    report = answer.report or {}
    made, kept = (report.get(name) for name in ("num_draft_tokens", "num_accepted_draft_tokens"))
    if not isinstance(made, int) or not isinstance(kept, int) or not 0 <= kept <= made:
        raise ValueError(f"num_draft_tokens is {made!r} and num_accepted_draft_tokens {kept!r}; expected counts")
    return {"rounds": None, "target_passes": None, "drafted": made, "accepted": kept, "acceptance_length": None,
            "acceptance_length_drafted": report.get("mean_acceptance_length"), "passes_saved": None, "hazard": [],
            "draft_utilisation": kept / made if made else None, **times}
