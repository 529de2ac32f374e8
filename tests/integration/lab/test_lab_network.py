"""Real namespaces, real TCP and UDP, the real relay process: links are what they are set to.

What a link does is read from the relay's books: packets it has counted, and bytes in its queue by
its own clock. Nothing here depends on how fast this machine is.
"""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import TypeAlias

import pytest

from geo_ray.base.errors import ConfigError, LabLateError
from geo_ray.lab import records
from geo_ray.lab.lab import Lab
from geo_ray.lab.teardown import read_record
from geo_ray.lab.topology import CapConfig, DefaultLink, LabRegionConfig, Topology
from tests.support.lab_support import WAIT_S, needs_lab, tcp_pair, udp_socket, until

pytestmark = needs_lab

HEADS_BYTES = 28  # IPv4 and UDP
SIZE_BYTES = 1000

Send: TypeAlias = Callable[[str, str, int], None]


@pytest.fixture
def lab() -> Iterator[Lab]:
    topology = Topology(
        name="test",
        mtu=1400,
        link=DefaultLink(delay_s=0.001),
        regions=(
            LabRegionConfig(name="A"),
            LabRegionConfig(name="B", congestion_control="bbr"),
            LabRegionConfig(name="C"),
        ),
    )
    with Lab(topology) as lab:
        yield lab


@pytest.fixture
def send(lab: Lab) -> Iterator[Send]:
    """Sends packets to a port that stays open, so that no complaints about them travel back."""
    with ExitStack() as stack:

        def send(src: str, dst: str, count: int) -> None:
            receiver = stack.enter_context(udp_socket(lab, dst))
            with udp_socket(lab, src) as sender:
                for _ in range(count):
                    sender.sendto(bytes(SIZE_BYTES - HEADS_BYTES), receiver.getsockname())

        yield send


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6], ids=["IPv4", "IPv6"])
def test_tcp_carries_bytes_between_regions(lab: Lab, family: int) -> None:
    if family == socket.AF_INET6 and not lab.addresses6:
        pytest.skip("this kernel has no IPv6")
    sent, got = os.urandom(3_000_000), bytearray()
    near, far = tcp_pair(lab, "A", "B", family=family)
    with near, far:
        reader = threading.Thread(
            target=lambda: got.extend(b"".join(iter(lambda: far.recv(1 << 16), b"")))
        )
        reader.start()
        near.sendall(sent)
        near.shutdown(socket.SHUT_WR)
        reader.join(WAIT_S)
    assert got == sent
    stats = lab.stats()
    assert stats.links["A", "B"].out_bytes > len(sent)
    beside = json.loads(json.dumps(stats.record()))
    assert beside["congestion_control"]["A"] == "cubic"
    assert set(beside["links"]) == {"A -> B", "B -> A"}


def test_each_region_has_its_congestion_control_and_mtu(lab: Lab) -> None:
    assert lab.stats().congestion_control == {"A": "cubic", "B": "bbr", "C": "cubic"}
    near, far = tcp_pair(lab, "A", "B")
    with near, far:
        assert near.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG) == 1400 - 40 - 12
        name = far.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        assert name.rstrip(b"\0") == b"bbr"


def test_no_packet_arrives_before_its_delay(lab: Lab) -> None:
    lab.set("A", "B", delay_s=0.05)
    with udp_socket(lab, "A") as sender, udp_socket(lab, "B") as receiver:
        for _ in range(50):
            sender.sendto(struct.pack("d", time.monotonic()), receiver.getsockname())
        for _ in range(50):
            (sent_s,) = struct.unpack("d", receiver.recv(100))
            assert time.monotonic() >= sent_s + 0.05
    assert lab.stats().links["A", "B"].out_packets == 50


def test_a_delay_holds_packets_until_a_cut_loses_them(lab: Lab, send: Send) -> None:
    lab.set("A", "B", delay_s=50.0)
    send("A", "B", 30)
    until(lambda: lab.stats().links["A", "B"].in_packets == 30)
    books = lab.stats().links["A", "B"]
    assert (books.waiting, books.out_packets) == (30, 0)
    lab.cut("A", "B")
    books = lab.stats().links["A", "B"]
    assert (books.waiting, books.cut_drops) == (0, 30)


def test_a_rate_empties_the_queue_at_that_rate(lab: Lab, send: Send) -> None:
    lab.set("A", "B", rate_mbps=2.0, queue_bytes=1_000_000)
    send("A", "B", 500)
    until(lambda: lab.stats().links["A", "B"].in_packets == 500)
    first = lab.stats()
    until(lambda: lab.stats().links["A", "B"].queue_bytes < 400_000)
    second = lab.stats()
    served = first.links["A", "B"].queue_bytes - second.links["A", "B"].queue_bytes
    # Time passes between a request's clock and its queue, more on a busy machine.
    assert served * 8 == pytest.approx((second.seconds - first.seconds) * 2e6, rel=0.2)
    assert first.links["A", "B"].queue_peak_bytes > 400_000


def test_a_full_queue_drops_the_tail(lab: Lab, send: Send) -> None:
    lab.set("A", "B", rate_mbps=0.008, queue_bytes=10_000)  # a second per packet
    send("A", "B", 100)
    until(lambda: lab.stats().links["A", "B"].in_packets == 100)
    books = lab.stats().links["A", "B"]
    assert books.queue_bytes <= 10_000
    assert books.queue_drops == 100 - books.waiting - books.out_packets > 50


def test_loss_is_as_set_and_counted(lab: Lab) -> None:
    lab.set("A", "B", loss=0.1)
    got = 0

    def has_passed(count: int) -> bool:
        books = lab.stats().links["A", "B"]
        return books.in_packets == count and books.waiting == 0

    with udp_socket(lab, "A") as sender, udp_socket(lab, "B") as receiver:
        receiver.setblocking(False)
        for round_ in range(1, 101):  # as much at a time as the receiver's buffer surely holds
            for _ in range(100):
                sender.sendto(b"x", receiver.getsockname())
            until(lambda count=100 * round_: has_passed(count))
            with suppress(BlockingIOError):
                while receiver.recv(10):
                    got += 1
    books = lab.stats().links["A", "B"]
    assert got == books.out_packets == 10_000 - books.lost
    assert abs(books.lost - 1000) < 5 * math.sqrt(10_000 * 0.1 * 0.9)


def test_links_of_a_region_share_its_uplink(lab: Lab, send: Send) -> None:
    lab.cap("A", up=CapConfig(rate_mbps=2.0, queue_bytes=1_000_000))
    send("A", "B", 250)
    send("A", "C", 250)
    until(lambda: sum(lab.stats().links["A", dst].in_packets for dst in "BC") == 500)
    first = lab.stats()
    until(lambda: lab.stats().up["A"].queue_bytes < 300_000)
    second = lab.stats()
    served = first.up["A"].queue_bytes - second.up["A"].queue_bytes
    # Time passes between a request's clock and its queue. Two separate caps would serve twice.
    assert served * 8 == pytest.approx((second.seconds - first.seconds) * 2e6, rel=0.2)


def test_links_to_a_region_share_its_downlink(lab: Lab, send: Send) -> None:
    lab.cap("C", down=CapConfig(rate_mbps=0.008, queue_bytes=10_000))
    send("A", "C", 50)
    send("B", "C", 50)
    until(lambda: sum(lab.stats().links[src, "C"].cap_drops for src in "AB") > 50)
    until(lambda: sum(lab.stats().links[src, "C"].in_packets for src in "AB") == 100)
    assert lab.stats().down["C"].queue_bytes <= 10_000


def test_a_flow_is_capped_and_others_are_not(lab: Lab) -> None:
    lab.set("A", "B", flow_rate_mbps=0.008, queue_bytes=5000)
    with udp_socket(lab, "B") as receiver, ExitStack() as open_:
        # A port of its own is a flow of its own; one that was let go may be had again.
        senders = [open_.enter_context(udp_socket(lab, "A")) for _ in range(21)]
        for sender in senders[:20] + senders[20:] * 20:
            sender.sendto(bytes(972), receiver.getsockname())
    until(lambda: lab.stats().links["A", "B"].in_packets == 40)
    books = lab.stats().links["A", "B"]
    assert books.cap_drops == 15  # of the last flow, whose queue holds five


def test_a_cut_works_both_ways_or_one_and_heals(lab: Lab, send: Send) -> None:
    def cut_drops() -> tuple[int, int]:
        links = lab.stats().links
        return links["A", "C"].cut_drops, links["C", "A"].cut_drops

    lab.cut("A", "C", one_way=True)
    send("A", "C", 5)
    send("C", "A", 5)
    until(lambda: cut_drops()[0] == 5)
    until(lambda: lab.stats().links["C", "A"].out_packets == 5)
    lab.cut("A", "C")
    send("C", "A", 5)
    until(lambda: cut_drops() == (5, 5))
    lab.heal("A", "C")
    with udp_socket(lab, "A") as sender, udp_socket(lab, "C") as receiver:
        sender.sendto(b"found", receiver.getsockname())
        assert receiver.recv(100) == b"found"


def test_tcp_survives_a_cut(lab: Lab) -> None:
    near, far = tcp_pair(lab, "A", "B")
    with near, far:
        lab.cut("A", "B")
        near.sendall(b"patience")
        until(lambda: lab.stats().links["A", "B"].cut_drops > 0)
        lab.heal("A", "B")
        assert far.recv(100) == b"patience"


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [({"speed": 1}, "speed"), ({"loss": 2.0}, "loss"), ({"rate_mbps": -1.0}, "rate_mbps")],
)
def test_a_change_that_cannot_be_is_refused(
    lab: Lab, changes: dict[str, float], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        lab.set("A", "B", **changes)
    with pytest.raises(ConfigError, match="'Z'"):
        lab.cut("A", "Z")
    with pytest.raises(ConfigError, match="no region 'Z'"):
        lab.popen("Z", ["true"])


def test_a_relay_that_was_held_up_is_late(lab: Lab, send: Send) -> None:
    pid = read_record(records.BASE / lab.lab_id)["relay"][0]
    lab.set("A", "B", delay_s=0.5)
    send("A", "B", 50)
    until(lambda: lab.stats().links["A", "B"].in_packets == 50)
    os.kill(pid, signal.SIGSTOP)
    time.sleep(1.0)  # the packets' time passes
    os.kill(pid, signal.SIGCONT)
    until(lambda: lab.stats().links["A", "B"].waiting == 0)
    with pytest.raises(LabLateError):
        lab.check_not_late()


def test_a_trace_changes_rates_by_itself() -> None:
    topology = Topology.model_validate_json(
        """{"regions": [{"name": "A"}, {"name": "B"}],
            "link": {"trace": {"kind": "points", "points": [[0, 10], [0.2, 20], [0.4, 30]]}}}"""
    )
    with Lab(topology) as lab:
        seen = set()
        until(lambda: seen.add(lab.stats().links["A", "B"].rate_mbps) or 30.0 in seen)
        assert seen <= {10.0, 20.0, 30.0}
        lab.restart_traces()
        until(lambda: lab.stats().links["B", "A"].rate_mbps in (10.0, 20.0, 30.0))
        lab.set("A", "B", rate_mbps=5.0)
        until(lambda: lab.stats().links["B", "A"].rate_mbps == 30.0)
        assert lab.stats().links["A", "B"].rate_mbps == 5.0


def test_a_lab_without_links_worth_the_name_still_has_one_region() -> None:
    with Lab(Topology(regions=(LabRegionConfig(name="alone"),), link=DefaultLink())) as lab:
        assert lab.stats().links == {}
        assert lab.popen("alone", ["true"]).wait(WAIT_S) == 0
