"""The training loop: deterministic in (seed, step), resumable to the bit, and watched by what is *served*, not by the loss alone."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import nn

from . import checkpoint
from .base import Task
from .corpus import Text
from .features import Tapper
from .muon import Muon
from .team import ALONE, Team

SAVE_S, SHOW_S = 60.0, 10.0           # seconds of work that a kill may cost, and without a line of progress, at most


@dataclass(frozen=True, slots=True)
class Plan:
    """How long and how fast to learn."""

    steps: int
    batch: int = 8                    # texts per step
    lr: float = 1e-3
    warmup: int = 50
    seed: int = 0
    clip: float = 1.0
    save_every: int = 100             # steps between two checkpoints, but no more than SAVE_S seconds
    look_every: int = 250             # steps between two looks at served acceptance
    matmul: str = "highest"           # torch's precision of float32 products while a step is learned; "medium" may take bfloat16


@dataclass(frozen=True, slots=True)
class Shown:
    """One line of progress. `served` is the acceptance length on held-out prompts, where it was looked at."""

    step: int
    steps: int
    loss: float
    figures: Mapping[str, float]
    tokens_per_s: float
    left_s: float                     # until the last step, looks not counted
    served: float | None = None


TABLES = ("embed", "emb.", "wte.", "head.", "outputs.", "markov", "codebook")      # in the names of matrices with a row per token


def optimizers_of(module: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices between hidden states, AdamW for everything else."""
    trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    matrices = [p for name, p in trained if p.ndim == 2 and not any(table in name for table in TABLES)]
    others = [p for _, p in trained if not any(p is m for m in matrices)]
    made: list[torch.optim.Optimizer] = []
    if matrices:
        made.append(Muon(matrices, lr))
    if others:
        made.append(torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95), weight_decay=0.0))
    return made


def rate(step: int, plan: Plan) -> float:
    """Share of the learning rate at a step: linear warm-up, then linear decay over the last half."""
    return min(1.0, (step + 1) / max(1, plan.warmup), 2 * (plan.steps - step) / plan.steps)


def batch_of(step: int, count: int, plan: Plan) -> list[int]:
    """Which texts a step reads: every text once per epoch, in an order that depends on the seed and the epoch alone."""
    places = (divmod(place, count) for place in range(step * plan.batch, (step + 1) * plan.batch))
    return [_order(plan.seed, epoch, count)[within] for epoch, within in places]


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, count: int) -> tuple[int, ...]:
    return tuple(random.Random(f"{seed} {epoch}").sample(range(count), count))


def data_of(task: Task, texts: Sequence[Text]) -> str:
    """A hash of what is learnt: the texts, and which tokens a reduced vocabulary has."""
    ids = getattr(task.module, "ids", None)
    found = hashlib.sha256(repr(None if ids is None else ids.tolist()).encode())
    for text in texts:
        found.update(repr((text.ids, text.answer_from)).encode())
    return found.hexdigest()[:16]


@contextmanager
def products(precision: str) -> Iterator[None]:
    """float32 products have this precision of torch's within."""
    usual = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(usual)


@dataclass(slots=True)
class _Run:
    """What is learnt, as it is now: after `done` steps, unless Ctrl-C came while the weights were moved."""

    task: Task
    texts: Sequence[Text]
    tapper: Tapper
    plan: Plan
    team: Team
    file: Path
    whose: Mapping[str, object]
    optimizers: list[torch.optim.Optimizer]
    done: int = 0
    moving: bool = False

    def step(self) -> tuple[float, Mapping[str, float], int]:
        """One more: its loss, the family's figures, and how many tokens all of the team read."""
        plan, team, step = self.plan, self.team, self.done
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = plan.lr * rate(step, plan)
        # anchors and the like: a resumed run draws what the other drew
        torch.manual_seed(((plan.seed * 1_000_003 + step) * team.size + team.rank) % 2**63)
        chosen = [self.texts[i] for i in batch_of(step, len(self.texts), plan)]
        read = self.tapper.read(team.share(chosen))
        parameters = [p for p in self.task.module.parameters() if p.requires_grad]
        with products(plan.matmul):
            own, figures = self.task.loss(read)
            if own.requires_grad:                           # else no guess counts: nothing moves
                own.backward()  # type: ignore[no-untyped-call]
            mean = team.average(parameters, own.detach())
            torch.nn.utils.clip_grad_norm_(parameters, plan.clip)
            self.moving = True
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            self.done, self.moving = step + 1, False
        return mean.item(), figures, sum(len(text.ids) for text in chosen)

    def save(self) -> None:
        checkpoint.save(self.file, self.done, self.task.module, self.optimizers, self.whose)


def train(task: Task, texts: Sequence[Text], tapper: Tapper, plan: Plan, folder: Path, show: Callable[[Shown], None],
          served: Callable[[], float] | None = None, notes: Mapping[str, object] | None = None, team: Team = ALONE,
          say: Callable[[str], None] = lambda line: None) -> None:
    """Train `task` to the end of the plan, going on from folder/checkpoint.safetensors. The result is in task.module.

    Of a team every process calls this with the same texts and plan; the first one writes, looks and shows.
    """
    whose = {"seed": plan.seed, "steps": plan.steps, "batch": plan.batch, "lr": plan.lr, "texts": len(texts), "processes": team.size,
             "matmul": plan.matmul, **(notes or {}), "data": data_of(task, texts)}
    run = _Run(task, texts, tapper, plan, team, folder / "checkpoint.safetensors", whose, optimizers_of(task.module, plan.lr))
    run.done = start = checkpoint.load(run.file, task.module, run.optimizers, whose)
    team.wait()                                             # nobody writes what another has not read yet
    if 0 < start < plan.steps:
        say(f"going on from step {start}/{plan.steps}")
    try:
        _steps(run, show, served)
    except KeyboardInterrupt:
        if team.leads and start < run.done and not run.moving:
            run.save()
            say(f"stopped behind step {run.done}/{plan.steps}; the same command goes on from there")
        raise


def _steps(run: _Run, show: Callable[[Shown], None], served: Callable[[], float] | None) -> None:
    """All that are left, with checkpoints, looks and lines in between."""
    plan, start, tokens, smooth = run.plan, run.done, 0, 0.0
    began = saved = shown = time.perf_counter()
    while run.done < plan.steps:
        loss, figures, read = run.step()
        step, last = run.done, run.done == plan.steps
        tokens, smooth = tokens + read, loss if step == start + 1 else 0.95 * smooth + 0.05 * loss
        if not run.team.leads:
            continue
        now = time.perf_counter()
        if step % plan.save_every == 0 or last or now - saved > SAVE_S:
            run.save()
            saved = now
        look = served is not None and (step % plan.look_every == 0 or last)
        if look or step % 25 == 0 or last or now - shown > SHOW_S:
            length = served() if look and served is not None else None
            shown = time.perf_counter()
            began += shown - now                            # checkpoints and looks are not learning
            pace = (shown - began) / (step - start)
            show(Shown(step, plan.steps, smooth, figures, tokens / (shown - began), pace * (plan.steps - step), length))
