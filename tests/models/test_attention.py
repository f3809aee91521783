"""The flash kernel against its plain twin, and the merge of pages against one softmax over all keys."""

from __future__ import annotations

import pytest
import torch

from draftproof.models.attention import TILE, flash_page, merge, plain_page
from draftproof.models.passes import Pass, Path


def one_pass(lengths: list[int], rows: list[int], page: int) -> Pass:
    """A pass in which sequence i holds lengths[i] keys and runs rows[i] more; its pages are consecutive."""
    positions: list[int] = []
    paths: list[Path] = []
    first = 1
    for length, n in zip(lengths, rows, strict=True):
        pages = list(range(first, first + (length + n) // page + 1))
        first = pages[-1] + 1
        paths.append(Path(pages, list(range(len(positions), len(positions) + n))))
        positions += range(length, length + n)
    ids = torch.zeros(1, len(positions), dtype=torch.int64)
    return Pass(ids, torch.tensor([positions]), positions, torch.arange(len(positions)), None, paths, page, TILE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("group", [1, 2, 7])
def test_pages_merge_to_one_softmax(dtype: torch.dtype, window: int | None, group: int) -> None:
    generator = torch.Generator().manual_seed(group)
    kv, dim, page, lengths, rows = 2, 16, 16, [37, 3, 60], [5, 2, 1]
    p = one_pass(lengths, rows, page)
    items = p.items(window, group, dtype)
    store = torch.randn(2, 12 * page, kv, dim, generator=generator).to(dtype)
    query = torch.randn(sum(rows), kv * group, dim, generator=generator).to(dtype)
    taken = query if items.take is None else query[items.take]
    q = taken.reshape(items.paths, items.width, kv, group, dim).permute(0, 2, 3, 1, 4).reshape(items.paths, kv, group * items.width, dim)
    q = q if items.owner is None else q[items.owner]
    k, v = (s.view(-1, page, kv, dim)[items.pages].transpose(1, 2) for s in store)
    results = []
    for function in (flash_page, plain_page):
        out, lse = function(q, k, v, items.bias, dim**-0.5)
        merged = (
            merge(out, lse, items, None).view(items.paths, kv, group, items.width, dim).permute(0, 3, 1, 2, 4).reshape(-1, kv * group, dim)
        )
        results.append((merged if items.back is None else merged[items.back]).float())
    row = 0
    want = torch.empty_like(results[0])
    for path, length, n in zip(p.paths, lengths, rows, strict=True):
        for i in range(n):
            at = length + i
            low = max(0, at - window + 1) if window else 0
            places = torch.tensor([path.pages[t // page] * page + t % page for t in range(low, at + 1)])
            keys, values = store[0][places].float(), store[1][places].float()
            for head in range(kv * group):
                weights = (keys[:, head // group] @ query[row, head].float() * dim**-0.5).softmax(0)
                want[row, head] = weights @ values[:, head // group]
            row += 1
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for got in results:
        torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)


def test_soft_caps_and_sinks() -> None:
    generator = torch.Generator().manual_seed(0)
    p = one_pass([10], [2], 16)
    items = p.items(None, 2, torch.float32)
    q, k, v = (torch.randn(1, 2, n, 8, generator=generator) for n in (4, 16, 16))
    out, lse = plain_page(q, k, v, items.bias, 1.0, softcap=2.0)
    scores = 2.0 * torch.tanh(q @ k.transpose(-1, -2) / 2.0) + items.bias
    torch.testing.assert_close(out, scores.softmax(-1) @ v)
    sinks = torch.randn(2, 4, generator=generator)
    with_sink = torch.cat([scores, sinks[None, :, :, None]], -1).softmax(-1)[..., :-1] @ v
    torch.testing.assert_close(merge(out, lse, items, sinks), with_sink)


@pytest.mark.parametrize("function", [flash_page, plain_page])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_query_does_not_depend_on_the_queries_beside_it(function: object, dtype: torch.dtype) -> None:
    """Whole tiles only: 4, 8, 12, 20 and 64 queries give the same bits to each of them."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, 2, n, 64, generator=generator).to(dtype) for n in (64, 256, 256))
    bias = torch.zeros(1, 1, 64, 256, dtype=dtype)
    whole, logs = function(q, k, v, bias, 0.125)  # type: ignore[operator]
    for start, count in ((0, 4), (4, 8), (8, 12), (40, 20), (60, 4)):
        part, log = function(q[:, :, start : start + count], k, v, bias[:, :, :count], 0.125)  # type: ignore[operator]
        assert torch.equal(part, whole[:, :, start : start + count]) and torch.equal(log, logs[:, :, start : start + count])
