"""A cap on each flow of a link, as a window or a provider's policy limits a single stream."""

from __future__ import annotations

import heapq
from typing import Final

from geo_ray.lab.relay.serialiser import Serialiser

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
