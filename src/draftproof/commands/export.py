"""draftproof export: a trained head in the layout that another engine reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ..config import SpeculationConfig
from ..errors import OptionError
from . import options as o
from .console import emit_json, note

ENGINES = ("vllm", "sglang", "trtllm", "hf")
CONFIGS = ("vllm", "sglang", "trtllm", "llamacpp", "transformers", "openvino", "max")


@click.group(short_help="Hand a drafter to another engine.")
def export() -> None:
    """Write what another engine reads."""


@export.command(short_help="A head or draft model in another engine's layout.")
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--to", "engine", type=click.Choice(ENGINES), required=True)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), required=True, metavar="DIR")
def head(folder: Path, engine: str, out: Path) -> None:
    """Write the head in FOLDER for another engine. Tensors are renamed, never changed."""
    from ..models.heads.export import export_head

    for line in export_head(folder, engine, out):
        note(line)
    click.echo(out)


@export.command(short_help="The flags or the config of another engine.", context_settings={"ignore_unknown_options": True})
@click.option("--to", "engine", type=click.Choice(CONFIGS), required=True)
@o.target_option
@o.speculation_options
@click.option("--depth-by-batch", "schedule", metavar="START:DEPTH,…", help="Depths by batch size, as in 1:5,8:3,32:0.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), metavar="DIR",
              help="Write the files there, with the head converted if the engine reads another layout.")
@o.json_option
@click.argument("extra", nargs=-1, type=click.UNPROCESSED)
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
    if len(plan.parts) == 1 and plan.drafter.path is not None:
        plan = plan.at(_absolute(plan.drafter.path))
    if out is not None:
        if out.exists() and any(out.iterdir()):
            raise OptionError(f"--out {out} is not empty; expected a new folder")
        plan = _with_head(plan, engine, out)
    done = export_config(plan, engine)
    if out is not None:
        done.write(out)
    note(f"written for {done.version}")
    for line in done.notes:
        note(line)
    if as_json:
        emit_json(done.as_dict())
    else:
        click.echo(str(out) if out is not None else done.text, nl=out is not None)


def _absolute(place: str) -> str:
    folder = Path(place).expanduser()
    return str(folder.resolve()) if folder.exists() else place


def _with_head(plan: Any, engine: str, out: Path) -> Any:
    """A local head in the layout that the engine reads, beside its configuration."""
    from ..models.heads.export import WRITERS, export_head

    if (plan.name, engine) not in WRITERS:
        return plan
    for line in export_head(plan.path(), engine, out / "head"):
        note(line)
    return plan.at(str((out / "head").resolve()))
