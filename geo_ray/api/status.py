"""Queries and requests about a run: `geo_ray.status`, `members`, `checkpoints`, `stop`.

This module imports neither PyTorch, Ray nor user code: these commands must answer immediately, and
must be safe for the runs of other users.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Literal, Protocol, get_args

from geo_ray.api.config import FilePath
from geo_ray.api.display import Table
from geo_ray.base.clock import SystemClock
from geo_ray.base.errors import (
    CheckpointError,
    ConfigError,
    MembersRefusedError,
    RunActorMissingError,
    RunDirectoryError,
    RunFinishedError,
)
from geo_ray.experiment.recorded import RecordedConfig
from geo_ray.runs import directory as rundir
from geo_ray.runs import requests
from geo_ray.runs.checkpoints import regions_of, store_of
from geo_ray.runs.directory import RunDirectory
from geo_ray.runs.remote import pass_on, view_copy
from geo_ray.runs.requests import MemberRequest, Verb, request_member_change
from geo_ray.runs.status import Beside, StatusReader
from geo_ray.storage.uri import is_s3
from geo_ray.telemetry.event_log import Ending, has_begun
from geo_ray.telemetry.events import Event
from geo_ray.telemetry.status import MembersFold
from geo_ray.telemetry.status import RunStatus as RunStatus
from geo_ray.telemetry.totals import RunTotals

_POLL_EVERY_S = 0.25
_REMOTE_POLL_S = 2.0  # each request costs money
_MOST_EVENTS = 1_000_000


class OpenedRun(Protocol):
    """A run given as an object, such as a `Run`."""

    @property
    def path(self) -> Path:
        """Its directory."""


def status(run: FilePath) -> RunStatus:
    """Return the state of a run: its run actor, the progress of regions, checkpoints and cost.

    The function only reads the run's directory. It takes up to 12.5 s (37.5 s for a run in a
    bucket) if the run actor is on another machine and its lease is not renewed meanwhile.

    Args:
        run: directory of the run.

    Raises:
        RunDirectoryError: there is no run, or it cannot be read.
    """
    reader, clock = StatusReader(directory_of(run)), SystemClock()
    while (found := reader.read()).is_going is None and found.run_actor is not None:
        clock.sleep_s(_POLL_EVERY_S)
    return found


def follow_status(run: FilePath, every_s: float = 2.0) -> Iterator[RunStatus]:
    """Yield the state of a run repeatedly until it is no longer active; at least once.

    A run whose run actor is being restarted counts as active.

    Args:
        run: directory of the run.
        every_s: seconds between two states.

    Raises:
        RunDirectoryError: as for `status`.
    """
    reader, clock = StatusReader(directory_of(run)), SystemClock()
    while True:
        found = reader.read()
        yield found
        if (found.is_going is False and found.waits_s is None) or found.run_actor is None:
            return
        clock.sleep_s(every_s)


def members(run: FilePath) -> Table:
    """Return the regions of a run, a row each: ``region``, ``state``, ``step`` and ``refused``.

    ``state`` is ``member``, ``absent`` (not present when the run last began, and not joined
    since), ``joining``, ``leaving``, ``lost``, ``left`` or ``did not join``. ``step`` is the
    newest step of any region when the state began. ``refused`` is the reason of the newest
    request about the region if it was refused.

    Args:
        run: directory of the run.

    Raises:
        RunDirectoryError: there is no run.
    """
    directory, config = _begun(run)
    folds: list[MembersFold] = []
    found = StatusReader(directory.path, beside=partial(_feeds, folds)).read()
    now = folds[-1]
    if found.is_going is False and found.waits_s is None:
        now.end()
    rows = [
        {"region": name, "state": each.state, "step": each.step, "refused": each.refused}
        for name in config.region_names
        for each in (now.of(name),)
    ]
    return Table(rows, {"region": str, "state": str, "step": int, "refused": str})


def change_members(
    run: FilePath, verb: str, region: str, *, wait_s: float = 10.0
) -> Literal["begun", "unanswered"]:
    """Request a change of a run's members, and wait for the answer.

    The run's events and `members` show the result of an accepted change.

    Args:
        run: directory of the run.
        verb: ``add`` a region that is not a member, ``drain`` a region, which leaves after all its
            work has been exchanged, or ``remove`` a region at once.
        region: region of the run's configuration.
        wait_s: timeout for the answer; 0: do not wait.

    Returns:
        Whether the change has begun, or there was no answer yet.

    Raises:
        RunDirectoryError: there is no run, or its directory cannot be written.
        ConfigError: there is no such verb or region.
        RunFinishedError, RunActorMissingError: the run is not active; nothing was requested.
        MembersRefusedError: the request is refused; states the reason.
    """
    directory, config = _begun(run)
    names = config.region_names
    if verb not in get_args(Verb):
        known = ", ".join(get_args(Verb))
        raise ConfigError(f"no verb '{verb}'", fix=f"Use one of {known}.")
    if region not in names:
        raise ConfigError(
            f"no region '{region}' in this run", fix=f"Use one of {', '.join(names)}."
        )
    answers: dict[str, Event] = {}
    reader = StatusReader(directory.path, beside=lambda: partial(_note_answer, answers))
    found = reader.read()
    _check_driven(found)
    request = MemberRequest.model_validate({"verb": verb, "region": region})
    id = request_member_change(directory.path, request)
    pass_on(directory.address, directory.path)
    clock = SystemClock()
    until_s = clock.now_s() + (wait_s if found.waits_s is None else 0.0)
    while id not in answers and clock.now_s() < until_s:
        clock.sleep_s(_REMOTE_POLL_S if reader.is_remote else _POLL_EVERY_S)
        reader.feed(_MOST_EVENTS)
    answer = answers.get(id)
    if answer is not None and answer.kind == "members_refused":
        raise MembersRefusedError(
            f"'{verb} {region}' is refused: {answer['cause']}",
            fix=f"List the members with `geo-ray members {quote(found.run)}`.",
        )
    return "unanswered" if answer is None else "begun"


def checkpoints(run: FilePath | OpenedRun) -> Table:
    """Return the checkpoints of a run, a row each, oldest first.

    ``state`` is ``healthy`` for a checkpoint that a resume can use, ``diverged`` for one taken
    after the loss had exploded or numbers were not finite, and otherwise the defect of its files.
    Files in a directory are read for that; of files in an object store only the sizes are checked.

    Args:
        run: the run, or its directory.

    Raises:
        RunDirectoryError: there is no run.
        StoreError: its object store does not answer or refuses.
    """
    directory, config = _begun(run)
    store = store_of(directory, config.checkpoint)
    kinds = {"id": int, "step": int, "created": str, "bytes": int, "regions": str, "state": str}
    rows = []
    for number in store.ids():
        row: dict[str, object] = {"id": number}
        try:
            manifest = store.manifest(number)
            regions = regions_of(manifest, config.regions)
            row |= {
                "step": manifest.step,
                "created": manifest.created,
                "bytes": sum(part.bytes for part in manifest.parts),
                "regions": ", ".join(regions),
            }
            _ = store.peek(number) if store.is_remote else store.open(number)
            row["state"] = "healthy" if manifest.healthy else "diverged"
        except CheckpointError as error:
            row["state"] = error.message
        rows.append(row)
    return Table(rows, kinds)


def report(run: FilePath | OpenedRun, out: FilePath | None = None) -> Path:
    """Write the HTML report of a run and return its path.

    Args:
        run: the run, or its directory.
        out: output file; default: ``report.html`` in the run's directory.

    Raises:
        RunDirectoryError: there is no run, or the report cannot be written.
    """
    from geo_ray.cloud.autoscaler.journal import JournalMachines
    from geo_ray.runs.report import write_run_report  # imports all drawing code

    target = None if out is None else Path(out)
    return write_run_report(directory_of(run), target, JournalMachines())


def stop(run: FilePath | OpenedRun) -> None:
    """Request that an active run saves a checkpoint and stops; its events show the result.

    Does nothing if the run is not active, unless its run actor is being restarted.

    Args:
        run: directory of the run.

    Raises:
        RunDirectoryError: there is no run, or its directory cannot be written.
    """
    directory, _ = _begun(run)
    found = StatusReader(directory.path).read()
    if found.is_going is False and found.waits_s is None:
        return
    requests.request_stop(directory.path)
    pass_on(directory.address, directory.path)


def directory_of(run: FilePath | OpenedRun) -> Path:
    """Return the directory of a run, given as an object, a directory or an address.

    For a run in a bucket it is a current copy on this machine.

    Raises:
        RunDirectoryError: there is no run at the address.
        StoreError: the bucket does not answer or refuses.
    """
    if not isinstance(run, (str, os.PathLike)):
        return run.path
    return view_copy(run) if isinstance(run, str) and is_s3(run) else Path(run)


def _begun(run: FilePath | OpenedRun) -> tuple[RunDirectory, RecordedConfig]:
    """Return paths and configuration of a run that has begun.

    Raises:
        RunDirectoryError: there is no run, or it has no events yet.
    """
    directory, config = rundir.recorded_run(directory_of(run))
    if not has_begun(directory.path):
        raise not_begun(directory)
    return directory, config


def not_begun(directory: RunDirectory) -> RunDirectoryError:
    """Return the error about a run without events."""
    return RunDirectoryError(
        f"{directory.path} has no events: the run has not begun",
        fix="Check the output of the command that started it.",
    )


def _check_driven(found: RunStatus) -> None:
    """Return if a run is active, or may be.

    Raises:
        RunFinishedError, RunActorMissingError: the run is not active.
    """
    if found.is_going is not False or found.waits_s is not None:
        return
    if found.phase == Ending.FINISHED.value:
        raise RunFinishedError(
            "the run is finished: nothing was requested",
            fix=f"`geo-ray status {quote(found.run)}` shows its results.",
        )
    raise RunActorMissingError(
        f"{found.run} is not active ({found.phase}): nothing was requested",
        fix=f"Resume it first: `geo-ray train --resume {quote(found.run)}`.",
    )


def _note_answer(answers: dict[str, Event], event: Event, _: RunTotals) -> None:
    if event.kind in ("members_accepted", "members_refused") and event.fields.get("request"):
        answers[event["request"]] = event


def _feeds(folds: list[MembersFold]) -> Beside:
    """Return a callback that feeds events to a new fold, which is the last of ``folds``."""
    fold = MembersFold()
    folds.append(fold)
    return lambda event, totals: fold.feed(event)
