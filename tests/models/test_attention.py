"""The flash kernel against its plain twin, the merge of pages against one softmax over all keys, and pages against their places."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from draftproof import native
from draftproof.models.attention import TILE, attend, flash_page, merge, plain_page
from draftproof.models.cache import PagePool
from draftproof.models.passes import LEAST_RUN, MOST_COPIED, Pass, Path, calls_of


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
@pytest.mark.parametrize("window", [None, 20, -20])
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
    (call,) = items.calls
    q = q[call.owner]
    k, v = (s.view(-1, page, kv, dim)[call.pages].transpose(1, 2) for s in store)
    results = []
    for function in (flash_page, plain_page):
        out, lse = function(q, k, v, call.bias, dim**-0.5)
        merged = merge(out, lse, items, items.dead, None).view(items.paths, kv, group, items.width, dim).permute(0, 3, 1, 2, 4)
        merged = merged.reshape(-1, kv * group, dim)
        results.append((merged if items.back is None else merged[items.back]).float())
    row = 0
    want = torch.empty_like(results[0])
    for path, length, n in zip(p.paths, lengths, rows, strict=True):
        for i in range(n):
            at = length + i
            low = at // 20 * 20 if window == -20 else max(0, at - 19) if window else 0
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
    bias = items.calls[0].bias
    out, lse = plain_page(q, k, v, bias, 1.0, softcap=2.0)
    scores = 2.0 * torch.tanh(q @ k.transpose(-1, -2) / 2.0) + bias
    torch.testing.assert_close(out, scores.softmax(-1) @ v)
    sinks = torch.randn(2, 4, generator=generator)
    with_sink = torch.cat([scores, sinks[None, :, :, None]], -1).softmax(-1)[..., :-1] @ v
    torch.testing.assert_close(merge(out, lse, items, None, sinks), with_sink)


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


@pytest.mark.parametrize("function", [flash_page, plain_page])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv", [1, 3])
@pytest.mark.parametrize("queries", [4, 24, 256])
def test_an_item_does_not_depend_on_the_items_beside_it(function: Callable[..., tuple[Tensor, Tensor]], dtype: torch.dtype, kv: int,
                                                        queries: int) -> None:
    """However many items a call has, and wherever they lie, each gets the bits that it gets among all."""
    generator = torch.Generator().manual_seed(4)
    count = 13
    q, k, v = (torch.randn(count, n, kv, 64, generator=generator).to(dtype).transpose(1, 2) for n in (queries, 256, 256))
    bias = torch.zeros(count, 1, queries, 256, dtype=dtype)
    bias.masked_fill_(torch.rand(bias.shape, generator=generator) < 0.3, float("-inf"))
    whole, logs = function(q, k, v, bias, 0.125)
    for end in range(1, count + 1):
        for start in {0, end // 2, end - 1}:
            part, log = function(q[start:end], k[start:end], v[start:end], bias[start:end], 0.125)
            assert torch.equal(part, whole[start:end]) and torch.equal(log, logs[start:end])


P, KV, DIM, GROUP = 256, 2, 64, 2
PAGES = 30


def layouts() -> dict[str, list[int]]:
    """Places for `PAGES` pages: page i of a pass lies at layout[i] of the pool."""
    plain = list(range(1, PAGES + 1))
    shuffled = random.Random(1).sample(plain, PAGES)
    cuts = [0, 1, 3, 6, 10, 19, PAGES]  # runs of 1, 2, 3, 4, 9 and 11 pages, and none beside its neighbour
    runs = [plain[a:b] for a, b in pairwise(cuts)][::-1]
    return {"consecutive": plain, "reversed": plain[::-1], "scattered": shuffled, "in runs": sum(runs, [])}


def chain(layout: list[int]) -> Pass:
    """Three rows after 20 pages and 70 keys."""
    places = list(range(20 * P + 70, 20 * P + 73))
    write = slice(layout[20] * P + 70, layout[20] * P + 73)
    return Pass(torch.zeros(1, 3, dtype=torch.int64), torch.tensor([places]), places, write, None, [Path(layout[:21], range(3))], P, TILE)


def forest(layout: list[int]) -> Pass:
    """A tree of three leaves after 12 pages and 254 keys (so that it crosses an edge), a chain after 5 pages, and one after 9 keys."""
    base = 12 * P + 254
    depths = [0, 1, 2, 1, 2, 1]  # root, two nodes below it, two more, and a leaf
    positions = [base + d for d in depths] + [5 * P, 5 * P + 1, 9]
    trunk, leaves = layout[:12], [layout[12:14], layout[14:16], layout[16:18]]
    texts = [([0, 1, 2], [0, 1, 2]), ([0, 3, 4], [3, 4]), ([0, 5], [5])]
    paths = [Path([*trunk, *pages], mine) for pages, (_, mine) in zip(leaves, texts, strict=True)]
    paths += [Path(layout[18:24], [6, 7]), Path(layout[24:25], [8])]
    written = [(path, row) for path, (rows, _) in zip(paths, texts, strict=False) for row in rows]
    written += [(paths[3], 6), (paths[3], 7), (paths[4], 8)]
    to = torch.tensor([path.pages[positions[row] // P] * P + positions[row] % P for path, row in written])
    ids = torch.zeros(1, len(positions), dtype=torch.int64)
    return Pass(ids, torch.tensor([positions]), positions, to, torch.tensor([row for _, row in written]), paths, P, TILE)


@pytest.mark.parametrize("kind", [chain, forest])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", ["compiled", "capped", "flash", "plain"])
@pytest.mark.parametrize("window", [None, 7 * P + 3])
def test_bits_do_not_depend_on_where_the_pages_lie(kind: Callable[[list[int]], Pass], dtype: torch.dtype, way: str, window: int | None,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    softcap, ours = 20.0 if way in ("plain", "capped") else None, way in ("compiled", "capped")
    if ours and not native.available()[0]:
        pytest.skip(native.available()[1])
    if not ours:
        monkeypatch.setattr("draftproof.models.attention.compiled", lambda *_: False)
    generator = torch.Generator().manual_seed(6)
    held = [torch.randn(PAGES, P, KV, DIM, generator=generator).to(dtype) for _ in range(2)]
    rows = len(kind(layouts()["consecutive"]).position_list)
    query, key, value = (torch.randn(rows, n, DIM, generator=generator).to(dtype) for n in (KV * GROUP, KV, KV))
    results = {}
    for name, layout in layouts().items():
        pool = PagePool(P, PAGES * P, torch.device("cpu"))
        while pool.available():
            pool.take()
        for store, pages in zip(pool.storage(0, key, value), held, strict=True):
            store.view(-1, P, KV, DIM)[layout] = pages
        results[name] = attend(0, query, key, value, DIM**-0.5, window, kind(layout), pool, softcap)
    want = results.pop("consecutive")
    assert want.isfinite().all()
    for name, got in results.items():
        assert torch.equal(got, want), name
    if ours:
        monkeypatch.setattr("draftproof.models.attention.compiled", lambda *_: False)
        torch.testing.assert_close(want, attend(0, query, key, value, DIM**-0.5, window, kind(layout), pool, softcap), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("layout", layouts().values(), ids=layouts())
def test_calls_cover_the_items_once_and_copy_few_pages_at_a_time(layout: list[int]) -> None:
    owner = sorted(range(PAGES), key=lambda i: i // 2)
    bias = torch.arange(PAGES).view(-1, 1, 1, 1)
    calls = calls_of(layout, owner, bias)
    pages, owners = torch.arange(PAGES + 1), torch.arange(PAGES)
    assert torch.cat([pages[call.pages] for call in calls]).tolist() == layout
    assert torch.cat([owners[call.owner] for call in calls]).tolist() == owner
    assert torch.cat([call.bias for call in calls]).equal(bias)
    assert all(len(call.bias) <= MOST_COPIED for call in calls if not isinstance(call.pages, slice))
    where = {page: call for call in calls for page in pages[call.pages].tolist()}
    for start, end in pairwise([0, *(i for i in range(1, PAGES) if layout[i] != layout[i - 1] + 1), PAGES]):
        if end - start >= LEAST_RUN:
            assert where[layout[start]].pages == slice(layout[start], layout[end - 1] + 1), "a long run is read where it lies, in one call"
