"""Level (b) on servers: the same requests with guessing and without, token by token as far as the server tells, and margins
from its log-probabilities. The control sends the plain requests once more, several at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ..config import ProveConfig
from ..errors import Failure
from .load import Answer, Client, Job, Load, play
from .prove_rule import Check
from .prove_run import END, Comparison, Divergence, RunReport, judge
from .workload import Item

NEAR_TIE = 0.25
"""Nats between two tokens up to which rounding may have decided, since a server does not say in what precision it runs. An ulp of a
bf16 logit between 16 and 32 is 0.125."""


def prove_url(off: Client, on: Client, items: Sequence[Item], config: ProveConfig, note: Callable[[str], None] = lambda _: None, *,
              sampled: bool = False) -> RunReport:
    """Identity at temperature 0; with `sampled` (both are Draftproof's server, which shares its noise) at the others too."""
    report = RunReport()
    for temperature in config.temperatures if sampled else (0.0,):
        note(f"run: temperature {temperature:g}, plain, with guessing, and the control …")
        plain = ask(off, items, config, temperature, 1)
        control = compare(f"plain, {config.batch} at a time, against one at a time (control)", temperature,
                          ask(off, items, config, temperature, config.batch), plain)
        others = [compare(f"with guessing, {batch} at a time, against plain", temperature,
                          ask(on, items, config, temperature, batch), plain) for batch in (1, config.batch)]
        report.comparisons += [control, *others]
        judge(report.checks, control, others, False, temperature)
    if not any(c.tokens for c in report.comparisons):
        report.checks.append(Check("texts", False, "the servers wrote nothing that could be compared"))
    return report


def telling(client: Client, plain: Client, item: Item, config: ProveConfig, note: Callable[[str], None]) -> Client:
    """client, which asks for log-probabilities; plain, which does not, where the server refuses them, as TensorRT-LLM does while it
    guesses."""
    (answer,) = play(client, [Job("proof", Load(1), 0, 0, replace(item, turns=item.turns[:1]), config.seed, 1, 0.0)], Load(1))
    if answer.error is None or not answer.error.startswith("HTTP 4"):
        return client
    note(f"run: no log-probabilities, so texts are compared, and no margin is known: {' '.join(answer.error.split())}")
    return plain


def ask(client: Client, items: Sequence[Item], config: ProveConfig, temperature: float, concurrency: int) -> list[Answer]:
    """An answer to the first turn of every item. Raises Failure if a request fails."""
    load, found = Load(concurrency), {}
    jobs = [Job("proof", load, 0, i, replace(item, turns=item.turns[:1]), config.seed + i,
                min(item.max_tokens or config.tokens, config.tokens), temperature) for i, item in enumerate(items)]
    for answer in play(client, jobs, load):
        if answer.error:
            raise Failure(f"prompt {answer.job.number + 1}: {answer.error}")
        found[answer.job.number] = answer
    return [found[i] for i in range(len(items))]


def units(one: Answer, other: Answer) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What is compared: tokens if both servers tell them, else characters."""
    if one.logprobs and other.logprobs:
        return tuple(token for token, _, _ in one.logprobs), tuple(token for token, _, _ in other.logprobs)
    if one.token_ids is not None and other.token_ids is not None:
        return tuple(f"#{token}" for token in one.token_ids), tuple(f"#{token}" for token in other.token_ids)
    return tuple(one.text), tuple(other.text)


def compare(name: str, temperature: float, found: Sequence[Answer], plain: Sequence[Answer]) -> Comparison:
    same, tokens, differences = 0, 0, []
    for i, (one, other) in enumerate(zip(found, plain, strict=True)):
        mine, own = units(one, other)
        at = next((t for t, (a, b) in enumerate(zip(mine, own, strict=False)) if a != b), min(len(mine), len(own)))
        tokens += at
        if mine == own and one.text == other.text:
            same += 1
            continue
        ends = at >= min(len(mine), len(own))
        margin = None if ends else margin_at(one, other, at)
        near = margin is not None and margin <= NEAR_TIE / max(temperature, 1e-9 if temperature else 1.0)
        wrote, expected = (side[at] if at < len(side) else END for side in (mine, own))
        differences.append(Divergence(name, temperature, i, at, wrote, expected, margin, near))
    return Comparison(name, temperature, len(plain), same, tokens, tuple(differences))


def margin_at(one: Answer, other: Answer, at: int) -> float | None:
    """Nats between the two tokens where they first differ, in the view of whichever answer finds them further apart; None where a
    server gave no log-probabilities, or where neither answer's likeliest include the other's token."""
    if not (one.logprobs and other.logprobs):
        return None
    margins = []
    for mine, their in ((one, other), (other, one)):
        token, own, top = mine.logprobs[at]
        rival = their.logprobs[at][0]
        if rival in top and rival != token:
            margins.append(abs(own - top[rival]))
    return max(margins) if margins else None
