"""Learning to be accepted at a temperature, where a head cannot know the whole law."""

from __future__ import annotations

import pytest
import torch

from draftproof.core.budget import match_acceptance
from draftproof.models.fake import TableTarget
from draftproof.models.heads.eagle3 import Eagle3Head
from draftproof.train.eagle3 import Eagle3Task, acceptance


def laws(rows: int, size: int, seed: int) -> torch.Tensor:
    return (torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * 4).log_softmax(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_chance_is_that_of_shared_noise(temperature: float) -> None:
    p = laws(40, 60, 1)
    q = p + 0.2 * laws(40, 60, 2)
    exact = match_acceptance((p / temperature).softmax(-1), (q / temperature).softmax(-1))
    assert torch.allclose(acceptance(q, p.exp(), temperature, top=60), exact, atol=1e-5)
    some = acceptance(q, p.exp(), temperature)
    assert bool((some >= exact - 1e-6).all()) and float((some - exact).max()) < 0.02, "what is taken as one token adds little"


def test_its_slope_is_that_of_its_values() -> None:
    p, q, way = laws(5, 60, 3).exp(), laws(5, 60, 4).requires_grad_(), laws(5, 60, 5)
    acceptance(q, p, 0.8).sum().backward()
    assert q.grad is not None
    with torch.no_grad():
        ahead, behind = (acceptance(q + step * way, p, 0.8).sum() for step in (1e-3, -1e-3))
    assert float((q.grad * way).sum()) == pytest.approx(float(ahead - behind) / 2e-3, rel=0.01)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_one_law_for_several_texts_is_accepted_more_often_than_their_mean(temperature: float) -> None:
    """Three texts that a head cannot tell apart: cross-entropy leads to the mean of their laws, which is not what stands most often."""
    three = torch.tensor([[0.7, 0.1, 0.1, 0.1], [0.1, 0.7, 0.1, 0.1], [0.7, 0.1, 0.1, 0.1]])
    stand = {}
    for accept_at in (None, temperature):
        head = Eagle3Head.fresh(TableTarget(8, order=1).parts, None, hidden=32, heads=2, kv_heads=1, head_dim=16, inner=48)
        task = Eagle3Task(head, TableTarget(8, order=1).parts, accept_at=accept_at)
        one = torch.zeros(4, requires_grad=True)
        optimizer = torch.optim.Adam([one], lr=0.02)
        for _ in range(1500):
            optimizer.zero_grad()
            task._wrong(one.expand(3, -1), three).mean().backward()
            optimizer.step()
        stand[accept_at] = float(acceptance(one.detach().expand(3, -1), three, temperature).mean())
        if accept_at is None:
            assert torch.allclose(one.detach().softmax(-1), three.mean(0), atol=0.01)
    assert stand[temperature] > stand[None] + 0.05, stand
