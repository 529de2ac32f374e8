"""When a run is replanned: once for a change that lasts, seldom for others."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from geo_ray.runtime.replanning import ReplanPolicy

ALL, FEWER = ("a", "b", "c"), ("a", "b")


def test_a_change_that_lasts_is_planned_for_once() -> None:
    policy = ReplanPolicy(60.0, 600.0)
    assert not any(policy.due(ALL, float(now_s)) for now_s in range(100))
    found = [now_s for now_s in range(100, 2000) if policy.due(FEWER, float(now_s))]
    assert found == [160]


def test_a_change_that_is_undone_is_none() -> None:
    policy = ReplanPolicy(60.0, 600.0)
    for now_s in range(2000):
        there = FEWER if now_s % 100 > 50 else ALL
        assert not policy.due(there, float(now_s))


def test_the_next_change_waits_its_time() -> None:
    policy = ReplanPolicy(60.0, 600.0)
    policy.due(ALL, 0.0)
    first = [s for s in range(1, 300) if policy.due(FEWER, float(s))]
    second = [s for s in range(300, 2000) if policy.due(ALL, float(s))]
    assert first == [61] and second == [661]


@given(
    st.lists(st.tuples(st.sampled_from([ALL, FEWER, ("a",), ("a", "d")]), st.integers(1, 400))),
    st.integers(0, 100),
    st.integers(100, 900),
)
def test_the_queue_is_bounded_whatever_arrives(
    changes: list[tuple[tuple[str, ...], int]], settle_s: int, min_interval_s: int
) -> None:
    policy, now_s, planned = ReplanPolicy(settle_s, min_interval_s), 0, []
    lasted: dict[tuple[str, ...], int] = {}
    for members, for_s in changes:
        for _ in range(for_s):
            if policy.due(members, float(now_s)):
                planned.append(now_s)
            now_s += 1
        lasted[members] = max(lasted.get(members, 0), for_s)
    assert len(planned) <= now_s / min_interval_s + 1
    assert all(b - a >= min_interval_s for a, b in pairwise(planned))
    if not any(for_s > settle_s for for_s in lasted.values()) and len(lasted) == len(changes):
        assert not planned
