"""Reads a queue repeatedly for its pages; the queue may not exist yet."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final

from geo_ray.base.clock import Clock, SystemClock
from geo_ray.base.text import coarse_text, duration_text, number_text
from geo_ray.runs.lease import LEASE_KEY, LeaseWatch, decode_record, has_ended
from geo_ray.scheduler.queue.page import BarKind, QueueBar, QueueLane, QueueView, RegionCapacityRow
from geo_ray.scheduler.queue.report import JobSegmentRow, QueueJobRow, QueueReader, QueueReport
from geo_ray.scheduler.queue.slots import workers_text
from geo_ray.scheduler.queue.state import QueueLocation

_MOST_ENDED: Final = 500


class QueueLiveReader:
    """Reads new entries of a queue repeatedly, without changes to it.

    Args:
        location: location of the queue.
        now_unix_s: returns the time of day.
        clock: monotonic clock that detects an unresponsive server; None: the system clock.
    """

    def __init__(
        self,
        location: QueueLocation,
        now_unix_s: Callable[[], float] = time.time,
        clock: Clock | None = None,
    ) -> None:
        self._location, self._now_unix_s = location, now_unix_s
        self._clock = clock or SystemClock()
        self._reader = QueueReader(location)
        self._watch = LeaseWatch()

    @property
    def is_remote(self) -> bool:
        """Whether every read accesses a bucket."""
        return self._location.is_remote

    def read(self, most_events: int) -> float:
        """Read all new entries.

        Raises:
            QueueMissingError: the queue does not exist (yet).
        """
        del most_events
        self._reader.read()
        return 1.0

    def view(self) -> QueueView:
        """Return the view model of the queue.

        Raises:
            QueueMissingError: the queue does not exist (yet).
        """
        return view_of(self.report(), self._now_unix_s())

    def report(self) -> QueueReport:
        """Read new entries; return the report with forecast and whether the queue is served.

        Raises:
            QueueMissingError: the queue does not exist (yet).
        """
        report = self._reader.report(self._now_unix_s())
        return report.model_copy(update={"is_served": self._is_served()})

    def _is_served(self) -> bool | None:
        found = self._location.store().read(LEASE_KEY)
        if found is None:
            return False
        record = decode_record(found.data)
        if record.released or has_ended(record.owner):
            return False
        return self._watch.see(record, self._clock.now_s())


def _ended_unix_s(row: QueueJobRow) -> float:
    return row.ended_unix_s or 0.0


def view_of(report: QueueReport, now_unix_s: float) -> QueueView:
    """Return the view model of a report.

    Args:
        report: the report.
        now_unix_s: current time.
    """
    living = [row for row in report.jobs if row.state != "ended"]
    ended = [row for row in report.jobs if row.state == "ended"]
    ended.sort(key=_ended_unix_s, reverse=True)
    shown = [*living, *ended[:_MOST_ENDED]]
    origin_s = min((row.submitted_unix_s for row in shown), default=now_unix_s)
    running = [row for row in living if row.state == "running"]
    utility = sum(row.utility or 0.0 for row in ended)
    slot = "no slot yet" if report.slot is None else f"slot {report.slot}"
    return QueueView(
        report.name,
        report.is_served,
        (
            f"{report.policy}, {slot} of {duration_text(report.slot_s)}",
            f"runs in {report.runs}",
        ),
        (
            ("run", f"{len(running):,}"),
            ("wait", f"{sum(row.state == 'waiting' for row in living):,}"),
            ("ended", f"{len(ended):,}"),
            ("utility of those", number_text(utility)),
            ("written", f"{coarse_text(max(0.0, now_unix_s - report.written_unix_s))} ago"),
        ),
        tuple(_lane(row, origin_s, now_unix_s) for row in shown),
        tuple(_capacity(name, units, running) for name, units in report.capacity.items()),
        now_unix_s - origin_s,
    )


def _lane(row: QueueJobRow, origin_s: float, now_unix_s: float) -> QueueLane:
    bars = []
    for each in row.segments:
        lasts = each.until_unix_s is None
        bars.append(_bar(each, "has" if lasts else "had", origin_s, now_unix_s))
    for each in row.planned:
        bars.append(_bar(each, "planned", origin_s, now_unix_s))
    deadline_s = (
        None if row.deadline_s is None else row.submitted_unix_s + row.deadline_s - origin_s
    )
    message = row.message if row.code is None else f"{row.code}: {row.message}"
    return QueueLane(
        row.name,
        row.tenant,
        row.outcome or row.state,
        row.state == "ended",
        tuple(bars),
        row.submitted_unix_s - origin_s,
        deadline_s,
        (message, f"{row.value:g}", f"{row.done:.0%}", f"{row.factor:.2f}", str(row.attempts)),
    )


def _bar(each: JobSegmentRow, kind: BarKind, origin_s: float, now_unix_s: float) -> QueueBar:
    until_s = now_unix_s if each.until_unix_s is None else each.until_unix_s
    since_s = each.since_unix_s
    return QueueBar(
        since_s - origin_s, max(until_s, since_s) - origin_s, kind, workers_text(each.workers)
    )


def _capacity(
    name: str, units: tuple[float, float], running: list[QueueJobRow]
) -> RegionCapacityRow:
    has: Mapping[str, int]
    there = 0
    for row in running:
        has = row.segments[-1].workers if row.segments else {}
        there += name in has
    return RegionCapacityRow(name, (f"{units[0]:g}", f"{units[1]:g}", str(there)))
