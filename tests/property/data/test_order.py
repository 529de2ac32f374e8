from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geo_ray.base.errors import ConfigError, ShardEmptyError
from geo_ray.data.reader import StreamOrder

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=12)
SEEDS = st.integers(0, 2**63)


@given(SIZES, SEEDS, st.integers(1, 6), st.integers(0, 5))
def test_each_epoch_has_every_row_exactly_once(
    sizes: list[int], seed: int, window: int, epoch: int
) -> None:
    order = StreamOrder(sizes, seed, window)
    total = sum(sizes)
    assert order.rows_per_epoch == total
    shards, rows = order.locate_rows(epoch * total, total)
    expected = sorted((shard, row) for shard, size in enumerate(sizes) for row in range(size))
    assert sorted(zip(shards.tolist(), rows.tolist(), strict=True)) == expected


@given(SIZES, SEEDS, st.integers(1, 6), st.data())
@settings(max_examples=60)
def test_how_the_stream_is_cut_does_not_matter(
    sizes: list[int], seed: int, window: int, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, 3 * sum(sizes)))
    count = data.draw(st.integers(0, 2 * sum(sizes)))
    cuts = data.draw(st.lists(st.integers(0, count), max_size=6))
    shards, rows = StreamOrder(sizes, seed, window).locate_rows(start, count)
    order = StreamOrder(sizes, seed, window)
    edges = sorted({0, *cuts, count})
    pieces = list(pairwise(edges))
    located = {
        begin: order.locate_rows(start + begin, end - begin)
        for begin, end in data.draw(st.permutations(pieces))  # workers ask in any order
    }
    for begin, end in pieces:
        assert np.array_equal(located[begin][0], shards[begin:end])
        assert np.array_equal(located[begin][1], rows[begin:end])


@given(SIZES, SEEDS, st.integers(0, 300), st.integers(0, 60))
@settings(max_examples=60)
def test_the_three_ways_to_ask_agree(sizes: list[int], seed: int, start: int, count: int) -> None:
    order = StreamOrder(sizes, seed, 3)
    shards, rows = order.locate_rows(start, count)
    runs = order.locate_span(start, count)
    assert [shard for shard, of in runs for _ in of] == shards.tolist()
    assert [row for _, of in runs for row in of.tolist()] == rows.tolist()
    assert all(len(of) for _, of in runs)
    for offset in range(min(count, 5)):
        position = start + offset
        expected = (position // sum(sizes), int(shards[offset]), int(rows[offset]))
        assert order.locate(position) == expected


@given(st.lists(st.integers(1, 30), min_size=3, max_size=12), SEEDS, st.integers(1, 3))
def test_a_window_holds_few_shards(sizes: list[int], seed: int, window: int) -> None:
    order = StreamOrder(sizes, seed, window)
    shards, _ = order.locate_rows(0, sum(sizes))
    members: list[set[int]] = [set()]
    for shard in shards.tolist():
        if shard not in members[-1]:
            if len(members[-1]) == window:
                members.append(set())
            members[-1].add(shard)
    assert sum(len(group) for group in members) == len(sizes)


def test_epochs_and_seeds_differ_and_rows_are_mixed_across_shards() -> None:
    order = StreamOrder([100] * 8, seed=1)
    first, second = order.locate_rows(0, 800), order.locate_rows(800, 800)
    other = StreamOrder([100] * 8, seed=2).locate_rows(0, 800)
    assert not np.array_equal(first[1], second[1])
    assert not np.array_equal(first[1], other[1])
    assert len(set(first[0][:50].tolist())) == 4


FROZEN = [
    *((2, 2), (0, 1), (0, 2), (2, 3), (2, 1), (0, 0), (2, 0), (1, 0), (1, 1)),
    *((2, 0), (2, 2), (1, 1)),
]


def test_the_order_is_frozen() -> None:
    """A change of these numbers breaks every run that is resumed; NumPy must not cause one."""
    shards, rows = StreamOrder([3, 2, 4], seed=7, window_shards=2).locate_rows(0, 12)
    assert list(zip(shards.tolist(), rows.tolist(), strict=True)) == FROZEN


def test_far_positions_cost_no_more() -> None:
    order = StreamOrder([1000] * 10, seed=0)
    epoch, shard, row = order.locate(10**15 + 17)
    assert epoch == (10**15 + 17) // 10_000
    assert 0 <= shard < 10
    assert 0 <= row < 1000


def test_asking_changes_nothing_for_the_caller() -> None:
    order = StreamOrder([5, 5], seed=0)
    shards, rows = order.locate_rows(0, 4)
    kept = rows.copy()
    shards[:], rows[:] = -1, -1
    assert np.array_equal(order.locate_rows(0, 4)[1], kept)


def test_what_makes_no_stream_is_refused() -> None:
    with pytest.raises(ShardEmptyError):
        StreamOrder([], seed=0)
    with pytest.raises(ShardEmptyError, match="shard 1"):
        StreamOrder([3, 0], seed=0)
    for seed, window in ((-1, 1), (0, 0)):
        with pytest.raises(ConfigError):
            StreamOrder([3], seed, window)
    order = StreamOrder([3], seed=0)
    for start, count in ((-1, 1), (0, -1)):
        with pytest.raises(ValueError, match="negative"):
            order.locate_rows(start, count)
