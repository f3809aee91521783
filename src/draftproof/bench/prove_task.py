"""Level (c), the task: are the answers as good? Scored prompts, with guessing and without, paired.

One JSON object a line: {"prompt" | "messages" | "turns", "class"?} and what a right answer is, either `expect`, a regular
expression that it contains, or `answer`: its last number equals that one, or it contains that text, whatever the case.
Shown is equivalence, not the absence of a difference: the 90 % interval of the paired difference must lie within ± margin
(two one-sided tests at 5 %, TOST). A coarse instrument beside the other two levels, and the one that users ask for.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import Failure
from .load import Answer, Client, Job, Load, play
from .prove_rule import Check
from .statistics import mcnemar, paired_interval
from .workload import Item, item_of, read_lines

NUMBER = re.compile(r"(?:(?<!\w)[-+−])?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?")


@dataclass(frozen=True, slots=True)
class Task:
    item: Item
    expect: str | None
    answer: str | None

    def right(self, text: str) -> bool:
        if self.expect is not None:
            return re.search(self.expect, text) is not None
        wanted = str(self.answer).strip()
        if NUMBER.fullmatch(wanted):
            found = NUMBER.findall(text)
            return bool(found) and _value(found[-1]) == _value(wanted)
        return wanted.casefold() in text.casefold()


def _value(text: str) -> float:
    return float(text.replace(",", "").replace("−", "-"))


def read_tasks(path: str | Path) -> list[Task]:
    """Every task, in the order of the file. Raises Failure naming the line that has no known form, says no right answer, or whose
    expression does not compile."""
    return [_task(line, f"{path}, line {number}", number) for number, line in read_lines(path, "scored prompts")]


def _task(line: str, where: str, number: int) -> Task:
    """Prompt and right answer of one line."""
    item, record = item_of(line, where, number), json.loads(line)
    expect, answer = record.get("expect"), record.get("answer")
    if (expect is None) == (answer is None):
        raise Failure(f"{where}: expected either \"expect\" (a regular expression) or \"answer\" (a text or number)")
    if not isinstance(answer, str | int | float | None):
        raise Failure(f"{where}: answer {answer!r}; expected a text or number")
    if not isinstance(expect, str | None):
        raise Failure(f"{where}: expect {expect!r}; expected a regular expression, in quotes")
    try:
        re.compile(expect or "")
    except re.error as error:
        raise Failure(f"{where}: expect {expect!r} is no regular expression: {error}") from None
    return Task(item, expect, None if answer is None else str(answer))


@dataclass(frozen=True, slots=True)
class TaskReport:
    """Shares of right answers, off and on; gained and lost are prompts that only one of them got right. interval: 90 %, of on − off."""

    prompts: int
    right_off: int
    right_on: int
    gained: int
    lost: int
    identical: int                        # answers that are the same text
    interval: tuple[float, float]
    margin: float
    p_value: float                        # McNemar, exact: no difference at all
    check: Check

    def as_json(self) -> dict[str, Any]:
        return {"passed": self.check.passed, "checks": [self.check.as_json()],
                **{name: value for name, value in asdict(self).items() if name != "check"}}


def prove_task(off: Client, on: Client, tasks: Sequence[Task], tokens: int, temperature: float, seed: int, margin: float,
               concurrency: int = 1) -> TaskReport:
    """Ask every task of both and compare their scores. Raises Failure if a request fails."""
    mine, own = (_ask(client, name, tasks, tokens, temperature, seed, concurrency) for name, client in (("on", on), ("off", off)))
    pairs = [(task.right(a.text), task.right(b.text)) for task, a, b in zip(tasks, mine, own, strict=True)]
    same = sum(a.text == b.text for a, b in zip(mine, own, strict=True))
    return judge(pairs, same, margin)


def judge(pairs: Sequence[tuple[bool, bool]], same: int, margin: float) -> TaskReport:
    """pairs: (right with guessing, right without). Equal texts need no statistics: their scores are equal."""
    n, gained, lost = len(pairs), sum(a and not b for a, b in pairs), sum(b and not a for a, b in pairs)
    low, high = (0.0, 0.0) if same == n else paired_interval(gained, lost, n)
    p_value, passed = mcnemar(gained, lost), -margin < low and high < margin
    right_on, right_off = sum(a for a, _ in pairs), sum(b for _, b in pairs)
    words = f"{right_on} of {n} right with guessing, {right_off} without; difference {100 * low:+.1f} to {100 * high:+.1f} points (90 %)"
    if same == n:
        words += ": every answer is the same text"
    elif passed:
        words += f", within ± {100 * margin:g}: equivalent"
    elif high < -margin or (p_value < 0.05 and lost > gained):
        words += f": WORSE with guessing ({lost} lost, {gained} gained, McNemar p {p_value:.1e})"
    else:
        seen = (gained - lost) / n
        words += f": equivalence within ± {100 * margin:g} points is not shown"
        if (left := margin - abs(seen)) > 0:                    # the interval narrows around what was seen
            words += f"; about {max(n + 1, math.ceil(n * (max(seen - low, high - seen) / left) ** 2))} prompts could"
    return TaskReport(n, right_off, right_on, gained, lost, same, (low, high), margin, p_value, Check("task scores", passed, words))


def _ask(client: Client, name: str, tasks: Sequence[Task], tokens: int, temperature: float, seed: int, concurrency: int) -> list[Answer]:
    load = Load(concurrency)
    jobs = [Job(name, load, 0, i, task.item, seed + i, task.item.max_tokens or tokens, temperature) for i, task in enumerate(tasks)]
    last: dict[int, Answer] = {}
    for answer in play(client, jobs, load):
        if answer.error:
            raise Failure(f"task {answer.job.item.name} ({name}): {answer.error}")
        last[answer.job.number] = answer                 # of several turns the last one is scored
    return [last[i] for i in range(len(tasks))]
