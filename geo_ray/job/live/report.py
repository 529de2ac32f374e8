"""The report page of a run, with what its autoscaler or its plan says of machines."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from geo_ray.errors import GeoRayError, LeaseLostError, RunHeldError
from geo_ray.job.live.machines import machines_of
from geo_ray.job.rundir import FOLLOWED_FILE
from geo_ray.lease.local_store import LocalConditionalStore
from geo_ray.observe.events.columns import RunRecord
from geo_ray.observe.picture.view import MachinesView
from geo_ray.observe.report.ending import has_begun
from geo_ray.observe.report.report import write_report
from geo_ray.planning.plan import load_plan

_log = logging.getLogger(__name__)


def write_run_report(run_dir: Path, out: Path | None = None, run: RunRecord | None = None) -> Path:
    """Write the page of a run; see `write_report`.

    Raises:
        RunDirectoryError: as for `write_report`.
    """
    return write_report(run_dir, out, run, _machines(run_dir))


@contextmanager
def reported(run_dir: Path) -> Iterator[None]:
    """Write the page of a run once the block has ended it, in whatever way.

    The page is not written of a run that has not begun, or that is another process's by now. A page
    that cannot be written is logged: it can be made later.
    """
    try:
        yield
    except (LeaseLostError, RunHeldError):
        raise
    except BaseException:
        _write_or_log(run_dir)
        raise
    _write_or_log(run_dir)


def _write_or_log(run_dir: Path) -> None:
    if not has_begun(run_dir):
        return
    try:
        write_run_report(run_dir)
    except GeoRayError as error:
        _log.warning("no report was written: %s", error.message)


def _machines(run_dir: Path) -> MachinesView | None:
    """None also where a file of them cannot be read: the rest is worth its page."""
    with suppress(GeoRayError):
        followed = run_dir / FOLLOWED_FILE
        plan = load_plan(followed) if followed.exists() else None
        return machines_of(LocalConditionalStore(run_dir), plan, time.time())
    return None
