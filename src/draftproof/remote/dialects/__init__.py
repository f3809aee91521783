"""A file per engine: our plan in its words, as its current version reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from ...errors import OptionError
from ..plan import Exported, Plan, unheard
from .hf import export as transformers
from .llamacpp import export as llamacpp
from .modular import export as modular
from .openvino import export as openvino
from .sglang import export as sglang
from .trtllm import export as trtllm
from .vllm import export as vllm

DIALECTS: Mapping[str, Callable[[Plan], Exported]] = {
    "vllm": vllm, "sglang": sglang, "trtllm": trtllm, "llamacpp": llamacpp, "transformers": transformers, "openvino": openvino,
    "max": modular,
}


def export_config(plan: Plan, engine: str) -> Exported:
    """`plan` for `engine`. Its notes name every option that changes nothing. Raises OptionError naming what the engine lacks, and what
    it has instead."""
    if engine not in DIALECTS:
        raise OptionError(f"unknown engine {engine!r}; expected one of {', '.join(DIALECTS)}")
    done = DIALECTS[engine](plan)
    return replace(done, notes=(*done.notes, *unheard(plan, DIALECTS[engine])))
