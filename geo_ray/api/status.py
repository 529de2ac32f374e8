"""What any process may ask of a run: `geo_ray.status`, `members`, `checkpoints`, `stop`.

Nothing here imports PyTorch, Ray or code of the user: these commands must answer at once, and must
be safe for a run of somebody else's.
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
from geo_ray.runs.checkpoints import regions_in, store_of
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
_REMOTE_POLL_S = 2.0  # each look is paid for
_MOST_EVENTS = 1_000_000


class OpenedRun(Protocol):
    """A run that is given as a value, such as a `Run`."""

    @property
    def path(self) -> Path:
        """Its directory."""


def status(run: FilePath) -> RunStatus:
    """How a run stands: who drives it, how far every region is, what is saved and spent.

    The run's directory is all that is read; nothing in it is changed. Takes up to 12.5 s (of a run
    in a bucket 37.5 s) where the run is driven from another machine and nothing is heard of that:
    so long is waited for a sign.

    Args:
        run: its directory.

    Raises:
        RunDirectoryError: there is no run, or it cannot be read.
    """
    reader, clock = StatusReader(directory_of(run)), SystemClock()
    while (found := reader.read()).is_going is None and found.run_actor is not None:
        clock.sleep_s(_POLL_EVERY_S)
    return found


def follow_status(run: FilePath, every_s: float = 2.0) -> Iterator[RunStatus]:
    """The same again and again, until nobody drives the run any more; at least once.

    A run whose run actor is being started again is followed further.

    Args:
        run: its directory.
        every_s: seconds from one to the next.

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
    """The regions of a run, a row each: ``region``, ``state``, ``step`` and ``refused``.

    ``state`` is ``member``, ``absent`` (it was not there as the run last began, and has not
    joined), ``joining``, ``leaving``, ``lost``, ``left`` or ``did not join``. ``step`` says since
    when: the newest step that any region had taken then. ``refused`` is the newest request about
    the region and why it was refused, if it was.

    Args:
        run: its directory.

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
    """Ask whoever trains a run to change its members, and wait for the answer.

    What comes of a change that is begun is in the run's events, and in `members`.

    Args:
        run: its directory.
        verb: ``add`` a region that takes no part, ``drain`` one, which leaves with all it has done,
            or ``remove`` one at once.
        region: of the run's configuration.
        wait_s: for how long to wait for the answer at most; 0: not at all.

    Returns:
        Whether it is begun, or there was no answer yet.

    Raises:
        RunDirectoryError: there is no run, or nothing can be written there.
        ConfigError: there is no such verb or region.
        RunFinishedError, DriverMissingError: nobody drives the run, so nothing was asked.
        MembersRefusedError: it is refused; says why.
    """
    directory, config = _begun(run)
    names = config.region_names
    if verb not in get_args(Verb):
        known = ", ".join(get_args(Verb))
        raise ConfigError(f"there is no '{verb}'", fix=f"Say one of {known}.")
    if region not in names:
        raise ConfigError(
            f"there is no region '{region}' in this run", fix=f"Name one of {', '.join(names)}."
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
            fix=f"See who takes part with `geo-ray members {quote(found.run)}`.",
        )
    return "unanswered" if answer is None else "begun"


def checkpoints(run: FilePath | OpenedRun) -> Table:
    """The checkpoints of a run, a row each, oldest first.

    ``state`` is ``healthy`` for what a resume takes, ``diverged`` for one that was taken while the
    loss had exploded or numbers were not finite, else what is wrong with its files. Files in a
    directory are read for that; of those in an object store the sizes are compared.

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
            regions = regions_in({part.name for part in manifest.parts}, config.regions)
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
    """Write the HTML page about a run and give its path.

    Args:
        run: the run, or its directory.
        out: the file; default: ``report.html`` in that directory.

    Raises:
        RunDirectoryError: there is no run, or the page cannot be written.
    """
    from geo_ray.cloud.autoscaler.journal import JournalMachines
    from geo_ray.runs.report import write_run_report  # with all that it draws

    target = None if out is None else Path(out)
    return write_run_report(directory_of(run), target, JournalMachines())


def stop(run: FilePath | OpenedRun) -> None:
    """Ask a run that goes on to save a checkpoint and stop; what comes of it is in its events.

    Nothing is asked of a run that nobody drives, unless its run actor is being started again.

    Args:
        run: its directory.

    Raises:
        RunDirectoryError: there is no run, or nothing can be written there.
    """
    directory, _ = _begun(run)
    found = StatusReader(directory.path).read()
    if found.is_going is False and found.waits_s is None:
        return
    requests.request_stop(directory.path)
    pass_on(directory.address, directory.path)


def directory_of(run: FilePath | OpenedRun) -> Path:
    """The directory of a run that is given as such, or by its directory or address.

    Of a run in a bucket it is this machine's copy, as the run is now.

    Raises:
        RunDirectoryError: there is no run at the address.
        StoreError: the bucket does not answer or refuses.
    """
    if not isinstance(run, (str, os.PathLike)):
        return run.path
    return view_copy(run) if isinstance(run, str) and is_s3(run) else Path(run)


def _begun(run: FilePath | OpenedRun) -> tuple[RunDirectory, RecordedConfig]:
    """Paths and configuration of a run that has begun.

    Raises:
        RunDirectoryError: there is no run, or nothing has happened in it yet.
    """
    directory, config = rundir.recorded_run(directory_of(run))
    if not has_begun(directory.path):
        raise not_begun(directory)
    return directory, config


def not_begun(directory: RunDirectory) -> RunDirectoryError:
    """The error about a run in which nothing has happened yet."""
    return RunDirectoryError(
        f"{directory.path} has no events: the run has not begun",
        fix="Look at what the command that started it printed.",
    )


def _check_driven(found: RunStatus) -> None:
    """Return if somebody drives a run, or may yet.

    Raises:
        RunFinishedError, DriverMissingError: nobody does.
    """
    if found.is_going is not False or found.waits_s is not None:
        return
    if found.phase == Ending.FINISHED.value:
        raise RunFinishedError(
            "the run is finished: nothing was asked",
            fix=f"`geo-ray status {quote(found.run)}` shows what it came to.",
        )
    raise RunActorMissingError(
        f"nobody drives {found.run} ({found.phase}): nothing was asked",
        fix=f"Go on with it first: `geo-ray train --resume {quote(found.run)}`.",
    )


def _note_answer(answers: dict[str, Event], event: Event, _: RunTotals) -> None:
    if event.kind in ("members_accepted", "members_refused") and event.fields.get("request"):
        answers[event["request"]] = event


def _feeds(folds: list[MembersFold]) -> Beside:
    """What gives events to another fold, which is the last one of ``folds`` from now on."""
    fold = MembersFold()
    folds.append(fold)
    return lambda event, totals: fold.feed(event)
