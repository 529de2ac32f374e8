"""Whose machine will be gone, as far as Ray tells in time."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

from geo_ray.runtime.actor_group import EVERY_S, DrainNotices

NODES = {"a": "n1", "b": "n2"}


def notices_from(ask: Any, where: Any = dict) -> DrainNotices:
    return DrainNotices(SimpleNamespace(draining=ask, of_servers=where))


def settled(notices: DrainNotices, now_s: float) -> list[str]:
    """What is known once Ray has answered the question that is asked now."""
    notices.concern(NODES, now_s)
    assert notices._asking is not None
    notices._asking.result(10.0)
    return notices.concern(NODES, now_s)


def test_a_drained_node_concerns_those_that_live_there() -> None:
    answers: list[dict[str, int]] = [{}, {"n2": 9000, "n7": 0}]
    notices = notices_from(partial(answers.pop, 0))
    assert settled(notices, 100.0) == []
    assert settled(notices, 100.0 + 0.9 * EVERY_S) == [], "it is not asked each time"
    assert settled(notices, 100.0 + EVERY_S) == ["b"]
    assert answers == []


def test_a_missing_control_service_is_not_waited_for() -> None:
    never = threading.Event()

    def ask() -> dict[str, int]:
        never.wait(10.0)
        raise ConnectionError("no control service")

    notices = notices_from(ask)
    assert notices.concern(NODES, 0.0) == notices.concern(NODES, 50.0) == []
    never.set()
    assert settled(notices, 100.0) == []


def test_a_region_is_gone_with_the_first_of_its_servers_machines() -> None:
    nodes: Mapping[str, int] = {"n2": 9000, "n3": 7000, "n4": 0}
    where = {"us": {"n1"}, "eu": {"n2", "n3"}, "asia": {"n4"}, "placing": set[str]()}
    notices = notices_from(lambda: nodes, lambda: where)
    assert notices.regions == {}
    assert settled(notices, 0.0) == ["b"]
    assert notices.regions == {"eu": 7.0, "asia": math.inf}
    where["eu"] = {"n5"}  # it is back elsewhere
    settled(notices, 50.0)
    assert notices.regions == {"asia": math.inf}


def test_nodes_are_not_queried_without_a_notice() -> None:
    def where() -> dict[str, set[str]]:
        raise AssertionError

    notices = notices_from(dict, where)
    assert settled(notices, 0.0) == [] and notices.regions == {}
