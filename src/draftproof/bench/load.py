"""Load: jobs, the answers their clients saw, and the loop that keeps an engine or a server busy, closed or open."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, cycle
from typing import Any, Protocol

from ..core.tally import Tally
from ..engine.port import Handle, Port
from ..errors import CacheFull, Failure, PromptError, UsageError
from ..models.tokenizer import Tokenizer
from ..trace.events import RoundDone
from ..types import Sampling
from .workload import Item, Message

IDLE_S = 0.05                             # the longest sleep while nothing is to do
FILLING = -2                              # repeats from here down only keep a load steady; −1 warms up
CLIENTS = count()
FILLERS = 1 << 20                         # more than any block needs


@dataclass(frozen=True, slots=True)
class Load:
    """A closed loop keeps `concurrency` requests running; an open one sends `rate` a second, or at the recorded times (both None).

    A steady closed loop is full before the first request that counts, with others at different places of their answers, and fills the
    places that become free at the end until the last that counts is answered: every one meets the load that it is counted under.
    """

    concurrency: int | None = None
    rate: float | None = None
    steady: bool = False

    @property
    def name(self) -> str:
        return str(self.concurrency) if self.concurrency else f"{self.rate:g}/s" if self.rate else "recorded"


@dataclass(frozen=True, slots=True)
class Job:
    """One turn of one item, for one arm. The seed is the same in all arms."""

    arm: str
    load: Load
    repeat: int
    number: int                           # of the item in the workload
    item: Item
    seed: int
    max_tokens: int
    temperature: float
    block: int = 0                        # jobs of one block ran together
    answers: tuple[str, ...] = ()         # to the turns before

    @property
    def turn(self) -> int:
        return len(self.answers)

    @property
    def messages(self) -> list[Message]:
        """The conversation up to this turn."""
        found = list(self.item.history)
        for place, turn in enumerate(self.item.turns[:self.turn + 1]):
            found.append(turn if isinstance(turn, Mapping) else {"role": "user", "content": str(turn)})
            if place < self.turn:
                found.append({"role": "assistant", "content": self.answers[place]})
        return found

    def following(self, answer: str) -> Job | None:
        """The next turn, once this one is answered."""
        more = self.turn + 1 < len(self.item.turns)
        return replace(self, answers=(*self.answers, answer)) if more else None


@dataclass(frozen=True, slots=True)
class Answer:
    """One request as its client saw it. Times are seconds of one clock; chunks are (seconds since it was sent, tokens)."""

    job: Job
    sent_s: float
    ended_s: float
    chunks: tuple[tuple[float, int], ...] = ()
    text: str = ""
    token_ids: tuple[int, ...] | None = None     # None where a server does not tell
    tokens: int = 0
    prompt_tokens: int = 0
    tally: Tally | None = None                   # None where nobody counted
    steps: tuple[int, ...] = ()                  # tokens emitted by each round
    draft_bytes: int = 0
    kv_tokens_lost: int = 0
    error: str | None = None
    logprobs: tuple[tuple[str, float, dict[str, float]], ...] = field(default=(), repr=False)   # token, its own, the likeliest

    @property
    def e2e_s(self) -> float:
        return self.ended_s - self.sent_s

    @property
    def ttft_s(self) -> float | None:
        return self.chunks[0][0] if self.chunks else None

    @property
    def tpot_s(self) -> float | None:
        """(t_last − t_first) / (n_last − n_first), n_first being the tokens of the first chunk."""
        rest = sum(n for _, n in self.chunks[1:])
        return (self.chunks[-1][0] - self.chunks[0][0]) / rest if rest else None

    @property
    def decoding(self) -> float | None:
        """Tokens per second after the first chunk; None if there was no other."""
        return 1 / self.tpot_s if self.tpot_s else None

    @property
    def inter_chunk_s(self) -> list[float]:
        return [after[0] - before[0] for before, after in zip(self.chunks, self.chunks[1:], strict=False)]

    @property
    def tokens_per_s(self) -> float:
        """What one user gets: tokens over the time from sending to the last of them."""
        return self.tokens / self.e2e_s if self.e2e_s > 0 else 0.0


class Client(Protocol):
    """Whoever answers jobs. Not thread-safe."""

    def start(self, job: Job) -> None: ...

    def poll(self, wait_s: float) -> list[Answer]:
        """The jobs that ended; waits about so long at most if there are none."""
        ...


def play(client: Client, jobs: Sequence[Job], load: Load, clock: Callable[[], float] = time.perf_counter) -> Iterator[Answer]:
    """Run all jobs under a load. In a closed loop the next turn of a conversation keeps its place; order is the workload's.

    What fills the places of a steady load are copies of the jobs, each under a repeat of its own, below zero and of this block alone,
    so that none finds another's text in a cache or a store; their answers are not given.
    """
    for answers in paced(client, jobs, load, clock):
        yield from answers


def paced(client: Client, jobs: Sequence[Job], load: Load, clock: Callable[[], float] = time.perf_counter) -> Iterator[list[Answer]]:
    """`play`, one poll of the client at a time: the answers that it brought, often none."""
    began, waiting, running, unanswered = clock(), deque(jobs), 0, len(jobs)
    own = count(FILLING - FILLERS * jobs[0].block, -1) if jobs else ()
    fillers = map(lambda job, repeat: replace(job, repeat=repeat), cycle(jobs), own) if load.steady else None
    if fillers and jobs and load.concurrency:
        for place in range(load.concurrency):
            other = next(fillers)
            client.start(replace(other, max_tokens=1 + other.max_tokens * place // load.concurrency))
            running += 1
    while waiting or running:
        now = clock() - began
        while waiting and (running < load.concurrency if load.concurrency else (waiting[0].item.arrival_s or 0.0) <= now):
            client.start(waiting.popleft())
            running += 1
        while fillers and unanswered and load.concurrency and running < load.concurrency:
            client.start(next(fillers))
            running += 1
        pause = IDLE_S
        if waiting and not load.concurrency:
            pause = min(pause, max(0.0, (waiting[0].item.arrival_s or 0.0) - now))
        counted = []
        for answer in client.poll(pause):
            running -= 1
            if answer.job.repeat <= FILLING:
                continue
            counted.append(answer)
            after = None if answer.error else answer.job.following(answer.text)
            if after is not None:
                client.start(after)
                running += 1
            else:
                unanswered -= 1
        yield counted


@dataclass(slots=True)
class _Flight:
    job: Job
    handle: Handle
    sent: float
    chunks: list[tuple[float, int]] = field(default_factory=list)


class Local:
    """Jobs on an engine in this process."""

    def __init__(self, engine: Port, tokenizer: Tokenizer | None, context: int, options: dict[str, Any] | None = None,
                 clock: Callable[[], float] = time.perf_counter) -> None:
        """context: the longest text; a longer prompt loses its beginning."""
        self.engine, self.tokenizer, self.context = engine, tokenizer, context
        self.options, self.clock = options or {}, clock
        self.cut = 0                      # prompts that lost their beginning
        self._number = next(CLIENTS)      # of all in this process, whose engines may share a target
        self._flights: dict[str, _Flight] = {}
        self._failed: list[Answer] = []

    def start(self, job: Job) -> None:
        asked = {"temperature": job.temperature, "top_p": 1.0, "seed": job.seed, **self.options, "max_tokens": job.max_tokens}
        sampling = Sampling.of(**asked)
        now = self.clock()
        try:
            # A tenant of its own: no client, arm or repeat finds the prompts, or the answers, of another in a cache or a store.
            handle = self.engine.submit(self.prompt(job), sampling, prompt_class=job.item.prompt_class,
                                        tenant=f"{self._number}-{job.arm}-{job.load.name}-{job.repeat}")[0]
        except (UsageError, CacheFull) as error:
            self._failed.append(Answer(job, now, now, error=str(error)))
            return
        self._flights[handle.id] = _Flight(job, handle, now)

    def poll(self, wait_s: float) -> list[Answer]:
        if not self._flights and not self._failed:
            time.sleep(wait_s)
            return []
        done, self._failed = self._failed, []
        if not self._flights:
            return done
        counts: dict[str, int] = {}
        for event in self.engine.step():
            counts[event.request] = counts.get(event.request, 0) + 1
        now = self.clock()
        for name, tokens in counts.items():
            flight = self._flights[name]
            flight.chunks.append((now - flight.sent, tokens))
        for name in [name for name, flight in self._flights.items() if flight.handle.done]:
            done.append(_answer(self._flights.pop(name), now))
        return done

    def prompt(self, job: Job) -> str | tuple[int, ...]:
        """What the engine gets; of a prompt that leaves no room for the answer, its end."""
        ids, room = prompt_ids(job, self.tokenizer), max(1, self.context - job.max_tokens - 1)
        self.cut += len(ids) > room
        return ids[-room:]


def prompt_ids(job: Job, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Ids as they are, text encoded, a conversation in the model's own template if it has one, with the tools of its request.

    Raises Failure without a tokenizer, PromptError where the template refuses the conversation."""
    turn, asked = job.item.turns[job.turn], job.item.asked
    if isinstance(turn, tuple):
        return turn
    if tokenizer is None:
        raise Failure("the target has no tokenizer and the workload is text; expected prompt_token_ids")
    if isinstance(turn, str) and not job.item.chat:
        return tuple(tokenizer.encode(turn))
    if tokenizer.has_chat_template:
        tools = asked.get("tools") if tokenizer.takes_tools and asked.get("tool_choice") != "none" else None
        try:
            return tuple(tokenizer.chat(job.messages, tools, told=asked.get("chat_template_kwargs")))
        except Exception as error:          # a template is a program of its own
            raise PromptError(f"the chat template refuses the conversation ({type(error).__name__}: {str(error)[:200]})") from None
    return tuple(tokenizer.encode("\n\n".join(message["content"] for message in job.messages)))


def _answer(flight: _Flight, now: float) -> Answer:
    done = flight.handle.completion()
    rounds = [event for event in done.trace if isinstance(event, RoundDone)]
    tally = Tally()
    tally.prefill()
    for event in rounds:
        fates = [node.fate for node in event.nodes]
        tally.round(len(fates), fates.count("accepted"), fates.count("rejected"), len(event.tokens))
    return Answer(flight.job, flight.sent, now, tuple(flight.chunks), done.text, done.token_ids, len(done.token_ids), done.prompt_tokens,
                  tally, tuple(len(event.tokens) for event in rounds), done.metrics["draft_bytes"], done.metrics["kv_tokens_lost"],
                  done.error)
