"""draftproof export: a trained head in the layout that another engine reads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING, Any

import click

from ..config import SpeculationConfig
from ..errors import OptionError
from . import options as o
from .console import emit_json, note

if TYPE_CHECKING:
    from ..drafters import Spec

ENGINES = ("vllm", "sglang", "trtllm", "hf")
CONFIGS = ("vllm", "sglang", "trtllm", "llamacpp", "transformers", "openvino", "max")


@click.group(short_help="Hand a drafter to another engine.")
def export() -> None:
    """Write what another engine reads."""


@export.command(short_help="A head or draft model in another engine's layout.")
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--to", "engine", type=click.Choice(ENGINES), required=True, help="The engine that reads it; hf: as published.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), required=True, metavar="DIR", help="A new folder for it.")
@click.option("--target", metavar="PATH|ID",
              help="Of an mtp head: its target's checkpoint, which is copied with the head in it, as engines read one. Of an eagle3 "
                   "head: its target, whose number of layers tells how some count taps.")
def head(folder: Path, engine: str, out: Path, target: str | None) -> None:
    """Write the head in FOLDER for another engine. Tensors are renamed, never changed."""
    o.check_target(target)
    from ..models.heads.export import export_head

    for line in export_head(folder, engine, out, target):
        note(line)
    click.echo(out)


class Trailing(click.Command):
    """A command whose `extra` is what stands behind `--`, and nothing before it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        extra = tuple(args[end + 1:])                    # now: click empties the list that it parses
        rest = super().parse_args(ctx, args[:end])
        ctx.params["extra"] = extra
        return rest


@export.command(cls=Trailing, short_help="The flags or the config of another engine.",
                options_metavar="[OPTIONS] [-- ARGUMENTS OF THE ENGINE]")
@click.option("--to", "engine", type=click.Choice(CONFIGS), required=True, help="The engine whose words they are.")
@o.target_option
@o.speculation_options
@click.option("--depth-by-batch", "schedule", metavar="START:DEPTH,…", help="Depths by batch size, as in 1:5,8:3,32:0.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), metavar="DIR",
              help="Write the files there, with the head converted if the engine reads another layout.")
@o.json_option
def config(engine: str, target: str | None, schedule: str | None, out: Path | None, as_json: bool, extra: tuple[str, ...],
           **given: Any) -> None:
    """Write this setting of speculation in the words of another engine, and say what it cannot express.

    Arguments after -- go to the engine as they are. Local folders are written as absolute paths.
    """
    settings = SpeculationConfig.of(o.pick(SpeculationConfig, given))
    o.check_target(target)
    from ..remote.dialects import export_config
    from ..remote.plan import Plan, Schedule

    if target is None:
        from ..models.load import builtin

        target = str(builtin("target"))
    plan = Plan.of(_absolute(target), settings, None if schedule is None else Schedule.of(schedule), extra)
    plan = replace(plan, drafter=_settled(plan.drafter))
    done = export_config(plan, engine)                  # what the engine refuses is told before anything is written
    if out is not None:
        if out.exists() and any(out.iterdir()):
            raise OptionError(f"--out {out} is not empty; expected a new folder")
        done = export_config(_with_head(plan, engine, out), engine)
        done.write(out)
    note(f"written for {done.version}")
    for line in done.notes:
        note(line)
    if as_json:
        emit_json(done.as_dict())
    else:
        click.echo(str(out) if out is not None else done.text, nl=out is not None)


def _settled(drafter: Spec) -> Spec:
    """The same with absolute paths."""
    path = None if drafter.path is None else _absolute(drafter.path)
    return replace(drafter, path=path, parts=tuple(map(_settled, drafter.parts)))


def _absolute(place: str) -> str:
    folder = Path(place).expanduser()
    return str(folder.resolve()) if folder.exists() else place


def _with_head(plan: Any, engine: str, out: Path) -> Any:
    """A local head in the layout that the engine reads, beside its configuration."""
    from ..models.heads.export import TAPPED, WRITERS, export_head

    if (plan.name, engine) not in WRITERS:
        return plan
    try:
        known = plan.name in TAPPED and Path(plan.target).expanduser().is_dir()
        lines = export_head(plan.path(), engine, out / "head", plan.target if known else None)
    except BaseException:
        rmtree(out / "head", ignore_errors=True)
        raise
    for line in lines:
        note(line)
    return plan.at(str((out / "head").resolve()))
