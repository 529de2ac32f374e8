"""The driver as a detached actor, which outlives the job that started it.

It ends after the run, once a watcher has heard the result, or when nobody watches. If it is
killed, Ray restarts it, and it continues with the running processes or from the newest
checkpoint.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import ray

from geo_ray.base.errors import GeoRayError, InterruptedRunError, InvariantError
from geo_ray.base.text import coarse_text
from geo_ray.base.user_section import context
from geo_ray.experiment.experiment import Experiment
from geo_ray.planner.plan import Plan
from geo_ray.ray_cluster.calls import kill
from geo_ray.ray_cluster.connect import ConnectedCluster
from geo_ray.runs import directory
from geo_ray.runs.directory import RunDirectory
from geo_ray.runs.requests import Interruption
from geo_ray.runtime.driver.run_cluster import Reporting
from geo_ray.runtime.driver.train import Resumption, train
from geo_ray.telemetry.event_log import EVENTS_FILE, EventTail, has_begun
from geo_ray.telemetry.events import Event
from geo_ray.telemetry.summary import Summary


@dataclass(slots=True)
class Attendance:
    """Whether somebody watches a run.

    Attributes:
        longest_s: for how long nobody may watch; None: for ever.
        heard_s: when somebody was last heard.
    """

    longest_s: float | None
    heard_s: float

    def hear(self, now_s: float) -> None:
        """Somebody watches."""
        self.heard_s = max(self.heard_s, now_s)

    def is_over(self, now_s: float) -> bool:
        """Whether nobody has watched for too long."""
        return self.longest_s is not None and now_s - self.heard_s >= self.longest_s


@dataclass(frozen=True, slots=True)
class DriveOrder:
    """A run to be driven to its end.

    Attributes:
        experiment_json: its configuration.
        run: its directory.
        resume: as for `geo_ray.runtime.driver.train.train`.
        cluster: to run on.
        began_unix_s: time of day of the user's command.
        adopts: whether the configuration is another one than the directory has.
        plan: to follow from now on, if it is another one than before.
        is_detached: whether nobody is meant to watch.
    """

    experiment_json: str
    run: RunDirectory
    resume: Resumption | None
    cluster: ConnectedCluster
    began_unix_s: float
    adopts: bool = False
    plan: Plan | None = None
    is_detached: bool = False

    @property
    def experiment(self) -> Experiment:
        """The configuration as a tree."""
        given = context(self.run.base_dir)
        return Experiment.model_validate_json(self.experiment_json, context=given)


@dataclass(frozen=True, slots=True)
class DriverTold:
    """What a driver has to say to who watches it; events are in the run's log.

    Attributes:
        lines: phases since the last time, in order, and warnings, each with its logger's name.
        next: the number of the first line that is not among them.
        awaiting: (phase, done, total, names) of a wait that is going on.
        is_over: whether the run has ended.
        summary: what it came to.
        error: what ended it early.
    """

    lines: Sequence[tuple[str, str]]
    next: int
    awaiting: tuple[str, int, int, Sequence[str]] | None = None
    is_over: bool = False
    summary: Summary | None = None
    error: BaseException | None = field(default=None)


def driver_name(run_dir: Path) -> str:
    """The name of a run's driver among the actors of its namespace: there is at most one."""
    return f"driver-{hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()[:16]}"


_TICK_S: Final = 0.5
_MOST_LINES: Final = 1000
_AWAY_AFTER_S: Final = 5.0  # who has not asked for so long does not watch any more
_LINGERS_S: Final = 20.0  # for who comes to hear how it ended


class DriverActor:
    """Drives one run in a process of the cluster, whatever becomes of the one that asked for it.

    It is a detached actor: it outlives the job that made it, and ends by itself, once the run is
    over and whoever watches has heard so. If it is killed, Ray starts it again, and it goes on with
    the run: with its processes, which have a steward, or else from its newest checkpoint.

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
                directory.adopt(order.run, self._experiment, order.plan)

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
