"""`model` where vocabularies share too little: the draft model writes on, and the target's tokenizer reads what it wrote.

    text → drafter's ids → its likeliest continuation → string → target's ids

("string-level exact match" of Timor et al., arXiv 2502.05202.)

A guess has no law and no noise: it is a point mass, exact under every rule. The boundary is the delicate place. What is
guessed must continue the ids that the target has really written, not those that its tokenizer would have written: the last
words are tokenised again together with the guess, and only if the text's own ids come out is what follows them offered;
otherwise the guess is spelled on from where the text ends.
"""

from __future__ import annotations

import codecs
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import CacheFull
from ..models.target import Slot, Target
from ..types import Budget, Commit, Draft, SequenceView, Signals
from .base import Needs, Noise
from .vocabulary import Check, Spelling, Words, counterpart

OPEN = 256          # characters at the end of the text that are tokenised again as it grows; before them it is closed at a space
OVERLAP, FARTHEST = 8, 64       # how many tokens back the text is tokenised again together with a guess, at least and at most
SLACK = 1.25        # room taken for the growth of a text, in what its tokens have needed so far
SEAM = re.compile(r"(?<=\S)\s")


def _utf8() -> Any:
    return codecs.getincrementaldecoder("utf-8")("replace")


@dataclass(slots=True)
class StringState:
    """One sequence. The text in the drafter's ids is closed + those of `open`; `held` is what the slot holds."""

    seq: SequenceView
    decoder: Any = field(default_factory=_utf8)
    begun: bool = False             # whether the text has more than special tokens
    read: int = 0                   # tokens of the text that went through the decoder, which keeps an unfinished character
    closed: list[int] = field(default_factory=list)
    open: str = ""
    own: list[int] = field(default_factory=list)
    slot: Slot | None = None
    held: list[int] = field(default_factory=list)
    limit: int = 0                  # own tokens there is room for
    silent: str = ""                # why it can never draft again


@dataclass(slots=True)
class _Line:
    """One sequence within one `propose`."""

    state: StringState
    slot: Slot
    place: int
    budget: Budget
    steps: int
    reason: str
    wrote: list[int] = field(default_factory=list)


class StringLevel:
    """A draft model behind the `Target` protocol, read and written as strings. Chains only. It writes what it finds likeliest;
    the request's options are the target's to apply."""

    needs = Needs()
    name = "model"

    def __init__(self, lm: Target, target: Spelling, prefill_chunk: int = 512) -> None:
        self.lm, self.chunk, self.target = lm, prefill_chunk, target
        self.words = Words.of(lm)
        self.spelling = Spelling.of(self.words)
        self.checks: list[Check] = []

    def open(self, seq: SequenceView, signals: Signals | None) -> StringState:
        return StringState(seq)

    def close(self, state: StringState) -> None:
        slot, state.slot, state.held = state.slot, None, []
        state.silent = state.silent or "the sequence is closed"
        if slot is not None:
            self.lm.close(slot)

    def observe(self, states: Sequence[StringState], commits: Sequence[Commit], signals: Sequence[Signals | None]) -> None:
        for state in states:
            self._follow(state)

    def propose(self, states: Sequence[StringState], budgets: Sequence[Budget], noise: Noise) -> list[Draft]:
        drafts = [Draft.empty(self.name) for _ in states]
        lines: list[_Line] = []
        for place, (state, budget) in enumerate(zip(states, budgets, strict=True)):
            if budget.depth:
                self._follow(state)
                steps, reason = self._grant(state, budget.depth)
                if steps and state.slot is not None:
                    lines.append(_Line(state, state.slot, place, budget, steps, reason))
                else:
                    drafts[place] = Draft.empty(self.name, reason)
        try:
            self._write(lines)
        except CacheFull as full:
            for line in lines:
                line.wrote, line.reason = [], f"no room in the drafter's cache: {full}"
        finally:
            for line in lines:
                self._keep(line.state, line.slot)
        for line in lines:
            drafts[line.place] = self._draft(line)
        return drafts

    # The text in the drafter's tokens

    def _follow(self, state: StringState) -> None:
        """Read what is new in the text; forget what the slot holds beyond it."""
        if state.silent or state.read == len(state.seq.tokens):
            return
        for token in state.seq.tokens[state.read:]:
            content = self.target.contents.get(token, b"")
            if isinstance(content, str):
                said = counterpart(content, self.target.words, self.words)
                content = said.encode() if isinstance(said, str) else said
            elif not state.begun:
                state.begun, content = True, self._first(content)
            state.open += state.decoder.decode(content)
        state.read = len(state.seq.tokens)
        while len(state.open) > 2 * OPEN:
            seams = [match.start() for match in SEAM.finditer(state.open, 0, len(state.open) - OPEN)]
            cut = seams[-1] if seams else len(state.open) - OPEN
            state.closed += self._ids(state.open[:cut], not state.closed)
            state.open = state.open[cut:]
        state.own = state.closed + self._ids(state.open, not state.closed)
        if state.slot is not None:
            self._keep(state, state.slot)

    def _ids(self, text: str, first: bool) -> list[int]:
        if not first:
            return self.words.inside(text)
        assert self.words.tokenizer is not None
        ids, front = self.words.tokenizer.encode_plain(text), self.words.front
        return ids if ids[:len(front)] == front else [*front, *ids]

    def _keep(self, state: StringState, slot: Slot) -> None:
        """Of what the slot holds keep what the text begins with, but never its last token."""
        stands = 0
        for held, own in zip(state.held[:slot.length], state.own[:-1], strict=False):
            if held != own:
                break
            stands += 1
        try:
            if slot.length > stands:
                self.lm.truncate(slot, stands)
        except CacheFull:                       # the place is given up, and may be taken again
            state.slot, stands = None, 0
            self.lm.close(slot)
        del state.held[stands:]

    def _grant(self, state: StringState, depth: int) -> tuple[int, str]:
        """How many own tokens this sequence may write now, and why fewer than asked."""
        own, context = len(state.own), self.lm.context
        if state.silent or not own or own > context:
            if own > context:
                self.close(state)
                state.silent = f"the text, {own} of the drafter's tokens, is longer than its context of {context}"
            return 0, state.silent or "the text is empty"
        ratio = own / len(state.seq.tokens)
        steps = max(1, math.ceil(depth * min(4.0, ratio)))
        if state.slot is None and not self._seat(state, ratio):
            return 0, "no room in the drafter's cache"
        if own + steps > state.limit:
            if not self.lm.fits(own + steps - state.limit):
                return 0, "no room in the drafter's cache"
            state.limit = own + steps
        room = context - own + 1                                   # the last written token is never fed
        return (room, f"the drafter's context ends at {context} of its tokens") if room < steps else (steps, "")

    def _seat(self, state: StringState, ratio: float) -> bool:
        own, seq = state.own, state.seq
        growth = math.ceil(SLACK * ratio * max(0, seq.prompt_tokens + seq.sampling.max_tokens - len(seq.tokens))) + 1
        state.limit = max(len(own), min(self.lm.context, len(own) + growth))
        if not self.lm.fits(state.limit):
            return False
        try:
            state.slot = self.lm.open(own, seq.tenant, state.limit - len(own))
        except CacheFull:
            return False
        state.held = own[:state.slot.length]
        return True

    # Writing on

    def _write(self, lines: Sequence[_Line]) -> None:
        """One pass per own token, all sequences together; each ends with its steps or at a special token."""
        live = list(lines)
        missing = [line.state.own[line.slot.length:] for line in live]
        while any(len(ids) > self.chunk for ids in missing):
            behind = [i for i, ids in enumerate(missing) if len(ids) > self.chunk]
            self._feed([live[i] for i in behind], [missing[i][:self.chunk] for i in behind])
            for i in behind:
                missing[i] = missing[i][self.chunk:]
        while live:
            for line, token in zip(live, self._feed(live, missing), strict=True):
                line.wrote.append(token)
            live = [line for line in live if len(line.wrote) < line.steps and not self._special(line.wrote[-1])]
            missing = [line.wrote[-1:] for line in live]

    def _feed(self, lines: Sequence[_Line], ids: Sequence[list[int]]) -> list[int]:
        """The likeliest own token after ids[i] [n_i ≥ 1]."""
        scores = self.lm.extend([line.slot for line in lines], [torch.tensor(i, device=self.lm.device) for i in ids])
        for line, more in zip(lines, ids, strict=True):
            line.state.held += more
        best: list[int] = scores.logits.argmax(-1).tolist()
        return best

    def _special(self, own: int) -> bool:
        if self.spelling is not None:
            return not isinstance(self.spelling.contents.get(own), bytes)
        return self.words.tokenizer is None or own in self.words.tokenizer.special_ids

    # What was written, in the target's tokens

    def _draft(self, line: _Line) -> Draft:
        wrote, end = line.wrote, []
        if wrote and self._special(wrote[-1]):
            name = None if self.spelling is None else self.spelling.contents.get(wrote[-1])
            end = [self.target.ids[name]] if isinstance(name, str) and name in self.target.ids else []
            wrote = wrote[:-1]
        guess = self._string(line.state, wrote)
        found = self._continued(line.state, guess) if guess else []
        tokens: list[int] = []
        for token in [*found, *end]:
            content = self.target.contents.get(token)
            special = isinstance(content, str)
            if (special or content is None) and token not in end:   # written as text, not meant; or behind the target's vocabulary
                break
            tokens.append(token)
            if special or token in line.state.seq.end_ids:
                break
        if not tokens:
            return Draft.empty(self.name, line.reason or "what the drafter writes does not continue the text's tokens")
        return Draft.chain(tokens[:line.budget.depth], drafter=self.name, reason=line.reason)

    def _string(self, state: StringState, wrote: Sequence[int]) -> str:
        """Whole characters only."""
        if self.spelling is not None:
            text: str = _utf8().decode(self.spelling.written(wrote))
        else:
            assert self.words.tokenizer is not None
            before = state.own[-OVERLAP:]
            start = self.words.tokenizer.decode(before, skip_special=False)
            text = self.words.tokenizer.decode([*before, *wrote], skip_special=False).removeprefix(start)
        return text.partition("�")[0]

    def _continued(self, state: StringState, guess: str) -> list[int]:
        """The target's ids of `guess` behind the ids that the text has."""
        tokens, words = state.seq.tokens, self.target.words
        back = self._seam(tokens)
        if back is not None:
            tail = list(tokens[back:])
            text = _utf8().decode(self._bytes(tail, not back)) + guess     # without the unfinished character, which the guess must finish
            assert words.tokenizer is not None
            again = words.inside(text) if back else words.tokenizer.encode_plain(text)
            if again[:len(tail)] == tail:
                return again[len(tail):]
        pending = state.decoder.getstate()[0]
        data = guess.encode()
        if not data.startswith(pending):
            return []
        data = data[len(pending):]
        space = re.search(rb"\s", data)
        cut = space.start() if space else len(data)
        head = self.target.spell(data[:cut]) if cut else ()
        if head is None:
            return []
        return [*head, *(words.inside(data[cut:].decode()) if cut < len(data) else ())]

    def _bytes(self, tokens: Sequence[int], beginning: bool) -> bytes:
        """What the target's tokenizer reads as these tokens; `beginning`: they are the text's first."""
        data = b""
        for token in tokens:
            content = self.target.contents.get(token, b"")
            if isinstance(content, str):
                data += content.encode()
            else:
                data += self._first(content) if beginning else content
                beginning = False
        return data

    def _first(self, content: bytes) -> bytes:
        """A text's first word begins with a space in SentencePiece's pieces that is not in the text."""
        return content.removeprefix(b" ") if self.target.kind == "metaspace" else content

    def _seam(self, tokens: Sequence[int]) -> int | None:
        """Where to tokenise the text again from: at a token that begins with a space, or at the very beginning."""
        for back in range(len(tokens) - OVERLAP, max(0, len(tokens) - FARTHEST), -1):
            here, before = (self.target.contents.get(token) for token in (tokens[back], tokens[back - 1]))
            if isinstance(here, bytes) and here[:1].isspace() and isinstance(before, bytes) and not before[-1:].isspace():
                return back
        return 0 if len(tokens) <= FARTHEST else None
