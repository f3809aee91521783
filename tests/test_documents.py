"""What documents say of names: links, files, commands, options and their defaults, drafters, engines. Read as text; nothing is run."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import click
import pytest

from draftproof import Engine
from draftproof.cli import COMMANDS
from draftproof.drafters import DRAFTERS
from draftproof.drafters.base import Needs
from draftproof.remote.dialects import DIALECTS

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "draftproof"
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *(page for page in sorted(DOCS.glob("*.md")) if page.name != "log.md"), ROOT / "benchmarks" / "README.md",
         *sorted((ROOT / "recipes").glob("*/README.md"))]
NAMED_WHOLE = ("core", "trace", "models", "engine")         # folders of which README names every file


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def section(page: Path, heading: str) -> str:
    return re.split(r"^## ", read(page).split(f"\n## {heading}\n")[1], maxsplit=1, flags=re.MULTILINE)[0]


def leaves() -> Iterator[click.Command]:
    for command in COMMANDS.values():
        yield from command.commands.values() if isinstance(command, click.Group) else [command]


def options_of(command: click.Command) -> set[str]:
    return {name for option in command.params for name in (*option.opts, *option.secondary_opts) if name.startswith("--")}


def refused(line: str) -> set[str]:
    """Options in a line, `generate … --seed 1 -- what another engine gets`, that the command does not have."""
    words = line.split(" -- ")[0].split()
    command = COMMANDS[words[0].rstrip(",")]
    if isinstance(command, click.Group):
        command = command.commands[words[1]]
    return {word.strip("[]").partition("=")[0] for word in words if re.match(r"\[?--[a-z]", word)} - options_of(command)


def shown(page: Path, program: str) -> Iterator[str]:
    """What stands behind a program in a page's blocks, continued lines joined, without remarks."""
    text = read(page)
    blocks = [block for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL) if not language]
    blocks += re.findall(r"(?:^    \S.*\n|^        \S.*\n)+", text, re.MULTILINE)
    for line in "\n".join(blocks).replace("\\\n", " ").splitlines():
        found = re.match(rf"\s*(?:PYTHONPATH=\. )?{program} ([a-z].*)", line)
        if found:
            yield found[1].split(" #")[0]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page(page: Path) -> None:
    """Its links lead somewhere, its commands have the options with which they are shown, and defaults are those of some command."""
    for place, heading in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", read(page)):
        file = page.parent / place if place else page
        assert file.exists(), place
        headings = re.findall(r"^#+ (.*)$", read(file), re.MULTILINE) if heading else []
        assert not heading or heading in {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings}, heading
    assert {line: wrong for line in shown(page, "draftproof") if (wrong := refused(line))} == {}
    for line in shown(page, "python"):
        script = ROOT / line.split()[0]
        assert script.suffix != ".py" or {name for name in re.findall(r" --([a-z-]+)", line) if name not in read(script)} == set(), line
    for option, value in re.findall(r"`(--[a-z-]+)[^`]*`(?: [a-z]+)? \(([0-9.]+)\)", read(page)):
        assert float(value) in defaults(option), option


def defaults(option: str) -> set[float]:
    """What the help of some command says of it."""
    found = [param for command in leaves() for param in command.params if option in param.opts]
    told = [re.search(r"\[default: ([0-9.]+)", getattr(param, "help", None) or "") for param in found]
    shown_by_click = {float(param.default) for param in found if isinstance(param.default, int | float)}
    return {float(match[1]) for match in told if match} | shown_by_click


def test_readme_shows_commands_as_they_are() -> None:
    codes = [code for cell in re.findall(r"^\| (`.*?) \|", section(ROOT / "README.md", "Use"), re.MULTILINE)
             for code in re.findall(r"`([^`]+)`", cell)]
    assert len(codes) > 10 and {code: wrong for code in codes if (wrong := refused(code))} == {}


@pytest.mark.parametrize("name", ["generate", "chat", "demo", "doctor"])
def test_design_names_every_option(name: str) -> None:
    """Of commands that no page of their own describes."""
    assert options_of(COMMANDS[name]) <= set(re.findall(r"--[a-z][a-z-]*", section(DOCS / "design.md", "12. Command line")))


def test_every_drafter_is_told() -> None:
    listed = re.search(r"^Drafters: (.*?), and chains", read(ROOT / "README.md"), re.MULTILINE | re.DOTALL)
    assert listed and {name.partition(":")[0] for name in re.findall(r"`([^`]+)`", listed[1])} == {*DRAFTERS} - {"none"}
    told = {}
    for row in re.findall(r"^\| `.*", read(DOCS / "drafters.md").split("\n\n")[2], re.MULTILINE):
        first, last = (re.findall(r"`([^`]+)`", row.strip("|").split("|")[cell]) for cell in (0, -1))
        told |= dict.fromkeys(first, last)
    assert {spec.partition(":")[0] for spec in told} == {*DRAFTERS, "A+B"}
    for spec, files in told.items():
        assert all((SOURCE / "drafters" / file).exists() for file in files), spec
        name, _, options = spec.partition(":")
        if "=" in options and name != "layer-skip":             # which takes a layer of the target
            known = {key: option.default for key, option in inspect.signature(DRAFTERS[name]).parameters.items()}
            assert {key: int(value) for key, value in (part.split("=") for part in options.split(","))} == known, spec


def test_readmes_name_the_files() -> None:
    named = set(re.findall(r"\w+\.(?:py|c)\b", section(ROOT / "README.md", "Files")))
    assert named <= {file.name for folder in ("src", "benchmarks") for file in (ROOT / folder).rglob("*.*")}
    for folder in (SOURCE, *(SOURCE / name for name in NAMED_WHOLE)):
        assert {file.name for file in folder.glob("[!_]*.py")} <= named, folder.name
    told = set(re.findall(r"`(\w+\.py)`", read(ROOT / "benchmarks" / "README.md")))
    assert {file.name for file in (ROOT / "benchmarks").glob("*.py")} == told


def test_engines_have_the_drafters_that_are_told() -> None:
    rows = re.findall(r"^\| (\w+) \| ([^|]+) \| ([^|]+) \| [^|]+ \|$", section(DOCS / "cluster.md", "Other engines"), re.MULTILINE)[1:]
    assert {to for to, _, _ in rows} == {*DIALECTS}
    for to, version, drafters in rows:
        module = import_module(DIALECTS[to].__module__)
        assert "none, " + re.sub(r" \(.*?\)", "", drafters) == module.ABLE and version.split(",")[0] in module.VERSION, to


def test_what_python_takes() -> None:
    told = re.search(r"`Engine\(([^)]*)\)`", section(DOCS / "design.md", "13. Python"))
    assert told and told[1].replace("*, ", "").split(", ") == [*inspect.signature(Engine).parameters]
    told = re.search(r"`Needs\(([^)]*)\)`", read(DOCS / "add_a_drafter.md"))
    assert told and told[1].split(", ") == [field.name for field in fields(Needs)]


def test_design_counts_the_families() -> None:
    tree = ast.parse(read(ROOT / "tests" / "models" / "families.py"))
    found = next(node.value for node in tree.body if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == "FAMILIES")
    assert isinstance(found, ast.Dict) and f"for {len(found.keys)} families" in read(DOCS / "design.md")


def test_serving_tells_the_routes() -> None:
    told = re.findall(r"`(?:[A-Z]+ )?(/[\w./]*)", section(DOCS / "serving.md", "Routes"))
    served = re.findall(r'route\("(/[\w./]*)', read(SOURCE / "serve" / "app.py"))
    assert len(served) > 15 and {path.rstrip("/") for path in served} - {"/draftproof/ab.css"} <= {path.rstrip("/") for path in told}
