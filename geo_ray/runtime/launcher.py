"""Starts the processes of a run, which end with their owner, and holds its keys.

`HandoffRecord` is what a restarted run actor must know about running processes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from geo_ray.base.errors import InvariantError
from geo_ray.ray_cluster.calls import Handle
from geo_ray.ray_cluster.demand import RegionDemand
from geo_ray.ray_cluster.keys import BridgeKeys, Introduction, RunKeys
from geo_ray.ray_cluster.placement import PlacedRegion, place, remove
from geo_ray.transport.config import TransportConfig
from geo_ray.transport.security.process_keys import SignedCertificate
from geo_ray.transport.wire.sockets import Address

if TYPE_CHECKING:  # they import PyTorch
    from geo_ray.runtime.spec import RunSpec
    from geo_ray.training.membership import AveragerLeader


@dataclass(frozen=True, slots=True)
class RunEndpoints:
    """Where the averager lives and lived, and where servers and bridges listen.

    Attributes:
        leader: of the averager.
        standby: who may take over from there.
        former_leaders: where it lived before.
        shards: by region, the primary shard's first.
        bridges: where other regions, and the own one, reach each bridge.
    """

    leader: AveragerLeader
    standby: str | None
    former_leaders: tuple[str, ...]
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
class HandoffRecord:
    """Handoff record of a running run, kept by the supervisor: plain values and handles.

    Attributes:
        spec: what the run's processes were given at its start.
        origin_unix_s: time of day at which the run's clock was 0.
        servers: servers and bridges, by (role, region).
        workers: attempt and handle, by region and rank.
        placed: reserved places by region.
        where: where all that listens.
        gone: regions that take no part.
        is_changing: whether a region is on its way in or out.
        uses_upload_server: whether any process sends its parts to the run actor's machine.
    """

    spec: RunSpec
    origin_unix_s: float
    servers: Mapping[tuple[str, str], Handle]
    workers: Mapping[tuple[str, int], tuple[int, Handle]]
    placed: Mapping[str, PlacedRegion]
    where: RunEndpoints
    gone: GoneRegions = GoneRegions()
    is_changing: bool = False
    uses_upload_server: bool = False

    @property
    def handles(self) -> list[Handle]:
        """Of all processes."""
        return [*self.servers.values(), *(handle for _, handle in self.workers.values())]


@dataclass(frozen=True, slots=True)
class Handoff:
    """What a supervisor has for a run actor that comes.

    Attributes:
        record: what the run actor before has noted last; None: it had not begun to train.
        attempts: the newest incarnation that was made of each worker, by region and rank.
        newest_attempt: of bridges and servers.
    """

    record: HandoffRecord | None
    attempts: Mapping[tuple[str, int], int]
    newest_attempt: int


ProcessKind = Literal["bridge", "primary", "shard", "worker"]

_CLASSES: Final[Mapping[ProcessKind, tuple[str, str, int]]] = {
    "bridge": ("geo_ray.runtime.bridge_actor", "BridgeActor", 12),
    "primary": ("geo_ray.runtime.server_actors", "PrimaryActor", 4),
    "shard": ("geo_ray.runtime.server_actors", "ShardServerActor", 2),
    "worker": ("geo_ray.runtime.worker_actor", "WorkerActor", 6),
}
"""The actor's module and class, and how many calls of it may run at a time."""


def class_of(kind: ProcessKind) -> type:
    """Return the class of such a process, which imports PyTorch."""
    module, name, _ = _CLASSES[kind]
    found: type = getattr(import_module(module), name)
    return found


def load_classes() -> None:
    """Import the classes of all processes, which takes seconds: they import PyTorch."""
    for module, _, _ in _CLASSES.values():
        import_module(module)


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """A process that is wanted.

    Attributes:
        kind: what it is.
        arguments: what its actor is made with.
        cpus: that it asks for.
        gpus: that it asks for.
        strategy: its place.
        place: region and number, of a worker; others have none.
        attempt: its incarnation.
    """

    kind: ProcessKind
    arguments: tuple[Any, ...]
    cpus: float
    gpus: float
    strategy: PlacementGroupSchedulingStrategy
    place: tuple[str, int] | None
    attempt: int


class ProcessLauncher(Protocol):
    """Owns the processes, places and keys of a run; refuses commands of superseded run actors."""

    @property
    def has_places(self) -> bool:
        """Whether places were reserved for the run before."""
        ...

    def attach(self, token: int) -> Handoff | None:
        """Become the run actor.

        Args:
            token: fencing token: epoch of the run actor's lease.

        Returns:
            What an earlier run actor has left; None: nothing outlives a run actor here.

        Raises:
            LeaseLostError: a later run actor is there, as for all other methods.
        """
        ...

    def begin(self, run_id: str, regions: Sequence[str], transport: TransportConfig) -> None:
        """End whatever there is, and make the keys of a run that begins."""
        ...

    def make(self, specs: Sequence[ProcessSpec]) -> list[Handle]:
        """Begin to start processes; nothing is waited for."""
        ...

    def place(self, demands: Sequence[RegionDemand], timeout_s: float) -> dict[str, PlacedRegion]:
        """Reserve everything that ``demands`` ask for, or nothing.

        Raises:
            PlacementError: a region cannot be placed in time; nothing stays reserved.
        """
        ...

    def remove(self, placed: Mapping[str, PlacedRegion]) -> None:
        """Give reservations back; processes in them end."""
        ...

    def keep_only(self, handles: Sequence[Handle]) -> None:
        """End every process but these."""
        ...

    def clear(self) -> None:
        """End all processes and give all places back."""
        ...

    def is_ours(self) -> bool:
        """Whether this run actor may still end them."""
        ...

    def note(self, record: HandoffRecord) -> None:
        """Keep for the next run actor what this one knows of the run."""
        ...

    def for_bridge(self, region: str, introduction: Introduction) -> BridgeKeys:
        """See `RunKeys.for_bridge`."""
        ...

    def for_server(self, region: str, introduction: Introduction) -> bytes:
        """See `RunKeys.for_server`."""
        ...

    def sign(self, region: str, request_pem: bytes) -> SignedCertificate | None:
        """See `RunKeys.sign`."""
        ...


class OwnProcesses:
    """A `ProcessLauncher` that owns everything itself: all ends with this process.

    Args:
        reserved: places that somebody has reserved for the run, and gives back; None: it asks for
            places as they are needed.
    """

    def __init__(self, reserved: Mapping[str, PlacedRegion] | None = None) -> None:
        self._reserved = reserved
        self._keys: RunKeys | None = None

    @property
    def has_places(self) -> bool:
        """Whether places were reserved for the run."""
        return self._reserved is not None

    def attach(self, token: int) -> Handoff | None:
        """See `ProcessLauncher.attach`: no earlier run actor has left anything."""
        return None

    def begin(self, run_id: str, regions: Sequence[str], transport: TransportConfig) -> None:
        """See `ProcessLauncher.begin`."""
        self._keys = RunKeys(run_id, regions, transport)

    def make(self, specs: Sequence[ProcessSpec]) -> list[Handle]:
        """See `ProcessLauncher.make`."""
        return [_started(spec) for spec in specs]

    def place(self, demands: Sequence[RegionDemand], timeout_s: float) -> dict[str, PlacedRegion]:
        """See `ProcessLauncher.place`."""
        return place(demands, timeout_s) if self._reserved is None else dict(self._reserved)

    def remove(self, placed: Mapping[str, PlacedRegion]) -> None:
        """See `ProcessLauncher.remove`."""
        if self._reserved is None:
            remove(placed)

    def keep_only(self, handles: Sequence[Handle]) -> None:
        """See `ProcessLauncher.keep_only`: there are no others."""

    def clear(self) -> None:
        """See `ProcessLauncher.clear`: whoever has made processes here has ended them."""

    def is_ours(self) -> bool:
        """They are nobody else's."""
        return True

    def note(self, record: HandoffRecord) -> None:
        """No other run actor could read it."""

    def for_bridge(self, region: str, introduction: Introduction) -> BridgeKeys:
        """See `RunKeys.for_bridge`."""
        return self._held_keys.for_bridge(region, introduction)

    def for_server(self, region: str, introduction: Introduction) -> bytes:
        """See `RunKeys.for_server`."""
        return self._held_keys.for_server(region, introduction)

    def sign(self, region: str, request_pem: bytes) -> SignedCertificate | None:
        """See `RunKeys.sign`."""
        return self._held_keys.sign(region, request_pem)

    @property
    def _held_keys(self) -> RunKeys:
        if self._keys is None:
            raise InvariantError("keys were asked for before a run began")
        return self._keys


def _started(spec: ProcessSpec) -> Handle:
    kind, threads = class_of(spec.kind), _CLASSES[spec.kind][2]
    return (
        ray.remote(kind)
        .options(
            num_cpus=spec.cpus,
            num_gpus=spec.gpus,
            scheduling_strategy=spec.strategy,
            max_concurrency=threads,
            max_restarts=0,
        )
        .remote(*spec.arguments)
    )
