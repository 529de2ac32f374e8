"""Chains and packed trees: near what is possible, and never something impossible."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from numpy.typing import NDArray

from geo_ray.transport.overlay.links import LinkFlow, Links
from geo_ray.transport.overlay.netstorm import (
    Netstorm,
    allocate,
    busiest_s,
    centred,
    edges_of,
    pack,
)
from geo_ray.transport.overlay.plan import Tree
from geo_ray.transport.overlay.tsengine import best_chain

Floats = NDArray[np.float64]


def lines(num: int, mbps: float = 1.0) -> tuple[Floats, Floats, Floats]:
    return np.full((num, num), mbps), np.full(num, mbps), np.full(num, mbps)


def slowest(rate_NN: Floats, chain: list[int]) -> float:
    return min(rate_NN[a, b] for a, b in itertools.pairwise(chain))


# ------------------------------------------------------------------ chains


def test_a_chain_visits_all_between_its_ends() -> None:
    rate_NN = np.random.default_rng(0).uniform(1, 10, (7, 7))
    chain = best_chain(rate_NN, [1, 2, 3, 4, 5], start=6, end=0)
    assert chain[0] == 6 and chain[-1] == 0
    assert sorted(chain[1:-1]) == [1, 2, 3, 4, 5]


def test_between_equal_links_the_given_order_stays() -> None:
    assert best_chain(np.ones((5, 5)), [3, 1, 4], end=0) == [3, 1, 4, 0]


def test_a_chain_is_near_the_best_of_all_orders() -> None:
    shares = []
    for seed in range(30):
        rate_NN = np.random.default_rng(seed).uniform(20, 155, (7, 7))
        found = slowest(rate_NN, best_chain(rate_NN, list(range(1, 7)), end=0))
        orders = itertools.permutations(range(1, 7))
        best = max(slowest(rate_NN, [*order, 0]) for order in orders)
        shares.append(found / best)
    assert np.mean(shares) > 0.9
    assert min(shares) > 0.5


# ------------------------------------------------------------------ packing


@pytest.mark.parametrize("num", [2, 3, 8, 9])
def test_equal_regions_send_no_more_than_necessary(num: int) -> None:
    """2 (N - 1) / N of the vector over every line is the least there can be."""
    packed = pack(*lines(num), num)
    assert sum(share for _, share in packed) == pytest.approx(1.0)
    assert busiest_s(packed, *lines(num)) < 1.03 * 2 * (num - 1) / num


def test_every_packed_tree_is_a_tree_over_all_regions() -> None:
    rng = np.random.default_rng(3)
    for num in (2, 5, 9):
        link_NN = rng.uniform(1, 10, (num, num))
        for parents, share in pack(link_NN, rng.uniform(5, 9, num), rng.uniform(5, 9, num), num):
            assert share > 0
            assert sorted(Tree(parents, 0, 1).outward()) == list(range(num))


def test_a_slow_link_carries_little() -> None:
    link_NN, up_N, down_N = lines(4)
    link_NN[1, 2] = link_NN[2, 1] = 0.01
    packed = pack(link_NN, up_N, down_N, 8)
    over = sum(share for parents, share in packed if (1, 2) in edges_of(parents))
    assert over < 0.02
    assert busiest_s(packed, link_NN, up_N, down_N) < 1.1 * 2 * 3 / 4


def test_a_region_with_a_slow_line_is_a_leaf() -> None:
    link_NN, up_N, down_N = lines(5)
    up_N[3] = down_N[3] = 0.2
    packed = pack(link_NN, up_N, down_N, 10)
    edges = sum(share * sum(3 in edge for edge in edges_of(p)) for p, share in packed)
    assert edges == pytest.approx(1.0, abs=0.05)
    assert busiest_s(packed, link_NN, up_N, down_N) < 1.05 / 0.2


def test_shares_are_never_worse_than_equal_ones() -> None:
    link_NN, up_N, down_N = lines(4)
    up_N[0] = 0.3
    trees = [tuple([root] * 4) for root in range(4)]
    shared = allocate(trees, link_NN, up_N, down_N)
    equal = [(tree, 0.25) for tree in trees]
    assert busiest_s(shared, link_NN, up_N, down_N) < busiest_s(equal, link_NN, up_N, down_N)


def test_the_root_is_in_the_middle() -> None:
    assert centred((0, 0, 1, 2, 3)) == (1, 2, 2, 2, 3)


# ------------------------------------------------------------------ netstorm


def test_all_segments_are_in_some_slice_and_roots_differ() -> None:
    trees = Netstorm(Links(6), 60, 6).trees(1)
    assert [tree.first for tree in trees[1:]] == [tree.stop for tree in trees[:-1]]
    assert trees[0].first == 0 and trees[-1].stop == 60
    assert {tree.root for tree in trees} == set(range(6))


def test_no_more_slices_than_wanted_or_than_there_are_segments() -> None:
    assert len(Netstorm(Links(6), 60, 2).trees(1)) <= 2
    assert len(Netstorm(Links(6), 3, 6).trees(1)) <= 3


def test_trees_stay_while_little_changes_and_move_off_a_link_that_became_slow() -> None:
    links = Links(4, smoothing=1.0)
    storm = Netstorm(links, 400, 8)
    alone = [LinkFlow(a, b, 10.0, 1.0) for a in range(4) for b in range(4) if a != b]
    for flow in alone:
        links.note([flow])
    first = storm.trees(1)
    for flow in alone:
        links.note([LinkFlow(flow.src, flow.dst, 10.2, 1.0)])
    assert storm.trees(2) == first
    for pair in ((1, 2), (2, 1)):
        links.note([LinkFlow(*pair, 0.1, 1.0)])
    later = storm.trees(3)
    carried = sum(t.stop - t.first for t in later if (1, 2) in edges_of(t.parents))
    assert carried < 20
