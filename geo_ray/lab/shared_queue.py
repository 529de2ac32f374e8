"""A region's own line, up or down: one serialiser that all links of the region share. Pure."""

from __future__ import annotations

from collections import deque

from geo_ray.lab.link import Link, Sink
from geo_ray.lab.serialiser import Serialiser
from geo_ray.lab.shapes import CapShape


class SharedQueue:
    """Packets of several links behind one rate; they leave in the order in which they came.

    Args:
        shape: rate and queue.
    """

    __slots__ = ("_line", "_serial", "shape")

    def __init__(self, shape: CapShape) -> None:
        self.shape = shape
        self._line: deque[tuple[float, Link, bytes]] = deque()
        self._serial = Serialiser(shape.rate_mbps, shape.queue_limit_bytes())

    def push(self, link: Link, at_ns: float, packet: bytes) -> None:
        """Take a packet of ``link`` that comes at ``at_ns``, not before the one taken last."""
        done_ns = self._serial.finish_ns(at_ns, len(packet))
        if done_ns is None:
            link.cap_drops += 1
            return
        link.held += 1
        self._line.append((done_ns, link, packet))

    def release(self, now_ns: float, sink: Sink) -> None:
        """Hand on every packet that has left by ``now_ns``, in order."""
        line = self._line
        while line and line[0][0] <= now_ns:
            done_ns, link, packet = line.popleft()
            link.held -= 1
            sink(link, done_ns, packet)

    def next_ns(self) -> float | None:
        """When the next packet has left; None if none waits."""
        return self._line[0][0] if self._line else None

    def is_open(self) -> bool:
        """Whether packets may pass it by: it has no rate, and nothing waits."""
        return self.shape.rate_mbps is None and not self._line

    def reshape(self, now_ns: float, shape: CapShape) -> None:
        """Go on with another rate and queue; what waits leaves at the new rate."""
        self.shape = shape
        factor = self._serial.reshape(now_ns, shape.rate_mbps, shape.queue_limit_bytes())
        if factor != 1.0:
            self._line = deque(
                (now_ns + max(0.0, done_ns - now_ns) * factor, link, packet)
                for done_ns, link, packet in self._line
            )

    def books(self, now_ns: float) -> dict[str, int | float | None]:
        """Rate and queue, by the names of `geo_ray.lab.stats.CapStats`."""
        return {
            "rate_mbps": self.shape.rate_mbps,
            "queue_bytes": self._serial.waiting_bytes(now_ns),
            "queue_peak_bytes": self._serial.peak_bytes(),
        }

    def reset(self) -> None:
        """Begin the peak anew."""
        self._serial.forget_peak()
