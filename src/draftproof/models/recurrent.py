"""Tier 3: a model with a recurrent state (linear attention, state spaces, and hybrids of these with attention). Chains only.

Such a state has no positions that could be cut off, so a copy of it is kept while guesses are scored. After a rejection
the copy comes back, and the tokens between it and the end of the text are fed again at the head of the next pass, of which
they are a few more rows; a pass of their own would cost a round. At most REPLAY tokens are ever owed this way.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, LinearAttentionCacheLayerMixin

from ..errors import LoadError
from ..types import Draft, Scores
from .own import ADVICE, CACHES, CHUNK, OwnCacheTarget, OwnSlot, cache_name, difference
from .passes import inferring
from .selftest import differ_far, invisible
from .taps import rows_at, stacked

REPLAY = 16  # tokens: more rows than this at the head of a pass would cost more than a fresh copy of the state
ROWS = 12  # tokens that the check at load decodes in several ways
STATES = (Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin)


@dataclass(frozen=True, slots=True)
class Mark:
    """A copy of the cache as it was after `seen` tokens of the text."""

    seen: int
    cache: Any


START = Mark(0, None)


@dataclass(slots=True, eq=False)
class RecurrentSlot(OwnSlot):
    """seen: tokens that the state has taken in, guesses included. Fewer than `length`: the next pass begins with the rest."""

    seen: int = 0
    marks: list[Mark] = field(default_factory=lambda: [START])  # at most two, the older first

    def forget(self) -> None:
        """Drop the state; the text rebuilds it."""
        self.cache, self.seen, self.marks = None, 0, [START]


class RecurrentTarget(OwnCacheTarget[RecurrentSlot]):
    """Implements `Target` over the cache that the model itself makes.

    Call `check` before use: whether scoring several tokens is right depends on the family. `whole_tiles` asks that plain
    decoding takes the path that scoring takes, by a second row that nobody reads; it is granted only if `measure` finds
    that this makes speculation invisible to the bit, since taking that row back again is not free.
    """

    slot = RecurrentSlot

    def __init__(self, model: nn.Module, *, whole_tiles: bool, **shared: Any) -> None:
        super().__init__(model, whole_tiles=False, **shared)
        self._tiles_wanted = whole_tiles
        name = cache_name(model)
        if name is None:
            raise LoadError(f"{self._name()} takes none of {', '.join(CACHES)}; expected a cache that goes from pass to pass; {ADVICE}")
        takes = inspect.signature(model.forward).parameters
        self._cache_name = name
        self._takes_positions, self._takes_keep = "position_ids" in takes, "logits_to_keep" in takes

    @inferring
    def check(self) -> str:
        """What was measured: decoding token by token, scoring several, and scoring after a rejection give the logits of one pass.

        Raises LoadError where they do not: not every family reads its state when several tokens follow a cached prefix.
        Medians over rows of ‖a − b‖ / ‖b − mean b‖; right paths differ by rounding, as decoding token by token does.
        """
        before = max(1, min(REPLAY + 4, self.context - ROWS - 1))
        text = self._text(before + ROWS, seed=20)
        try:
            whole = self._logits(text, 0, before + ROWS)[before:]
            per_token, state = _bytes(self.slots[-1])
            alone = difference(self._logits(text, before, 1), whole)
            several = difference(self._logits(text, before, 3), whole)
            again = difference(self._logits(text, before, 3, guess=(text + 1) % self.vocab_size), whole)
        except LoadError:
            raise
        except Exception as error:
            raise LoadError(f"{self._name()} cannot decode from a cached prefix ({type(error).__name__}: {error}); {ADVICE}") from error
        finally:
            for slot in list(self.slots):
                self.close(slot)
        eps = torch.finfo(next(self.model.parameters()).dtype).eps
        if alone > (1e-3 if eps < 1e-5 else 0.2):
            raise LoadError(
                f"{self._name()}: decoding behind a cached prefix gives other logits than one pass ({alone:.0e} off, relative); {ADVICE}"
            )
        for name, found in (("scoring several tokens after a cached prefix", several), ("a pass after a rejected guess", again)):
            if not found <= max(8 * alone, 4 * eps):
                raise LoadError(
                    f"{self._name()}: {name} gives other logits than one pass over the whole text (relative difference {found:.0e}; "
                    f"token by token {alone:.0e}), so no draft can be scored; {ADVICE}"
                )
        self.facts = replace(self.facts, cache_bytes_per_token=per_token)
        return (
            f"{state:,} bytes a sequence; scoring several tokens ({several:.0e} off) and going back after a rejection ({again:.0e} off) "
            "give the logits of one pass"
        )

    def _text(self, length: int, seed: int) -> Tensor:
        return torch.randint(0, self.vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).to(self.device)

    def _logits(self, text: Tensor, before: int, width: int, guess: Tensor | None = None) -> Tensor:
        """Logits after each token of text[before:], scored `width` at a time, each time after a wrong `guess` was taken back."""
        slot, rows = self.open([]), []
        if before:
            self.extend([slot], [text[:before]])
        for at in range(before, text.shape[0], width):
            root = text[at : at + 1]
            if guess is not None:
                self.score([slot], root, [Draft.chain(guess[at : at + width])])
                self.rewind(slot, ())
                self.truncate(slot, at)
            draft = Draft.chain(text[at + 1 : at + width])
            rows.append(self.score([slot], root, [draft]).logits)
            self.rewind(slot, range(len(draft)))
        return torch.cat(rows)

    def measure(self, page_tokens: int, chunk: int) -> tuple[bool, str]:
        """Law 2 as `selftest.invisible` measures it, and on the state too. Decides `whole_tiles`.

        Rounded logits can hide for many rows that the state behind them took another course.
        """
        self.whole_tiles = self._tiles_wanted
        passed, reason = invisible(self, page_tokens, chunk)
        if passed and not self._states_agree(page_tokens):
            passed, reason = False, "no: the same tokens leave another state when they are scored 5 wide"
        elif passed and (far := differ_far(self)):
            passed, reason = False, far
        if self.whole_tiles and not passed:
            self.whole_tiles = False
            reason += "; a state keeps the rounding of how its tokens were grouped into passes, so plain decoding takes rows singly"
        return passed, reason

    @inferring
    def _states_agree(self, tokens: int) -> bool:
        text = self._text(min(max(tokens, 256), self.context), seed=21)
        before, end = text.shape[0] // 4, text.shape[0] - 4
        states = []
        for width in (1, 5):
            self._logits(text[:end], before, width)
            self.extend(self.slots[-1:], [text[end:]])
            states.append(list(_tensors(self.slots[-1].cache)))
        for slot in list(self.slots):
            self.close(slot)
        return all(torch.equal(a, b) for a, b in zip(*states, strict=True))

    def _name(self) -> str:
        return f"{self.facts.name} ({self.parts.config.get_text_config().model_type}, recurrent)"

    def close(self, slot: RecurrentSlot) -> None:
        super().close(slot)
        slot.forget()

    @inferring
    def _settle(self, slot: RecurrentSlot) -> None:
        """Go back to the last copy that has seen no more than the text."""
        if slot.seen > slot.length:
            slot.marks = [m for m in slot.marks if m.seen <= slot.length] or [START]
            slot.cache, slot.seen = restored(slot.cache, slot.marks[-1]), slot.marks[-1].seen

    @inferring
    def extend(self, slots: Sequence[RecurrentSlot], tokens: Sequence[Tensor]) -> Scores:
        last, taps = [], []
        for logits, tapped in self._each(slots, tokens, keep=1):
            last.append(logits[-1])
            taps.append(tapped)
        for slot, ids in zip(slots, tokens, strict=True):
            slot.tokens += ids.tolist()
            self._settle(slot)
        return Scores(torch.stack(last), tuple(range(len(slots) + 1)), stacked(taps))

    @inferring
    def score(self, slots: Sequence[RecurrentSlot], roots: Tensor, drafts: Sequence[Draft]) -> Scores:
        assert all(d.is_chain for d in drafts), "a recurrent state scores chains; the engine asks for trees only where `trees` is true"
        news = [torch.cat([roots[i : i + 1].to(self.device), draft.tokens.to(self.device)]) for i, draft in enumerate(drafts)]
        passes = self._each(slots, news, keep=None)
        starts = [0]
        for slot, root, draft in zip(slots, roots.tolist(), drafts, strict=True):
            slot.tokens.append(root)
            slot.nodes = draft.tokens.tolist()
            starts.append(starts[-1] + len(draft) + 1)
        return Scores(torch.cat([logits for logits, _ in passes]), tuple(starts), stacked([tapped for _, tapped in passes]))

    def _each(self, slots: Sequence[RecurrentSlot], news: Sequence[Tensor], keep: int | None) -> list[tuple[Tensor, Mapping[int, Tensor]]]:
        """Logits of the last `keep` rows (None: all) and taps of all rows of `news`, slot by slot. On failure the texts are as before."""
        try:
            return [self._run(slot, ids, keep or ids.shape[0]) for slot, ids in zip(slots, news, strict=True)]
        except BaseException:
            for slot in slots:
                slot.forget()
            raise

    def _run(self, slot: RecurrentSlot, new: Tensor, keep: int) -> tuple[Tensor, Mapping[int, Tensor]]:
        self._mark(slot)
        ids, owed = new.to(self.device), slot.length - slot.seen
        if owed:
            ids = torch.cat([torch.tensor(slot.tokens[slot.seen :], device=self.device), ids])
        junk = int(self.whole_tiles and ids.shape[0] == 1 and slot.length + 1 < self.context)
        logits = self._forward(slot, ids.repeat(2) if junk else ids, keep + junk)
        rows = slice(owed, owed + new.shape[0])
        return logits[: logits.shape[0] - junk], rows_at(self._taps.rows, rows)

    def _mark(self, slot: RecurrentSlot) -> None:
        """Pay what is owed and copy the state, where the last copy lies too far behind the end of the text."""
        if slot.length - slot.marks[-1].seen <= REPLAY:
            return
        while slot.seen < slot.length:
            end = slot.length if slot.length - slot.seen <= CHUNK + 1 else slot.seen + CHUNK  # no pass of a single row
            self._forward(slot, torch.tensor(slot.tokens[slot.seen : end], device=self.device), 1)
        slot.marks = [slot.marks[-1], mark(slot.cache, slot.seen)]

    def _forward(self, slot: RecurrentSlot, ids: Tensor, keep: int) -> Tensor:
        """One pass over `ids` [n] behind what the state has seen; logits [keep, V] of the last rows."""
        count = ids.shape[0]
        more: dict[str, Any] = {self._cache_name: slot.cache, "use_cache": True}
        if self._takes_positions:
            more["position_ids"] = torch.arange(slot.seen, slot.seen + count, device=self.device)[None]
        if self._takes_keep:
            more["logits_to_keep"] = keep
        out = self.model(input_ids=ids[None], **more)
        slot.cache = getattr(out, self._cache_name, None)
        if slot.cache is None:
            raise LoadError(f"{self._name()} hands back no {self._cache_name}; expected its cache in the output; {ADVICE}")
        slot.seen += count
        logits: Tensor = out.logits[0, -keep:]
        return logits


# Copies of a cache, whatever it consists of. Attention layers append keys and values by making new tensors, so the copy
# of one that keeps every key needs none of them: going back cuts what stands there now.


def mark(cache: Any, seen: int) -> Mark:
    """A copy of `cache`, which has taken in `seen` tokens, to go back to with `restored`, any number of times."""
    made = _copied(cache)
    for layer in filter(_grows, _layers(made)):
        layer.keys = layer.values = None
    return Mark(seen, made)


def restored(cache: Any, to: Mark) -> Any:
    """The cache as it was at the mark; `cache` is what grew out of it, and is of no use afterwards."""
    back = _copied(to.cache)
    for layer, now in zip(_layers(back), _layers(cache), strict=False):
        if _grows(layer) and now.keys is not None:
            layer.keys, layer.values = now.keys[..., : to.seen, :], now.values[..., : to.seen, :]
    return back


def _bytes(slot: RecurrentSlot) -> tuple[int, int]:
    """Bytes per token of the layers that keep every key, and of all the rest however long the text."""
    every, rest = (sum(t.numel() * t.element_size() for t in _tensors(c)) for c in (slot.cache, mark(slot.cache, slot.seen).cache))
    return (every - rest) // slot.seen, rest


def _layers(cache: Any) -> Sequence[Any]:
    return getattr(cache, "layers", ())


def _grows(layer: Any) -> bool:
    return isinstance(layer, DynamicLayer) and not layer.is_sliding


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    parts = vars(value) if isinstance(value, STATES) else value
    if isinstance(parts, list | tuple | dict):
        for part in parts.values() if isinstance(parts, dict) else parts:
            yield from _tensors(part)


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, list | tuple):
        return type(value)(_copied(v) for v in value)
    if isinstance(value, dict):
        return {k: _copied(v) for k, v in value.items()}
    if not isinstance(value, STATES):
        return value
    made = copy(value)
    appended = ("keys", "values") if isinstance(value, DynamicLayer) else ()
    for name, held in vars(value).items():
        if name not in appended:
            setattr(made, name, _copied(held))
    return made
