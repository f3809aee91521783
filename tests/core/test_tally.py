"""Counting: one definition, checked by hand and against its laws."""

from __future__ import annotations

import json
import random

import pytest

from draftproof.core.tally import Tally, fates
from draftproof.types import Commit, Verdict


def by_hand() -> Tally:
    tally = Tally()
    tally.prefill(1)
    tally.round(drafted=4, accepted=4, rejected=0, emitted=5)      # bonus
    tally.round(drafted=4, accepted=1, rejected=1, emitted=2)      # correction
    tally.round(drafted=0, accepted=0, rejected=0, emitted=1)      # plain
    tally.round(drafted=3, accepted=0, rejected=1, emitted=1)      # correction
    return tally


def test_by_hand():
    assert by_hand().as_metrics() == {
        "rounds": 4, "target_passes": 5, "drafted": 11, "accepted": 5, "acceptance_length": 9 / 4, "acceptance_length_drafted": 8 / 3,
        "draft_utilisation": 5 / 11, "hazard": [2 / 3, 1 / 2, 1.0, 1.0], "passes_saved": 5,
    }
    assert by_hand().completion_tokens == 10 == 1 + 5 + 4      # 1 + Σ (accepted + 1)


def test_nothing_counted_has_no_ratio():
    metrics = Tally().as_metrics()
    assert metrics["acceptance_length"] is metrics["acceptance_length_drafted"] is metrics["draft_utilisation"] is None
    assert metrics["hazard"] == [] and metrics["passes_saved"] == 0


def test_plain_decoding_saves_nothing():
    tally = Tally()
    tally.prefill()
    for _ in range(7):
        tally.round(0, 0, 0, 1)
    assert tally.passes_saved == 0 and tally.target_passes == tally.completion_tokens == 8
    assert tally.acceptance_length == 1 and tally.acceptance_length_drafted is None and tally.hazard == []


def test_a_stop_inside_a_draft():
    """Five drafted, four would stand, the second is an end token: two are emitted, nothing behind them was judged."""
    verdict = Verdict((0, 1, 2, 3), 9, "correction", (4,))
    assert fates(verdict, Commit(3, (7, 8), ("accepted",) * 2, (0, 1), "stop"), 5) == ("accepted",) * 2 + ("discarded",) * 3
    tally = Tally()
    tally.prefill()
    tally.round(drafted=5, accepted=2, rejected=0, emitted=2)
    assert tally.completion_tokens == 3 and tally.hazard == [1.0, 1.0] and tally.draft_utilisation == 2 / 5


def test_refusals_are_not_judged_where_the_text_ends_with_an_accepted_guess():
    verdict = Verdict((0, 1), 9, "correction", (2,))
    assert fates(verdict, Commit(3, (7, 8), ("accepted",) * 2, (0, 1), "length"), 3) == ("accepted", "accepted", "discarded")


def test_fates_of_a_tree():
    verdict = Verdict((1, 3), 7, "correction", (4, 5))
    found = fates(verdict, Commit(3, (5, 6, 7), ("accepted", "accepted", "correction"), (1, 3)), 7)
    assert found == ("discarded", "accepted", "discarded", "accepted", "rejected", "rejected", "discarded")


def test_the_hazard_of_a_tree_follows_the_walked_path():
    tally = Tally()
    tally.round(drafted=6, accepted=1, rejected=2, emitted=2)      # both children at depth 2 refused: one refusal of that depth
    tally.round(drafted=6, accepted=2, rejected=0, emitted=3)
    assert tally.hazard == [1.0, 0.5] and tally.rejected == 2


@pytest.mark.parametrize("counts", [(2, 2, 1, 3), (2, 1, 1, 3), (2, 1, 1, 0), (1, 0, -1, 1)])
def test_impossible_rounds_are_refused(counts):
    with pytest.raises(AssertionError):
        Tally().round(*counts)


def test_merging_is_counting_together():
    for seed in range(20):
        source = random.Random(seed)
        parts, whole = [Tally(), Tally(), Tally()], Tally()
        for _ in range(30):
            part, depth = source.choice(parts), source.randrange(6)
            accepted = source.randint(0, depth)
            counts = (depth, accepted, int(accepted < depth), accepted + 1)
            for tally in (part, whole):
                tally.round(*counts)
        for tally in (parts[1], whole):
            tally.prefill(2)
        assert sum(parts, Tally()) == whole


def test_counts_survive_json():
    tally = by_hand()
    again = Tally.from_dict(json.loads(json.dumps(tally.as_dict())))
    assert again == tally and again.as_metrics() == tally.as_metrics()
    assert Tally.from_dict(tally.as_dict() | {"of_a_later_version": 3}) == tally
    again.round(1, 1, 0, 2)
    assert tally == by_hand(), "a copy shares nothing"
