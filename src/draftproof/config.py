"""Frozen settings, one dataclass per layer, and the only home of defaults. An unknown key is an error."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from math import isfinite
from typing import Any, Literal, Self

from .errors import OptionError
from .types import RULES, Rule, is_integer

TraceLevel = Literal["none", "summary", "full"]


def _check_noise(temperatures: Iterable[float], seed: int) -> None:
    wrong = [t for t in temperatures if not (isfinite(t) and t >= 0)]
    if wrong:
        raise OptionError(f"temperature={wrong[0]}: expected a number ≥ 0")
    if not 0 <= seed < 2**63:
        raise OptionError(f"seed={seed}: expected an integer in [0, 2**63)")


class _Config:
    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Self:
        """Build from a mapping; an unknown key is an `OptionError` that names it and lists the known ones."""
        known = {f.name for f in fields(cls)}  # type: ignore[arg-type]
        for name in options:
            if name not in known:
                raise OptionError(f"unknown {cls.__name__} option {name!r}; known: {', '.join(sorted(known))}")
        return cls(**options)

    def _check_whole(self) -> None:
        """Every field that counts something is an integer: 2.5 would be cut, and True is no number."""
        for f in fields(self):  # type: ignore[arg-type]
            value = getattr(self, f.name)
            if f.type in ("int", "int | None") and not is_integer(value) and not (value is None and f.type != "int"):
                raise OptionError(f"{f.name}={value!r}: expected an integer")


@dataclass(frozen=True, slots=True)
class LoadConfig(_Config):
    """How a model is loaded. `None` means: choose, and say why."""

    dtype: str | None = None              # "bfloat16", "float16", "float32"; None: what the checkpoint was saved in
    device: str | None = None             # "cpu", "cuda", "cuda:1"
    draft_device: str | None = None       # of draft models; None: the target's. Heads stay with the target, whose states they read
    tensor_parallel: int = 1              # processes that share every block, each on a device of its own (on CPUs: all on this one)
    threads: int | None = None            # None: torch's choice, the cores or OMP_NUM_THREADS
    reproducible: bool = True             # rows independent of their neighbours where the machine allows it (Law 2)
    self_test: bool = True                # measure at load whether speculation is invisible to the bit
    kernels: bool = True                  # on a GPU, run blocks that are known, of heads too, through kernels of our own
    graphs: bool = True                   # on a CUDA device, record passes of few rows, and chains of heads, and replay them
    compile: bool = False                 # on a GPU, join the small operations between products by torch.compile; takes a minute at load
    packed: bool = True                   # pack linear layers where that is faster; not for training, which needs plain matrices
    quantization: str | None = None       # "int8", "int4", on a GPU "int4", "fp8": rounded at load; another model, whose text is its own
    page_tokens: int = 256                # keys per cache page, the attention kernel's block
    prefill_chunk: int = 512              # tokens per prefill pass, of all prompts together
    cache_tokens: int = 65_536            # most tokens whose keys are kept at a time
    cache_bits: int = 16                  # 8: keys and values are rounded, on a CPU; another model, whose text is its own
    trust_remote_code: bool = False       # never true by default

    def __post_init__(self) -> None:
        self._check_whole()
        if self.cache_bits not in (8, 16):
            raise OptionError(f"cache_bits={self.cache_bits}: expected 16, keys and values as they are, or 8")
        if self.dtype not in (None, "bfloat16", "float16", "float32"):
            raise OptionError(f"dtype={self.dtype!r}: expected bfloat16, float16 or float32")
        if self.quantization not in (None, "int8", "int4", "fp8"):
            raise OptionError(f"quantization={self.quantization!r}: expected int8, int4 or fp8, or nothing")
        if self.quantization and not self.packed:
            raise OptionError(f"quantization={self.quantization}, packed=False: rounded weights cannot be trained; leave one of them out")
        if self.compile and not self.packed:
            raise OptionError("compile=True, packed=False: what is trained runs as torch runs it; leave one of them out")
        for name in ("page_tokens", "prefill_chunk", "cache_tokens"):
            if getattr(self, name) < 2:
                raise OptionError(f"{name}={getattr(self, name)}: expected an integer ≥ 2")
        if self.tensor_parallel < 1:
            raise OptionError(f"tensor_parallel={self.tensor_parallel}: expected an integer ≥ 1")
        most = max(64, 4 * (os.cpu_count() or 1))               # far beyond, the system cannot start them, and torch ends the process
        if self.threads is not None and not 1 <= self.threads <= most:
            raise OptionError(f"threads={self.threads}: expected an integer from 1 to {most} ({os.cpu_count()} cores)")

    def of_draft(self) -> LoadConfig:
        """For a draft model: whole, on its own device, and untested, because its bits are not the text's."""
        device = self.draft_device or self.device
        rounding = None if self.quantization == "fp8" and device == "cpu" else self.quantization  # which no CPU multiplies
        return replace(self, device=device, tensor_parallel=1, self_test=False, compile=self.compile and device != "cpu",
                       quantization=rounding)


@dataclass(frozen=True, slots=True)
class SpeculationConfig(_Config):
    """Whether and how to guess. depth None is `auto`; a fixed depth is never lowered by the controller."""

    drafter: str = "none"                 # a drafter spec: none · ngram:min=2 · model:PATH · A+B
    depth: int | None = None
    tree: int | None = None               # most nodes per round; None: chains
    rule: Rule = "match"
    max_depth: int = 16                   # what `auto` may choose at most

    def __post_init__(self) -> None:
        self._check_whole()
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
    max_samples: int = 1024               # of one request
    max_logprobs: int = 256               # likeliest tokens that are told per position
    trace: TraceLevel = "summary"
    trace_alternatives: int = 3           # per token at level full, of target and drafter
    profile_s: float = 1.0                # with depth auto and a drafter: seconds at most to time the target's passes before serving
    least_acceptance: float = 0.0         # auto drafts nothing where the first guess stands less often (probes go on)
    free_memory: float = 0.03             # share of the device's memory: with less free, drafters give theirs back and pause

    def __post_init__(self) -> None:
        self._check_whole()
        for name in ("max_batch", "max_waiting", "max_samples"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name}={getattr(self, name)}: expected an integer ≥ 1")
        for name in ("least_acceptance", "free_memory"):
            if not 0 <= getattr(self, name) < 1:
                raise OptionError(f"{name}={getattr(self, name)}: expected a share from 0 to below 1 (0 is off)")
        if not self.profile_s >= 0:
            raise OptionError(f"profile_s={self.profile_s}: expected seconds ≥ 0 (0: none)")


@dataclass(frozen=True, slots=True)
class Settings(_Config):
    load: LoadConfig = field(default_factory=LoadConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)


@dataclass(frozen=True, slots=True)
class AbSide:
    """One side of `AbConfig.arms` as it was written: a drafter spec (`none` for off) and what stands behind it."""

    drafter: str
    options: Mapping[str, str]

    @classmethod
    def of(cls, text: str) -> AbSide:
        spec, options = text.strip(), {}
        while found := re.fullmatch(r"(|.*\s)(depth|rule)=(\S+)", spec, re.DOTALL):     # from the end: a path may hold spaces
            if found[2] in options:
                raise OptionError(f"ab arms: found {text.strip()!r}, which says {found[2]}= twice; expected it once")
            spec, options[found[2]] = found[1].rstrip(), found[3]
        if not spec or spec in ("off", "none") and options:
            raise OptionError(f"ab arms: found {text.strip()!r}; expected a drafter spec with depth=… and rule=… behind it, or off")
        return cls("none" if spec == "off" else spec, options)


@dataclass(frozen=True, slots=True)
class AbConfig(_Config):
    """Two ways to speculate, side by side on a server's own traffic (docs/ab.md)."""

    arms: str                             # "CANDIDATE vs CONTROL": a drafter spec or off each, and depth=… and rule=… behind it
    share: float | Literal["shadow"] = 0.5   # of requests that the candidate writes; shadow: none, it replays what control wrote
    stages: tuple[float, ...] = ()        # the shares of a roll-out, rising; the limits below hold only there
    replay: float | None = None           # share of answers written again with both arms; None: all with shadow, else a tenth
    minimum: int = 200                    # requests of each arm before the next stage
    wait_s: float = 60.0                  # a stage lasts at least so long
    ratio: float = 1.25                   # candidate's median or 90th percentile over control's that is too much
    errors: float = 0.01                  # failed requests, as a share, beyond control's that are too many
    alpha: float = 0.01                   # chance at most that a harmless candidate is turned back, over all stages
    experiment: str = ""                  # its name, which is part of the hash; empty: the arms

    def __post_init__(self) -> None:
        self._check_whole()

        def need(ok: bool, name: str, expected: str) -> None:
            if not ok:
                raise OptionError(f"ab {name}={getattr(self, name)!r}: expected {expected}")

        need(self.arms.count(" vs ") == 1, "arms", "CANDIDATE vs CONTROL, as in 'ngram vs off'")
        need(self.share == "shadow" or 0 <= self.share <= 1, "share", "shadow, or a share from 0 to 1")
        need(all(0 < share <= 1 for share in self.stages) and list(self.stages) == sorted(set(self.stages)), "stages",
             "rising shares above 0, at most 1")
        need(not self.stages or self.share != "shadow", "stages", "none with share shadow")
        need(self.replay is None or 0 <= self.replay <= 1, "replay", "a share from 0 to 1")
        need(self.minimum >= 1, "minimum", "an integer ≥ 1")
        need(self.wait_s >= 0, "wait_s", "seconds ≥ 0")
        need(self.ratio > 1, "ratio", "a number > 1")
        need(0 <= self.errors < 1, "errors", "a share from 0 to below 1")
        need(0 < self.alpha < 1, "alpha", "a probability in (0, 1)")
        assert self.sides, "or an error says why not"

    @property
    def sides(self) -> tuple[AbSide, AbSide]:
        """Candidate and control. Raises OptionError."""
        candidate, control = self.arms.split(" vs ")
        return AbSide.of(candidate), AbSide.of(control)

    @property
    def drafters(self) -> tuple[str, ...]:
        """Those that must be loaded."""
        return tuple(dict.fromkeys(side.drafter for side in self.sides if side.drafter != "none"))


@dataclass(frozen=True, slots=True)
class ServeConfig(_Config):
    """The server's edge: where it listens, whom it lets in, and how much of anything it takes."""

    host: str = "127.0.0.1"
    port: int = 8000                      # 0: one that is free
    hosts: tuple[str, ...] = ()           # names that may stand in a Host header, besides the loopback's and `host`
    origins: tuple[str, ...] = ()         # web pages that may call
    max_body_bytes: int = 4 << 20
    max_queue: int = 256                  # requests that wait for the engine
    max_per_tenant: int = 128             # requests of one key, running or waiting
    deadline_s: float = 600.0             # for a whole request
    drain_s: float = 60.0                 # to finish what runs, when told to stop
    grammar_s: float = 5.0                # to compile a grammar
    classes: int = 32                     # prompt classes that are counted apart; others count as "other"
    chunks: str = "round"                 # what one piece of a stream holds: a round's tokens, "tokens:N", or "ms:T" of time
    stall_s: float = 30.0                 # a step that takes longer says that the engine hangs
    events: int = 8192                    # trace events that are kept for pages which follow
    event_bytes: int = 8 << 20            # at most about so many bytes of them
    access_log: bool = False              # a line in the log for every answer
    otel: bool = False                    # an OpenTelemetry span per request; the OTEL_* variables say where to
    ab: AbConfig | None = None            # two ways to speculate that share the traffic

    def __post_init__(self) -> None:
        self._check_whole()
        for name in ("max_body_bytes", "max_queue", "max_per_tenant", "classes", "events", "event_bytes"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name}={getattr(self, name)}: expected an integer ≥ 1")
        for name in ("deadline_s", "drain_s", "grammar_s", "stall_s"):
            if not getattr(self, name) > 0:
                raise OptionError(f"{name}={getattr(self, name)}: expected seconds > 0")
        if not isfinite(self.drain_s):                      # the listener counts it in whole seconds
            raise OptionError(f"drain_s={self.drain_s}: expected a finite number of seconds")
        if not 0 <= self.port < 1 << 16:
            raise OptionError(f"port={self.port}: expected 0 to 65535")
        wrong = next((origin for origin in self.origins if not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/*?#@\sA-Z]+", origin)), None)
        if wrong is not None:
            raise OptionError(f"origins={wrong!r}: expected SCHEME://HOST[:PORT] as a browser sends it, in small letters, without a path "
                              "or a *; name each by itself")
        kind, _, size = self.chunks.partition(":")
        if self.chunks != "round" and (kind not in ("tokens", "ms") or not size.isdecimal() or not int(size)):
            raise OptionError(f"chunks={self.chunks!r}: expected round, tokens:N or ms:T")


@dataclass(frozen=True, slots=True)
class DemoConfig(_Config):
    """How much the demonstration measures: one to two minutes on two cores."""

    prompts: int = 12                     # of each class: another prompt tells more than the same one again
    repeats: int = 1
    tokens: int = 128                     # most tokens of a text
    temperatures: tuple[float, ...] = (0.0, 0.8)
    seed: int = 1

    def __post_init__(self) -> None:
        self._check_whole()
        for name in ("prompts", "repeats", "tokens"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name}={getattr(self, name)}: expected an integer ≥ 1")
        _check_noise(self.temperatures, self.seed)


@dataclass(frozen=True, slots=True)
class BenchConfig(_Config):
    """How much a benchmark measures, and when it has measured enough."""

    repeats: int = 2                      # at least
    most_repeats: int | None = None       # at most; None: 5, or as many as at least
    precision: float = 0.05               # half the 95 % interval of a speed-up, as a share of it, that is narrow enough
    budget_s: float = 600.0               # no new repeat after so many seconds
    tokens: int = 128                     # most tokens of an answer, where the workload does not say
    temperature: float = 0.0
    seed: int = 1
    each: int | None = None               # items of every class; None: all of a given workload, 4 of the built-in one

    def __post_init__(self) -> None:
        self._check_whole()
        for name in ("repeats", "tokens"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name}={getattr(self, name)}: expected an integer ≥ 1")
        if self.most < self.repeats:
            raise OptionError(f"most_repeats={self.most_repeats}: expected at least repeats ({self.repeats})")
        for name in ("precision", "budget_s"):
            if not getattr(self, name) > 0:
                raise OptionError(f"{name}={getattr(self, name)}: expected a number > 0")
        _check_noise((self.temperature,), self.seed)
        if self.each is not None and self.each < 1:
            raise OptionError(f"each={self.each}: expected an integer ≥ 1")

    @property
    def most(self) -> int:
        """Repeats at most."""
        return max(5, self.repeats) if self.most_repeats is None else self.most_repeats


@dataclass(frozen=True, slots=True)
class ProveConfig(_Config):
    """How long a proof looks, and what it forgives."""

    prompts: int = 12                     # texts per temperature
    tokens: int = 96                      # of each text
    batch: int = 8                        # texts side by side in the control and in the second look
    temperatures: tuple[float, ...] = (0.0, 0.8)
    seed: int = 1
    margin: float = 0.05                  # largest difference of task scores that counts as none
    draws: int = 4000                     # texts per χ² test of the shipped noise
    statistics_tokens: int = 1500         # fewest tokens for the martingale tests of rules ratio and block

    def __post_init__(self) -> None:
        self._check_whole()
        for name in ("prompts", "tokens", "batch"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name}={getattr(self, name)}: expected an integer ≥ 1")
        if self.draws < 100:                                # of fewer, chance alone looks as bad as a choice without noise
            raise OptionError(f"draws={self.draws}: expected an integer ≥ 100: fewer texts test nothing")
        if not 0 < self.margin < 1:
            raise OptionError(f"margin={self.margin}: expected a share in (0, 1)")
        _check_noise(self.temperatures, self.seed)
