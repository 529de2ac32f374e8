"""The properties of a link's direction and of a region's own line: plain values for the relay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MIN_QUEUE_BYTES: Final = 64 * 1024
_CAP_QUEUE_S: Final = 0.1  # default queue of a region's own line


@dataclass(frozen=True, slots=True)
class LinkShape:
    """One direction between two regions; `geo_ray.lab.topology.LinkConfig` describes the fields."""

    rate_mbps: float | None = None
    queue_bytes: int | None = None
    delay_s: float = 0.0
    jitter_s: float = 0.0
    jitter_memory_s: float = 0.2
    loss: float = 0.0
    burst_start: float = 0.0
    burst_stop: float = 1.0
    flow_rate_mbps: float | None = None

    def queue_limit_bytes(self) -> int:
        """The bytes that may wait before the link drops: as set, or a round trip's worth."""
        return self._limit_bytes(self.rate_mbps)

    def flow_limit_bytes(self) -> int:
        """The bytes that may wait in the queue of one flow."""
        return self._limit_bytes(self.flow_rate_mbps)

    def _limit_bytes(self, rate_mbps: float | None) -> int:
        if self.queue_bytes is not None:
            return self.queue_bytes
        return _worth_bytes(rate_mbps, 2 * self.delay_s)


@dataclass(frozen=True, slots=True)
class CapShape:
    """A region's own line in one direction, shared by all its links."""

    rate_mbps: float | None = None
    queue_bytes: int | None = None

    def queue_limit_bytes(self) -> int:
        """The bytes that may wait before the line drops: as set, or 100 ms worth."""
        if self.queue_bytes is not None:
            return self.queue_bytes
        return _worth_bytes(self.rate_mbps, _CAP_QUEUE_S)


def _worth_bytes(rate_mbps: float | None, span_s: float) -> int:
    return max(MIN_QUEUE_BYTES, int((rate_mbps or 0.0) * 125_000 * span_s))
