"""What a round drew can be drawn again by whoever knows the two laws, from the seed and the trace alone (docs/design.md, section 3)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from draftproof import Draft, Engine, EngineConfig, Sampling
from draftproof.core.choice import choose
from draftproof.core.noise import key, key_rows, uniform
from draftproof.core.tree import depths, path
from draftproof.core.verify import joint
from draftproof.drafters.model import ModelDrafter
from draftproof.models.fake import TableTarget
from draftproof.trace.events import RoundDone
from draftproof.types import DraftLaw

SEED = 2**40 + 3
P, Q = (TableTarget(vocab_size=5, order=1, seed=seed, sharpness=1.0) for seed in (1, 2))


def likeliest(law: TableTarget, text: Sequence[int]) -> list[Any]:
    """As level full tells them: three, and how likely they are."""
    chances, ids = law.law(text).exp().topk(3)
    return [(token, pytest.approx(chance, rel=1e-5)) for token, chance in zip(ids.tolist(), chances.tolist(), strict=True)]


class Again:
    """One sample, drawn anew round by round. attempts: position → rounds in which it could be drafted."""

    def __init__(self, rule: str, sample: int, text: list[int]) -> None:
        self.rule, self.sample, self.text = rule, sample, text
        self.attempts: Counter[int] = Counter()

    def keys(self, stream: str, places: Sequence[int]) -> torch.Tensor:
        return key_rows([key(SEED, self.sample, stream, at, 0 if stream == "text" else self.attempts[at]) for at in places], "cpu")

    def chosen(self, law: TableTarget, text: Sequence[int], stream: str) -> int:
        return int(choose(law.law(text)[None], self.keys(stream, [len(text)])))

    def round(self, event: RoundDone) -> None:
        """The draft's first guess behind each node, the coins, and what was emitted."""
        tokens, parents = [node.token for node in event.nodes], tuple(node.parent for node in event.nodes)
        texts = [[*self.text, *(tokens[n] for n in path(parents, node))] for node in range(-1, len(tokens))]
        stream = "text" if self.rule == "match" else "draft"
        for parent in dict.fromkeys(parents):
            assert tokens[parents.index(parent)] == self.chosen(Q, texts[parent + 1], stream)
        self.told(event, parents, texts)
        if self.rule == "match" or not tokens:
            for token in event.tokens:
                assert token.token == self.chosen(P, self.text, "text")
                self.text.append(token.token)
        else:
            emitted = self.judged(event, tokens, parents, texts)
            assert [token.token for token in event.tokens] == emitted
            self.text += emitted
        for at in range(event.position, event.position + event.depth):
            self.attempts[at] += 1

    def told(self, event: RoundDone, parents: tuple[int, ...], texts: list[list[int]]) -> None:
        """The probabilities of every guess and every token, and the likeliest tokens in its place: the drafter's where it guessed there."""
        for node, parent in zip(event.nodes, parents, strict=True):
            chances = [float(law.law(texts[parent + 1])[node.token].exp()) for law in (P, Q)]
            assert [node.p, node.q] == [pytest.approx(chance, rel=1e-5) for chance in chances]
        walked = [-1, *(i for i, node in enumerate(event.nodes) if node.fate == "accepted")]
        for token, at in zip(event.tokens, walked, strict=True):
            assert token.p == pytest.approx(float(P.law(texts[at + 1])[token.token].exp()), rel=1e-5)
            assert [(one.token, one.probability) for one in token.alternatives] == likeliest(P, texts[at + 1])
            guessed = likeliest(Q, texts[at + 1]) if at in parents else []
            assert [(one.token, one.probability) for one in token.draft_alternatives] == guessed

    def judged(self, event: RoundDone, tokens: list[int], parents: tuple[int, ...], texts: list[list[int]]) -> list[int]:
        places = [len(self.text) + depth - 1 for depth in depths(parents)]
        coins = uniform(self.keys("coin", places), torch.arange(len(tokens))[:, None])[:, 0]
        assert [node.coin for node in event.nodes] == coins.tolist()
        p, q = (torch.stack([law.law(text) for text in texts]) for law in (P, Q))
        draft = Draft(torch.tensor(tokens), parents, law=DraftLaw(q.float(), tuple(parent + 1 for parent in parents)))
        verdict = joint(self.rule, draft, p, coins, self.keys("residual", [len(self.text), *(at + 1 for at in places)]))  # type: ignore[arg-type]
        return [*(tokens[node] for node in verdict.accepted), verdict.next_token]


@pytest.mark.parametrize(("rule", "tree"), [("match", None), ("match", 5), ("ratio", None), ("ratio", 5), ("block", None)])
def test_a_round_can_be_drawn_again(rule: str, tree: int | None) -> None:
    with Engine(target=P, drafter=ModelDrafter(Q), depth=3, tree=tree, rule=rule, config=EngineConfig(trace="full")) as engine:  # type: ignore[arg-type]
        out = engine.generate([1, 4], Sampling(temperature=1.0, top_p=1.0, seed=SEED, max_tokens=40, n=2))
        assert engine.speculation.state[0] == "on", engine.speculation.failure
    drafted: Counter[int] = Counter()
    for sample, one in enumerate(out.samples):
        again = Again(rule, sample, [1, 4])
        again.text.append(again.chosen(P, again.text, "text"))
        for event in one.trace:
            if event.event == "round_done":
                again.round(event)
        assert again.text == [1, 4, *one.token_ids]
        drafted += again.attempts
    assert out.samples[0].token_ids != out.samples[1].token_ids and max(drafted.values()) > 3, "positions are drafted again and again"
