"""Laws about the source itself: who may import whom, how long things are, what is public, what is never written down."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from statistics import median

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "draftproof"
FILES = sorted(SOURCE.rglob("*.py"))

# Lower may not import higher; parts on one level may not import each other.
LEVELS = [
    {"errors", "view"}, {"types"}, {"config"}, {"compiler", "huge"}, {"native", "gpu"},
    {"choices", "llama", "mixtures", "recurrences"}, {"core"},
    {"trace"}, {"models"}, {"drafters"}, {"engine"},
    {"remote", "bench", "audition"}, {"advise", "serve", "train"}, {"commands"}, {"cli"},
]
LEVEL = {part: level for level, parts in enumerate(LEVELS) for part in parts}
FREE = {"weights"}                                      # imports nothing of ours
ONLY_IN_MODELS = {"transformers", "tokenizers"}
CORE_MAY_IMPORT = {"torch", "numpy", "draftproof"} | set(sys.stdlib_module_names)
TRANSFORMERS_ELSEWHERE: set[str] = set()                # the exceptions, by path; none so far

FILE_LINES, FUNCTION_LINES = 400, 60

PUBLIC = [
    "Budget", "CacheFull", "Commit", "Completion", "Draft", "DrafterError", "DraftproofError", "Engine", "EngineConfig",
    "Failure", "Handle", "Jsonl", "LoadConfig", "LoadError", "Memory", "OptionError", "ParityError", "PromptError", "Sampling",
    "Settings", "SpecError", "SpeculationConfig", "TokenEvent", "TokenLogprob", "UsageError", "Verdict", "VocabularyMismatch",
    "__version__", "read_trace",
]


def part_of(file: Path) -> str:
    first = file.relative_to(SOURCE).parts[0]
    return first.removesuffix(".py")


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


@cache
def modules_imported(file: Path) -> set[str]:
    """Dotted names that a file imports, relative ones made absolute; names for type checkers only count too."""
    package = ("draftproof", *file.relative_to(SOURCE).parts[:-1])
    found: set[str] = set()
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[:len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            # `from .. import x` may name a module, so both readings count
            found |= {module} | ({f"{module}.{alias.name}" for alias in node.names} if module == "draftproof" else set())
    return found


def ours(file: Path) -> set[str]:
    return {module.split(".")[1] for module in modules_imported(file) if module.startswith("draftproof.")} & (set(LEVEL) | FREE)


def functions(file: Path) -> list[tuple[str, int]]:
    return [(f"{file.relative_to(ROOT)}:{node.lineno} {node.name}", (node.end_lineno or node.lineno) - node.lineno + 1)
            for node in ast.walk(parsed(file)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(SOURCE)))
def test_import_law(file: Path) -> None:
    part = part_of(file)
    if part in ("__init__", "__main__"):
        return
    assert part in LEVEL or part in FREE, f"{part} has no level: add it to the import law"
    for other in ours(file) - {part}:
        assert part not in FREE, f"{part} imports {other}, and may import nothing"
        assert other not in FREE and LEVEL[other] < LEVEL[part], f"{part} may not import {other}"


def test_the_law_can_fail() -> None:
    assert LEVEL["core"] < LEVEL["models"] and "models" in ours(SOURCE / "drafters" / "model.py")
    assert all("cli" not in ours(file) for file in FILES if part_of(file) != "__main__")


def test_the_design_has_the_same_law() -> None:
    told = re.search(r"from low to high: (.*?)\. A part", (ROOT / "docs" / "design.md").read_text(encoding="utf-8"), re.DOTALL)
    assert told and [set(re.findall(r"\w+", level)) for level in told[1].split("<")] == [LEVELS[0] - {"view"}, *LEVELS[1:]]


@pytest.mark.parametrize("file", [f for f in FILES if part_of(f) == "core"], ids=lambda f: f.name)
def test_core_is_pure(file: Path) -> None:
    outside = {module.split(".")[0] for module in modules_imported(file)} - CORE_MAY_IMPORT
    assert not outside, f"core imports {outside}"
    assert not {"time", "os", "random", "pathlib", "io"} & {m.split(".")[0] for m in modules_imported(file)}
    for node in ast.walk(parsed(file)):
        assert not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("open", "print"))


def test_only_models_imports_transformers() -> None:
    users = {str(f.relative_to(SOURCE)) for f in FILES if ONLY_IN_MODELS & {m.split(".")[0] for m in modules_imported(f)}}
    assert {user for user in users if not user.startswith("models/")} == TRANSFORMERS_ELSEWHERE


def test_no_utils() -> None:
    assert not [f for f in ROOT.joinpath("src").rglob("*") if re.fullmatch(r"utils?|helpers?|misc|common", f.stem)]


def test_sizes() -> None:
    files = {str(f.relative_to(ROOT)): len(f.read_text().splitlines()) for f in FILES}
    lengths = [entry for file in FILES for entry in functions(file)]
    print(f"\n{len(files)} files, median {median(files.values()):.0f} lines; "
          f"{len(lengths)} functions, median {median(n for _, n in lengths):.0f}")
    assert not {name: n for name, n in files.items() if n > FILE_LINES}
    assert not [entry for entry in lengths if entry[1] > FUNCTION_LINES]


def test_public_names() -> None:
    import draftproof

    assert sorted(draftproof.__all__) == sorted(PUBLIC)
    assert all(getattr(draftproof, name) is not None for name in draftproof.__all__)


@pytest.mark.parametrize("module", ["draftproof", "draftproof.cli"])
def test_import_does_not_load_torch(module: str) -> None:
    program = f"import sys, {module}; heavy = {{'torch', 'transformers', 'numpy'}} & set(sys.modules); sys.exit(str(heavy or '') or 0)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr


def environment() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": str(ROOT / "src")}


# No path of one machine, no link to a tracker, no unfinished business.
FORBIDDEN = re.compile(r"(?<![\w./~{}])/(?:work|home|root|Users|mnt)/|\.\./shared|\bTO" r"DO\b|\bFIX" r"ME\b|NotImplemented" r"Error")


@pytest.mark.parametrize("folder", ["src", "tests", "recipes", "benchmarks", "docs", "README.md", "Makefile", ".ci"])
def test_nothing_machine_bound_is_written_down(folder: str) -> None:
    place = ROOT / folder
    texts = (".py", ".md", ".toml", ".json", "")
    files = [place] if place.is_file() else [f for f in place.rglob("*") if f.suffix in texts and f.is_file() and "weights" not in f.parts]
    found = [f"{f.relative_to(ROOT)}:{number} {line.strip()[:80]}" for f in files if f != Path(__file__)
             for number, line in enumerate(f.read_text(errors="replace").splitlines(), 1) if FORBIDDEN.search(line)]
    assert not found
