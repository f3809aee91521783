"""Which tier a model is: whether our attention over pages can stand for its own, measured on one short text.

A short text shows no window, nor anything else that begins further back. So masks are not judged by what they do to it: while the model
runs, transformers hands over the rule of each mask, and the rule is asked about texts as long as the context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import causal_mask_function

from ..errors import LoadError, first_line
from . import attention
from .cache import PagePool
from .known import can_fuse
from .passes import Pass, Path

Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # batch, head, position of a query, positions of keys → which of them it reads

WATCHED = "draftproof_watched"  # our attention, and a look at what it is given
SILENT = "draftproof_silent"  # experts that add nothing
RECURRENT = {"linear_attention", "hybrid", "hybrid_sliding"}  # kinds of layers whose state has no positions
ROWS, PAGE = 24, 8  # tokens of the text, and keys of a page


def tier_of(model: Any, context: int, reasons: dict[str, str], fused: bool) -> tuple[int, int]:
    """1, 2 or 3, and the bytes of a token's keys and values in our pages, if a pass shows them (else 0); reasons["tier"] says why. fused:
    whether blocks that are known run as ours. Raises LoadError for a model whose own code cannot run it."""
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ["full_attention"])
    foreign = kinds - {"full_attention", "sliding_attention"}
    stateful = getattr(model, "_is_stateful", False) or kinds & RECURRENT
    if (stateful or "conv" in kinds) and fused and can_fuse(model)[0]:
        reasons["tier"] = "1, own pages, and beside them recurrent states, which take in what stands as the next pass comes by"
        return 1, 0
    if foreign == {"chunked_attention"} and not stateful and fused and can_fuse(model)[0]:
        reasons["tier"] = "1, own pages: where attention is chunked, a row reads those of its own part of the text"
        return 1, 0
    if stateful:
        reasons["tier"] = "3, a recurrent state: copied before guesses are scored, put back after a rejection"
        return 3, 0
    if not getattr(model, "_supports_attention_backend", False) and not getattr(model, "_can_set_attn_implementation", bool)():
        without = f"{type(model).__name__} takes no attention function from outside"
        if fused and can_fuse(model)[0]:
            reasons["tier"] = f"1, own pages: {without}, but its blocks are known, and run as ours"
            return 1, 0
        reasons["tier"] = f"2, the model's own cache: {without}"
        return 2, 0
    if foreign:
        reasons["tier"] = f"2, the model's own cache: layers of kind {', '.join(sorted(foreign))} have masks of their own"
        return 2, 0
    found = pages_agree(model, context)
    if isinstance(found, str) and attention.LOST in found:
        hooks = hand_on(model)
        found = pages_agree(model, context)
        if isinstance(found, str):
            for hook in hooks:
                hook.remove()
    if isinstance(found, str):
        reasons["tier"] = f"2, the model's own cache: {found}"
        return 2, 0
    difference, held = found
    reasons["tier"] = f"1, own pages: logits agree with the model's own attention ({difference:.1e} of the largest)"
    return 1, held


@torch.inference_mode()
def pages_agree(model: Any, context: int) -> tuple[float, int] | str:
    """Largest relative difference between the model's logits of a short text and ours, whose second half reads the keys of the first in
    pages, and the bytes that a token's keys and values take there; or why our attention cannot be used. Leaves the model with the attention
    that is to be used. Raises LoadError if the model fails with its own."""
    device, rows = model.device, min(ROWS, max(2, context - 1))
    ids = (torch.arange(rows, device=device) * 7919 % model.config.get_text_config().vocab_size)[None]
    at = torch.arange(rows, device=device)[None]
    before = model.config._attn_implementation
    try:
        stock = model(input_ids=ids, position_ids=at, use_cache=False).logits.float()
    except Exception as error:
        kind, why = type(model).__name__, f"{type(error).__name__}: {first_line(error)}"
        raise LoadError(f"{kind} cannot read a text of {rows} tokens ({why}): correct config.json, or look for a release of transformers "
                        "that runs this model") from error
    pool, pages, parts = WatchedPool(context, device), [3, 1, 2], []
    try:
        for name, start, end in ((WATCHED, 0, rows // 2), (attention.NAME, rows // 2, rows)):
            model.set_attn_implementation(name)
            places = torch.tensor([pages[t // PAGE] * PAGE + t % PAGE for t in range(start, end)], device=device)
            path = Path(pages, list(range(end - start)))
            one = Pass(ids[:, start:end], at[:, start:end], list(range(start, end)), places, None, [path], PAGE, attention.TILE)
            with Ruled():
                parts.append(model(input_ids=one.ids, position_ids=one.positions, use_cache=False, draftproof_pass=one,
                                   draftproof_pool=pool).logits.float())
        why = pool.found
    except Exception as error:
        why = f"its attention cannot be replaced ({first_line(error)})"
    if not why:
        difference = float((torch.cat(parts, 1) - stock).abs().max() / stock.abs().max().clamp_min(1e-6))
        exact = next(model.parameters()).dtype == torch.float32
        if difference <= (1e-3 if exact else 0.05) or not exact and difference <= min(_rounding(model, ids, at, stock, before), 0.3):
            return difference, sum(rows[0].nbytes for store in (pool.keys, pool.values) for rows in store.values())
        why = f"our attention gives other logits (relative difference {difference:.1e}), so it has a mask we do not know" + (
            "" if exact else ", or enlarges what rounding loses: with dtype float32 the load tells which")
    model.set_attn_implementation(before)
    return why


def hand_on(model: nn.Module) -> list[RemovableHandle]:
    """Bring what a pass is called with to attention, where layers do not hand it on (StableLM's, Nemotron's)."""
    told: dict[str, Any] = {}

    def take(_: nn.Module, __: Any, named: dict[str, Any]) -> None:
        told.update((name, named.get(name)) for name in ("draftproof_pass", "draftproof_pool"))

    def bring(_: nn.Module, args: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**named, **told}

    attending = [module for module in model.modules() if hasattr(module, "layer_idx") and type(module).__name__.endswith("Attention")]
    return [module.register_forward_pre_hook(hook, with_kwargs=True)
            for module, hook in ((model, take), *((module, bring) for module in attending))]


def _rounding(model: Any, ids: Tensor, at: Tensor, stock: Tensor, usual: str) -> float:
    """Twice what other roundings of the model's own attention do to its logits: some enlarge what bfloat16 loses (random Gemma 4s)."""
    before = model.config._attn_implementation
    try:
        model.set_attn_implementation("sdpa" if usual == "eager" else "eager")
        other = model(input_ids=ids, position_ids=at, use_cache=False).logits.float()
    except Exception:
        return 0.0
    finally:
        model.set_attn_implementation(before)
    return 2 * float((other - stock).abs().max() / stock.abs().max().clamp_min(1e-6))


@contextmanager
def silent_experts(model: nn.Module) -> Iterator[None]:
    """While a load looks at passes and compares attention, experts add nothing, where transformers lets us say so: what another order of
    additions changes in bfloat16 is enough to let a router choose others, and their difference is as large as that of another mask."""
    modules: Iterator[Any] = model.modules()
    configs = list({id(module.config): module.config for module in modules if hasattr(module, "is_concatenated")}.values())
    before = [config._experts_implementation for config in configs]
    try:
        for config in configs:
            config._experts_implementation = SILENT
        yield
    finally:
        for config, was in zip(configs, before, strict=True):
            config._experts_implementation = was


def _silent(module: nn.Module, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
    return torch.zeros_like(hidden)


class WatchedPool(PagePool):
    """Looks at what the attention calls of one pass are given. found: why our pages cannot stand for their cache, or an empty text."""

    def __init__(self, context: int, device: torch.device) -> None:
        super().__init__(PAGE, ROWS, device)
        self.context, self.found = context, ""
        self._layers: set[int] = set()
        self._known: set[tuple[Rule | None, int | None]] = set()

    def watch(self, layer: int, mask: Tensor | None, window: int | None) -> None:
        asked: tuple[Rule | None, bool] = (causal_mask_function, True) if mask is None else getattr(mask, "draftproof_rule", (None, False))
        rule, far = asked
        if layer in self._layers:
            self.found = f"two attention calls of a pass keep keys under one number ({layer})"
        elif rule is None:
            self.found = "its attention makes a mask of its own"
        elif (rule, window) not in self._known and not _reads_alike(rule, window, self.context if far else ROWS // 2, self.device):
            self.found = f"its attention is told of {f'a window of {window}' if window else 'no window'} and given a mask that is another"
        self._layers.add(layer)
        self._known.add((rule, window))


def _reads_alike(rule: Rule, window: int | None, context: int, device: torch.device) -> bool:
    """Whether a mask lets queries read the keys that `window` (None: all) leaves them, in texts of up to `context` tokens."""
    zero = torch.zeros((), dtype=torch.int64, device=device)
    lasts = {(context - 1) >> shift for shift in range(context.bit_length())}
    for last in lasts:
        keys = torch.arange(min(last + 2, context), device=device)
        ours = (keys <= last) & (keys > last - (window or context))
        if not torch.equal(torch.as_tensor(rule(zero, zero, zero + last, keys)).expand_as(keys), ours):
            return False
    return True


def _watched(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *more: Any,
             **named: Any) -> tuple[Tensor, None]:
    if isinstance(pool := named.get("draftproof_pool"), WatchedPool):
        pool.watch(module.layer_idx, attention_mask, named.get("sliding_window"))  # type: ignore[arg-type]
    return attention.paged_attention(module, query, key, value, attention_mask, *more, **named)


class Ruled(TorchFunctionMode):
    """Where a family takes rows of a mask, as Gemma 4 does in front of layers that share keys, they keep its rule."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        if function is Tensor.__getitem__ and hasattr(args[0], "draftproof_rule"):
            found.draftproof_rule = args[0].draftproof_rule
        return found


def _mask(*, batch_size: int, q_length: int, kv_length: int, mask_function: Rule, allow_is_causal_skip: bool = False,
          device: torch.device | str = "cpu", **_: Any) -> Tensor:
    """Carries its rule. One that families add to looks things up by position, and cannot be asked about other positions."""
    mask = torch.ones(batch_size, 1, q_length, kv_length, dtype=torch.bool, device=device)
    mask.draftproof_rule = mask_function, allow_is_causal_skip  # type: ignore[attr-defined]
    return mask


AttentionInterface.register(WATCHED, _watched)
AttentionMaskInterface.register(WATCHED, _mask)
ALL_EXPERTS_FUNCTIONS.register(SILENT, _silent)
