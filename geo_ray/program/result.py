"""The result of a program and its cost: machine hours and cross-region gigabytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from geo_ray.base.errors import ProgramInvalidError
from geo_ray.base.notebooks import html_view
from geo_ray.base.text import bytes_text, counted, duration_text
from geo_ray.prices.price import INTERNET
from geo_ray.prices.price_book import PriceBook
from geo_ray.program.calls import FRAME_BYTES, EdgeTraffic
from geo_ray.program.graph import Program


@dataclass(frozen=True, slots=True, repr=False)
class ProgramResult:
    """A program that has ended.

    Attributes:
        program: the program.
        on: threads, processes, ray or virtual.
        values: results of each ``run``, by instance.
        seconds: from the first start to the last return, of virtual time on the virtual clock.
        traffic: over each edge.
        restarts: number of restarts by instance, without zeros.
    """

    program: Program
    on: str
    values: Mapping[str, Any]
    seconds: float
    traffic: tuple[EdgeTraffic, ...]
    restarts: Mapping[str, int]

    def plain(self) -> dict[str, Any]:
        """Return values for JSON, as far as results allow it."""
        return {
            "program": self.program.name,
            "on": self.on,
            "seconds": self.seconds,
            "values": dict(self.values),
            "restarts": dict(self.restarts),
            "traffic": [
                {
                    "source": each.edge.source,
                    "target": each.edge.target,
                    "source_region": each.edge.source_region,
                    "target_region": each.edge.target_region,
                    "calls": each.calls,
                    "request_bytes": each.request_bytes,
                    "answer_bytes": each.answer_bytes,
                }
                for each in self.traffic
            ],
        }

    def __repr__(self) -> str:
        return (
            f"<ProgramResult {self.program.name}: {duration_text(self.seconds)} ({self.on}), "
            f"{counted(len(self.values), 'instance')}>"
        )

    def _repr_html_(self) -> str:
        rows = [
            (
                each.edge.source,
                each.edge.target,
                f"{each.calls:,}",
                bytes_text(each.request_bytes),
                bytes_text(each.answer_bytes),
            )
            for each in self.traffic
        ]
        return html_view(repr(self)[1:-1], ("from", "to", "calls", "there", "back"), rows)

    def __str__(self) -> str:
        lines = [f"program {self.program.name}: {duration_text(self.seconds)} ({self.on})"]
        for name, value in sorted(self.values.items()):
            lines.append(f"  {name} returned {value!r:.200}")
        for name, count in sorted(self.restarts.items()):
            lines.append(f"  {name} was restarted, {counted(count, 'time')}")
        for each in self.traffic:
            edge = each.edge
            way = f"   [{edge.source_region} => {edge.target_region}]" if edge.crosses else ""
            there, back = bytes_text(each.request_bytes), bytes_text(each.answer_bytes)
            lines.append(
                f"  {edge.source} -> {edge.target}: {counted(each.calls, 'call')}, {there} there, "
                f"{back} back{way}"
            )
        return "\n".join(lines)


_GB: Final = 1e9
_HOUR_S: Final = 3600.0
_UNPRICED: Final = "not priced"


@dataclass(frozen=True, slots=True)
class ProgramCost:
    """Cost of a program with the seconds and bytes of a trial run.

    Attributes:
        seconds: its duration.
        machines_usd: by node, of all its instances.
        egress_usd: by pair of regions, source first.
        planned_usd: prices by the planner, by node.
        cross_region_bytes: by pair of regions, headers included.
        unpriced: nodes without a machine type.
    """

    seconds: float
    machines_usd: Mapping[str, float]
    egress_usd: Mapping[tuple[str, str], float]
    planned_usd: Mapping[str, float]
    cross_region_bytes: Mapping[tuple[str, str], int]
    unpriced: tuple[str, ...] = ()

    @property
    def usd(self) -> float:
        """Total cost."""
        parts = (self.machines_usd, self.egress_usd, self.planned_usd)
        return sum(sum(part.values()) for part in parts)

    def plain(self) -> dict[str, Any]:
        """Return JSON values."""
        pairs = {f"{a} => {b}": usd for (a, b), usd in self.egress_usd.items()}
        sizes = {f"{a} => {b}": size for (a, b), size in self.cross_region_bytes.items()}
        return {
            "usd": self.usd,
            "seconds": self.seconds,
            "machines_usd": dict(self.machines_usd),
            "egress_usd": pairs,
            "planned_usd": dict(self.planned_usd),
            "cross_region_bytes": sizes,
            "unpriced": list(self.unpriced),
        }

    def __str__(self) -> str:
        lines = [f"{self.usd:.6f} USD in {duration_text(self.seconds)}"]
        for name, node_usd in (*self.machines_usd.items(), *self.planned_usd.items()):
            lines.append(f"  {node_usd:12.6f}  {name}")
        for (a, b), size_bytes in self.cross_region_bytes.items():
            usd = self.egress_usd.get((a, b)) if size_bytes else 0.0
            price = f"{_UNPRICED:>12}" if usd is None else f"{usd:12.6f}"
            why = "; the program has no places" if usd is None else ""
            lines.append(f"  {price}  {bytes_text(size_bytes)} from {a} to {b}{why}")
        lines += [f"  {_UNPRICED:>12}  {name}: it names no machine" for name in self.unpriced]
        return "\n".join(lines)


def cost_of(
    result: ProgramResult, book: PriceBook, planned_usd: Mapping[str, float] | None = None
) -> ProgramCost:
    """Price a program that has ended, on any clock.

    Args:
        result: its seconds and bytes.
        book: of prices.
        planned_usd: by node, prices from the planner.

    Raises:
        ProgramInvalidError: a price is needed in a region without a place.
        PriceUnknownError: the book does not have a price.
    """
    program, hours = result.program, result.seconds / _HOUR_S
    machines: dict[str, float] = {}
    for group in program.groups:
        if group.machine is None:
            continue
        cloud, _, kind = group.machine.partition(":")
        _, region = _place(program, group.region)
        usd = book.usd_of_hours(book.instance(cloud, region, kind), hours) * group.replicas
        machines |= {node.name: usd for node in group.nodes}
    cross_region = cross_region_bytes(result)
    egress: dict[tuple[str, str], float] = {}
    for (src, dst), size_bytes in cross_region.items():
        if program.places and size_bytes:
            (cloud, here), (other, there) = _place(program, src), _place(program, dst)
            record = book.egress(cloud, here, there if cloud == other else INTERNET)
            egress[src, dst] = book.usd_of_volume(record, size_bytes / _GB)
    planned = dict(planned_usd or {})
    unpriced = tuple(
        node.name
        for group in program.groups
        if group.machine is None
        for node in group.nodes
        if node.name not in planned
    )
    return ProgramCost(result.seconds, machines, egress, planned, cross_region, unpriced)


def cross_region_bytes(result: ProgramResult) -> dict[tuple[str, str], int]:
    """Return the bytes by pair of regions, headers included."""
    found: dict[tuple[str, str], int] = {}
    for each in result.traffic:
        if each.edge.crosses:
            there = (each.edge.source_region, each.edge.target_region)
            heads = each.calls * FRAME_BYTES
            for way, size_bytes in ((there, each.request_bytes), (there[::-1], each.answer_bytes)):
                found[way] = found.get(way, 0) + size_bytes + heads
    return found


def _place(program: Program, region: str) -> tuple[str, str]:
    if region not in program.places:
        raise ProgramInvalidError(
            f"region {region} has no place, so it cannot be priced",
            fix=f"Give the program places, say places={{{region!r}: 'aws:eu-central-1'}}.",
        )
    cloud, _, name = program.places[region].partition(":")
    return cloud, name
