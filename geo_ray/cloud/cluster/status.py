"""Status of a cluster, from the clouds, the journal and the status report of its head.

It needs neither Ray nor access to the cluster's network: machines come from the clouds, and the
rest from the cluster's folder. So it also works if the head is dead.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from pydantic import Field, TypeAdapter, ValidationError

from geo_ray.base.errors import GeoRayError, RegionsUnreachableError
from geo_ray.base.model import StrictModel
from geo_ray.base.notebooks import ShownModel
from geo_ray.base.text import counted
from geo_ray.cloud.autoscaler.actions import AutoscalerStatus
from geo_ray.cloud.autoscaler.journal_read import read_journal
from geo_ray.cloud.autoscaler.state import (
    AutoscalerState,
    InstanceState,
    ManagedInstance,
    pool_key,
)
from geo_ray.cloud.autoscaler.target import REGION_LABEL, ROLE_LABEL, MachineKind
from geo_ray.cloud.cluster.head import find_head, head_address, job_server_of, tunnel_command
from geo_ray.cloud.cluster.state import STATUS_KEY, ClusterRecord, ClusterState, Phase
from geo_ray.cloud.provider import Availability, Machine, MachineProvider, MachineState
from geo_ray.storage.conditional_store import MAX_RECORD_BYTES, ConditionalStore

ALL_ENDED: Final = "all machines have ended"
_HOUR_S: Final = 3600.0
_STALE_ITERATIONS: Final = 4
_ACTIONS: Final = 20
_UNREAD: Final = "costs and nodes of its machines are unknown"
_STALE: Final = "its autoscaler has not reported for a while, as far as clocks agree"


class ClusterMachineRow(StrictModel):
    """A machine of a cluster."""

    id: str
    role: str = Field(description="head, server or worker")
    region: str = Field(description="region of the run; empty: none")
    type: str
    market: str
    at: str = Field(description="cloud zone, else region")
    state: str = Field(description="as listed by the cloud")
    address: str | None
    age_s: float
    usd_per_hour: float | None = Field(description="null: unknown")
    is_ready: bool = Field(description="whether its node has joined and it stays")
    leaves: str | None = Field(description="why it leaves; null: it stays")
    leaves_in_s: float | None = Field(description="seconds until its latest end")


class NodeGroupRow(StrictModel):
    """Planned and actual machines of a region and role."""

    region: str
    role: str
    planned: int
    ready: int
    coming: int = Field(description="requested or starting")
    leaving: int


class DecisionRow(StrictModel):
    """An action of the autoscaler."""

    unix_s: float
    region: str
    what: str
    reason: str
    alternatives: tuple[dict[str, str | float | int | None], ...] = ()


class ClusterReport(ShownModel):
    """Status of a cluster."""

    name: str
    id: str = Field(description="unique id, a tag of its machines")
    phase: Phase
    clouds: tuple[str, ...]
    state: str = Field(description="folder of the cluster")
    address: str | None = Field(description="address of the Ray head, host:port")
    job_server: str | None
    tunnel: str | None
    head: ClusterMachineRow | None
    machines: tuple[ClusterMachineRow, ...] = Field(
        description="all running machines except the head"
    )
    node_groups: tuple[NodeGroupRow, ...] = Field(description="plan against actual")
    wanted: int = Field(description="planned machines")
    usd_per_hour: float = Field(description="of all machines, including the head")
    spent_usd: float = Field(description="cost so far, including the head")
    budget_usd: float | None = Field(description="maximum cost; null: no limit")
    is_idle: bool = Field(description="whether its run has ended or stopped and needs no machines")
    is_stopped: bool = Field(description="whether the budget is used up")
    left_s: float | None = Field(description="remaining seconds of the run; null: unknown")
    to_finish_usd: float | None = Field(description="cost of the rest of the run")
    has_reported: bool = Field(description="whether its autoscaler has reported at all")
    report_age_s: float | None = Field(
        description="seconds since its last report, as far as clocks agree"
    )
    reported_unix_s: float | None = Field(
        None, description="time of its last report, by its own clock"
    )
    acts: bool = Field(description="whether an autoscaler is active")
    notes: tuple[str, ...] = Field(description="problems")
    decisions: tuple[DecisionRow, ...] = Field(description="most recent actions, oldest first")

    def view(self) -> tuple[str, Sequence[str], Sequence[Sequence[str]]]:
        """See `ShownModel.view`."""
        line = f"{self.name}: {self.phase}, {counted(len(self.machines), 'machine')}, "
        line += f"{self.usd_per_hour:.4g} USD/h, {self.spent_usd:.4g} USD so far"
        head = () if self.head is None else (self.head,)
        rows = [
            (row.id, row.role, row.region, row.type, row.state) for row in (*head, *self.machines)
        ]
        return line, ("machine", "role", "region", "type", "state"), rows


class HeadStatus(StrictModel):
    """Status report that the head writes periodically."""

    unix_s: float
    made: int = Field(1, description="how many clusters of this name were created")
    did: tuple[str, ...] = Field(
        (), description="progress messages about ending the cluster, newest last"
    )
    status: AutoscalerStatus

    @property
    def has_ended_all(self) -> bool:
        """Whether all machines of the cluster have ended."""
        return self.did[-1:] == (ALL_ENDED,)


_HEAD_STATUS: Final = TypeAdapter(HeadStatus)


def write_status(store: ConditionalStore, head_status: HeadStatus, tag: str | None) -> str | None:
    """Write a status report; return the new tag, None if another head has written."""
    actions = head_status.status.actions[-_ACTIONS:]
    while True:
        slim = replace(head_status.status, actions=actions)
        data = _HEAD_STATUS.dump_json(head_status.model_copy(update={"status": slim}))
        if len(data) <= MAX_RECORD_BYTES or not actions:
            return store.write(STATUS_KEY, data, tag)
        actions = actions[len(actions) // 2 + 1 :]


def read_status(store: ConditionalStore, made: int) -> tuple[HeadStatus | None, str | None]:
    """Return the last status report of the head and its tag.

    An invalid report, or one of an earlier cluster, counts as none.

    Args:
        store: store of the cluster.
        made: how many clusters of this name were created.
    """
    found = store.read(STATUS_KEY)
    if found is None:
        return None, None
    try:
        head_status = _HEAD_STATUS.validate_json(found.data)
    except ValidationError:  # of another release
        return None, found.tag
    return (head_status if head_status.made == made else None), found.tag


def report_of(
    record: ClusterRecord,
    state: ClusterState,
    provider: MachineProvider,
    *,
    is_heard: bool = False,
) -> ClusterReport:
    """Return the status of a cluster.

    Args:
        record: record of the cluster.
        state: its folder.
        provider: its clouds.
        is_heard: whether the caller has observed a new report recently; then the age of the report
            is not used, which would be wrong if clocks differ.

    Raises:
        GeoRayError: no cloud answers, or the folder cannot be read.
    """
    now_s = time.time()
    ended_s = now_s if record.ended_unix_s is None else record.ended_unix_s
    store = state.store()
    head_status, _ = read_status(store, record.made)
    journal = read_journal(store)
    memory = journal.memory
    listed, unreachable = _listed(provider, record, memory)
    living = [m for m in listed if m.state is not MachineState.ENDED]
    head = find_head(listed, record)
    rows = [_row(machine, memory, now_s) for machine in living if machine is not head]
    notes = [f"{journal.trouble}: {_UNREAD}"] if journal.trouble else []
    notes += [f"{name} does not answer: {unreachable[name]}" for name in sorted(unreachable)]
    head_usd = None
    if record.head.existing is None:
        try:
            (availability,) = provider.availability([record.head.pool])
            head_usd = _price(availability)
        except GeoRayError as error:
            notes.append(f"the price of the head is unknown: {error.message}")
    head_row = None if head is None else _head_row(head, head_usd, ended_s)
    spent = memory.ledger.paid_usd
    burn = sum(row.usd_per_hour or 0.0 for row in rows)
    usd_of = {row.id: row.usd_per_hour or 0.0 for row in rows}
    for machine in living:
        if machine.id in usd_of and machine.id in memory.instances:
            instance = memory.instances[machine.id]
            kind = record.target.kind_of(machine)
            spent += _unbooked_usd(machine, instance, kind, usd_of[machine.id], ended_s)
    if head is not None and head_row is not None and head_usd is not None:
        kind = None if record.target.head is None else record.target.head.kind
        spent += _unbooked_usd(head, memory.heads.get(head.id), kind, head_usd, ended_s)
        burn += head_usd if head_row.state not in ("ended",) else 0.0
    age_s = None if head_status is None else now_s - head_status.unix_s
    is_fresh = is_heard or (age_s is not None and abs(age_s) < unresponsive_s(record))
    is_hidden = head is None and record.head.pool.region in unreachable
    notes += _notes(record, head_row, head_status, is_fresh=is_fresh, is_hidden=is_hidden)
    left_s = None
    if (
        head_status is not None
        and is_fresh
        and record.phase == "up"
        and any(r.is_ready for r in rows)
    ):
        left_s = head_status.status.left_s
    is_idle = (
        record.phase == "up"
        and head_status is not None
        and is_fresh
        and head_status.status.left_s == 0.0
    )
    if is_idle:
        notes.append(
            "its run has ended or stopped; machines are launched when a run waits for them"
        )
    address = head_address(head, record)
    node_groups = _node_groups(record, memory, rows)
    return ClusterReport(
        name=record.name,
        id=record.id,
        phase=record.phase,
        clouds=record.clouds,
        state=state.uri,
        address=address,
        job_server=job_server_of(address, record) if address else None,
        tunnel=tunnel_command(address, record, head) if address else None,
        head=head_row,
        machines=tuple(rows),
        node_groups=tuple(node_groups),
        wanted=sum(node_group.planned for node_group in node_groups),
        usd_per_hour=burn,
        spent_usd=spent,
        budget_usd=record.target.budget_usd,
        is_stopped=_is_stopped(record, memory, spent),
        is_idle=is_idle,
        left_s=left_s,
        to_finish_usd=None if left_s is None else burn * left_s / _HOUR_S,
        has_reported=head_status is not None and head_status.status.iteration_unix_s is not None,
        report_age_s=age_s,
        reported_unix_s=None if head_status is None else head_status.unix_s,
        acts=is_fresh and head_status is not None and head_status.status.is_acting,
        notes=tuple(notes),
        decisions=() if head_status is None else tuple(_decisions(head_status.status)),
    )


def _is_stopped(record: ClusterRecord, memory: AutoscalerState, spent_usd: float) -> bool:
    budget_usd = record.target.budget_usd
    return budget_usd is not None and budget_usd <= max(
        spent_usd, memory.required.stopped_at_usd or 0.0
    )


def unresponsive_s(record: ClusterRecord) -> float:
    """Return the seconds without a report after which an autoscaler counts as unresponsive."""
    return _STALE_ITERATIONS * record.autoscale.every_s + 10.0


# ------------------------------------------------------------------ parts


def _listed(
    provider: MachineProvider, record: ClusterRecord, memory: AutoscalerState
) -> tuple[list[Machine], Mapping[str, str]]:
    """Return the machines, unreachable ones as last listed, and the outages by region."""
    try:
        return list(provider.list_machines(record.name)), {}
    except RegionsUnreachableError as error:
        instances = [instance.machine for instance in memory.instances.values()]
        unreached = [machine for machine in instances if machine.pool.region in error.unreachable]
        return [*error.found, *unreached], error.unreachable


def _row(machine: Machine, memory: AutoscalerState, now_s: float) -> ClusterMachineRow:
    instance = memory.instances.get(machine.id)
    termination = None if instance is None else instance.termination
    pool = machine.pool
    record = memory.pools.get(pool_key(pool if instance is None else instance.machine.pool))
    usd = None if instance is None else instance.usd_per_hour
    if record is not None and record.usd_per_hour is not None:
        usd = record.usd_per_hour
    leaves = None if termination is None else termination.reason
    until_s = None if termination is None else termination.deadline_unix_s
    is_ready = (
        machine.state is MachineState.RUNNING
        and instance is not None
        and instance.state is InstanceState.READY
    )
    return ClusterMachineRow(
        id=machine.id,
        role=machine.labels.get(ROLE_LABEL, "worker"),
        region=machine.labels.get(REGION_LABEL, ""),
        type=pool.type,
        market=pool.market.value,
        at=pool.zone or pool.region,
        state=machine.state.value,
        address=machine.address,
        age_s=max(0.0, now_s - machine.launched_unix_s),
        usd_per_hour=usd,
        is_ready=is_ready,
        leaves=leaves,
        leaves_in_s=None if until_s is None else until_s - now_s,
    )


def _unbooked_usd(
    machine: Machine,
    instance: ManagedInstance | None,
    kind: MachineKind | None,
    usd: float,
    until_unix_s: float,
) -> float:
    """Cost of a machine since it was last recorded, or since its start.

    A dead head records no costs, but its machines are still charged.
    """
    since_s = machine.launched_unix_s if instance is None else instance.paid_unix_s
    hours = max(0.0, until_unix_s - since_s) / _HOUR_S
    age_h = (since_s - machine.launched_unix_s) / _HOUR_S
    factor = 1.0 if kind is None else kind.age_factor(age_h, hours)
    return usd * factor * hours


def _head_row(head: Machine, usd: float | None, now_s: float) -> ClusterMachineRow:
    running = head.state is MachineState.RUNNING
    return ClusterMachineRow(
        id=head.id,
        role="head",
        region="",
        type=head.pool.type,
        market=head.pool.market.value,
        at=head.pool.zone or head.pool.region,
        state=head.state.value,
        address=head.address,
        age_s=max(0.0, now_s - head.launched_unix_s),
        usd_per_hour=usd,
        is_ready=running,
        leaves=None,
        leaves_in_s=None if head.ends_unix_s is None else head.ends_unix_s - now_s,
    )


def _node_groups(
    record: ClusterRecord, memory: AutoscalerState, rows: Sequence[ClusterMachineRow]
) -> list[NodeGroupRow]:
    planned: dict[tuple[str, str], int] = {}
    for region in record.plan.regions:
        count = sum(machines.count for machines in region.machines)
        if record.provider.rent == "demand":
            count = 0
        planned[region.region, "worker"] = count
        if region.server is not None:
            planned[region.region, "server"] = 1 if count else 0
    for row in rows:
        planned.setdefault((row.region, row.role), 0)
    found = []
    for (name, role), count in planned.items():
        mine = [row for row in rows if (row.region, row.role) == (name, role)]
        asked = sum(
            max(0, pending_launch.request.count - pending_launch.failed - len(pending_launch.ended))
            for pending_launch in memory.pending_launches.values()
            if (
                pending_launch.request.labels.get(REGION_LABEL),
                pending_launch.request.labels.get(ROLE_LABEL, "worker"),
            )
            == (name, role)
        )
        ready = sum(row.is_ready for row in mine)
        leaving = sum(row.leaves is not None for row in mine)
        coming = max(asked, len(mine) - ready - leaving)
        found.append(
            NodeGroupRow(
                region=name,
                role=role,
                planned=count,
                ready=ready,
                coming=coming,
                leaving=leaving,
            )
        )
    return found


def _notes(
    record: ClusterRecord,
    head: ClusterMachineRow | None,
    head_status: HeadStatus | None,
    *,
    is_fresh: bool,
    is_hidden: bool,
) -> list[str]:
    found = []
    existing = record.head.existing
    if existing is not None:
        found.append(
            f"the head {existing.machine} belongs to the Terraform stack {existing.stack}: neither "
            "counted here nor ended by `geo-ray down`"
        )
        if record.phase != "down" and head_status is not None and not is_fresh:
            found.append(f"{_STALE}: is the head running?")
    elif record.phase != "down":
        if is_hidden:
            found.append("the state of its head is unknown: its region does not answer")
        elif head is None:
            found.append("its head is missing: `geo-ray up` launches another one")
        elif head.state in ("ending", "ended"):
            found.append(f"its head {head.id} has ended: `geo-ray up` launches another one")
        elif head_status is not None and not is_fresh:
            found.append(_STALE)
    if record.phase == "ending":
        found.append("it is being taken down; if no command does so now, run `geo-ray down`")
    if head_status is not None and is_fresh:
        found += head_status.status.errors
        found += head_status.status.notes
        found += head_status.did[-1:]
    return found


def _decisions(status: AutoscalerStatus) -> list[DecisionRow]:
    found = []
    for action in status.actions:
        others: list[Mapping[str, str | float | int | None]] = [
            {
                "at": other.pool.zone or other.pool.region,
                "type": other.pool.type,
                "market": other.pool.market.value,
                "usd_per_hour": other.usd_per_hour,
                "usd_per_million_rows": other.usd_per_million_rows,
                "chosen": other.chosen,
                "note": other.note,
            }
            for other in action.alternatives
        ]
        found.append(
            DecisionRow(
                unix_s=action.unix_s,
                region=action.region,
                what=action.what,
                reason=action.reason,
                alternatives=tuple(dict(each) for each in others),
            )
        )
    return found


def _price(availability: Availability) -> float | None:
    return availability.usd_per_hour
