"""What a depth is worth: expected tokens, speed-up, best depth. Formulas only; who measures what goes in stands elsewhere.

Words: hazard h_k = P(token k accepted | the k−1 before it were); survival S_k = h₁ ⋯ h_k; c seconds to draft a token and
v(k) seconds of a pass that scores k drafted tokens, both in units of a plain pass; o overhead of a round that drafts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def survival(hazards: Sequence[float]) -> list[float]:
    """S_k = P(the first k drafted tokens are all accepted), k = 1 … depth."""
    return list(accumulate(hazards, mul))


def expected_tokens(hazards: Sequence[float]) -> float:
    """Tokens that a round emits: 1 + Σ_k S_k. Mean hazards per depth are right here, a mean over depths is not (convexity)."""
    return 1 + sum(survival(hazards))


def expected_tokens_iid(alpha: float, depth: int) -> float:
    """The same with every hazard alpha: (1 − α^{γ+1}) / (1 − α), which lies in [1, γ + 1] (arXiv 2211.17192, eq. 1)."""
    return expected_tokens([alpha] * depth)


def speedup(tokens: float, depth: int, c: float, v: float = 1.0, o: float = 0.0) -> float:
    """S = E / (γ c + v(γ) + o) over plain decoding, E being the tokens a round emits (arXiv 2211.17192, Theorem 3.8, with v = 1, o = 0)."""
    return tokens / (depth * c + v + o)


def break_even(depth: int, c: float, v: float = 1.0, o: float = 0.0) -> float | None:
    """The least i.i.d. acceptance α at which a draft of this depth costs no time: E(α, γ) = γ c + v + o. None if no α ≤ 1 does."""
    cost = depth * c + v + o
    if cost > depth + 1:
        return None
    low, high = 0.0, 1.0
    while high - low > 1e-12:
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens_iid(middle, depth) < cost else (low, middle)
    return high if cost > 1 else 0.0


def best_depth(survival: Sequence[float], draft_cost: Sequence[float], score_cost: Sequence[float],
               overhead: float = 0.0) -> tuple[int, float]:
    """The depth with the most tokens per second, and that rate; the least such depth, 0 included.

    survival[k−1] = S_k. draft_cost[k]: seconds to draft k tokens, draft_cost[0] for none. score_cost[r−1]: seconds of a pass
    over r rows; depth k needs k + 1. overhead: seconds that a round with a draft takes besides. The shortest list is the limit.
    """
    best, best_rate, tokens = 0, 1 / (draft_cost[0] + score_cost[0]), 1.0
    for depth in range(1, min(len(survival) + 1, len(draft_cost), len(score_cost))):
        tokens += survival[depth - 1]
        rate = tokens / (draft_cost[depth] + score_cost[depth] + overhead)
        if rate > best_rate:
            best, best_rate = depth, rate
    return best, best_rate


def best_batch(survivals: Sequence[Sequence[float]], draft_cost: Sequence[float], score_cost: Sequence[float],
               overhead: float = 0.0, shares: Sequence[Sequence[float]] | None = None, others: int = 0) -> tuple[list[int], float]:
    """Depths for a whole batch, and its tokens per second: the global top-B of all survival products, best B.

    Units as in `best_depth`; draft_cost[d] is that of a batch whose deepest draft has d tokens, score_cost[r−1] that of r rows
    in all; neither may fall. For every limit d on the depth the rows are granted by falling survival, so depths are prefixes.
    shares[i][k−1]: chance that there will be a k-th token to score (1 without); rows are then expected ones. others: sequences of
    the same pass that are offered nothing here; their rows and tokens count.
    """
    batch = others + len(survivals)
    if len(survivals) == 1:
        depth, rate = _best_of_one(survivals[0], draft_cost, score_cost, overhead, None if shares is None else shares[0], batch)
        return [depth], rate
    return _best_of_many(survivals, draft_cost, score_cost, overhead, shares, batch)


def _best_of_one(survival: Sequence[float], draft_cost: Sequence[float], score_cost: Sequence[float], overhead: float,
                 shares: Sequence[float] | None, batch: int) -> tuple[int, float]:
    """`_best_of_many` for one sequence: of the drafts within a limit only the one that reaches it can win, for it costs the least."""
    chances = list(accumulate(survival[:len(draft_cost) - 1], min))
    tokens, rows, rest = float(batch), float(batch), sum(chances)
    best, best_rate = 0, batch / (draft_cost[0] + score_cost[batch - 1])
    for depth, chance in enumerate(chances, 1):
        share = 1.0 if shares is None else shares[depth - 1]
        if rows + share > len(score_cost):
            break
        tokens += chance
        rows += share
        rest -= chance
        cost = draft_cost[depth] + overhead + between(score_cost, rows)
        if tokens > best_rate * cost:
            best, best_rate = depth, tokens / cost
        elif tokens + rest <= best_rate * cost:
            break
    return best, best_rate


def _best_of_many(survivals: Sequence[Sequence[float]], draft_cost: Sequence[float], score_cost: Sequence[float], overhead: float,
                  shares: Sequence[Sequence[float]] | None, batch: int) -> tuple[list[int], float]:
    """Every limit on the depth [L] with every number of rows [N], at once."""
    plain, lengths = batch / (draft_cost[0] + score_cost[batch - 1]), np.array([len(chances) for chances in survivals])
    limits = np.arange(1, min(int(lengths.max()) + 1, len(draft_cost)))
    if not len(limits):
        return [0] * len(survivals), plain
    chance = np.array([chance for chances in survivals for chance in accumulate(chances, min)])
    share = np.ones(len(chance)) if shares is None else np.array([share for sequence in shares for share in sequence])
    owner = np.repeat(np.arange(len(survivals)), lengths)
    depth = np.arange(1, len(chance) + 1) - np.repeat(lengths.cumsum() - lengths, lengths)
    order = np.lexsort((owner, depth, -chance))
    chance, depth, owner, share = chance[order], depth[order], owner[order], share[order]
    within = depth <= limits[:, None]
    tokens, rows = (np.where(within, add, 0.0) for add in (chance, share))
    tokens[:, 0] += batch
    rows[:, 0] += batch
    tokens, rows = tokens.cumsum(1), rows.cumsum(1)
    costs = np.interp(rows, np.arange(1, len(score_cost) + 1), score_cost) + (np.array(draft_cost)[limits] + overhead)[:, None]
    rates = np.where(within & (rows <= len(score_cost)), tokens / costs, 0.0)
    limit, last = divmod(int(rates.argmax()), len(chance))
    if rates[limit, last] <= plain:
        return [0] * len(survivals), plain
    granted = np.bincount(owner[:last + 1][within[limit, :last + 1]], minlength=len(survivals))
    return granted.tolist(), float(rates[limit, last])


def between(score_cost: Sequence[float], rows: float) -> float:
    """score_cost at a number of rows that need not be whole, an expectation, by the straight line between its neighbours."""
    low = int(rows)
    value = score_cost[low - 1]
    return value if rows == low else value + (rows - low) * (score_cost[low] - value)


@overload
def distinct_experts(experts: int, chosen: int, rows: float) -> float: ...
@overload
def distinct_experts(experts: int, chosen: int, rows: NDArray[np.float64]) -> NDArray[np.float64]: ...
def distinct_experts(experts: int, chosen: int, rows: float | NDArray[np.float64]) -> float | NDArray[np.float64]:
    """Of `experts`, how many are expected to be read where each of `rows` rows chooses `chosen` of them: E (1 − (1 − k/E)^t), whatever the
    router, so long as each expert is as likely as any other and rows choose independently (MoESD, arXiv 2505.19645). Rows that agree, as
    those of neighbouring tokens do, and experts that are chosen more often than others, make it fewer (arXiv 2506.20675)."""
    return experts * (1 - (1 - chosen / experts) ** rows)


def match_acceptance(p: Tensor, q: Tensor) -> Tensor:
    """Σ_x 1 / Σ_y max(p_y/p_x, q_y/q_x) [...] of laws [..., V]: the acceptance of rule `match` with shared noise.

    At least (1 − TV)/(1 + TV) (Daliri, Musco and Suresh, arXiv 2408.07978). Sorted by p/q, the inner maximum changes sides
    once, so prefix sums do it in V log V.
    """
    p, q = p.to(torch.float64), q.to(torch.float64)
    ratio = torch.where(p > 0, p / q, 0.0)                      # +inf where only p is positive
    order = ratio.argsort(-1, descending=True)
    p, q = p.gather(-1, order), q.gather(-1, order)
    above, below = p.cumsum(-1), q.sum(-1, keepdim=True) - q.cumsum(-1)
    both = (p > 0) & (q > 0)
    shared = p * q / (above * q + below.clamp_min(0) * p)
    return torch.where(both, shared, 0.0).sum(-1)


@dataclass(frozen=True, slots=True)
class Memory:
    """What speculation takes: bytes by purpose, and how many tokens of the target's cache they displace."""

    weights: int
    draft_cache: int
    target_cache: int                     # keys of drafted tokens, until the rewind
    logits: int                           # of all scored rows, float32
    laws: int                             # q of the drafted tokens, float32; only where a rule needs it
    kv_tokens_lost: int

    @property
    def total(self) -> int:
        return self.weights + self.draft_cache + self.target_cache + self.logits + self.laws


def memory(depth: int, batch: int, context: int, vocab_size: int, weight_bytes: int, draft_bytes_per_token: int,
           target_bytes_per_token: int, keeps_law: bool = False) -> Memory:
    """Extra memory of drafting `depth` tokens for `batch` sequences of at most `context` tokens. Bytes, and tokens of cache lost."""
    draft_cache, target_cache = batch * context * draft_bytes_per_token, batch * depth * target_bytes_per_token
    logits, laws = batch * (depth + 1) * vocab_size * 4, batch * depth * vocab_size * 4 if keeps_law else 0
    total = weight_bytes + draft_cache + target_cache + logits + laws
    lost = math.ceil(total / target_bytes_per_token) if target_bytes_per_token else 0
    return Memory(weight_bytes, draft_cache, target_cache, logits, laws, lost)
