"""Frozen settings, one dataclass per layer, and the only home of defaults. An unknown key is an error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Self

from .errors import OptionError
from .types import RULES, Rule

TraceLevel = Literal["none", "summary", "full"]


class _Config:
    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Self:
        """Build from a mapping; an unknown key is an `OptionError` that names it and lists the known ones."""
        known = {f.name for f in fields(cls)}  # type: ignore[arg-type]
        for name in options:
            if name not in known:
                raise OptionError(f"unknown {cls.__name__} option {name!r}; known: {', '.join(sorted(known))}")
        return cls(**options)


@dataclass(frozen=True, slots=True)
class LoadConfig(_Config):
    """How a model is loaded. `None` means: choose, and say why."""

    dtype: str | None = None              # "bfloat16", "float16", "float32"; None: what the checkpoint was saved in
    device: str | None = None             # "cpu", "cuda", "cuda:1"
    threads: int | None = None            # None: the physical cores
    reproducible: bool = True             # rows independent of their neighbours where the machine allows it (Law 2)
    self_test: bool = True                # measure at load whether speculation is invisible to the bit
    packed: bool = True                   # pack linear layers where that is faster; not for training, which needs plain matrices
    page_tokens: int = 256                # keys per cache page, the attention kernel's block
    prefill_chunk: int = 512              # tokens per prefill pass
    cache_tokens: int = 65_536            # most tokens whose keys are kept at a time
    trust_remote_code: bool = False       # never true by default

    def __post_init__(self) -> None:
        if self.dtype not in (None, "bfloat16", "float16", "float32"):
            raise OptionError(f"dtype={self.dtype!r}: expected bfloat16, float16 or float32")
        for name in ("page_tokens", "prefill_chunk", "cache_tokens"):
            if getattr(self, name) < 2:
                raise OptionError(f"{name}={getattr(self, name)}: expected an integer ≥ 2")
        if self.threads is not None and self.threads < 1:
            raise OptionError(f"threads={self.threads}: expected an integer ≥ 1")


@dataclass(frozen=True, slots=True)
class SpeculationConfig(_Config):
    """Whether and how to guess. depth None is `auto`; a fixed depth is never lowered by the controller."""

    drafter: str = "none"                 # a drafter spec: none · ngram:min=2 · model:PATH · A+B
    depth: int | None = None
    tree: int | None = None               # most nodes per round; None: chains
    rule: Rule = "match"
    max_depth: int = 16                   # what `auto` may choose at most

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise OptionError(f"rule={self.rule!r}: expected one of {', '.join(RULES)}")
        if self.depth is not None and self.depth < 0:
            raise OptionError(f"depth={self.depth}: expected auto or an integer ≥ 0")
        if self.drafter == "none" and self.depth:
            raise OptionError(f"depth={self.depth} with drafter none: name a drafter, or leave the depth out")
        if self.tree is not None and self.tree < max(1, self.depth or 1):
            raise OptionError(f"tree={self.tree}: expected at least the depth ({self.depth or 1})")
        if self.tree is not None and self.rule == "block":
            raise OptionError(f"rule=block, shape=tree, drafter={self.drafter}: block verification judges chains only; use match or ratio")


@dataclass(frozen=True, slots=True)
class EngineConfig(_Config):
    """The engine itself."""

    max_batch: int = 16                   # sequences in one round
    max_waiting: int = 1024               # requests queued behind them
    trace: TraceLevel = "summary"
    trace_alternatives: int = 3           # per token at level full, of target and drafter


@dataclass(frozen=True, slots=True)
class Settings(_Config):
    load: LoadConfig = field(default_factory=LoadConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)


@dataclass(frozen=True, slots=True)
class DemoConfig(_Config):
    """How much the demonstration measures: about two minutes on two cores."""

    prompts: int = 4                      # of each class
    repeats: int = 3
    tokens: int = 128                     # most tokens of a text
    temperatures: tuple[float, ...] = (0.0, 0.8)
    seed: int = 1

    def __post_init__(self) -> None:
        for name in ("prompts", "repeats", "tokens"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name}={getattr(self, name)}: expected an integer ≥ 1")
