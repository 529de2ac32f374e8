"""The relay's plan of a topology: plain values, passed as JSON from one process to another."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from geo_ray.lab.relay.shapes import CapShape, LinkShape
from geo_ray.lab.relay.traces import Trace

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
