"""Drafters whose head reads the target's hidden states and goes on from its own: the part that EAGLE's generations share.

The head has one entry per token of the text but the last: entry t reads the target's hidden state at t and token t + 1, and
predicts token t + 2. What the target leaves behind waits until the next `propose`, which feeds all of it, of all sequences,
in one pass; the last entry gives the first guess, and every further one reads the head's own output. Entries of guesses are
forgotten, for those that stood come back with true features. One pass per level, of a chain or of a whole tree's frontier.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from ..core.upload import rows_of, uploaded
from ..models.experts import take_experts
from ..models.graphs import recorder
from ..models.heads.blocks import join
from ..models.heads.cache import HeadCache, HeadPass, entry_bytes
from ..models.heads.compiled import CompiledHead, Made, Wish
from ..models.heads.recorded import MOST_FED, MOST_LINES, Fed, RecordedChains, Recording, RecurrentHead
from ..models.heads.rows import by_rows
from ..models.packed import can_pack, pack, packed, sizes
from ..models.taps import abreast, rows_in, stacked
from ..types import Budget, Commit, Draft, SequenceView, Signals
from .base import NOTHING, Needs, Noise, Picks, Ranking, pick
from .grow import CANDIDATES, SURE, Growth, Margins, evenly, grown, longer, sight
from .lines import Line, RecurrentState, Ways
from .planted import PlantedTrees, plant
from .spines import beside, collected, spine

CHUNK = 1024        # rows of one sequence that wait, or are fed, at most in one pass
WIDEST = 8          # nodes of one sequence that a level extends at most
ENDS = "the draft ends the text"


class RecurrentDrafter:
    """score: perturbed margin, how far log q + g of a token lies above the best other candidate of its node; a sibling's is
    negative."""

    name: str
    dynamic = True              # with more nodes than depth, grow the tree by worth; otherwise siblings beside a chain

    def __init__(self, head: nn.Module, vocab_size: int, graphs: bool = True, kernels: bool = True) -> None:
        """head: a `RecurrentHead`, ready for its device; its linear layers are packed here where that pays. graphs: whether its drafts are
        recorded where the device can. kernels: whether layers that are known then run through our own kernels for a GPU."""
        self.vocab_size = vocab_size
        self.weight_bytes, self.parameters = sizes(head)
        first = next(head.parameters())
        self.device, self.dtype = first.device, first.dtype
        head.requires_grad_(False).eval()
        join(head)
        if self.device.type == "cpu" and can_pack(self.dtype)[0]:
            take_experts(head, packed)
            pack(head)
        self.head: RecurrentHead = head  # type: ignore[assignment]
        self.cache_bytes_per_token = entry_bytes(self.head.depth, self.head.kv_heads, self.head.head_dim, self.dtype)
        self.compiled = CompiledHead.of(head)
        record = recorder(self.device) if graphs else None
        ours = record is not None and kernels and by_rows(head, self.device, self.dtype)    # one by one they take longer to be called
        self.recorded = None if record is None else RecordedChains(self.head, record, self.dtype, self.device, ours)
        taps = tuple(sorted(set(self.head.taps)))
        self.needs = Needs(taps=taps, parts=("embed", "output"), law=True, tree=True, context=self.head.context)
        self.margins = Margins()

    def open(self, seq: SequenceView, signals: Signals | None) -> RecurrentState:
        pool = None if self.recorded is None else self.recorded.pool
        cache = HeadCache(self.head.depth, self.head.kv_heads, self.head.head_dim, self.dtype, self.device, pool)
        state = RecurrentState(seq, Ranking(seq), cache)
        if signals is not None:
            self._take(state, signals)
        return state

    def close(self, state: RecurrentState) -> None:
        if state.cache is not None:
            state.cache.close()
        state.cache, state.learn, state.last = None, None, None
        state.window.close()

    def observe(self, states: Sequence[RecurrentState], commits: Sequence[Commit], signals: Sequence[Signals | None]) -> None:
        left: list[tuple[RecurrentState, Signals]] = []
        for state, commit, rows in zip(states, commits, signals, strict=True):
            if state.cache is None:
                continue
            if state.learn is not None and commit.start == state.length:
                state.learn(commit.tokens)
            state.learn = None
            if rows is not None:
                left.append((state, rows))
        if len(left) > 1:       # one operation for all of them
            taps = [rows.taps for _, rows in left]
            together = abreast(stacked(taps), self.head.taps)
            for (state, rows), own in zip(left, torch.split(together, [rows_in(each) for each in taps]), strict=True):
                self._keep(state, own, rows.start)
        elif left:
            self._take(*left[0])

    @torch.inference_mode()
    def propose(self, states: Sequence[RecurrentState], budgets: Sequence[Budget], noise: Noise) -> list[Draft]:
        drafts = [Draft.empty(self.name) for _ in states]
        lines: list[Line] = []
        for place, (state, budget) in enumerate(zip(states, budgets, strict=True)):
            state.learn = None
            if not budget.depth:
                continue
            reason = self._silence(state)
            if reason or state.cache is None:
                drafts[place] = Draft.empty(self.name, reason)
                continue
            state.cache.truncate(state.window.held)
            lines.append(Line(state, state.cache, place, budget))
        if not lines:
            return drafts
        ways = self._ways(lines, noise)
        if len(ways.chains) + len(ways.trees) > 1:
            self._catch_up([*ways.chains, *ways.trees])
        for some, draw in zip(ways, (self._replayed, self._chains, self._planted, self._trees), strict=True):
            for line, draft in zip(some, draw(some, noise) if some else [], strict=True):
                drafts[line.place] = draft
        return drafts

    def _ways(self, lines: Sequence[Line], noise: Noise) -> Ways:
        ways = Ways([], [], [], [])
        recorded = None if noise.keep_law else self.recorded
        chains, trees = (recorded is not None and recorded.records(form) for form in (Recording, PlantedTrees))
        deepest = max(line.budget.depth for line in lines)
        for line in lines:
            tree = self.dynamic and not noise.keep_law and line.budget.nodes > line.budget.depth
            line.due = self._missing(line.state)
            guesses = (deepest - 1) * WIDEST if tree else deepest
            plain = not line.state.ranking.names_tokens and self._whole(line.state, deepest)
            if (trees if tree else chains) and line.due and plain and line.cache.pooled(line.due + guesses):
                (ways.planted if tree else ways.replayed).append(line)
            else:
                (ways.trees if tree else ways.chains).append(line)
        return ways

    def _whole(self, state: RecurrentState, depth: int) -> bool:
        """Whether all layers see all of a text and so many guesses: kernels and recordings know no windows."""
        whole = getattr(self.head, "whole", None) or getattr(getattr(self.head, "layers", None), "whole", None)
        return whole is None or bool(whole(state.window.held + self._missing(state) + depth - 1))

    # The text's own entries.

    def _take(self, state: RecurrentState, signals: Signals) -> None:
        """Hidden states that the target left."""
        self._keep(state, abreast(signals.taps, self.head.taps), signals.start)

    def _keep(self, state: RecurrentState, rows: Tensor, start: int) -> None:
        """The same [n, taps · H] of positions from `start` on."""
        if state.window.take(rows, start):
            state.last = None
            if state.cache is not None:
                state.cache.truncate(0)
        while state.window.ahead > CHUNK and self._missing(state) >= CHUNK:
            self._feed([state])

    def _missing(self, state: RecurrentState) -> int:
        """Entries that the text has and the cache has not."""
        return len(state.seq.tokens) - 1 - state.window.at

    def _silence(self, state: RecurrentState) -> str:
        """Why this sequence cannot draft now, or nothing."""
        if state.cache is None:
            return "the sequence is closed"
        if state.window.empty or self._missing(state) > state.window.ahead:
            return "the target's hidden states of the last tokens are not here yet"
        return ""

    def _catch_up(self, lines: Sequence[Line]) -> None:
        while any(line.state.window.ahead and self._missing(line.state) for line in lines):
            self._feed([line.state for line in lines])

    @torch.inference_mode()
    def _feed(self, states: Sequence[RecurrentState], spare: int = 0) -> None:
        """Feed what the caches lack, but for the last `spare` rows, at most a chunk of each sequence, in one pass."""
        behind: list[RecurrentState] = []
        features: list[Tensor] = []
        tokens: list[int] = []
        positions: list[int] = []
        for state in states:
            if min(self._missing(state) - spare, state.window.ahead) > 0 and state.cache is not None:
                state.cache.truncate(state.window.held)
                rows, text = self._due(state, spare)
                start = state.window.at
                behind.append(state)
                features.append(rows)
                tokens += text
                positions += range(start, start + len(text))
        counts = [len(rows) for rows in features]
        flat = features[0] if len(features) == 1 else torch.cat(features)
        ids, places = uploaded([tokens, positions], self.device).unbind()
        attend = HeadPass([state.cache for state in behind if state.cache is not None], counts)
        out = self.head.step(ids, self.head.fuse(flat), places, attend)
        attend.done()
        end = 0
        for state, count in zip(behind, counts, strict=True):
            end += count
            state.window.read(count)
            state.last = out[end - 1].clone()

    def _due(self, state: RecurrentState, spare: int = 0) -> tuple[Tensor, Sequence[int]]:
        """What the cache lacks, but for `spare` rows, at most a chunk: features, and the tokens that are read beside them."""
        window = state.window
        count, start = min(self._missing(state) - spare, window.ahead, CHUNK), window.at + 1
        return window.due(count), state.seq.tokens[start:start + count]

    # Drafts.

    def _replayed(self, lines: Sequence[Line], noise: Noise) -> list[Draft]:
        """By launches of recordings, which feed what waits first; level by level if there are none."""
        return [draft for some in _launches(lines) for draft in self._replay(some, noise) or self._chains(some, noise)]

    def _replay(self, lines: Sequence[Line], noise: Noise) -> list[Draft] | None:
        assert self.recorded is not None
        fed, depths, widest = self._fed(lines), [line.budget.depth for line in lines], 0
        for line in lines:
            if line.budget.nodes > line.budget.depth:
                line.extra = evenly(line.budget.depth, line.budget.nodes - line.budget.depth)
                widest = max(widest, line.extra[0])
        depth = max(depths)
        made = self.recorded.draft(fed, depth, max(2, 1 + widest), self._keys(lines, depth, noise))
        if made is None:
            return None
        self._went(lines, fed, made.last.clone())
        if widest:
            every = zip(lines, depths, *(part.to("cpu", copy=True) for part in (made.tokens, made.values)), strict=True)
            return [spine(tokens[:n], values[:n], line.extra, None, self.name, "") for line, n, tokens, values in every]
        return [Draft.chain(own if n == depth else own[:n], score=worth if n == depth else worth[:n], drafter=self.name)
                for n, own, worth in zip(depths, made.first.clone().unbind(), made.margins.clamp(max=SURE).unbind(), strict=True)]

    def _fed(self, lines: Sequence[Line]) -> list[Fed]:
        """What a recording feeds of each line; what is too much for it is fed before."""
        behind = [line.state for line in lines if line.due > MOST_FED]
        while behind:
            self._feed(behind, 1)
            behind = [state for state in behind if self._missing(state) > MOST_FED]
        fed: list[Fed] = []
        for line in lines:
            state, at = line.state, line.state.window.at
            text = state.seq.tokens[at + 1:]
            fed.append(Fed(line.cache, text, state.window.pieces(len(text)), at, state.ranking.filters))
        return fed

    def _keys(self, lines: Sequence[Line], depth: int, noise: Noise) -> Tensor | None:
        """Of the noise of so many levels, level by level; None if all lines are greedy."""
        seqs = [line.seq for line in lines]
        if all(seq.sampling.greedy for seq in seqs):
            return None
        lengths = [len(seq.tokens) for seq in seqs]
        return noise.keys(seqs * depth, [length + level for level in range(depth) for length in lengths])

    def _went(self, lines: Sequence[Line], fed: Sequence[Fed], last: Tensor) -> None:
        """A recording has fed this, with these outputs [lines, H]."""
        for line, one, own in zip(lines, fed, last.unbind(), strict=True):
            line.state.window.read(len(one.tokens))
            line.state.last = own

    def _chains(self, lines: Sequence[Line], noise: Noise) -> list[Draft]:
        """One pass per level over all sequences; siblings, if any, are fixed before anything is drawn."""
        for line in lines:
            depth, nodes = line.budget.depth, line.budget.nodes
            line.extra = evenly(depth, nodes - depth)
        width = max(2, 1 + max(line.extra[0] for line in lines))
        made = self._compiled(lines, noise, width)
        if made is not None:
            line, (ids, heights) = lines[0], made.line()
            return [beside(ids, heights, line.extra[:len(ids)], None, self.name, ENDS if len(ids) < line.budget.depth else "")]
        edited = any(line.state.ranking.names_tokens for line in lines)
        read = edited or self.device.type == "cpu"          # elsewhere a look at a token would wait for the device
        levels: list[Picks] = []
        live, row = list(lines), 0
        hidden = self._last(lines)
        while live:
            level = len(levels)
            picks = pick(self.head.logits(hidden), [line.state.ranking.rows(line.path) for line in live], [line.seq for line in live],
                         [len(line.seq.tokens) + level for line in live], noise, width, self.head.ids, self.vocab_size)
            levels.append(picks)
            host = picks.tokens[:, 0].tolist() if read else [-1] * len(live)
            dead = (picks.values[:, 0] == -math.inf).tolist() if edited else [False] * len(live)
            going = []
            for i, line in enumerate(live):
                if dead[i]:
                    line.reason = NOTHING
                    continue
                line.rows.append(row + i)
                line.path += (host[i],)
                deeper = level + 1 < line.budget.depth
                if deeper and host[i] in line.seq.end_ids:
                    line.reason = ENDS
                elif deeper:
                    going.append(i)
            row += len(live)
            live = [live[i] for i in going]
            if live:
                hidden = self._extend(live, rows_of(picks.tokens, going)[:, 0], rows_of(hidden, going), level, 1, None)
        return collected(lines, levels, self.vocab_size, self.name)

    def _compiled(self, lines: Sequence[Line], noise: Noise, candidates: int, widest: int = 0) -> Made | None:
        """A chain, or a tree that extends `widest` nodes per level, by one call of the kernels, which feeds what waits first; None where
        they go the way of torch: several sequences, options that name tokens, a rule that asks for laws, or layers that slide."""
        if self.compiled is None or noise.keep_law or len(lines) > 1 or lines[0].state.ranking.names_tokens:
            return None
        state, budget, cache = lines[0].state, lines[0].budget, lines[0].cache
        if not self._whole(state, budget.depth):
            return None
        while self._missing(state) > CHUNK:
            self._feed([state])
        rows, text = self._due(state) if self._missing(state) else (None, ())
        seq, length, greedy = state.seq, len(state.seq.tokens), state.seq.sampling.greedy
        keys = None if greedy else noise.keys([seq] * budget.depth, range(length, length + budget.depth))
        wish = Wish(length - 1, budget.depth, candidates, state.ranking.filters, seq.end_ids, text)
        if widest:
            wish = wish._replace(nodes=budget.nodes, widest=widest, odds=self.margins.odds(greedy))
        made = self.compiled.draft(wish, state.last, cache, rows, keys)
        if made is not None and rows is not None:
            state.window.read(len(text))
            state.last = made.last
        return made

    def _planted(self, lines: Sequence[Line], noise: Noise) -> list[Draft]:
        """Trees by launches of recordings."""
        return [draft for some in _launches(lines) for draft in self._trees(some, noise, True)]

    def _plant(self, lines: Sequence[Line], growth: Growth, noise: Noise) -> bool:
        """Whether a recording has grown them."""
        assert self.recorded is not None
        if not self.recorded.records(PlantedTrees):
            return False
        fed, size = self._fed(lines), self.vocab_size if self.head.ids is None else len(self.head.ids)
        last = plant(self.recorded, fed, growth, self._keys(lines, max(growth.depths), noise), size)
        if last is not None:
            self._went(lines, fed, last)
        return last is not None

    def _trees(self, lines: Sequence[Line], noise: Noise, planted: bool = False) -> list[Draft]:
        """What is worth its node is known after the noise."""
        widths = [min(WIDEST, max(2, line.budget.nodes // line.budget.depth + 1)) for line in lines]
        for line in lines:
            line.state.length = len(line.seq.tokens)
        made = self._compiled(lines, noise, CANDIDATES, widths[0])
        if made is not None:
            state, levels = lines[0].state, map(made.level, range(made.levels))     # read when they are asked for
            state.learn = partial(self.margins.follow, state.seq.sampling.greedy, levels=levels)
            return [grown(made, lines[0].budget.prices, self.name)]
        growth = Growth([line.budget.depth for line in lines], [line.budget.nodes for line in lines],
                        [line.seq.sampling.greedy for line in lines], [line.seq.end_ids for line in lines], self.margins,
                        widths, [line.budget.prices for line in lines])
        if not (planted and self._plant(lines, growth, noise)):
            self._grow(lines, growth, noise)
        for i, line in enumerate(lines):
            line.state.learn = partial(growth.learn, i)
        return [draft if len(draft) else Draft.empty(self.name, NOTHING) for draft in growth.finish(self.name)]

    def _grow(self, lines: Sequence[Line], growth: Growth, noise: Noise) -> None:
        """One pass per level over the frontiers of all sequences."""
        history = any(line.state.ranking.looks_back for line in lines)
        paths: list[list[tuple[int, ...]]] = [[()] for _ in lines]
        hidden, slots = self._last(lines), 1
        seen = torch.zeros(len(lines), 1, 0, dtype=torch.bool, device=self.device)
        seqs = [line.seq for line in lines]
        for level in range(max(growth.depths)):
            picks = pick(self.head.logits(hidden), [line.state.ranking.rows(*paths[i]) for i, line in enumerate(lines)], seqs,
                         [len(seq.tokens) + level for seq in seqs], noise, CANDIDATES, self.head.ids, self.vocab_size, shares=True)
            shape = (len(lines), slots, -1)
            front = growth.grow(*picks.offered(shape))
            if front is None:
                break
            paths = longer(paths, front) if history else [[()] * front.tokens.shape[1]] * len(lines)
            hidden = hidden.view(shape).gather(1, front.parents[..., None].expand(-1, -1, hidden.shape[-1]))
            slots, seen = front.tokens.shape[1], sight(seen, front.parents)
            hidden = self._extend(lines, front.tokens.flatten(), hidden.flatten(0, 1), level, slots, seen)

    def _last(self, lines: Sequence[Line]) -> Tensor:
        self._catch_up(lines)
        return torch.stack([line.state.last for line in lines if line.state.last is not None])

    def _extend(self, lines: Sequence[Line], tokens: Tensor, hidden: Tensor, level: int, slots: int, seen: Tensor | None) -> Tensor:
        """Entries of a level's guesses, `slots` of each sequence. seen [B, slots, guesses so far]: in a tree, each one's
        ancestors and itself."""
        masks = None
        if seen is not None:
            held = [torch.ones(slots, line.state.window.held, dtype=torch.bool, device=self.device) for line in lines]
            masks = [torch.cat((true, own), 1) for true, own in zip(held, seen, strict=True)]
        at = [len(line.seq.tokens) - 1 + level for line in lines for _ in range(slots)]
        attend = HeadPass([line.cache for line in lines], [slots] * len(lines), masks)
        out = self.head.step(tokens, hidden, uploaded(at, self.device), attend)
        attend.done()
        return out


def _launches(lines: Sequence[Line]) -> Iterator[Sequence[Line]]:
    """As many at a time as a recording holds."""
    for start in range(0, len(lines), MOST_LINES):
        yield lines[start:start + MOST_LINES]
