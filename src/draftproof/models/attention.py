"""Attention over pages, as `transformers` calls it.

On a CPU with a compiler `native.attend` takes it whole. Elsewhere two functions compute (path, page) items: `flash_page` is torch's CPU
flash kernel; `plain_page` is ordinary matrix products, the twin of both, and the one that knows soft caps and runs on any device. Both
return the page's own softmax average and its log-sum-exp; pages are merged in page order by explicit sums, so that a page a row cannot
see adds exactly nothing and may be skipped without moving a bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from .. import native
from .cache import PagePool
from .key_levels import opened
from .passes import Call, Items, Pass

NAME = "draftproof_pages"
LOST = "the model must hand keyword arguments through to attention"
Weigh = Callable[[Tensor, Tensor, float, float | None], tuple[Tensor, Tensor]]  # as `weights_of`
TILE = 4  # queries per product; tiles of 1–3 rows take another kernel with other bits


def compiled(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether attention runs through `native.attend`."""
    return device.type == "cpu" and dtype in native.TYPES and native.available()[0]


def flash_page(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """query [I, KV, Q, D], key and value [I, KV, P, D], bias [I, 1, Q, P] → (average [I, KV, Q, D], log-sum-exp [I, KV, Q])."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, False, attn_mask=bias, scale=scaling)
    return out, lse if lse.shape[1] == key.shape[1] else lse.transpose(1, 2)


def weights_of(scores: Tensor, bias: Tensor, scaling: float, softcap: float | None) -> tuple[Tensor, Tensor]:
    """Softmax over the last dimension of scores, scaled, capped and with `bias` added, in their type, and its log-sum-exp, float32."""
    scores = scores.float() * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    wide = scores + bias.float()
    logp = torch.log_softmax(wide, -1)  # per-row kernel: independent of the number of rows
    return logp.exp().to(bias.dtype), wide.amax(-1) - logp.amax(-1)


def plain_page(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scaling: float, softcap: float | None = None, weigh: Weigh = weights_of
) -> tuple[Tensor, Tensor]:
    """The same by matrix products of fixed shape [TILE, D] × [D, P]; softcap as in Gemma 2 (arXiv 2408.00118).

    The products see tiles of constant shape as a batch, because a product's bits may depend on its number of rows. They may also
    depend on the order in which a matrix is stored: the keys are laid out [D, P] here, else the number of tiles would decide. weigh: what
    stands for `weights_of`.
    """
    items, heads, queries, dim = query.shape
    tiles = -(-queries // TILE)
    if queries % TILE:
        query = torch.nn.functional.pad(query, (0, 0, 0, tiles * TILE - queries))
        bias = torch.nn.functional.pad(bias, (0, 0, 0, tiles * TILE - queries))
    tiled = query.reshape(items, heads, tiles, TILE, dim)
    scores = torch.matmul(tiled, key.transpose(-1, -2).contiguous()[:, :, None])
    weights, lse = weigh(scores, bias.reshape(items, 1, tiles, TILE, -1), scaling, softcap)
    out = torch.matmul(weights, value[:, :, None])
    shape = (items, heads, tiles * TILE)
    return out.reshape(*shape, -1)[:, :, :queries], lse.reshape(shape)[:, :, :queries]


def merge(out: Tensor, lse: Tensor, items: Items, dead: Tensor | None, sinks: Tensor | None) -> Tensor:
    """Join the pages of each path: [I, KV, Q, D], [I, KV, Q] → [paths, KV, Q, D]. dead [I, 1, Q]: queries that see nothing of an item;
    sinks [KV, Q]: logits that only normalise."""
    if dead is not None:
        lse = lse.masked_fill(dead, float("-inf"))
    if items.grid is None:
        if sinks is None:
            return out
        outs, logs = out[:, None], lse[:, None]
    elif out.shape[0] == items.grid.numel():
        outs, logs = out.reshape(*items.grid.shape, *out.shape[1:]), lse.reshape(*items.grid.shape, *lse.shape[1:])
    else:  # paths of different lengths: −1 reads a page that weighs nothing
        outs = torch.cat([out, torch.zeros_like(out[:1])])[items.grid]
        logs = torch.cat([lse, torch.full_like(lse[:1], float("-inf"))])[items.grid]
    top = logs.amax(1)
    if sinks is not None:
        top = torch.maximum(top, sinks)
    weights = (logs - top[:, None]).exp_()
    norm = weights[:, 0]
    for j in range(1, weights.shape[1]):  # explicit order: adding 0 for an unseen page changes no bit
        norm = norm + weights[:, j]
    if sinks is not None:
        norm = norm + torch.exp(sinks - top)
    parts = outs * weights.div_(norm[:, None])[..., None]  # float32, as the weights
    total = parts[:, 0]
    for j in range(1, parts.shape[1]):
        total = total + parts[:, j]
    return total.to(out.dtype)


def paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    draftproof_pass: Pass | None = None,
    draftproof_pool: PagePool | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The function registered with transformers: query [1, H, rows, D], key and value [1, KV, rows, D] → [1, rows, H, D]."""
    assert draftproof_pass is not None and draftproof_pool is not None, LOST
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    layer: int = module.layer_idx  # type: ignore[assignment]
    return attend(layer, q, k, v, scale, sliding_window, draftproof_pass, draftproof_pool, softcap, s_aux)[None], None


def attend(
    layer: int,
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    scaling: float,
    window: int | None,
    p: Pass,
    pool: PagePool,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    weigh: Weigh | None = None,
) -> Tensor:
    """Write the rows' keys into their pages, then attend along each path. query [rows, H, D], key and value [rows, KV, D] → [rows, H, D].
    Without a key the layer's pages have those of this pass.

    window: how many keys a row sees, itself included (None: all). softcap and sinks [H] as the functions above take them. weigh: what
    stands for `weights_of`; then pages go through `plain_page` on any device.
    """
    rows, heads, dim = query.shape
    if key is None or value is None:
        keys, values = pool.keys[layer], pool.values[layer]
    else:
        keys, values = pool.storage(layer, key, value)
        if p.write_from is not None:
            key, value = key[p.write_from], value[p.write_from]
        key, value = pool.kept(key), pool.kept(value)
        if isinstance(p.write_to, slice):
            keys[p.write_to], values[p.write_to] = key, value
        else:
            keys.index_copy_(0, p.write_to, key)
            values.index_copy_(0, p.write_to, value)
    group = heads // keys.shape[1]

    if weigh is None and compiled(query.device, query.dtype):
        return native.attend(p.course(), query, keys, values, scaling, window, sinks, softcap)
    return _by_torch(layer, query, scaling, p.items(window, group, query.dtype), pool, softcap, sinks, weigh)


def _by_torch(
    layer: int, query: Tensor, scaling: float, items: Items, pool: PagePool, softcap: float | None, sinks: Tensor | None,
    weigh: Weigh | None,
) -> Tensor:
    """With the query heads of a key head and a path's rows as the queries of one product."""
    if items.take is not None:
        query = query[items.take]
    paths, width, heads, dim = items.paths, items.width, *query.shape[1:]
    kv_heads, deep = pool.values[layer].shape[1], pool.numbers(layer)
    query = query.reshape(paths, width, kv_heads, -1, dim).permute(0, 2, 3, 1, 4).reshape(paths, kv_heads, -1, dim)
    flash = weigh is None and softcap is None and query.device.type == "cpu" and dim == deep

    def answer(call: Call) -> tuple[Tensor, Tensor]:
        asked = (query if call.owner is None else query[call.owner]).expand(len(call.bias), -1, -1, -1)
        key, value = (opened(pages[:, : call.bias.shape[-1]]).transpose(1, 2) for pages in pool.read(layer, call.pages))
        if flash:
            return flash_page(asked, key, value, call.bias, scaling)
        return plain_page(asked, key, value, call.bias, scaling, softcap, weigh or weights_of)

    out, lse = _joined([answer(call) for call in items.calls])
    if sinks is not None:
        sinks = sinks.float().view(kv_heads, -1, 1).expand(-1, -1, width).reshape(kv_heads, -1)
    merged = merge(out, lse, items, items.dead, sinks).view(paths, kv_heads, -1, width, deep).permute(0, 3, 1, 2, 4)
    merged = merged.reshape(paths * width, heads, deep)
    return merged if items.back is None else merged[items.back]


def _joined(answers: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The items of all calls, in order."""
    if len(answers) == 1:
        return answers[0]
    outs, logs = zip(*answers, strict=True)
    return torch.cat(outs), torch.cat(logs)


AttentionInterface.register(NAME, paged_attention)
