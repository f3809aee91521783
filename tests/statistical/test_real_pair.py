"""Is the law of the text the target's, on the trained pair, under `ratio` and `block`? Two tests that look at whole texts.

Martingale. Given the text before it, each token x is drawn from p if the rule is exact. With d the drafter's likeliest token,
    z = Σ (1{x = d} − p(d)) / √Σ p(d)(1 − p(d))   and   l = Σ (log p(x) − E log p) / √Σ Var log p
are sums of centred terms over their standard deviation: standard normal in the limit. A rule that favours the draft moves z.

Randomised PIT. With tokens ordered by the drafter's belief, u = P(before x) + v·p(x), v uniform, is uniform on (0, 1).

False alarms: |z| or |l| > 4.9 has probability 1e-6 each, a Kolmogorov–Smirnov p-value below 1e-6 likewise: 6e-6 for the
file, and seeds are fixed. Power: with 5,000 tokens and Σp(1−p) ≈ 0.15 per token, a bias of 4.1 points towards the draft
is found with probability 0.98 (2.7 points: one half); the planted rules below are found every time.
p and q are computed anew from the finished text in one pass, not taken from the engine.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from draftproof.config import EngineConfig, LoadConfig
from draftproof.core import verify
from draftproof.core.edits import Rows
from draftproof.core.probs import distribution
from draftproof.core.tree import Odds
from draftproof.engine.engine import Engine
from draftproof.models.load import WEIGHTS, builtin, load_target
from draftproof.models.target import Target
from draftproof.types import Draft, Rule, Sampling

TOKENS, PROMPTS, DEPTH = 160, 32, 4
LIMIT, SMALLEST = 4.9, 1e-6


@cache
def pair() -> tuple[Target, Target]:
    quick = LoadConfig(self_test=False)
    return load_target(builtin("target"), quick), load_target(builtin("draft"), quick)


def texts(rule: Rule, count: int, temperature: float) -> list[tuple[list[int], list[int]]]:
    target, _ = pair()
    assert target.tokenizer is not None
    lines = [json.loads(line) for line in (WEIGHTS / "prompts.jsonl").read_text("utf-8").splitlines()]
    prompts = [target.tokenizer.encode(line["prompt"])[:80] for line in lines][:count]
    options = [Sampling(temperature=temperature, top_p=1.0, seed=i, max_tokens=TOKENS, ignore_eos=True) for i in range(len(prompts))]
    with Engine(target, "model", DEPTH, rule=rule, config=EngineConfig(max_batch=PROMPTS, trace="none")) as engine:
        outs = engine.generate_batch(prompts, options)
    assert sum(o.metrics["accepted"] for o in outs) > 1000, "hardly a draft was accepted: nothing was tested"
    return [(p, list(o.token_ids)) for p, o in zip(prompts, outs, strict=True)]


def laws(model: Target, prompt: list[int], output: list[int], temperature: float) -> Tensor:
    """log-probabilities [len(output), V] of every output token's place, from one pass over the finished text."""
    slot = model.open(prompt[:2], tenant="statistics", room=len(prompt) + len(output) + 8)
    model.extend([slot], [torch.tensor(prompt[:-1])])
    logits = model.score([slot], torch.tensor(prompt[-1:]), [Draft.chain(output[:-1])]).logits
    model.rewind(slot, ())
    model.close(slot)
    row = Rows(Sampling(temperature=temperature, top_p=1.0), (), 0, ((),) * len(output), frozenset())
    return distribution(logits, [row]).double()


def statistics(found: list[tuple[list[int], list[int]]], temperature: float) -> tuple[float, float, float]:
    """(z, l, KS p-value) over all texts."""
    target, drafter = pair()
    hits, spread, surprise, variance, pits = 0.0, 0.0, 0.0, 0.0, []
    rng = np.random.default_rng(0)
    for prompt, output in found:
        logp, logq = laws(target, prompt, output, temperature), laws(drafter, prompt, output, temperature)
        p, x = logp.exp(), torch.tensor(output)[:, None]
        favourite = logq.argmax(-1, keepdim=True)
        pd = p.gather(1, favourite)
        hits += float(((x == favourite).double() - pd).sum())
        spread += float((pd * (1 - pd)).sum())
        finite = logp.clamp_min(-1e3)
        mean = (p * finite).sum(-1)
        surprise += float((finite.gather(1, x)[:, 0] - mean).sum())
        variance += float(((p * finite**2).sum(-1) - mean**2).sum())
        order = logq.argsort(-1, descending=True)
        sorted_p = p.gather(1, order)
        place = (order == x).int().argmax(-1, keepdim=True)
        before = (sorted_p.cumsum(-1) - sorted_p).gather(1, place)[:, 0].numpy()
        pits.append(before + rng.random(len(output)) * sorted_p.gather(1, place)[:, 0].numpy())
    ks = float(stats.kstest(np.clip(np.concatenate(pits), 0, 1), "uniform").pvalue)
    return hits / spread**0.5, surprise / variance**0.5, ks


@pytest.mark.parametrize("rule", ["ratio", "block"])
def test_the_law_of_the_text_is_the_targets(rule: Rule) -> None:
    z, surprise, ks = statistics(texts(rule, PROMPTS, 1.0), 1.0)
    assert abs(z) < LIMIT and abs(surprise) < LIMIT and ks > SMALLEST, (z, surprise, ks)


WRONG = {
    "accept where p ≥ q": lambda accept: (accept >= 1).double(),
    "accept a little too often": lambda accept: accept.sqrt(),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_planted_wrong_rule_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = verify.tree_odds

    def odds(p: Tensor, q: Tensor | None, tokens: Sequence[int], parents: Sequence[int]) -> Odds:
        found = right(p, q, tokens, parents)
        return Odds(WRONG[name](found.accept), found.rest)

    monkeypatch.setattr(verify, "tree_odds", odds)
    z, surprise, ks = statistics(texts("ratio", PROMPTS, 1.0), 1.0)
    assert abs(z) > LIMIT or abs(surprise) > LIMIT or ks < SMALLEST, (z, surprise, ks)
