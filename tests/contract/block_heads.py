"""Block drafters with random weights over `TableTarget`, for the contract tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from draftproof.drafters.dflash import DFlashDrafter
from draftproof.drafters.dflash2 import DFlash2Drafter
from draftproof.drafters.domino import DominoDrafter
from draftproof.drafters.dspark import DSparkDrafter
from draftproof.drafters.pard import PardDrafter
from draftproof.drafters.xpress import XPressDrafter
from draftproof.models.fake import TableTarget
from draftproof.models.heads.dflash import DFlash
from draftproof.models.heads.dflash2 import DFlash2, LocalConv
from draftproof.models.heads.domino import Domino
from draftproof.models.heads.dspark import DSpark
from draftproof.models.heads.layout import View
from draftproof.models.heads.xpress import XPress

V = 13
NextToken = Callable[[Sequence[int]], int]
SIZES = {"heads": 4, "kv_heads": 2, "head_dim": 8, "inner": 32}


def _soft(head: DFlash, **more: Any) -> None:
    """The table's output matrix makes random states far too sure."""
    head.layout = replace(head.layout, output_scale=0.1, **more)


def dflash(target: TableTarget, views: tuple[View, ...] = (View(), View()), **more: Any) -> DFlashDrafter:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        head = DFlash.fresh(target.parts, **{"block": 6, "mask_token": 0, **SIZES, **more})
    _soft(head, views=views)
    return DFlashDrafter(head, target.vocab_size)


def cut(target: TableTarget) -> DFlashDrafter:
    """A head with a vocabulary and an output matrix of its own."""
    whole, ids = dflash(target).head, torch.tensor([0, 2, 3, 5, 7, 8, 12])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(6)
        head = DFlash(target.parts, whole.shape, whole.layout, whole.config, own_output=len(ids), ids=ids)
        torch.nn.init.normal_(head.lm_head.weight)  # type: ignore[union-attr]
    return DFlashDrafter(head, target.vocab_size)


def dspark(target: TableTarget, **more: Any) -> DSparkDrafter:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        head = DSpark.fresh(target.parts, **{"block": 5, "rank": 8, **SIZES, **more})
        assert head.markov_head is not None
        torch.nn.init.normal_(head.markov_head.markov_w2.weight)
    _soft(head)
    return DSparkDrafter(head, target.vocab_size)


def dflash2(target: TableTarget, views: tuple[View, ...] = (View(), View()), **more: Any) -> DFlash2Drafter:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        head = DFlash2.fresh(target.parts, **{"block": 6, "mask_token": 0, "rank": 8, **SIZES, **more})
        torch.nn.init.normal_(head.candidate_selector.successor_codebook)
        for module in head.modules():
            if isinstance(module, LocalConv):
                torch.nn.init.normal_(module.base_kernel)
                torch.nn.init.normal_(module.kernel_projection.weight, std=0.3)
    assert head.layout.local is not None
    _soft(head, views=views, local=replace(head.layout.local, choices=7))
    return DFlash2Drafter(head, target.vocab_size)


def xpress(target: TableTarget, views: tuple[View, ...] = (View(), View()), from_anchor: bool = False, **more: Any) -> XPressDrafter:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(6)
        head = XPress.fresh(target.parts, **{"block": 6, "mask_token": 0, "rank": 8, **SIZES, **more})
        for weight in (head.xpress_head.w1.weight, head.xpress_head.w2.weight, head.xpress_head.mix["L"]):
            torch.nn.init.normal_(weight, std=2.0)
    _soft(head, views=views, from_anchor=from_anchor)
    head.reach = head.block if from_anchor else head.block - 1
    return XPressDrafter(head, target.vocab_size)


def domino(target: TableTarget, **more: Any) -> DominoDrafter:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(8)
        head = Domino.fresh(target.parts, **{"block": 6, "mask_token": 0, "rank": 8, **SIZES, **more})
        for weight in (head.prefix_gru.weight_ih_l0, head.embed_proj[0].weight, head.embed_proj[2].weight):
            torch.nn.init.normal_(weight)  # type: ignore[arg-type]
    head.embed_proj[0].weight.data[:, :head.shape.hidden] *= 0.1  # type: ignore[operator]
    _soft(head)
    return DominoDrafter(head, target.vocab_size)


BLOCK_HEADS: dict[str, Callable[[TableTarget, NextToken], Any]] = {
    "dflash": lambda target, truth: dflash(target),
    "dflash-sliding-short-context": lambda target, truth: dflash(target, (View(4, True), View(6)), context=15),
    "dflash-cut": lambda target, truth: cut(target),
    "dflash2": lambda target, truth: dflash2(target),
    "dflash2-sliding-short-context": lambda target, truth: dflash2(target, (View(4), View(6)), context=15),
    "dspark": lambda target, truth: dspark(target),
    "dspark-rnn": lambda target, truth: dspark(target, kind="rnn", confidence=False),
    "domino": lambda target, truth: domino(target),
    "xpress": lambda target, truth: xpress(target),
    "xpress-from-anchor-short-context": lambda target, truth: xpress(target, (View(4), View(6)), True, context=15),
    "pard": lambda target, truth: PardDrafter(TableTarget(V, order=1, seed=9), 0, prefill_chunk=3),
    "pard-padded-short-context": lambda target, truth: PardDrafter(TableTarget(V + 3, order=1, seed=9, context=20), V, V),
}
