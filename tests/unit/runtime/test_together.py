"""Calls at the same time: all have ended when it returns, the first error of them is raised."""

from __future__ import annotations

import threading

import pytest

from geo_ray.base.threads import ParallelCalls, in_turn

WAIT_S = 20.0


def test_calls_run_at_the_same_time() -> None:
    meet = threading.Barrier(3, timeout=WAIT_S)  # nobody passes it before all three are there
    together = ParallelCalls(3, "test")
    try:
        assert sorted(together([meet.wait] * 3)) == [0, 1, 2]
        assert together([lambda: "a", lambda: "b"]) == ["a", "b"]
        assert together([lambda i=i: i for i in range(7)]) == list(range(7))
    finally:
        together.close()


def test_all_have_ended_before_an_error_is_raised() -> None:
    ended = []
    gate = threading.Event()

    def late() -> None:
        assert gate.wait(WAIT_S)
        ended.append("late")

    def fails() -> None:
        gate.set()
        raise ValueError("first")

    together = ParallelCalls(2, "test")
    try:
        with pytest.raises(ValueError, match="first"):
            together([fails, late])
        assert ended == ["late"]
        with pytest.raises(ZeroDivisionError):
            together([lambda: 1, lambda: 1 // 0])
        assert together([lambda: 1, lambda: 2]) == [1, 2]
    finally:
        together.close()


def test_closing_leaves_no_thread_behind() -> None:
    together = ParallelCalls(4, "leaves-nothing")
    together([lambda: None] * 4)
    together.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("leaves-nothing")]


def test_in_turn_keeps_the_order() -> None:
    order: list[int] = []
    in_turn([lambda i=i: order.append(i) for i in range(3)])
    assert order == [0, 1, 2]
