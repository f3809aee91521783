"""Counter-based noise: a pure function of (seed, sample, stream, position, attempt, token), with no state to keep or rewind.

    row key   z ← 0; for each word of (seed, sample, stream, position, attempt): z ← splitmix64(z xor word);  k0, k1 ← low, high half of z
    token     h = mix(mix(token xor k0) + k1), 32-bit arithmetic that wraps, logical shifts
    uniform   u = (h + 1/2) / 2**32, float64, never 0 or 1
    noise     E = −log1p(−u), float64 rounded to float32; Gumbel g = −log E, float64 rounded to float32

argmax(log p + g) = argmax(log p − log E) is then a sample of p (the Gumbel-max trick), and a drafter that adds the same
g to its own log q guesses it as often as can be promised without seeing p (Daliri et al., arXiv 2408.07978). Integers are equal
on every device. The logarithms are taken in float64 because float32 ones depend on where a token stands in its tensor
(vector body or scalar tail) and on the device, which may change the text.

Streams have different keys. `text` is shared by drafter and target and keyed by position alone (attempt 0); `draft`, `coin`
and `residual` belong to the joint rules, where noise that a rule has already looked at may not serve the next round, so
they are keyed by the attempt too: the number of rounds that have already drafted this position.

splitmix64: Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014). mix: `lowbias32` of
Chris Wellons' hash prospector. Neighbouring keys or tokens share nothing; a key that is linear in position and token
repeats whole rows under a shift, and arithmetic shifts leave visible correlations.

Test vectors (k0, k1 of `key`; h of tokens 0, 1 and 128255):

    seed             sample  stream    position  attempt   k0          k1          h(0)        h(1)        h(128255)
    0                0       text      0         0         0x6b5fd45e  0x78ae5a9a  0xfe97adb4  0xd015aa68  0x3201c35d
    1                0       text      7         0         0x74ffa12b  0xfe0caa68  0xbfc6fc35  0x95cd37c7  0x327edf60
    1                3       draft     7         2         0xf36b4032  0x081a6963  0x27c41419  0x23a297f0  0x235c467c
    2**63 - 1        1       residual  131071    1         0xdc7c15d0  0x6194b84c  0xbba263c6  0xc0312a60  0x9f9cfee3
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from . import host
from .upload import sent

STREAMS = {"text": 0, "draft": 1, "coin": 2, "residual": 3}

MANY = 24       # rows from which on arrays pay
FEW = 1 << 16   # numbers up to which numpy is sooner done than torch, on several threads too
_WORD = 2**64 - 1
_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MIX = ((16, 0xFFFF, 0x7FEB352D), (15, 0x1FFFF, 0x846CA68B - 2**32))  # shift, mask that makes it logical, multiplier as int32


def key(seed: int, sample: int, stream: str, position: int, attempt: int = 0) -> tuple[int, int]:
    """The two 32-bit words that key one row. `position` is the number of tokens before it, prompt included."""
    z = _stirred(_stirred(_stem(seed, sample, STREAMS[stream]), position), attempt)
    return z & 0xFFFFFFFF, z >> 32


def _stirred(z: int, word: int) -> int:
    z = ((z ^ (word & _WORD)) + _STEP) & _WORD
    z = ((z ^ (z >> 30)) * _FIRST) & _WORD
    z = ((z ^ (z >> 27)) * _SECOND) & _WORD
    return z ^ (z >> 31)


@lru_cache(maxsize=256)
def _stem(seed: int, sample: int, stream: int) -> int:
    """What all positions of a text share."""
    return _stirred(_stirred(_stirred(0, seed), sample), stream)


def shared_rows(owners: Sequence[tuple[int, int]], positions: Sequence[int], device: torch.device | str) -> Tensor:
    """`key_rows` of the text's own stream, one row per (seed, sample) and position; of many rows sooner than key by key."""
    if len(owners) < MANY:
        return key_rows([key(*owner, "text", at) for owner, at in zip(owners, positions, strict=True)], device)
    z = np.array([_stem(*owner, STREAMS["text"]) for owner in owners], np.uint64) ^ np.array(positions, np.uint64)
    for _ in range(2):
        z += np.uint64(_STEP)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(_FIRST)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(_SECOND)
        z ^= z >> np.uint64(31)         # then attempt 0, which changes nothing before the next turn
    return sent(torch.from_numpy(z.view(np.int32).reshape(-1, 2)), device)


def key_rows(rows: Sequence[tuple[int, int]], device: torch.device | str) -> Tensor:
    """Row keys from `key` as an int32 tensor [R, 2]."""
    words = array("I", chain.from_iterable(rows))        # for so few sooner than through numpy
    return sent(torch.frombuffer(words, dtype=torch.int32).view(-1, 2) if rows else torch.empty(0, 2, dtype=torch.int32), device)


def bits(keys: Tensor, tokens: Tensor) -> Tensor:
    """h as int32 [R, K] (read it as unsigned): keys int32 [R, 2], tokens [K] or [R, K] of any integer type."""
    if keys.device.type == "cpu" and keys.shape[0] * tokens.shape[-1] <= FEW:
        return torch.from_numpy(host.bits(keys.numpy().view(np.uint32), tokens.numpy()).view(np.int32))
    x = tokens.to(torch.int32) ^ keys[:, :1]
    scratch = torch.empty_like(x)
    _mix(x, scratch)
    x += keys[:, 1:]
    _mix(x, scratch)
    return x


def _mix(x: Tensor, scratch: Tensor) -> None:
    """One round of the 32-bit mixer, in place."""
    for shift, mask, multiplier in _MIX:
        torch.bitwise_right_shift(x, shift, out=scratch)
        x ^= scratch.bitwise_and_(mask)
        x *= multiplier
    torch.bitwise_right_shift(x, 16, out=scratch)
    x ^= scratch.bitwise_and_(0xFFFF)


def gumbel_of(words: Sequence[int], token: int) -> float:
    """`gumbel` of one row's key words and one token, but for the rounding to float32; for so few sooner than any array."""
    h = _mixed(_mixed((token ^ words[0]) & 0xFFFFFFFF) + words[1] & 0xFFFFFFFF)
    return -math.log(-math.log1p(-(h + 0.5) * 2.0**-32))


def _mixed(h: int) -> int:
    for shift, _, multiplier in _MIX:
        h = (h ^ (h >> shift)) * multiplier & 0xFFFFFFFF
    return h ^ (h >> 16)


def uniform(keys: Tensor, tokens: Tensor) -> Tensor:
    """u = (h + 1/2) / 2**32, float64 [R, K], strictly inside (0, 1)."""
    return bits(keys, tokens).view(torch.uint32).to(torch.float64).add_(0.5).mul_(2.0**-32)


def exponential(keys: Tensor, tokens: Tensor) -> Tensor:
    """E ~ Exp(1), float32 [R, K]; between 2**-33 and 22.9."""
    return uniform(keys, tokens).neg_().log1p_().neg_().to(torch.float32)


def gumbel(keys: Tensor, tokens: Tensor) -> Tensor:
    """g = −log E ~ Gumbel(0, 1), float32 [R, K]; between −3.2 and 22.9."""
    return exponential(keys, tokens).to(torch.float64).log_().neg_().to(torch.float32)
