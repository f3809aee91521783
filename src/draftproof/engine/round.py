"""One round: plan → propose → score → distribution → verify → commit → rewind → observe → trace."""

from __future__ import annotations

from bisect import bisect_right
from collections import abc
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from ..core.choice import Law, choose, likeliest
from ..core.edits import Rows
from ..core.noise import key, key_rows, uniform
from ..core.probs import laws
from ..core.tally import fates
from ..core.tree import path, walk
from ..core.tree import positions as places
from ..core.typical import typical
from ..core.upload import downloaded, index_of, uploaded
from ..core.verify import joint, match, shares_noise, short_of
from ..errors import CacheFull
from ..models.graphs import recordings
from ..models.taps import SideBySide, rows_at, side_by_side
from ..models.target import Slot, Target
from ..trace.events import Times
from ..types import LOSSY, Budget, Commit, Draft, Likely, Scores, Signals, Verdict
from .ahead import PendingPass, PendingRound, begin_pass
from .lanes import Lanes
from .logprobs import note_logprobs
from .marks import Marks
from .records import Judged, Recorder
from .sequence import Sequence, Status


class Rounds:
    """Runs rounds over batches of running sequences of one target."""

    def __init__(self, target: Target, lanes: Lanes, recorder: Recorder) -> None:
        self.target, self.lanes, self.recorder = target, lanes, recorder
        self._early_pass: PendingPass | None = None      # of the next round, begun before this one was over: its pass alone,
        self._early_round: PendingRound | None = None    # or all of it, drafts too (ahead.py)
        self._recorded = recordings()

    def run(self, batch: abc.Sequence[Sequence], joining: abc.Sequence[Sequence] | None = None) -> list[Commit]:
        """Advance every sequence by at least one token. If it raises, texts and caches still agree and no token is half in.

        joining: who will be in the next round beside those that go on; None if that is not known.
        """
        start = perf_counter()
        before, self._recorded = self._recorded, recordings()    # counted from the last round on, which may have begun this one
        pending = self._begun_early(batch) or self._begin(batch)                                 # plan → propose → score
        budgets, drafts, scores = pending.budgets, pending.drafts, pending.scores
        try:
            law = _law(batch, drafts, scores)                                                    # → distribution
            verdicts, coins, nodes, law = self._verify(batch, drafts, law, scores.starts)        # → verify
            verified = perf_counter()
            times, waited = pending.seconds(start, verified)
            commits = _commit(batch, budgets, verdicts, nodes)                                   # → commit
            judged = _judged(batch, pending, verdicts, nodes, commits, coins)
            self._rewind(batch, commits)                                                         # → rewind
        except BaseException:
            self._restore(batch)
            raise

        def learn() -> None:
            """Tell the controllers what the round showed; with that the next one can be planned, and begun."""
            passing = waited + perf_counter() - verified if recordings() == before else None
            self.lanes.learn(batch, budgets, drafts, verdicts, times, passing)
            if early:
                self._early_round = self._begin_early([*(seq for seq in batch if seq.finish is None), *(joining or ())])

        try:
            likely = _likely(scores, nodes, drafts, self.lanes.likely if any([budget.depth for budget in budgets]) else 0)
            self.lanes.observe(batch, commits, _signals(scores, commits, likely))                # → observe
            times = times._replace(other_s=perf_counter() - verified)
            early = joining is not None and self._early_pass is None and self.lanes.asks_early
            before_records = early and not self._records_wait(batch)
            if before_records:
                learn()
        finally:                                             # whatever is interrupted: the tokens stand, and so do the records of them
            self._record(judged, law, scores, verified, times)                                   # → trace
        if not before_records:
            learn()
        return commits

    def choose_first(self, seq: Sequence, logits: Tensor) -> Commit:
        """The prefill's token, from the logits [1, V] after the prompt."""
        law = laws(logits, [_rows(seq, ((),), logits)]).sure()
        token = int(choose(law, _choice_keys([seq], [Draft.empty()], logits.device)))
        seq.to(Status.RUNNING)                               # not before: an interrupted choice is made again
        commit = seq.commit(Verdict((), token, "prefill"), ())
        seq.tally.prefill(seq.prefill_passes)
        note_logprobs(seq, logits, [0], commit.tokens)
        seq.spell()
        seq.clock.delivered(perf_counter(), 1)
        self.recorder.prefill(seq, law)
        return commit

    def _records_wait(self, batch: abc.Sequence[Sequence]) -> bool:
        """Whether a round's records read tensors on the device, and would wait there for a round that was begun before they are written."""
        return self.recorder.level == "full" or any(seq.sampling.logprobs is not None for seq in batch)

    def let_go(self) -> None:
        """There is no next round, as far as is known."""
        self._early_pass = None
        self._begun_early(())

    def _begun_early(self, batch: abc.Sequence[Sequence]) -> PendingRound | None:
        """The round that was begun early, if it is this batch's; another one is undone."""
        pending, self._early_round = self._early_round, None
        if pending is None:
            return None
        found = pending.take(batch, self.lanes)
        if found is None:
            self._restore([seq for seq in pending.seqs if seq.slot is not None])
        return found

    def _begin_early(self, batch: abc.Sequence[Sequence]) -> PendingRound | None:
        """The round that follows; None without a text, or where it fails: when its turn comes it is begun again, and raises then."""
        try:
            return self._begin(batch) if batch else None
        except Exception:
            return None

    def _begin(self, batch: abc.Sequence[Sequence]) -> PendingRound:
        """Plan a round, draft it and score it; a device may still be at work on it when this returns."""
        early, self._early_pass = self._early_pass, None
        start, marks = perf_counter(), Marks(self.target.device)
        budgets = self.lanes.plan(batch)
        try:
            drafts = self.lanes.propose(batch, budgets)
            marks.mark()
            scores, drafts, early = self._score(batch, drafts, early)
        except BaseException:
            self._restore(batch)
            raise
        marks.mark()
        return PendingRound(batch, budgets, drafts, scores, marks, start, self.lanes.steered, early)

    def _score(self, batch: abc.Sequence[Sequence], drafts: list[Draft],
               early: PendingPass | None) -> tuple[Scores, list[Draft], PendingPass | None]:
        """The scores, the drafts that were scored, and the pass that was begun early if the scores are its."""
        slots = [_slot(seq) for seq in batch]
        roots = torch.from_numpy(np.array([seq.tokens[-1] for seq in batch], np.int64))
        if early is not None and not any(map(len, drafts)):
            scores = early.take(batch, roots, self.lanes.taps)
            if scores is not None:
                return scores, drafts, early
        try:
            return self.target.score(slots, roots, drafts), drafts, None
        except CacheFull as full:
            if not any(map(len, drafts)):
                raise
            self._restore(batch)
            return self._score(batch, _fewer(drafts, f"no room to score it: {full}"), None)

    def _verify(self, batch: abc.Sequence[Sequence], drafts: list[Draft], law: Law,
                starts: abc.Sequence[int]) -> tuple[list[Verdict], dict[int, Tensor], list[list[int]], Law]:
        """A verdict per sequence, the coins of those whose draft a joint rule judged, the drafted tokens, and the law of them. Here a round
        waits for its device: choices and guesses are read together, and whether the law was made of too few tokens; then it is remade.

        Without a draft, at temperature 0 and under `match` the target chooses, with the shared noise. A draft that leads into a dead
        end is judged like all others, and no verdict goes on behind it.
        """
        given = law = law.sure() if any(map(_is_joint, batch, drafts)) else law
        dead = _dead_ends(law, starts)
        verdicts, coins = self._verify_jointly(batch, drafts, law, starts)
        rest = [i for i in range(len(batch)) if i not in verdicts]
        choices = None
        if rest:
            if len(rest) < len(batch) or starts[-1] > sum(len(d) + 1 for d in drafts):
                law = law.of([row for i in rest for row in range(starts[i], starts[i] + len(drafts[i]) + 1)])
            choices = choose(law, _choice_keys([batch[i] for i in rest], [drafts[i] for i in rest], self.target.device))
        read = _reading(choices, drafts, law.short)
        if choices is not None and len(rest) == len(batch) and self.lanes.passes.overlaps and self.lanes.idle:
            self._early_pass = begin_pass(self.target, batch, drafts, choices)
        chosen, nodes, short = read()
        if short:
            self._early_pass = None
            return self._verify(batch, drafts, given.remade(), starts)
        if self._early_pass is not None:
            self._early_pass.tokens = chosen
        at = 0                                               # row of the sequence's root among those of `rest`
        for i in rest:
            own = chosen[at:at + len(nodes[i]) + 1]
            if batch[i].rule in LOSSY:
                verdicts[i] = typical(drafts[i].parents, nodes[i], law.whole[at:at + len(own)], own, dead.get(i, ()))
            else:
                verdicts[i] = match(drafts[i].parents, nodes[i], own)
            at += len(own)
        return [short_of(verdicts[i], nodes[i], dead.get(i, ())) for i in range(len(batch))], coins, nodes, given

    def _verify_jointly(self, batch: abc.Sequence[Sequence], drafts: list[Draft], law: Law,
                        starts: abc.Sequence[int]) -> tuple[dict[int, Verdict], dict[int, Tensor]]:
        """Verdicts and coins, by place in the batch, of the drafts that `ratio` or `block` judges. A draft that its rule cannot judge is
        dropped from `drafts` and retires its drafter."""
        verdicts: dict[int, Verdict] = {}
        coins: dict[int, Tensor] = {}
        for i, (seq, draft) in enumerate(zip(batch, drafts, strict=True)):
            if not _is_joint(seq, draft):
                continue
            logp = law.whole[starts[i]:starts[i + 1]]
            try:
                verdicts[i], coins[i] = _joint(seq, draft, logp)
            except Exception as error:                       # whatever comes of a draft's law is its drafter's doing
                lane = self.lanes.of(seq)
                lane.retire(error)
                drafts[i] = Draft.empty(draft.drafter, lane.failure)
        return verdicts, coins

    def _rewind(self, batch: abc.Sequence[Sequence], commits: abc.Sequence[Commit]) -> None:
        """Cut each cache back to its text, which lacks the key of its last token."""
        for seq, commit in zip(batch, commits, strict=True):
            slot = _slot(seq)
            self.target.rewind(slot, commit.kept[:len(commit.tokens) - 1])
            assert slot.length == len(seq.tokens) - 1, f"{seq.id}: {slot.length} keys for {len(seq.tokens)} tokens"

    def _restore(self, batch: abc.Sequence[Sequence]) -> None:
        """After an interruption: forget the scored nodes; no slot holds more than its text but the last token."""
        self._early_pass = None
        for seq in batch:
            slot = _slot(seq)
            self.target.rewind(slot, ())
            self.target.truncate(slot, min(slot.length, len(seq.tokens) - 1))
            self.lanes.leave(seq)

    def _record(self, judged: abc.Sequence[Judged], law: Law, scores: Scores, verified: float, times: Times) -> None:
        """The round's trace records and the times that metrics are made of. verified: the host's time when its verdicts stood."""
        for one in judged:
            one.seq.spell()
            one.seq.clock.delivered(verified + times.other_s, len(one.commit.tokens))
            one.seq.clock.spent(times)
        self.recorder.rounds(judged, law, scores, times)


def _law(batch: abc.Sequence[Sequence], drafts: abc.Sequence[Draft], scores: Scores) -> Law:
    """What each row's logits come to under its request's options."""
    options = [_options(seq, draft, scores.logits) for seq, draft in zip(batch, drafts, strict=True)]
    return laws(scores.logits, options, scores.starts)


def _fewer(drafts: list[Draft], why: str) -> list[Draft]:
    """Of trees the first lines, for which texts have room; of chains alone nothing. How much room a tree takes depends on what was drawn,
    and under the joint rules a draft may not be dropped for that; siblings may."""
    if all(draft.is_chain for draft in drafts):
        return [Draft.empty(draft.drafter, why) for draft in drafts]
    fewer = []
    for draft in drafts:
        line = list(walk(draft.parents, [True] * len(draft))[0])
        law = None if draft.law is None else replace(draft.law, row=tuple(draft.law.row[node] for node in line))
        score = None if draft.score is None else draft.score[line]
        fewer.append(draft if draft.is_chain else Draft.chain(draft.tokens[line], score=score, law=law, drafter=draft.drafter, reason=why))
    return fewer


def _commit(batch: abc.Sequence[Sequence], budgets: abc.Sequence[Budget], verdicts: abc.Sequence[Verdict],
            nodes: abc.Sequence[list[int]]) -> list[Commit]:
    """Let the verdicts into the texts."""
    for seq, budget in zip(batch, budgets, strict=True):
        if not shares_noise(seq.rule):
            seq.drafted(budget.depth)
    return [seq.commit(verdict, tokens) for seq, verdict, tokens in zip(batch, verdicts, nodes, strict=True)]


def _judged(batch: abc.Sequence[Sequence], pending: PendingRound, verdicts: abc.Sequence[Verdict], nodes: abc.Sequence[list[int]],
            commits: abc.Sequence[Commit], coins: abc.Mapping[int, Tensor]) -> list[Judged]:
    """Each sequence's part of the round, counted."""
    judged = []
    for i, (seq, draft, root) in enumerate(zip(batch, pending.drafts, pending.scores.starts, strict=False)):
        fate = fates(verdicts[i], commits[i], len(draft))
        judged.append(Judged(seq, pending.budgets[i], draft, nodes[i], commits[i], fate, coins.get(i)))
        _count(judged[-1], pending.scores.logits, root)      # before what may fail: counts are those of the text
    return judged


def _count(one: Judged, logits: Tensor, root: int) -> None:
    """What a round did to a text. logits [rows, V]: of the pass; root: the row of the sequence's root."""
    seq, kept, emitted = one.seq, one.commit.kept, one.commit.tokens
    seq.tally.round(len(one.nodes), len(kept), one.fates.count("rejected"), len(emitted))
    seq.rounds += 1
    note_logprobs(seq, logits, [root, *(root + 1 + node for node in kept)][:len(emitted)], emitted)


def _dead_ends(law: Law, starts: abc.Sequence[int]) -> dict[int, list[int]]:
    """The nodes without a token behind them, of each draft that has any."""
    found: dict[int, list[int]] = {}
    for row in law.dead:
        i = bisect_right(starts, row) - 1
        found.setdefault(i, []).append(row - starts[i] - 1)
    return found


def _slot(seq: Sequence) -> Slot:
    assert seq.slot is not None, f"{seq.id} takes part in a round without a slot"
    return seq.slot


def _is_joint(seq: Sequence, draft: Draft) -> bool:
    """Whether `ratio` or `block` judges a draft."""
    return not shares_noise(seq.rule) and len(draft) > 0 and not seq.sampling.greedy


def _reading(choices: Tensor | None, drafts: abc.Sequence[Draft],
             short: Tensor | None) -> Callable[[], tuple[list[int], list[list[int]], bool]]:
    """Ask for the choices [N], every draft's tokens, of which those on the choices' device come in one look, and whether the law of any row
    is short; to be called for them."""
    if choices is None or choices.device.type == "cpu":
        return lambda: ([] if choices is None else choices.tolist(), [draft.tokens.tolist() for draft in drafts], False)
    near = [i for i, draft in enumerate(drafts) if len(draft) and draft.tokens.device == choices.device]
    parts = [choices, *(drafts[i].tokens for i in near), *([] if short is None else [short.any()[None].long()])]
    choices_there, count = downloaded(torch.cat(parts) if len(parts) > 1 else choices), choices.shape[0]

    def read() -> tuple[list[int], list[list[int]], bool]:
        seen = choices_there()
        at = dict(zip(near, accumulate((len(drafts[i]) for i in near), initial=count), strict=False))
        nodes = [seen[at[i]:at[i] + len(draft)] if i in at else draft.tokens.tolist() for i, draft in enumerate(drafts)]
        return seen[:count], nodes, short is not None and bool(seen[-1])

    return read


def _options(seq: Sequence, draft: Draft, logits: Tensor) -> Rows:
    """The options that act on a sequence's rows; the tokens on the way to each are only read where options look back."""
    if not len(draft) or not (seq.sampling.needs_history or seq.grammar):
        paths: abc.Sequence[abc.Sequence[int]] = ((),) * (len(draft) + 1)
    else:
        nodes = draft.tokens.tolist()
        paths = [(), *(tuple(nodes[n] for n in path(draft.parents, node)) for node in range(len(draft)))]
    return _rows(seq, paths, logits)


def _rows(seq: Sequence, paths: abc.Sequence[abc.Sequence[int]], logits: Tensor) -> Rows:
    mask = None if seq.grammar is None else seq.grammar.masks(paths).to(logits.device)
    return Rows(seq.sampling, seq.tokens, len(seq.prompt), paths, seq.end_ids, mask, seq.counts)


def _choice_keys(batch: abc.Sequence[Sequence], drafts: abc.Sequence[Draft], device: torch.device) -> Tensor | None:
    """Keys of the shared noise for every row; None if all sequences are greedy, which no noise can move."""
    if all(seq.sampling.greedy for seq in batch):
        return None
    rows: list[tuple[int, int]] = []
    for seq, draft in zip(batch, drafts, strict=True):
        length = len(seq.tokens)
        if draft.is_chain:
            rows += [key(seq.seed, seq.sample, "text", at) for at in range(length, length + len(draft) + 1)]
        else:
            rows += [key(seq.seed, seq.sample, "text", at) for at in (length, *places(draft.parents, length))]
    return key_rows(rows, device)


def _joint(seq: Sequence, draft: Draft, logp: Tensor) -> tuple[Verdict, Tensor]:
    """`ratio` or `block` on one draft, and its coins [n]; coins and residual noise are of this attempt at each position."""
    at = places(draft.parents, len(seq.tokens) - 1)
    coins = key_rows([key(seq.seed, seq.sample, "coin", p, seq.attempt(p)) for p in at], logp.device)
    thrown = uniform(coins, torch.arange(len(at), device=logp.device)[:, None])[:, 0]     # siblings share a position, not a coin
    residual = [key(seq.seed, seq.sample, "residual", p, seq.attempt(p)) for p in (len(seq.tokens), *(p + 1 for p in at))]
    return joint(seq.rule, draft, logp, thrown, key_rows(residual, logp.device)), thrown


def _signals(scores: Scores, commits: abc.Sequence[Commit], likely: abc.Sequence[Likely | None]) -> abc.Sequence[Signals | None]:
    """What the pass left for drafters that asked for it: hidden states of each root and of the nodes that entered its text, and the
    likeliest tokens."""
    if not scores.taps:
        return [None if own is None else Signals(commit.start - 1, {}, own) for commit, own in zip(commits, likely, strict=True)]
    rows = [row for root, commit in zip(scores.starts, commits, strict=False) for row in (root, *(root + 1 + n for n in commit.kept))]
    device = scores.logits.device
    # A recorded pass writes over its rows the next time; on a processor every pass has its own, and those of a chain need no copy.
    index = index_of(rows, device) if device.type == "cpu" else uploaded(rows, device)
    kept = rows_at(scores.taps, index)
    if len(commits) == 1:
        return [Signals(commits[0].start - 1, kept, likely[0])]
    kept = side_by_side(kept)
    parts = torch.split(kept.whole, [1 + len(commit.kept) for commit in commits])
    return [Signals(commit.start - 1, SideBySide(kept.layers, rows), own) for commit, rows, own in zip(commits, parts, likely, strict=True)]


def _likely(scores: Scores, nodes: abc.Sequence[list[int]], drafts: abc.Sequence[Draft], count: int) -> abc.Sequence[Likely | None]:
    """The `count` likeliest tokens behind every row of each sequence, if a drafter asked for any."""
    if not count:
        return [None] * len(nodes)
    tokens, logits = likeliest(scores.logits[:scores.starts[-1]], count)
    own = [slice(start, start + 1 + len(draft)) for start, draft in zip(scores.starts, drafts, strict=False)]
    return [Likely(ids, draft.parents, tokens[rows], logits[rows]) for ids, draft, rows in zip(nodes, drafts, own, strict=True)]
