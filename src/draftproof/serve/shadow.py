"""Replays: answers that are written again with both arms while nobody asks for anything, and compared.

A replay under the candidate that differs proves nothing if one under control differs as well: then the target's texts depend on
more than their seed. So every answer is written twice more, once with each arm, in turning order; what counts is where the two
differ from a text of control's: the answer, or if the candidate gave it, one that control writes first. For if both arms' texts have
one law, each replay is as likely as the other to be the only one that differs from it; and a candidate that writes other texts, the
same ones or others every time, is the one that does. Against its own answer it would be control. Nothing of a text is kept but the
place of its first difference.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..engine.port import Completion
from ..trace.events import Event, RequestDone, RequestStarted, TraceStarted
from ..trace.sinks import Null, Sink
from ..types import Sampling
from .ab import CANDIDATE, CONTROL, TIMES, Outcome, Reservoir

REPLAY = "(replay)"         # their class, which no client can name
JOBS, SIZE = 64, 1 << 20    # answers that wait: how many, and how many characters and tokens in all
TRIES = 3                   # times that one may be interrupted

Prompt = str | tuple[int, ...]
Texts = tuple[tuple[int, ...], ...]     # of every sample


@dataclass(slots=True, eq=False)
class Job:
    """One answer to be written again. `sampling` has the seed it was written from."""

    prompt: Prompt
    sampling: Sampling
    prompt_class: str
    tenant: str
    texts: Texts | None                     # by control; None: it is to write them first
    lasting: bool                           # whether the text follows from the seed alone, whoever guessed
    order: tuple[str, str] = (CANDIDATE, CONTROL)
    tries: int = 0
    replayed: dict[str, tuple[Texts, bool, Outcome]] = field(default_factory=dict)     # by arm: texts, lasting, times

    @property
    def size(self) -> int:
        return len(self.prompt) + sum(map(len, self.texts or ()))

    @property
    def next(self) -> str | None:
        """The arm that is to write it."""
        return CONTROL if self.texts is None else next((arm for arm in self.order if arm not in self.replayed), None)


class Replays:
    """The answers that wait. Bounded: what does not fit is left out, and counted."""

    def __init__(self) -> None:
        self._jobs: deque[Job] = deque()
        self._size, self._taken = 0, 0
        self.counts = dict.fromkeys(("done", "skipped", "interrupted", "failed"), 0)

    @property
    def waiting(self) -> int:
        return len(self._jobs)

    def offer(self, job: Job) -> bool:
        if len(self._jobs) >= JOBS or self._size + job.size > SIZE:
            self.counts["skipped"] += 1
            return False
        self._jobs.append(job)
        self._size += job.size
        return True

    def take(self) -> Job | None:
        """The next one, its arms in turning order."""
        if not self._jobs:
            return None
        job = self._jobs.popleft()
        self._size -= job.size
        if not job.tries:
            self._taken += 1
        if self._taken % 2:
            job.order = (CONTROL, CANDIDATE)
        return job

    def interrupted(self, job: Job) -> None:
        """Somebody came while it ran: it is begun anew, a few times."""
        self.counts["interrupted"] += 1
        job.tries += 1
        job.replayed.clear()
        if job.tries < TRIES and len(self._jobs) < JOBS and self._size + job.size <= SIZE:
            self._jobs.appendleft(job)
            self._size += job.size

    def clear(self) -> None:
        self._jobs.clear()
        self._size = 0


@dataclass(slots=True)
class Matches:
    """What comparing has shown, in one class."""

    compared: int = 0
    identical: int = 0                    # under both arms
    gained: int = 0                       # different under the candidate only
    lost: int = 0                         # under control only
    both: int = 0
    incomparable: int = 0                 # sampled by a rule that keeps the distribution, not the text
    first: int | None = None              # the earliest place at which a candidate's text differed, in tokens after the prompt
    ratios: dict[str, Reservoir] = field(default_factory=lambda: {name: Reservoir() for name in TIMES})

    def add(self, job: Job) -> None:
        """A job that both arms have written."""
        (mine, my_lasting, my_times), (others, other_lasting, other_times) = job.replayed[CANDIDATE], job.replayed[CONTROL]
        for name, sample in self.ratios.items():
            above, below = getattr(my_times, name), getattr(other_times, name)
            if above is not None and below:
                sample.add(above / below)
        if not (job.lasting and my_lasting and other_lasting):
            self.incomparable += 1
            return
        assert job.texts is not None, "written before the replays"
        places = divergence(job.texts, mine), divergence(job.texts, others)
        self.compared += 1
        self.identical += places == (None, None)
        self.both += None not in places
        self.gained += places[0] is not None and places[1] is None
        self.lost += places[0] is None and places[1] is not None
        if places[0] is not None:
            self.first = places[0] if self.first is None else min(self.first, places[0])


def divergence(texts: Texts, others: Texts) -> int | None:
    """The earliest place at which a sample differs from its twin, its end included; None if all are the same."""
    assert len(texts) == len(others), "a replay has as many samples"
    places = [next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))
              for one, two in zip(texts, others, strict=True) if one != two]
    return min(places, default=None)


def lasting(done: Sequence[Completion], greedy: bool) -> bool:
    """Whether these texts are meant to follow from their seed alone. Rules that keep the distribution do not promise it where drafts
    were sampled; a lossy rule is taken at no better word than `match`, so that what it does to texts is seen."""
    return greedy or not any(one.speculation["rule"] in ("ratio", "block") and one.metrics["drafted"] for one in done)


class Unreplayed(Null):
    """Passes on what was served to others, and none of the replays."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._hidden: set[str] = set()

    def write(self, event: Event) -> None:
        if isinstance(event, TraceStarted):
            self._hidden.clear()                            # another engine: nothing of the old one lives
        elif isinstance(event, RequestStarted) and event.prompt_class == REPLAY:
            self._hidden.add(event.request)
            return
        elif event.request in self._hidden:
            if isinstance(event, RequestDone):
                self._hidden.discard(event.request)
            return
        self._sink.write(event)
