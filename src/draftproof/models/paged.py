"""Tier 1: a transformers model that attends through our own pages. Chains and trees, many sequences in one pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor, nn

from .. import native
from ..core.tree import depths as levels
from ..core.tree import path as path_to
from ..core.upload import rows_of, sent, uploaded
from ..errors import OptionError
from ..types import Draft, Scores
from .attention import TILE, compiled
from .cache import PagedSlot, PagePool
from .fused_pass import FusedPass
from .passes import Pass, Path, inferring
from .states import read_again
from .taps import Taps, rows_at
from .target import LoadFacts, Target, TargetParts
from .tokenizer import Tokenizer

NOTHING = Draft.empty()


def paged_of(target: Target, drafter: str, use: str) -> PagedTarget:
    """The target, for a drafter that uses its pages in this way. Raises OptionError where it has none of its own."""
    if not isinstance(target, PagedTarget):
        reasons = target.facts.reasons
        why = reasons.get("tensor parallel") or reasons.get("tier", "it has no layers")
        raise OptionError(f"{drafter} needs a target of tier 1 in one process, whose {use}; {target.facts.name} is of tier "
                          f"{target.facts.tier} ({why}); use another drafter")
    return target


def _each(roots: Tensor) -> Sequence[Tensor]:
    """Every one of them, [1]."""
    return (roots,) if len(roots) == 1 else torch.split(roots, 1)


class PagedTarget:
    """Implements `Target`. `whole_tiles` keeps Law 2: no product sees one row, no attention call fewer queries than a tile; where every
    kernel is ours, rows stand alone anyway."""

    trees = True

    def __init__(
        self,
        model: nn.Module,
        *,
        vocab_size: int,
        context: int,
        page_tokens: int,
        cache_tokens: int,
        whole_tiles: bool,
        facts: LoadFacts,
        parts: TargetParts,
        tokenizer: Tokenizer | None,
        defaults: dict[str, float],
        eos_ids: tuple[int, ...],
        fused: FusedPass | None = None,
        in_levels: bool = False,
    ) -> None:
        """fused: the slim forward pass that stands for the model's own. in_levels: keys and values are kept in eight bits."""
        self.model, self.vocab_size, self.context = model, vocab_size, context
        self.whole_tiles = whole_tiles and not (fused is not None and fused.rows_alone())
        self.facts, self.parts, self.tokenizer, self.defaults, self.eos_ids = facts, parts, tokenizer, defaults, eos_ids
        self.device = next(model.parameters()).device
        self.query_tile = TILE if whole_tiles and not compiled(self.device, next(model.parameters()).dtype) else 1
        self.states = None if fused is None else fused.states
        self.pool = PagePool(page_tokens, cache_tokens, self.device, self.states, facts.cache_bytes_per_token, in_levels)
        self.slots: list[PagedSlot] = []
        self.fused = fused
        self.joint = fused is not None and fused.compiled()  # the kernels read what paths have in common in the first one's pages
        self._taps: Taps | FusedPass = fused or Taps(parts.layers)

    def set_taps(self, layers: Sequence[int]) -> None:
        self._taps.set(layers)

    # Places

    def open(self, tokens: Sequence[int], tenant: str = "", room: int = 0) -> PagedSlot:
        pages = self.pool.find(tokens, tenant)
        slot = PagedSlot(tenant, list(tokens[: len(pages) * self.pool.page_tokens]), pages, shared=len(pages))
        try:
            slot.state = self.pool.state(pages)
            self._reach(slot, len(tokens) + room)
        except BaseException:
            for page in slot.pages:
                self.pool.release(page)
            raise
        self.slots.append(slot)
        return slot

    def adopt(self, slot: PagedSlot, tokens: Sequence[int]) -> int:
        """See `Adopts`."""
        assert slot.length == slot.shared * self.pool.page_tokens, "a slot has written nothing of its own"
        pages = self.pool.find(tokens, slot.tenant)
        given_back = slot.pages[: len(pages)] if len(pages) >= slot.shared else pages  # the mark that it began with may be gone
        for page in given_back:
            self.pool.release(page)
        if given_back is not pages:
            slot.pages[: len(pages)], slot.shared = pages, len(pages)
            slot.held = list(tokens[: len(pages) * self.pool.page_tokens])
            slot.state = self.pool.state(pages)
        return 0 if slot.state is None else len(self.pool.alike(tokens, slot.tenant)) * self.pool.page_tokens

    def fits(self, tokens: int) -> bool:
        return -(-tokens // self.pool.page_tokens) <= self.pool.available()

    def filled(self) -> float:
        return 1 - self.pool.available() / (self.pool.capacity - 1)

    def truncate(self, slot: PagedSlot, length: int) -> None:
        assert slot.nodes is None and length <= slot.length, "a slot only shrinks, between passes"
        if length < slot.shared * self.pool.page_tokens:
            self.pool.part(slot, length)
        slot.cut(length)

    def close(self, slot: PagedSlot) -> None:
        if slot.closed:
            return
        self._drop_tails(slot)
        if slot.state is None or slot.state.length == slot.length:
            self.pool.publish(slot)
        for page in slot.pages:
            self.pool.release(page)
        slot.pages, slot.closed, slot.state = [], True, None
        self.slots.remove(slot)

    def _reach(self, slot: PagedSlot, tokens: int) -> None:
        """Own pages for so many tokens."""
        while len(slot.pages) * self.pool.page_tokens < tokens:
            slot.pages.append(self.pool.take())

    def _drop_tails(self, slot: PagedSlot) -> None:
        for _, pages in slot.tails:
            for page in pages:
                self.pool.release(page)
        slot.tails = []

    # Passes

    @inferring
    def extend(self, slots: Sequence[PagedSlot], tokens: Sequence[Tensor]) -> Scores:
        drafts, sure = [Draft.chain(ids[1:]) for ids in tokens], [len(ids) for ids in tokens]
        if len(slots) > 1:
            ends = list(accumulate(sure))
            logits = self._run(slots, drafts, torch.stack([ids[0] for ids in tokens]), [end - 1 for end in ends], sure)
        elif not self.whole_tiles:
            logits = self._run(slots, drafts, tokens[0][:1], [len(drafts[0])], sure)
        elif len(drafts[0]) == 0:  # a second row that nobody reads
            logits = self._run(slots, [Draft.chain(tokens[0])], tokens[0], None, sure)[:1]
        else:
            logits = self._run(slots, drafts, tokens[0][:1], [len(drafts[0]) - 1, len(drafts[0])], sure)[1:]
        for slot, ids in zip(slots, tokens, strict=True):
            slot.add(ids)
            if slot.state is not None:
                slot.state.keep(range(len(ids)))
            if slot.length >= (slot.shared + 1) * self.pool.page_tokens:
                self.pool.publish(slot)
        rows = sum(map(len, tokens))
        return Scores(logits, tuple(range(len(slots) + 1)), self._tapped(rows))

    @inferring
    def score(self, slots: Sequence[PagedSlot], roots: Tensor, drafts: Sequence[Draft]) -> Scores:
        run, rows = list(drafts), sum(len(d) + 1 for d in drafts)
        if self.whole_tiles and rows == 1:  # plain decoding of one sequence: a second row that nobody reads
            run = [Draft.chain(roots)]
        logits = self._run(slots, run, roots, None)
        if logits.shape[0] > rows:
            logits = logits[:rows]
        starts = [0]
        for slot, root, draft in zip(slots, _each(roots), drafts, strict=True):
            self._take(slot, root, draft.tokens)
            starts.append(starts[-1] + len(draft) + 1)
        return Scores(logits, tuple(starts), self._tapped(rows))

    @inferring
    def begin(self, slots: Sequence[PagedSlot], roots: Tensor) -> Scores | None:
        """See `Begins`."""
        if self.whole_tiles and len(slots) == 1:
            return None
        for slot in slots:
            self.rewind(slot, ())
        logits = self._run(slots, [NOTHING] * len(slots), roots, None)
        return Scores(logits[: len(slots)], tuple(range(len(slots) + 1)), self._tapped(len(slots)))

    def settle(self, slots: Sequence[PagedSlot], roots: Tensor) -> None:
        """See `Begins`."""
        for slot, root in zip(slots, _each(roots), strict=True):
            self._take(slot, root, NOTHING.tokens)

    def _take(self, slot: PagedSlot, root: Tensor, nodes: Tensor) -> None:
        """What a pass scored."""
        slot.add(root)
        slot.nodes = nodes
        if slot.state is not None:
            slot.state.keep((0,))

    def _tapped(self, rows: int) -> Mapping[int, Tensor]:
        """Of the last pass; the next one keeps what it finds elsewhere."""
        return rows_at(self._taps.rows, slice(rows))

    def rewind(self, slot: PagedSlot, kept: Sequence[int]) -> None:
        if kept and slot.tails:
            self._adopt_tail(slot, kept[-1])
        if kept and slot.nodes is not None:
            slot.add(rows_of(slot.nodes, kept))
            if slot.state is not None:
                slot.state.keep([1 + node for node in kept])
        self._drop_tails(slot)
        slot.nodes = None

    def _adopt_tail(self, slot: PagedSlot, node: int) -> None:
        """Make the winner's last pages the slot's own (the first path writes into the slot's own pages); of pages without what the
        paths have in common, the guesses' keys alone."""
        size = self.pool.page_tokens
        for path, pages in slot.tails:
            if node in path:
                first = (slot.length - 1) // size  # the root's page; its key is already in the text
                last = len(pages)
                if self.joint:
                    starts = range(first * size, (first + last) * size, size)
                    self.pool.copy([
                        (page, own, max(slot.length - start, 0), min(slot.length + len(path) - start, size))
                        for page, own, start in zip(pages, slot.pages[first : first + last], starts, strict=True)])
                else:
                    slot.pages[first : first + last], pages[:] = pages[:], slot.pages[first : first + last]
                return

    def _run(self, slots: Sequence[PagedSlot], drafts: Sequence[Draft], roots: Tensor, keep: list[int] | None,
             sure: Sequence[int] = ()) -> Tensor:
        """One forward pass; logits of the rows in `keep`, or of all rows. sure: how many of each one's rows its slot is given for good;
        empty: they are guessed. On failure the slots are as before."""
        ran = False
        try:
            read_again(self, slots)
            p = self._plan(slots, drafts, roots, sure)
            ran = True
            logits = self._pass(p, keep)
            for slot, walk in zip(slots, p.walks, strict=False):
                assert slot.state is not None
                slot.state.passed(walk)
        except BaseException:
            for slot in slots:
                self._drop_tails(slot)
                if ran and slot.state is not None:  # some layers, or texts, may have gone further than others
                    slot.state.forget()
            raise
        return logits

    def _pass(self, p: Pass, keep: list[int] | None) -> Tensor:
        if self.fused is not None:
            return self.fused(p, self.pool, keep)
        p = p.placed()
        more = {} if keep is None else {"logits_to_keep": uploaded(keep, self.device)}
        out = self.model(
            input_ids=p.ids, position_ids=p.positions, use_cache=False, draftproof_pass=p, draftproof_pool=self.pool, **more
        )
        logits: Tensor = out.logits[0]
        return logits

    def _plan(self, slots: Sequence[PagedSlot], drafts: Sequence[Draft], roots: Tensor, sure: Sequence[int] = ()) -> Pass:
        if len(slots) == 1 and drafts[0].is_chain:
            return self._plan_chain(slots[0], drafts[0], roots, sure)
        size = self.pool.page_tokens
        positions: list[int] = []
        paths: list[Path] = []
        write_to: list[int] = []
        write_from: list[int] = []
        copies: list[tuple[int, int, int, int]] = []
        walks: list[native.Walk] = []
        for number, (slot, draft) in enumerate(zip(slots, drafts, strict=True)):
            assert slot.nodes is None and not slot.closed, "rewind before the next pass"
            first, base = len(positions), slot.length
            if draft.is_chain:
                rows = range(first, first + len(draft) + 1)
                self._reach(slot, base + len(rows))
                positions += range(base, base + len(rows))
                paths.append(Path(slot.pages, rows))
                write_to += self._places(slot, base, base + len(rows))
                write_from += rows
                if slot.state is not None:
                    walks.append(slot.state.walk([rows], sure[number] if sure else 0))
                continue
            depths = [0, *levels(draft.parents)]
            self._reach(slot, base + max(depths) + 1)
            positions += [base + d for d in depths]
            lines = []
            for pages, along, mine, common in self._tree_paths(slot, draft, base, max(depths), copies):
                lines.append([first + r for r in along])
                paths.append(Path(pages, [first + r for r in mine], common))
                write_to += [pages[(base + depths[r]) // size] * size + (base + depths[r]) % size for r in along]
                write_from += lines[-1]
            if slot.state is not None:
                walks.append(slot.state.walk(lines, 0))
        self.pool.copy(copies)
        ids = self._ids(roots, drafts)
        return Pass(
            ids,
            self._readable(positions),
            positions,
            torch.tensor(write_to),
            None if write_from == list(range(len(positions))) else torch.tensor(write_from),
            paths,
            size,
            self.query_tile,
            walks=walks,
        )

    def _plan_chain(self, slot: PagedSlot, draft: Draft, root: Tensor, sure: Sequence[int]) -> Pass:
        """`_plan` for one chain, the shape of most passes."""
        assert slot.nodes is None and not slot.closed, "rewind before the next pass"
        base, rows = slot.length, len(draft) + 1
        self._reach(slot, base + rows)
        positions, places = list(range(base, base + rows)), self._places(slot, base, base + rows)
        write_to = slice(places.start, places.stop) if isinstance(places, range) else torch.tensor(places)
        ids, paths = self._ids(root, [draft]), [Path(slot.pages, range(rows))]
        walks = () if slot.state is None else (slot.state.walk([range(rows)], sure[0] if sure else 0),)
        return Pass(ids, self._readable(positions), positions, write_to, None, paths, self.pool.page_tokens, self.query_tile, walks=walks)

    def _readable(self, positions: list[int]) -> list[int]:
        """As the model reads them: the row that nobody reads may stand behind the context."""
        return positions if max(positions) < self.context else [min(t, self.context - 1) for t in positions]

    def _places(self, slot: PagedSlot, start: int, stop: int) -> Sequence[int]:
        """The storage rows of these positions; a range where they lie in one page."""
        size = self.pool.page_tokens
        if start // size == (stop - 1) // size:
            first = slot.pages[start // size] * size + start % size
            return range(first, first + stop - start)
        return [slot.pages[t // size] * size + t % size for t in range(start, stop)]

    def _ids(self, roots: Tensor, drafts: Sequence[Draft]) -> Tensor:
        """Each root and its nodes, [1, rows] on the model's device. They may come from the host or any device; from the host alone they
        move together."""
        if roots.is_cpu and all(draft.tokens.is_cpu for draft in drafts):
            rows = [row for root, draft in zip(roots.tolist(), drafts, strict=True) for row in (root, *draft.tokens.tolist())]
            return sent(torch.from_numpy(np.array([rows], np.int64)), self.device)
        if not any(map(len, drafts)):
            return sent(roots, self.device)[None]
        parts: list[Tensor] = []
        for root, draft in zip(_each(sent(roots, self.device)), drafts, strict=True):
            parts += (root, sent(draft.tokens, self.device)) if len(draft) else (root,)
        return torch.cat(parts)[None]

    def _tree_paths(
        self, slot: PagedSlot, draft: Draft, base: int, depth: int, copies: list[tuple[int, int, int, int]]
    ) -> Iterator[tuple[list[int], list[int], list[int], int]]:
        """(page table, rows whose keys lie on the path, rows that attend through it, keys read in the path before it) per leaf. Row 0 is
        the root, row 1+i node i.

        The first leaf writes into the slot's own pages, every other one into pages of its own from the root's on, with `copies` (for the
        pool) of what lies before the root there, unless that is read in common.
        """
        size = self.pool.page_tokens
        head, end = base // size, (base + depth) // size + 1
        start = base % size // native.CHUNK * native.CHUNK if self.joint else 0
        inner = set(draft.parents)
        served: set[int] = set()
        for leaf in range(len(draft)):
            if leaf in inner:
                continue
            nodes = path_to(draft.parents, leaf)
            rows = [0, *(node + 1 for node in nodes)]
            pages = slot.pages
            if served:
                tail: list[int] = []
                slot.tails.append((nodes, tail))  # registered before it is filled: a failure gives it back
                for _ in range(head, end):
                    tail.append(self.pool.take())
                copies.append((slot.pages[head], tail[0], start, base % size))
                pages = [*slot.pages[:head], *tail]
            mine = [r for r in rows if r not in served]
            common = head * size + start if served else 0
            served.update(mine)
            yield pages, rows, mine, common

    def check(self) -> None:
        """Audit the cache; for tests and idle moments."""
        self.pool.check(self.slots)
