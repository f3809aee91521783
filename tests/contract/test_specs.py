"""Drafter specs: what parses, what does not, and whether the message says what to write instead."""

from __future__ import annotations

import pytest

from draftproof.config import LoadConfig
from draftproof.drafters import DRAFTERS, Spec, build, parse_spec
from draftproof.drafters.fixed import NoDrafter
from draftproof.drafters.ngram import NgramDrafter
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
}

BAD = {
    "": ("unknown drafter ''", "none, ngram, model"),
    "eagel3:x": ("unknown drafter 'eagel3'", "none, ngram, model"),
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
    "ngram+model:PATH": ("chains of drafters are not available in this version", "ngram, model:PATH"),
    "model:PATH+ngram:min=3": ("chains of drafters are not available in this version", "model:PATH, ngram:min=3"),
}


@pytest.mark.parametrize("text", GOOD)
def test_a_good_spec(text: str) -> None:
    assert parse_spec(text) == GOOD[text]


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


def test_every_drafter_says_its_own_name() -> None:
    target = TableTarget(8)
    for name, kind in DRAFTERS.items():
        if not kind.takes_path:
            assert build(name, target, "match", LoadConfig()).name == name
