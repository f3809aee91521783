"""Drafters whose head starts from one hidden state of the target and needs no keys of its own: what Medusa, Hydra and the MLP
speculator share.

The hidden state of the last token that the target has read predicts the root, which is known; with it and the root the head
guesses on. Each level is one pass over the frontiers of all sequences, in chains as in trees.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..core.upload import uploaded
from ..errors import LoadError
from ..models.packed import can_pack, pack, sizes
from ..models.target import TargetParts
from ..types import Budget, Commit, Draft, SequenceView, Signals
from .base import NOTHING, Needs, Noise, Picks, Ranking, pick
from .grow import CANDIDATES, Growth, Margins, evenly, longer
from .spines import collected

Path = tuple[int, ...]


@dataclass(slots=True)
class VectorState:
    """One sequence: the hidden state [H] at position `at`, the last that the target has read."""

    seq: SequenceView
    ranking: Ranking
    row: Tensor | None = None
    at: int = -2                            # −2: none yet
    tree: tuple[Growth, int] | None = None  # what grew for the text as it is, and which sequence of it this was
    length: int = 0                         # tokens of that text


@dataclass(slots=True)
class Line:
    """One sequence within one `propose`."""

    state: Any
    place: int                              # of its draft in the answer
    depth: int
    nodes: int
    prices: Sequence[float] = ()                          # as in its budget
    reason: str = ""
    rows: list[int] = field(default_factory=list)         # its row of every level's picks, counted over the whole round
    path: Path = ()                                       # the chain on the host, where it is read

    @property
    def seq(self) -> SequenceView:
        seq: SequenceView = self.state.seq
        return seq

    @property
    def extra(self) -> list[int]:
        """Siblings beside each level of a chain, fixed before anything is drawn."""
        return evenly(self.depth, self.nodes - self.depth)


class VectorDrafter(ABC):
    """score: perturbed margin, how far log q + g of a token lies above the best other candidate of its node (a sibling's is negative)."""

    name: str
    widest = 6          # nodes of one sequence that a level extends at most

    def __init__(self, head: Any, parts: TargetParts, vocab_size: int) -> None:
        """head: a network of `models.heads` with `depth`, `taps` and `ids`, ready for its device; its linear layers are packed
        here where that pays."""
        if parts.norm is None:
            raise LoadError(f"drafter {self.name} reads the target's last hidden state after the final norm, and no final norm was "
                            "found in it; expected a decoder with a norm behind its last layer: use another drafter")
        self.head, self.vocab_size, self.norm = head, vocab_size, parts.norm
        self.needs = Needs(taps=head.taps, parts=("embed", "output"), law=True, tree=True)
        self.margins = Margins()
        first = next(head.parameters())
        self.device = first.device
        self.weight_bytes, self.parameters = sizes(head)
        assert isinstance(head, nn.Module)
        head.requires_grad_(False).eval()
        if self.device.type == "cpu" and can_pack(first.dtype)[0]:
            pack(head)

    # What a family is.

    @abstractmethod
    def begin(self, lines: Sequence[Line], depth: int) -> Any:
        """What the first step reads, one row per line. No line goes deeper than `depth`."""

    @abstractmethod
    def step(self, level: int, carry: Any, tokens: Tensor) -> tuple[Tensor, Any]:
        """One level deeper, after tokens [R] (the roots, at level 0): logits [R, V] for the next, and what the next step reads."""

    def width(self, line: Line) -> int:
        """How many nodes of a sequence a level may extend; of its own budget alone, so that company changes nothing."""
        return min(self.widest, max(2, line.nodes // line.depth + 1))

    def keep(self, carry: Any, rows: Tensor) -> Any:
        """Of what a level of chains passes on, that of the sequences [R] which go on."""
        return carry[rows]

    def follow(self, carry: Any, rows: Tensor) -> Any:
        """What the given nodes [R] of a level of trees pass on, in this order, to their children."""
        return carry[rows]

    # The protocol.

    def open(self, seq: SequenceView, signals: Signals | None) -> VectorState:
        state = self.fresh_state(seq, Ranking(seq))
        if signals is not None:
            self.take(state, signals)
        return state

    def fresh_state(self, seq: SequenceView, ranking: Ranking) -> VectorState:
        return VectorState(seq, ranking)

    def close(self, state: VectorState) -> None:
        state.row, state.at, state.tree = None, -2, None

    def observe(self, states: Sequence[VectorState], commits: Sequence[Commit], signals: Sequence[Signals | None]) -> None:
        for state, commit, rows in zip(states, commits, signals, strict=True):
            if state.tree is not None and commit.start == state.length:
                growth, i = state.tree
                growth.learn(i, commit.tokens)
            state.tree = None
            if rows is not None:
                self.take(state, rows)

    def take(self, state: VectorState, signals: Signals) -> None:
        """Hidden states that the target left; the last is all that counts."""
        rows = signals.taps[self.head.taps[0]]
        state.row, state.at = rows[-1].clone(), signals.start + rows.shape[0] - 1

    def missing(self, state: VectorState) -> str:
        """What a guess lacks now; empty: nothing."""
        read = state.at == len(state.seq.tokens) - 2
        return "" if read else "the target's hidden state of the last token it read is not here yet"

    @torch.inference_mode()
    def propose(self, states: Sequence[VectorState], budgets: Sequence[Budget], noise: Noise) -> list[Draft]:
        drafts = [Draft.empty(self.name) for _ in states]
        lines: list[Line] = []
        for place, (state, budget) in enumerate(zip(states, budgets, strict=True)):
            state.tree = None
            missing = self.missing(state) if budget.depth else ""
            if missing:
                drafts[place] = Draft.empty(self.name, missing)
            elif budget.depth:
                depth = min(budget.depth, self.head.depth)
                nodes = budget.nodes if budget.nodes > budget.depth else depth
                reason = f"the head looks {depth} tokens ahead" if depth < budget.depth else ""
                lines.append(Line(state, place, depth, nodes, budget.prices, reason))
        trees = [line for line in lines if line.nodes > line.depth and not noise.keep_law]
        chains = [line for line in lines if line.nodes == line.depth or noise.keep_law]
        for some, draw in ((chains, self.chains), (trees, self.trees)):
            for line, draft in zip(some, draw(some, noise) if some else (), strict=True):
                drafts[line.place] = draft
        return drafts

    # Drafts.

    def roots(self, lines: Sequence[Line]) -> Tensor:
        return uploaded([line.seq.tokens[-1] for line in lines], self.device)

    def hidden(self, lines: Sequence[Line]) -> Tensor:
        """What the target feeds to its output matrix [B, H], at the last position it has read."""
        hidden: Tensor = self.norm(torch.stack([line.state.row for line in lines]))
        return hidden

    def chains(self, lines: Sequence[Line], noise: Noise) -> list[Draft]:
        """One pass per level over all sequences; siblings, if any, are fixed before anything is drawn."""
        edited = any(line.state.ranking.names_tokens for line in lines)
        read = edited or self.device.type == "cpu"          # elsewhere a look at a token would wait for the device
        width = max(2, 1 + max(line.extra[0] for line in lines))
        levels: list[Picks] = []
        live, row, tokens = list(lines), 0, self.roots(lines)
        carry = self.begin(lines, max(line.depth for line in lines))
        while live:
            level = len(levels)
            logits, carry = self.step(level, carry, tokens)
            picks = pick(logits, [line.state.ranking.rows(line.path) for line in live], [line.seq for line in live],
                         [len(line.seq.tokens) + level for line in live], noise, width, self.head.ids, self.vocab_size)
            levels.append(picks)
            host = picks.tokens[:, 0].tolist() if read else [-1] * len(live)
            dead = (picks.values[:, 0] == -math.inf).tolist() if edited else [False] * len(live)
            going = [i for i, line in enumerate(live) if self._grown(line, row + i, host[i], dead[i], level)]
            row += len(live)
            tokens = picks.tokens[:, 0]
            if going and len(going) < len(live):
                rows = uploaded(going, self.device)
                carry, tokens = self.keep(carry, rows), tokens[rows]
            live = [live[i] for i in going]
        return collected(lines, levels, self.vocab_size, self.name)

    def _grown(self, line: Line, row: int, token: int, dead: bool, level: int) -> bool:
        """Add a level to a chain; whether it goes on."""
        if dead:
            line.reason = NOTHING
            return False
        line.rows.append(row)
        line.path += (token,)
        if level + 1 == line.depth:
            return False
        if token in line.seq.end_ids:
            line.reason = "the draft ends the text"
            return False
        return True

    def trees(self, lines: Sequence[Line], noise: Noise) -> list[Draft]:
        """One pass per level over the frontiers of all sequences; what is worth its node is known after the noise."""
        deepest = max(line.depth for line in lines)
        history = any(line.state.ranking.looks_back for line in lines)
        growth = Growth([line.depth for line in lines], [line.nodes for line in lines], [line.seq.sampling.greedy for line in lines],
                        [line.seq.end_ids for line in lines], self.margins,
                        [self.width(line) for line in lines], [line.prices for line in lines])
        paths: list[list[Path]] = [[()] for _ in lines]
        carry, tokens = self.begin(lines, deepest), self.roots(lines)[:, None]
        for level in range(deepest):
            picks, carry = self.candidates(lines, level, carry, tokens, paths, noise)
            shape = (*tokens.shape, -1)
            front = growth.grow(*picks.offered(shape))
            if front is None:
                break
            slots = torch.arange(len(lines), device=self.device)[:, None] * tokens.shape[1] + front.parents
            carry, tokens = self.follow(carry, slots.flatten()), front.tokens
            paths = longer(paths, front) if history else [[()] * tokens.shape[1]] * len(lines)
        for i, line in enumerate(lines):
            line.state.tree, line.state.length = (growth, i), len(line.seq.tokens)
        drafts = zip(growth.finish(self.name), lines, strict=True)
        return [replace(draft, reason=line.reason if len(draft) else NOTHING) for draft, line in drafts]

    def candidates(self, lines: Sequence[Line], level: int, carry: Any, tokens: Tensor, paths: Sequence[Sequence[Path]],
                   noise: Noise) -> tuple[Picks, Any]:
        """The best tokens after every node of the frontier, tokens [B, F]: picks of B · F rows, and what the next level reads."""
        logits, carry = self.step(level, carry, tokens.flatten())
        return pick(logits, [line.state.ranking.rows(*paths[i]) for i, line in enumerate(lines)], [line.seq for line in lines],
                    [len(line.seq.tokens) + level for line in lines], noise, CANDIDATES, self.head.ids, self.vocab_size, shares=True), carry
