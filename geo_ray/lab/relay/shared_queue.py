"""A region's own line, up or down: one serialiser that all links of the region share. Pure."""

from __future__ import annotations

from collections import deque

from geo_ray.lab.relay.link import Link, Sink
from geo_ray.lab.relay.serialiser import Serialiser
from geo_ray.lab.relay.shapes import CapShape


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
        """Return rate and queue, by the names of `geo_ray.lab.relay.stats.CapStats`."""
        return {
            "rate_mbps": self.shape.rate_mbps,
            "queue_bytes": self._serial.waiting_bytes(now_s),
            "queue_peak_bytes": self._serial.peak_bytes(),
        }

    def reset(self) -> None:
        """Reset the peak."""
        self._serial.forget_peak()
