"""`lossy-typical`: a guess stands if the target finds it typical. Faster, and the text is not the target's own: LOSSY.

A token x is typical after its path if p(x) > min(ε, δ·exp(−H(p))), H the entropy in nats of the target's law there (Medusa,
arXiv 2401.10774, section 3.1; its code sets ε = 0.09 and δ = 0.3, about √ε). No law is kept: unlikely tokens are drawn too rarely, and
what the drafter prefers too often. Where it refuses, the next token is the target's own choice. At temperature 0 the law is
one token and only that is typical, so the text is then plain decoding's.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from ..types import Verdict
from .tree import depths, path, walk

EPSILON = 0.09       # a likelier token always stands
DELTA = 0.3          # scales what the entropy asks for: the flatter the law, the less likely a token may be


def threshold(logp: Tensor, epsilon: float = EPSILON, delta: float = DELTA) -> Tensor:
    """min(ε, δ·exp(−H)) per row: logp [rows, V] normalised log-probabilities, −inf excluded → [rows] float64."""
    entropy = torch.special.entr(logp.exp()).sum(-1, dtype=torch.float64)
    least: Tensor = (delta * (-entropy).exp()).clamp_max(epsilon)
    return least


def typical(parents: Sequence[int], tokens: Sequence[int], logp: Tensor, choices: Sequence[int], dead: Collection[int] = ()) -> Verdict:
    """The longest path of typical nodes stands, of equal ones the first; the target's choice after it is the next token.

    logp [n+1, V]: the target's log-probabilities, the root's row first; choices [n+1]: its choice at every row. Any tree.
    dead: nodes behind which there is no token: nobody but the target's own choice leads there.
    """
    assert len(choices) == len(tokens) + 1 == len(parents) + 1 == logp.shape[0], "one row and one choice per node, the root's first"
    rows = [parent + 1 for parent in parents]
    chance = logp[rows, list(tokens)].double().exp()
    good = (chance > threshold(logp)[rows]).tolist()
    stands: list[bool] = []
    for node, parent in enumerate(parents):
        stands.append(good[node] and node not in dead and (parent < 0 or stands[parent]))
    reach = [depth if stood else 0 for depth, stood in zip(depths(parents), stands, strict=True)]
    best = max(range(len(reach)), key=reach.__getitem__, default=-1)
    kept = set(path(parents, best)) if best >= 0 and reach[best] else set()
    accepted, rejected, role = walk(parents, [node in kept for node in range(len(parents))])
    return Verdict(accepted, choices[accepted[-1] + 1 if accepted else 0], role, rejected)
