"""draftproof export: a trained head in the layout that another engine reads."""

from __future__ import annotations

from pathlib import Path

import click

from .console import note

ENGINES = ("vllm", "sglang", "trtllm", "hf")


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
