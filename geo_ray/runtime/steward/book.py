"""What a driver must know of a run that goes on: plain values and handles, kept by the steward."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from geo_ray.runtime.actors.spec import RunSpec
from geo_ray.runtime.cluster.placement import PlacedRegion
from geo_ray.runtime.control.calls import Handle
from geo_ray.training.averager.home import AveragerHome
from geo_ray.transport.wire.sockets import Address


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Where the averager lives and lived, and where servers and bridges listen.

    Attributes:
        home: of the averager.
        standby: who may take over from there.
        former_homes: where it lived before.
        shards: by region, the primary shard's first.
        bridges: where other regions, and the own one, reach each bridge.
    """

    home: AveragerHome
    standby: str | None
    former_homes: tuple[str, ...]
    shards: Mapping[str, tuple[Address, ...]]
    bridges: Mapping[str, tuple[Address, Address]]


@dataclass(frozen=True, slots=True)
class GoneRegions:
    """What is known of regions that take no part.

    Attributes:
        awaited: lost ones that will be brought back.
        away: those that were asked to leave, or are not to be there.
        rows: the books of rows of those that were there before, by region.
    """

    awaited: tuple[str, ...] = ()
    away: tuple[str, ...] = ()
    rows: Mapping[str, Mapping[str, object]] = field(default_factory=dict)

    def but_for(self, regions: Collection[str]) -> GoneRegions:
        """The same with regions that take no part and are not to come back by themselves."""
        awaited = tuple(name for name in self.awaited if name not in regions)
        return GoneRegions(awaited, tuple(sorted({*self.away, *regions})), self.rows)


@dataclass(frozen=True, slots=True)
class RunBook:
    """See the module's docstring.

    Attributes:
        spec: what the run's processes were given at its start.
        origin_unix_s: time of day at which the run's clock was 0.
        servers: servers and bridges, by (role, region).
        workers: epoch and handle, by region and rank.
        placed: reserved places by region.
        where: where all that listens.
        gone: regions that take no part.
        is_changing: whether a region is on its way in or out.
        uses_desk: whether any process sends its parts to the driver's machine.
    """

    spec: RunSpec
    origin_unix_s: float
    servers: Mapping[tuple[str, str], Handle]
    workers: Mapping[tuple[str, int], tuple[int, Handle]]
    placed: Mapping[str, PlacedRegion]
    where: Whereabouts
    gone: GoneRegions = GoneRegions()
    is_changing: bool = False
    uses_desk: bool = False

    @property
    def handles(self) -> list[Handle]:
        """Of all processes."""
        return [*self.servers.values(), *(handle for _, handle in self.workers.values())]


@dataclass(frozen=True, slots=True)
class Kept:
    """What a steward has for a driver that comes.

    Attributes:
        book: what the driver before has noted last; None: it has not come so far.
        epochs: the newest incarnation that was made of each worker, by region and rank.
        newest_epoch: of bridges and servers.
    """

    book: RunBook | None
    epochs: Mapping[tuple[str, int], int]
    newest_epoch: int
