"""Real namespaces, real TCP and UDP, the real relay process."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from lab_support import needs_lab, tcp_pair, udp_socket

from geo_ray.lab.lab import Lab
from geo_ray.lab.topology import DefaultLink, RegionConfig, Topology

pytestmark = needs_lab


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    topology = Topology(
        name="test",
        link=DefaultLink(delay_s=0.002),
        regions=(
            RegionConfig(name="A"),
            RegionConfig(name="B", congestion_control="bbr"),
            RegionConfig(name="C"),
        ),
    )
    with Lab(topology) as lab:
        yield lab


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6], ids=["IPv4", "IPv6"])
def test_tcp_carries_bytes_between_regions(lab: Lab, family: int) -> None:
    if family == socket.AF_INET6 and not lab.addresses6:
        pytest.skip("this kernel has no IPv6")
    near, far = tcp_pair(lab, "A", "B", family=family)
    with near, far:
        sent = bytes(range(256)) * 100  # fits into the buffers of both ends
        near.sendall(sent)
        near.shutdown(socket.SHUT_WR)
        got = b"".join(iter(lambda: far.recv(1 << 16), b""))
    assert got == sent


def test_each_region_has_its_congestion_control(lab: Lab) -> None:
    assert lab.stats().congestion_control == {"A": "cubic", "B": "bbr", "C": "cubic"}


def test_a_cut_loses_packets_and_a_heal_lets_them_pass(lab: Lab) -> None:
    sender, receiver = udp_socket(lab, "A"), udp_socket(lab, "C")
    with sender, receiver:
        lab.cut("A", "C")
        lab.reset()
        for _ in range(5):
            sender.sendto(b"lost", receiver.getsockname())
        while lab.stats().links["A", "C"].cut_drops < 5:
            pass
        lab.heal("A", "C")
        sender.sendto(b"found", receiver.getsockname())
        assert receiver.recv(100) == b"found"
        assert lab.stats().links["A", "C"].in_packets == 6
