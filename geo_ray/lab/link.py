"""One direction between two regions: queue, serialiser, loss, delay line. Pure: times are given.

A packet that comes passes its flow's cap if there is one, then the link's serialiser. Whether it is
lost is decided there: a lost packet has used the link. The others wait in the delay line until they
are due. Order is kept. Since everything in the line has already come, a new rate only stretches the
time that the waiting packets still need.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from random import Random
from typing import Final, TypeAlias

from geo_ray.lab.chance import Jitter, Loss
from geo_ray.lab.flows import FlowCaps
from geo_ray.lab.serialiser import Serialiser
from geo_ray.lab.shapes import LinkShape

LATE_NS: Final = 1_000_000

Sink: TypeAlias = "Callable[[Link, float, bytes], None]"
"""Takes a packet at the link's end: the link, when it was due, the packet."""


class Link:
    """State and books of one direction.

    Packets are counted: ``in == out + lost + every kind of drop + waiting``.

    Args:
        src: index of the sending region.
        dst: index of the receiving region.
        shape: what the link is like.
        seed: of loss and jitter.
    """

    __slots__ = (
        "_delay_ns",
        "_flows",
        "_jitter",
        "_last_due_ns",
        "_loss",
        "_random",
        "_serial",
        "cap_drops",
        "cut_drops",
        "device_drops",
        "dst",
        "held",
        "in_bytes",
        "in_packets",
        "is_cut",
        "late_max_ns",
        "late_packets",
        "late_sum_ns",
        "line",
        "lost",
        "out_bytes",
        "out_packets",
        "queue_drops",
        "shape",
        "src",
    )

    def __init__(self, src: int, dst: int, shape: LinkShape, seed: int) -> None:
        self.src, self.dst = src, dst
        self.is_cut = False
        self.late_sum_ns: float = 0.0
        self.late_max_ns: float = 0.0
        self.held = 0  # packets of this link in the queues of its regions' own lines
        self.line: deque[tuple[float, float, bytes]] = deque()  # (due, left the queue, packet)
        self._random = Random(seed)
        self._serial = Serialiser(None, 0)
        self._flows: FlowCaps | None = None
        self._loss: Loss | None = None
        self._jitter: Jitter | None = None
        self._delay_ns = 0.0
        self._last_due_ns = 0.0
        self.shape = LinkShape()
        self.reset()
        self.reshape(0.0, shape)

    # ------------------------------------------------------------------ packets

    def push(self, at_ns: float, packet: bytes) -> None:
        """Take a packet that comes at ``at_ns``, not before the one taken last."""
        if self.is_cut:
            self.cut_drops += 1
        elif self._flows is None:
            self._carry(at_ns, packet)
        elif not self._flows.push(at_ns, packet):
            self.cap_drops += 1

    def _carry(self, at_ns: float, packet: bytes) -> None:
        done_ns = self._serial.finish_ns(at_ns, len(packet))
        if done_ns is None:
            self.queue_drops += 1
            return
        if self._loss is not None and self._loss.hits():
            self.lost += 1
            return
        due_ns = done_ns + self._delay_ns
        if self._jitter is not None:
            due_ns = max(done_ns, due_ns + self._jitter.offset_ns(done_ns))
        if due_ns < self._last_due_ns:
            due_ns = self._last_due_ns
        self._last_due_ns = due_ns
        self.line.append((due_ns, done_ns, packet))

    def release(self, now_ns: float, sink: Sink) -> None:
        """Hand every packet that is due to ``sink``, in order."""
        flows = self._flows
        if flows is not None:
            while (ready_ns := flows.next_ns()) is not None and ready_ns <= now_ns:
                self._carry(*flows.pop())
        line = self.line
        while line and line[0][0] <= now_ns:
            due_ns, _, packet = line.popleft()
            sink(self, due_ns, packet)

    def next_ns(self) -> float | None:
        """When `release` has something to do next; None if nothing waits."""
        times_ns = [self.line[0][0]] if self.line else []
        if self._flows is not None and (ready_ns := self._flows.next_ns()) is not None:
            times_ns.append(ready_ns)
        return min(times_ns, default=None)

    def delivered(self, late_ns: float, size_bytes: int) -> None:
        """Note that a packet has reached its region, so long after it was due."""
        self.out_packets += 1
        self.out_bytes += size_bytes
        self.late_sum_ns += late_ns
        if late_ns > LATE_NS:
            self.late_packets += 1
        if late_ns > self.late_max_ns:
            self.late_max_ns = late_ns

    # ------------------------------------------------------------------ changes

    def reshape(self, now_ns: float, shape: LinkShape) -> None:
        """Become another link; what waits leaves at the new rate, what is under way stays."""
        old, self.shape = self.shape, shape
        factor = self._serial.reshape(now_ns, shape.rate_mbps, shape.queue_limit_bytes())
        if factor != 1.0:
            self._stretch(now_ns, factor)
        self._delay_ns = shape.delay_s * 1e9
        self._reshape_flows(now_ns)
        if (old.loss, old.burst_start, old.burst_stop) != (
            shape.loss, shape.burst_start, shape.burst_stop
        ):  # fmt: skip
            lossy = shape.loss or shape.burst_start
            self._loss = (
                Loss(self._random, shape.loss, shape.burst_start, shape.burst_stop)
                if lossy
                else None
            )
        if (old.jitter_s, old.jitter_memory_s) != (shape.jitter_s, shape.jitter_memory_s):
            self._jitter = (
                Jitter(self._random, shape.jitter_s, shape.jitter_memory_s)
                if shape.jitter_s
                else None
            )

    def cut(self, now_ns: float) -> None:
        """Lose everything that waits or is under way, and all that comes, until `heal`."""
        self.cut_drops += self.waiting - self.held
        self.line.clear()
        if self._flows is not None:
            self._flows = FlowCaps(self._flows.rate_mbps, self.shape.flow_limit_bytes())
        self._serial.empty(now_ns)
        self.is_cut = True

    def heal(self) -> None:
        """Carry packets again."""
        self.is_cut = False

    def _reshape_flows(self, now_ns: float) -> None:
        rate_mbps, limit_bytes = self.shape.flow_rate_mbps, self.shape.flow_limit_bytes()
        if rate_mbps is None:
            flows, self._flows = self._flows, None
            while flows:
                _, packet = flows.pop()
                self._carry(now_ns, packet)
        elif self._flows is None:
            self._flows = FlowCaps(rate_mbps, limit_bytes)
        else:
            self._flows.reshape(now_ns, rate_mbps, limit_bytes)

    def _stretch(self, now_ns: float, factor: float) -> None:
        stretched: deque[tuple[float, float, bytes]] = deque()
        last_ns = 0.0
        for due_ns, done_ns, packet in self.line:
            if done_ns > now_ns:
                new_ns = now_ns + (done_ns - now_ns) * factor
                due_ns, done_ns = max(last_ns, due_ns - done_ns + new_ns), new_ns
            last_ns = due_ns
            stretched.append((due_ns, done_ns, packet))
        self.line = stretched
        self._last_due_ns = last_ns

    # ------------------------------------------------------------------ books

    @property
    def waiting(self) -> int:
        """Packets in any queue or under way."""
        return self.held + len(self.line) + (0 if self._flows is None else len(self._flows))

    def queue_bytes(self, now_ns: float) -> int:
        """Bytes in the link's queue, lost ones included."""
        return self._serial.waiting_bytes(now_ns)

    def reset(self) -> None:
        """Begin the books anew; what waits counts as having come."""
        self.in_packets = self.waiting
        self.in_bytes = sum(len(packet) for _, _, packet in self.line)
        self.out_packets = self.out_bytes = 0
        self.lost = self.queue_drops = self.cap_drops = self.cut_drops = self.device_drops = 0
        self.late_packets = 0
        self.late_sum_ns = self.late_max_ns = 0.0
        self._serial.forget_peak()

    def books(self, now_ns: float) -> dict[str, int | float | bool]:
        """All counters, by the names of `geo_ray.lab.stats.LinkStats`."""
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
            "late_mean_s": self.late_sum_ns / 1e9 / max(1, self.out_packets),
            "late_max_s": self.late_max_ns / 1e9,
            "queue_bytes": self.queue_bytes(now_ns),
            "queue_peak_bytes": self._serial.peak_bytes(),
            "waiting": self.waiting,
            "is_cut": self.is_cut,
        }
