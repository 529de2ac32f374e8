"""Runs of one name in a directory: the name itself, and with a number where that was taken."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from geo_ray.errors import RunDirectoryError
from geo_ray.job.rundir import PLAN_FILE
from geo_ray.lease.record import LEASE_KEY
from geo_ray.observe.events.log import EVENTS_FILE
from geo_ray.planning.plan import Plan


@dataclass(frozen=True, slots=True)
class NamedRun:
    """The run that a cluster is made for.

    Attributes:
        path: its directory if its name is free; else that with a number.
        plan: that it follows.
        since_unix_s: when the cluster was asked for: a run whose driver has written nothing since
            then is none of its work.
    """

    path: Path
    plan: Plan
    since_unix_s: float = 0.0


@dataclass(frozen=True, slots=True)
class FoundRun:
    """The directory of a run.

    Attributes:
        path: it.
        made_ns: when it was made, by its file system's clock.
        written_unix_s: when its driver last wrote to it, by the same clock.
    """

    path: Path
    made_ns: int
    written_unix_s: float


def runs_named(path: Path, since_unix_s: float = 0.0) -> list[FoundRun]:
    """Return the runs that have a directory's name, or would have it if it had been free.

    A run of another name may be among them: ``trial-2`` may be called so.

    Args:
        path: ``run.dir/name``.
        since_unix_s: runs to which nobody has written since then are left out.

    Returns:
        The one that was made last first.

    Raises:
        RunDirectoryError: the directory of all runs cannot be read.
    """
    name = re.compile(rf"{re.escape(path.name)}(-\d+)?")
    found = []
    try:
        for each in path.parent.iterdir():
            if name.fullmatch(each.name):
                with suppress(FileNotFoundError, NotADirectoryError):  # none, or not a whole one
                    found.append(_seen(each))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunDirectoryError(f"cannot read {path.parent}: {error.strerror or error}") from error
    recent = [run for run in found if run.written_unix_s >= since_unix_s]
    return sorted(recent, key=lambda run: (run.made_ns, run.path.name), reverse=True)


def _seen(path: Path) -> FoundRun:
    made = (path / PLAN_FILE).stat()  # written once, when the directory is made
    written_s = [made.st_mtime]
    for name in (EVENTS_FILE, LEASE_KEY):
        with suppress(FileNotFoundError):
            written_s.append((path / name).stat().st_mtime)
    return FoundRun(path, made.st_mtime_ns, max(written_s))
