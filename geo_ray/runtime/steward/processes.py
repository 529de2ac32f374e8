"""Makes the processes of a run: whoever makes them owns them, and they end with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from geo_ray.runtime.actors.bridge_actor import BridgeActor
from geo_ray.runtime.actors.server_actors import PrimaryActor, ShardServerActor
from geo_ray.runtime.actors.worker_actor import WorkerActor
from geo_ray.runtime.cluster.demand import RegionDemand
from geo_ray.runtime.cluster.placement import PlacedRegion, place, remove
from geo_ray.runtime.control.calls import Handle

ProcessKind = Literal["bridge", "primary", "shard", "worker"]

_CLASSES: Final[Mapping[ProcessKind, tuple[type, int]]] = {
    "bridge": (BridgeActor, 12),
    "primary": (PrimaryActor, 4),
    "shard": (ShardServerActor, 2),
    "worker": (WorkerActor, 6),
}
"""The actor, and how many calls of it may run at a time."""


@dataclass(frozen=True, slots=True)
class ProcessOrder:
    """A process that is wanted.

    Attributes:
        kind: what it is.
        arguments: what its actor is made with.
        cpus: that it asks for.
        gpus: that it asks for.
        strategy: its place.
        place: region and number, of a worker; others have none.
        epoch: its incarnation.
    """

    kind: ProcessKind
    arguments: tuple[Any, ...]
    cpus: float
    gpus: float
    strategy: PlacementGroupSchedulingStrategy
    place: tuple[str, int] | None
    epoch: int


class ProcessMaker(Protocol):
    """Makes processes and reserves their places; whoever does so owns both."""

    def make(self, orders: Sequence[ProcessOrder]) -> list[Handle]:
        """Begin to start processes; nothing is waited for."""
        ...

    def place(self, demands: Sequence[RegionDemand], timeout_s: float) -> dict[str, PlacedRegion]:
        """Reserve everything that ``demands`` ask for, or nothing."""
        ...

    def remove(self, placed: Mapping[str, PlacedRegion]) -> None:
        """Give reservations back; processes in them end."""
        ...

    def is_ours(self) -> bool:
        """Whether this driver may still end them."""
        ...

    def note(self, book: Any) -> None:
        """Keep for the next driver what this one knows of the run."""
        ...


class OwnProcesses:
    """A `ProcessMaker` that owns them itself: they end with this process.

    Args:
        reserved: places that somebody has reserved for the run, and gives back; None: it asks for
            places as they are needed.
    """

    def __init__(self, reserved: Mapping[str, PlacedRegion] | None = None) -> None:
        self._reserved = reserved

    def make(self, orders: Sequence[ProcessOrder]) -> list[Handle]:
        """See `ProcessMaker.make`."""
        return [_made(order) for order in orders]

    def place(self, demands: Sequence[RegionDemand], timeout_s: float) -> dict[str, PlacedRegion]:
        """See `ProcessMaker.place`.

        Raises:
            PlacementError: if a region cannot be placed in time; nothing stays reserved.
        """
        return place(demands, timeout_s) if self._reserved is None else dict(self._reserved)

    def remove(self, placed: Mapping[str, PlacedRegion]) -> None:
        """See `ProcessMaker.remove`."""
        if self._reserved is None:
            remove(placed)

    def is_ours(self) -> bool:
        """They are nobody else's."""
        return True

    def note(self, book: Any) -> None:
        """There is nobody whom it would be kept for."""


def _made(order: ProcessOrder) -> Handle:
    kind, threads = _CLASSES[order.kind]
    return (
        ray.remote(kind)
        .options(
            num_cpus=order.cpus,
            num_gpus=order.gpus,
            scheduling_strategy=order.strategy,
            max_concurrency=threads,
            max_restarts=0,
        )
        .remote(*order.arguments)
    )
