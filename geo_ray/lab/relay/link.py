"""One direction between two regions: queue, serialiser, loss, delay line. Pure: times are given.

A packet passes its flow's cap if there is one, then the link's serialiser, where it is decided
whether it is lost: a lost packet has used the link. Other packets wait in the delay line until they
are due. Order is kept. A new rate only stretches the time that waiting packets still need, because
all packets in the line have arrived already.

`push` and `release` run once per packet and batch of the relay, so they are laid out for speed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from random import Random
from typing import Final, TypeAlias

from geo_ray.lab.acceptance import LEAST_S
from geo_ray.lab.relay.chance import Jitter, Loss
from geo_ray.lab.relay.flows import FlowCaps
from geo_ray.lab.relay.serialiser import Serialiser
from geo_ray.lab.relay.shapes import LinkShape

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
        self.push: Callable[[float, bytes], None] = self._carry
        self.shape = LinkShape()
        self.reset()
        self.reshape(0.0, shape)

    # ------------------------------------------------------------------ packets

    # `push(at_s, packet)` takes a packet that comes at a time not before the one taken last. It is
    # one of the three methods that follow, so that a plain link asks nothing per packet.

    def _carry(self, at_s: float, packet: bytes) -> None:
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
            self._carry(*flows.pop())

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
            self.push = self._carry if self._flows is None else self._pass_flow

    def _reshape_flows(self, now_s: float) -> None:
        rate_mbps, limit_bytes = self.shape.flow_rate_mbps, self.shape.flow_limit_bytes()
        if rate_mbps is None:
            flows, self._flows = self._flows, None
            while flows:
                _, packet = flows.pop()
                self._carry(now_s, packet)
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
        """Return all counters, by the names of `geo_ray.lab.relay.stats.LinkStats`."""
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
