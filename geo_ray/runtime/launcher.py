"""Starts the processes of a run, which end with their owner, and holds its keys.

`HandoffRecord` contains what a restarted run actor must know about the running processes.
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

if TYPE_CHECKING:  # these import PyTorch
    from geo_ray.runtime.spec import RunSpec
    from geo_ray.training.membership import AveragerLeader


@dataclass(frozen=True, slots=True)
class RunEndpoints:
    """Present and former regions of the averager, and addresses of servers and bridges.

    Attributes:
        leader: region of the averager.
        standby: region that may take over.
        former_leaders: earlier regions of the averager.
        shards: addresses by region, the primary shard's first.
        bridges: addresses of each bridge, for other regions and for its own.
    """

    leader: AveragerLeader
    standby: str | None
    former_leaders: tuple[str, ...]
    shards: Mapping[str, tuple[Address, ...]]
    bridges: Mapping[str, tuple[Address, Address]]


@dataclass(frozen=True, slots=True)
class GoneRegions:
    """Regions that do not take part.

    Attributes:
        awaited: lost regions that will be brought back.
        away: regions that were asked to leave or are excluded.
        rows: row accounting of regions that took part before.
    """

    awaited: tuple[str, ...] = ()
    away: tuple[str, ...] = ()
    rows: Mapping[str, Mapping[str, object]] = field(default_factory=dict)

    def but_for(self, regions: Collection[str]) -> GoneRegions:
        """Return the same without ``regions``: they do not take part or return by themselves."""
        awaited = tuple(name for name in self.awaited if name not in regions)
        return GoneRegions(awaited, tuple(sorted({*self.away, *regions})), self.rows)


@dataclass(frozen=True, slots=True)
class HandoffRecord:
    """State of a running run, stored by the supervisor for the next run actor: values and handles.

    Attributes:
        spec: the run's specification at its start.
        origin_unix_s: wall-clock time at which the run's clock was 0.
        servers: servers and bridges, by (role, region).
        workers: attempt and handle, by region and rank.
        placed: reserved places by region.
        where: addresses.
        gone: regions that do not take part.
        is_changing: whether a region is joining or leaving.
        uses_upload_server: whether any process uploads parts to the run actor's machine.
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
        """Handles of all processes."""
        return [*self.servers.values(), *(handle for _, handle in self.workers.values())]


@dataclass(frozen=True, slots=True)
class Handoff:
    """State that a supervisor gives to a new run actor.

    Attributes:
        record: last record of the previous run actor; None: it had not begun to train.
        attempts: newest attempt of each worker, by region and rank.
        newest_attempt: newest attempt of bridges and servers.
    """

    record: HandoffRecord | None
    attempts: Mapping[tuple[str, int], int]
    newest_attempt: int


ProcessKind = Literal["averager", "bridge", "holder", "primary", "rank", "shard", "worker"]

_CLASSES: Final[Mapping[ProcessKind, tuple[str, str, int]]] = {
    "averager": ("geo_ray.runtime.serving", "AveragerActor", 8),
    "bridge": ("geo_ray.runtime.bridge_actor", "BridgeActor", 12),
    "holder": ("geo_ray.runtime.serving", "HolderActor", 4),
    "primary": ("geo_ray.runtime.server_actors", "PrimaryActor", 4),
    "rank": ("geo_ray.runtime.group_actor", "GroupRankActor", 1),
    "shard": ("geo_ray.runtime.server_actors", "ShardServerActor", 2),
    "worker": ("geo_ray.runtime.worker_actor", "WorkerActor", 6),
}
"""The actor's module and class, and the number of its concurrent calls."""


def class_of(kind: ProcessKind) -> type:
    """Return the actor class of a kind of process; imports PyTorch."""
    module, name, _ = _CLASSES[kind]
    found: type = getattr(import_module(module), name)
    return found


def load_classes() -> None:
    """Import the classes of all processes, which takes seconds because of PyTorch."""
    for module, _, _ in _CLASSES.values():
        import_module(module)


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """Specification of a process.

    Attributes:
        kind: kind of process.
        arguments: constructor arguments of its actor.
        cpus: requested CPUs.
        gpus: requested GPUs.
        strategy: its placement.
        place: region and rank of a worker, or of a rank of a group; None for others.
        attempt: its attempt.
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
        """Whether places were reserved before the run started."""
        ...

    def attach(self, token: int) -> Handoff | None:
        """Become the run actor.

        Args:
            token: fencing token of the run actor's lease.

        Returns:
            The state left by an earlier run actor; None: processes do not outlive a run actor here.

        Raises:
            LeaseLostError: a later run actor has attached; this applies to all other methods, too.
        """
        ...

    def begin(self, run_id: str, regions: Sequence[str], transport: TransportConfig) -> None:
        """End all existing processes, and create the keys of a new run."""
        ...

    def make(self, specs: Sequence[ProcessSpec]) -> list[Handle]:
        """Start processes without waiting for them."""
        ...

    def place(self, demands: Sequence[RegionDemand], timeout_s: float) -> dict[str, PlacedRegion]:
        """Reserve all of ``demands``, or nothing.

        Raises:
            PlacementError: a region cannot be placed in time; nothing is reserved.
        """
        ...

    def remove(self, placed: Mapping[str, PlacedRegion]) -> None:
        """Release reservations; processes in them end."""
        ...

    def keep_only(self, handles: Sequence[Handle]) -> None:
        """End every process except these."""
        ...

    def clear(self) -> None:
        """End all processes and release all places."""
        ...

    def is_ours(self) -> bool:
        """Return whether this run actor may still end them."""
        ...

    def note(self, record: HandoffRecord) -> None:
        """Store this run actor's state of the run for the next one."""
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
    """A `ProcessLauncher` that owns everything itself: all processes end with this one.

    Args:
        reserved: places that the caller has reserved and will release; None: places are requested
            as needed.
    """

    def __init__(self, reserved: Mapping[str, PlacedRegion] | None = None) -> None:
        self._reserved = reserved
        self._keys: RunKeys | None = None

    @property
    def has_places(self) -> bool:
        """Whether places were reserved for the run."""
        return self._reserved is not None

    def attach(self, token: int) -> Handoff | None:
        """See `ProcessLauncher.attach`: there is no earlier run actor."""
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
        """See `ProcessLauncher.clear`: the owner of the processes has ended them."""

    def is_ours(self) -> bool:
        """Return True: there is no other owner."""
        return True

    def note(self, record: HandoffRecord) -> None:
        """Do nothing: no other run actor could read the record."""

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
            raise InvariantError("keys were requested before a run began")
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
