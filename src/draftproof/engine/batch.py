"""Which sequences are where: admission, prefill in chunks between rounds, rounds over all that run, and the way out."""

from __future__ import annotations

from collections import abc, deque
from collections.abc import Iterator
from time import perf_counter

import torch

from ..core.upload import uploaded
from ..errors import CacheFull
from ..models.taps import rows_at, rows_in, stacked
from ..models.target import Adopts, Slot, Target
from ..types import Commit, Draft, FinishReason, Scores, Signals
from .lanes import Lanes
from .logprobs import note_prompt
from .records import Recorder
from .round import Rounds
from .sequence import Sequence, Status

PAUSE_S = 0.3           # that running texts wait for one pass over prompts, if it need not be of fewer tokens than
FEWEST = 64             # these, for which all weights are read as well
SCORED = 1 << 24        # logits that one pass over prompts makes at most where every row's are wanted (prompt_logprobs): 64 MB


class Batch:
    """The sequences of one engine. Each step moves every one of them that it can."""

    def __init__(self, target: Target, lanes: Lanes, recorder: Recorder, max_batch: int, prefill_chunk: int) -> None:
        self.target, self.lanes, self.recorder = target, lanes, recorder
        self.rounds = Rounds(target, lanes, recorder)
        self.waiting: deque[Sequence] = deque()
        self.live: list[Sequence] = []
        self.ended: list[Sequence] = []           # done, but not yet settled by the engine
        self._max_batch, self._chunk = max_batch, prefill_chunk
        self._token_s = 0.0                       # of a prompt, in the last pass that was no shorter than the shortest

    def __iter__(self) -> Iterator[Sequence]:
        return iter((*self.live, *self.waiting))

    def reach(self, seq: Sequence) -> int:
        """The most keys that the sequence may hold at once: of its longest text, and of a tree beside it."""
        return seq.limit + (self.lanes.tree or 0)

    def step(self) -> list[tuple[Sequence, Commit]]:
        """Admit what fits, prefill a chunk of the prompts, run one round; what was committed, in order."""
        self.target.set_taps(self.lanes.taps)
        self._end_finished()                                 # by a step that was interrupted
        with torch.inference_mode():
            self._admit()
            running = [seq for seq in self.live if seq.status is Status.RUNNING and seq.finish is None]
            starting = [seq for seq in self.live if seq.status is Status.PREFILL]
            done = self._prefill(starting, self._most(bool(running)))
            self._catch_up(running)
            done += self._round(running, [seq for seq in starting if seq.status is Status.RUNNING and seq.finish is None])
        self._end_finished()
        return done

    def _end_finished(self) -> None:
        """End every text whose last token stands."""
        for seq in list(self.live):
            if seq.finish is not None:
                self.end(seq, seq.finish, seq.error)

    def end(self, seq: Sequence, finish: FinishReason, error: BaseException | None = None) -> None:
        """Give back what the sequence holds; its text stays. Interrupted, it is among the live, and the next step ends it."""
        seq.finish, seq.error = finish, error
        self.lanes.leave(seq)
        self.lanes.forget(seq)
        if seq.slot is not None:
            slot, seq.slot = seq.slot, None
            self.target.close(slot)
        seq.spell()
        seq.finish, seq.signals = finish, None
        if seq in self.live:
            self.live.remove(seq)
        elif seq in self.waiting:
            self.waiting.remove(seq)
        seq.to(Status.DONE)
        self.ended.append(seq)
        if not self.live:
            self.rounds.let_go()

    def _admit(self) -> None:
        """Waiting sequences take their slots in order, as long as there is room; what can never fit ends with an error."""
        while self.waiting and len(self.live) < self._max_batch:
            seq = self.waiting[0]
            if self.live and not self.target.fits(self.reach(seq)):
                return
            try:
                known = seq.prompt[:1] if _wants_prompt_logprobs(seq) else seq.prompt     # a cached prefix has keys, but no logits
                seq.slot = self.target.open(known, seq.tenant, self.reach(seq) - len(known))
            except CacheFull as full:
                if self.live:
                    return
                self.end(seq, "error", full)
                continue
            self.waiting.popleft()
            self.live.append(seq)
            seq.to(Status.PREFILL)

    def _most(self, awaited: bool) -> int:
        """Tokens of the next pass over prompts. Where texts wait for it, as many as are read meanwhile at the last pass's speed."""
        return min(self._chunk, max(FEWEST, round(PAUSE_S / self._token_s))) if awaited and self._token_s else self._chunk

    def _prefill(self, batch: list[Sequence], most: int) -> list[tuple[Sequence, Commit]]:
        """One chunk of the prompts, no more, since running texts wait for it. A prompt that is complete gets its first token."""
        plain = [seq for seq in batch if not _wants_prompt_logprobs(seq)]
        scored = [seq for seq in batch if _wants_prompt_logprobs(seq)]
        return self._read(plain, most) + self._read(scored, min(most, max(1, SCORED // self.target.vocab_size)))

    def _read(self, batch: list[Sequence], most: int) -> list[tuple[Sequence, Commit]]:
        """One prefill pass of at most `most` tokens, over prompts of which all or none want their log-probabilities."""
        if not batch:
            return []
        start = perf_counter()
        for seq in batch:
            self._ready(seq)
        ends = [(seq.slot.length, seq.pause, seq.prompt_tokens) for seq in batch if seq.slot is not None]
        widths = shares([(pause if at < pause else end) - at for at, pause, end in ends], most)
        batch = [seq for seq, width in zip(batch, widths, strict=True) if width]
        slots = [self._started(seq) for seq in batch]
        starts = [slot.length for slot in slots]
        chunks = [uploaded(seq.prompt[at:at + width], self.target.device)
                  for seq, at, width in zip(batch, starts, filter(None, widths), strict=True)]
        try:
            scores = self._scored(batch, slots, chunks) if _wants_prompt_logprobs(batch[0]) else self.target.extend(slots, chunks)
        except Exception as error:
            return self._apart(batch, starts, error)
        spent, read, row = perf_counter() - start, sum(widths), 0
        if read >= min(FEWEST, self._chunk):
            self._token_s = spent / read
        done: list[tuple[Sequence, Commit]] = []
        for i, (seq, chunk, at) in enumerate(zip(batch, chunks, starts, strict=True)):
            seq.prefill_passes += 1
            seq.prefill_s += spent
            if scores.taps:
                seq.signals = _joined(seq.signals, Signals(at, rows_at(scores.taps, slice(row, row + len(chunk)))))
            row += len(chunk)
            if at + len(chunk) == seq.prompt_tokens:
                done += self._first_token(seq, scores.logits[i:i + 1])
        return done

    def _ready(self, seq: Sequence) -> None:
        """Make the slot hold the longest prefix that need not be read again: if none of the prompt was read yet, what others have cached
        since it was admitted; if an interrupted step has read all of it, all but the last token, whose logits are lost."""
        assert seq.slot is not None, f"{seq.id}: a prompt has a slot"
        if not (seq.begun or _wants_prompt_logprobs(seq)) and isinstance(self.target, Adopts):
            seq.pause = self.target.adopt(seq.slot, seq.prompt)
        known = max(0, len(seq.prompt_logprobs) - 1) if _wants_prompt_logprobs(seq) else seq.prompt_tokens - 1
        if seq.slot.length > known:
            self.target.rewind(seq.slot, ())
            self.target.truncate(seq.slot, known)

    def _started(self, seq: Sequence) -> Slot:
        """Its slot; the trace hears of the request when its prompt is first read, as the cached prefix is known then."""
        assert seq.slot is not None, f"{seq.id}: a prompt has a slot"
        if not seq.begun:
            seq.begun = True
            self.recorder.started(seq, seq.slot.length, self.lanes.of(seq).name if seq.speculate else "none")
        return seq.slot

    def _scored(self, batch: list[Sequence], slots: list[Slot], chunks: list[torch.Tensor]) -> Scores:
        """`Target.extend` that notes the log-probability of every token: a chunk is scored as a draft that is known to stand."""
        scores = self.target.score(slots, torch.cat([chunk[:1] for chunk in chunks]), [Draft.chain(chunk[1:]) for chunk in chunks])
        for i, (seq, slot, chunk) in enumerate(zip(batch, slots, chunks, strict=True)):
            self.target.rewind(slot, range(len(chunk) - 1))
            note_prompt(seq, scores.logits[scores.rows(i)], slot.length - len(chunk))
        return Scores(scores.logits[[end - 1 for end in scores.starts[1:]]], tuple(range(len(batch) + 1)), scores.taps)

    def _apart(self, batch: list[Sequence], starts: list[int], error: Exception) -> list[tuple[Sequence, Commit]]:
        """After a prefill pass that failed: each prompt by itself. One that fails alone ends with its error."""
        for seq, start in zip(batch, starts, strict=True):
            if seq.slot is not None:
                self.target.rewind(seq.slot, ())
                self.target.truncate(seq.slot, min(seq.slot.length, start))
                del seq.prompt_logprobs[start + 1 if start else 0:]
        if len(batch) == 1:
            self.end(batch[0], "error", error)
            return []
        return [done for seq in batch for done in self._prefill([seq], self._chunk)]

    def _first_token(self, seq: Sequence, logits: torch.Tensor) -> list[tuple[Sequence, Commit]]:
        try:
            commit = self.rounds.choose_first(seq, logits)
        except Exception as error:
            self.end(seq, "error", error)
            return []
        self.lanes.begin(seq, seq.signals)
        seq.signals = None
        return [(seq, commit)]

    def _catch_up(self, batch: abc.Sequence[Sequence]) -> None:
        """After an interruption between commit and rewind a slot may lack tokens of its text: feed them again."""
        for seq in batch:
            slot = seq.slot
            if slot is not None and slot.length < len(seq.tokens) - 1:
                self.target.extend([slot], [torch.tensor(seq.tokens[slot.length:-1], device=self.target.device)])

    def _round(self, batch: list[Sequence], joining: list[Sequence] | None = None) -> list[tuple[Sequence, Commit]]:
        """One round. Where it fails (options that leave no token, a pass without memory) each sequence gets a round by itself:
        the one that fails alone ends with its error, and the others go on."""
        if not batch:
            return []
        lengths = [len(seq.tokens) for seq in batch]
        try:
            return list(zip(batch, self.rounds.run(batch, joining), strict=True))
        except Exception as error:
            if [len(seq.tokens) for seq in batch] != lengths:
                raise                                        # tokens entered a text that no reader would hear of
            if len(batch) == 1:
                self.end(batch[0], "error", error)
                return []
            return [done for seq in batch for done in self._round([seq])]


def shares(left: abc.Sequence[int], most: int) -> list[int]:
    """How many of the `most` tokens of a prefill chunk each prompt gets; left[i]: how many it still needs. The oldest, which stands first,
    gets at least half, so that no prompt waits for ever; of the others the shortest come first."""
    first = min(left[0], most if len(left) == 1 else max(1, most // 2))
    given, room = [first] + [0] * (len(left) - 1), most - first
    for i in sorted(range(1, len(left)), key=left.__getitem__):
        given[i] = min(left[i], room)
        room -= given[i]
    given[0] += min(left[0] - first, room)
    return given


def _wants_prompt_logprobs(seq: Sequence) -> bool:
    return seq.sampling.prompt_logprobs is not None


def _joined(before: Signals | None, more: Signals) -> Signals:
    """The signals of two chunks of one prompt; of the second alone if an interrupted step lost some between them."""
    if before is None or before.start + rows_in(before.taps) != more.start:
        return more
    return Signals(before.start, stacked((before.taps, more.taps)))
