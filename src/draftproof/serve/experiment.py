"""Between the server and the pure parts of an A/B comparison: clocks, threads, tickets, and who hears of what.

Requests come in from the event loop, their ends and the replays from the worker's thread, looks from anywhere: one lock. Without a
configured experiment every request is of one arm, `served`, and only the books and the watch over acceptance are kept.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from threading import Lock
from time import monotonic
from typing import Any

from ..config import AbConfig
from ..core.tally import Tally
from ..drafters import REMEMBER, parse_spec
from ..engine.port import Completion
from ..trace.events import UNCLASSED
from ..trace.report import requests
from .ab import ALL, CANDIDATE, CONTROL, SERVED, Arm, Book, Flight, Flights, Outcome, arms_of, place
from .drift import Drift
from .refusal import Refusal, of_error
from .rollout import Rollout, Window, advance
from .shadow import REPLAY, Job, Matches, Replays, lasting
from .ticket import Ticket
from .translate import Order, Served
from .versions import drafter_version

log = logging.getLogger("draftproof.serve")

OTHER = "other"             # where classes beyond the limit are counted
OF_AN_ARM = ("speculation ", "drafter=", "depth=", "rule=")     # what an error begins with that is about one of its options
TENTH = 0.1
GOLDEN = 0.6180339887498949  # its multiples fill [0, 1) evenly, so that every stretch of answers has its share


@dataclass(slots=True, eq=False)
class Followed:
    """One request between submission and end: a ticket for each of its prompts."""

    tickets: Sequence[Ticket]
    arm: Arm
    epoch: int                              # between two changes: what spans one says nothing of either side
    began: float
    first: float | None = None
    flight: Flight | None = None            # of a replay, beside which nothing runs, there is none
    beside: tuple[float, float] | None = None
    over: bool = False

    @property
    def done(self) -> list[Completion]:
        return [one for ticket in self.tickets for one in ticket.completions.values()]

    @property
    def error(self) -> BaseException | None:
        """What ended it. Whose client left, or leaves because of it, ends with that."""
        return min((ticket.error for ticket in self.tickets if ticket.error is not None), key=left, default=None)

    @property
    def mistaken(self) -> bool:
        """Whether what ended it is what the client asked for, which no arm could write."""
        ended = [ticket for ticket in self.tickets if ticket.error is not None and not left(ticket.error)]
        return bool(ended) and all(refused(ticket) for ticket in ended)


class Experiment:
    """What is compared, and what has come out so far. `clock` is monotonic, in seconds."""

    def __init__(self, config: AbConfig | None, served: Served, classes: int, deadline_s: float,
                 clock: Callable[[], float] = monotonic) -> None:
        self.config, self.served, self._most, self._deadline_s, self._clock = config, served, classes, deadline_s, clock
        arms = [Arm(SERVED)] if config is None else arms_of(config)
        self.arms = {arm.name: arm for arm in arms}
        self.name = "" if config is None else config.experiment or config.arms
        self.remembers = any(map(remembers, arms))          # then a replay finds its own answer, and its speed says nothing
        self.versions = {**served.versions, **{f"drafter of {arm.name}": drafter_version(arm.drafter) for arm in arms}}
        self._lock = Lock()
        self.history: deque[dict[str, Any]] = deque(maxlen=100)
        self.left_out: Counter[str] = Counter()
        self.returns = 0
        self._flights = Flights()
        self._epoch = 0
        self._own = served.drafter                           # in the engine, which a switch may exchange for another
        self._began = clock()
        self._begin()

    def _begin(self) -> None:
        self.default = Arm(SERVED)                           # of everybody, while nothing is compared
        self.rollout = Rollout.of(self.config, self._clock())
        self.books = {"served": Book(), "replayed": Book()}
        self.matches: dict[str, Matches] = {}
        self.drifts: dict[tuple[str, str], Drift] = {}
        self.replays = Replays()
        self._job: Job | None = None                         # the one that is being replayed
        self._answers = 0
        self._new_window()

    def _new_window(self, looks: Counter[str] | None = None) -> None:
        """looks: those that were had, if the stage is still the same."""
        self._epoch += 1
        self._broken: set[str] = set()                       # arms of which it was said
        self._window = None if self.config is None else Window(self.config, self._most + 1, looks)
        self._differed = self._gained_lost()

    # Requests

    def enter(self, order: Order, tenant: str) -> tuple[Order, Arm | None]:
        """The order as its arm speculates, and that arm; None if it takes no part."""
        with self._lock:
            if order.speculation is not None:
                self.left_out["they said their own speculation"] += 1
                return order, None
            wish, live = self.default.wish, self.config is not None and self.rollout.live
            if not live and wish is None:
                return order, self.default
            if order.sampling.prediction:                    # a drafter that does not read it would refuse the request
                self.left_out["they predicted their output"] += 1
                return order, None
            if not live:
                return replace(order, speculation=wish), self.default
            share = self.rollout.share
        key = ("user", order.user) if order.user else ("text", order.prompts, order.sampling.seed)
        arm = self.arms[CANDIDATE if place(self.name, tenant, *key) < share else CONTROL]
        return replace(order, speculation=arm.wish), arm

    def follow(self, tickets: Sequence[Ticket], arm: Arm) -> None:
        """Hear of a request, whose tickets were just submitted, until all of them have ended. Prompts that came together are one
        request in every book: they share their moment and their user, and are not independent."""
        with self._lock:
            followed = Followed(tickets, arm, self._epoch, self._clock())
            followed.flight = self._flights.begin(arm.name, sum(ticket.samples for ticket in tickets), followed.began)
        self._listen(followed, self._served)()              # it may have begun, or ended, already

    def _listen(self, followed: Followed, ended: Callable[[Followed], None]) -> Callable[[], None]:
        """Look at its tickets before their reader does, whenever there is news. Returns what looks."""
        def look() -> None:
            try:
                with self._lock:
                    if followed.first is None and any(any(ticket.told) for ticket in followed.tickets):
                        followed.first = self._clock()
                    if not followed.over and all(ticket.done for ticket in followed.tickets):
                        followed.over = True
                        if followed.flight is not None:
                            followed.beside = self._flights.end(followed.flight, self._clock())
                        ended(followed)
            except Exception:                                # a mistake in the books is no reason to open another engine
                log.exception("a request was not counted")

        for ticket in followed.tickets:
            ticket.news = both(look, ticket.news)
        return look

    def _served(self, followed: Followed) -> None:
        first, arm, error, done = followed.tickets[0], followed.arm, followed.error, followed.done
        if error is not None and left(error):
            self.left_out["their client left, or the server stopped"] += 1
            return
        if followed.epoch != self._epoch:
            self.left_out["they began before a change"] += 1
            return
        if followed.mistaken:
            self.left_out["they asked for what cannot be"] += 1
            return
        if error is None and (wrong := idle(arm, done)):
            self.left_out["the arm did not guess"] += 1
            return self._silent(arm, *wrong)
        prompt_class, outcome = self._class(first.prompt_class or ""), outcome_of(followed, self._clock())
        self.books["served"].add(arm.name, prompt_class, outcome)
        self._watch(arm.name, prompt_class, outcome.first_guess)
        if self._window is not None and self.rollout.staged:
            self._move(self._window.add(arm.name, prompt_class, outcome))
        if error is None:
            self._offer(first, arm, prompt_class)            # the others may well be the same text once more

    def _silent(self, arm: Arm, state: str, reason: str) -> None:
        """An arm did not guess. If its drafter broke, only the candidate's speaks against the candidate."""
        why = f"drafter is {state}: {reason}"
        if state == "out of service" and arm.name == CANDIDATE:
            self._move(f"its {why}")
        elif state == "out of service" and arm.name not in self._broken:
            self._broken.add(arm.name)
            self._note(f"{arm.name}'s {why}")

    def _move(self, breach: str | None) -> None:
        """What the roll-out makes of it."""
        before, now = self.rollout, self._clock()
        if self.config is None or self._window is None:
            return
        self.rollout = advance(before, now, self._window.enough, breach, self.config.wait_s)
        if self.rollout == before:
            return
        self._note(f"{before.state} → {self.rollout.state}, share {self.rollout.share:.3g}: {self.rollout.reason}")
        self._new_window()
        if self.rollout.state == "returned":
            self.returns += 1
            self._no_replays()

    def _note(self, event: str) -> None:
        self.history.append({"at_s": self._clock() - self._began, "event": event})
        log.warning("experiment %s: %s", self.name, event)

    def _watch(self, arm: str, prompt_class: str, value: float | None) -> None:
        if value is None:
            return
        alarm = self.drifts.setdefault((arm, prompt_class), Drift()).add(value)
        if alarm is not None:
            self._note(f"acceptance of {arm} in class {prompt_class or UNCLASSED} {alarm.direction} from {alarm.before:.3f} to "
                       f"{alarm.since:.3f} over the last {alarm.length} requests")

    def _class(self, name: str) -> str:
        known = {prompt_class for _, prompt_class in self.books["served"].cells} - {ALL}
        return name if name != ALL and (name in known or len(known) < self._most) else OTHER

    # Replays

    def _offer(self, ticket: Ticket, arm: Arm, prompt_class: str) -> None:
        if self.config is None or self.rollout.state not in ("comparing", "shadow", "running", "holding"):
            return
        share = self.config.replay if self.config.replay is not None else 1.0 if self.rollout.state == "shadow" else TENTH
        self._answers += 1
        if self._answers * GOLDEN % 1 < share:
            self.replays.offer(Job(ticket.prompt, ticket.sampling, prompt_class, ticket.tenant,
                                   texts_of(ticket) if arm.name == CONTROL else None,
                                   lasting([*ticket.completions.values()], ticket.sampling.greedy)))

    def spare(self) -> Ticket | None:
        """A ticket for a moment in which nobody asks for anything. In the worker's thread."""
        with self._lock:
            job = self._job = self._job or self.replays.take()
            if job is None or job.next is None:
                return None
            arm = self.arms[job.next]
            ticket = Ticket(job.prompt, job.sampling, arm.wish, REPLAY, job.tenant, self._clock() + self._deadline_s, spare=True)
            self._listen(Followed([ticket], arm, self._epoch, self._clock()), lambda followed: self._replayed(job, ticket, followed))
        return ticket

    def _replayed(self, job: Job, ticket: Ticket, followed: Followed) -> None:
        if job is not self._job:
            return                                           # the experiment was begun anew meanwhile
        arm, error, done = followed.arm, followed.error, followed.done
        if isinstance(error, Refusal) and error.status == 499:
            self._job = None
            return self.replays.interrupted(job)
        outcome = outcome_of(followed, self._clock())
        if self.remembers:
            outcome = Outcome(failed=outcome.failed)
        if error is not None or idle(arm, done):
            self._job = None
            self.replays.counts["failed"] += 1
            if error is not None:
                self.books["replayed"].add(arm.name, job.prompt_class, outcome)
            return
        if job.texts is None:
            job.texts, job.lasting = texts_of(ticket), lasting(done, job.sampling.greedy)
            return
        self.books["replayed"].add(arm.name, job.prompt_class, outcome)
        job.replayed[arm.name] = texts_of(ticket), lasting(done, job.sampling.greedy), outcome
        if job.next is None:
            self._job = None
            self.replays.counts["done"] += 1
            for name in (job.prompt_class, ALL):
                self.matches.setdefault(name, Matches()).add(job)
            if self._window is not None and self.rollout.staged:
                gained, lost = (now - then for now, then in zip(self._gained_lost(), self._differed, strict=True))
                self._move(self._window.identity(gained, lost, self.served.exact))

    def _no_replays(self) -> None:
        self.replays.clear()
        self._job = None

    def _gained_lost(self) -> tuple[int, int]:
        found = self.matches.get(ALL)
        return (0, 0) if found is None else (found.gained, found.lost)

    # The operator

    @property
    def fixed(self) -> frozenset[str]:
        """Drafters that may not be taken away while requests are sent to them."""
        taking_part = self.config is not None and self.rollout.live
        return frozenset(arm.drafter for arm in self.arms.values() if arm.drafter and arm.guesses) if taking_part else frozenset()

    def disturbed(self, why: str, drafter: str | None = None) -> None:
        """Something else changed: a stage begins anew, so that no comparison spans it. drafter: what became the server's own."""
        with self._lock:
            if drafter is not None:
                self._own, self.default = drafter, Arm(SERVED)
            if self.rollout.live and self._window is not None:
                self._note(why)
                self.rollout = replace(self.rollout, since_s=self._clock())
                self._new_window(self._window.looks)

    def end(self) -> None:
        """Nobody takes part any more; what was found stays. A candidate that was turned back does not come again, though it may be the
        server's own drafter: everybody keeps control, until a drafter is switched to."""
        with self._lock:
            if not self.rollout.live:
                return
            said = "ended by the operator"
            if self.rollout.state == "returned":
                control = self.arms[CONTROL]
                self.default = replace(control, name=SERVED)
                said += f"; the candidate had been turned back, so everybody keeps control ({control.text}) until a drafter is switched to"
            self._epoch += 1
            self.rollout = replace(self.rollout, state="ended", reason=said, since_s=self._clock())
            self._note(said)
            self._no_replays()

    def restart(self) -> None:
        """From the first stage, with empty books. Raises Refusal if a drafter of an arm was exchanged: those beside it stay."""
        with self._lock:
            mine = self.served.drafter
            if self._own != mine and any(arm.drafter == mine for arm in self.arms.values() if arm.guesses):
                raise Refusal(409, f"drafter {mine!r} is not loaded any more, {self._own!r} is in its place; switch back to it "
                              "(PUT /draftproof/speculation), then begin anew", param="action")
            self._begin()
            self._note("begun anew by the operator")

    def look(self, read: Callable[[Experiment], Any]) -> Any:
        """`read(self)` while nothing changes; it must be quick."""
        with self._lock:
            return read(self)

    @property
    def seconds(self) -> float:
        """Since it began, and in its present state."""
        return self._clock() - self._began

    @property
    def stage(self) -> Book:
        """The requests of this stage."""
        return Book() if self._window is None else self._window.book


def both(one: Callable[[], None], other: Callable[[], None]) -> Callable[[], None]:
    def each() -> None:
        one()
        other()

    return each


def left(error: BaseException) -> bool:
    """Whether it says nothing of an arm: the client left, or the server stopped."""
    return isinstance(error, Refusal) and (error.status == 499 or error.code == "stopping")


def refused(ticket: Ticket) -> bool:
    """Whether the engine did not take it for what its client asked, and not for how its arm speculates."""
    error = ticket.error
    return error is not None and not ticket.handles and of_error(error).status == 400 and not str(error).startswith(OF_AN_ARM)


def idle(arm: Arm, done: Sequence[Completion]) -> tuple[str, str] | None:
    """State and reason if an arm that should guess did not in one of its samples; the worst of them."""
    wrong = [(one.speculation["state"], one.speculation["reason"]) for one in done if arm.guesses and one.speculation["state"] != "on"]
    return min(wrong, key=lambda one: one[0] != "out of service", default=None)


def remembers(arm: Arm) -> bool:
    """Whether its drafter learns from past outputs."""
    parsed = parse_spec(arm.drafter or "none")
    return any(part.name in REMEMBER for part in parsed.parts or (parsed,))


def texts_of(ticket: Ticket) -> tuple[tuple[int, ...], ...]:
    return tuple(ticket.completions[sample].token_ids for sample in range(ticket.samples))


def outcome_of(followed: Followed, now: float) -> Outcome:
    """Times as a client sees them, but for the network: the queue is in them."""
    if followed.error is not None:
        return Outcome(failed=True, beside=followed.beside)
    done = followed.done
    tally = sum((report.tally for one in done for report in requests(one.trace).values()), Tally())
    speeds = [one.metrics["tpot_s"] for one in done if one.metrics["tpot_s"] is not None]
    return Outcome(
        ttft_s=None if followed.first is None else followed.first - followed.began, tpot_s=fmean(speeds) if speeds else None,
        e2e_s=now - followed.began, tally=tally, draft_bytes=max((one.metrics["draft_bytes"] for one in done), default=0),
        kv_tokens_lost=max((one.metrics["kv_tokens_lost"] for one in done), default=0), beside=followed.beside)
