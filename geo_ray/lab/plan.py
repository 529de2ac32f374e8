"""The relay's plan of a topology: link and line properties, rate traces, stations.

Plain values, passed as JSON from one process to another. Standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from random import Random
from typing import Any, Final

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


@dataclass(frozen=True, slots=True)
class Trace:
    """Either points, or a range from which a rate is drawn at fixed intervals.

    Attributes:
        points: (seconds since the start, Mbit/s), ascending from 0; empty for a drawn trace.
        repeat_s: time after which the points are repeated; None keeps the last rate.
        low_mbps: least drawn rate.
        high_mbps: largest drawn rate.
        every_s: time between two draws.
        seed: of the draws.
    """

    points: Sequence[Sequence[float]] = ()
    repeat_s: float | None = None
    low_mbps: float = 0.0
    high_mbps: float = 0.0
    every_s: float = 0.0
    seed: int = 0

    def changes(self) -> Iterator[tuple[float, float]]:
        """Yield (seconds since the start, Mbit/s) in order of time, perhaps without end."""
        if self.points:
            yield from self._played()
        else:
            random, turn = Random(self.seed), 0
            while True:
                yield turn * self.every_s, random.uniform(self.low_mbps, self.high_mbps)
                turn += 1

    def _played(self) -> Iterator[tuple[float, float]]:
        begins_s = 0.0
        while True:
            for time_s, rate_mbps in self.points:
                yield begins_s + time_s, rate_mbps
            if self.repeat_s is None:
                return
            begins_s += self.repeat_s


DEVICE: Final = "wan0"
QUANTUM_US: Final = 500
FIRST_NET: Final = 1  # 10.1.0.0/16 is the first region's


@dataclass(frozen=True)
class StationPlan:
    """A region.

    Attributes:
        name: of the region.
        namespace: name of its network namespace.
        up: its own line towards the others.
        down: its own line from the others.
        congestion_control: of its TCP.
        up_trace: how the line's rate changes.
        down_trace: the same for the other direction.
    """

    name: str
    namespace: str
    up: CapShape
    down: CapShape
    congestion_control: str
    up_trace: Trace | None = None
    down_trace: Trace | None = None


@dataclass(frozen=True)
class LinkPlan:
    """An ordered pair, by the regions' indices."""

    src: int
    dst: int
    shape: LinkShape
    seed: int
    trace: Trace | None = None


@dataclass(frozen=True)
class LabPlan:
    """A whole lab; the order of stations gives their addresses."""

    lab_id: str
    mtu: int
    stations: tuple[StationPlan, ...]
    links: tuple[LinkPlan, ...]
    quantum_us: int = QUANTUM_US
    metadata: dict[str, str] = field(default_factory=dict)


def ipv4_of(index: int) -> str:
    """Return the IPv4 address of the region with this index."""
    return f"10.{FIRST_NET + index}.0.1"


def ipv6_of(index: int) -> str:
    """Return the IPv6 address of the region with this index."""
    return f"fd67:6562:6c61:{FIRST_NET + index:x}::1"


def prefixes_of(index: int) -> tuple[bytes, bytes]:
    """Return the first bytes of a region's addresses: 10.x/16 and fd67:6562:6c61:x/64."""
    number = FIRST_NET + index
    return bytes([10, number]), bytes.fromhex("fd6765626c61") + number.to_bytes(2, "big")


def to_json(plan: LabPlan) -> str:
    """Return a plan as JSON."""
    return json.dumps(asdict(plan), allow_nan=False)


def from_json(text: str) -> LabPlan:
    """Read what `to_json` wrote."""
    tree: dict[str, Any] = json.loads(text)
    return LabPlan(
        lab_id=tree["lab_id"],
        mtu=tree["mtu"],
        stations=tuple(
            StationPlan(
                name=station["name"],
                namespace=station["namespace"],
                up=CapShape(**station["up"]),
                down=CapShape(**station["down"]),
                congestion_control=station["congestion_control"],
                up_trace=_trace(station["up_trace"]),
                down_trace=_trace(station["down_trace"]),
            )
            for station in tree["stations"]
        ),
        links=tuple(
            LinkPlan(
                src=link["src"],
                dst=link["dst"],
                shape=LinkShape(**link["shape"]),
                seed=link["seed"],
                trace=_trace(link["trace"]),
            )
            for link in tree["links"]
        ),
        quantum_us=tree["quantum_us"],
        metadata=tree["metadata"],
    )


def _trace(tree: dict[str, Any] | None) -> Trace | None:
    return None if tree is None else Trace(**tree)
