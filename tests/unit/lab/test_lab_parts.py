"""Loss, jitter, flows, traces, routing and verdict of the lab: pure parts, explicit times."""

from __future__ import annotations

import math
import re
import statistics
from itertools import groupby, islice
from pathlib import Path
from random import Random

import pytest

from geo_ray.lab import relay
from geo_ray.lab.link import Jitter, Link, Loss, flow_key
from geo_ray.lab.mesh import Mesh, Station
from geo_ray.lab.plan import (
    MIN_QUEUE_BYTES,
    CapShape,
    LinkShape,
    Trace,
    ipv4_of,
    ipv6_of,
    prefixes_of,
)
from geo_ray.lab.relay import Control, TraceSchedule

# ------------------------------------------------------------------ chance


def within(count: int, trials: int, chance: float) -> bool:
    """Whether a binomial count lies within five standard deviations."""
    return abs(count - trials * chance) <= 5 * math.sqrt(trials * chance * (1 - chance))


@pytest.mark.parametrize("chance", [0.001, 0.01, 0.5])
def test_independent_loss_has_its_rate(chance: float) -> None:
    loss = Loss(Random(3), chance, 0.0, 1.0)
    assert within(sum(loss.hits() for _ in range(50_000)), 50_000, chance)


def test_bursts_have_their_share_and_length() -> None:
    loss = Loss(Random(3), 0.0, 0.01, 0.2)
    hits = [loss.hits() for _ in range(200_000)]
    lengths = [len(list(run)) for hit, run in groupby(hits) if hit]
    assert statistics.mean(lengths) == pytest.approx(5.0, rel=0.1)
    assert sum(hits) / len(hits) == pytest.approx(0.01 / 0.21, rel=0.1)


def test_jitter_has_its_deviation_and_memory() -> None:
    jitter = Jitter(Random(3), 0.005, 0.2)
    offsets_s = [jitter.offset_s(0.01 * number) for number in range(100_000)]
    assert statistics.mean(offsets_s) == pytest.approx(0.0, abs=0.0003)
    assert statistics.stdev(offsets_s) == pytest.approx(0.005, rel=0.05)
    wanted = math.exp(-0.01 / 0.2)
    assert statistics.correlation(offsets_s, [*offsets_s[1:], 0.0]) == pytest.approx(
        wanted, abs=0.02
    )


def test_correlated_jitter_barely_biases_the_delay() -> None:
    link = Link(LinkShape(delay_s=0.05, jitter_s=0.005), 3)
    for number in range(20_000):
        link.push(0.001 * number, b"x")
    delays_s = [due_s - done_s for due_s, done_s, _ in link.line]
    assert statistics.mean(delays_s) == pytest.approx(0.05, abs=0.0012)
    dues_s = [due_s for due_s, _, _ in link.line]
    assert dues_s == sorted(dues_s)


def test_the_same_seed_loses_the_same_packets() -> None:
    def lost(seed: int) -> list[int]:
        link = Link(LinkShape(loss=0.3), seed)
        for number in range(200):
            link.push(float(number), bytes([number]))
        return [packet[0] for _, _, packet in link.line]

    assert lost(1) == lost(1) != lost(2)


# ------------------------------------------------------------------ flows


def ipv4(protocol: int, src_port: int, *, options: int = 0, fragment: int = 0) -> bytes:
    head = bytes([0x45 + options, 0, 0, 0, 0, 0]) + fragment.to_bytes(2, "big")
    head += bytes([64, protocol, 0, 0, 10, 1, 0, 1, 10, 2, 0, 1]) + bytes(4 * options)
    return head + src_port.to_bytes(2, "big") + bytes([0, 80]) + bytes(16)


def ipv6(protocol: int, src_port: int, dst: int = 1) -> bytes:
    head = bytes([0x60]) + bytes(5) + bytes([protocol, 64])
    addresses = prefixes_of(0)[1] + bytes(7) + b"\1" + prefixes_of(dst)[1] + bytes(7) + b"\1"
    return head + addresses + src_port.to_bytes(2, "big") + bytes([0, 80]) + bytes(16)


def test_flows_are_distinguished_by_protocol_addresses_and_ports() -> None:
    keys = {
        flow_key(packet)
        for packet in (
            ipv4(6, 1000), ipv4(6, 1001), ipv4(17, 1000), ipv6(6, 1000), ipv6(6, 1001),
            ipv6(6, 1000, dst=2),
        )
    }  # fmt: skip
    assert len(keys) == 6
    assert flow_key(ipv4(6, 1000)) == flow_key(ipv4(6, 1000, options=2))


def test_fragments_and_other_protocols_are_one_flow_per_pair() -> None:
    assert flow_key(ipv4(17, 1000, fragment=0x2000)) == flow_key(ipv4(17, 7, fragment=0x00B9))
    assert flow_key(ipv4(1, 1000)) == flow_key(ipv4(1, 1001))


def test_dont_fragment_is_no_fragment() -> None:
    assert flow_key(ipv4(6, 1000, fragment=0x4000)) != flow_key(ipv4(6, 1001, fragment=0x4000))


def test_idle_flows_are_forgotten() -> None:
    link = Link(LinkShape(flow_rate_mbps=1.0), 1)
    assert link._flows is not None
    for number in range(50_000):
        link.push(float(number), ipv4(17, number))
        link.hand_over(float(number), lambda *_: None)
    assert len(link._flows._flows) <= 1024


def test_removing_the_cap_releases_waiting_packets() -> None:
    link, got = Link(LinkShape(flow_rate_mbps=0.001, queue_bytes=10**6), 1), []
    for _ in range(10):
        link.push(1.0, ipv4(17, 5))
    link.reshape(2.0, LinkShape())
    link.release(2.0, got.append)
    assert len(got) == 10


# ------------------------------------------------------------------ queue defaults


def test_a_queue_holds_a_round_trip_by_default() -> None:
    assert LinkShape(rate_mbps=100, delay_s=0.05).queue_limit_bytes() == 1_250_000
    assert LinkShape(rate_mbps=100, delay_s=0.05, queue_bytes=7).queue_limit_bytes() == 7
    assert LinkShape(rate_mbps=1).queue_limit_bytes() == MIN_QUEUE_BYTES
    assert CapShape(rate_mbps=100).queue_limit_bytes() == 1_250_000


# ------------------------------------------------------------------ traces


def test_points_are_played_and_repeated() -> None:
    trace = Trace(points=[(0, 10), (2, 30)], repeat_s=5)
    assert list(islice(trace.changes(), 5)) == [(0, 10), (2, 30), (5, 10), (7, 30), (10, 10)]
    assert list(Trace(points=[(0, 10), (2, 30)]).changes()) == [(0, 10), (2, 30)]


def test_draws_stay_in_their_range_and_follow_the_seed() -> None:
    trace = Trace(low_mbps=20, high_mbps=155, every_s=180, seed=4)
    drawn = list(islice(trace.changes(), 1000))
    assert [time_s for time_s, _ in drawn[:3]] == [0, 180, 360]
    assert all(20 <= rate <= 155 for _, rate in drawn)
    assert statistics.mean(rate for _, rate in drawn) == pytest.approx(87.5, abs=5)
    assert drawn == list(islice(trace.changes(), 1000))


def test_the_schedule_merges_traces_and_forgets_those_set_by_hand() -> None:
    schedule = TraceSchedule(
        {
            ("link", 0, 1): Trace(points=[(0, 1), (2, 2)]),
            ("up", 0, 0): Trace(points=[(0, 5), (1, 6), (3, 7)]),
        }
    )
    schedule.start(100.0)
    assert schedule.next_s() == 100.0
    assert sorted(schedule.due(101.0)) == [
        (("link", 0, 1), 1), (("up", 0, 0), 5), (("up", 0, 0), 6),
    ]  # fmt: skip
    schedule.drop(("up", 0, 0))
    assert schedule.due(200.0) == [(("link", 0, 1), 2)]
    assert schedule.next_s() is None


# ------------------------------------------------------------------ mesh and control


class Region:
    """A station whose device is a list."""

    def __init__(self, index: int, up: CapShape | None = None, down: CapShape | None = None):
        self.got: list[bytes] = []
        self.refuses = False
        self.station = Station(
            "ABC"[index], prefixes_of(index), up or CapShape(), down or CapShape(), self.take
        )

    def take(self, packet: bytes) -> None:
        if self.refuses:
            raise OSError
        self.got.append(packet)


def mesh_of(*regions: Region, shape: LinkShape | None = None) -> Mesh:
    count = range(len(regions))
    shape = shape or LinkShape()
    pairs = {(src, dst): (shape, 1) for src in count for dst in count if src != dst}
    return Mesh([region.station for region in regions], pairs)


def to(dst: int, size: int = 1500) -> bytes:
    return (bytes([0x45]) + bytes(15) + bytes([10, 1 + dst, 0, 1])).ljust(size, b"\0")


def test_packets_are_routed_by_address() -> None:
    a, b, c = Region(0), Region(1), Region(2)
    mesh = mesh_of(a, b, c)
    a.station.accept([to(1), to(2), ipv6(17, 5, dst=2), to(0), to(200)], 1.0)
    mesh.advance(lambda: 1.0)
    assert (b.got, c.got) == ([to(1)], [to(2), ipv6(17, 5, dst=2)])
    assert a.station.unrouted == 2


def test_prefixes_are_those_of_the_addresses() -> None:
    import ipaddress

    for index in (0, 1, 63):
        assert ipaddress.ip_address(ipv4_of(index)).packed[:2] == prefixes_of(index)[0]
        assert ipaddress.ip_address(ipv6_of(index)).packed[:8] == prefixes_of(index)[1]


def test_an_uplink_is_shared_by_all_destinations() -> None:
    a, b, c = Region(0, up=CapShape(12.0, 10**6)), Region(1), Region(2)  # 1 ms per packet
    mesh = mesh_of(a, b, c)
    a.station.accept([to(1), to(2)] * 10, 0.0)
    mesh.advance(lambda: 0.0105)
    assert (len(b.got), len(c.got)) == (5, 5)
    assert mesh.next_s() == pytest.approx(0.011)
    mesh.advance(lambda: 0.020001)
    assert (len(b.got), len(c.got)) == (10, 10)


def test_a_downlink_is_shared_by_all_sources_in_order_of_time() -> None:
    a, b, c = Region(0), Region(1), Region(2, down=CapShape(12.0, 10**6))
    mesh = mesh_of(a, b, c)
    b.station.accept([to(2, 1000)], 0.0)
    a.station.accept([to(2)] * 3, 0.0001)
    b.station.accept([to(2, 1000)] * 3, 0.0002)
    mesh.advance(lambda: 0.0002)
    mesh.advance(lambda: 1.0)
    assert [len(packet) for packet in c.got] == [1000, 1500, 1500, 1500, 1000, 1000, 1000]
    assert mesh.links[0, 2].out_packets == 3 and mesh.links[1, 2].out_packets == 4


def test_packets_dropped_by_a_full_cap_are_counted() -> None:
    a, b = Region(0, up=CapShape(12.0, 3000)), Region(1)
    mesh = mesh_of(a, b)
    a.station.accept([to(1)] * 10, 0.0)
    mesh.advance(lambda: 1.0)
    link = mesh.links[0, 1]
    assert (link.in_packets, link.out_packets, link.cap_drops, link.waiting) == (10, 2, 8, 0)


def test_lateness_is_measured_from_when_a_packet_was_due() -> None:
    a, b = Region(0), Region(1)
    mesh = mesh_of(a, b, shape=LinkShape(delay_s=0.01))
    a.station.accept([to(1)], 0.0)
    mesh.advance(lambda: 0.0105)
    assert mesh.links[0, 1].late_packets == 0
    a.station.accept([to(1)] * 40, 1.0)
    mesh.advance(lambda: 1.015)
    link = mesh.links[0, 1]
    assert (link.out_packets, link.late_packets) == (41, 40)
    assert link.late_max_s == pytest.approx(0.005)


def test_a_region_that_refuses_packets_stops_nothing() -> None:
    a, b = Region(0), Region(1)
    mesh = mesh_of(a, b)
    b.refuses = True
    a.station.accept([to(1)] * 40, 0.0)
    mesh.advance(lambda: 0.0)
    assert (mesh.links[0, 1].device_drops, mesh.links[0, 1].out_packets) == (40, 0)


def control_of(mesh: Mesh) -> Control:
    return Control(mesh, TraceSchedule({}), lambda: None)


@pytest.mark.parametrize(
    ("request_", "complaint"),
    [
        ({"do": "fly"}, "unknown request"),
        ({"do": "__init__"}, "unknown request"),
        ({}, "'do'"),
        ({"do": "set", "src": "A", "dst": "Z", "changes": {}}, "'Z'"),
        ({"do": "set", "src": "A", "dst": "A", "changes": {}}, "no link A -> A"),
        ({"do": "set", "src": "A", "dst": "B", "changes": {"speed": 1}}, "speed"),
        ({"do": "stats"}, "'src'"),
        ({"do": "cap", "region": "A", "up": {"speed": 1}}, "speed"),
    ],
)
def test_a_wrong_request_changes_nothing(request_: dict[str, object], complaint: str) -> None:
    mesh = mesh_of(Region(0), Region(1), shape=LinkShape(rate_mbps=5))
    assert complaint in control_of(mesh).answer(request_, 0.0)["error"]
    assert all(link.shape == LinkShape(rate_mbps=5) for link in mesh.links.values())


def test_a_star_stands_for_every_region() -> None:
    mesh = mesh_of(Region(0), Region(1), Region(2))
    control = control_of(mesh)
    control.answer({"do": "set", "src": "*", "dst": "B", "changes": {"rate_mbps": 3}}, 0.0)
    control.answer({"do": "cut", "src": "C", "dst": "*"}, 0.0)
    assert {pair for pair, link in mesh.links.items() if link.shape.rate_mbps == 3} == {
        (0, 1), (2, 1),
    }  # fmt: skip
    assert {pair for pair, link in mesh.links.items() if link.is_cut} == {(2, 0), (2, 1)}


def test_lateness_counts_against_the_round_trip() -> None:
    a, b = Region(0), Region(1)
    mesh = mesh_of(a, b, shape=LinkShape(delay_s=0.1))  # 2 % of 0.2 s are 4 ms
    control = control_of(mesh)
    a.station.accept([to(1)] * 10, 0.0, 0.0039)
    mesh.advance(lambda: 0.1039)
    link = mesh.links[0, 1]
    assert (link.late_packets, link.taken_late_packets) == (0, 0)
    assert link.taken_late_sum_s == pytest.approx(0.039)
    control.answer({"do": "set", "src": "B", "dst": "A", "changes": {"delay_s": 0.0}}, 1.0)
    a.station.accept([to(1)] * 10, 1.0, 0.0039)  # now 2 ms, because the way back is shorter
    mesh.advance(lambda: 1.1039)
    assert (link.late_packets, link.taken_late_packets) == (10, 10)
    books = control.answer({"do": "stats", "src": "A"}, 2.0)["links"]["B"]
    assert books["round_trip_s"] == pytest.approx(0.1)
    assert books["taken_late_mean_s"] == pytest.approx(0.0039)
    mesh.reset()
    assert (link.late_packets, link.taken_late_packets, link.taken_late_sum_s) == (0, 0, 0.0)


# ------------------------------------------------------------------ what the kernel counts


def test_stolen_time_is_that_of_the_wanted_cores() -> None:
    text = (
        "cpu  10 0 0 0 0 0 0 60 0 0\ncpu0 1 2 3 4 5 6 7 10 9 10\ncpu1 0 0 0 0 0 0 0 20 0 0\n"
        "cpu10 0 0 0 0 0 0 0 30 0 0\nintr 5 5 5 5 5 5 5 5 5\n"
    )
    assert relay.stolen_ticks(text, {0, 1}) == 30
    assert relay.stolen_ticks(text, {10}) == 30
    assert relay.stolen_ticks("cpu0 1 2 3 4\n", {0}) == 0  # a kernel without the column


def test_the_kernels_own_sum_of_stolen_time_is_that_of_its_cores() -> None:
    text = Path("/proc/stat").read_text()
    cores = [int(line.split()[0][3:]) for line in text.splitlines() if re.match(r"cpu\d", line)]
    total = int(text.splitlines()[0].split()[8])
    assert abs(relay.stolen_ticks(text, cores) - total) <= len(cores)  # each is rounded


def test_the_run_queue_is_the_second_number() -> None:
    assert relay.run_queue_ns("703089 1368383 2\n") == 1368383
    with pytest.raises(ValueError, match="unpack"):
        relay.run_queue_ns("0")
