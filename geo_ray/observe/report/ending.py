"""How a run ended: what is noted when an error ends it, and what its event log tells of that."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from pathlib import Path

from geo_ray.errors import GeoRayError, InterruptedRunError, InvariantError
from geo_ray.observe.events.log import EVENTS_FILE, EventLog, being_written
from geo_ray.observe.metrics.totals import RunTotals

LOGS = "logs"  # directory of what the actors of a failed run printed
_TAIL_BYTES = 65_536


class Ending(Enum):
    """The ways in which a run may stand."""

    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped"
    """Somebody asked it to stop before its end."""
    GOING = "still going"
    CUT_OFF = "cut off"
    """Its process was killed, or its machine went down: nothing was noted."""
    UNKNOWN = "not finished"
    """Still going or cut off; this file system does not tell."""
    NOT_BEGUN = "not begun"
    """It is starting, or ended before training began without a word."""


def ending_of(run_dir: Path, totals: RunTotals) -> Ending:
    """Say how the run in ``run_dir`` stands.

    Args:
        run_dir: its directory.
        totals: the fold over its events.
    """
    if totals.failed is not None:
        stopped = totals.failed["code"] == InterruptedRunError.code
        return Ending.STOPPED if stopped else Ending.FAILED
    if totals.finished is not None:
        return Ending.FINISHED
    if totals.started is None:
        return Ending.NOT_BEGUN
    going = being_written(run_dir / EVENTS_FILE)
    if going is None:
        return Ending.UNKNOWN
    return Ending.GOING if going else Ending.CUT_OFF


def has_begun(run_dir: Path) -> bool:
    """Whether a run has written an event, or its actors have left logs."""
    events = run_dir / EVENTS_FILE
    return (events.exists() and events.stat().st_size > 0) or (run_dir / LOGS).is_dir()


@contextmanager
def failure_noted(run_dir: Path) -> Iterator[None]:
    """Call `note_failure` if an error leaves this block, at the time of the newest event."""
    try:
        yield
    except BaseException as error:
        note_failure(run_dir, error)
        raise


def note_failure(run_dir: Path, error: BaseException, began_unix_s: float = math.inf) -> None:
    """Write `run_failed` at the end of a run's events; never raises.

    Does nothing for a run without events and without logs, whose directory will be removed.

    Args:
        run_dir: its directory; nobody else writes its events any more.
        error: what ended it.
        began_unix_s: time of day at which the user's command began. If events were written since
            then, the time without any until now is added to theirs.
    """
    path = run_dir / EVENTS_FILE
    if not has_begun(run_dir):
        return
    with suppress(GeoRayError, OSError, ValueError, KeyError):
        t_s = 0.0
        if path.exists():
            newest_unix_s = path.stat().st_mtime
            wrote = newest_unix_s >= began_unix_s
            t_s = _newest_s(path) + (max(0.0, time.time() - newest_unix_s) if wrote else 0.0)
        with EventLog(path) as log:
            log.write("run_failed", t_s, **failure_fields(error))


def _newest_s(path: Path) -> float:
    """The newest time among the last events."""
    with path.open("rb") as file:
        start = max(0, path.stat().st_size - _TAIL_BYTES)
        file.seek(start)
        lines = [line for line in file if line.endswith(b"\n")]
    return max((json.loads(line)["t_s"] for line in lines[start > 0 :]), default=0.0)


def failure_fields(error: BaseException) -> dict[str, str]:
    """Give what `run_failed` says of an error."""
    if isinstance(error, GeoRayError):
        told = error
    elif isinstance(error, KeyboardInterrupt):
        told = InterruptedRunError("the run was interrupted and ended at once")
    else:
        told = InvariantError(f"{type(error).__name__}: {error}")
    return {"code": told.code, "message": told.message, "fix": told.fix}
