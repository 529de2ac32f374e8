"""Rows of a step among machines: whole, and the last machine done as early as can be."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geo_ray.planner.cover import most_rows, slowest_s, split_rows

SPEEDS = st.lists(st.sampled_from([0.5, 1.0, 2.0, 3.0, 7.5]), min_size=1, max_size=4)


def last_s(rows: list[int], speeds: list[float]) -> float:
    return max(n / speed for n, speed in zip(rows, speeds, strict=True))


ROOMS = st.lists(st.none() | st.integers(1, 5), min_size=4, max_size=4)


@given(SPEEDS, st.integers(0, 9), ROOMS)
def test_no_split_is_done_earlier(speeds: list[float], more: int, rooms: list[int | None]) -> None:
    rows = len(speeds) + more
    rooms = [rows if room is None else room for room in rooms[: len(speeds)]]
    if sum(rooms) < rows:
        assert slowest_s(rows, [1] * len(speeds), speeds, rooms) == float("inf")
        return
    mine = split_rows(rows, speeds, rooms)
    assert all(n <= room for n, room in zip(mine, rooms, strict=True))
    assert sum(mine) == rows and min(mine) >= 1
    every = (
        split
        for split in itertools.product(range(1, rows + 1), repeat=len(speeds))
        if sum(split) == rows and all(n <= r for n, r in zip(split, rooms, strict=True))
    )
    best_s = min(last_s(list(split), speeds) for split in every)
    assert last_s(mine, speeds) == pytest.approx(best_s)
    machines = list(zip(speeds, rooms, strict=True))
    kinds = sorted(set(machines))
    counts = [machines.count(kind) for kind in kinds]
    assert slowest_s(rows, counts, *zip(*kinds, strict=True)) == pytest.approx(best_s)
    # and no time below it is long enough for all of the rows, one at least on each
    done = [min(most_rows(best_s * 0.999, speed), room) for speed, room in machines]
    assert sum(done) < rows or min(done) < 1


def test_many_rows_take_as_long_as_if_they_could_be_cut() -> None:
    assert slowest_s(100_000, [2, 3], [10.0, 7.0], [10**6] * 2) == pytest.approx(
        100_000 / 41, rel=1e-4
    )


def test_the_fast_give_way_to_those_that_need_a_row() -> None:
    assert split_rows(3, [100.0, 1.0, 1.0], [9] * 3) == [1, 1, 1]
    assert split_rows(4, [30.0, 10.0], [9] * 2) == [3, 1]
    assert split_rows(30, [30.0, 30.0, 10.0, 10.0], [30] * 4) in ([11, 11, 4, 4], [12, 12, 3, 3])
    assert split_rows(7, [3.0], [7]) == [7]
