"""One direction of a link between two regions: flow caps, queue, loss and delay line. Pure.

A packet passes its flow's cap if there is one, then the link's serialiser, where losses are drawn:
a lost packet has used the link. Other packets wait in the delay line until they are due; order is
kept. A new rate only stretches the remaining time of queued packets. `SharedQueue` is a region's
own line, shared by all links of the region. Serialisers store no packets: waiting bytes are the
time until the line is free, times the rate.

`push` and `release` run once per packet and batch of the relay, so they are written for speed.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Final, TypeAlias

from geo_ray.lab.plan import CapShape, LinkShape
from geo_ray.lab.stats import LEAST_S


class Serialiser:
    """A rate with a drop-tail queue; times are seconds of any one clock.

    Args:
        rate_mbps: 10^6 bit/s of whole IP packets; None is unlimited.
        limit_bytes: bytes that may wait. A packet that finds the line free always passes.
    """

    __slots__ = ("_limit_s", "_s_per_byte", "free_s", "peak_s")

    def __init__(self, rate_mbps: float | None, limit_bytes: int) -> None:
        self._s_per_byte = 8e-6 / rate_mbps if rate_mbps else 0.0
        self._limit_s = limit_bytes * self._s_per_byte
        self.free_s = 0.0
        self.peak_s = 0.0

    def finish_s(self, at_s: float, size_bytes: int) -> float | None:
        """Take a packet that comes at ``at_s``, not before the one taken last.

        Returns:
            When its last bit has left; None if the queue was full and the packet is dropped.
        """
        cost_s = size_bytes * self._s_per_byte
        if self.free_s <= at_s:
            self.free_s = done_s = at_s + cost_s
            return done_s
        waiting_s = self.free_s - at_s + cost_s
        if waiting_s > self._limit_s and cost_s:
            return None
        if waiting_s > self.peak_s:
            self.peak_s = waiting_s
        self.free_s = done_s = self.free_s + cost_s
        return done_s

    def waiting_bytes(self, now_s: float) -> int:
        """Return the bytes that have come and not left by ``now_s``."""
        return self._bytes_of(self.free_s - now_s)

    def peak_bytes(self) -> int:
        """Return the most bytes that waited since `forget_peak`, at the present rate."""
        return self._bytes_of(self.peak_s)

    def forget_peak(self) -> None:
        """Reset `peak_bytes`."""
        self.peak_s = 0.0

    def reshape(self, now_s: float, rate_mbps: float | None, limit_bytes: int) -> float:
        """Change rate and limit; waiting packets leave at the new rate.

        Returns:
            The factor by which the remaining time of every waiting packet changes.
        """
        old = self._s_per_byte
        self._s_per_byte = 8e-6 / rate_mbps if rate_mbps else 0.0
        self._limit_s = limit_bytes * self._s_per_byte
        factor = self._s_per_byte / old if old else 1.0
        self.peak_s *= factor
        if self.free_s > now_s:
            self.free_s = now_s + (self.free_s - now_s) * factor
        return factor

    def empty(self, now_s: float) -> None:
        """Forget waiting packets."""
        self.free_s = min(self.free_s, now_s)

    def _bytes_of(self, span_s: float) -> int:
        return round(max(0.0, span_s) / self._s_per_byte) if self._s_per_byte else 0


class Loss:
    """Decides which packets are lost: independent loss, and bursts after Gilbert and Elliott.

    The bursts are a chain of two states. In the bad one every packet is lost; the chain moves
    before each packet, so the share lost to bursts is ``start / (start + stop)`` and a burst is
    ``1 / stop`` packets long on average.

    Args:
        random: random numbers of this object only.
        loss: probability of independent loss.
        start: probability to become bad.
        stop: probability to become good again.
    """

    __slots__ = ("_bad", "_loss", "_next", "_start", "_stop")

    def __init__(self, random: Random, loss: float, start: float, stop: float) -> None:
        self._next = random.random
        self._loss, self._start, self._stop = loss, start, stop
        self._bad = False

    def hits(self) -> bool:
        """Return whether the next packet is lost."""
        if self._start:
            turn = self._stop if self._bad else self._start
            if self._next() < turn:
                self._bad = not self._bad
            if self._bad:
                return True
        return self._next() < self._loss


class Jitter:
    """Gaussian deviations of the delay, correlated over a limited time.

    Since order is kept, independent deviations would raise the mean delay: every packet would wait
    for the slowest before it. Correlated deviations change slowly compared with the spacing of
    packets.

    Args:
        random: random numbers of this object only.
        deviation_s: standard deviation.
        memory_s: time constant of the correlation; 0 draws each packet's deviation afresh.
    """

    __slots__ = ("_at_s", "_deviation_s", "_memory_s", "_random", "_value")

    def __init__(self, random: Random, deviation_s: float, memory_s: float) -> None:
        self._random = random
        self._deviation_s = deviation_s
        self._memory_s = memory_s
        self._value = 0.0
        self._at_s: float | None = None

    def offset_s(self, at_s: float) -> float:
        """Return the deviation of a packet that leaves at ``at_s``."""
        retained = 0.0
        if self._memory_s and self._at_s is not None:
            # after a cut or a higher rate a packet may leave earlier than the last one asked for
            retained = math.exp(min(0.0, self._at_s - at_s) / self._memory_s)
        fresh = math.sqrt(1.0 - retained * retained)
        self._value = retained * self._value + fresh * self._random.gauss(0.0, 1.0)
        self._at_s = at_s
        return self._value * self._deviation_s


_TIDY_AT: Final = 1024
_TCP, _UDP, _SCTP = 6, 17, 132
_WITH_PORTS: Final = frozenset((_TCP, _UDP, _SCTP))


def flow_key(packet: bytes) -> bytes:
    """Return protocol, addresses and, if they can be read, ports of an IP packet."""
    if packet[0] >> 4 == 6:
        if packet[6] in _WITH_PORTS:
            return packet[6:7] + packet[8:44]
        return packet[6:7] + packet[8:40]
    head_bytes = (packet[0] & 15) * 4
    whole = not (packet[6] & 0x3F or packet[7])  # a fragment's ports may be in another packet
    if whole and packet[9] in _WITH_PORTS:
        return packet[9:10] + packet[12:20] + packet[head_bytes : head_bytes + 4]
    return packet[9:10] + packet[12:20]


class FlowCaps:
    """A rate and a queue for each flow; packets that have passed are merged by time.

    Args:
        rate_mbps: rate of every flow.
        limit_bytes: queue of every flow.
    """

    __slots__ = ("_flows", "_limit_bytes", "_number", "_ready", "_tidy_at", "rate_mbps")

    def __init__(self, rate_mbps: float, limit_bytes: int) -> None:
        self.rate_mbps = rate_mbps
        self._limit_bytes = limit_bytes
        self._flows: dict[bytes, Serialiser] = {}
        self._ready: list[tuple[float, int, bytes]] = []
        self._number = 0
        self._tidy_at = _TIDY_AT

    def __len__(self) -> int:
        return len(self._ready)

    def push(self, at_s: float, packet: bytes) -> bool:
        """Take a packet; return False if its flow's queue is full."""
        key = flow_key(packet)
        flow = self._flows.get(key)
        if flow is None:
            if len(self._flows) >= self._tidy_at:
                self._tidy(at_s)
            flow = self._flows[key] = Serialiser(self.rate_mbps, self._limit_bytes)
        done_s = flow.finish_s(at_s, len(packet))
        if done_s is None:
            return False
        self._number += 1
        heapq.heappush(self._ready, (done_s, self._number, packet))
        return True

    def next_s(self) -> float | None:
        """Return when the next packet will have passed; None without packets."""
        return self._ready[0][0] if self._ready else None

    def pop(self) -> tuple[float, bytes]:
        """Return the packet of `next_s` and its time."""
        done_s, _, packet = heapq.heappop(self._ready)
        return done_s, packet

    def reshape(self, now_s: float, rate_mbps: float, limit_bytes: int) -> None:
        """Change rate and limit; all flows have the same, so the order stays."""
        factor = self.rate_mbps / rate_mbps
        self.rate_mbps, self._limit_bytes = rate_mbps, limit_bytes
        for flow in self._flows.values():
            flow.reshape(now_s, rate_mbps, limit_bytes)
        self._ready = [
            (now_s + (done_s - now_s) * factor if done_s > now_s else done_s, number, packet)
            for done_s, number, packet in self._ready
        ]

    def _tidy(self, now_s: float) -> None:
        """Forget idle flows; double the limit only if most are busy."""
        self._flows = {key: flow for key, flow in self._flows.items() if flow.free_s > now_s}
        self._tidy_at = max(_TIDY_AT, 2 * len(self._flows))


MAX_RELEASE: Final = 32  # packets per reading of the clock

Device: TypeAlias = Callable[[bytes], object]
"""Gives a packet to a region; raises OSError if the region does not take it."""

Sink: TypeAlias = "Callable[[Link, float, bytes], None]"
"""Takes (link, time when it was due, packet) at the link's end."""


class Link:
    """The state and counters of one direction.

    Packets are counted: ``in == out + lost + every kind of drop + waiting``.

    Args:
        shape: properties of the link.
        seed: seed of loss and jitter.
    """

    __slots__ = (
        "_delay_s", "_flows", "_jitter", "_last_due_s", "_loss", "_random", "_serial", "cap_drops",
        "cut_drops", "device_drops", "has_flows", "held", "in_bytes", "in_packets", "is_cut",
        "late_after_s", "late_max_s", "late_packets", "late_sum_s", "line", "lost", "out_bytes",
        "out_packets", "push", "queue_drops", "round_trip_s", "shape", "taken_late_packets",
        "taken_late_sum_s",
    )  # fmt: skip

    def __init__(self, shape: LinkShape, seed: int) -> None:
        self.is_cut = False
        self.round_trip_s = 0.0  # there and back, without queues; the mesh knows it
        self.late_after_s = LEAST_S
        self.late_sum_s = self.late_max_s = 0.0
        self.held = 0  # packets of this link in the queues of its regions' own lines
        self.line: deque[tuple[float, float, bytes]] = deque()  # (due, left the queue, packet)
        self._random = Random(seed)
        self._serial = Serialiser(None, 0)
        self._flows: FlowCaps | None = None
        self.has_flows = False  # packets wait elsewhere than in `line` too
        self._loss: Loss | None = None
        self._jitter: Jitter | None = None
        self._last_due_s = 0.0
        self.push: Callable[[float, bytes], None] = self._forward
        self.shape = LinkShape()
        self.reset()
        self.reshape(0.0, shape)

    # ------------------------------------------------------------------ packets

    # `push(at_s, packet)` takes a packet that comes at a time not before the one taken last. It is
    # one of the three methods that follow, so that a plain link asks nothing per packet.

    def _forward(self, at_s: float, packet: bytes) -> None:
        done_s = self._serial.finish_s(at_s, len(packet))
        if done_s is None:
            self.queue_drops += 1
            return
        if self._loss is not None and self._loss.hits():
            self.lost += 1
            return
        due_s = done_s + self._delay_s
        if self._jitter is not None:
            due_s = max(done_s, due_s + self._jitter.offset_s(done_s))
        if due_s < self._last_due_s:
            due_s = self._last_due_s
        self._last_due_s = due_s
        self.line.append((due_s, done_s, packet))

    def _pass_flow(self, at_s: float, packet: bytes) -> None:
        if self._flows is None or not self._flows.push(at_s, packet):
            self.cap_drops += 1

    def _refuse(self, at_s: float, packet: bytes) -> None:
        self.cut_drops += 1

    def release(self, now_s: float, device: Device) -> bool:
        """Give due packets to a region, in order; at most `MAX_RELEASE`.

        Returns:
            Whether any packet was due.
        """
        if self._flows is not None:
            self._merge_flows(now_s)
        line = self.line
        if not line or line[0][0] > now_s:
            return False
        count = num_bytes = late_packets = 0
        late_before_s, due_sum_s, first_due_s = now_s - self.late_after_s, 0.0, line[0][0]
        while line and line[0][0] <= now_s and count < MAX_RELEASE:
            due_s, _, packet = line.popleft()
            try:
                device(packet)
            except OSError:
                self.device_drops += 1
                continue
            count += 1
            num_bytes += len(packet)
            due_sum_s += due_s
            if due_s < late_before_s:
                late_packets += 1
        self.out_packets += count
        self.out_bytes += num_bytes
        self.late_packets += late_packets
        self.late_sum_s += count * now_s - due_sum_s
        if now_s - first_due_s > self.late_max_s:
            self.late_max_s = now_s - first_due_s
        return True

    def hand_over(self, now_s: float, sink: Sink) -> None:
        """Hand all due packets on to the next queue behind the link, in order."""
        if self._flows is not None:
            self._merge_flows(now_s)
        line = self.line
        while line and line[0][0] <= now_s:
            due_s, _, packet = line.popleft()
            sink(self, due_s, packet)

    def delivered(self, late_s: float, size_bytes: int) -> None:
        """Note that a packet has reached its region, so long after it was due."""
        self.out_packets += 1
        self.out_bytes += size_bytes
        self.late_sum_s += late_s
        if late_s > self.late_after_s:
            self.late_packets += 1
        if late_s > self.late_max_s:
            self.late_max_s = late_s

    def taken_late(self, late_s: float) -> None:
        """Note that a packet was taken in a round that began so late; it came after the last."""
        self.taken_late_sum_s += late_s
        if late_s > self.late_after_s:
            self.taken_late_packets += 1

    def next_s(self) -> float | None:
        """Return when there is something to do next; None if nothing waits."""
        times_s = [self.line[0][0]] if self.line else []
        if self._flows is not None and (ready_s := self._flows.next_s()) is not None:
            times_s.append(ready_s)
        return min(times_s, default=None)

    def _merge_flows(self, now_s: float) -> None:
        flows = self._flows
        while flows and (ready_s := flows.next_s()) is not None and ready_s <= now_s:
            self._forward(*flows.pop())

    # ------------------------------------------------------------------ changes

    def reshape(self, now_s: float, shape: LinkShape) -> None:
        """Change the link's shape; waiting packets leave at the new rate, those under way stay."""
        old, self.shape = self.shape, shape
        factor = self._serial.reshape(now_s, shape.rate_mbps, shape.queue_limit_bytes())
        if factor != 1.0:
            self._stretch(now_s, factor)
        self._delay_s = shape.delay_s
        self._reshape_flows(now_s)
        self._choose_push()
        losses = (shape.loss, shape.burst_start, shape.burst_stop)
        if losses != (old.loss, old.burst_start, old.burst_stop):
            is_lossy = shape.loss > 0 or shape.burst_start > 0
            self._loss = Loss(self._random, *losses) if is_lossy else None
        jitters = (shape.jitter_s, shape.jitter_memory_s)
        if jitters != (old.jitter_s, old.jitter_memory_s):
            self._jitter = Jitter(self._random, *jitters) if shape.jitter_s else None

    def cut(self, now_s: float) -> None:
        """Drop all packets that wait, are under way or come later, until `heal`."""
        self.cut_drops += self.waiting - self.held
        self.line.clear()
        if self._flows is not None:
            self._flows = FlowCaps(self._flows.rate_mbps, self.shape.flow_limit_bytes())
        self._serial.empty(now_s)
        self.is_cut = True
        self._choose_push()

    def heal(self) -> None:
        """Carry packets again after `cut`."""
        self.is_cut = False
        self._choose_push()

    def _choose_push(self) -> None:
        self.has_flows = self._flows is not None
        if self.is_cut:
            self.push = self._refuse
        else:
            self.push = self._forward if self._flows is None else self._pass_flow

    def _reshape_flows(self, now_s: float) -> None:
        rate_mbps, limit_bytes = self.shape.flow_rate_mbps, self.shape.flow_limit_bytes()
        if rate_mbps is None:
            flows, self._flows = self._flows, None
            while flows:
                _, packet = flows.pop()
                self._forward(now_s, packet)
        elif self._flows is None:
            self._flows = FlowCaps(rate_mbps, limit_bytes)
        else:
            self._flows.reshape(now_s, rate_mbps, limit_bytes)

    def _stretch(self, now_s: float, factor: float) -> None:
        stretched: deque[tuple[float, float, bytes]] = deque()
        last_s = 0.0
        for due_s, done_s, packet in self.line:
            if done_s > now_s:
                new_s = now_s + (done_s - now_s) * factor
                due_s, done_s = max(last_s, due_s - done_s + new_s), new_s
            last_s = due_s
            stretched.append((due_s, done_s, packet))
        self.line = stretched
        self._last_due_s = last_s

    # ------------------------------------------------------------------ counters

    @property
    def waiting(self) -> int:
        """Packets in any queue or under way."""
        return self.held + len(self.line) + (0 if self._flows is None else len(self._flows))

    def queue_bytes(self, now_s: float) -> int:
        """Bytes in the link's queue, lost ones included."""
        return self._serial.waiting_bytes(now_s)

    def reset(self) -> None:
        """Reset the counters; waiting packets count as arrived after the reset."""
        self.in_packets = self.waiting
        self.out_packets = self.in_bytes = self.out_bytes = 0
        self.lost = self.queue_drops = self.cap_drops = self.cut_drops = self.device_drops = 0
        self.late_packets = self.taken_late_packets = 0
        self.late_sum_s = self.late_max_s = self.taken_late_sum_s = 0.0
        self._serial.forget_peak()

    def books(self, now_s: float) -> dict[str, int | float | bool]:
        """Return all counters, by the names of `geo_ray.lab.stats.LinkStats`."""
        return {
            "in_packets": self.in_packets,
            "in_bytes": self.in_bytes,
            "out_packets": self.out_packets,
            "out_bytes": self.out_bytes,
            "lost": self.lost,
            "queue_drops": self.queue_drops,
            "cap_drops": self.cap_drops,
            "cut_drops": self.cut_drops,
            "device_drops": self.device_drops,
            "late_packets": self.late_packets,
            "late_mean_s": self.late_sum_s / max(1, self.out_packets),
            "late_max_s": self.late_max_s,
            "round_trip_s": self.round_trip_s,
            "taken_late_packets": self.taken_late_packets,
            "taken_late_mean_s": self.taken_late_sum_s / max(1, self.in_packets),
            "queue_bytes": self.queue_bytes(now_s),
            "queue_peak_bytes": self._serial.peak_bytes(),
            "waiting": self.waiting,
            "is_cut": self.is_cut,
        }


class SharedQueue:
    """A queue of packets of several links behind one rate; they leave in order of arrival.

    Args:
        shape: rate and queue.
    """

    __slots__ = ("_line", "_serial", "is_open", "shape")

    def __init__(self, shape: CapShape) -> None:
        self.shape = shape
        self.is_open = shape.rate_mbps is None  # packets may bypass the queue
        self._line: deque[tuple[float, Link, bytes]] = deque()
        self._serial = Serialiser(shape.rate_mbps, shape.queue_limit_bytes())

    def push(self, link: Link, at_s: float, packet: bytes) -> None:
        """Take a packet of ``link`` that comes at ``at_s``, not before the one taken last."""
        done_s = self._serial.finish_s(at_s, len(packet))
        if done_s is None:
            link.cap_drops += 1
            return
        link.held += 1
        self._line.append((done_s, link, packet))

    def release(self, now_s: float, sink: Sink) -> None:
        """Hand on all packets that have left by ``now_s``, in order."""
        line = self._line
        while line and line[0][0] <= now_s:
            done_s, link, packet = line.popleft()
            link.held -= 1
            sink(link, done_s, packet)
        self.is_open = self.shape.rate_mbps is None and not line

    def next_s(self) -> float | None:
        """Return when the next packet has left; None if none waits."""
        return self._line[0][0] if self._line else None

    def reshape(self, now_s: float, shape: CapShape) -> None:
        """Change rate and queue; waiting packets leave at the new rate."""
        self.shape = shape
        self.is_open = shape.rate_mbps is None and not self._line
        factor = self._serial.reshape(now_s, shape.rate_mbps, shape.queue_limit_bytes())
        if factor != 1.0:
            self._line = deque(
                (now_s + max(0.0, done_s - now_s) * factor, link, packet)
                for done_s, link, packet in self._line
            )

    def books(self, now_s: float) -> dict[str, int | float | None]:
        """Return rate and queue, by the names of `geo_ray.lab.stats.CapStats`."""
        return {
            "rate_mbps": self.shape.rate_mbps,
            "queue_bytes": self._serial.waiting_bytes(now_s),
            "queue_peak_bytes": self._serial.peak_bytes(),
        }

    def reset(self) -> None:
        """Reset the peak."""
        self._serial.forget_peak()
