"""Whose machine will be gone, as far as Ray tells in time."""

from __future__ import annotations

import threading

from geo_ray.runtime.control.notices import EVERY_S, DrainNotices

NODES = {"a": "n1", "b": "n2"}


def settled(notices: DrainNotices, now_s: float) -> list[str]:
    """What is known once Ray has answered the question that is asked now."""
    notices.concern(NODES, now_s)
    assert notices._asking is not None
    notices._asking.join(10.0)
    return notices.concern(NODES, now_s)


def test_a_drained_node_concerns_those_that_live_there() -> None:
    answers = [[], ["n2", "n7"]]
    notices = DrainNotices(lambda: answers.pop(0))
    assert settled(notices, 100.0) == []
    assert settled(notices, 100.0 + 0.9 * EVERY_S) == [], "it is not asked each time"
    assert settled(notices, 100.0 + EVERY_S) == ["b"]
    assert answers == []


def test_nobody_waits_for_a_control_service_that_is_gone() -> None:
    never = threading.Event()

    def ask() -> list[str]:
        never.wait(10.0)
        raise ConnectionError("no control service")

    notices = DrainNotices(ask)
    assert notices.concern(NODES, 0.0) == notices.concern(NODES, 50.0) == []
    never.set()
    assert settled(notices, 100.0) == []
