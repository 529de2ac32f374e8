"""Segments, trees and the static shapes."""

from __future__ import annotations

import pytest

from geo_ray.base.errors import InvariantError
from geo_ray.transport.overlay.links import Links
from geo_ray.transport.overlay.plan import (
    RESULT,
    SUM,
    Grid,
    SendOrder,
    Tree,
    equal_slices,
    full_mask,
    sized_slices,
)
from geo_ray.transport.overlay.policy import binary, mend, rack, ring, square_groups, star


def depth(tree: Tree, node: int) -> int:
    return 0 if tree.parents[node] == node else 1 + depth(tree, tree.parents[node])


def test_segments_cover_the_vector_and_the_last_is_shorter() -> None:
    grid = Grid(10, 4)
    assert grid.count == 3
    assert [grid.bounds(i) for i in range(3)] == [(0, 4), (4, 8), (8, 10)]


def test_slices_are_equal_within_one_and_none_is_empty() -> None:
    assert equal_slices(3, 8) == [(0, 2), (2, 5), (5, 8)]
    assert equal_slices(5, 2) == [(0, 1), (1, 2)]


def test_sized_slices_follow_their_shares_and_cover_everything() -> None:
    assert sized_slices([0.5, 0.25, 0.25], 8) == [(0, 4), (4, 6), (6, 8)]
    assert sized_slices([0.98, 0.01, 0.01], 10)[-1][1] == 10


def test_a_tree_gives_orders_up_and_down() -> None:
    tree = Tree((0, 0, 1), 2, 5)
    assert tree.root == 0
    assert tree.masks() == [0b111, 0b110, 0b100]
    assert tree.sums() == [SendOrder(2, 1, SUM, 2, 5, 0b100), SendOrder(1, 0, SUM, 2, 5, 0b110)]
    assert tree.results() == [SendOrder(0, 1, RESULT, 2, 5), SendOrder(1, 2, RESULT, 2, 5)]


@pytest.mark.parametrize("parents", [(1, 0), (0, 1), (0, 2, 1)])
def test_an_invalid_tree_is_refused(parents: tuple[int, ...]) -> None:
    with pytest.raises(InvariantError):
        Tree(parents, 0, 1).outward()


def test_the_star_hangs_on_its_root() -> None:
    (tree,) = star(4, 2, 7)
    assert tree == Tree((2, 2, 2, 2), 0, 7)


def test_the_binary_tree_is_balanced() -> None:
    (tree,) = binary(8, 3, 7)
    assert tree.root == 3
    children = [sum(p == n for i, p in enumerate(tree.parents) if i != n) for n in range(8)]
    assert max(children) == 2
    assert max(depth(tree, node) for node in range(8)) == 3


def test_a_rack_sends_through_its_first_and_the_roots_rack_to_the_root() -> None:
    (tree,) = rack(6, 1, 7, [[0, 1, 2], [4, 3], [5]])
    assert tree.parents == (1, 1, 1, 4, 1, 1)


def test_racks_by_default_are_about_the_root_of_the_number() -> None:
    assert square_groups(9, 4) == [[4, 0, 1], [2, 3, 5], [6, 7, 8]]


def test_the_ring_gives_every_region_a_slice_at_the_end_of_a_chain() -> None:
    trees = ring(5, 11)
    assert [tree.root for tree in trees] == [0, 1, 2, 3, 4]
    assert [tree.stop for tree in trees[:-1]] == [tree.first for tree in trees[1:]]
    assert trees[-1].stop == 11
    for tree in trees:
        assert sorted(depth(tree, node) for node in range(5)) == [0, 1, 2, 3, 4]
        assert tree.masks()[tree.root] == full_mask(5)


def test_a_tree_goes_round_a_broken_link() -> None:
    links = Links(4)
    links.break_link(2, 1)
    tree = mend(Tree((0, 0, 1, 2), 0, 1), links)
    assert tree.parents == (0, 0, 0, 2)


def test_no_region_depends_on_a_region_that_is_down() -> None:
    links = Links(4)
    links.down.add(1)
    tree = mend(Tree((0, 0, 1, 1), 0, 1), links)
    assert tree.parents == (0, 0, 0, 0)


def test_a_region_that_cannot_reach_its_root_uses_another_region() -> None:
    links = Links(3)
    links.break_link(2, 0)
    assert mend(Tree((0, 0, 0), 0, 1), links).parents == (0, 0, 1)


def test_a_region_that_reaches_no_other_keeps_its_place() -> None:
    links = Links(3)
    links.break_link(2, 0)
    links.break_link(2, 1)
    assert mend(Tree((0, 0, 0), 0, 1), links).parents == (0, 0, 0)
