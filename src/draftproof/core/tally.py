"""The one definition of every acceptance metric: counts, added up round by round. Ratios exist only when read.

A round is one scoring pass of one sequence; prefill is not a round. `accepted` counts emitted draft tokens only, nodes behind
a stop are discarded, so completion_tokens = 1 + Σ (accepted + 1) over rounds, unless a stop cut the last one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from itertools import zip_longest
from typing import Any, Self

from ..types import Commit, Fate, Verdict


def fates(verdict: Verdict, commit: Commit, nodes: int) -> tuple[Fate, ...]:
    """What became of each of a draft's `nodes`.

    Behind a stop nothing counts as judged: accepted nodes that did not enter the text are discarded, and so are refusals where the
    text ended before the target's own token.
    """
    fate: list[Fate] = ["discarded"] * nodes
    for node in commit.kept:
        fate[node] = "accepted"
    if len(commit.tokens) > len(commit.kept):
        for node in verdict.rejected:
            fate[node] = "rejected"
    return tuple(fate)


def ratio(part: int, whole: int) -> float | None:
    """part / whole; None, not NaN, where nothing was counted."""
    return part / whole if whole else None


@dataclass(slots=True)
class Tally:
    """Counts of one request, of one class of prompts or of a whole run; `a + b` merges them.

    reached[i] and passed[i] count rounds whose walk judged, and accepted, a token of depth i + 1.
    """

    requests: int = 0                     # prefills, each of which emits one token
    prefill_passes: int = 0
    rounds: int = 0
    rounds_drafted: int = 0               # rounds that had a draft
    drafted: int = 0                      # nodes
    accepted: int = 0
    rejected: int = 0
    emitted: int = 0                      # by rounds
    emitted_drafted: int = 0              # by rounds that had a draft
    reached: list[int] = field(default_factory=list)
    passed: list[int] = field(default_factory=list)

    def prefill(self, passes: int = 1) -> None:
        """One request's prefill in `passes` target passes; it emits one token."""
        self.requests += 1
        self.prefill_passes += passes

    def round(self, drafted: int, accepted: int, rejected: int, emitted: int) -> None:
        """One round: nodes drafted, of which accepted (and emitted) and rejected, and tokens emitted, the target's own included.

        rejected > 0 says that the walk was refused at depth accepted + 1. A round that a stop cut emits no token of the
        target's own (emitted = accepted) or has refusals behind the stop (rejected = 0, see `fates`).
        """
        assert 0 <= accepted and 0 <= rejected and accepted + rejected <= drafted, "a node has one fate"
        assert accepted <= emitted <= accepted + 1, "a round emits what it accepted and at most one token more"
        self.rounds += 1
        self.drafted += drafted
        self.accepted += accepted
        self.rejected += rejected
        self.emitted += emitted
        if not drafted:
            return
        self.rounds_drafted += 1
        self.emitted_drafted += emitted
        judged = accepted + (rejected > 0)
        short = judged - len(self.reached)
        if short > 0:
            self.reached += [0] * short
            self.passed += [0] * short
        for depth in range(judged):
            self.reached[depth] += 1
        for depth in range(accepted):
            self.passed[depth] += 1

    @property
    def completion_tokens(self) -> int:
        return self.requests + self.emitted

    @property
    def target_passes(self) -> int:
        """Rounds and prefill passes; a pass shared by a batch counts once for each of its sequences."""
        return self.rounds + self.prefill_passes

    @property
    def passes_saved(self) -> int:
        """Tokens emitted, prefill's included, beyond one per target pass; a prefill in several chunks lowers it."""
        return self.completion_tokens - self.target_passes

    @property
    def acceptance_length(self) -> float | None:
        """Tokens emitted per round, rounds of depth 0 included."""
        return ratio(self.emitted, self.rounds)

    @property
    def acceptance_length_drafted(self) -> float | None:
        """Tokens emitted per round that had a draft (what vLLM calls the mean acceptance length)."""
        return ratio(self.emitted_drafted, self.rounds_drafted)

    @property
    def draft_utilisation(self) -> float | None:
        """Accepted per drafted node."""
        return ratio(self.accepted, self.drafted)

    @property
    def hazard(self) -> list[float]:
        """hazard[i] = P(the token of depth i + 1 accepted | the walk reached it), along the walked path of a tree."""
        return [passed / reached for passed, reached in zip(self.passed, self.reached, strict=True)]

    def __add__(self, other: Tally) -> Tally:
        merged = Tally()
        for name in (f.name for f in fields(self)):
            mine, theirs = getattr(self, name), getattr(other, name)
            both = [a + b for a, b in zip_longest(mine, theirs, fillvalue=0)] if isinstance(mine, list) else mine + theirs
            setattr(merged, name, both)
        return merged

    def as_dict(self) -> dict[str, Any]:
        """The counts, for JSON; `Tally.from_dict` reads them back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, counts: Mapping[str, Any]) -> Self:
        """From `as_dict`'s counts; keys of later versions are left alone."""
        tally = cls()
        for name in (f.name for f in fields(cls) if f.name in counts):
            value = counts[name]
            setattr(tally, name, value if isinstance(value, int) else list(value))
        return tally

    def as_metrics(self) -> dict[str, Any]:
        """The counting keys of `generate --json`'s metrics. Ratios of nothing are None."""
        names = ("rounds", "target_passes", "drafted", "accepted", "acceptance_length", "acceptance_length_drafted",
                 "draft_utilisation", "hazard", "passes_saved")
        return {name: getattr(self, name) for name in names}
