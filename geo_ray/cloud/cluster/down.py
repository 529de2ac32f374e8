"""Ends a cluster: runs are saved, machines drained and ended; then the cloud is asked.

It may be killed at any point and repeated. While the head lives, it is told by the cluster's record
and does the first part itself, in order; if it does not answer, all machines are ended from here.
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
from geo_ray.cloud.cluster.state import ClusterRecord, ClusterState, Phase, alone
from geo_ray.cloud.cluster.status import read_status, report_of
from geo_ray.cloud.provider import Machine, MachineProvider, MachineState
from geo_ray.runs.lease import LeaseKeeper

Tell = Callable[[str], None]

_SAVE_S: Final = 240.0
_SILENT_S: Final = 30.0
_GONE_S: Final = 600.0
_LATE_GONE_S: Final = 60.0  # for one that came late
_CLOCKS_S: Final = 10.0  # between a cloud's and this one


@dataclass(frozen=True, slots=True)
class EndedCluster:
    """What came of it.

    Attributes:
        name: of the cluster.
        machines: how many were ended.
        spent_usd: that it cost in all, as far as prices are known.
        in_order: whether runs were stopped and machines drained first.
        was_down: whether it had been taken down before, and nothing of it was left.
        stack: of Terraform's, which the head and all else belong to; None: there is none.
        unread: where the autoscaler's journal is kept, which could not be read: `spent_usd` lacks
            what it knew; None: it could.
    """

    name: str
    machines: int
    spent_usd: float
    in_order: bool
    was_down: bool = False
    stack: str | None = None
    unread: str | None = None


def end_cluster(state: ClusterState, tell: Tell, *, at_once: bool = False) -> EndedCluster:
    """End a cluster; of one that has ended the cloud is asked again.

    Args:
        state: where it is written down.
        tell: told each step.
        at_once: neither wait for runs to save nor for machines to drain.

    Raises:
        ClusterStateError: there is none.
        ClusterBusyError: another command works on it and does not end.
        MachinesLeftError: something of it is still there.
        CloudError: the cloud refuses.
    """
    state.known()  # before a folder is made for one that is not there
    state.make()
    with alone(state, "down", tell) as lease:
        record = state.known()
        provider = open_clouds(record, state)
        before = report_of(record, state, provider)
        was_down = record.phase == "down"
        if record.phase == "up":
            record = _phase(state, "ending")
        known = {row.id for row in before.machines}
        if before.head is not None and not was_down:
            known.add(before.head.id)
        in_order = not (at_once or was_down) and _ended_by_head(record, state, provider, tell)
        known |= _end_all(record, state, provider, lease, tell, is_again=was_down)
        _remove_secrets(record, state)
        unread = _check(record, state, provider, tell)
        if record.phase != "down":
            record = _phase(state, "down")
        # What a dead head has not booked can be reckoned only while its machines are listed.
        spent_usd = max(before.spent_usd, report_of(record, state, provider).spent_usd)
    standing = record.head.standing
    return EndedCluster(
        name=record.name,
        machines=len(known),
        spent_usd=spent_usd,
        in_order=in_order,
        was_down=was_down and not known,
        stack=standing.stack if standing else None,
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
    record: ClusterRecord, state: ClusterState, provider: MachineProvider, tell: Tell
) -> bool:
    """Let the head save runs and end machines; whether it has."""
    store = state.store()
    began_s = heard_s = time.monotonic()
    last_unix_s, heard = 0.0, set[str]()
    while True:
        is_gone = False
        with suppress(
            RegionsUnreachableError
        ):  # whether it lives is not known: what it tells counts
            head = find_head(listed_for_head(provider, record), record)
            is_gone = record.head.standing is None and not is_alive(head)
        if is_gone:
            tell("the head does not live: machines are ended without it")
            return False
        told, _ = read_status(store, record.made)
        if told is not None and told.unix_s != last_unix_s:
            heard_s, last_unix_s = time.monotonic(), told.unix_s
            for text in told.did:
                if text not in heard:
                    tell(text)
            heard.update(told.did)
        if told is not None and told.has_ended_all:
            return True
        unresponsive_s = max(_SILENT_S, 3 * record.autoscale.every_s)
        if time.monotonic() - heard_s > unresponsive_s:
            tell(
                f"the head tells nothing for {unresponsive_s:.0f} s: machines are ended without it"
            )
            return False
        if time.monotonic() - began_s > _SAVE_S + 2 * record.autoscale.drain_s:
            tell("the head takes too long: machines are ended without it")
            return False
        time.sleep(state.look_s)


def _end_all(
    record: ClusterRecord,
    state: ClusterState,
    provider: MachineProvider,
    lease: LeaseKeeper,
    tell: Tell,
    *,
    is_again: bool,
) -> set[str]:
    """End the head, then all others: nobody is left who could rent anew.

    Where regions do not answer, what the others list is ended before that is told.

    Args:
        record: of the cluster.
        state: where it is written down.
        provider: its clouds.
        lease: of whoever ends it.
        tell: told each step.
        is_again: whether it was down before: then machines that have ended were counted.
    """
    seen: set[str] = set()
    deadline_s = time.monotonic() + _GONE_S
    last_error = ""
    told = 0
    while True:
        machines, unreachable = _as_listed(provider, record)
        living = _living(machines)
        # Clouds list those of an earlier cluster of the name, too, that have ended.
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
            if len(living) != told:
                told = len(living)
                tell("ending 1 machine" if told == 1 else f"ending {told} machines")
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
    record: ClusterRecord, state: ClusterState, provider: MachineProvider, tell: Tell
) -> str | None:
    """Ask the cloud for anything that bears the cluster's name and id.

    A launch of which nothing was ever seen may still come, also one that was called off: it is
    waited for as long as a cloud may leave a new machine out of its list. A journal that cannot be
    read may have known of one.

    Returns:
        Where that journal was put; None: it could be read.
    """
    journal = read_journal(state.store())
    memory = journal.memory
    unreached = bool(journal.trouble) or any(
        outstanding(memory, each) > 0 for each in memory.pending_launches.values()
    )
    missing_s = record.autoscale.retry.missing_s
    late_s = max(memory.called_off.values(), default=-math.inf) + missing_s - time.time()
    wait_s = missing_s if unreached else min(max(0.0, late_s), missing_s)
    if wait_s > 0:
        tell(f"looking for {wait_s:.0f} s for machines that were asked for and never seen")
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
            if "there is no secret" in error.message:
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
    return MachinesLeftError(f"{len(living)} machines of {record.name} are left: {listed}{reason}")
