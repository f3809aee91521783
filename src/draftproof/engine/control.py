"""Automatic depth: how far to draft this round, and with which part of a chain of drafters. Only finished rounds decide, never the values
of the tokens about to be offered: a depth that looked at them would bias the rules `ratio` and `block`.

`AutoDepth` makes a plan: the depths with the most expected tokens per second over the whole batch, from how often guesses survive
(`survival.py`) and what passes and drafts cost (`costs.py`). What is not in use is tried now and then, as its worth cannot be known
otherwise. Trials are paid out of a credit, which grows by a share of the time and is kept per drafter and load, so that few texts do not
pay for what many have earned. Whatever the drafter does, all trials together cost no more than that share; trials near the break-even are
cheap and therefore frequent.
"""

from __future__ import annotations

from collections import abc
from dataclasses import replace
from math import exp, inf, isqrt
from time import perf_counter

from ..core.budget import best_batch, between
from ..trace.events import Times
from ..types import Budget, Draft, Verdict
from .costs import LINGER, PassCosts
from .plans import Arm, Choice, Outcome, Plan, Scene, Shown, Trial, reaching
from .sequence import Sequence
from .survival import Hazards, Survival

SHARE = 0.01            # of the time, for trials
MARGIN = 0.02           # by which a draft must be expected to win before guessing begins, or another drafter takes over
REPLAN, REST = 4, 32    # rounds between two plans for the same sequences, and at most while nothing is drafted and so nothing learnt
FAR = 0.25              # of a plain pass: where trials are expected to lose more, no guess pays before one shows it, however texts grow
CALM = 4                # times REPLAN, at most, where plans keep to one drafter, or to none: depths that waver are worth about the same
THRIFT = 0.015          # of the time, about, that plans and what they learn from may take where a text is known a little
TRIALS = 3              # rounds of a drafter before it may be chosen
TRIAL_DEPTH, FIRST_DEPTH = 2, 4
DEEPER = 0.01           # by which a tree with a level more must be expected to win
FEW = 4                 # a plan goes on where at most one text in so many is new
PLAIN_AFTER = 64        # rounds with drafts after which a plain pass is timed again, for each that this takes
AGAIN = Choice(0, "auto: timing a plain pass again")
SIZES = 50              # trees whose sizes are remembered
HORIZON = 64            # tokens over which reading a text for the first time must pay off
OVERDRAFT = 1.0, 8.0    # plain passes that a trial is charged at most, one of the first and a later one: neither what a first call
                        # costs nor a pause of the machine is what drafting costs


class AutoDepth:
    """The depth, and the part of a chain, with the most expected tokens per second. One object per drafter.

    parts: names of a chain's parts, if it is one. prices: whether the drafter ends a chain where a guess is not worth its row. passes: what
    the target's passes cost, shared by all that plan for it, and told by whoever runs them. least: of an acceptance of first guesses
    below it nothing is drafted but trials.
    """

    def __init__(self, max_depth: int, tree: int | None = None, *, parts: abc.Sequence[str] = (), prices: bool = False,
                 passes: PassCosts | None = None, least: float = 0.0) -> None:
        self.max_depth, self.tree, self.least, self.priced = max_depth, tree, least, prices or tree is not None
        self.passes = PassCosts() if passes is None else passes
        self.arms = [Arm(name, Survival(max_depth)) for name in (None, *dict.fromkeys(parts))]
        self.rounds = 0
        self._plan: Plan | None = None
        self._last: Scene | None = None                          # for which it was made
        self._planned: tuple[str, ...] = ()                      # ids of the texts that it holds for; none: plan again at once
        self._choices: list[Choice] = []                         # what it grants each of them
        self._due = 0                                            # from this round on, texts that came are a reason for another plan
        self._next = 0                                           # from this round on, there is another plan for the same texts, too
        self._same = 0                                           # plans in a row that changed neither the arm nor whether it drafts
        self._trial: Trial | None = None                         # of the round that runs
        self._waiting: list[Shown] = []                          # rounds that were seen, but not taken in yet: the next plan does that
        self._seen = 0                                           # the last round that was taken in
        self._own = self._spent = 0.0                            # seconds of planning and learning: of a usual plan, and since the last one
        self._looks = inf                                        # of the rounds before the next plan, so many are seen
        self._plain_credit = 0.0                                 # seconds that timing plain passes may lose
        self._more = self._timed = 0                             # rounds for which timing plain passes goes on, and when it began
        self._overhead = 0.0                                     # seconds of a round's drafting step where nothing is drafted

    @property
    def tried(self) -> bool:
        """Whether every arm has had its first trials. Until then nothing else is drafted, so that each arm's cost is measured alone."""
        return all(arm.costs.seen >= TRIALS for arm in self.arms)

    @property
    def holds(self) -> bool:
        """See `Control`."""
        return self._trial is None and self.rounds < self._next and bool(self._planned)

    @property
    def stays(self) -> bool:
        """See `Control`: whether the round after this one is known to be plain if this one is, and the batch stays the same."""
        return self._more > 0 or self._trial is None and self.rounds + 1 < self._next and bool(self._planned)

    @property
    def rests(self) -> bool:
        """Whether nothing is learnt from the round that runs: a plan that holds for long is judged by its last rounds."""
        return self._trial is None and self._next - self.rounds > self._looks

    @property
    def hazards(self) -> Hazards:
        """Of the drafter as it is, over all texts."""
        self._settle()
        return self.arms[0].survival.common

    # The protocol.

    def depths(self, batch: abc.Sequence[Sequence], rooms: abc.Sequence[int], whole: abc.Sequence[Sequence]) -> list[Choice]:
        if self._more:
            self._more -= 1
            return [AGAIN] * len(batch)
        self._trial = None
        if not self.passes.known:
            return [Choice(0, "auto: timing a plain pass")] * len(batch)
        ids = tuple([seq.id for seq in batch])
        if self.rounds < self._next and self._planned and (ids == self._planned or self._carried(batch, rooms, ids)):
            return self._choices
        start = perf_counter()
        self._settle()
        scene, before = self._scene(batch, rooms, whole), self._plan
        self._plan = self._best(scene, before.arm if before else None)
        calm = before is not None and (before.arm, before.drafts) == (self._plan.arm, self._plan.drafts)
        self._same = min(self._same + 1, CALM) if calm and ids == self._planned else 1
        self._last, self._planned, self._choices = scene, ids, self._told(scene, self._plan)
        self._next = self.rounds + (self._same * REPLAN + len(batch) // 4 if self.tried else 1)
        choices = self._tried(scene, self._plan) or self._choices
        self._spare(self._plan, perf_counter() - start, calm)
        return choices

    def learn(self, batch: abc.Sequence[Sequence], budgets: abc.Sequence[Budget], drafts: abc.Sequence[Draft],
              verdicts: abc.Sequence[Verdict], times: Times | None) -> None:
        resting, self.rounds = self.rests, self.rounds + 1
        if resting:
            return
        asked = [Outcome.of(seq, budget, draft, verdict)
                 for seq, budget, draft, verdict in zip(batch, budgets, drafts, verdicts, strict=True) if budget.depth]
        self._waiting.append(Shown(self.rounds, asked, None if times is None else times.draft_s, self.passes.moment))
        if self._trial is not None:
            self._charge(self._trial, batch, budgets, verdicts, self._settle())
        elif self.rounds >= self._next:
            start = perf_counter()
            self._settle()                                       # before the next round's clock runs
            self._spent += perf_counter() - start

    def forget(self, seq: Sequence) -> None:
        self._settle()
        for arm in self.arms:
            arm.survival.forget(seq)
            arm.read.pop(seq.id, None)

    # Plans.

    def _carried(self, batch: abc.Sequence[Sequence], rooms: abc.Sequence[int], ids: tuple[str, ...]) -> bool:
        """Whether the plan goes on for what is left of its texts, and for a few that came, which get every guess that is at least as likely
        to stand as the least likely one granted. Not with trees, whose prices depend on all texts."""
        told, plan, scene = dict(zip(self._planned, self._choices, strict=True)), self._plan, self._last
        new = [i for i, name in enumerate(ids) if name not in told]
        if self.tree or new and self.rounds >= self._due or FEW * len(new) > len(ids) or plan is None or scene is None:
            return False
        if new:
            came, depths, chances = [batch[i] for i in new], [0] * len(new), [list[float]() for _ in new]
            if plan.arm is not None:
                chances, _ = plan.arm.chances(came, self.rounds, [rooms[i] for i in new], self.least)
                for j, (seq, own) in enumerate(zip(came, chances, strict=True)):
                    gains = [chance - plan.least for chance in own[:max(plan.depths)] if chance >= plan.least]
                    if HORIZON / (1 + sum(own[:len(gains)])) * sum(gains) / plan.rate >= plan.arm.fee(seq, scene):
                        depths[j] = len(gains)
            joined = Plan(plan.arm, depths, plan.tokens, plan.seconds, chances)
            beside = 0.0 if plan.arm is None else self._nodes(plan.arm, plan.depths)
            told.update(zip([ids[i] for i in new], self._told(replace(scene, batch=came), joined, beside), strict=True))
        self._planned, self._choices = ids, [told[name] for name in ids]
        return True

    def _scene(self, batch: abc.Sequence[Sequence], rooms: abc.Sequence[int], whole: abc.Sequence[Sequence]) -> Scene:
        keys = sum(len(seq.tokens) for seq in whole)
        most = max(self.max_depth, self.tree or 0)
        score = self.passes.curve(len(whole), keys, len(whole) + most * len(batch))
        none: list[list[float]] = [[] for _ in batch]
        return Scene(batch, rooms, len(whole), score, Plan(None, [0] * len(batch), len(whole), score[len(whole) - 1], none))

    def _best(self, scene: Scene, held: Arm | None) -> Plan:
        """The best of plain decoding and every arm. To begin drafting, or to change the arm, needs a gain of MARGIN; to stop needs none."""
        best = scene.plain
        for arm in sorted(self.arms, key=lambda arm: arm is not held) if self.tried else ():         # the one in use first
            plan = self._of(arm, scene)
            if plan.rate > best.rate * (1.0 if arm is held else 1 + MARGIN):
                best = plan
        return best

    def _of(self, arm: Arm, scene: Scene) -> Plan:
        """The best depths with this arm. Texts that it has not read yet are drafted only if reading them pays off within HORIZON tokens."""
        chances, shares = arm.chances(scene.batch, self.rounds, scene.rooms, self.least)
        plan = self._fitted(arm, scene, chances, shares)
        fees = [arm.fee(seq, scene) if depth else 0.0 for seq, depth in zip(scene.batch, plan.depths, strict=True)]
        late = [i for i, fee in enumerate(fees) if fee]
        if late:
            without = self._fitted(arm, scene, [[] if i in late else c for i, c in enumerate(chances)], shares)
            ahead = sum(min(scene.rooms[i], HORIZON) for i in late) / len(late) * scene.rows         # tokens of the whole batch
            if ahead / without.rate - ahead / plan.rate < sum(fees):
                return without
        return plan

    def _fitted(self, arm: Arm, scene: Scene, chances: list[list[float]], shares: list[list[float]]) -> Plan:
        draft = arm.costs.levels(reaching(shares, bool(self.tree)))
        per_token = arm.costs.per_token
        score = [seconds + per_token * drafted for drafted, seconds in enumerate(scene.score, 1 - scene.rows)]
        if self.tree:
            depths, rate = self._best_tree(arm, scene, chances, draft, score)
        else:
            depths, rate = best_batch(chances, draft, score, 0.0, shares, scene.others)
        tokens = scene.rows + sum(sum(chance[:depth]) for chance, depth in zip(chances, depths, strict=True))
        return Plan(arm, depths, tokens, tokens / rate, chances)

    def _nodes(self, arm: Arm, depths: abc.Iterable[int]) -> float:
        """Nodes that are expected to be drafted at these depths."""
        return float(sum(max(d, self.tree or 0) * arm.share for d in depths if d))

    def _prices(self, arm: Arm, scene: Scene, plan: Plan, depths: abc.Sequence[int], beside: float = 0.0) -> list[tuple[float, ...]]:
        """`Budget.prices` of each sequence: the tokens that the plan writes in the time that 1, 2, … further rows take, on top of the rows
        of the others. beside: nodes of sequences that are not among these."""
        if not self.priced:
            return [()] * len(depths)
        score, most, told = scene.score, max(self.max_depth, self.tree or 0), dict[int, tuple[float, ...]]({0: ()})
        whole = scene.rows + beside + self._nodes(arm, depths)
        for depth in depths:
            if depth not in told:
                rows = min(whole - self._nodes(arm, [depth]), len(score) - most)          # more, where texts have come
                base = between(score, rows)
                told[depth] = tuple([plan.rate * (between(score, rows + n) - base + n * arm.costs.per_token) for n in range(1, most + 1)])
        return [told[depth] for depth in depths]

    def _best_tree(self, arm: Arm, scene: Scene, chances: list[list[float]], draft: list[float],
                   score: list[float]) -> tuple[list[int], float]:
        """One depth for all, since the nodes of a tree hardly depend on it. A level more must win by DEEPER: its cost is certain, its gain
        is not."""
        best, best_rate = [0] * len(chances), scene.plain.rate
        for depth in range(1, self.max_depth + 1):
            depths = [min(depth, len(c)) for c in chances]
            tokens = scene.rows + sum(sum(chance[:d]) for chance, d in zip(chances, depths, strict=True))
            rate = tokens / (draft[max(depths)] + between(score, scene.rows + self._nodes(arm, depths)))
            if rate > best_rate * (1 + DEEPER if depth > 1 else 1):
                best, best_rate = depths, rate
        return best, best_rate

    def _spare(self, plan: Plan, planning: float, calm: bool) -> None:
        """Put the next plan off where rounds are so short that planning and learning count. planning: seconds that this plan took."""
        self._spent += planning
        self._own += (self._spent - self._own) * (0.2 if self._own else 1.0)
        rest = int(self._rest(plan))
        self._spent, self._looks, self._due = 0.0, inf, self.rounds + rest
        if self._trial is None and calm and self.tried and rest:
            self._next, self._looks = max(self._next, self._due), max(REPLAN, rest // 4)

    def _rest(self, plan: Plan) -> float:
        """Rounds of this plan over which the next one takes no more than THRIFT of the time."""
        return min(self._own / (THRIFT * plan.seconds), REST)

    def _told(self, scene: Scene, plan: Plan, beside: float = 0.0) -> list[Choice]:
        """What the plan grants each sequence, with the reason in words."""
        name = "" if plan.arm is None or plan.arm.name is None else f"{plan.arm.name}, "
        told, prices = [], [()] * len(plan.depths) if plan.arm is None else self._prices(plan.arm, scene, plan, plan.depths, beside)
        for seq, depth, chance, price in zip(scene.batch, plan.depths, plan.chances, prices, strict=True):
            if depth:
                gain = plan.rate / scene.plain.rate
                why = f"{name}{1 + sum(chance[:depth]):.2f} tokens expected, {gain:.2f}× the plain rate"
            elif self.least and (first := max(arm.survival.first(seq) for arm in self.arms)) < self.least:
                why = f"the first guess stands in {first:.0%} of such texts, least_acceptance is {self.least:.0%}"
            elif not self.tried:
                why = "the drafter is tried first"
            elif plan.drafts:
                why = f"{name}too few of this text's guesses stand (the first in {chance[0] if chance else 0:.0%})"
            else:
                why = "no draft is expected to pay for its time"
            step = plan.rate * plan.arm.costs.per_level if plan.arm and price else 0.0
            told.append(Choice(depth, f"auto: {why}", plan.arm.name if plan.arm else None, price, step))
        return told

    # Trials.

    def _tried(self, scene: Scene, plan: Plan) -> list[Choice] | None:
        """The plan with the one thing tried in it that has waited longest; None where no credit covers what a trial may lose."""
        plain, wait, far = scene.plain.seconds, inf, inf
        for arm in sorted(self.arms, key=lambda arm: arm.asked):
            if not arm.credit:
                arm.credit[scene.load] = TRIALS * OVERDRAFT[0] * plain
            free = [i for i, depth in enumerate(plan.depths) if scene.rooms[i] and not (depth and arm is plan.arm)]
            if not free:
                continue
            free.sort(key=lambda i: (arm.kinds.get(arm.survival.kind(scene.batch[i]), -1), arm.unread(scene.batch[i])))
            some, deepest = free[:isqrt(len(free))], TRIAL_DEPTH if arm.costs.seen >= TRIALS else FIRST_DEPTH
            depths = {i: min(deepest, scene.rooms[i], self.max_depth) for i in some}       # several share the call and its levels
            trial = self._trial_of(arm, scene, plan, depths)
            credit = arm.credit.get(scene.load, 0.0)
            if arm.costs.seen >= TRIALS:
                credit = arm.credit[scene.load] = min(credit, plain / 4 + trial.loss)
            if arm.costs.seen < TRIALS or self.tried and trial.loss <= credit:
                self._trial = trial
                why = f"auto: a probe{f' of {arm.name}' if arm.name else ''} after {self.rounds - arm.asked} rounds without"
                chosen = self._asking(arm, scene, plan, depths, why)
                return [chosen.get(i, choice) for i, choice in enumerate(self._choices)]
            wait, far = min(wait, (trial.loss - credit) * len(self.arms) / (SHARE * plan.seconds)), min(far, trial.loss)
        if plan.drafts:
            loss, rounds = plain - scene.rows / plan.rate, 1 + self.passes.lingering(scene.rows)
            wanted = PLAIN_AFTER * rounds - min(self.passes.since_plain, self.rounds - self._timed)    # others may guess in it
            self._next = min(self._next, self.rounds + max(REPLAN, wanted + 1))
            if wanted < 0 and rounds * loss <= self._plain_credit:
                self._trial, self._more, self._timed = Trial(None, [], loss, 0.0, 0.0, plan.rate), rounds - 1, self.rounds
                return [AGAIN] * len(plan.depths)
        else:
            longest = max(REST, CALM * self._rest(plan)) if far > self._own + FAR * plain else REST
            self._next = max(self._next, self.rounds + int(min(wait, longest)))
        return None

    def _asking(self, arm: Arm, scene: Scene, plan: Plan, depths: abc.Mapping[int, int], why: str) -> dict[int, Choice]:
        """The choices of a trial, by place in the batch. What a level costs is not known yet of a drafter that is new."""
        prices = self._prices(arm, scene, plan, [depths.get(i, depth) for i, depth in enumerate(plan.depths)])
        step = plan.rate * arm.costs.per_level if self.priced and arm.costs.seen >= TRIALS else 0.0
        return {i: Choice(depth, why, arm.name, prices[i], step) for i, depth in depths.items()}

    def _trial_of(self, arm: Arm, scene: Scene, plan: Plan, depths: abc.Mapping[int, int]) -> Trial:
        """What drafting these sequences with `arm` is expected to bring, and to lose against the plan. A trial takes a plan of its own."""
        asked, rest = [scene.batch[i] for i in depths], [0 if i in depths else d for i, d in enumerate(plan.depths)]
        beside = 0.0 if plan.arm is None or not any(rest) else plan.arm.costs.seconds([1.0] * max(rest), sum(rest), 0)
        if not arm.costs.seen:
            return Trial(arm, asked, self._own, 0.0, beside, plan.rate)
        chances, shares = arm.survival.of(asked, self.rounds, list(depths.values()))
        new = self._nodes(arm, depths.values()) if self.tree else sum(map(sum, shares))
        rows = scene.rows + self._nodes(arm if plan.arm is None else plan.arm, rest) + new
        reach = reaching(shares, bool(self.tree))
        drafting = beside + arm.costs.seconds(reach, new, sum(map(arm.unread, asked)))
        if plan.arm is arm and any(rest):
            drafting -= arm.costs.seconds(reach[:max(rest)], 0, 0)         # the call and its levels are shared
        kept = sum(sum(chance[:d]) for chance, d in zip(plan.chances, rest, strict=True))
        brought = sum(map(sum, chances))
        seconds = drafting + between(scene.score, min(rows, len(scene.score)))
        return Trial(arm, asked, self._own + seconds - (scene.rows + kept + brought) / plan.rate, brought, drafting, plan.rate)

    def _charge(self, trial: Trial, batch: abc.Sequence[Sequence], budgets: abc.Sequence[Budget], verdicts: abc.Sequence[Verdict],
                drafting: float | None) -> None:
        """Take from the credit what the trial has really lost; one that went better than expected gives some back."""
        places = [i for i, seq in enumerate(batch) if seq in trial.asked]
        if trial.arm is None:
            self._plain_credit -= trial.loss
        elif any(budgets[i].depth for i in places):
            assert self._plan is not None and self._last is not None
            stood = sum(len(verdicts[i].accepted) for i in places)
            lost = trial.loss + (trial.tokens - stood) / trial.rate + (0.0 if drafting is None else drafting - trial.drafting)
            trial.arm.earn(self._last.load, -min(lost, OVERDRAFT[trial.arm.costs.seen > TRIALS] * self._plan.seconds))
            if stood > trial.tokens:
                self._planned = ()                               # news: plan again at once

    # What rounds show.

    def _settle(self) -> float | None:
        """Take in the rounds seen since the last plan, all at once, which takes a fraction of the time (see `PassCosts`). Returns the
        seconds that drafting took in the last of them, in fair weather; None where that is not known."""
        self.passes.settle()
        spent: float | None = 0.0
        for shown in self._waiting:
            spent = self._learn(shown)
        self._waiting.clear()
        return spent

    def _learn(self, shown: Shown) -> float | None:
        """Take in one round; returns the seconds that its drafting took, in fair weather, None where that is not known."""
        since, self._seen = shown.at - self._seen, shown.at
        if self._plan is not None and self._last is not None:
            earned = SHARE * self._plan.seconds * since
            self._plain_credit = min(self._plain_credit + earned, (1 + LINGER) * self._plan.seconds)
            for arm in self.arms:
                arm.earn(self._last.load, earned / len(self.arms))
        if not shown.asked:
            if shown.draft_s is not None:
                self._overhead += (shown.draft_s - self._overhead) * (0.1 if self._overhead else 1.0)
            return 0.0
        spent = None if shown.draft_s is None else max(shown.draft_s - self._overhead, 1e-6) * exp(-shown.moment.weather)
        names = dict.fromkeys([one.drafter for one in shown.asked])
        known = len(names) == 1 and since == 1                   # whose doing it was, and how much there was to read
        for name in names:
            arm = next((arm for arm in self.arms if arm.name == name), self.arms[0])
            self._follow(arm, shown.at, [one for one in shown.asked if one.drafter == name], spent if known else None)
        return spent

    def _follow(self, arm: Arm, at: int, asked: abc.Sequence[Outcome], seconds: float | None) -> None:
        """Take in what became of an arm's drafts in round `at`. seconds: what they took, in fair weather; None where other arms drafted,
        too, or rounds before were not seen."""
        arm.asked, unread = at, 0
        for one in asked:
            unread += max(0, one.length - arm.read.get(one.seq.id, 0))
            arm.read[one.seq.id] = one.length
            arm.kinds[arm.survival.kind(one.seq)] = at
            arm.survival.learn(one.seq, one.length, at, one.granted, one.depth, one.accepted)
            if one.depth and one.nodes:
                arm.trees = min(arm.trees + 1, SIZES)
                arm.share += (one.drafted / one.nodes - arm.share) / arm.trees
        if seconds is not None:
            levels = max(one.granted if self.tree and one.depth else one.depth for one in asked)
            arm.costs.learn(levels, sum(one.drafted for one in asked), unread, seconds)
