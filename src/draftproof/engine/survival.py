"""How far guesses survive: per drafter, class of prompts, sequence and position, counted from finished rounds."""

from __future__ import annotations

from bisect import bisect_right
from collections import abc

from .sequence import Sequence

Prior = tuple[list[float], float, list[float]]       # hazards, how often there is a draft, and the shares of drafts by length

# Weights are what a prior counts for, in observations.
FIRST, WEIGHT = 0.6, 2.0        # prior of a drafter's first guess, before anything was seen
CLASS_WEIGHT = 8.0              # of the drafter's hazards as the prior of a class of prompts
OWN_WEIGHT = 4.0                # of the class's hazards as the prior of a sequence
AGES = 16, 64, 256              # lengths of an answer at which its next age begins: a drafter that copies has more to copy from
AGE_WEIGHT = 8.0                # of the prior that ages do not differ, in guesses that stood and in guesses that did not
EVEN = 0.1                      # of a guess that stood and one that did not, so that a class that knows nothing expects both
LONG, SHORT, OWN, AGE = 0.995, 0.8, 0.95, 0.999      # decay of the counts, per further observation
IDLE = 0.99                     # decay of a sequence's own counts, per round without a draft
CHANGE = 3.5                    # standard deviations by which the last guesses must differ to replace the long memory
LEAST = 0.02                    # a smaller chance counts as none: nothing deeper is looked at
KINDS = 64                      # kinds of text that are told apart at most


class Hazards:
    """P(token k stands | there was a draft, k tokens were granted, and the walk reached it) for every k, as decayed counts. A token
    that a draft lacks counts as refused. Beside it, how often there is a draft at all."""

    def __init__(self, depth: int, decay: float) -> None:
        self._decay = decay
        self.passed, self.reached = [0.0] * depth, [0.0] * depth
        self.drafts, self.asked = 0.0, 0.0

    def learn(self, granted: int, drafted: int, accepted: int) -> None:
        decay = self._decay
        self.asked = self.asked * decay + 1
        self.drafts = self.drafts * decay + (drafted > 0)
        if drafted:
            passed, reached = self.passed, self.reached
            for k in range(min(granted, accepted + 1, len(passed))):
                reached[k] = reached[k] * decay + 1
                passed[k] = passed[k] * decay + (k < accepted)

    def means(self, prior: abc.Sequence[float] | None = None, weight: float = WEIGHT, left: float = 1.0) -> abc.Iterator[float]:
        """Posterior means under a prior per position (without one: the position before). left: of the counts, by their age."""
        before = FIRST
        for k, (passed, reached) in enumerate(zip(self.passed, self.reached, strict=True)):
            before = (passed * left + weight * (before if prior is None else prior[k])) / (reached * left + weight)
            yield before

    def offers(self, prior: float = 1.0, weight: float = 1.0, left: float = 1.0) -> float:
        """How often there is a draft."""
        return (self.drafts * left + weight * prior) / (self.asked * left + weight)

    def add(self, other: Hazards) -> None:
        """Take the other's counts in."""
        self.passed = [a + b for a, b in zip(self.passed, other.passed, strict=True)]
        self.reached = [a + b for a, b in zip(self.reached, other.reached, strict=True)]
        self.drafts, self.asked = self.drafts + other.drafts, self.asked + other.asked

    def believe(self, other: Hazards, k: int) -> None:
        """Forget position k, and take the other's counts for it."""
        self.passed[k], self.reached[k] = other.passed[k], other.reached[k]


class Age:
    """How answers of one age differ from all of their class: what became of their guesses, against what the class's hazards expected at
    that time. A change that meets all ages is thus not held against one. Index `depth` is for whether there is a draft at all."""

    def __init__(self, depth: int) -> None:
        self._stood, self._failed, self._to_stand, self._to_fail = ([0.0] * (depth + 1) for _ in range(4))

    def learn(self, k: int, stood: bool, chance: float) -> None:
        """Guess k stood or not; chance: what the class expected."""
        for counts, more in ((self._stood, stood), (self._failed, not stood), (self._to_stand, chance), (self._to_fail, 1 - chance)):
            counts[k] = counts[k] * AGE + more

    def apply(self, k: int, chance: float) -> float:
        """The class's chance, corrected for this age: its odds times the odds found over the odds expected."""
        good = (self._stood[k] + AGE_WEIGHT) / (self._to_stand[k] + AGE_WEIGHT) * chance
        bad = (self._failed[k] + AGE_WEIGHT) / (self._to_fail[k] + AGE_WEIGHT) * (1 - chance)
        return good / (good + bad)


class Kind:
    """What is known of one kind of text: hazards over a long time, unless recent ones contradict them; how they differ by the answer's
    age; and how long drafts are, because only tokens that are drafted take rows."""

    def __init__(self, depth: int) -> None:
        self.long, self.short = Hazards(depth, LONG), Hazards(depth, SHORT)
        self.ages = [Age(depth) for _ in range(len(AGES) + 1)]
        self._had, self._granted = [0.0] * depth, [0.0] * depth

    def learn(self, written: int, granted: int, drafted: int, accepted: int) -> None:
        """written: tokens of the answer in front of the draft."""
        age, known, depth = self.ages[bisect_right(AGES, written)], self.long, len(self._had)
        age.learn(depth, drafted > 0, (known.drafts + EVEN) / (known.asked + 2 * EVEN))
        for k in range(min(granted, accepted + 1, depth) if drafted else 0):
            age.learn(k, k < accepted, (known.passed[k] + EVEN) / (known.reached[k] + 2 * EVEN))
        self.long.learn(granted, drafted, accepted)
        self.short.learn(granted, drafted, accepted)
        if not drafted:
            return
        had, asked, long, short = self._had, self._granted, self.long.reached, self.short.reached
        for k in range(min(granted, len(had))):
            asked[k] = asked[k] * LONG + 1
            had[k] = had[k] * LONG + (k < drafted)
        for k in range(min(granted, accepted + 1, len(had))):
            count = short[k]
            if long[k] > 2 * count:
                mean = (self.long.passed[k] + 0.5) / (long[k] + 1)
                if (self.short.passed[k] / count - mean) ** 2 > CHANGE**2 * mean * (1 - mean) / count:
                    self.long.believe(self.short, k)

    def lengths(self) -> list[float]:
        """The share of drafts with a k-th token, never rising; where nothing was granted yet, that of the position before."""
        before, found = 1.0, []
        for had, granted in zip(self._had, self._granted, strict=True):
            before = min(before, (had + before) / (granted + 1))
            found.append(before)
        return found


class Survival:
    """How far one drafter's guesses survive: over all prompts, in each class of them, by the answer's age, and in each sequence, each level
    the prior of the next."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._kinds: dict[object, Kind] = {}
        self._own: dict[str, tuple[Hazards, int]] = {}          # sequence → its hazards, and the round they are from
        self._priors: dict[tuple[object, int], Prior] = {}      # of kinds and ages that were asked about since the last thing learnt

    @property
    def common(self) -> Hazards:
        """Over all texts: the sum of what is known of the kinds."""
        found = Hazards(self._depth, LONG)
        for kind in self._kinds.values():
            found.add(kind.long)
        return found

    def kind(self, seq: Sequence) -> object:
        """What sequences are told apart by: the class of their prompt, and whether they are sampled. Beyond KINDS, classes share one."""
        kind = seq.prompt_class, seq.sampling.greedy
        return kind if kind in self._kinds or len(self._kinds) < KINDS else (None, seq.sampling.greedy)

    def learn(self, seq: Sequence, length: int, at: int, granted: int, drafted: int, accepted: int) -> None:
        """What became of a draft behind the first `length` tokens of the text, in round `at`."""
        kind, own = self.kind(seq), self._own.get(seq.id)
        if kind not in self._kinds:
            self._kinds[kind] = Kind(self._depth)
        hazards = Hazards(self._depth, OWN) if own is None else own[0]
        self._kinds[kind].learn(length - len(seq.prompt), granted, drafted, accepted)
        hazards.learn(granted, drafted, accepted)
        self._own[seq.id] = hazards, at
        self._priors.clear()

    def of(self, batch: abc.Sequence[Sequence], at: int, rooms: abc.Sequence[int]) -> tuple[list[list[float]], list[list[float]]]:
        """Per sequence and k = 1, 2, … up to its room: P(the first k tokens stand), and how often there is a k-th token."""
        chances, shares = [], []
        for seq, room in zip(batch, rooms, strict=True):
            prior, offers, lengths = self._prior(seq)
            hazards: abc.Iterable[float] = prior
            own = self._own.get(seq.id)
            if own is not None:
                left = IDLE ** (at - own[1])
                hazards, offers = own[0].means(prior, OWN_WEIGHT, left), own[0].offers(offers, OWN_WEIGHT, left)
            found, chance = [], offers
            for _, hazard in zip(range(room), hazards, strict=False):
                chance *= hazard
                if chance < LEAST * offers:
                    break
                found.append(chance)
            chances.append(found)
            shares.append([offers * share for share in lengths[:len(found)]])
        return chances, shares

    def first(self, seq: Sequence) -> float:
        """P(the first guess stands) in texts of this kind, where there is one."""
        return self._prior(seq)[0][0]

    def _prior(self, seq: Sequence) -> Prior:
        """What is expected of a sequence of this kind and age before its own guesses are counted."""
        kind, age = self.kind(seq), bisect_right(AGES, len(seq.tokens) - len(seq.prompt))
        found = self._priors.get((kind, age))
        if found is None:
            common, counts = self.common, self._kinds.get(kind)
            means = list(common.means())
            if counts is None:
                lengths = next(iter(self._kinds.values())).lengths() if self._kinds else [1.0] * self._depth
                found = means, common.offers(), lengths
            else:
                long, aged = counts.long, counts.ages[age]
                hazards = [aged.apply(k, mean) for k, mean in enumerate(long.means(means, CLASS_WEIGHT))]
                found = hazards, aged.apply(self._depth, long.offers(common.offers(), CLASS_WEIGHT)), counts.lengths()
            self._priors[kind, age] = found
        return found

    def forget(self, seq: Sequence) -> None:
        self._own.pop(seq.id, None)
