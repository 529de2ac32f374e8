"""The autoscaler's journal and target override in the cluster's conditional store.

The journal lies next to the lease and is written before anything is done. A write is refused if
another process has written since it was read, so a fenced autoscaler cannot change it. A target
override outlives the actor that received it; one that cannot be read counts as none.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from geo_ray.base.errors import LeaseLostError, RunDirectoryError
from geo_ray.cloud.autoscaler.state import (
    AutoscalerState,
    ManagedInstance,
    PendingLaunch,
    decode_memory,
    encode_memory,
    outstanding,
)
from geo_ray.cloud.autoscaler.target import ClusterTarget
from geo_ray.storage.conditional_store import MAX_RECORD_BYTES, ConditionalStore
from geo_ray.telemetry.view import MachineRow, MachinesView

JOURNAL_KEY: Final = "autoscaler.z"


class Journal:
    """Autoscaler state in a conditional store.

    Args:
        store: the store.
        token: fencing token of the lease; part of request ids.
    """

    def __init__(self, store: ConditionalStore, token: int) -> None:
        self._store, self._token = store, token
        self._tag: str | None = None
        self._memory: AutoscalerState | None = None

    def read(self) -> AutoscalerState:
        """Return the state. The store is read only once.

        Raises:
            RunDirectoryError: the store cannot be read.
        """
        if self._memory is None:
            found = self._store.read(JOURNAL_KEY)
            if found is not None:
                self._tag = found.tag
            self._memory = AutoscalerState() if found is None else decode_memory(found.data)
            self._memory.token = self._token
        return self._memory

    def write(self, memory: AutoscalerState) -> None:
        """Replace the state.

        Raises:
            LeaseLostError: another process has written it.
            RunDirectoryError: the outcome of the write is unknown; the next write finds out.
        """
        data = encode_memory(memory)
        if len(data) > MAX_RECORD_BYTES:
            raise RunDirectoryError(
                f"the journal of the autoscaler would have {len(data)} bytes",
                fix="The autoscaler supports a few thousand machines; use several clusters.",
            )
        tag = self._store.write(JOURNAL_KEY, data, self._tag)
        if tag is None:
            found = self._store.read(JOURNAL_KEY)
            if found is not None and found.data == data:
                tag = found.tag  # the reply to this write was lost
            else:
                raise LeaseLostError(
                    "another autoscaler has written the journal of this cluster; this one "
                    "makes no more changes"
                )
        self._tag, self._memory = tag, memory


TARGET_OVERRIDE_KEY: Final = "target-override.json"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TargetOverride:
    """A target, or the release of all machines, set after the autoscaler was started.

    It is stored next to the journal and survives a restart of the actor. It can be set again at any
    time, so an unreadable override counts as none and is overwritten by the next one.

    Attributes:
        made: how many clusters of this name were created.
        target: the target; None: the one that the autoscaler was started with.
        is_over: whether all machines are released.
        number: how often the override was written.
        is_followed: whether the target differs from the initial one and is needed whatever is left
            of the run; otherwise only the budget differs.
    """

    made: int
    target: ClusterTarget | None = None
    is_over: bool = False
    number: int = 0
    is_followed: bool = False


_READER: Final = TypeAdapter(TargetOverride)


def read_target_override(
    store: ConditionalStore, made: int, note: Callable[[str], None] = _log.warning
) -> TargetOverride:
    """Return the target override of a cluster; an empty one if there is none.

    Args:
        store: store of the cluster.
        made: how many clusters of this name were created.
        note: called with a message if the override is unreadable.

    Raises:
        RunDirectoryError: the store does not answer.
    """
    return _read(store, made, note)[0]


def write_target_override(
    store: ConditionalStore, made: int, change: Callable[[TargetOverride], TargetOverride]
) -> None:
    """Change the target override.

    Args:
        store: store of the cluster.
        made: how many clusters of this name were created.
        change: returns the new override; called again after a concurrent write.

    Raises:
        RunDirectoryError: the store cannot be written, or the override is too long.
    """
    while True:
        before, tag = _read(store, made, _log.warning)
        after = change(before)
        if after == before:
            return
        data = _READER.dump_json(replace(after, number=before.number + 1))
        if len(data) > MAX_RECORD_BYTES:
            raise RunDirectoryError(
                f"a target of {len(data)} bytes is too long",
                fix="Name fewer regions, zones and types of machines.",
            )
        if store.write(TARGET_OVERRIDE_KEY, data, tag) is not None:
            return


def _read(
    store: ConditionalStore, made: int, note: Callable[[str], None]
) -> tuple[TargetOverride, str | None]:
    found = store.read(TARGET_OVERRIDE_KEY)
    if found is None:
        return TargetOverride(made), None
    row = _row(found.data)
    number = row.get("number")
    # every write needs a new number
    nothing = TargetOverride(made, number=number if isinstance(number, int) else 0)
    if row.get("made", made) != made:
        return nothing, found.tag
    try:
        return _READER.validate_json(found.data), found.tag
    except ValidationError:
        note(f"ignoring an unreadable target override: {TARGET_OVERRIDE_KEY}")
        return nothing, found.tag


def _row(data: bytes) -> dict[str, Any]:
    """Return the JSON object in the data; empty if there is none."""
    try:
        row = json.loads(data)
    except ValueError:
        return {}
    return row if isinstance(row, dict) else {}


class JournalMachines:
    """Reads the machines of a run from the journal of its autoscaler; a `MachineSource`.

    Args:
        store: where the journal lies; None: next to the lease of the run.
    """

    def __init__(self, store: ConditionalStore | None = None) -> None:
        self._store = store

    def machines(self, leases: ConditionalStore, now_unix_s: float) -> MachinesView | None:
        """Return the machines that the journal lists; None if there is no journal."""
        found = (self._store or leases).read(JOURNAL_KEY)
        return None if found is None else _view(decode_memory(found.data), now_unix_s)


def _view(memory: AutoscalerState, now_unix_s: float) -> MachinesView:
    instances = (*memory.heads.values(), *memory.instances.values())
    rows = [_machine_row(instance, now_unix_s) for instance in instances]
    for pending_launch in memory.pending_launches.values():
        missing = outstanding(memory, pending_launch)
        if missing > 0:
            rows.append(_requested_row(pending_launch, missing))
    rows.sort(key=attrgetter("region", "machine"))
    return MachinesView("autoscaler", tuple(rows), memory.ledger.paid_usd)


def _machine_row(instance: ManagedInstance, now_unix_s: float) -> MachineRow:
    machine = instance.machine
    state, note = machine.state.value, instance.reason
    if not instance.stays:
        state, note = "leaving", instance.leaves_for
    elif not instance.is_ready and machine.state.value == "running":
        state = "without a node"
    return MachineRow(
        region=machine.labels.get("ray.io/availability-region", machine.pool.region),
        machine=machine.id,
        type=f"{machine.pool.type} {machine.pool.market.value.replace('_', '-')}",
        state=state,
        usd_per_hour=instance.usd_per_hour,
        age_s=now_unix_s - machine.launched_unix_s,
        note=note,
    )


def _requested_row(pending_launch: PendingLaunch, missing: int) -> MachineRow:
    pool = pending_launch.request.pool
    return MachineRow(
        region=pending_launch.request.labels.get("ray.io/availability-region", pool.region),
        machine=f"{missing} x",
        type=f"{pool.type} {pool.market.value.replace('_', '-')}",
        state="asked for",
        usd_per_hour=missing * pending_launch.usd_per_hour,
        note=pending_launch.reason,
    )
