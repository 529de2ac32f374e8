"""Follows a run for the pages that show it: it may not be there yet, or have ended long ago."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final

from geo_ray.errors import GeoRayError
from geo_ray.job.live.machines import machines_of
from geo_ray.job.status import Beside, StatusReader
from geo_ray.lease.store import ConditionalStore
from geo_ray.observe.events.log import EVENTS_FILE
from geo_ray.observe.metrics.cost import Cost
from geo_ray.observe.metrics.counters import Link
from geo_ray.observe.metrics.totals import RunTotals
from geo_ray.observe.picture.fold import HistoryFold, map_of
from geo_ray.observe.picture.map_section import MOST_LINKS
from geo_ray.observe.picture.view import MachinesView, PlannedTotals, RunView
from geo_ray.planning.actual import Spent, held_against

# Steps that a resumption may take back (see `RunTotals.forget`): of all regions, of each at least.
_ALL_STEPS: Final = 200_000
_EACH_STEPS: Final = 2_000
_PROBLEMS: Final = 5
_MORE_EVENTS: Final = 10_000


class LiveReader:
    """Reads a run again and again, each time what is new. Changes nothing in it.

    Args:
        find: gives the run's directory; raises while there is none.
        machines: where the autoscaler's journal lies; None: where the run's lease does.
        now_unix_s: time of day, by which ages are told.
    """

    def __init__(
        self,
        find: Callable[[], Path],
        machines: ConditionalStore | None = None,
        now_unix_s: Callable[[], float] = time.time,
    ) -> None:
        self._find = find
        self._journal = machines
        self._now_unix_s = now_unix_s
        self._path: Path | None = None
        self._reader: StatusReader | None = None
        self._history = HistoryFold()
        self._limits: dict[Link, float] = {}
        self._problems: deque[str] = deque(maxlen=_PROBLEMS)

    def read(self, most_events: int) -> float:
        """Read on.

        Args:
            most_events: read no more than so many.

        Returns:
            Which part of the log was read, 1 if all of it was.

        Raises:
            RunDirectoryError: there is no run (yet, or any more).
            StoreError: the bucket does not answer or refuses.
        """
        reader = self._opened()
        reader.feed(most_events)
        totals = reader.totals
        totals.forget(max(_EACH_STEPS, _ALL_STEPS // max(1, len(totals.regions))))
        self._history.prune()
        return reader.read_share

    def view(self) -> RunView:
        """Give all that is shown of the run, as far as it was read.

        Raises:
            RunDirectoryError: as for `read`, or its lease cannot be read.
            StoreError: as for `read`.
        """
        reader = self._opened()
        # Some events more: whoever ends a run writes those before it gives the lease back.
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
    def is_far(self) -> bool:
        """Whether every look asks a bucket."""
        return self._reader is not None and self._reader.is_far

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
        """Whether it is still the run that was opened: its log only grows, but for a torn line."""
        if self._path is None or self._reader is None or not self._path.is_dir():
            return False
        if self._reader.is_far:
            return True  # whose copy says itself what has become of it
        log = self._path / EVENTS_FILE
        try:
            return log.stat().st_size >= self._reader.read_bytes
        except OSError:
            return self._reader.read_bytes == 0

    def _beside(self) -> Beside:
        """Begin anew: the log is one that was not read yet."""
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
        return held_against(plan, Spent.of(totals))

    def _machines(self, reader: StatusReader) -> MachinesView | None:
        try:
            store = self._journal or reader.leases
            return machines_of(store, reader.plan, self._now_unix_s())
        except GeoRayError as error:
            self._note(error)
            return None

    def _note(self, error: GeoRayError) -> None:
        text = f"{error.code}: {error.message}"
        if text not in self._problems:
            self._problems.append(text)
