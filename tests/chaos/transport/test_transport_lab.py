"""Two regions in real namespaces, a process each, and a link that is cut, lossy or moves."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from geo_ray.lab import lab as requirements
from geo_ray.lab.lab import Lab
from geo_ray.lab.plan import DEVICE
from geo_ray.lab.topology import DefaultLink, LabRegionConfig, Topology
from tests.support.wan_support import WAIT_S

pytestmark = pytest.mark.skipif(
    requirements.missing_requirements() is not None, reason=str(requirements.missing_requirements())
)

MB = 1_000_000
NODE = Path(__file__).parents[2] / "support" / "wan_lab_node.py"
PATIENT: dict[str, Any] = {"peer_timeout_s": 60.0, "tls": "off", "max_ahead_bytes": 4 * MB}
QUICK: dict[str, Any] = PATIENT | {
    "peer_timeout_s": 1.0,
    "heartbeat_s": 0.2,
    "connect_timeout_s": 1.0,
    "handshake_timeout_s": 2.0,
    "reconnect_max_s": 0.5,
}


class Region:
    """The near end of a node's pipe."""

    def __init__(self, lab: Lab, region: str, peer: str, attempt: int, config: dict[str, Any]):
        self.port = 0
        self.child = lab.popen(
            region, [sys.executable, str(NODE)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._say({"region": region, "peer": peer, "attempt": attempt, "config": config})

    def _say(self, what: dict[str, Any]) -> None:
        assert self.child.stdin is not None
        self.child.stdin.write(json.dumps(what).encode() + b"\n")
        self.child.stdin.flush()

    def ask(self, do: str, **order: Any) -> dict[str, Any]:
        """Give an order and wait for the answer."""
        assert self.child.stdout is not None
        self._say({"do": do, **order})
        answer: dict[str, Any] = json.loads(self.child.stdout.readline())
        return answer

    def until(self, done: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """What there is to know, as soon as it is so."""
        deadline_s = time.monotonic() + WAIT_S
        while not done(seen := self.ask("look")):
            assert time.monotonic() < deadline_s, seen
            time.sleep(0.02)
        return seen

    def until_messages(self, count: int) -> dict[str, Any]:
        """All of them, each once, in order and intact."""
        seen = self.until(lambda seen: len(seen["messages"]) >= count)
        assert seen["messages"] == list(range(count)) and seen["damaged"] == []
        return seen

    def until_flushed(self) -> dict[str, Any]:
        """Everything is acknowledged."""
        return self.until(lambda seen: seen["stats"]["outbox_messages"] == 0)

    def end(self) -> None:
        """Let the process end by itself; it must."""
        with suppress(BrokenPipeError):
            self.child.communicate(timeout=WAIT_S)


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    topology = Topology(
        name="transport",
        link=DefaultLink(delay_s=0.01, rate_mbps=60.0),
        regions=(LabRegionConfig(name="eu"), LabRegionConfig(name="us")),
    )
    with Lab(topology) as lab:
        yield lab


@contextmanager
def regions(lab: Lab, config: dict[str, Any], host: str = "") -> Iterator[tuple[Region, Region]]:
    """eu, which dials, and us, which listens; connected."""
    eu, us = Region(lab, "eu", "us", 1, config), Region(lab, "us", "eu", 1, config)
    try:
        address = lab.addresses["us"]
        us.port = us.ask("listen", host=host or address)["port"]
        eu.ask("connect", host=address, port=us.port)
        for each in (eu, us):
            each.until(lambda seen: bool(seen["stats"]) and seen["stats"]["connected"])
        yield eu, us
    finally:
        for each in (eu, us):
            each.end()
    assert eu.child.returncode == us.child.returncode == 0


def _arrived(seen: dict[str, Any]) -> int:
    return int(seen["stats"]["bytes_received"].get("update", 0))


def test_a_short_cut_costs_no_connection_and_little_is_sent_twice(lab: Lab) -> None:
    with regions(lab, PATIENT) as (eu, us):
        eu.ask("send", first=0, count=12, size_bytes=MB)
        before = us.until(lambda seen: _arrived(seen) > 3 * MB)
        assert len(before["messages"]) < 12
        lab.cut("eu", "us")
        time.sleep(1.0)  # what is to be survived
        cut = us.ask("look")
        assert len(cut["messages"]) < 12
        lab.heal("eu", "us")
        us.until_messages(12)
        books = eu.until_flushed()["stats"]
        assert books["reconnects"] == 0 and books["messages_out"] == 12
        assert books["bytes_sent"].get("resend", 0) < 6 * MB


@pytest.mark.parametrize("one_way", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_path_that_is_back_is_used_before_tcp_has_noticed(lab: Lab, one_way: bool) -> None:
    """TCP tries 0.2, 0.6, 1.4, 3, 6.2 and 12.6 s after the cut; silence counts after a minute."""
    with regions(lab, PATIENT) as (eu, us):
        eu.ask("send", first=0, count=12, size_bytes=MB)
        us.until(lambda seen: _arrived(seen) > 3 * MB)
        lab.cut("eu", "us", one_way=one_way)
        time.sleep(7.5)
        assert eu.ask("look")["stats"]["reconnects"] == 0
        lab.heal("eu", "us", one_way=one_way)
        us.until_messages(12)
        books = eu.until_flushed()["stats"]
        assert books["reconnects"] == 1 and books["messages_out"] == 12
        assert books["bytes_sent"].get("resend", 0) < 6 * MB


def test_a_long_outage_is_noticed_by_both_and_the_transfer_continues(lab: Lab) -> None:
    with regions(lab, QUICK) as (eu, us):
        eu.ask("send", first=0, count=12, size_bytes=MB)
        us.until(lambda seen: _arrived(seen) > 3 * MB)
        lab.cut("eu", "us")
        for each in (eu, us):
            down = each.until(lambda seen: seen["peers"] == [[1, True], [1, False]])
            assert "sent nothing" in down["stats"]["last_error"] or not down["stats"]["connected"]
        time.sleep(2.0)
        assert not eu.ask("look")["stats"]["connected"]
        lab.heal("eu", "us")
        us.until_messages(12)
        books = eu.until_flushed()["stats"]
        assert books["reconnects"] >= 1 and books["messages_out"] == 12
        # What had begun and was not acknowledged, and what came late: not the whole again.
        assert books["bytes_sent"].get("resend", 0) < 8 * MB
        for each in (eu, us):
            seen = each.until(lambda seen: seen["stats"]["connected"])
            ups = [up for _, up in seen["peers"]]
            assert ups == [True, False] * (len(ups) // 2) + [True]


@pytest.mark.parametrize(
    ("src", "dst"), [("eu", "us"), pytest.param("us", "eu", marks=pytest.mark.slow)]
)
def test_a_partition_in_one_direction_is_noticed_by_both(lab: Lab, src: str, dst: str) -> None:
    with regions(lab, QUICK) as (eu, us):
        eu.ask("send", first=0, count=6, size_bytes=MB)
        us.until(lambda seen: _arrived(seen) > MB)
        lab.cut(src, dst, one_way=True)
        for each in (eu, us):
            each.until(lambda seen: [1, False] in seen["peers"])
        lab.heal(src, dst, one_way=True)
        us.ask("send", first=0, count=2, size_bytes=MB)
        us.until_messages(6)
        eu.until_messages(2)
        eu.until_flushed()
        us.until_flushed()


def test_a_lossy_link_carries_everything_both_ways(lab: Lab) -> None:
    lab.set("*", "*", loss=0.01, jitter_s=0.002)
    try:
        with regions(lab, PATIENT) as (eu, us):
            for each in (eu, us):
                each.ask("send", first=0, count=30, size_bytes=100_000)
            for each in (eu, us):
                assert each.until_messages(30)["stats"]["reconnects"] == 0
    finally:
        lab.set("*", "*", loss=0.0, jitter_s=0.0)


def test_a_successor_at_another_port_is_dialed_when_announced(lab: Lab) -> None:
    with regions(lab, QUICK) as (eu, us):
        eu.ask("send", first=0, count=2, size_bytes=1000)
        us.until_messages(2)
        eu.until_flushed()
        us.end()
        eu.until(lambda seen: [1, False] in seen["peers"])
        successor = Region(lab, "us", "eu", 2, QUICK)
        try:
            port = successor.ask("listen", host=lab.addresses["us"])["port"]
            eu.ask("connect", host=lab.addresses["us"], port=port)
            eu.until(lambda seen: seen["peers"][-1] == [2, True])
            eu.ask("send", first=0, count=3, size_bytes=MB)
            successor.ask("send", first=0, count=3, size_bytes=MB)
            successor.until_messages(3)
            eu.until_messages(3)
            assert eu.ask("look")["peers"] == [[1, True], [1, False], [2, True]]
        finally:
            successor.end()


@pytest.mark.skipif(not requirements.has_ipv6(), reason="this kernel has no IPv6")
def test_the_same_endpoint_at_another_address_continues(lab: Lab) -> None:
    """In mid-transfer its IPv4 address vanishes; the dialer is given the other one."""

    def ip4(verb: str) -> None:
        command = ["ip", "-4", "addr", verb, f"{lab.addresses['us']}/32", "dev", DEVICE]
        lab.inside("us", lambda: subprocess.run(command, check=True))

    with regions(lab, QUICK, host="::") as (eu, us):
        eu.ask("send", first=0, count=8, size_bytes=MB)
        us.until(lambda seen: _arrived(seen) > 2 * MB)
        ip4("del")
        try:
            eu.ask("connect", host=lab.addresses6["us"], port=us.port)
            us.until_messages(8)
            books = eu.until_flushed()["stats"]
            assert books["reconnects"] >= 1 and books["attempt"] == 1 and books["dropped_out"] == 0
        finally:
            ip4("add")
            route = ["ip", "-4", "route", "replace", "default", "dev", DEVICE]
            route += ["src", lab.addresses["us"]]
            lab.inside("us", lambda: subprocess.run(route, check=True))
