"""Answers → rows: speed, latency, acceptance and identity per arm, load and class; the same numbers in other tools' words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from operator import attrgetter
from statistics import fmean, median, pstdev
from typing import Any

from ..core.tally import Tally, ratio
from .cells import ALL, OFF, Middle, Spread, percentile
from .load import Answer, Load
from .sweep import Arm, identical, speedup
from .workload import MT_BENCH, SPEC_BENCH

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


@dataclass(frozen=True, slots=True)
class Row:
    """One arm under one load in one class of prompts. Seconds; speeds are tokens per second and user unless `total`."""

    arm: str
    drafter: str
    depth: str
    prompt_class: str
    load: Load
    requests: int
    failed: int
    tokens: int
    tokens_per_s: Spread                  # low and high: the 10th and 90th percentile over requests
    total_tokens_per_s: Spread | None     # of the whole load (class `all` only); low and high: the extremes over repeats
    speedup: Middle | None                # against off, over prompts; None without off
    decoding: Middle | None               # the same of the tokens after the first chunk
    identical: bool | None                # to off; None where that cannot be asked
    tally: Tally | None
    latency: Mapping[str, Mapping[str, float] | None] = field(default_factory=dict)     # name → p50, p90, p99
    draft_bytes: int = 0
    kv_tokens_lost: int = 0

    def as_json(self) -> dict[str, Any]:
        tally, latency = self.tally, self.latency
        rounds = tally.rounds_drafted if tally else 0
        return {
            "arm": self.arm, "drafter": self.drafter, "depth": self.depth, "class": self.prompt_class,
            "concurrency": self.load.concurrency, "rate": self.load.rate, "load": self.load.name,
            "requests": self.requests, "failed": self.failed, "tokens": self.tokens,
            "tokens_per_s": asdict(self.tokens_per_s),
            "total_tokens_per_s": None if self.total_tokens_per_s is None else asdict(self.total_tokens_per_s),
            "speedup": None if self.speedup is None else asdict(self.speedup),
            "decoding": None if self.decoding is None else asdict(self.decoding),
            "acceptance_length": tally.acceptance_length if tally else None,
            "acceptance_length_drafted": tally.acceptance_length_drafted if tally else None,
            "draft_utilisation": tally.draft_utilisation if tally else None,
            "hazard": tally.hazard if tally else None,
            "accepted_at": [passed / rounds for passed in tally.passed] if tally and rounds else None,
            "ttft_s": (latency["ttft_s"] or {}).get("p50"), "tpot_s": (latency["tpot_s"] or {}).get("p50"),
            "latency": {name: None if values is None else dict(values) for name, values in latency.items()},
            "identical": self.identical, "draft_bytes": self.draft_bytes, "kv_tokens_lost": self.kv_tokens_lost,
        }


def rows(answers: Sequence[Answer], arms: Sequence[Arm]) -> list[Row]:
    """A row per load, class and arm, then per load and arm over all classes, in the order of the workload."""
    found = []
    for load in dict.fromkeys(a.job.load for a in answers):
        here = [a for a in answers if a.job.load == load]
        for name in [*dict.fromkeys(a.job.item.prompt_class for a in here), ALL]:
            for arm in arms:
                chosen = [a for a in here if a.job.arm == arm.name and name in (ALL, a.job.item.prompt_class)]
                if chosen:
                    found.append(_row(arm, name, load, chosen, here))
    return found


def _row(arm: Arm, name: str, load: Load, chosen: Sequence[Answer], here: Sequence[Answer]) -> Row:
    good = [a for a in chosen if not a.error]
    speeds = sorted(a.tokens_per_s for a in good) or [0.0]
    counted = [a.tally for a in good if a.tally is not None]
    off = arm.name == OFF
    same, _ = identical([a for a in here if name in (ALL, a.job.item.prompt_class)], arm.name) if arm.comparable else (None, 0)
    return Row(
        arm.name, arm.drafter, arm.depth, name, load, len(chosen), len(chosen) - len(good), sum(a.tokens for a in good),
        Spread(median(speeds), percentile(speeds, 0.1), percentile(speeds, 0.9)),
        _total(chosen) if name == ALL else None, None if off else speedup(here, arm.name, name),
        None if off else speedup(here, arm.name, name, speed=attrgetter("decoding")), same,
        sum(counted, Tally()) if counted else None,
        {"ttft_s": _quantiles(a.ttft_s for a in good), "tpot_s": _quantiles(a.tpot_s for a in good),
         "inter_chunk_s": _quantiles(gap for a in good for gap in a.inter_chunk_s), "e2e_s": _quantiles(a.e2e_s for a in good)},
        max((a.draft_bytes for a in good), default=0), max((a.kv_tokens_lost for a in good), default=0))


def _quantiles(values: Iterable[float | None]) -> dict[str, float] | None:
    known = sorted(v for v in values if v is not None)
    return {name: percentile(known, share) for name, share in QUANTILES.items()} if known else None


def busy_s(answers: Sequence[Answer]) -> float:
    """Seconds in which the arm had work: from first to last, block by block."""
    blocks: dict[int, list[Answer]] = {}
    for a in answers:
        blocks.setdefault(a.job.block, []).append(a)
    return sum(max(a.ended_s for a in block) - min(a.sent_s for a in block) for block in blocks.values())


def _total(answers: Sequence[Answer]) -> Spread | None:
    repeats: dict[int, list[Answer]] = {}
    for a in answers:
        repeats.setdefault(a.job.repeat, []).append(a)
    rates = [sum(a.tokens for a in each if not a.error) / seconds for each in repeats.values() if (seconds := busy_s(each)) > 0]
    return Spread(median(rates), min(rates), max(rates)) if rates else None


def serving(answers: Sequence[Answer], arm: Arm, load: Load) -> dict[str, Any]:
    """One arm under one load with the keys of `vllm bench serve --save-result`. Its ITL is the time between chunks, not tokens."""
    chosen = [a for a in answers if a.job.arm == arm.name and a.job.load == load]
    good = [a for a in chosen if not a.error]
    seconds, prompt, written = busy_s(chosen), sum(a.prompt_tokens for a in good), sum(a.tokens for a in good)
    out: dict[str, Any] = {
        "label": arm.name, "num_prompts": len(chosen), "request_rate": load.rate or "inf", "max_concurrency": load.concurrency,
        "duration": seconds, "completed": len(good), "failed": len(chosen) - len(good), "total_input_tokens": prompt,
        "total_output_tokens": written, "request_throughput": _rate(len(good), seconds), "output_throughput": _rate(written, seconds),
        "total_token_throughput": _rate(prompt + written, seconds),
    }
    times: dict[str, list[float | None]] = {"ttft": [a.ttft_s for a in good], "tpot": [a.tpot_s for a in good],
                                            "itl": [gap for a in good for gap in a.inter_chunk_s],
                                            "e2el": [a.e2e_s for a in good]}
    for name, values in times.items():
        known = sorted(1000 * v for v in values if v is not None)
        if known:
            out |= {f"mean_{name}_ms": fmean(known), f"median_{name}_ms": median(known), f"std_{name}_ms": pstdev(known),
                    f"p99_{name}_ms": percentile(known, 0.99)}
    tally = sum((a.tally for a in good if a.tally is not None), Tally())
    if tally.drafted and tally.rounds_drafted:
        out |= {"spec_decode_acceptance_rate": 100 * tally.accepted / tally.drafted,
                "spec_decode_acceptance_length": tally.acceptance_length_drafted, "spec_decode_num_drafts": tally.rounds_drafted,
                "spec_decode_draft_tokens": tally.drafted, "spec_decode_accepted_tokens": tally.accepted,
                "spec_decode_per_position_acceptance_rates": [n / tally.rounds_drafted for n in tally.passed]}
    return out


def _rate(count: int, seconds: float) -> float | None:
    return count / seconds if seconds > 0 else None


def spec_bench(answers: Sequence[Answer], arm: str) -> list[dict[str, Any]]:
    """Spec-Bench's own report, with its own arithmetic: mean tokens per step, speed as the mean over questions of tokens over wall
    time (prefill included), speed-up as the quotient of two such means. Rows: its six tasks as far as asked, then overall."""
    tasks = [name for name in SPEC_BENCH if any(a.job.item.prompt_class == name for a in answers)]
    found = []
    for task in [*tasks, "overall"]:
        here = [a for a in answers if not a.error and task in ("overall", a.job.item.prompt_class)]
        mine, off = [a for a in here if a.job.arm == arm], [a for a in here if a.job.arm == OFF]
        steps = [n for a in mine for n in a.steps]
        speed, base = _mean_speed(mine), _mean_speed(off)
        found.append({"task": task, "questions": len({a.job.number for a in mine}), "mean_accepted_tokens": ratio(sum(steps), len(steps)),
                      "tokens_per_s": speed, "tokens_per_s_baseline": base, "speedup": speed / base if speed and base else None})
    return found


def _mean_speed(answers: Sequence[Answer]) -> float | None:
    questions: dict[tuple[int, int], list[Answer]] = {}
    for a in answers:
        questions.setdefault((a.job.number, a.job.repeat), []).append(a)
    speeds = [sum(a.tokens for a in turns) / seconds for turns in questions.values() if (seconds := sum(a.e2e_s for a in turns)) > 0]
    return fmean(speeds) if speeds else None


def is_spec_bench(answers: Sequence[Answer]) -> bool:
    return bool(answers) and all(a.job.item.category in (*MT_BENCH, *SPEC_BENCH) and a.job.item.prompt_class in SPEC_BENCH for a in answers)


def answer_lines(answers: Sequence[Answer], arm: str, model: str, stamp: float) -> list[dict[str, Any]]:
    """Spec-Bench's answer file: one record per question, one choice per repeat; `accept_lengths` are tokens per target step."""
    questions: dict[int, dict[int, list[Answer]]] = {}
    for a in answers:
        if a.job.arm == arm and not a.error:
            questions.setdefault(a.job.number, {}).setdefault(a.job.repeat, []).append(a)
    lines = []
    for _, repeats in sorted(questions.items()):
        item = next(iter(repeats.values()))[0].job.item
        choices = []
        for repeat, turns in sorted(repeats.items()):
            turns = sorted(turns, key=lambda a: a.job.turn)
            choices.append({"index": repeat, "turns": [a.text for a in turns],
                            "decoding_steps": [a.tally.rounds if a.tally else len(a.steps) for a in turns],
                            "new_tokens": [a.tokens for a in turns], "wall_time": [a.e2e_s for a in turns],
                            "accept_lengths": [n for a in turns for n in a.steps]})
        lines.append({"question_id": int(item.name) if item.name.isdecimal() else item.name, "category": item.category,
                      "answer_id": f"{arm}-{item.name}", "model_id": f"{model}-{arm}", "choices": choices, "tstamp": stamp})
    return lines
