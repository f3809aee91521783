"""Geometry of draft trees."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from draftproof.core.tree import children, depths, path, positions, walk

#        root
#       0    1
#      2 3   4
#      5
PARENTS = (-1, -1, 0, 0, 1, 2)

trees = st.lists(st.integers(0, 10**6), max_size=24).map(lambda draws: tuple(draw % (i + 1) - 1 for i, draw in enumerate(draws)))


def test_by_hand():
    assert depths(PARENTS) == [1, 1, 2, 2, 2, 3]
    assert positions(PARENTS, 9) == [10, 10, 11, 11, 11, 12]
    assert children(PARENTS) == [[0, 1], [2, 3], [4], [5], [], [], []]
    assert path(PARENTS, 5) == (0, 2, 5) and path(PARENTS, -1) == ()


def test_without_nodes():
    assert depths(()) == [] and children(()) == [[]]
    assert walk((), ()) == ((), (), "plain")


@given(trees)
def test_one_geometry(parents):
    n, below = len(parents), children(parents)
    assert sorted(node for kids in below for node in kids) == list(range(n))
    for node in range(n):
        way = path(parents, node)
        assert len(way) == depths(parents)[node] and way[-1] == node
        assert all(parents[b] == a for a, b in zip((-1, *way), way, strict=False))


@given(trees, st.randoms(use_true_random=False))
def test_walk_is_the_recursive_definition(parents, random):
    passing = [random.random() < 0.6 for _ in parents]
    below, accepted, node = children(parents), [], -1
    while (taken := next((kid for kid in below[node + 1] if passing[kid]), None)) is not None:
        accepted.append(taken)
        node = taken
    role = "plain" if not parents else "correction" if below[node + 1] else "bonus"
    assert walk(parents, passing) == (tuple(accepted), tuple(below[node + 1]), role)
