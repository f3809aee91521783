"""A server as a client sees it: any OpenAI-compatible endpoint, streamed, and the counters it publishes.

Per answer: vLLM's `metrics.speculative_decoding` (also ours) where the server sends it. Else Prometheus counters before
and after a block, under the suffix that vLLM and llama.cpp share (`<engine>:spec_decode_num_drafts_total`, …), or SGLang's gauges.
"""

from __future__ import annotations

import json
import math
import queue
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from ..core.tally import Tally
from ..errors import Failure
from .load import Answer, Job

COUNTERS = {"drafts": "spec_decode_num_drafts", "drafted": "spec_decode_num_draft_tokens", "accepted": "spec_decode_num_accepted_tokens"}
PER_POSITION = "spec_decode_num_accepted_tokens_per_pos"
GAUGES = {"spec_accept_length": "length", "spec_accept_rate": "rate", "spec_decode_acceptance_length": "length"}   # SGLang, TensorRT-LLM
DONE: dict[str, Any] = {"choices": []}       # stands for a stream's last line, which is no JSON
SAMPLE = re.compile(r"^(vllm|sglang|llamacpp|trtllm|lmdeploy|draftproof)[:_](\w+?)(?:_total)?(?:\{(.*)\})?\s+(\S+)")


@dataclass(slots=True)
class Counters:
    """What a server has counted so far. None where it publishes no such number; gauges are its own averages."""

    engine: str | None = None
    drafts: float | None = None
    drafted: float | None = None
    accepted: float | None = None
    per_position: dict[int, float] = field(default_factory=dict)
    gauges: dict[str, float] = field(default_factory=dict)

    def since(self, before: Counters) -> Counters:
        """What was counted in between, or since a restart in between; gauges as they are now."""
        if any((getattr(self, name) or 0.0) < (getattr(before, name) or 0.0) for name in COUNTERS):
            before = Counters()                         # it began again at 0, and all that it has counted since is of this time

        def less(name: str) -> float | None:
            now, then = getattr(self, name), getattr(before, name)
            return None if now is None else now - (then or 0.0)

        positions = {at: n - before.per_position.get(at, 0.0) for at, n in self.per_position.items()}
        return Counters(self.engine, less("drafts"), less("drafted"), less("accepted"), positions, dict(self.gauges))

    def __add__(self, later: Counters) -> Counters:
        """Both together; gauges as the later has them."""

        def both(name: str) -> float | None:
            known = [value for value in (getattr(self, name), getattr(later, name)) if value is not None]
            return sum(known) if known else None

        positions = {at: self.per_position.get(at, 0.0) + later.per_position.get(at, 0.0)
                     for at in sorted(self.per_position.keys() | later.per_position.keys())}
        return Counters(later.engine or self.engine, both("drafts"), both("drafted"), both("accepted"), positions,
                        dict(later.gauges or self.gauges))

    def as_json(self) -> dict[str, Any]:
        """Keys of `vllm bench serve`; absent where the server does not count, or counted no draft. The rate is in percent, the length
        includes the bonus."""
        out: dict[str, Any] = {"metrics_of": self.engine}
        if self.drafts and self.drafted and self.accepted is not None:
            out |= {"spec_decode_num_drafts": int(self.drafts), "spec_decode_draft_tokens": int(self.drafted),
                    "spec_decode_accepted_tokens": int(self.accepted), "spec_decode_acceptance_rate": 100 * self.accepted / self.drafted,
                    "spec_decode_acceptance_length": 1 + self.accepted / self.drafts,
                    "spec_decode_per_position_acceptance_rates": [n / self.drafts for _, n in sorted(self.per_position.items())]}
        if "spec_decode_acceptance_length" not in out and "length" in self.gauges:
            out["spec_decode_acceptance_length"] = self.gauges["length"]
        if "spec_decode_acceptance_rate" not in out and "rate" in self.gauges:
            out["spec_decode_acceptance_rate"] = 100 * self.gauges["rate"]
        return out


def read_counters(text: str) -> Counters:
    """From Prometheus' text format; samples of several labels are added up, gauges averaged. What is no finite number is left out, and so
    are gauges of a rank that has not guessed yet: its length is 0, where one of a round is at least 1."""
    found, gauges = Counters(), dict[str, dict[str, float]]()
    for line in text.split("\n"):
        match = None if line.startswith("#") else SAMPLE.match(line)
        value = _number(match[4]) if match else None
        if match is None or value is None:
            continue
        engine, name, labels = match[1], match[2], match[3] or ""
        for key, wanted in COUNTERS.items():
            if name == wanted:
                found.engine = engine
                setattr(found, key, (getattr(found, key) or 0.0) + value)
        if name == PER_POSITION and (position := re.search(r'position="(\d+)"', labels)):
            at = int(position[1])
            found.per_position[at] = found.per_position.get(at, 0.0) + value
        if name in GAUGES:
            found.engine = found.engine or engine
            gauges.setdefault(labels, {})[GAUGES[name]] = value
    ranks = [rank for rank in gauges.values() if rank.get("length") != 0]
    for key in dict.fromkeys(key for rank in ranks for key in rank):
        found.gauges[key] = fmean(rank[key] for rank in ranks if key in rank)
    return found


def _number(word: str) -> float | None:
    try:
        value = float(word)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


class Endpoint:
    """Jobs over HTTP, one thread each while they run. `url` with or without /v1; `extra` goes into every request's body."""

    def __init__(self, url: str, model: str | None = None, api_key: str | None = None, extra: Mapping[str, Any] | None = None,
                 timeout_s: float = 600.0, clock: Callable[[], float] = time.perf_counter) -> None:
        try:
            import httpx2
        except ImportError:
            raise Failure("talking to a server needs the package httpx2; install draftproof[remote]") from None
        self._errors: tuple[type[Exception], ...] = (httpx2.HTTPError, httpx2.InvalidURL, ValueError, KeyError, TypeError)
        self.root = url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx2.Client(headers=headers, timeout=timeout_s, limits=httpx2.Limits(max_connections=None))
        self.clock, self.extra = clock, dict(extra or {})
        self._done: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self.models = self._models() if model is None else [model]

    def _models(self) -> list[str]:
        try:
            reply = self._http.get(f"{self.root}/v1/models", timeout=30)
            if reply.status_code == 401:
                raise Failure(f"{self.root} answered 401: expected a key that it takes; give --api-key-file FILE")
            reply.raise_for_status()
            names = [entry["id"] for entry in reply.json()["data"]]
        except self._errors as error:
            raise Failure(f"{self.root}/v1/models: {error}; expected an OpenAI-compatible server there, or give --model") from None
        if not names:
            raise Failure(f"{self.root}/v1/models lists no model; expected one, or give --model")
        return names

    def counters(self) -> Counters | None:
        """The server's counters now, empty where they hold no draft; None where they could not be read."""
        try:
            reply = self._http.get(f"{self.root}/metrics", timeout=30)
            return read_counters(reply.text) if reply.status_code == 200 else None
        except self._errors:
            return None

    def start(self, job: Job) -> None:
        threading.Thread(target=lambda: self._done.put(self.ask(job)), daemon=True).start()

    def poll(self, wait_s: float) -> list[Answer]:
        try:
            found = [self._done.get(timeout=max(wait_s, 1e-3))]
        except queue.Empty:
            return []
        while not self._done.empty():
            found.append(self._done.get())
        return found

    def close(self) -> None:
        self._http.close()

    def ask(self, job: Job) -> Answer:
        """One streamed request. What goes wrong is the answer's error, not an exception."""
        sent, reading = self.clock(), _Reading()
        try:
            self._read(job, sent, reading)
            ended = sent + reading.chunks[-1][0] if reading.chunks else self.clock()
            return reading.answer(job, sent, ended)
        except Exception as failure:                    # whatever a server sends: whoever waits for the answer must get one
            return Answer(job, sent, self.clock(), tuple(reading.chunks), reading.text, error=f"{type(failure).__name__}: {failure}")

    def _read(self, job: Job, sent: float, reading: _Reading) -> None:
        path, body = self._body(job)
        with self._http.stream("POST", self.root + path, json=body) as reply:
            if reply.status_code != 200:
                reply.read()
                reading.error = f"HTTP {reply.status_code}: {reply.text[:300]}"
                return
            for event in _events(_lines(reply.iter_bytes())):
                reading.take(event, self.clock() - sent)
            if not reading.whole:
                reading.error = reading.error or ("the stream ended in the middle; expected [DONE], or a finish_reason; "
                                                  f"found {reply.headers.get('content-type', 'no content type')}")

    def _body(self, job: Job) -> tuple[str, dict[str, Any]]:
        body = {"model": self.models[0], "max_tokens": job.max_tokens, "temperature": job.temperature, "seed": job.seed, "stream": True,
                "stream_options": {"include_usage": True}, **job.item.asked, **self.extra}
        logprobs = body.pop("top_logprobs", None)
        turn = job.item.turns[job.turn]
        if job.item.chat:
            more = {} if logprobs is None else {"logprobs": True, "top_logprobs": logprobs}
            return "/v1/chat/completions", {**body, "messages": job.messages, **more}
        more = {} if logprobs is None else {"logprobs": logprobs}
        return "/v1/completions", {**body, "prompt": list(turn) if isinstance(turn, tuple) else turn, **more}


def _lines(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Lines that end in \\n only: JSON lets U+2028, U+2029 and U+0085 stand, at which text is cut too."""
    rest = b""
    for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n")
        yield from whole
    yield rest


def _events(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.startswith(b"data:"):
            data = line[5:].strip()
            event = DONE if data == b"[DONE]" else json.loads(data.decode(errors="replace"))
            if isinstance(event, dict):
                yield event


def _said(delta: Mapping[str, Any]) -> str:
    """What a piece of a chat's answer adds to it: reasoning (under either name), text, and calls as they are written."""
    calls = [call.get("function") or {} for call in delta.get("tool_calls") or ()]
    return "".join([delta.get("reasoning_content") or delta.get("reasoning") or "", delta.get("content") or "",
                    *((call.get("name") or "") + (call.get("arguments") or "") for call in calls)])


class _Reading:
    """A stream on its way to an Answer. A chunk without a count of its own is one token until `usage` says how many there were."""

    def __init__(self) -> None:
        self.chunks: list[tuple[float, int]] = []
        self.text = ""
        self.error: str | None = None
        self.whole = False                # whether the server said that this is the end
        self.usage: dict[str, Any] = {}
        self.speculative: dict[str, Any] = {}
        self.ids: list[int] = []
        self.logprobs: list[tuple[str, float, dict[str, float]]] = []

    def take(self, event: dict[str, Any], at: float) -> None:
        if event.get("error"):
            self.error = str(event["error"])
        self.usage = event.get("usage") or self.usage
        self.whole |= event is DONE or bool(self.usage)
        self.speculative = (event.get("metrics") or {}).get("speculative_decoding") or self.speculative
        for choice in event.get("choices") or ():
            piece = choice.get("text") or _said(choice.get("delta") or {})
            self.whole |= choice.get("finish_reason") is not None
            entries = list(_logprobs(choice.get("logprobs")))
            ids = choice.get("token_ids") or ()
            self.text += piece
            self.ids += ids
            self.logprobs += entries
            if piece or entries or ids:
                self.chunks.append((at, len(ids) or len(entries) or 1))

    def answer(self, job: Job, sent: float, ended: float) -> Answer:
        counted = sum(n for _, n in self.chunks)
        tokens = int(self.usage.get("completion_tokens") or counted)
        if self.chunks and tokens > counted:           # several tokens arrived as one chunk: spread them over the chunks
            extra, chunks = tokens - counted, self.chunks
            each, left = divmod(extra, max(1, len(chunks) - 1))
            self.chunks = [(at, n + (each + (i <= left) if i or len(chunks) == 1 else 0)) for i, (at, n) in enumerate(chunks)]
        ids = tuple(self.ids) if len(self.ids) == tokens and tokens else None
        return Answer(job, sent, ended, tuple(self.chunks), self.text, ids, tokens, int(self.usage.get("prompt_tokens") or 0),
                      tally_of(self.speculative, tokens) if self.speculative else None, _steps(self.speculative), error=self.error,
                      logprobs=tuple(self.logprobs))


def _logprobs(found: Any) -> Iterator[tuple[str, float, dict[str, float]]]:
    """Chat's list of entries, or the parallel lists of completions."""
    if not isinstance(found, dict):
        return
    for entry in found.get("content") or ():
        yield entry["token"], entry["logprob"], {top["token"]: top["logprob"] for top in entry.get("top_logprobs") or ()}
    if found.get("tokens"):
        tops = found.get("top_logprobs") or [None] * len(found["tokens"])
        for token, value, top in zip(found["tokens"], found["token_logprobs"], tops, strict=True):
            yield token, value if value is not None else 0.0, dict(top or {})


def tally_of(metrics: Mapping[str, Any], tokens: int) -> Tally:
    """vLLM's per-request numbers as a tally. Rounds without a draft are what is left of the tokens; a draft shorter than the
    deepest counts as refused behind its end, which is how that histogram counts. Depths that no walk reached are left out."""
    histogram = [int(n) for n in metrics.get("acceptance_histogram") or ()]
    rounds, accepted = int(metrics.get("num_spec_steps") or sum(histogram)), int(metrics.get("num_accepted_draft_tokens") or 0)
    drafted = int(metrics.get("num_draft_tokens") or 0)
    emitted = min(rounds + accepted, max(0, tokens - 1))
    plain = max(0, tokens - 1 - emitted)
    reached = [count for depth in range(len(histogram) - 1) if (count := sum(histogram[depth:]))]
    passed = [sum(histogram[depth + 1:]) for depth in range(len(reached))]
    return Tally(requests=1, prefill_passes=1, rounds=rounds + plain, rounds_drafted=rounds, drafted=drafted, accepted=accepted,
                 emitted=emitted + plain, emitted_drafted=emitted, reached=reached, passed=passed)


def _steps(metrics: Mapping[str, Any]) -> tuple[int, ...]:
    """Tokens emitted by each round that had a draft: in order with detailed metrics, else as the histogram has them."""
    if metrics.get("per_step_accepted"):
        return tuple(int(n) + 1 for n in metrics["per_step_accepted"])
    return tuple(length + 1 for length, count in enumerate(metrics.get("acceptance_histogram") or ()) for _ in range(int(count)))
