"""What commands say: results on standard output, everything else on standard error; colour only on a terminal (NO_COLOR honoured)."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from ..types import LOSSY

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from ..engine.engine import Engine
    from ..engine.port import Completion
    from ..models.target import LoadFacts

TABLE_WIDTH = 132                       # when nobody's terminal says otherwise: where text in a table is wrapped
UNBROKEN = 1000                         # where nothing is wrapped, and a narrower one would cut values off
TOLD_S = 10.0
TIERS = {0: "a table", 1: "own cache in pages", 2: "the model's own cache", 3: "recurrent state"}


def note(message: str) -> None:
    """One line on standard error."""
    click.echo(message, err=True)


def log_lines() -> None:
    """From now on what is logged goes to standard error, each line with its time, level and source."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%Y-%m-%dT%H:%M:%S%z")
    logging.getLogger("draftproof").setLevel(logging.INFO)


def emit_json(document: Mapping[str, Any]) -> None:
    """The result, as the last line of standard output. No NaN: what was not counted is null."""
    click.echo(json.dumps(document, allow_nan=False))


def console(error: bool = False, wraps: bool = True) -> Console:
    """Rich writes to a terminal in its width and colours, and plain wide text to anything else: what does not wrap, as wide as it is."""
    from rich.console import Console

    stream = sys.stderr if error else sys.stdout
    return Console(file=stream, width=None if stream.isatty() else TABLE_WIDTH if wraps else UNBROKEN, highlight=False)


def print_rows(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], words: Collection[str] = (), together: int = 0) -> None:
    """A table that cuts nothing off; a line stands where the first `together` values change. words: names of columns that are no numbers.

    On a terminal that is too narrow it has no frame, and names break at spaces and soft hyphens; if need be, what stands in brackets behind
    values is left out, which is said; where that is not enough, lines are as long as they are.
    """
    out = console(wraps=False)
    forms = [(_table(title, head, rows, words, together), "")]
    if out.width < UNBROKEN:
        bare = [[re.sub(r" \(.*", "", value) for value in row] for row in rows]
        names = [re.sub(r" \(.*", "", name) for name in head]
        forms.append((_table(title, head, rows, words, together, narrow=True), ""))
        forms.append((_table(title, names, bare, words, together, narrow=True),
                      "Left out, for the terminal is narrow: what stands in brackets behind values. A wider one has it, or --json."))
    table, remark = next((form for form in forms if _wide(form[0], out) <= out.width), forms[-1])
    out.width = max(out.width, _wide(table, out))
    out.print(table)
    if remark:
        note(remark)


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], words: Collection[str], together: int,
           narrow: bool = False) -> Table:
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(title), title_justify="left", title_style="")
    if narrow:
        table.box, table.padding, table.pad_edge = None, (0, 1, 0, 0), False
    for name in head:
        shown = name.replace(" ", "\n").replace("\xad", "-\n") if narrow else name.replace("\xad", "")
        table.add_column(escape(shown), justify="left" if name in words else "right", no_wrap=True)
    for before, row in zip([rows[0], *rows] if rows else (), rows, strict=False):
        if before[:together] != row[:together]:
            table.add_row() if narrow else table.add_section()
        table.add_row(*map(escape, row))
    return table


def _wide(table: Table, out: Console) -> int:
    """Columns that it takes, its title aside, which wraps."""
    from rich.measure import Measurement

    return Measurement.get(out, out.options.update(width=UNBROKEN), table).maximum


class Pace:
    """Tells every TOLD_S seconds how far a long piece of work has come, and of `total` how long the rest takes."""

    def __init__(self, say: Callable[[str], None], what: str, total: int | None = None) -> None:
        self.say, self.what, self.total = say, what, total
        self.told = time.perf_counter()
        self.first: tuple[int, float] | None = None          # what an earlier run left says nothing of this one's pace

    def __call__(self, done: int) -> None:
        now = time.perf_counter()
        if self.first is None:
            self.first = done, now
        if now - self.told < TOLD_S:
            return
        self.told = now
        (count, since), rest = self.first, (self.total or 0) - done
        left = f" · {remaining((now - since) / (done - count) * rest)}" if rest > 0 and done > count else ""
        self.say(f"{done}{f'/{self.total}' if self.total else ''} {self.what}{left}")


def counted(count: int, what: str) -> str:
    """1 text, 2 texts."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def remaining(seconds: float) -> str:
    """about 40 s left, about 4 min left, about 2.5 h left."""
    if seconds < 99.5:
        return f"about {seconds:.0f} s left"
    return f"about {seconds / 60:.0f} min left" if seconds < 99.5 * 60 else f"about {seconds / 3600:.1f} h left"


def size(count: float) -> str:
    """Bytes for people: 1.5 KB, 36.4 MB (powers of 1000)."""
    for unit in ("B", "KB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def parameters(facts: LoadFacts) -> str:
    """18.5 M parameters; of a mixture of experts also what one row goes through."""
    experts = facts.experts
    more = f" ({facts.active_parameters / 1e6:.1f} M of them for each row: {experts.chosen} of {experts.count} experts)" if experts else ""
    return f"{facts.parameters / 1e6:.1f} M parameters{more}"


def facts_lines(facts: LoadFacts, cache_tokens: int) -> list[str]:
    """What a load decided and measured, one line each, every automatic choice with its reason."""
    return [
        f"target {facts.name}: {parameters(facts)}, {facts.dtype} on {facts.device}, threads {facts.threads}, "
        f"tier {facts.tier} ({TIERS.get(facts.tier, 'unknown')})",
        f"memory: weights {size(facts.weight_bytes)}, cache at most {size(facts.cache_bytes_per_token * cache_tokens)} "
        f"({size(facts.cache_bytes_per_token)} a token, {cache_tokens} tokens)",
        f"invisible to the bit: {facts.invisible_reason}",
        *(f"{choice}: {reason}" for choice, reason in facts.reasons.items()),
    ]


def load_lines(engine: Engine, cache_tokens: int) -> list[str]:
    """`facts_lines` of the target, and what is known of a drafter that is a model: its size, and how its tokens were compared."""
    lines, drafter = facts_lines(engine.target.facts, cache_tokens), engine.speculation.drafter
    if engine.settings.rule in LOSSY:
        lines.append(f"rule {engine.settings.rule}: lossy, what is written is neither the target's own text nor drawn from its law")
    lm = getattr(drafter, "lm", None)
    if lm is not None:
        lines.append(f"drafter {lm.facts.name}: {parameters(lm.facts)}, {lm.facts.dtype} on {lm.facts.device}")
    told = [check for check in getattr(drafter, "checks", ()) if check.name == "vocabulary" or not check.ok]
    return lines + [f"drafter {check.name}: {check.detail}" for check in told]


def guarantee(speculation: Mapping[str, Any], facts: LoadFacts) -> str:
    """What speculation did to the text, in words."""
    if speculation["drafter"] == "none":
        return "plain decoding, no drafter"
    if speculation["rule"] in LOSSY:
        return f"lossy: the text is not the target's own (rule {speculation['rule']})"
    if speculation["rule"] != "match":
        return f"the same distribution as plain decoding (rule {speculation['rule']}), not the same text"
    if facts.invisible:
        return "identical to plain decoding with this seed, bit for bit"
    return f"the same choices as plain decoding with this seed, up to near ties ({facts.invisible_reason})"


def summary(done: Completion, facts: LoadFacts) -> str:
    """One line about a finished sample."""
    metrics, speculation = done.metrics, done.speculation
    parts = [f"{done.completion_tokens} tokens ({done.finish_reason})"]
    if metrics.get("tokens_per_s") is not None:
        parts.append(f"{metrics['tokens_per_s']:.1f} tokens/s")
    if metrics.get("acceptance_length") is not None:
        parts.append(f"acceptance length {metrics['acceptance_length']:.2f}")
    drafter = speculation["drafter"] + (", out of service" if speculation["state"] == "out of service" else "")
    parts += [f"drafter {drafter}", f"depth {speculation['depth']}", f"seed {done.seed}", guarantee(speculation, facts)]
    return " · ".join(parts)
