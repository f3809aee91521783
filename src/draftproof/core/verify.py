"""The rules: what stands of a draft. Pure: laws, coins and noise keys in, verdict out.

    match   the target chooses with noise that the drafter shares; the draft only has to guess the choice   chains, all trees
    ratio   accept with min(1, p/q), else draw from what q left over                                         chains, trees
    block   judge all prefixes of a chain jointly; never accepts less than ratio                             chains
    lossy-typical   accept what the target finds typical: keeps nothing (core/typical.py), runs only by name   chains, all trees

Under `match` every emitted token is the target's own choice. `ratio` and `block` keep the law of the text if the draft was
drawn from q, its noise and the coins are fresh, and no token was withheld after its value was seen. Each of the two is a
pair: *odds* (probabilities, no randomness, so that tests can enumerate them) and *draw* (coins → verdict).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

import torch
from torch import Tensor

from ..errors import DrafterError, OptionError
from ..types import LOSSY, Draft, DraftLaw, Rule, Verdict
from .tree import LawRows, Odds, draw_next, normalised, passes, quotient, tree_draw, tree_odds, walk
from .upload import rows_of, uploaded

Shape = Literal["chain", "tree", "merged tree"]
"""A merged tree has siblings that were not drawn together from one law: several drafters' guesses, or several sampled chains."""

RULE_SHAPES: dict[Rule, tuple[Shape, ...]] = {
    "match": ("chain", "tree", "merged tree"),
    "ratio": ("chain", "tree"),
    "block": ("chain",),
    "lossy-typical": ("chain", "tree", "merged tree"),
}


def allowed(rule: Rule, shape: Shape, drafter: str) -> None:
    """Raises OptionError, naming the three, unless `rule` is exact on drafts of this shape."""
    if shape not in RULE_SHAPES[rule]:
        shapes = " or ".join(RULE_SHAPES[rule])
        rules = " or ".join(r for r, known in RULE_SHAPES.items() if shape in known and r not in LOSSY)
        raise OptionError(f"rule={rule}, shape={shape}, drafter={drafter}: rule {rule} would be biased there; "
                          f"it judges a {shapes}. Use rule {rules}, or a drafter that proposes a {shapes}")


def shares_noise(rule: Rule) -> bool:
    """Whether drafter and target draw with the same noise and no law of the draft is needed: `match`, and the lossy rule."""
    return rule == "match" or rule in LOSSY


def shape_of(draft: Draft) -> Shape:
    """A tree whose siblings name different rows of the draft's law is merged."""
    if draft.is_chain:
        return "chain"
    if draft.law is None:
        return "tree"
    drawn: dict[int, int] = {}
    alike = all(drawn.setdefault(parent, row) == row for parent, row in zip(draft.parents, draft.law.row, strict=True))
    return "tree" if alike else "merged tree"


def match(parents: Sequence[int], tokens: Sequence[int], choices: Sequence[int]) -> Verdict:
    """Walk down as long as a child is the target's own choice; the choice at the end is the next token.

    choices [n+1]: the target's choice at the root, then after each node. Of equal siblings the first stands. Exact path by
    path: the text is the target's for any draft (shared noise: Daliri, Musco and Suresh, arXiv 2408.07978).
    """
    assert len(choices) == len(tokens) + 1 == len(parents) + 1, "one choice per row, the root's first"
    guessed = [token == choices[parent + 1] for token, parent in zip(tokens, parents, strict=True)]
    accepted, rejected, role = walk(parents, guessed)
    return Verdict(accepted, choices[accepted[-1] + 1 if accepted else 0], role, rejected)


def short_of(verdict: Verdict, tokens: Sequence[int], dead: Collection[int]) -> Verdict:
    """The verdict, ended with the first accepted node in `dead`, behind which there is no token: it is the last one, as in plain decoding,
    and the round that would go on from there says why it cannot. tokens [n]: the nodes'."""
    for place, node in enumerate(verdict.accepted):
        if node in dead:
            return Verdict(verdict.accepted[:place], tokens[node], "bonus")
    return verdict


def dense_law(law: DraftLaw, vocab_size: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """q [n, V] over the target's vocabulary, one row per node. Raises DrafterError if it does not fit in V."""
    q = law.logq.to(dtype).softmax(-1)
    if law.ids is None and q.shape[1] > vocab_size:
        raise DrafterError(f"the draft's law has {q.shape[1]} tokens and no id map, the target {vocab_size}; "
                           "expected at most as many: give DraftLaw.ids, or cut the drafter's unused rows")
    if law.row != tuple(range(q.shape[0])):
        q = rows_of(q, law.row)
    if q.shape[1] == vocab_size and law.ids is None:
        return q
    ids = torch.arange(q.shape[1], device=q.device) if law.ids is None else law.ids.to(q.device)
    return q.new_zeros(q.shape[0], vocab_size).index_add_(1, ids, q)


def ratio_odds(p: Tensor, q: Tensor | None, tokens: Sequence[int]) -> Odds:
    """A chain's odds under `ratio`: accept[i] = min(1, pᵢ(xᵢ)/qᵢ(xᵢ)), residual[i] ∝ max(pᵢ − qᵢ, 0), residual[n] = pₙ.

    p [n+1, V], q [n, V] or None for point masses: then accept[i] = pᵢ(xᵢ), residual[i] ∝ pᵢ without xᵢ.
    Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318.
    """
    return tree_odds(p, q, tokens, range(-1, len(tokens) - 1))


def ratio_draw(odds: Odds, coins: Tensor, keys: Tensor | None) -> Verdict:
    """Stop at the first coin that is not below its odds. coins [n] float64; keys [n+1, 2] of the residual stream."""
    return tree_draw(odds, range(-1, odds.accept.shape[0] - 1), coins, keys)


def block_odds(p: Tensor, q: Tensor | None, tokens: Sequence[int]) -> Odds:
    """A chain's odds under `block`: accept[i−1] = hᵢ, the chance that a prefix of i tokens stands if no longer one does.

    ρ₀ = 1, ρᵢ = min(1, ρᵢ₋₁ pᵢ(xᵢ)/qᵢ(xᵢ)); residual[i] ∝ max(ρᵢ pᵢ₊₁ − qᵢ₊₁, 0) with mass Zᵢ; hᵢ = Zᵢ/(Zᵢ + 1 − ρᵢ), hₙ = ρₙ.
    p [n+1, V], q [n, V] or None for point masses, where Zᵢ = ρᵢ (1 − pᵢ₊₁(xᵢ₊₁)). Sun et al., arXiv 2403.10444.
    """
    n = len(tokens)
    token = uploaded(tokens, p.device, torch.int64).view(n, 1)
    chance = p[:n].gather(1, token).to(torch.float64)
    if q is not None:
        chance = quotient(chance, q.gather(1, token).to(torch.float64))
    stands = [chance.new_ones(())]
    for step in chance[:, 0]:
        stands.append((stands[-1] * step).clamp_max(1))
    rho = torch.stack(stands)

    def leftover(law: Tensor, draft: Tensor | None, ids: Tensor) -> Tensor:
        return law.scatter_(-1, ids, 0) if draft is None else law.sub_(draft).clamp_min_(0)

    def rest(row: int) -> Tensor:
        law = p[row].to(torch.float64)
        return law if row == n else normalised(leftover(rho[row] * law, None if q is None else q[row], token[row]), law)

    mass = leftover(rho[:n, None].to(p.dtype) * p[:n], q, token).sum(1, dtype=torch.float64)
    room = mass + 1 - rho[:n]
    ends = torch.where(room <= 0, 1.0, mass / room)
    return Odds(torch.cat((ends[1:], rho[n:]))[:n], rest, p.dtype)


def block_draw(odds: Odds, coins: Tensor, keys: Tensor | None) -> Verdict:
    """The longest prefix whose coin is below its odds stands, whatever happened to shorter ones. Arguments as `ratio_draw`."""
    n = odds.accept.shape[0]
    length = max((i + 1 for i, passed in enumerate(passes(odds, coins)) if passed), default=0)
    accepted, rejected, role = walk(range(-1, n - 1), [i < length for i in range(n)])
    return Verdict(accepted, draw_next(odds, length, keys), role, rejected)


def joint(rule: Rule, draft: Draft, logp: Tensor, coins: Tensor, keys: Tensor | None) -> Verdict:
    """The verdict of `ratio` or `block` on one draft.

    logp [n+1, V]: the target's log-probabilities, root first; coins [n] float64 in (0, 1); keys [n+1, 2] of the residual
    stream, None at temperature 0. Laws keep the precision of logp; what is decided from them is float64.
    Raises OptionError for a shape that the rule cannot judge, DrafterError for a false law.
    """
    assert not shares_noise(rule), f"{rule} needs the target's choices"
    allowed(rule, shape_of(draft), draft.drafter)
    q = None if draft.law is None else dense_law(draft.law, logp.shape[1], logp.dtype).to(logp.device)
    tokens = draft.tokens.tolist()
    if rule == "block":
        return block_draw(block_odds(logp.softmax(-1), q, tokens), coins, keys)
    return tree_draw(tree_odds(LawRows(logp), q, tokens, draft.parents), draft.parents, coins, keys)
