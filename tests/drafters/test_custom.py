"""`custom:pkg.mod:Class`: the documented example runs, and whatever is missing is named."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from draftproof import Engine, Sampling
from draftproof.errors import SpecError
from draftproof.models.fake import TableTarget
from draftproof.types import Rule

DOCUMENT = Path(__file__).parents[2] / "docs" / "add_a_drafter.md"
OPTIONS = Sampling(temperature=0.7, top_p=1.0, seed=3, max_tokens=80)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on Python's path; what was imported from it is forgotten afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def example(number: int = 0) -> str:
    return re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)[number]


@pytest.mark.parametrize("spec", ["custom:pairs:Pairs", "custom:pairs:Pairs+ngram", "suffix+custom:pairs:Pairs"])
def test_the_documented_example_runs(module: Path, spec: str) -> None:
    (module / "pairs.py").write_text(example())
    target = TableTarget(12, order=2, seed=1, sharpness=3.0)
    with Engine(target) as engine:
        plain = engine.generate([1, 2, 3], OPTIONS)
    with Engine(target, spec, depth=4) as engine:
        runs = [engine.generate([1, 2, 3], OPTIONS) for _ in range(2)]
        assert engine.speculation.state[0] == "on"
    assert all(run.token_ids == plain.token_ids for run in runs)
    assert runs[1].metrics["accepted"] > 20


def test_the_example_is_short() -> None:
    assert 30 <= len(example().splitlines()) <= 48


@pytest.mark.parametrize("rule", ["match", "ratio", "block"])
@pytest.mark.parametrize("more", [{}, {"top_k": 3}, {"temperature": 0.0}, {"repetition_penalty": 1.3}])
def test_the_documented_example_with_a_law_runs(module: Path, rule: Rule, more: dict[str, Any]) -> None:
    """Accepted more often than the same guesses without a law would be, where the rule reads one."""
    (module / "bigrams.py").write_text(example(1))
    (module / "points.py").write_text(example(1).replace("if laws and laws[0] is not None else None", "if not tokens and laws else None"))
    target, sampling = TableTarget(12, order=1, seed=1, sharpness=2.0), replace(OPTIONS, max_tokens=400, **more)
    with Engine(target) as engine:
        plain = engine.generate([1, 2, 3], sampling)
    runs = []
    for place in ("bigrams:Bigrams", "points:Bigrams"):
        with Engine(target, f"custom:{place}", depth=4, rule=rule) as engine:
            engine.generate([4, 2], replace(sampling, seed=1))
            runs.append(engine.generate([1, 2, 3], sampling))
            assert engine.speculation.state[0] == "on"
    accepted = [run.metrics["accepted"] for run in runs]
    if rule == "match" or sampling.greedy:
        assert all(run.token_ids == plain.token_ids for run in runs) and accepted[0] > 100
    else:
        assert accepted[0] > accepted[1] + 20


WHOLE = """
from draftproof.drafters.base import Needs
class Mine:
    name, needs = "mine", Needs()
    def open(self, seq, signals): ...
    def propose(self, states, budgets, noise): ...
    def observe(self, states, commits, signals): ...
    def close(self, state): ...
"""
CASES = {
    "no module": ("", "nowhere.at_all:Mine", r"there is no module nowhere; .*PYTHONPATH"),
    "missing dependency": ("import not_there_at_all", "mod:Mine", "module mod imports not_there_at_all, which is missing"),
    "broken module": ("1 / 0", "mod:Mine", "importing mod raised ZeroDivisionError"),
    "no class": (WHOLE, "mod:Yours", "found no such name in mod, expected a class; it has: Mine"),
    "no class but a function": (WHOLE + "def make(): ...", "mod:make", "found a function in mod, expected a class"),
    "needs arguments": (WHOLE + "    def __init__(self, size): ...", "mod:Mine", "cannot be made; expected one that takes no arg"),
    "own error": (WHOLE + "    def __init__(self): 'a' + 1", "mod:Mine", r"making it raised TypeError: .*concatenate.* \(.*mod.py:9\)"),
    "other error": (WHOLE + "    def __init__(self): raise RuntimeError('no weights')", "mod:Mine",
                    "making it raised RuntimeError: no weights"),
    "options": (WHOLE, "mod:Mine:k=3", "such drafters take no options"),
    "no name": (WHOLE.replace('"mine"', "7"), "mod:Mine", "name is 7, expected a text"),
    "no needs": (WHOLE.replace("Needs()", "None"), "mod:Mine", "needs is None, expected a draftproof.drafters.base.Needs"),
    "no observe": (WHOLE.replace("observe", "watch"), "mod:Mine", r"expected a method observe\(self, states, commits, signals\)"),
    "old propose": (WHOLE.replace("budgets, noise", "budgets"), "mod:Mine", r"expected a method propose\(self, states, budgets, noise\)"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_missing_is_named(module: Path, case: str) -> None:
    text, place, words = CASES[case]
    (module / "mod.py").write_text(text)
    with pytest.raises(SpecError, match=words):
        Engine(TableTarget(8), f"custom:{place}")


def test_a_class_may_make_itself_from_its_site(module: Path) -> None:
    (module / "mod.py").write_text(WHOLE + """
    @classmethod
    def from_spec(cls, path, options, site):
        made = cls()
        made.name = f"mine-{site.target.vocab_size}-{site.rule}-{path}-{options}"
        return made
""")
    with Engine(TableTarget(8), "custom:mod:Mine") as engine:
        assert engine.speculation.name == "mine-8-match-None-{}"


def test_nothing_is_imported_before_the_drafter_is_built(module: Path) -> None:
    from draftproof.drafters import parse_spec

    (module / "mod.py").write_text("raise SystemExit('imported')")
    assert parse_spec("ngram+custom:mod:Mine").parts[1].path == "mod:Mine"
    assert "mod" not in sys.modules
