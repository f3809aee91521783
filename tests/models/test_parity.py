"""float32, greedy: the same ids as `transformers.generate`, with speculation on and off, for one sequence and for four.

The window of sliding models is shorter than the text, and pages of 16 tokens make every text cross several page edges.
"""

from __future__ import annotations

from pathlib import Path

import families
import pytest
import torch

from draftproof.config import LoadConfig
from draftproof.models.load import load_target
from draftproof.models.target import Target
from draftproof.types import Draft

NEW = 64
LENGTHS = (40, 7, 22, 33)


def prompts() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, 200, (n,), generator=generator) for n in LENGTHS]


def reference(model: torch.nn.Module, prompt: torch.Tensor) -> list[int]:
    out = model.generate(
        prompt[None],
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=NEW,
        min_new_tokens=NEW,
        do_sample=False,
        pad_token_id=0,
    )  # type: ignore[operator]
    ids: list[int] = out[0, len(prompt) :].tolist()
    return ids


def generate(target: Target, texts: list[torch.Tensor], depth: int, oracle: list[list[int]]) -> list[list[int]]:
    """Greedy rounds over a batch; drafts are the reference's own tokens with every third one wrong, so rejection always runs."""
    slots = [target.open(t.tolist(), room=NEW + depth + 2) for t in texts]
    out: list[list[int]] = []
    for slot, text in zip(slots, texts, strict=True):
        for start in range(slot.length, len(text), 9):  # the second run finds its first pages in the prefix cache
            scores = target.extend([slot], [text[start : start + 9]])
        out.append([int(scores.logits[0].argmax())])
    while any(len(o) < NEW for o in out):
        drafts = []
        for o, want in zip(out, oracle, strict=True):
            guess = [(t + (1 if (len(o) + i) % 3 == 2 else 0)) % 200 for i, t in enumerate(want[len(o) : len(o) + depth])]
            drafts.append(Draft.chain(guess))
        scores = target.score(slots, torch.tensor([o[-1] for o in out]), drafts)
        for i, (slot, draft) in enumerate(zip(slots, drafts, strict=True)):
            choices = scores.logits[scores.rows(i)].argmax(-1).tolist()
            kept = 0
            while kept < len(draft) and draft.tokens[kept] == choices[kept]:
                kept += 1
            out[i] += choices[: kept + 1]
            target.rewind(slot, tuple(range(kept)))
    for slot in slots:
        target.close(slot)
    return [o[:NEW] for o in out]


@pytest.mark.parametrize("family", families.FAMILIES)
def test_greedy_ids_equal_transformers_generate(family: str, tmp_path: Path) -> None:
    """One text's by `generate`; the others' by induction, since each token is what transformers chooses behind those before it."""
    model = families.save(family, tmp_path)
    texts = prompts()
    target = load_target(tmp_path, LoadConfig(page_tokens=16, self_test=False, threads=torch.get_num_threads()))
    assert target.facts.tier == (2 if family in families.TIER_2 else 1), target.facts.reasons
    assert target.facts.reasons["tier"].startswith(str(target.facts.tier))
    want = generate(target, texts, 0, [[]] * len(texts))
    assert want[0] == reference(model, texts[0])
    assert all(ids == families.chosen(model, text, ids) for text, ids in zip(texts, want, strict=True))
    assert len({tuple(w[-16:]) for w in want}) > 1 and len(set(want[0])) > 3, "the text must vary, or the test shows nothing"
    assert generate(target, texts, 4, want) == want
    for depth in (0, 4):
        assert generate(target, texts[:1], depth, want[:1]) == want[:1]
