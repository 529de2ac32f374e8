"""Autoscaler state persisted between iterations.

The clouds list the machines. The state holds only what no list has: requested launches, why a
machine was launched and at which price, costs by region and reason, pending terminations, and
statistics of pools. It is written before any action.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final, Literal

from pydantic import BaseModel, TypeAdapter, ValidationError

from geo_ray.base.errors import RunDirectoryError
from geo_ray.base.states import StateTable
from geo_ray.cloud.provider import LaunchRequest, Machine, Pool

_BETWEEN: Final = "\t"


@dataclass(slots=True)
class SpendRow:
    """Cost of one region and reason.

    Attributes:
        machine_h: machine hours.
        quoted_usd: cost at the prices at launch.
        paid_usd: cost at the prices over time.
    """

    machine_h: float = 0.0
    quoted_usd: float = 0.0
    paid_usd: float = 0.0


@dataclass(slots=True)
class SpendLedger:
    """Ledger of all costs.

    Attributes:
        rows: by region and reason.
    """

    rows: dict[str, SpendRow] = field(default_factory=dict)

    def add(
        self, region: str, reason: str, hours: float, quoted_usd: float, paid_usd: float
    ) -> None:
        """Add machine hours."""
        row = self.rows.setdefault(f"{region}{_BETWEEN}{reason}", SpendRow())
        row.machine_h += hours
        row.quoted_usd += quoted_usd
        row.paid_usd += paid_usd

    def move(self, region: str, reason: str, to_reason: str, row: SpendRow) -> None:
        """Move recorded costs to another reason."""
        mine = self.rows.setdefault(f"{region}{_BETWEEN}{reason}", SpendRow())
        mine.machine_h = max(0.0, mine.machine_h - row.machine_h)
        mine.quoted_usd = max(0.0, mine.quoted_usd - row.quoted_usd)
        mine.paid_usd = max(0.0, mine.paid_usd - row.paid_usd)
        self.add(region, to_reason, row.machine_h, row.quoted_usd, row.paid_usd)

    def row(self, region: str, reason: str) -> SpendRow:
        """Return one row."""
        return self.rows.get(f"{region}{_BETWEEN}{reason}", SpendRow())

    def by_region_and_reason(self) -> list[tuple[str, str, SpendRow]]:
        """Return all rows, sorted."""
        found = []
        for key in sorted(self.rows):
            region, _, reason = key.partition(_BETWEEN)
            found.append((region, reason, self.rows[key]))
        return found

    @property
    def paid_usd(self) -> float:
        """Total cost."""
        return sum(row.paid_usd for row in self.rows.values())

    @property
    def quoted_usd(self) -> float:
        """Total cost at the prices at launch."""
        return sum(row.quoted_usd for row in self.rows.values())


_TAKEN_IN: Final = "it existed when the journal was unreadable"
_MOST_BYTES: Final = 64 * 1024 * 1024
_FIX: Final = "End all machines of the cluster, then remove the journal from its directory."


@dataclass(slots=True)
class PendingLaunch:
    """A launch request, some of whose machines have not been listed yet: they are `REQUESTED`.

    Attributes:
        request: the request to the cloud.
        reason: why the machines are launched.
        usd_per_hour: quoted price of one machine when the launch was decided.
        since_unix_s: when it was decided.
        sent_unix_s: when the request was last sent.
        failed: machines that the cloud will not start.
        ended: ids of machines that were listed, or accepted, and have ended since.
        sends: number of times the request was sent.
    """

    request: LaunchRequest
    reason: str
    usd_per_hour: float
    since_unix_s: float
    sent_unix_s: float
    failed: int = 0
    ended: tuple[str, ...] = ()
    sends: int = 1


class InstanceState(StrEnum):
    """The state of a machine of the cluster; `INSTANCE` lists the events that change it."""

    REQUESTED = "requested"
    BOOTING = "booting"
    READY = "ready"
    DISCONNECTED = "disconnected"
    LEAVING = "leaving"
    DRAINING = "draining"
    RELEASING = "releasing"
    TERMINATING = "terminating"
    TERMINATED = "terminated"


InstanceEvent = Literal[
    "list",
    "join",
    "disconnect",
    "leave",
    "drain",
    "release",
    "terminate",
    "keep booting",
    "keep ready",
    "keep disconnected",
    "end",
]
_S = InstanceState
_STAYING: Final = (_S.BOOTING, _S.READY, _S.DISCONNECTED)
_GOING: Final = (_S.LEAVING, _S.DRAINING, _S.RELEASING, _S.TERMINATING)
_KEEP: Final[dict[InstanceState, InstanceEvent]] = {
    _S.BOOTING: "keep booting",
    _S.READY: "keep ready",
    _S.DISCONNECTED: "keep disconnected",
}


def _moves() -> dict[tuple[InstanceState, InstanceEvent], InstanceState]:
    found: dict[tuple[InstanceState, InstanceEvent], InstanceState] = {
        (_S.REQUESTED, "list"): _S.BOOTING,
        (_S.REQUESTED, "terminate"): _S.TERMINATING,
        (_S.REQUESTED, "end"): _S.TERMINATED,
        (_S.BOOTING, "join"): _S.READY,
        (_S.READY, "disconnect"): _S.DISCONNECTED,
        (_S.DISCONNECTED, "join"): _S.READY,
    }
    for state in (*_STAYING, _S.LEAVING):
        found[state, "leave"] = _S.LEAVING
        found[state, "drain"] = _S.DRAINING
        found[state, "release"] = _S.RELEASING
    for state in (_S.BOOTING, _S.DISCONNECTED, _S.LEAVING):
        found[state, "terminate"] = _S.TERMINATING
    found[_S.DRAINING, "drain"] = _S.DRAINING
    for state in (_S.LEAVING, _S.RELEASING):
        found |= {(state, event): retained for retained, event in _KEEP.items()}
    for state in _GOING:  # its node may still join or leave
        found[state, "join"] = found[state, "disconnect"] = state
    found |= {(state, "end"): _S.TERMINATED for state in (*_STAYING, *_GOING)}
    return found


INSTANCE: Final[StateTable[InstanceState, InstanceEvent]] = StateTable(
    name="Machine of a cluster",
    states={
        _S.REQUESTED: "A launch request asks for it; no cloud lists it yet.",
        _S.BOOTING: "It is listed; its Ray node has never joined.",
        _S.READY: "Its Ray node is part of the cluster.",
        _S.DISCONNECTED: "Its Ray node has joined before and is missing.",
        _S.LEAVING: "It must leave once a replacement computes; it may still be kept.",
        _S.DRAINING: "Its node starts nothing new; it ends when idle, at the latest at a deadline.",
        _S.RELEASING: "It ends if nothing runs there, and is retained if something does.",
        _S.TERMINATING: "It ends now, whatever runs there.",
        _S.TERMINATED: "It has ended, and is no longer recorded.",
    },
    moves=_moves(),
)


@dataclass(slots=True)
class PendingTermination:
    """Why an instance leaves, and by when.

    Attributes:
        reason: why it leaves.
        deadline_unix_s: when it is ended at the latest; None while it waits for a replacement.
        token: fencing token of the autoscaler that drains it.
        successor: id of the machine that replaces it, where no plan sets the number of machines;
            None: none yet.
    """

    reason: str
    deadline_unix_s: float | None = None
    token: int = 0
    successor: str | None = None


@dataclass(slots=True)
class ManagedInstance:
    """A machine that the autoscaler has launched.

    Attributes:
        machine: the machine as last listed, with the pool that it counts to, which has no zone if
            the target names none.
        reason: why it was launched.
        usd_per_hour: quoted price at launch.
        paid_unix_s: end of the time whose cost is in the ledger.
        observed_unix_s: when it was last listed, or its region did not answer.
        node_unix_s: when `node` last changed.
        state: the state of the instance.
        node: `BOOTING`, `READY` or `DISCONNECTED`: the state that it has, or would have if it did
            not leave.
        termination: why and by when it leaves; set while it does.
        starting: cost before its node first joined.
        idle_unix_s: start of its idle time, without a plan or without a matching region and role
            in the target; None: it is needed.
        is_awaited: whether pending demand needed it in the last iteration, without a plan.
    """

    machine: Machine
    reason: str
    usd_per_hour: float
    paid_unix_s: float
    observed_unix_s: float
    node_unix_s: float
    state: InstanceState = InstanceState.BOOTING
    node: InstanceState = InstanceState.BOOTING
    termination: PendingTermination | None = None
    starting: SpendRow = field(default_factory=SpendRow)
    idle_unix_s: float | None = None
    is_awaited: bool = True

    def copied(self) -> ManagedInstance:
        """Return a deep copy."""
        return replace(
            self,
            termination=self.termination and replace(self.termination),
            starting=replace(self.starting),
        )

    @property
    def has_joined(self) -> bool:
        """Whether its node has ever joined."""
        return self.node is not InstanceState.BOOTING

    @property
    def is_ready(self) -> bool:
        """Whether its node is part of the cluster, also while it leaves."""
        return self.node is InstanceState.READY

    @property
    def stays(self) -> bool:
        """Whether nothing makes it leave."""
        return self.state in _STAYING

    @property
    def leaves_for(self) -> str:
        """The reason for which it leaves; empty while it stays."""
        return "" if self.termination is None else self.termination.reason

    def apply(self, event: InstanceEvent, unix_s: float = 0.0) -> None:
        """Change the state.

        Args:
            event: what has happened.
            unix_s: time of day; needed for events of its node.

        Raises:
            InvariantError: the event is impossible in this state.
        """
        self.state = INSTANCE.after(self.state, event)
        if event in ("join", "disconnect"):
            self.node, self.node_unix_s = INSTANCE.after(self.node, event), unix_s

    def leave(self, reason: str) -> None:
        """Mark it to leave once others have replaced it."""
        self.apply("leave")
        self.termination = PendingTermination(reason)

    def drain(self, reason: str, deadline_unix_s: float, token: int) -> None:
        """Mark it as drained, to be ended at a deadline at the latest."""
        self.apply("drain")
        successor = None if self.termination is None else self.termination.successor
        self.termination = PendingTermination(reason, deadline_unix_s, token, successor)

    def release(self, reason: str, unix_s: float) -> None:
        """Mark it to end if nothing runs there."""
        self.apply("release")
        self.termination = PendingTermination(reason, unix_s)

    def terminate(self, reason: str, unix_s: float) -> None:
        """Mark it to end now."""
        self.apply("terminate")
        self.termination = PendingTermination(reason, unix_s)

    def keep(self) -> None:
        """Withdraw its pending termination."""
        self.apply(_KEEP[self.node])
        self.termination = None


@dataclass(slots=True)
class PoolRecord:
    """Statistics of a pool.

    Attributes:
        pool: the pool.
        usd_per_hour: last observed price; None: none.
        refusals: consecutive failures.
        until_unix_s: end of the backoff.
        preemptions: preemptions, weighted by age.
        hours: machine hours, weighted by age.
        as_of_unix_s: time of both weights.
        taken_unix_s: time of the last preemption.
        unjoined: consecutive launches with a machine whose node never joined.
        unjoined_request: the last of them; each counts once.
    """

    pool: Pool
    usd_per_hour: float | None = None
    refusals: int = 0
    until_unix_s: float = 0.0
    preemptions: float = 0.0
    hours: float = 0.0
    as_of_unix_s: float = 0.0
    taken_unix_s: float = 0.0
    unjoined: int = 0
    unjoined_request: str | None = None


@dataclass(slots=True)
class RegionMemory:
    """State of a region.

    Attributes:
        moved_unix_s: time of the last launch there.
        surplus_unix_s: start of the current surplus; None: there is none.
    """

    moved_unix_s: float = 0.0
    surplus_unix_s: float | None = None


@dataclass(slots=True)
class SpeedRecord:
    """Decisions on deadline and budget that persist between iterations.

    Attributes:
        only_on_demand: whether the deadline leaves no time for a preemption.
        stopped_at_usd: budget at which everything was stopped; None: it was not.
        speed: multiple of the target's speed at which the job is cheapest.
        speed_unix_s: when that speed was chosen.
        done_unix_s: when the job had no work left; None: it has some.
    """

    only_on_demand: bool = False
    stopped_at_usd: float | None = None
    speed: float = 1.0
    speed_unix_s: float = 0.0
    done_unix_s: float | None = None


@dataclass(slots=True)
class AutoscalerState:
    """Autoscaler state persisted between iterations; see the module.

    It is written before any action and survives the process.

    Attributes:
        token: fencing token of the writer's lease.
        launches: number of requests ever made; part of their ids.
        pending_launches: by request id.
        instances: by machine id.
        regions: by name.
        pools: by `pool_key`.
        ledger: costs.
        resources: by machine type, what Ray last found.
        heads: machines of the Ray head by machine id; only charged here.
        required: decisions on deadline and budget.
        withdrawn: last send time of withdrawn requests by request id; their machines may still
            appear, since clouds list new ones late.
        unreached: cloud names of regions that were unreachable when an unreadable journal was
            replaced; their machines are adopted once they answer.
        charged_unix_s: if an earlier journal was unreadable: end of the time whose total cost is in
            the ledger as one sum.
    """

    token: int = 0
    launches: int = 0
    pending_launches: dict[str, PendingLaunch] = field(default_factory=dict)
    instances: dict[str, ManagedInstance] = field(default_factory=dict)
    regions: dict[str, RegionMemory] = field(default_factory=dict)
    pools: dict[str, PoolRecord] = field(default_factory=dict)
    ledger: SpendLedger = field(default_factory=SpendLedger)
    required: SpeedRecord = field(default_factory=SpeedRecord)
    resources: dict[str, dict[str, float]] = field(default_factory=dict)
    heads: dict[str, ManagedInstance] = field(default_factory=dict)
    withdrawn: dict[str, float] = field(default_factory=dict)
    unreached: tuple[str, ...] = ()
    charged_unix_s: float = 0.0

    def copied(self) -> AutoscalerState:
        """Return a deep copy."""
        return replace(
            self,
            pending_launches={key: replace(each) for key, each in self.pending_launches.items()},
            instances={key: each.copied() for key, each in self.instances.items()},
            regions={key: replace(each) for key, each in self.regions.items()},
            required=replace(self.required),
            pools={key: replace(each) for key, each in self.pools.items()},
            ledger=SpendLedger({key: replace(row) for key, row in self.ledger.rows.items()}),
            resources={key: dict(each) for key, each in self.resources.items()},
            heads={key: each.copied() for key, each in self.heads.items()},
            withdrawn=dict(self.withdrawn),
        )

    def remove(self, instance: ManagedInstance) -> None:
        """Remove an instance that has ended."""
        instance.apply("end")
        del self.instances[instance.machine.id]

    def pool(self, pool: Pool) -> PoolRecord:
        """Return the record of a pool; a new one if there is none."""
        return self.pools.setdefault(pool_key(pool), PoolRecord(pool))

    def region(self, name: str) -> RegionMemory:
        """Return the state of a region."""
        return self.regions.setdefault(name, RegionMemory())


def set_with_clock(memory: AutoscalerState, by_s: float) -> AutoscalerState:
    """Return a copy whose stored times are shifted with the clock.

    Times reported by clouds (launch, end) follow their own clocks and stay.
    """

    def at(when_unix_s: float) -> float:
        return when_unix_s + by_s if when_unix_s else 0.0  # 0: never

    def since(when_unix_s: float | None) -> float | None:
        return None if when_unix_s is None else at(when_unix_s)

    memory = memory.copied()
    memory.charged_unix_s = at(memory.charged_unix_s)
    memory.withdrawn = {key: at(when) for key, when in memory.withdrawn.items()}
    memory.required.speed_unix_s = at(memory.required.speed_unix_s)
    memory.required.done_unix_s = since(memory.required.done_unix_s)
    for pending_launch in memory.pending_launches.values():
        pending_launch.since_unix_s, pending_launch.sent_unix_s = (
            at(pending_launch.since_unix_s),
            at(pending_launch.sent_unix_s),
        )
    for instance in (*memory.instances.values(), *memory.heads.values()):
        instance.paid_unix_s = at(instance.paid_unix_s)
        instance.observed_unix_s = at(instance.observed_unix_s)
        instance.node_unix_s = at(instance.node_unix_s)
        instance.idle_unix_s = since(instance.idle_unix_s)
        if instance.termination is not None:
            deadline_s = since(instance.termination.deadline_unix_s)
            instance.termination.deadline_unix_s = deadline_s
    for region in memory.regions.values():
        region.moved_unix_s = at(region.moved_unix_s)
        region.surplus_unix_s = since(region.surplus_unix_s)
    for pool in memory.pools.values():
        pool.until_unix_s, pool.taken_unix_s = at(pool.until_unix_s), at(pool.taken_unix_s)
        pool.as_of_unix_s = at(pool.as_of_unix_s)
    return memory


def uncharged_unix_s(memory: AutoscalerState, machine: Machine, now_unix_s: float) -> float:
    """Return the start of the cost of a machine that is not in the ledger yet."""
    return min(max(machine.launched_unix_s, memory.charged_unix_s), now_unix_s)


def adopted(memory: AutoscalerState, machine: Machine, now_unix_s: float) -> ManagedInstance:
    """Return an instance for a listed machine that is in no journal."""
    since_s = uncharged_unix_s(memory, machine, now_unix_s)
    return ManagedInstance(machine, _TAKEN_IN, 0.0, since_s, now_unix_s, now_unix_s)


def pool_key(pool: Pool) -> str:
    """Return the key of a pool."""
    return f"{pool.region}/{pool.zone or '*'}/{pool.type}/{pool.market.value}"


def outstanding(memory: AutoscalerState, pending_launch: PendingLaunch) -> int:
    """Return the number of machines of a request that may still appear."""
    request = pending_launch.request
    came = sum(
        instance.machine.request_id == request.request_id and name not in pending_launch.ended
        for name, instance in memory.instances.items()
    )
    return request.count - came - pending_launch.failed - len(pending_launch.ended)


@dataclass(frozen=True, slots=True)
class _Stored:
    """Serialized journal.

    Attributes:
        format: format version.
        memory: the state.
    """

    format: str
    memory: AutoscalerState


_FORMAT: Final = "autoscaler-journal-3"
_READER: Final = TypeAdapter(_Stored)


class _FormatOf(BaseModel):
    format: str = "autoscaler-journal-1"  # which had no such field


def encode_memory(memory: AutoscalerState) -> bytes:
    """Return the bytes that `decode_memory` reads."""
    return zlib.compress(_READER.dump_json(_Stored(_FORMAT, memory)))


def decode_memory(data: bytes) -> AutoscalerState:
    """Read the bytes that `encode_memory` returned.

    Raises:
        RunDirectoryError: the bytes are no journal, or one of another format.
    """
    try:
        reader = zlib.decompressobj()
        text = reader.decompress(data, _MOST_BYTES)
        if not reader.eof:
            raise ValueError("cut off, or too long")
        found = _FormatOf.model_validate_json(text).format
        if found == _FORMAT:
            return _READER.validate_json(text).memory
    except (ValidationError, ValueError, zlib.error) as error:
        raise RunDirectoryError("the autoscaler's journal cannot be read", fix=_FIX) from error
    raise RunDirectoryError(
        f"the autoscaler's journal cannot be read: its format is {found}, and this release of "
        f"geo_ray reads {_FORMAT}",
        fix=_FIX,
    )
