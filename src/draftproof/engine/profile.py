"""A target's passes, timed on purpose before it serves, so that the controller's first plans are made of measurements."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

import torch

from ..models.target import Target
from ..types import Draft
from .costs import PassCosts

log = logging.getLogger("draftproof.engine")

SHORT, LONG = 16, 256                      # tokens of a text
ROWS = (1, 5, 2, 9, 3, 17)                 # of one sequence, the root included; the most telling first
CROWDS, MORE = {"cpu": (4,)}, (4, 16, 64)  # how many, by the kind of device: a processor has enough to do with few, and records nothing
CROWD_ROWS = (1, 3, 1.5, 9, 2)             # of each of several, on average: a draft may be worth it for some of them only
SWEEPS = 2
Clock = Callable[[], float]


def profile(target: Target, passes: PassCosts, most: int, seconds: float, clock: Clock = time.perf_counter) -> int:
    """Time passes by rows, batch (at most `most`) and context, for about so many seconds, and teach `passes`; returns their number.

    It leaves nothing behind in the target but what a device has recorded, which takes its time beside these seconds. What fails is told in
    the log and ends the profile: serving then learns by itself.
    """
    start, count = clock(), 0
    try:
        with torch.inference_mode():
            for batch, context, widths in _points(most, CROWDS.get(target.device.type, MORE)):
                widest = max(widths) // batch + 1
                if context + widest > target.context or not target.fits(batch * (context + widest + 1)):
                    continue
                cost = passes.curve(batch, batch * context, batch)[-1] * 3 * len(widths) if passes.known else 0.0
                if cost > seconds - (clock() - start):
                    break
                for rows, spent in _timed(target, batch, context, widths, clock):
                    if not rows:
                        start += spent
                        continue
                    passes.learn(batch, rows, batch * context, spent)
                    count += 1
                    if clock() - start > seconds:
                        return count
    except Exception as error:
        log.warning("profile: a pass of the target failed (%s: %s); costs are learnt while serving", type(error).__name__, error)
    return count


def _points(most: int, crowds: Sequence[int]) -> Iterator[tuple[int, int, list[int]]]:
    """Batches, tokens of each text, and rows in all."""
    yield 1, SHORT, list(ROWS)
    for batch in sorted({*(min(crowd, most) for crowd in crowds), most} - {1}):
        yield batch, SHORT, [int(batch * rows) for rows in CROWD_ROWS]
    yield 1, LONG, [1, 9]


def _timed(target: Target, batch: int, context: int, widths: list[int], clock: Clock) -> Iterator[tuple[int, float]]:
    """(rows in all, seconds) of a scoring pass, every width in turn, SWEEPS times; before them (0, seconds) of those that warm up: on a
    processor one, elsewhere every width, as it may be recorded."""
    widest = max(widths) // batch + 1
    dice = Random(0)                                                             # in a mixture of experts equal texts would share theirs
    texts = [[dice.randrange(target.vocab_size) for _ in range(context + widest)] for _ in range(batch)]
    slots: list[Any] = []
    try:
        for i, text in enumerate(texts):
            slots.append(target.open(text[:context], f"profile {i}", widest))
            target.extend(slots[-1:], [torch.tensor(text[slots[-1].length:context], device=target.device)])
        records = target.device.type not in CROWDS
        for rows in widths if records else (max(widths),):
            spent = _pass(target, slots, texts, context, rows, clock)
            if records:
                yield 0, spent
        for _ in range(SWEEPS):
            for rows in widths:
                yield rows, _pass(target, slots, texts, context, rows, clock)
    finally:
        for slot in slots:
            target.close(slot)


def _pass(target: Target, slots: list[Any], texts: list[list[int]], context: int, rows: int, clock: Clock) -> float:
    roots = torch.tensor([text[context] for text in texts], device=target.device)
    each, more = divmod(rows, len(slots))
    drafts = [Draft.chain(torch.tensor(text[context + 1:context + each + (i < more)], dtype=torch.int64, device=target.device))
              for i, text in enumerate(texts)]
    before = clock()
    float(target.score(slots, roots, drafts).logits[0, 0])                       # reading a number waits for the device
    spent = clock() - before
    for slot in slots:
        target.rewind(slot, ())
        target.truncate(slot, context)
    return spent
