"""Calls at the same time: all have ended when it returns, the first error of them is raised."""

from __future__ import annotations

import threading

import pytest

from geo_ray.base.threads import ThreadPoolMap, in_turn

WAIT_S = 20.0


def test_calls_run_at_the_same_time() -> None:
    meet = threading.Barrier(3, timeout=WAIT_S)  # nobody passes it before all three are there
    pool = ThreadPoolMap(3, "test")
    try:
        assert sorted(pool([meet.wait] * 3)) == [0, 1, 2]
        assert pool([lambda: "a", lambda: "b"]) == ["a", "b"]
        assert pool([lambda i=i: i for i in range(7)]) == list(range(7))
    finally:
        pool.close()


def test_all_have_ended_before_an_error_is_raised() -> None:
    ended = []
    gate = threading.Event()

    def late() -> None:
        assert gate.wait(WAIT_S)
        ended.append("late")

    def fails() -> None:
        gate.set()
        raise ValueError("first")

    pool = ThreadPoolMap(2, "test")
    try:
        with pytest.raises(ValueError, match="first"):
            pool([fails, late])
        assert ended == ["late"]
        with pytest.raises(ZeroDivisionError):
            pool([lambda: 1, lambda: 1 // 0])
        assert pool([lambda: 1, lambda: 2]) == [1, 2]
    finally:
        pool.close()


def test_closing_leaves_no_thread_behind() -> None:
    pool = ThreadPoolMap(4, "leaves-nothing")
    pool([lambda: None] * 4)
    pool.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("leaves-nothing")]


def test_in_turn_keeps_the_order() -> None:
    order: list[int] = []
    in_turn([lambda i=i: order.append(i) for i in range(3)])
    assert order == [0, 1, 2]
