"""Hidden states side by side are read as those that lie apart."""

from __future__ import annotations

import pytest
import torch

from draftproof.models.heads.eagle3 import default_taps, distinct_taps
from draftproof.models.taps import SideBySide, abreast, rows_at, stacked


def test_side_by_side_is_a_mapping_of_layers_like_any_other() -> None:
    whole = torch.randn(5, 3, 4)
    ours, plain = SideBySide((2, 5, 7), whole), {layer: whole[:, i].clone() for i, layer in enumerate((2, 5, 7))}
    assert list(ours) == list(plain) and len(ours) == 3 and 5 in ours and 3 not in ours and ours.get(3) is None
    with pytest.raises(KeyError):
        ours[3]
    for rows in (slice(0, 5), slice(1, 3), slice(4, 9), torch.tensor([0, 3, 4])):
        one, other = rows_at(ours, rows), rows_at(plain, rows)
        assert all(torch.equal(one[layer], other[layer]) for layer in plain)
        for layers in ((2, 5, 7), (7, 2), (5,)):
            assert torch.equal(abreast(one, layers), abreast(other, layers))
    assert rows_at(ours, slice(0, 5)) is ours and abreast(ours, (2, 5, 7)).data_ptr() == whole.data_ptr(), "nothing is copied"
    both = stacked((ours, rows_at(ours, slice(1, 3))))
    assert torch.equal(both[5], torch.cat((plain[5], plain[5][1:3])))


@pytest.mark.parametrize("layers", range(1, 40))
def test_a_new_head_reads_no_layer_twice_where_there_are_enough_and_the_usual_ones_where_they_differ(layers: int) -> None:
    taps, usual = distinct_taps(layers), default_taps(layers)
    assert taps == usual if not 4 <= layers <= 6 else sorted(set(taps)) == list(taps) and taps[-1] == layers - 2
    assert len(set(taps)) == 3 or layers < 4
