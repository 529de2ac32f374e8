"""How a run stands, and who takes part in it, from any process: `geo_ray.status`, `members`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from geo_ray.api.inputs import FilePath
from geo_ray.api.run import directory_of, open_run
from geo_ray.api.tables import Table, table_of
from geo_ray.clock import SystemClock
from geo_ray.errors import ConfigError
from geo_ray.job.far.copy import pass_on
from geo_ray.job.live.member_states import MemberStates
from geo_ray.job.status import StatusReader
from geo_ray.observe.events.log import EVENTS_FILE, read_events
from geo_ray.observe.status.record import RunStatus as RunStatus
from geo_ray.runtime.control.membership.member_requests import MemberRequest, Verb, ask

_LOOK_EVERY_S = 0.25


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
    while (found := reader.read()).is_going is None and found.driver is not None:
        clock.sleep_s(_LOOK_EVERY_S)
    return found


def follow_status(run: FilePath, every_s: float = 2.0) -> Iterator[RunStatus]:
    """The same again and again, until nobody drives the run any more; at least once.

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
        if found.is_going is False or found.driver is None:
            return
        clock.sleep_s(every_s)


def members(run: FilePath) -> Table:
    """The regions of a run, a row each: ``region``, ``state``, and ``step``, since when.

    ``state`` is ``member``, ``absent`` (it was not there at the start, and has not joined),
    ``lost``, ``left`` or ``did not join``.

    Args:
        run: its directory.

    Raises:
        RunDirectoryError: there is no run.
    """
    opened = open_run(run)
    fold = MemberStates(opened.experiment.region_names)
    for event in read_events(opened.directory.path / EVENTS_FILE):
        fold.feed(event)
    rows = [{"region": n, "state": s, "step": at} for n, (s, at) in fold.states.items()]
    return table_of(rows, {"region": str, "state": str, "step": int})


def change_members(run: FilePath, verb: str, region: str) -> None:
    """Ask whoever trains a run to change its members; what comes of it is in the run's events.

    Args:
        run: its directory.
        verb: ``add`` a region that takes no part, ``drain`` one, which leaves with all it has done,
            or ``remove`` one at once.
        region: of the run's configuration.

    Raises:
        RunDirectoryError: there is no run, or nothing can be written there.
        ConfigError: there is no such verb or region.
    """
    opened = open_run(run)
    names = opened.experiment.region_names
    if verb not in get_args(Verb):
        known = ", ".join(get_args(Verb))
        raise ConfigError(f"there is no '{verb}'", fix=f"Say one of {known}.")
    if region not in names:
        raise ConfigError(
            f"there is no region '{region}' in this run", fix=f"Name one of {', '.join(names)}."
        )
    request = MemberRequest.model_validate({"verb": verb, "region": region})
    ask(opened.directory.path, request)
    pass_on(opened.directory.address, opened.directory.path)
