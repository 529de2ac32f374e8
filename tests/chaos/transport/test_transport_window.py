"""What is under way on a line whose buffer has no end: the window's doing, not TCP's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from geo_ray.transport.wire.message import BACKGROUND, CONTROL, DATA
from tests.support.slow_proxy import SlowProxy
from tests.support.wan_support import Node, leaving_nothing_behind, numbers_of, running, until

MB = 1_000_000
MESSAGES = 8


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    with leaving_nothing_behind():
        yield


@pytest.mark.parametrize(
    "lane",
    [
        CONTROL,
        pytest.param(DATA, marks=pytest.mark.slow),
        pytest.param(BACKGROUND, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("connections", [1, 1000], ids=["control stream only", "all streams"])
def test_the_window_holds_for_the_link_whatever_the_streams(connections: int, lane: int) -> None:
    eu, us = Node("eu"), Node("us")
    windows: list[int] = []
    with (
        running(eu, us),
        SlowProxy(us.endpoint.listen(), 2.5 * MB, 0.02, connections) as proxy,
    ):
        eu.join(us, proxy.address)

        def is_done() -> bool:
            windows.append(eu.about("us")["window_bytes"])
            return len(us.got) == MESSAGES

        for n in range(MESSAGES):
            eu.say("us", n, bytes(MB), lane)
        until(is_done)
        assert numbers_of(us.wait_messages(MESSAGES)) == list(range(MESSAGES))
        assert proxy.most_held_bytes < 2 * max(windows) < MESSAGES * MB
