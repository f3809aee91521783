"""Where the last tokens of a text stood before: in the text itself (`TextIndex`), and in texts kept from earlier (`Store`).

Grams of 1, 2, 4, … tokens are hashed (64-bit; a gram's hash is made of its halves' hashes, so a new token costs one step
per length). A place is the position right after an earlier occurrence: what stands there is a guess. Longest grams first,
newest first, so that the places found are those a suffix automaton's longest match would name, with their frequencies.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

MASK = (1 << 64) - 1
FIRST = 0x9E3779B97F4A7C15                                       # of a single token; odd, as every factor below
FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93, 0xA0761D6478BD642F, 0xE7037ED1A0B428DB, 0x8EBC6AF09C88C6E3)
BULK = 48                                                        # new tokens from which numpy is faster than a loop
SEPARATOR = -1
AGREEMENTS = (2, 3, 4, 5, 7, 9, 13, 17, 25)             # tokens from which on a copy's chance is counted anew
FARTHEST_SCORE = 32     # tokens of agreement beyond which a longer match says nothing new


def agreed(text: Sequence[int], place: int) -> int:
    """How many tokens before `place` equal the last tokens of the text, at most FARTHEST_SCORE."""
    n, most = 0, min(place, FARTHEST_SCORE)
    while n < most and text[place - 1 - n] == text[-1 - n]:
        n += 1
    return n


def gram_levels(longest: int) -> int:
    """How many of the lengths 1, 2, 4, … there are up to `longest` (at most 64)."""
    return longest.bit_length()


def _hash_all(tokens: NDArray[np.int64], levels: int) -> list[NDArray[np.uint64]]:
    """Per gram length L the hash of the L tokens that end with token i (of fewer, where i + 1 < L)."""
    hashes = [(tokens.astype(np.uint64) + np.uint64(1)) * np.uint64(FIRST)]
    for level in range(levels - 1):
        half, last = 1 << level, hashes[-1]
        before = np.zeros_like(last)
        before[half:] = last[:-half] if half < len(last) else before[half:]
        hashes.append(before * np.uint64(FACTORS[level]) + last)
    return hashes


def _older(keys: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For every key that occurred before: its index, and the index of the nearest earlier equal one."""
    order = np.argsort(keys, kind="stable")
    same = keys[order[1:]] == keys[order[:-1]]
    return order[1:][same], order[:-1][same]


class TextIndex:
    """The grams of one growing text. What ends with the last token read is no earlier occurrence of itself."""

    def __init__(self, levels: int) -> None:
        self.levels = levels
        self.length = 0                                          # tokens read
        self._hashes: list[list[int]] = [[] for _ in range(levels)]
        self._last: list[dict[int, int]] = [{} for _ in range(levels)]
        self._before: list[dict[int, int]] = [{} for _ in range(levels)]

    def extend(self, text: Sequence[int]) -> None:
        """Read what `text` has beyond the tokens read before."""
        if len(text) - self.length > max(BULK, self.length):
            self._extend_all(text)
            return
        hashes, lasts, befores = self._hashes, self._last, self._before
        for at in range(self.length, len(text)):
            half = 0
            for level in range(self.levels):
                mine = hashes[level]
                if at >> level:                                  # the gram that ends here is an earlier one from now on
                    gram, last = mine[at - 1], lasts[level]
                    older = last.get(gram)
                    if older is not None:
                        befores[level][at] = older
                    last[gram] = at
                if level == 0:
                    value = ((text[at] + 1) * FIRST) & MASK
                else:
                    below = hashes[level - 1]
                    value = ((below[at - half] if at >= half else 0) * FACTORS[level - 1] + value) & MASK
                mine.append(value)
                half = 1 << level
        self.length = max(self.length, len(text))

    def _extend_all(self, text: Sequence[int]) -> None:
        """The same, from the beginning, for many tokens at once."""
        count = len(text)
        self.length = count
        for level, hashed in enumerate(_hash_all(np.asarray(text, dtype=np.int64), self.levels)):
            start = (1 << level) - 1
            keys = hashed[start:count - 1]
            self._hashes[level] = hashed.tolist()
            self._last[level] = dict(zip(keys.tolist(), range(start + 1, count), strict=True))
            newer, older = _older(keys)
            self._before[level] = dict(zip((newer + start + 1).tolist(), (older + start + 1).tolist(), strict=True))

    @property
    def grams(self) -> list[int]:
        """Hashes of the last 1, 2, 4, … tokens, as many as there are."""
        return [mine[-1] for level, mine in enumerate(self._hashes) if self.length >> level]

    def known(self, grams: Sequence[int]) -> int:
        """How many of `grams`, from the shortest up, stood here before."""
        for level, gram in enumerate(grams):
            if gram not in self._last[level]:
                return level
        return len(grams)

    def places(self, level: int, gram: int, limit: int) -> list[int]:
        """Ends of earlier occurrences of the gram of 2**level tokens with this hash, newest first, at most `limit`."""
        found: list[int] = []
        end, before = self._last[level].get(gram), self._before[level]
        while end is not None and len(found) < limit:
            found.append(end)
            end = before.get(end)
        return found


def tenant_key(tenant: str) -> int:
    """A signed 64-bit digest that stands for a tenant, equal in every process."""
    return int.from_bytes(blake2b(tenant.encode(), digest_size=8).digest(), "little", signed=True)


class Store:
    """Texts that are over, at most `capacity` tokens of them, in a ring: the oldest are overwritten first.

    Grams are found through hash chains. A place is only trusted after its tokens and its owner were compared, so what was
    overwritten is never found, and no tenant ever reads a token of another. Memory: about 90 bytes a token with six gram
    lengths, taken in doublings as texts arrive.
    """

    SMALLEST = 1 << 14
    TRIES = 4                                                    # places looked at per place wanted

    def __init__(self, capacity: int, levels: int) -> None:
        self.capacity, self.levels = capacity, levels
        self._at, self._filled = 0, False
        self._allocate(min(capacity, self.SMALLEST))

    @property
    def size(self) -> int:
        """Places for tokens that are taken now; grows up to `capacity`."""
        return len(self._tokens)

    @property
    def empty(self) -> bool:
        return not self._filled

    @property
    def memory_bytes(self) -> int:
        arrays = (self._tokens, self._owner, *self._last, *self._before)
        return sum(a.itemsize * len(a) for a in arrays)

    def add(self, text: Sequence[int], owner: int) -> None:
        """Keep `text` (its last `capacity` − 1 tokens, if it is longer) for the tenant with this key."""
        text = text[max(0, len(text) - self.capacity + 1):]
        if len(text) < 2:
            return
        while self._at + len(text) + 1 > self.size < self.capacity:
            self._grow()
        if self._at + len(text) + 1 > self.size:
            self._tokens[self._at:] = array("i", [SEPARATOR]) * (self.size - self._at)      # the oldest texts, which stood there
            self._at = 0
        self._filled = True
        at, stop = self._at, self._at + len(text)
        self._tokens[at:stop + 1] = array("i", [SEPARATOR]) * (len(text) + 1)      # interrupted, nobody's tokens have another's owner
        self._owner[at:stop + 1] = array("q", [owner]) * (len(text) + 1)
        self._tokens[at:stop] = array("i", text)
        for level, hashed in enumerate(_hash_all(np.asarray(text, dtype=np.int64), self.levels)):
            self._link(level, at + (1 << level), self._slots(hashed[(1 << level) - 1:-1], owner))
        self._at = stop + 1

    def texts(self) -> list[tuple[int, list[int]]]:
        """(owner, tokens) of every text, oldest first; a text that was partly overwritten is there with what is left of it."""
        found: list[tuple[int, list[int]]] = []
        for low, high in ((self._at, self.size), (0, self._at)):
            start = low
            for stop in [low + int(i) for i in np.flatnonzero(np.asarray(self._tokens[low:high]) == SEPARATOR)]:
                if stop - start > 1:
                    found.append((self._owner[start], self._tokens[start:stop].tolist()))
                start = stop + 1
        return found

    def places(self, level: int, gram: int, owner: int, tail: array[int], limit: int) -> list[int]:
        """Where the last 2**level tokens of `tail`, with hash `gram`, ended in texts of this owner, newest first, at most `limit`."""
        end = self._last[level][(((gram ^ owner) * FIRST) & MASK) >> self._shift]
        found: list[int] = []
        if not end:
            return found
        tokens, length, before = self._tokens, 1 << level, self._before[level]
        wanted = tail[-length:]
        for _ in range(self.TRIES * limit):
            if tokens[end - length:end] == wanted and self._owner[end - 1] == owner and end not in found:
                found.append(end)
                if len(found) == limit:
                    break
            end = before[end]
            if not end:
                break
        return found

    def agreement(self, end: int, text: Sequence[int], known: int, longest: int) -> int:
        """How many tokens before `end` equal the last ones of `text`, at most `longest`; the first `known` are."""
        tokens, longest, n = self._tokens, min(longest, len(text), end), known
        while n < longest and tokens[end - 1 - n] == text[-1 - n]:
            n += 1
        return n

    def after(self, end: int, depth: int) -> list[int]:
        """At most `depth` tokens of the text that stands at `end`, up to its own end."""
        found = self._tokens[end:end + depth].tolist()
        return found[:found.index(SEPARATOR)] if SEPARATOR in found else found

    def _allocate(self, size: int) -> None:
        slots = 1 << size.bit_length()
        self._shift = 64 - size.bit_length()
        self._tokens, self._owner = array("i", [SEPARATOR]) * size, array("q", [0]) * size
        self._last = [array("i", [0]) * slots for _ in range(self.levels)]
        self._before = [array("i", [0]) * size for _ in range(self.levels)]

    def _grow(self) -> None:
        kept = self.texts()
        self._allocate(min(self.capacity, 2 * self.size))
        self._at = 0
        for owner, text in kept:
            self.add(text, owner)

    def _slots(self, grams: NDArray[np.uint64], owner: int) -> NDArray[np.uint64]:
        return ((grams ^ np.uint64(owner & MASK)) * np.uint64(FIRST)) >> np.uint64(self._shift)

    def _link(self, level: int, first: int, slots: NDArray[np.uint64]) -> None:
        """Put the ends first, first + 1, … at the heads of their slots' chains."""
        if not len(slots):
            return
        last, before = (np.frombuffer(a, dtype=np.int32) for a in (self._last[level], self._before[level]))
        ends = np.arange(first, first + len(slots), dtype=np.int32)
        before[ends] = last[slots]
        newer, older = _older(slots)
        before[ends[newer]] = ends[older]
        last[slots] = ends                                       # of equal slots the last assignment stands
