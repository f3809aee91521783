"""Draftproof makes language models generate faster by guessing ahead, and proves that not one token changed.

    engine = draftproof.Engine(target="path", drafter="ngram")
    out = engine.generate("def fib(", draftproof.Sampling(temperature=0.7, seed=1, max_tokens=64))

Names are imported on first use, so that a command line can parse its arguments before torch is loaded.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import EngineConfig, LoadConfig, Settings, SpeculationConfig
    from .engine.engine import Engine
    from .engine.port import Completion, Handle, TokenEvent, TokenLogprob
    from .errors import (
        CacheFull,
        DrafterError,
        DraftproofError,
        Failure,
        LoadError,
        OptionError,
        ParityError,
        PromptError,
        SpecError,
        UsageError,
        VocabularyMismatch,
    )
    from .trace.sinks import Jsonl, Memory, read_trace
    from .types import Budget, Commit, Draft, Sampling, Verdict

__version__ = "0.1.0"

__all__ = [
    "Budget", "CacheFull", "Commit", "Completion", "Draft", "DrafterError", "DraftproofError", "Engine",
    "EngineConfig", "Failure", "Handle", "Jsonl", "LoadConfig", "LoadError", "Memory", "OptionError",
    "ParityError", "PromptError", "Sampling", "Settings", "SpecError", "SpeculationConfig", "TokenEvent", "TokenLogprob",
    "UsageError", "Verdict", "VocabularyMismatch", "__version__", "read_trace",
]

_HOME = {
    **dict.fromkeys(("EngineConfig", "LoadConfig", "Settings", "SpeculationConfig"), "config"),
    "Engine": "engine.engine",
    **dict.fromkeys(("Completion", "Handle", "TokenEvent", "TokenLogprob"), "engine.port"),
    **dict.fromkeys(("CacheFull", "DrafterError", "DraftproofError", "Failure", "LoadError", "OptionError", "ParityError", "PromptError",
                     "SpecError", "UsageError", "VocabularyMismatch"), "errors"),
    **dict.fromkeys(("Jsonl", "Memory", "read_trace"), "trace.sinks"),
    **dict.fromkeys(("Budget", "Commit", "Draft", "Sampling", "Verdict"), "types"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'draftproof' has no attribute {name!r}")
    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
