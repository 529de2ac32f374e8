"""Ends a cluster: saves runs, drains and terminates machines, and checks that the cloud has none.

The command may be killed at any point and repeated. A running head reads the new phase in the
cluster's record and does the first part itself. If the head does not answer, this process
terminates all machines.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from geo_ray.base.errors import (
    GeoRayError,
    MachinesLeftError,
    ProviderRefusedError,
    RegionsUnreachableError,
)
from geo_ray.cloud.autoscaler.journal_read import put_aside, read_journal
from geo_ray.cloud.autoscaler.state import outstanding
from geo_ray.cloud.cluster.head import find_head, is_alive, listed_for_head
from geo_ray.cloud.cluster.providers import open_clouds, secrets_of
from geo_ray.cloud.cluster.state import ClusterRecord, ClusterState, Phase, cluster_lock
from geo_ray.cloud.cluster.status import read_status, report_of
from geo_ray.cloud.provider import Machine, MachineProvider, MachineState
from geo_ray.runs.lease import LeaseKeeper

Notify = Callable[[str], None]

_SAVE_S: Final = 240.0
_SILENT_S: Final = 30.0
_GONE_S: Final = 600.0
_LATE_GONE_S: Final = 60.0  # for a machine that appeared late
_CLOCKS_S: Final = 10.0  # tolerance between the clocks of a cloud and this machine


@dataclass(frozen=True, slots=True)
class EndedCluster:
    """Result of ending a cluster.

    Attributes:
        name: name of the cluster.
        machines: number of terminated machines.
        spent_usd: total cost, as far as prices are known.
        in_order: whether runs were stopped and machines drained first.
        was_down: whether the cluster had been ended before and had no machines left.
        stack: Terraform stack that owns the head and the networks; None: none.
        unread: where an unreadable autoscaler journal was saved, whose costs `spent_usd` lacks;
            None: it was readable.
    """

    name: str
    machines: int
    spent_usd: float
    in_order: bool
    was_down: bool = False
    stack: str | None = None
    unread: str | None = None


def end_cluster(state: ClusterState, notify: Notify, *, at_once: bool = False) -> EndedCluster:
    """End a cluster. For an ended cluster, only check the cloud again.

    Args:
        state: folder of the cluster.
        notify: called with a message for each step.
        at_once: whether to skip saving runs and draining machines.

    Raises:
        ClusterStateError: there is no such cluster.
        ClusterBusyError: another command holds the cluster and does not finish.
        MachinesLeftError: machines or secrets of the cluster remain.
        CloudError: the cloud refuses a call.
    """
    state.known()  # before a folder is created for a missing cluster
    state.make()
    with cluster_lock(state, "down", notify) as lease:
        record = state.known()
        provider = open_clouds(record, state)
        before = report_of(record, state, provider)
        was_down = record.phase == "down"
        if record.phase == "up":
            record = _phase(state, "ending")
        known = {row.id for row in before.machines}
        if before.head is not None and not was_down:
            known.add(before.head.id)
        in_order = not (at_once or was_down) and _ended_by_head(record, state, provider, notify)
        known |= _end_all(record, state, provider, lease, notify, is_again=was_down)
        _remove_secrets(record, state)
        unread = _check(record, state, provider, notify)
        if record.phase != "down":
            record = _phase(state, "down")
        # The cost that a dead head has not recorded can be computed only while its machines are
        # listed.
        spent_usd = max(before.spent_usd, report_of(record, state, provider).spent_usd)
    existing = record.head.existing
    return EndedCluster(
        name=record.name,
        machines=len(known),
        spent_usd=spent_usd,
        in_order=in_order,
        was_down=was_down and not known,
        stack=existing.stack if existing else None,
        unread=unread,
    )


def _phase(state: ClusterState, phase: Phase) -> ClusterRecord:
    record, tag = state.read()
    if record is None:
        record = state.known()
    ended_unix_s = time.time() if phase == "down" else None
    record = record.model_copy(update={"phase": phase, "ended_unix_s": ended_unix_s})
    state.write(record, tag)
    return record


def _ended_by_head(
    record: ClusterRecord, state: ClusterState, provider: MachineProvider, notify: Notify
) -> bool:
    """Let the head save runs and end machines; return whether it has."""
    store = state.store()
    began_s = heard_s = time.monotonic()
    last_unix_s, heard = 0.0, set[str]()
    while True:
        is_gone = False
        with suppress(RegionsUnreachableError):  # its state is unknown: the status decides
            head = find_head(listed_for_head(provider, record), record)
            is_gone = record.head.existing is None and not is_alive(head)
        if is_gone:
            notify("the head is not running: ending machines without it")
            return False
        head_status, _ = read_status(store, record.made)
        if head_status is not None and head_status.unix_s != last_unix_s:
            heard_s, last_unix_s = time.monotonic(), head_status.unix_s
            for text in head_status.did:
                if text not in heard:
                    notify(text)
            heard.update(head_status.did)
        if head_status is not None and head_status.has_ended_all:
            return True
        unresponsive_s = max(_SILENT_S, 3 * record.autoscale.every_s)
        if time.monotonic() - heard_s > unresponsive_s:
            notify(
                f"the head has not reported for {unresponsive_s:.0f} s: ending machines without it"
            )
            return False
        if time.monotonic() - began_s > _SAVE_S + 2 * record.autoscale.drain_s:
            notify("the head takes too long: ending machines without it")
            return False
        time.sleep(state.look_s)


def _end_all(
    record: ClusterRecord,
    state: ClusterState,
    provider: MachineProvider,
    lease: LeaseKeeper,
    notify: Notify,
    *,
    is_again: bool,
) -> set[str]:
    """Terminate the head first, so that nothing can launch machines, then all others.

    If regions are unreachable, the machines of the others are terminated before the error is
    raised.

    Args:
        record: record of the cluster.
        state: its folder.
        provider: its clouds.
        lease: lease of this command.
        notify: called with a message for each step.
        is_again: whether the cluster was down before; ended machines were then counted already.
    """
    seen: set[str] = set()
    deadline_s = time.monotonic() + _GONE_S
    last_error = ""
    reported = 0
    while True:
        machines, unreachable = _as_listed(provider, record)
        living = _living(machines)
        # Lists include ended machines of an earlier cluster of the name.
        since_unix_s = record.began_unix_s - _CLOCKS_S
        mine = [m for m in machines if m.launched_unix_s >= since_unix_s]
        seen |= {machine.id for machine in (living if is_again else [*living, *mine])}
        if not living and unreachable is not None:
            raise unreachable
        if not living:
            return seen
        if time.monotonic() > deadline_s:
            raise _left(record, living, last_error)
        head = find_head(machines, record)
        first = [head.id] if head is not None and is_alive(head) else []
        to_end = first or [m.id for m in living if is_alive(m)]
        if to_end:
            lease.check()
            if len(living) != reported:
                reported = len(living)
                notify("ending 1 machine" if reported == 1 else f"ending {reported} machines")
            try:
                provider.terminate(to_end)
            except ProviderRefusedError:
                raise
            except GeoRayError as error:
                last_error = error.message
        time.sleep(state.look_s)


def _as_listed(
    provider: MachineProvider, record: ClusterRecord
) -> tuple[Sequence[Machine], RegionsUnreachableError | None]:
    try:
        return provider.list_machines(record.name), None
    except RegionsUnreachableError as error:
        return error.found, error


def _remove_secrets(record: ClusterRecord, state: ClusterState) -> None:
    for store in secrets_of(record, state):
        store.delete(record.token_secret)


def _check(
    record: ClusterRecord, state: ClusterState, provider: MachineProvider, notify: Notify
) -> str | None:
    """Check the cloud for anything with the cluster's name and id.

    A launch without a listed machine, including a withdrawn one, may still produce one: wait as
    long as a cloud may delay a new machine in its list. An unreadable journal may have had such a
    launch.

    Returns:
        Where the unreadable journal was saved; None: it was readable.
    """
    journal = read_journal(state.store())
    memory = journal.memory
    unreached = bool(journal.trouble) or any(
        outstanding(memory, each) > 0 for each in memory.pending_launches.values()
    )
    missing_s = record.autoscale.retry.missing_s
    late_s = max(memory.withdrawn.values(), default=-math.inf) + missing_s - time.time()
    wait_s = missing_s if unreached else min(max(0.0, late_s), missing_s)
    if wait_s > 0:
        notify(f"waiting {wait_s:.0f} s for requested machines that were never listed")
    looks_until_s = time.monotonic() + wait_s
    gone_by_s = looks_until_s
    while True:
        living = _living(provider.list_machines(record.name))
        now_s = time.monotonic()
        if living:
            provider.terminate([machine.id for machine in living])
            gone_by_s = gone_by_s if gone_by_s > looks_until_s else now_s + _LATE_GONE_S
        if now_s >= max(looks_until_s, gone_by_s if living else 0.0):
            break
        time.sleep(state.look_s)
    if living:
        raise _left(record, living, "")
    for store in secrets_of(record, state):
        try:
            store.get(record.token_secret)
        except ProviderRefusedError as error:
            if "has no secret" in error.message:
                continue
            raise
        raise MachinesLeftError(f"the secret {record.token_secret} is still in its store")
    aside = put_aside(state.store())
    return None if aside is None else f"{aside} in {state.shown}"


def _living(machines: Sequence[Machine]) -> list[Machine]:
    return [machine for machine in machines if machine.state is not MachineState.ENDED]


def _left(record: ClusterRecord, living: Sequence[Machine], why: str) -> MachinesLeftError:
    listed = ", ".join(f"{m.id} ({m.state.value}) in {m.pool.region}" for m in living)
    reason = f": {why}" if why else ""
    return MachinesLeftError(f"{len(living)} machines of {record.name} remain: {listed}{reason}")
