"""Drafter specs: what parses, what does not, and whether the message says what to write instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftproof.config import LoadConfig
from draftproof.drafters import DRAFTERS, Spec, build, parse_spec
from draftproof.drafters.chain import ChainDrafter
from draftproof.drafters.fixed import NoDrafter
from draftproof.drafters.ngram import NgramDrafter
from draftproof.drafters.prediction import PredictionDrafter
from draftproof.drafters.suffix import SuffixDrafter
from draftproof.errors import LoadError, SpecError
from draftproof.models.fake import TableTarget

GOOD = {
    "none": Spec("none"),
    "ngram": Spec("ngram"),
    "ngram:min=2,max=4": Spec("ngram", options={"min": 2, "max": 4}),
    "ngram: max = 7 ": Spec("ngram", options={"max": 7}),
    "model": Spec("model"),
    "model:/a/folder with:colons,and=signs": Spec("model", path="/a/folder with:colons,and=signs"),
    "model:c++/models": Spec("model", path="c++/models"),
    "model:org/name": Spec("model", path="org/name"),
    "suffix:max=16,tokens=5000": Spec("suffix", options={"max": 16, "tokens": 5000}),
    "custom:my.drafters:Mine": Spec("custom", path="my.drafters:Mine"),
    "ngram+model:PATH": Spec("ngram+model", parts=(Spec("ngram"), Spec("model", path="PATH"))),
    " model:c++/models+ngram:min=3 ": Spec("model+ngram", parts=(Spec("model", path="c++/models"), Spec("ngram", options={"min": 3}))),
    "prediction+suffix+custom:a:B+eagle3": Spec("prediction+suffix+custom+eagle3", parts=(
        Spec("prediction"), Spec("suffix"), Spec("custom", path="a:B"), Spec("eagle3"))),
    "layer-skip:exit=4": Spec("layer-skip", options={"exit": 4}),
}

BAD = {
    "": ("unknown drafter ''", "none, ngram, suffix"),
    "eagel3:x": ("unknown drafter 'eagel3'", "none, ngram, suffix"),
    "ngram:": ("nothing after the colon", "ngram:min=N,max=N"),
    "model:": ("nothing after the colon", "model:PATH"),
    "ngram:size=3": ("unknown option 'size' of drafter ngram", "min, max"),
    "ngram:min=2,,max=3": ("unknown option ''", "min, max"),
    "none:x=1": ("unknown option 'x' of drafter none", "it takes none"),
    "ngram:min=two": ("min='two'", "an integer from 1 to 32"),
    "ngram:min=": ("min=''", "an integer from 1 to 32"),
    "ngram:min=0": ("min='0'", "an integer from 1 to 32"),
    "ngram:max=33": ("max='33'", "an integer from 1 to 32"),
    "ngram:min=-1": ("min='-1'", "an integer from 1 to 32"),
    "ngram:min=2,min=3": ("option min", "twice"),
    "ngram+none": ("none in a chain", "leave it out"),
    "ngram+": ("unknown drafter 'ngram+'", "none, ngram"),
    "ngram+eagel3:x": ("unknown drafter 'ngram+eagel3'", "none, ngram"),
    "suffix+ngram:min=0": ("min='0'", "an integer from 1 to 32"),
    "custom": ("spec custom:", "custom:pkg.mod:Class"),
    "custom:my.drafters": ("spec custom:my.drafters", "custom:pkg.mod:Class"),
    "custom:../evil.py:Class": ("spec custom:../evil.py:Class", "custom:pkg.mod:Class"),
}


@pytest.mark.parametrize("text", GOOD)
def test_a_good_spec(text: str) -> None:
    assert parse_spec(text) == GOOD[text]


def test_a_folder_whose_name_ends_like_a_chain_is_one_path(tmp_path: Path) -> None:
    here = tmp_path / "llama"
    chain = Spec("eagle3+mtp", parts=(Spec("eagle3", path=str(here)), Spec("mtp")))
    assert parse_spec(f"eagle3:{here}+mtp") == chain
    here.mkdir()
    assert parse_spec(f"eagle3:{here}+mtp") == chain
    (tmp_path / "llama+mtp+ngram").mkdir()
    assert parse_spec(f"eagle3:{here}+mtp") == chain
    whole = Spec("eagle3", path=f"{here}+mtp+ngram")
    assert parse_spec(f"eagle3:{here}+mtp+ngram") == whole
    assert parse_spec(f"suffix+eagle3:{here}+mtp+ngram+ngram:min=2").parts == (Spec("suffix"), whole, Spec("ngram", options={"min": 2}))
    assert parse_spec("eagle3:" + "x" * 5000 + "\0+mtp").parts[1] == Spec("mtp")


@pytest.mark.parametrize("text", BAD)
def test_a_bad_spec_says_what_was_found_and_what_was_expected(text: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_spec(text)
    found, expected = BAD[text]
    assert found in str(caught.value) and expected in str(caught.value)


def test_min_above_max_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(SpecError, match="min=5,max=2: expected 1 ≤ min ≤ max"):
        parse_spec("ngram:min=5,max=2")
    with pytest.raises(SpecError, match="min=9,max=4"):
        parse_spec("ngram:min=9")


def test_build() -> None:
    target = TableTarget(8)
    drafter = build("ngram:min=1,max=2", target, "match", LoadConfig())
    assert isinstance(drafter, NgramDrafter) and (drafter.min, drafter.max) == (1, 2)
    assert isinstance(build("none", target, "ratio", LoadConfig()), NoDrafter)
    with pytest.raises(LoadError, match="does not exist"):
        build("model:/no/such/folder", target, "match", LoadConfig())


def test_build_a_chain() -> None:
    drafter = build("prediction+ngram:min=2+suffix:tokens=50", TableTarget(8), "match", LoadConfig())
    assert isinstance(drafter, ChainDrafter) and drafter.name == "prediction+ngram+suffix"
    first, rest = drafter.parts
    assert isinstance(first, PredictionDrafter) and isinstance(rest, ChainDrafter)
    assert isinstance(rest.parts[0], NgramDrafter) and rest.parts[0].min == 2
    assert isinstance(rest.parts[1], SuffixDrafter) and rest.parts[1].tokens == 50


def test_every_drafter_says_its_own_name() -> None:
    target = TableTarget(8)
    for name, kind in DRAFTERS.items():
        if not kind.takes_path and name != "layer-skip":       # which needs layers, and a table has none
            assert build(name, target, "match", LoadConfig()).name == name
