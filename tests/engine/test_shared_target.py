"""Two engines with different heads over one target, step by step in turn: each reads the layers that its own drafter needs."""

from __future__ import annotations

from contract.eagle_heads import EAGLE_HEADS
from contract.vector_heads import VECTOR_HEADS

from draftproof.engine.engine import Engine
from draftproof.models.fake import TableTarget
from draftproof.types import Sampling

WISH = Sampling(temperature=0.7, top_p=1.0, seed=3, max_tokens=24)


def test_heads_do_not_take_each_others_layers() -> None:
    target = TableTarget(13, order=2, seed=1)
    makers = [EAGLE_HEADS["eagle3"], VECTOR_HEADS["medusa"]]
    alone = [Engine(target, make(target, None), 3).generate([1, 2, 3], WISH) for make in makers]
    engines = [Engine(target, make(target, None), 3) for make in makers]
    handles = [engine.submit([1, 2, 3], WISH)[0] for engine in engines]
    while not all(handle.done for handle in handles):
        for engine in engines:
            engine.step()
    for handle, expected in zip(handles, alone, strict=True):
        done = handle.completion()
        assert done.speculation["state"] == "on" and done.token_ids == expected.token_ids
        assert (done.metrics["drafted"], done.metrics["accepted"]) == (expected.metrics["drafted"], expected.metrics["accepted"])
