"""Our kernels on a GPU: what an interpreter and a compiler alone cannot show."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
ROWS = (5, 16, 17, 40, 64, 100, 128, 200, 320, 600)


def rounded(weight: Tensor, eight: bool) -> tuple[Tensor, Tensor | None]:
    """In sixteen bits, or in eight with a step for each output."""
    steps = weight.abs().amax(1, keepdim=True) / 448
    return ((weight / steps).to(torch.float8_e4m3fn), steps) if eight else (weight.bfloat16(), None)


@pytest.mark.parametrize("outputs, inputs", [(4096, 4096), (6144, 1024), (1000, 2048), (512, 14336)])
@pytest.mark.parametrize("eight", [False, True])
def test_a_row_has_the_bits_that_it_has_alone(outputs: int, inputs: int, eight: bool) -> None:
    """In tiles of every size, which other instructions multiply; plain, added and gated; rows of very different sizes, so that sums would
    show another order."""
    from draftproof.gpu import calls

    dice = torch.Generator("cuda").manual_seed(outputs)
    sizes = torch.randn(max(ROWS), inputs, generator=dice, device="cuda").mul_(2).exp_()
    x = (torch.randn(max(ROWS), inputs, generator=dice, device="cuda") * sizes).clamp(-1e4, 1e4)
    x = x.to(torch.float16 if eight else torch.bfloat16)
    weight, steps = rounded(torch.randn(outputs, inputs, generator=dice, device="cuda"), eight)
    onto = torch.randn(max(ROWS), outputs, generator=dice, device="cuda").bfloat16()

    def three(rows: slice) -> list[Tensor]:
        ours = partial(calls.product, x[rows], weight, None, steps)
        return [ours(kind=torch.bfloat16), ours(onto=onto[rows].clone()), ours(gated=True, kind=torch.bfloat16)]

    alone = [torch.cat(each) for each in zip(*(three(slice(i, i + 1)) for i in range(max(ROWS))), strict=True)]
    for rows in ROWS:
        for found, right in zip(three(slice(0, rows)), alone, strict=True):
            assert torch.equal(found, right[:rows]), f"{rows} rows"


@pytest.mark.parametrize("heads, kv, dim, inputs", [(32, 8, 128, 4096), (9, 3, 64, 576), (8, 2, 96, 1000)])
@pytest.mark.parametrize("eight", [False, True])
def test_heads_in_one_kernel_are_the_product_turned(heads: int, kv: int, dim: int, inputs: int, eight: bool) -> None:
    """Queries, keys and values have the bits that two kernels give; a row without a place writes nothing."""
    from draftproof.gpu import calls

    dice = torch.Generator("cuda").manual_seed(dim)
    outputs, kind = (heads + 2 * kv) * dim, torch.float16 if eight else torch.bfloat16
    matrix, steps = rounded(torch.randn(outputs, inputs, generator=dice, device="cuda"), eight)
    for rows in range(1, calls.FEW + 1):
        x = torch.randn(rows, inputs, generator=dice, device="cuda").mul_(2).exp_().clamp_(max=1e3).to(kind)
        angles = torch.randn(rows, 2, dim, generator=dice, device="cuda").bfloat16()
        to = torch.randperm(100, generator=dice, device="cuda")[:rows]
        to[rows // 2] = -1 if rows > 1 else to[0]
        stores = [[torch.zeros(100, kv, dim, dtype=torch.bfloat16, device="cuda") for _ in range(2)] for _ in range(2)]
        wanted = calls.product(x, matrix, None, steps, kind=torch.bfloat16)
        calls.turn(wanted, angles, None, 0.0, to, torch.arange(rows, device="cuda"), *stores[0])
        found = calls.heads(x, matrix, None, steps, angles, to, *stores[1], torch.bfloat16)
        assert torch.equal(found[:, :heads * dim], wanted[:, :heads * dim]) and all(map(torch.equal, *stores)), f"{rows} rows"


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("tree", [None, 15])
def test_the_built_in_head_drafts_by_our_kernels_what_it_drafts_by_torch(temperature: float, tree: int | None) -> None:
    """Of half precision, whose roundings may decide between near candidates: nearly as many tokens stand, and the text is the same."""
    from draftproof import Engine, LoadConfig, Sampling
    from draftproof.drafters.recurrent import RecurrentDrafter
    from draftproof.models.heads import rows

    sampling = Sampling(temperature=temperature, seed=3, max_tokens=200, ignore_eos=True)
    texts, lengths = [], []
    for ours in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not ours:
                patch.setattr(rows, "knows", lambda head: False)
            with Engine(None, "eagle3", 6, tree=tree, load=LoadConfig(device="cuda", dtype="bfloat16")) as engine:
                drafter = engine.speculation.drafter
                done = [engine.generate(prompt, sampling) for prompt in ("def add(left, right):", "class Stack:", "import os\n\n")]
                assert isinstance(drafter, RecurrentDrafter) and drafter.recorded is not None and drafter.recorded.ours == ours
                assert drafter.recorded.held and not drafter.recorded.failed, drafter.recorded.failed
        texts.append([one.token_ids for one in done])
        lengths.append(sum(one.metrics["acceptance_length"] for one in done) / 3)
    assert texts[0] == texts[1] and lengths[0] > 0.9 * lengths[1] > 1.5, lengths


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("tree", [None, 15])
def test_rows_are_remembered_across_the_bus(temperature: float, tree: int | None) -> None:
    """What was likely is read from the device each round: texts are plain decoding's, and a text that is written again is guessed."""
    from draftproof import Engine, LoadConfig, Sampling

    sampling = Sampling(temperature=temperature, seed=3, max_tokens=120, ignore_eos=True)
    texts, lengths = [], []
    for drafter, depth, nodes in (("none", "auto", None), ("recycle", 6, tree)):
        with Engine(None, drafter, depth, tree=nodes, load=LoadConfig(device="cuda", dtype="bfloat16")) as engine:
            done = [engine.generate("class Stack:", sampling) for _ in range(2)]
        texts.append([one.token_ids for one in done])
        lengths.append(done[1].metrics["acceptance_length"])
    assert texts[0] == texts[1] and lengths[1] > 4, lengths
