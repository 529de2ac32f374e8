"""Views of a run: report page, machines, cost and live updates."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Protocol

from geo_ray.base.errors import GeoRayError, LeaseLostError, RunHeldError
from geo_ray.planner.actual_cost import Spent, compare_cost
from geo_ray.planner.plan import Plan, load_plan
from geo_ray.runs.directory import FOLLOWED_FILE, RunDirectory, followed_plan
from geo_ray.runs.status import Beside, StatusReader
from geo_ray.storage.conditional_store import ConditionalStore, LocalConditionalStore
from geo_ray.telemetry.event_log import EVENTS_FILE, has_begun
from geo_ray.telemetry.report import write_report
from geo_ray.telemetry.run_map import MOST_LINKS
from geo_ray.telemetry.summary import Cost, save_cost
from geo_ray.telemetry.totals import Link, RunTotals
from geo_ray.telemetry.view import (
    HistoryFold,
    MachineRow,
    MachinesView,
    PlannedTotals,
    RunView,
    map_of,
)


def account(run: RunDirectory, totals: RunTotals) -> float | None:
    """Write `cost.json` of a run that follows a plan.

    Args:
        run: directory of the run.
        totals: totals over its events.

    Returns:
        Cost in USD; None if unknown, or the run follows no plan.

    Raises:
        PlanError: its plan cannot be read.
        RunDirectoryError: the file cannot be written.
    """
    plan = followed_plan(run)
    if plan is None:
        return None
    cost = compare_cost(plan, Spent.of(totals))
    save_cost(cost, run.path)
    total = cost.total("USD")
    return None if total is None else total.actual


class MachineSource(Protocol):
    """Record of the machines rented for a run."""

    def machines(self, leases: ConditionalStore, now_unix_s: float) -> MachinesView | None:
        """Return the machines of a run; None if none are recorded.

        Args:
            leases: the store that holds the lease of the run.
            now_unix_s: time of day.

        Raises:
            RunDirectoryError: the record cannot be read.
            StoreError: the bucket does not answer or refuses.
        """


def _machines_of(
    source: MachineSource | None, leases: ConditionalStore, plan: Plan | None, now_unix_s: float
) -> MachinesView | None:
    """Return the recorded machines, or else those of the plan."""
    found = None if source is None else source.machines(leases, now_unix_s)
    if found is None and plan is not None:
        found = _planned(plan)
    return found


def _planned(plan: Plan) -> MachinesView:
    rows = [
        MachineRow(
            region=region.region,
            machine=f"{each.count} x",
            type=f"{each.type} {each.market.replace('_', '-')}",
            state="planned",
            usd_per_hour=each.count * each.usd_per_h,
        )
        for region in plan.regions
        for each in region.machines
    ]
    return MachinesView("plan", tuple(rows))


_log = logging.getLogger(__name__)


def write_run_report(
    run_dir: Path, out: Path | None = None, machines: MachineSource | None = None
) -> Path:
    """Write the report page of a run; see `write_report`.

    Args:
        run_dir: directory of the run.
        out: file to write.
        machines: where its machines are recorded; None: the page shows those of its plan.

    Raises:
        RunDirectoryError: as for `write_report`.
    """
    return write_report(run_dir, out, None, _readable_machines(run_dir, machines))


@contextmanager
def reported(run_dir: Path) -> Iterator[None]:
    """Write the page of a run when the block ends, in any way.

    The page is not written if the run has not begun, or belongs to another process by now. A
    failure is only logged, because the page can be written later.
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


def _readable_machines(run_dir: Path, source: MachineSource | None) -> MachinesView | None:
    """Return the machines; None also if they cannot be read, because the page has other content."""
    with suppress(GeoRayError):
        followed = run_dir / FOLLOWED_FILE
        plan = load_plan(followed) if followed.exists() else None
        return _machines_of(source, LocalConditionalStore(run_dir), plan, time.time())
    return None


# Steps that a resume may repeat (see `RunTotals.forget`): of all regions, of each at least.
_ALL_STEPS: Final = 200_000
_EACH_STEPS: Final = 2_000
_PROBLEMS: Final = 5
_MORE_EVENTS: Final = 10_000


class LiveReader:
    """Reads new data of a run repeatedly, without changing it.

    Args:
        find: returns the run's directory; raises while there is none.
        machines: record of the run's machines; None: those of its plan are shown.
        now_unix_s: time of day, for ages.
    """

    def __init__(
        self,
        find: Callable[[], Path],
        machines: MachineSource | None = None,
        now_unix_s: Callable[[], float] = time.time,
    ) -> None:
        self._find = find
        self._machine_source = machines
        self._now_unix_s = now_unix_s
        self._path: Path | None = None
        self._reader: StatusReader | None = None
        self._history = HistoryFold()
        self._limits: dict[Link, float] = {}
        self._problems: deque[str] = deque(maxlen=_PROBLEMS)

    def read(self, most_events: int) -> float:
        """Read new events.

        Args:
            most_events: maximum number of events.

        Returns:
            The fraction of the log that was read, 1 for all.

        Raises:
            RunDirectoryError: the run does not exist.
            StoreError: the bucket does not answer or refuses.
        """
        reader = self._opened()
        reader.feed(most_events)
        totals = reader.totals
        totals.forget(max(_EACH_STEPS, _ALL_STEPS // max(1, len(totals.regions))))
        self._history.prune()
        return reader.read_fraction

    def view(self) -> RunView:
        """Return the view of the run, as far as it was read.

        Raises:
            RunDirectoryError: as for `read`, or its lease cannot be read.
            StoreError: as for `read`.
        """
        reader = self._opened()
        # Read some more events, because the end of a run is written before the lease is released.
        status = reader.read(_MORE_EVENTS)
        cost = self._cost(reader.totals)
        plan = reader.plan
        return RunView(
            status=status,
            map=map_of(status, self._history.links(self._limits, MOST_LINKS + 1)),
            history=self._history.history(),
            machines=self._machines(reader),
            cost=cost,
            planned=None if plan is None else PlannedTotals(plan.total_s, plan.total_usd),
            problems=(*reader.problems, *self._problems),
        )

    @property
    def is_remote(self) -> bool:
        """Whether reading sends requests to a bucket."""
        return self._reader is not None and self._reader.is_remote

    def _opened(self) -> StatusReader:
        if self._reader is not None and not self._is_same():
            self._reader = None
        if self._reader is None:
            self._path = self._find()
            self._problems.clear()
            self._reader = StatusReader(self._path, beside=self._beside)
            links = self._reader.config.links()
            self._limits = {
                link: spec.rate_mbps for link, spec in links.items() if spec.rate_mbps is not None
            }
        return self._reader

    def _is_same(self) -> bool:
        """Return whether it is still the same run: its log only grows, except for a torn line."""
        if self._path is None or self._reader is None or not self._path.is_dir():
            return False
        if self._reader.is_remote:
            return True  # its copy reports changes itself
        log = self._path / EVENTS_FILE
        try:
            return log.stat().st_size >= self._reader.read_bytes
        except OSError:
            return self._reader.read_bytes == 0

    def _beside(self) -> Beside:
        """Restart, because the log is a different one."""
        self._history = HistoryFold(self._usd)
        return lambda event, totals: self._history.feed(event, totals)

    def _usd(self, totals: RunTotals) -> float | None:
        cost = self._cost(totals)
        total = None if cost is None else cost.total("USD")
        return None if total is None else total.actual

    def _cost(self, totals: RunTotals) -> Cost | None:
        plan = None if self._reader is None else self._reader.plan
        if plan is None or totals.started is None:
            return None
        return compare_cost(plan, Spent.of(totals))

    def _machines(self, reader: StatusReader) -> MachinesView | None:
        try:
            return _machines_of(
                self._machine_source, reader.leases, reader.plan, self._now_unix_s()
            )
        except GeoRayError as error:
            self._note(error)
            return None

    def _note(self, error: GeoRayError) -> None:
        text = f"{error.code}: {error.message}"
        if text not in self._problems:
            self._problems.append(text)
