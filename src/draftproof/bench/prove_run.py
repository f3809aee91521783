"""Level (b), the run: this target, this drafter, these options. The same texts with guessing and without, or the same law.

Texts are compared token by token with plain decoding at the same seed. Where two first differ, the text so far is scored once
more and the *margin* is how far apart the two tokens stand there, noise included: a tie decided by rounding has a margin of an
ulp or two, a wrong rule has any margin. The control is the engine without a drafter against itself at another batch size: what
this machine does to texts on its own. Under `ratio` and `block` sampled texts must follow the law instead; three statistics say
whether they do.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..config import EngineConfig, LoadConfig, ProveConfig, TraceLevel
from ..core.edits import Rows
from ..core.noise import gumbel, key, key_rows
from ..core.probs import distribution
from ..engine.engine import Engine
from ..errors import Failure
from ..models.target import Target
from ..trace.events import RoundDone
from ..types import Draft, Rule, Sampling
from .prove_rule import ALARM, Check
from .statistics import skewed_tail, uniform_fit

Ids = tuple[int, ...]

END = "(end)"            # where a token would stand, of the text that ended


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where two texts first differ. margin: how far apart both tokens stand there, in nats after the request's options and noise (of
    another engine: first minus second logit); ulps: the same in units of the logits' rounding, and gap: how far the lower of both
    tokens lies below the best, where it was looked at."""

    comparison: str
    temperature: float
    prompt: int
    at: int                               # tokens of the answer before it
    token: str
    expected: str
    margin: float | None                  # None where one text ended and the other went on, or where a server does not tell
    near_tie: bool
    ulps: float | None = None
    gap: float | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Many pairs of texts. tokens: compared, up to the first difference of each pair."""

    name: str
    temperature: float
    texts: int
    identical: int
    tokens: int
    divergences: tuple[Divergence, ...] = ()

    @property
    def per_1000(self) -> float:
        """Divergences per thousand compared tokens."""
        return 1000 * len(self.divergences) / max(1, self.tokens)


@dataclass(slots=True)
class RunReport:
    checks: list[Check] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    statistics: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return {"passed": all(check.passed for check in self.checks), "checks": [check.as_json() for check in self.checks],
                "comparisons": [asdict(c) for c in self.comparisons], "statistics": self.statistics}


@dataclass(frozen=True, slots=True)
class Subject:
    """What is put to the proof."""

    target: Target
    drafter: str
    depth: int | None
    tree: int | None
    rule: Rule
    load: LoadConfig


def prove_run(subject: Subject, prompts: Sequence[Ids], config: ProveConfig, note: Callable[[str], None] = lambda _: None) -> RunReport:
    """Identity (or the law) of the drafter's texts at every temperature, alone and in a batch, with the control."""
    report = RunReport()
    for temperature in config.temperatures:
        options = [Sampling(temperature=temperature, top_p=1.0, seed=config.seed + i, max_tokens=config.tokens)
                   for i in range(len(prompts))]
        if subject.rule not in ("ratio", "block") or temperature == 0:
            note(f"run: temperature {temperature:g}, plain decoding, the drafter and the control …")
            _identity(subject, prompts, options, config, report)
        else:
            note(f"run: temperature {temperature:g}, statistics of the texts under rule {subject.rule} …")
            _law(subject, prompts, temperature, config, report)
    return report


def texts(subject: Subject, drafter: str, prompts: Sequence[Ids], options: Sequence[Sampling], batch: int,
          level: TraceLevel = "none") -> tuple[list[Ids], list[list[RoundDone]], int]:
    """(answers, the rounds of each if traced, tokens accepted)."""
    plain = drafter == "none"
    settings: dict[str, Any] = {} if plain else {"depth": "auto" if subject.depth is None else subject.depth, "tree": subject.tree,
                                                 "rule": subject.rule}
    config = EngineConfig(max_batch=batch, max_waiting=len(prompts), trace=level)
    with Engine(subject.target, drafter, load=subject.load, config=config, **settings) as engine:
        outs = engine.generate_batch(list(prompts), list(options), tenant=f"proof-{drafter}-{batch}")
    errors = [out.error for out in outs if out.error]
    if errors:
        raise Failure(f"{drafter}: {errors[0]}")
    rounds = [[event for event in out.trace if isinstance(event, RoundDone)] for out in outs]
    return [out.token_ids for out in outs], rounds, sum(out.metrics["accepted"] for out in outs)


def _identity(subject: Subject, prompts: Sequence[Ids], options: Sequence[Sampling], config: ProveConfig, report: RunReport) -> None:
    temperature = float(options[0].temperature or 0.0)
    plain, _, _ = texts(subject, "none", prompts, options, 1)
    control, _, _ = texts(subject, "none", prompts, options, config.batch)
    pairs = [(f"plain, {config.batch} at a time, against one at a time (control)", control)]
    accepted = 0
    for batch in (1, config.batch):
        found, _, more = texts(subject, subject.drafter, prompts, options, batch)
        accepted += more
        pairs.append((f"{subject.drafter}, {batch} at a time, against plain", found))
    measured = [compare(subject.target, name, prompts, options, found, plain) for name, found in pairs]
    report.comparisons += measured
    judge(report.checks, measured[0], measured[1:], subject.target.facts.invisible, temperature)
    report.checks.append(_accepted(accepted, temperature))


def _accepted(count: int, temperature: float) -> Check:
    words = f"{count} drafted tokens entered the texts"
    if not count:
        words = "not one drafted token was accepted: nothing was put to the proof; use more or longer prompts"
    return Check(f"guesses accepted at temperature {temperature:g}", count > 0, words)


def judge(checks: list[Check], control: Comparison, others: Sequence[Comparison], invisible: bool, temperature: float) -> None:
    """A promise of identity allows no difference; without one, only near ties, and hardly more than the control has."""
    for c in others:
        name = f"{c.name}, temperature {temperature:g}"
        wrong = [d for d in c.divergences if not d.near_tie]
        if not c.divergences:
            checks.append(Check(name, True, f"{c.tokens} tokens of {c.texts} texts identical"))
        elif wrong or invisible:
            d = (wrong or list(c.divergences))[0]
            ended = "one text ended there" if END in (d.token, d.expected) else "margin unknown"
            margin = ended if d.margin is None else f"margin {d.margin:.3g}"
            why = "not a near tie" if wrong else "a near tie, but this target is measured invisible to the bit: none may fall otherwise"
            checks.append(Check(name, False, f"{len(c.divergences)} of {c.texts} texts differ; prompt {d.prompt + 1} at token {d.at + 1}: "
                                f"{d.token!r} where plain decoding wrote {d.expected!r}, {margin}: {why}"))
        else:
            allowed = 2 * control.per_1000 + 3000 / max(1, c.tokens)
            largest = max(d.margin or 0 for d in c.divergences)
            words = (f"{len(c.divergences)} of {c.texts} texts differ, all at near ties (largest margin {largest:.2g}); "
                     f"{c.per_1000:.2f} per 1000 tokens, the control has {control.per_1000:.2f}")
            often = c.per_1000 > allowed
            checks.append(Check(name, not often, words + (": far more often than the control" if often else "")))


def compare(target: Target, name: str, prompts: Sequence[Ids], options: Sequence[Sampling], found: Sequence[Ids],
            plain: Sequence[Ids]) -> Comparison:
    """Pair by pair, with the margin of every first difference."""
    same, tokens, differences = 0, 0, []
    for i, (prompt, sampling, mine, own) in enumerate(zip(prompts, options, found, plain, strict=True)):
        at = next((t for t, (a, b) in enumerate(zip(mine, own, strict=False)) if a != b), min(len(mine), len(own)))
        tokens += at
        if mine == own:
            same += 1
            continue
        margin, ulps, near = None, None, False
        if at < min(len(mine), len(own)):
            margin, ulps, near = margin_at(target, prompt, own[:at], sampling, mine[at], own[at])
        differences.append(Divergence(name, float(sampling.temperature or 0), i, at, _piece(target, mine, at), _piece(target, own, at),
                                      margin, near, ulps))
    return Comparison(name, float(options[0].temperature or 0), len(plain), same, tokens, tuple(differences))


def _piece(target: Target, ids: Ids, at: int) -> str:
    if at >= len(ids):
        return END
    return target.tokenizer.piece(ids[at]) if target.tokenizer else f"#{ids[at]}"


def margin_at(target: Target, prompt: Ids, before: Ids, sampling: Sampling, one: int, other: int) -> tuple[float, float, bool]:
    """(how far apart two tokens stand after this text, with the options and noise that chose between them; the same in ulps of the
    logits; whether rounding of a couple of them can have decided). At a near tie both stand at the top as well."""
    logits = last_logits(target, [*prompt, *before])
    law = distribution(logits, [Rows(sampling, [*prompt, *before], len(prompt), ((),), frozenset(target.eos_ids))])[0].double()
    if not sampling.greedy:
        keys = key_rows([key(int(sampling.seed or 0), 0, "text", len(prompt) + len(before))], law.device)
        law = law + gumbel(keys, torch.arange(law.shape[0], device=law.device))[0].double()
    else:
        law = logits[0].double()                 # at temperature 0 the law is one token; its logits say how close it was
    margin = abs(float(law[one] - law[other]))
    top = float(law.max()) - min(float(law[one]), float(law[other]))
    kind = getattr(torch, target.facts.dtype.removeprefix("torch."), torch.float32)
    ulp = torch.finfo(kind).eps * float(logits.abs().max().clamp_min(1)) / max(sampling.temperature or 1.0, 1e-3)
    return margin, margin / ulp, top <= 4 * ulp


def last_logits(target: Target, text: Sequence[int]) -> Tensor:
    """Logits [1, V] after a text, from a pass of its own."""
    slot = target.open(list(text), tenant="proof", room=8)
    try:
        left = torch.tensor(list(text)[slot.length:], device=target.device)
        return target.extend([slot], [left]).logits
    finally:
        target.close(slot)


def all_laws(target: Target, prompt: Ids, answer: Ids, temperature: float) -> Tensor:
    """log-probabilities [len(answer), V] float64 at every token of the answer, from one pass over the finished text."""
    slot = target.open(list(prompt[:2]), tenant="proof", room=len(prompt) + len(answer) + 8)
    try:
        if len(prompt) - 1 > slot.length:
            target.extend([slot], [torch.tensor(prompt[slot.length:-1], device=target.device)])
        draft = Draft.chain(torch.tensor(answer[:-1], dtype=torch.int64, device=target.device))
        logits = target.score([slot], torch.tensor(prompt[-1:], device=target.device), [draft]).logits
        target.rewind(slot, ())
    finally:
        target.close(slot)
    row = Rows(Sampling(temperature=temperature, top_p=1.0), (), 0, ((),) * len(answer), frozenset())
    return distribution(logits, [row]).double()


def _law(subject: Subject, prompts: Sequence[Ids], temperature: float, config: ProveConfig, report: RunReport) -> None:
    """Martingales and the randomised PIT, over enough texts."""
    per_text = min(config.tokens, 160)
    count = max(len(prompts), -(-config.statistics_tokens // per_text))
    asked = [prompts[i % len(prompts)] for i in range(count)]
    options = [Sampling(temperature=temperature, top_p=1.0, seed=config.seed + i, max_tokens=per_text, ignore_eos=True)
               for i in range(count)]
    answers, rounds, accepted = texts(subject, subject.drafter, asked, options, config.batch, "full")
    found = law_statistics(subject.target, asked, answers, rounds, temperature)
    report.statistics[f"temperature {temperature:g}"] = found | {"accepted": accepted}
    for name, (value, chance, words) in {
        "martingale": (found["z"], skewed_tail(found["z"], found["z_skew"]),
                       f"the drafter's favourite is written too {'often' if found['z'] > 0 else 'seldom'}"),
        "surprise": (found["surprise"], skewed_tail(found["surprise"], found["surprise_skew"]),
                     "the texts are likelier, or less likely, than the target's own"),
        "PIT": (found["pit"], found["pit"], "the tokens' places in the target's law are not uniform"),
    }.items():
        ok = chance > ALARM
        report.checks.append(Check(f"{name}, rule {subject.rule}, temperature {temperature:g}", ok,
                                   f"{value:.3g} over {found['tokens']} tokens, p-value {chance:.1e}" + ("" if ok else f": {words}")))
    report.checks.append(_accepted(accepted, temperature))


def law_statistics(target: Target, prompts: Sequence[Ids], answers: Sequence[Ids], rounds: Sequence[Sequence[RoundDone]],
                   temperature: float) -> dict[str, Any]:
    """z: Σ(1{x = d} − p(d)) over its deviation, d being the drafter's favourite at the first token of each round, which depends on the
    text before it alone (later ones would not, under `block`). surprise: the same of log p(x). pit: p-value that
    u = P(likelier than x) + v·p(x) is uniform. The skews are those of the first two. All are standard if every token is drawn from p,
    whatever was drafted."""
    hits = spread = third = surprise = variance = cubes = 0.0
    pits: list[float] = []
    rng = random.Random(0)
    for prompt, answer, own_rounds in zip(prompts, answers, rounds, strict=True):
        logp = all_laws(target, prompt, answer, temperature).cpu()
        p, x = logp.exp(), torch.tensor(answer)[:, None]
        for position, guess in favourites(own_rounds).items():
            at = position - len(prompt)
            chance = float(p[at, guess])
            hits += (answer[at] == guess) - chance
            spread += chance * (1 - chance)
            third += chance * (1 - chance) * (1 - 2 * chance)
        finite = logp.clamp_min(-1e3)
        mean = (p * finite).sum(-1)
        surprise += float((finite.gather(1, x)[:, 0] - mean).sum())
        variance += float(((p * finite**2).sum(-1) - mean**2).clamp_min(0).sum())
        cubes += float((p * (finite - mean[:, None])**3).sum())
        own = p.gather(1, x)
        before = (p > own) | ((p == own) & (torch.arange(p.shape[1]) < x))
        above = torch.where(before, p, 0).sum(-1)
        pits += [min(1.0, float(a) + rng.random() * float(b)) for a, b in zip(above, own[:, 0], strict=True)]
    return {"tokens": len(pits), "rounds": sum(map(len, rounds)), "pit": uniform_fit(pits),
            "z": hits / spread**0.5 if spread > 0 else 0.0, "z_skew": third / spread**1.5 if spread > 0 else 0.0,
            "surprise": surprise / variance**0.5 if variance > 0 else 0.0, "surprise_skew": cubes / variance**1.5 if variance > 0 else 0.0}


def favourites(rounds: Sequence[RoundDone]) -> dict[int, int]:
    """Position → the drafter's favourite at the first token of each round of one text, where it had one."""
    found = {}
    for event in rounds:
        token = event.tokens[0]
        if token.draft_alternatives:
            found[event.position] = token.draft_alternatives[0].token
        elif event.nodes and event.nodes[0].q is None:           # a point mass: its first guess is a function of the text
            found[event.position] = event.nodes[0].token
    return found
