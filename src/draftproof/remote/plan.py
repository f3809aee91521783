"""One setting of speculation, said in no engine's words, and what comes of putting it into an engine's."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..config import SpeculationConfig
from ..drafters import DRAFTERS, Spec, parse_spec
from ..errors import LoadError, OptionError
from ..types import Rule

DEPTH = 4
"""What stands for `auto`, which no other engine knows: near the best of chains on most pairs."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Depths by batch size: from `start` sequences on, up to the next step's start, `depth` tokens are guessed."""

    steps: tuple[tuple[int, int], ...]              # (start, depth); the first start is 1

    @classmethod
    def of(cls, text: str) -> Schedule:
        """From "1:5,8:3,32:0". Raises OptionError."""
        if not re.fullmatch(r"\d+:\d+(,\d+:\d+)*", text):
            raise OptionError(f"depth by batch {text!r}: expected START:DEPTH,…, as in 1:5,8:3,32:0")
        steps = tuple((int(start), int(depth)) for start, _, depth in (part.partition(":") for part in text.split(",")))
        starts = [start for start, _ in steps]
        if starts[0] != 1 or starts != sorted(set(starts)):
            raise OptionError(f"depth by batch {text!r}: expected rising batch sizes that begin with 1")
        return cls(steps)

    def ranges(self, last: int) -> list[tuple[int, int, int]]:
        """(first batch size, last one, depth), `last` closing the open end."""
        ends = [start - 1 for start, _ in self.steps[1:]] + [max(last, self.steps[-1][0])]
        return [(start, end, depth) for (start, depth), end in zip(self.steps, ends, strict=True)]


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to run. depth None is auto; `extra` are arguments that the engine gets as they are."""

    target: str
    drafter: Spec
    depth: int | None = None
    tree: int | None = None
    rule: Rule = "match"
    schedule: Schedule | None = None
    extra: tuple[str, ...] = ()

    @classmethod
    def of(cls, target: str, wanted: SpeculationConfig, schedule: Schedule | None = None, extra: tuple[str, ...] = ()) -> Plan:
        """Raises SpecError, or OptionError for a schedule beside a depth or without a drafter."""
        if schedule is not None and wanted.drafter == "none":
            raise OptionError("a depth by batch with drafter none: name a drafter, or leave it out")
        if schedule is not None and wanted.depth is not None:
            raise OptionError(f"depth={wanted.depth} with a depth by batch, which says every depth: leave one of them out")
        return cls(target, parse_spec(wanted.drafter), wanted.depth, wanted.tree, wanted.rule, schedule, extra)

    @property
    def parts(self) -> tuple[Spec, ...]:
        return self.drafter.parts or (self.drafter,)

    @property
    def name(self) -> str:
        return self.drafter.name

    @property
    def k(self) -> int:
        """Tokens guessed per round; of a schedule, the most."""
        if self.schedule is not None:
            return max(depth for _, depth in self.schedule.steps)
        return DEPTH if self.depth is None else self.depth

    def path(self, part: Spec | None = None) -> str:
        """Where the drafter's weights are: its path, or the built-in ones of the demo target. Raises LoadError."""
        part = part or self.drafter
        if part.path is not None:
            return part.path
        if DRAFTERS[part.name].takes_path:
            from ..models.load import builtin

            return str(builtin("draft" if part.name == "model" else part.name))
        raise LoadError(f"drafter {part.name} has no weights of its own")

    def general_notes(self, depth: bool = True) -> list[str]:
        """What no engine can express. depth: whether one is written."""
        if self.name == "none":
            return []
        notes = []
        if depth and self.depth is None and self.schedule is None:
            notes.append(f"depth auto cannot be expressed: {self.k} is written; `draftproof advise` finds the best fixed depth")
        if self.rule == "match":
            notes.append("rule match (noise that target and drafter share) is draftproof's own: sampled texts keep their distribution, "
                         "not their seed's text")
        if self.name == "mtp" and self.drafter.path is not None and _alone(self.drafter.path):
            notes.append(f"{self.drafter.path} is an mtp head alone; engines read one inside its target's checkpoint: `draftproof export "
                         "head FOLDER --to ENGINE --target TARGET --out DIR` writes that; serve DIR with drafter mtp")
        return notes

    def at(self, path: str) -> Plan:
        """The same with the drafter's weights elsewhere."""
        return replace(self, drafter=replace(self.drafter, path=path))


@dataclass(frozen=True, slots=True)
class Exported:
    """A plan in an engine's own words. command: argv, empty for libraries; files by name; notes: what could not be expressed."""

    engine: str
    version: str
    command: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """For reading: the files, each under its name, and the command."""
        parts = [f"# {name}\n{content.rstrip()}\n" for name, content in self.files.items()]
        if self.command:
            parts.append(" ".join(shlex.quote(word) for word in self.command) + "\n")
        return "\n".join(parts)

    def as_dict(self) -> dict[str, Any]:
        return {"engine": self.engine, "version": self.version, "command": list(self.command), "files": dict(self.files),
                "notes": list(self.notes)}

    def write(self, folder: Path) -> None:
        """Every file, and the command as a script."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            (folder / name).write_text(content, encoding="utf-8")
        if self.command:
            script = folder / "run.sh"
            script.write_text("#!/bin/sh\nset -e\ncd \"$(dirname \"$0\")\"\nexec " + " ".join(map(shlex.quote, self.command)) + ' "$@"\n',
                              encoding="utf-8")
            script.chmod(0o755)


def _alone(path: str) -> bool:
    from ..models.heads.mtp_files import alone

    return alone(path)


def unheard(plan: Plan, export: Callable[[Plan], Exported]) -> list[str]:
    """The options of the plan's drafters, and its depth, that change nothing in what `export` writes, a sentence each."""
    def same(other: Plan) -> bool:
        found, changed = export(plan), export(other)
        return (found.command, found.files) == (changed.command, changed.files)

    if not plan.k:
        return []
    notes = []
    for place, part in enumerate(plan.parts):
        for key, value in part.options.items():
            one = replace(part, options={**part.options, key: value + 1})
            parts = (*plan.parts[:place], one, *plan.parts[place + 1:])
            if same(replace(plan, drafter=replace(plan.drafter, parts=parts) if plan.drafter.parts else one)):
                notes.append(f"{part.name}:{key}={value} has no counterpart, and is left out")
    if plan.depth is not None and same(replace(plan, depth=plan.depth + 1)):
        notes.append(f"depth {plan.depth} has no counterpart: the engine decides")
    return notes


def short_names(places: Iterable[str]) -> dict[str, str]:
    """A file's name for every folder or hub id: its last part, with as many of those before it as tell them all apart."""
    parts = {place: [part for part in place.split("/") if part] for place in places}
    most = max(map(len, parts.values()), default=1)
    names = ({place: "-".join(words[-count:]) for place, words in parts.items()} for count in range(1, most + 1))
    return next((found for found in names if len(set(found.values())) == len(set(map(tuple, parts.values())))), {place: place.replace(
        "/", "-") for place in parts})


def refuse(plan: Plan, engine: str, able: str, instead: str = "") -> OptionError:
    """The error for a drafter that an engine does not have."""
    return OptionError(f"{engine} has no drafter like {plan.name}; expected one of {able}" + (f": {instead}" if instead else ""))


def one_drafter(plan: Plan, engine: str) -> None:
    """Raises OptionError for a chain of drafters."""
    if plan.drafter.parts:
        raise OptionError(f"{engine} runs one drafter at a time, found {plan.name}; export one of {', '.join(p.name for p in plan.parts)}")


def config_of(path: str) -> dict[str, Any]:
    """The config.json of a local folder; empty for a hub id, whose files are not here."""
    file = Path(path).expanduser() / "config.json"
    try:
        found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except ValueError as error:
        raise LoadError(f"{file} is no JSON ({error})") from None
    return found if isinstance(found, dict) else {}


def vocabularies_differ(target: str, draft: str) -> bool:
    """Whether two local folders say different vocabulary sizes; False where either is not here to be read."""
    ours, theirs = config_of(target).get("vocab_size"), config_of(draft).get("vocab_size")
    return ours is not None and theirs is not None and ours != theirs


def compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
