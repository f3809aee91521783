"""`model`: a smaller language model with the target's vocabulary guesses token by token (Leviathan et al., arXiv 2211.17192).

It draws with the request's own options and, under `match`, with the target's own noise, so that it guesses the token
the target will *choose*, not merely a likely one. All sequences share one forward pass per level.

Its slot follows the text. Between rounds it holds a prefix of the text, never the last token; while a draft is out it
also holds what was drafted, and the round's commit, or the next `propose`, takes back what did not stand.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from ..core.upload import rows_of, uploaded
from ..core.verify import shares_noise
from ..errors import CacheFull
from ..models.target import Slot, Target
from ..types import Budget, Commit, Draft, DraftLaw, SequenceView, Signals
from .base import NOTHING, Drafter, Needs, Noise, NoOptions, Picks, Ranking, Site, pick
from .confidence import Confidence, Run
from .grow import CANDIDATES, Margins, evenly, gaps_of, worthiest
from .spines import spine
from .vocabulary import Check

FULL = "no room in the drafter's cache"
UNWORTHY = "a further guess is not worth its time"
SIBLINGS = CANDIDATES - 1       # beside the best, how many a tree's level considers


@dataclass(frozen=True, slots=True)
class Offered:
    """A tree's candidates: tokens, gaps and shares [levels][k], best first, beside a line of the best."""

    tokens: list[list[int]]
    gaps: list[list[float]]
    shares: list[list[float]]

    def teach(self, margins: Margins, greedy: bool, committed: Sequence[int]) -> None:
        """The text went on with these tokens: count which candidates on the way were the target's choice."""
        for offered, gaps, shares, token in zip(self.tokens, self.gaps, self.shares, committed, strict=False):
            rank = offered.index(token) if token in offered else None
            margins.learn(greedy, gaps, shares, rank)
            if rank != 0:
                return


@dataclass(slots=True)
class ModelState:
    """One sequence. While a draft is out, base is the length of the text it started from and guess its spine."""

    seq: SequenceView
    ranking: Ranking
    slot: Slot | None = None
    silent: str = ""                # why there is no slot
    lasting: bool = False           # … and there never will be
    base: int = 0
    guess: Tensor | None = None
    offered: Offered | None = None  # of a tree whose siblings were chosen after the noise
    run: Run | None = None          # of a chain that ends where it is not worth going on


@dataclass(slots=True)
class _Line:
    """One sequence within one `propose`."""

    state: ModelState
    slot: Slot
    place: int                      # index of its draft in the answer
    depth: int
    spare: int                      # nodes beyond the spine
    reason: str
    prices: Sequence[float] = ()                          # of the spare ones
    rows: list[int] = field(default_factory=list)         # its row of every level's picks, counted over the whole round
    spine: list[Tensor] = field(default_factory=list)     # [1] int64 per level
    path: tuple[int, ...] = ()                            # the spine on the host, where it is read
    run: Run | None = None                                # of a chain that ends where it is not worth going on

    @property
    def width(self) -> int:
        """Tokens of a level that this line may offer."""
        return 1 + max(min(self.spare, SIBLINGS), -(-self.spare // self.depth), 1)


class ModelDrafter(NoOptions):
    """A draft model behind the `Target` protocol. score: perturbed margin, how far log q + g of the token lies above the
    best other token of its row (a sibling's is negative): what the worth of a guess is judged by after the noise.

    With more nodes than depth levels offer their next best perturbed tokens as siblings, where these are worth most; only the
    best is extended.
    """

    takes_path: ClassVar[bool] = True
    nothing: ClassVar[str] = NOTHING            # why a draft ends in a dead end

    def __init__(self, lm: Target, vocab_size: int | None = None, prefill_chunk: int = 512, name: str = "model") -> None:
        """vocab_size: the target's, where it differs from the draft model's by padding."""
        self.lm, self.name, self.chunk = lm, name, prefill_chunk
        self.vocab_size = vocab_size or lm.vocab_size
        # Elsewhere a look at a token, by which a chain would end, waits for the device.
        self.needs = Needs(law=True, tree=True, context=lm.context, prices=lm.device.type == "cpu")
        self.checks: list[Check] = []
        self.margins, self.sure = Margins(), Confidence()

    @classmethod
    def from_spec(cls, path: str | None, options: Mapping[str, int], site: Site) -> Drafter:
        from ..models.load import builtin, load_target
        from .translate import pair

        lm = load_target(path or builtin("draft"), site.load.of_draft())
        return pair(site.target, lm, site.load.prefill_chunk)

    def open(self, seq: SequenceView, signals: Signals | None) -> ModelState:
        state = ModelState(seq, Ranking(seq))
        self._seat(state)
        return state

    def close(self, state: ModelState) -> None:
        self._settle(state, 0)
        slot, state.slot = state.slot, None
        state.silent, state.lasting = "the sequence is closed", True
        if slot is not None:
            self.lm.close(slot)

    def observe(self, states: Sequence[ModelState], commits: Sequence[Commit], signals: Sequence[Signals | None]) -> None:
        for state, commit in zip(states, commits, strict=True):
            stood = 0
            if state.guess is not None and commit.start == state.base:
                if state.run is not None:
                    state.run.teach(self.sure, commit.tokens)
                if state.offered is not None:
                    state.offered.teach(self.margins, state.seq.sampling.greedy, commit.tokens)
                for guessed, token in zip(state.guess.tolist(), commit.tokens, strict=False):
                    if guessed != token:
                        break
                    stood += 1
            self._settle(state, stood)

    def propose(self, states: Sequence[ModelState], budgets: Sequence[Budget], noise: Noise) -> list[Draft]:
        drafts = [Draft.empty(self.name) for _ in states]
        lines: list[_Line] = []
        for place, (state, budget) in enumerate(zip(states, budgets, strict=True)):
            self._settle(state, 0)
            if budget.depth:
                depth, reason = self._grant(state, budget.depth)
                if depth and state.slot is not None:
                    rest = budget.without(budget.depth)
                    line = _Line(state, state.slot, place, depth, rest.nodes, reason, rest.prices)
                    if self.needs.prices and budget.step and not rest.nodes and (shares_noise(state.seq.rule) or state.seq.sampling.greedy):
                        line.run = Run(budget, state.seq.sampling.greedy)
                    lines.append(line)
                else:
                    drafts[place] = Draft.empty(self.name, reason)
        if not lines:
            return drafts
        before = [line.slot.length for line in lines]
        done = False
        try:
            for line, draft in zip(lines, self._finish(lines, self._draft(lines, noise)), strict=True):
                drafts[line.place] = draft
            done = True
        except CacheFull as full:                       # what some of them had room for is others' now
            for line in lines:
                self._give_up(line.state)
            return [Draft.empty(self.name, f"{FULL}: {full}") for _ in states]
        finally:
            if not done:
                for line, length in zip(lines, before, strict=True):
                    line.state.guess = None
                    self._cut(line.state, min(length, line.slot.length))
        return drafts

    def _seat(self, state: ModelState) -> None:
        """Take a slot if there is room; otherwise stay silent and say why."""
        text, context = state.seq.tokens, self.lm.context
        if len(text) > context:
            state.silent, state.lasting = f"the text is longer than the drafter's context of {context}", True
            return
        room = max(0, min(state.seq.prompt_tokens + state.seq.sampling.max_tokens, context) - len(text))
        try:
            state.slot = self.lm.open(text, state.seq.tenant, room)
        except CacheFull:
            state.silent = FULL

    def _grant(self, state: ModelState, depth: int) -> tuple[int, str]:
        """How deep this sequence may draft now (0: not at all), and why less than asked."""
        if state.slot is None:
            if not state.lasting and self.lm.fits(len(state.seq.tokens)):
                self._seat(state)
            if state.slot is None:
                return 0, state.silent
        text, slot = state.seq.tokens, state.slot
        room = self.lm.context - len(text) + 1                     # the last drafted token is never fed
        unknown = next((t for t in text[slot.length:] if t >= self.lm.vocab_size), None) if self.lm.vocab_size < self.vocab_size else None
        if room < 1 or unknown is not None:
            self.close(state)
            state.silent = (f"token {unknown} of the text is not in the drafter's vocabulary of {self.lm.vocab_size}" if unknown is not None
                            else f"the text is longer than the drafter's context of {self.lm.context}")
            return 0, state.silent
        return (room, f"the drafter's context ends at {self.lm.context}") if room < depth else (depth, "")

    def _settle(self, state: ModelState, stood: int) -> None:
        """Take back a draft that is out, but for the `stood` first tokens of its spine. Without one, nothing to do."""
        if state.slot is not None and state.guess is not None:
            state.guess, state.offered, state.run = None, None, None
            self._cut(state, min(state.base + stood, len(state.seq.tokens) - 1, state.slot.length))

    def _cut(self, state: ModelState, length: int) -> None:
        """The slot to so many tokens."""
        if state.slot is not None:
            try:
                self.lm.truncate(state.slot, length)
            except CacheFull:                           # in the middle of a page that others read
                self._give_up(state)

    def _give_up(self, state: ModelState) -> None:
        """The slot, until there is room again."""
        slot, state.slot, state.silent, state.guess = state.slot, None, FULL, None
        if slot is not None:
            self.lm.close(slot)

    def _draft(self, lines: Sequence[_Line], noise: Noise) -> list[Picks]:
        """Feed what the slots lack, then one pass per level; returns each level's picks and fills the lines."""
        edited = any(line.state.ranking.names_tokens for line in lines)
        read = edited or self.lm.device.type == "cpu"       # elsewhere a look at a token would wait for the device
        logits = self._catch_up(lines)
        levels: list[Picks] = []
        width = max(line.width for line in lines)
        trees = any(line.spare for line in lines) and not noise.keep_law
        live, row = list(lines), 0
        while True:
            level = len(levels)
            picks = pick(logits, [line.state.ranking.rows(line.path) for line in live], [line.state.seq for line in live],
                         [len(line.state.seq.tokens) + level for line in live], noise, width, shares=trees)
            levels.append(picks)
            best = picks.tokens[:, :1].unbind()
            host = picks.tokens[:, 0].tolist() if read else ()
            gaps = gaps_of(picks.values[:, :2])[:, 0].tolist() if any(line.run for line in live) else ()
            dead = (picks.values[:, 0] == -math.inf).tolist() if edited else [False] * len(live)
            going: list[_Line] = []
            for i, line in enumerate(live):
                if dead[i]:
                    line.reason = self.nothing
                    continue
                if line.run is not None and not line.run.takes(host[i], gaps[i], self.sure):
                    line.reason = UNWORTHY
                    continue
                line.rows.append(row + i)
                line.spine.append(best[i])
                ended = bool(host) and host[i] in line.state.seq.end_ids
                if line.state.ranking.looks_back:
                    line.path += (host[i],)
                if ended and level + 1 < line.depth:
                    line.reason = "the draft ends the text"
                if not ended and level + 1 < line.depth:
                    if line.run is not None and not line.run.goes_on(self.sure):
                        line.reason = UNWORTHY
                    else:
                        going.append(line)
            row += len(live)
            if not going:
                return levels
            live = going
            logits = self._forward([line.slot for line in live], [line.spine[-1] for line in live])

    def _catch_up(self, lines: Sequence[_Line]) -> Tensor:
        """Feed the text that the slots lack, in chunks; logits [lines, V] after the last token of each text."""
        missing = [uploaded(line.state.seq.tokens[line.slot.length:], self.lm.device, torch.int64) for line in lines]
        while any(ids.shape[0] > self.chunk for ids in missing):
            behind = [i for i, ids in enumerate(missing) if ids.shape[0] > self.chunk]
            self.lm.extend([lines[i].slot for i in behind], [missing[i][:self.chunk] for i in behind])
            for i in behind:
                missing[i] = missing[i][self.chunk:]
        return self._forward([line.slot for line in lines], missing)

    def _forward(self, slots: Sequence[Slot], tokens: Sequence[Tensor]) -> Tensor:
        """Logits over the target's ids: a padded draft vocabulary is cut, a shorter one filled with −inf."""
        logits = self.lm.extend(slots, tokens).logits
        gap = self.vocab_size - logits.shape[-1]
        if gap == 0:
            return logits
        return logits[:, :gap] if gap < 0 else functional.pad(logits, (0, gap), value=-math.inf)

    def _finish(self, lines: Sequence[_Line], levels: Sequence[Picks]) -> list[Draft]:
        """Drafts out of the picks; only trees are shaped on the host."""
        tokens, values = torch.cat([p.tokens for p in levels]), torch.cat([p.values for p in levels])
        shares = None if levels[0].shares is None else torch.cat([p.shares for p in levels if p.shares is not None]).float()
        logq = None if levels[0].logq is None else torch.cat([p.logq for p in levels if p.logq is not None])
        if any(line.spare for line in lines):                       # one look for all of them
            tokens, values, shares = tokens.cpu(), values.cpu(), None if shares is None else shares.cpu()
        drafts = []
        for line in lines:
            if line.run is not None and (kept := line.run.kept()) < len(line.rows):
                line.rows, line.spine, line.reason = line.rows[:kept], line.spine[:kept], UNWORTHY
            line.state.base, line.state.guess = len(line.state.seq.tokens), torch.cat(line.spine or [tokens.new_empty(0)])
            line.state.run = line.run
            if not line.rows:
                drafts.append(Draft.empty(self.name, line.reason))
                continue
            greedy, count = line.state.seq.sampling.greedy, len(line.rows)
            law = None if logq is None or greedy else DraftLaw(rows_of(logq, line.rows), tuple(range(count)))
            mine, above = rows_of(tokens, line.rows)[:, :line.width], rows_of(values, line.rows)[:, :line.width].float()
            if not line.spare or law is not None or shares is None:
                extra = evenly(line.depth, line.spare)[:count]
            else:
                gaps, own = gaps_of(above), rows_of(shares, line.rows)[:, :line.width]
                extra = worthiest(gaps, own, line.spare, greedy, self.margins, line.prices)
                line.state.offered = Offered(mine.tolist(), gaps.tolist(), own.tolist())
            drafts.append(spine(mine, above, extra, law, self.name, line.reason))
        return drafts
