"""Attention over pages, as `transformers` calls it. Two functions compute one (path, page) item; one merges a path's pages.

`flash_page` is the CPU flash kernel; `plain_page` is ordinary matrix products, its twin, and the one that knows soft caps
and runs on any device. Both return the page's own softmax average and its log-sum-exp; pages are merged in page order by
explicit sums, so that a page a row cannot see adds exactly nothing and may be skipped without moving a bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from .cache import PagePool
from .passes import Items, Pass

NAME = "draftproof_pages"
TILE = 4  # queries per product; tiles of 1–3 rows take another kernel with other bits


def flash_page(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """query [I, KV, Q, D], key and value [I, KV, P, D], bias [I, 1, Q, P] → (average [I, KV, Q, D], log-sum-exp [I, KV, Q])."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, False, attn_mask=bias, scale=scaling)
    return out, lse if lse.shape[1] == key.shape[1] else lse.transpose(1, 2)


def plain_page(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scaling: float, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """The same by matrix products of fixed shape [TILE, D] × [D, P]; softcap as in Gemma 2 (arXiv 2408.00118).

    The products see tiles of constant shape as a batch, because a product's bits may depend on its number of rows.
    """
    items, heads, queries, dim = query.shape
    tiles = -(-queries // TILE)
    if queries % TILE:
        query = torch.nn.functional.pad(query, (0, 0, 0, tiles * TILE - queries))
        bias = torch.nn.functional.pad(bias, (0, 0, 0, tiles * TILE - queries))
    tiled = query.reshape(items, heads, tiles, TILE, dim)
    scores = torch.matmul(tiled, key[:, :, None].transpose(-1, -2)).float() * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + bias.view(items, 1, tiles, TILE, -1).float()
    logp = torch.log_softmax(scores, -1)  # per-row kernel: independent of the number of rows
    lse = scores.amax(-1) - logp.amax(-1)
    out = torch.matmul(logp.exp().to(value.dtype), value[:, :, None])
    shape = (items, heads, tiles * TILE)
    return out.reshape(*shape, -1)[:, :, :queries], lse.reshape(shape)[:, :, :queries]


def merge(out: Tensor, lse: Tensor, items: Items, sinks: Tensor | None) -> Tensor:
    """Join the pages of each path: [I, KV, Q, D], [I, KV, Q] → [paths, KV, Q, D]. sinks [KV, Q]: logits that only normalise."""
    if items.dead is not None:
        lse = lse.masked_fill(items.dead, float("-inf"))
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
    weights = torch.exp(logs - top[:, None])
    parts = outs.float() * weights[..., None]
    total, norm = parts[:, 0], weights[:, 0]
    for j in range(1, parts.shape[1]):  # explicit order: adding 0 for an unseen page changes no bit
        total, norm = total + parts[:, j], norm + weights[:, j]
    if sinks is not None:
        norm = norm + torch.exp(sinks - top)
    return (total / norm[..., None]).to(out.dtype)


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
    """The function registered with transformers: query [1, H, rows, D], key and value [1, KV, rows, D] → [1, rows, H, D].

    Writes the rows' keys into their pages, then attends along each path.
    """
    assert draftproof_pass is not None and draftproof_pool is not None, "the model must hand keyword arguments through to attention"
    p, pool = draftproof_pass, draftproof_pool
    heads, rows, dim = query.shape[1:]
    kv_heads = key.shape[1]
    group = heads // kv_heads
    keys, values = pool.storage(module.layer_idx, key, value)  # type: ignore[arg-type]
    new_keys, new_values = key[0].transpose(0, 1), value[0].transpose(0, 1)
    if p.write_from is not None:
        new_keys, new_values = new_keys[p.write_from], new_values[p.write_from]
    keys.index_copy_(0, p.write_to, new_keys)
    values.index_copy_(0, p.write_to, new_values)

    items = p.items(sliding_window, group, query.dtype)
    queries = query[0].transpose(0, 1)  # [rows, H, D]
    if items.take is not None:
        queries = queries[items.take]
    queries = (
        queries.reshape(items.paths, items.width, kv_heads, group, dim)
        .permute(0, 2, 3, 1, 4)
        .reshape(items.paths, kv_heads, group * items.width, dim)
    )
    if items.owner is not None:
        queries = queries[items.owner]
    size = p.page_tokens
    read_keys = keys.view(-1, size, kv_heads, keys.shape[2])[items.pages].transpose(1, 2)
    read_values = values.view(-1, size, kv_heads, values.shape[2])[items.pages].transpose(1, 2)
    scale = dim**-0.5 if scaling is None else scaling
    if softcap is None and query.device.type == "cpu" and dim == values.shape[2]:
        out, lse = flash_page(queries, read_keys, read_values, items.bias, scale)
    else:
        out, lse = plain_page(queries, read_keys, read_values, items.bias, scale, softcap)
    sinks = None if s_aux is None else s_aux.float().view(kv_heads, group, 1).expand(-1, -1, items.width).reshape(kv_heads, -1)
    merged = merge(out, lse, items, sinks)
    merged = merged.view(items.paths, kv_heads, group, items.width, -1).permute(0, 3, 1, 2, 4).reshape(items.paths * items.width, heads, -1)
    if items.back is not None:
        merged = merged[items.back]
    return merged[None], None


AttentionInterface.register(NAME, paged_attention)
