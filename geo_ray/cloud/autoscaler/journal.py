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
    AutoscalerMemory,
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
    """The memory in a store.

    Args:
        store: where it lies.
        epoch: number of this holder of the lease; part of the ids of its requests.
    """

    def __init__(self, store: ConditionalStore, epoch: int) -> None:
        self._store, self._epoch = store, epoch
        self._tag: str | None = None
        self._memory: AutoscalerMemory | None = None

    def read(self) -> AutoscalerMemory:
        """Return the memory; asks the store only once.

        Raises:
            RunDirectoryError: it cannot be read.
        """
        if self._memory is None:
            found = self._store.read(JOURNAL_KEY)
            if found is not None:
                self._tag = found.tag
            self._memory = AutoscalerMemory() if found is None else decode_memory(found.data)
            self._memory.epoch = self._epoch
        return self._memory

    def write(self, memory: AutoscalerMemory) -> None:
        """Replace the memory.

        Raises:
            LeaseLostError: somebody else has written it.
            RunDirectoryError: it cannot be written; the next write finds out what came of it.
        """
        data = encode_memory(memory)
        if len(data) > MAX_RECORD_BYTES:
            raise RunDirectoryError(
                f"the autoscaler's journal would have {len(data)} bytes",
                fix="It is made for some thousand machines: use several clusters.",
            )
        tag = self._store.write(JOURNAL_KEY, data, self._tag)
        if tag is None:
            found = self._store.read(JOURNAL_KEY)
            if found is not None and found.data == data:
                tag = found.tag  # the answer to this very write got lost
            else:
                raise LeaseLostError(
                    "another autoscaler has written the journal of this cluster; this one rents "
                    "and ends nothing any more"
                )
        self._tag, self._memory = tag, memory


TOLD_KEY: Final = "told.json"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ToldTarget:
    """What an autoscaler was told after it was started: to follow another target, or to end all.

    It lies beside the journal, so that the next one goes on with that and not with what it was
    started with. Whoever told it may do so again at any time; so what cannot be read, torn or of
    another release, counts as nothing told, and the next who tells something writes over it.

    Attributes:
        made: of which cluster of the name: how often one was made.
        target: that is followed; None: the one that it was started with.
        is_over: whether nothing is to run any more.
        number: how often it was written.
        is_followed: whether the target is another than that it was started with, and is needed
            whatever is left of the run; else it only has another budget.
    """

    made: int
    target: ClusterTarget | None = None
    is_over: bool = False
    number: int = 0
    is_followed: bool = False


_READER: Final = TypeAdapter(ToldTarget)


def read_told(
    store: ConditionalStore, made: int, note: Callable[[str], None] = _log.warning
) -> ToldTarget:
    """Return what was told; nothing, if all that there is was told of another cluster.

    Args:
        store: where it lies.
        made: how often a cluster of the name was made.
        note: told if something was told of this cluster and makes no sense.

    Raises:
        RunDirectoryError: its store does not answer.
    """
    return _read(store, made, note)[0]


def write_told(
    store: ConditionalStore, made: int, change: Callable[[ToldTarget], ToldTarget]
) -> None:
    """Change what was told.

    Args:
        store: where it lies.
        made: how often a cluster of the name was made.
        change: gives the new from the old; may be called again, if somebody else writes.

    Raises:
        RunDirectoryError: it cannot be written, or is too long.
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
        if store.write(TOLD_KEY, data, tag) is not None:
            return


def _read(
    store: ConditionalStore, made: int, note: Callable[[str], None]
) -> tuple[ToldTarget, str | None]:
    found = store.read(TOLD_KEY)
    if found is None:
        return ToldTarget(made), None
    row = _row(found.data)
    number = row.get("number")
    # Numbers go on: every write is to be another one than all before.
    nothing = ToldTarget(made, number=number if isinstance(number, int) else 0)
    if row.get("made", made) != made:
        return nothing, found.tag
    try:
        return _READER.validate_json(found.data), found.tag
    except ValidationError:
        note(f"what the autoscaler was told cannot be read, and counts as not told: {TOLD_KEY}")
        return nothing, found.tag


def _row(data: bytes) -> dict[str, Any]:
    """Return what was written as far as it is a row of JSON at all."""
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


def _view(memory: AutoscalerMemory, now_unix_s: float) -> MachinesView:
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
