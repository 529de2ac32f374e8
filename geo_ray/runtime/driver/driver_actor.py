"""Drives one run in a process of the cluster, whatever becomes of the one that asked for it.

It is a detached actor: it outlives the job that made it, and ends by itself, once the run is over
and whoever watches has heard so. If it is killed, Ray starts it again, and it goes on with the run:
with its processes, which have a steward, or else from its newest checkpoint.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import ray

from geo_ray.errors import (
    GeoRayError,
    InterruptedRunError,
    InvariantError,
)
from geo_ray.job import rundir
from geo_ray.observe.events.log import EVENTS_FILE, EventTail
from geo_ray.observe.events.schema import Event
from geo_ray.observe.metrics.summary import Summary
from geo_ray.observe.report.ending import has_begun
from geo_ray.observe.text import coarse_text
from geo_ray.runtime.control.calls import kill
from geo_ray.runtime.control.interruption import Interruption
from geo_ray.runtime.driver.attendance import Attendance
from geo_ray.runtime.driver.order import DriveOrder, DriverTold
from geo_ray.runtime.driver.run_cluster import Reporting
from geo_ray.runtime.driver.train import Resumption, train

_TICK_S: Final = 0.5
_MOST_LINES: Final = 1000
_AWAY_AFTER_S: Final = 5.0  # who has not asked for so long does not watch any more
_LINGERS_S: Final = 20.0  # for who comes to hear how it ended


class DriverActor:
    """See the module's docstring.

    Args:
        order: the run.
        cwd: the working directory of who asked for it.
        path: where that process looks for modules.
    """

    def __init__(self, order: DriveOrder, cwd: str, path: Sequence[str]) -> None:
        with suppress(OSError):
            os.chdir(cwd)
        sys.path.extend(entry for entry in path if entry not in sys.path)
        self._order = order
        self._experiment = order.experiment
        self._lock = threading.Lock()
        self._lines: deque[tuple[str, str]] = deque(maxlen=_MOST_LINES)
        self._next = 0
        self._awaiting: tuple[str, int, int, Sequence[str]] | None = None
        self._interruption = Interruption()
        self._ends_now: BaseException | None = None
        self._summary: Summary | None = None
        self._error: BaseException | None = None
        self._over_s: float | None = None
        self._fronts: dict[str, tuple[float, bool]] = {}
        longest_s = None if order.is_detached else self._experiment.run.unattended_s
        self._attendance = Attendance(longest_s, time.monotonic())
        logging.getLogger().addHandler(_Forward(self._warn))
        context = ray.get_runtime_context()
        self._self = context.current_actor
        self._is_again = bool(context.was_current_actor_reconstructed)
        self._drives = self._self.drive.remote()
        threading.Thread(target=self._keep_watch, name="watch", daemon=True).start()

    def hear(self, front: str, since: int) -> DriverTold:
        """What there is to say to one who watches.

        Args:
            front: its name.
            since: number of the first line that it has not heard.
        """
        now_s = time.monotonic()
        with self._lock:
            self._attendance.hear(now_s)
            is_over = self._over_s is not None
            self._fronts[front] = (now_s, is_over)
            first = self._next - len(self._lines)
            lines = [line for i, line in enumerate(self._lines, first) if i >= since]
            told = (lines, self._next, self._awaiting, is_over, self._summary, self._error)
        return DriverTold(*told)

    def interrupt(self) -> None:
        """Save a checkpoint and stop."""
        self._interruption.set()

    def end_now(self, error: BaseException) -> None:
        """Stop at once, with this error."""
        self._ends_now = error

    # ------------------------------------------------------------------ the run

    def drive(self) -> None:
        """Drive the run to its end; called once, by the actor itself."""
        order, error, summary = self._order, None, None
        try:
            reporting = Reporting(
                self._status,
                (self._take,),
                order.began_unix_s,
                self._await,
                self._interruption,
            )
            resume = order.resume
            if self._is_again and has_begun(order.run.path):
                resume = (resume or Resumption()).again(EventTail(order.run.path / EVENTS_FILE))
            summary = train(
                self._experiment, order.run, reporting, resume=resume, stands=order.cluster
            )
        except BaseException as raised:  # who watches is told, whatever it is
            error = raised
        with self._lock:
            self._summary, self._error = summary, _carried(error)
            self._over_s = time.monotonic()

    def _take(self, event: Event) -> None:
        self._check()
        order = self._order
        if event.kind == "run_started":
            self._awaiting = None
            if order.adopts:
                rundir.adopt(order.run, self._experiment, order.plan)

    def _status(self, text: str) -> None:
        self._check()
        self._say(text)

    def _await(self, phase: str, done: int, total: int, names: Sequence[str]) -> None:
        self._check()
        self._awaiting = (phase, done, total, tuple(names))

    def _check(self) -> None:
        """End the run where it is, if that was asked for."""
        error = self._ends_now
        if error is not None:
            self._ends_now = None  # once: what is done at the end tells phases, too
            raise error

    def _say(self, text: str, logger: str = "") -> None:
        with self._lock:
            self._lines.append((text, logger))
            self._next += 1
            self._awaiting = None

    def _warn(self, logger: str, text: str) -> None:
        self._say(text, logger)

    # ------------------------------------------------------------------ around the run

    def _keep_watch(self) -> None:
        while True:
            time.sleep(_TICK_S)
            now_s = time.monotonic()
            if self._over_s is not None:
                if self._is_heard_out(now_s):
                    kill(self._self)  # else it would be started again
                    time.sleep(_TICK_S)
                    os._exit(0)
                continue
            self._end_if_unattended(now_s)

    def _end_if_unattended(self, now_s: float) -> None:
        with self._lock:
            is_over = self._attendance.is_over(now_s)
        if is_over and not self._interruption.is_set():
            longest_s = self._attendance.longest_s or 0.0
            self._interruption.set(
                InterruptedRunError(f"nobody has watched the run for {coarse_text(longest_s)}")
            )

    def _is_heard_out(self, now_s: float) -> bool:
        """Whether everybody who watches knows how the run ended."""
        since_s = now_s - (self._over_s or now_s)
        with self._lock:
            there = [told for at_s, told in self._fronts.values() if now_s - at_s < _AWAY_AFTER_S]
        # One that has just heard gets its answer before the process ends.
        return since_s >= _LINGERS_S or (since_s >= 2 * _TICK_S and bool(there) and all(there))


class _Forward(logging.Handler):
    """Gives warnings to who watches the run."""

    def __init__(self, take: object) -> None:
        super().__init__(logging.WARNING)
        self._take = take

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.startswith("geo_ray") and callable(self._take):
            self._take(record.name, record.getMessage())


def _carried(error: BaseException | None) -> BaseException | None:
    """The error as another process can read it, whatever modules that has."""
    if error is None or isinstance(error, GeoRayError):
        return error
    if isinstance(error, KeyboardInterrupt):
        return KeyboardInterrupt()
    return InvariantError(f"{type(error).__name__}: {error}")
