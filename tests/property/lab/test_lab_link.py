"""The lab's link arithmetic against plain, slow models of the same thing."""

from __future__ import annotations

from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from geo_ray.lab.link import Link, Serialiser, SharedQueue
from geo_ray.lab.plan import CapShape, LinkShape

rates_mbps = st.floats(0.1, 1000.0)
sizes = st.integers(20, 1500)
gaps_s = st.floats(0.0, 0.01)
arrivals = st.lists(st.tuples(gaps_s, sizes), min_size=1, max_size=80)


class SlowQueue:
    """A drop-tail queue moved forward bit by bit: what is in service, what waits."""

    def __init__(self, rate_mbps: float, limit_bytes: int) -> None:
        self.rate_bps, self.limit_bytes = rate_mbps * 1e6, limit_bytes
        self.waiting: deque[list[float]] = deque()  # [number, bits left]
        self.now_s = 0.0
        self.done_s: dict[int, float] = {}

    def advance(self, to_s: float) -> None:
        while self.waiting:
            need_s = self.waiting[0][1] / self.rate_bps
            if self.now_s + need_s > to_s:
                self.waiting[0][1] -= (to_s - self.now_s) * self.rate_bps
                break
            self.now_s += need_s
            self.done_s[int(self.waiting.popleft()[0])] = self.now_s
        self.now_s = to_s

    def take(self, number: int, size_bytes: int) -> None:
        bits = sum(left for _, left in self.waiting)
        if not self.waiting or bits / 8 + size_bytes <= self.limit_bytes + 1e-6:
            self.waiting.append([number, size_bytes * 8.0])


@settings(deadline=None)
@given(arrivals, rates_mbps, st.integers(1500, 20_000))
def test_the_serialiser_is_a_drop_tail_queue(
    packets: list[tuple[float, int]], rate_mbps: float, limit_bytes: int
) -> None:
    fast, slow = Serialiser(rate_mbps, limit_bytes), SlowQueue(rate_mbps, limit_bytes)
    at_s, passed = 0.0, {}
    for number, (gap_s, size) in enumerate(packets):
        at_s += gap_s
        slow.advance(at_s)
        waits = sum(left for _, left in slow.waiting) / 8
        if abs(waits + size - limit_bytes) < 1e-3 or (0 < waits < 1e-3):
            return  # both answers are right to rounding
        done_s = fast.finish_s(at_s, size)
        slow.take(number, size)
        if done_s is not None:
            passed[number] = done_s
        assert fast.waiting_bytes(at_s) <= max(limit_bytes, size) + 1
    slow.advance(1e9)
    assert passed.keys() == slow.done_s.keys()
    for number, done_s in passed.items():
        assert abs(done_s - slow.done_s[number]) < 1e-6


@settings(deadline=None)
@given(
    st.lists(st.tuples(gaps_s, sizes, st.one_of(st.none(), rates_mbps)), min_size=1, max_size=60),
    rates_mbps,
)
def test_a_new_rate_applies_to_queued_packets(
    steps: list[tuple[float, int, float | None]], rate_mbps: float
) -> None:
    link = Link(LinkShape(rate_mbps=rate_mbps, queue_bytes=10**9), 1)
    slow = SlowQueue(rate_mbps, 10**9)
    now_s = 0.0
    for number, (gap_s, size, new_mbps) in enumerate(steps):
        now_s += gap_s
        slow.advance(now_s)
        if new_mbps is not None:
            slow.rate_bps = new_mbps * 1e6
            link.reshape(now_s, LinkShape(rate_mbps=new_mbps, queue_bytes=10**9))
        slow.take(number, size)
        link.push(now_s, bytes(size))
    slow.advance(1e9)
    dues_s = [due_s for due_s, _, _ in link.line]
    assert len(dues_s) == len(steps)
    for due_s, number in zip(dues_s, range(len(steps)), strict=True):
        assert abs(due_s - slow.done_s[number]) < 1e-6 * max(1.0, due_s)


shapes = st.builds(
    LinkShape,
    rate_mbps=st.one_of(st.none(), rates_mbps),
    queue_bytes=st.one_of(st.none(), st.integers(1, 10_000)),
    delay_s=st.floats(0.0, 0.1),
    jitter_s=st.sampled_from([0.0, 0.005]),
    loss=st.sampled_from([0.0, 0.3]),
    burst_start=st.sampled_from([0.0, 0.2]),
    burst_stop=st.sampled_from([0.5, 1.0]),
    flow_rate_mbps=st.one_of(st.none(), rates_mbps),
)
events = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.integers(0, 3)),
        st.tuples(st.just("push"), st.integers(0, 3)),
        st.tuples(st.just("release"), st.none()),
        st.tuples(st.just("reshape"), shapes),
        st.tuples(st.just("cut"), st.none()),
        st.tuples(st.just("heal"), st.none()),
    ),
    max_size=120,
)


def udp(flow: int, number: int, size: int = 200) -> bytes:
    head = b"\x45" + bytes(8) + b"\x11" + bytes(2) + bytes([10, 1, 0, 1, 10, 2, 0, 1])
    return (head + bytes([0, flow, 0, 9]) + number.to_bytes(4, "big")).ljust(size, b"\0")


@settings(deadline=None)
@given(shapes, events, st.lists(gaps_s, min_size=120, max_size=120))
def test_books_balance_and_order_holds_whatever_happens(
    shape: LinkShape, script: list[tuple[str, object]], gaps: list[float]
) -> None:
    link, now_s, got = Link(shape, 5), 0.0, []
    offered = 0
    for number, ((what, value), gap_s) in enumerate(zip(script, gaps, strict=False)):
        now_s += gap_s
        if what == "push":
            offered += 1
            link.in_packets += 1  # as the station does
            link.push(now_s, udp(int(str(value)), number))
        elif what == "release":
            while link.release(now_s, got.append):
                pass
        elif what == "reshape":
            assert isinstance(value, LinkShape)
            link.reshape(now_s, value)
        elif what == "cut":
            link.cut(now_s)
            assert link.waiting == 0
        else:
            link.heal()
        drops = link.lost + link.queue_drops + link.cap_drops + link.cut_drops
        assert link.in_packets == offered == link.out_packets + drops + link.waiting
        assert link.out_packets == len(got)
    while link.release(1e9, got.append):
        pass
    assert link.waiting == 0 and link.next_s() is None
    for flow in range(4):
        numbers = [int.from_bytes(p[24:28], "big") for p in got if p[21] == flow]
        assert numbers == sorted(numbers)


@settings(deadline=None)
@given(arrivals, rates_mbps, st.floats(0.0, 0.2))
def test_nothing_arrives_early_and_the_rate_is_kept(
    packets: list[tuple[float, int]], rate_mbps: float, delay_s: float
) -> None:
    link = Link(LinkShape(rate_mbps=rate_mbps, delay_s=delay_s, queue_bytes=10**9), 1)
    at_s, came_s = 0.0, []
    for gap_s, size in packets:
        at_s += gap_s
        came_s.append(at_s)
        link.push(at_s, bytes(size))
    last_s = 0.0
    for came, (due_s, _, packet) in zip(came_s, link.line, strict=True):
        cost_s = len(packet) * 8e-6 / rate_mbps
        assert due_s >= came + delay_s + cost_s - 1e-9
        assert due_s >= last_s + cost_s - 1e-9
        last_s = due_s


def all_of(link: Link) -> list[tuple[float, bytes]]:
    """Everything that is in a link, with when it is due."""
    found: list[tuple[float, bytes]] = []
    link.hand_over(1e9, lambda _, due_s, packet: found.append((due_s, packet)))
    return found


@settings(deadline=None)
@given(st.lists(st.tuples(gaps_s, st.integers(0, 2), sizes), min_size=1, max_size=80), rates_mbps)
def test_a_flow_is_held_back_by_its_own_packets_only(
    packets: list[tuple[float, int, int]], rate_mbps: float
) -> None:
    shape = LinkShape(flow_rate_mbps=rate_mbps, queue_bytes=10**9)
    together, alone = Link(shape, 1), [Link(shape, 1) for _ in range(3)]
    at_s = 0.0
    for number, (gap_s, flow, size) in enumerate(packets):
        at_s += gap_s
        packet = udp(flow, number, max(size, 28))
        together.push(at_s, packet)
        alone[flow].push(at_s, packet)
    assert sorted(all_of(together)) == sorted(entry for link in alone for entry in all_of(link))


@settings(deadline=None)
@given(
    st.lists(st.tuples(gaps_s, st.integers(0, 2), sizes), min_size=1, max_size=80),
    rates_mbps,
    st.integers(1500, 10_000),
)
def test_a_shared_line_keeps_its_rate_over_all_links(
    packets: list[tuple[float, int, int]], rate_mbps: float, limit_bytes: int
) -> None:
    links = [Link(LinkShape(), 1) for _ in range(3)]
    queue, left = SharedQueue(CapShape(rate_mbps, limit_bytes)), []
    at_s = 0.0
    for gap_s, which, size in packets:
        at_s += gap_s
        links[which].in_packets += 1
        queue.push(links[which], at_s, bytes(size))
        assert sum(link.held + link.cap_drops for link in links) <= len(packets)
    queue.release(1e9, lambda link, done_s, packet: left.append((done_s, len(packet))))
    assert len(left) + sum(link.cap_drops for link in links) == len(packets)
    assert all(link.held == 0 for link in links)
    last_s = 0.0
    for done_s, size in left:
        assert done_s >= last_s + size * 8e-6 / rate_mbps - 1e-9
        last_s = done_s
