"""Log-probabilities that a request asked for: of the tokens it gets, and of those it gave."""

from __future__ import annotations

from collections import abc

import torch
from torch import Tensor

from ..trace.events import Alternative
from .port import TokenLogprob
from .sequence import Sequence

FLOOR = -9999.0
"""A log-probability of −inf, in a form that every JSON reader takes."""


def note_logprobs(seq: Sequence, logits: Tensor, rows: abc.Sequence[int], tokens: abc.Sequence[int]) -> None:
    """Of the emitted tokens; logits [N, V], tokens[j] was chosen at rows[j]."""
    if seq.sampling.logprobs is not None:
        seq.logprobs += _of(logits[list(rows)], tokens, seq.sampling.logprobs)


def note_prompt(seq: Sequence, logits: Tensor, start: int) -> None:
    """Of the prompt's tokens behind position `start`; logits [n, V] after it and those that follow."""
    if not seq.prompt_logprobs:
        seq.prompt_logprobs.append(TokenLogprob(seq.prompt[0], None))
    tokens = seq.prompt[start + 1:start + 1 + logits.shape[0]]
    seq.prompt_logprobs += _of(logits[:len(tokens)], tokens, seq.sampling.prompt_logprobs or 0)


def _of(logits: Tensor, tokens: abc.Sequence[int], count: int) -> list[TokenLogprob]:
    """Raw log-softmax, before temperature and penalties; logits [n, V]: of tokens[j] at row j, and of the `count` likeliest there."""
    logp = (logits if logits.dtype == torch.float64 else logits.float()).log_softmax(-1)
    values, ids = logp.topk(min(count, logp.shape[-1]), -1)
    chosen = logp[range(len(tokens)), list(tokens)]
    ranks = (logp >= chosen[:, None]).sum(-1).tolist()
    tops = [tuple(Alternative(i, max(v, FLOOR)) for i, v in zip(*row, strict=True))
            for row in zip(ids.tolist(), values.tolist(), strict=True)]
    return [TokenLogprob(token, max(value, FLOOR), top, rank)
            for token, value, top, rank in zip(tokens, chosen.tolist(), tops, ranks, strict=True)]
