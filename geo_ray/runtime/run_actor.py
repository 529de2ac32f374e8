"""The run actor: hosts a run's loop on a cluster; its supervisor starts and restarts it.

`RunHost` executes user code, so its process may die at any time. `SupervisedLauncher` is its client
of the supervisor, which owns everything that must outlive it.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import ray
from ray.exceptions import RayError

from geo_ray.base.errors import GeoRayError, InvariantError, LeaseLostError, RegionLostError
from geo_ray.experiment.experiment import Experiment
from geo_ray.ray_cluster.calls import Handle, collect
from geo_ray.ray_cluster.demand import RegionDemand
from geo_ray.ray_cluster.keys import BridgeKeys, Introduction
from geo_ray.ray_cluster.placement import PlacedRegion
from geo_ray.runs import directory
from geo_ray.runs.requests import Interruption
from geo_ray.runtime import main
from geo_ray.runtime.launcher import Handoff, HandoffRecord, ProcessSpec
from geo_ray.runtime.run_context import Reporting
from geo_ray.runtime.run_finish import conclude
from geo_ray.runtime.run_order import Resumption, RunEnd, RunOrder, StartWait, UserRequests
from geo_ray.telemetry.event_log import EVENTS_FILE, EventTail, has_begun
from geo_ray.telemetry.events import Event, RunObserver
from geo_ray.telemetry.summary import Summary
from geo_ray.transport.config import TransportConfig
from geo_ray.transport.security.process_keys import SignedCertificate

_log = logging.getLogger(__name__)

_BEAT_S: Final = 0.2
_ANSWER_S: Final = 60.0
_MOST_LINES: Final = 1000


class WatchedProgress(RunObserver):
    """Reports of the run since the last beat, and whether it must end immediately.

    Only the thread that makes it ends the run.

    Args:
        order: the run.
    """

    def __init__(self, order: RunOrder) -> None:
        self._order = order
        self._lock = threading.Lock()
        self._lines: deque[tuple[str, str]] = deque(maxlen=_MOST_LINES)
        self._awaiting: StartWait | None = None
        self._is_ending = False
        self._thread = threading.get_ident()
        self.end_error: BaseException | None = None

    def status(self, text: str) -> None:
        """Report a phase to watchers."""
        self.check()
        self.say(text)

    def awaiting(self, phase: str, done: int, total: int, names: Sequence[str]) -> None:
        """Report a wait to watchers."""
        self.check()
        self._awaiting = StartWait(phase, done, total, tuple(names))

    def on_event(self, event: Event) -> None:
        """Store the configuration of a run that was resumed with a changed one."""
        self.check()
        order = self._order
        if event.kind == "run_started":
            self._awaiting = None
            if order.adopts:
                directory.adopt(order.run, order.experiment, order.plan)

    def say(self, text: str, logger: str = "") -> None:
        """Report a line to watchers: a phase, or a logger's warning."""
        with self._lock:
            self._lines.append((text, logger))
            self._awaiting = None

    def take(self) -> tuple[tuple[tuple[str, str], ...], StartWait | None]:
        """Return lines that were not taken before, and the wait in progress."""
        with self._lock:
            lines, awaiting = tuple(self._lines), self._awaiting
            self._lines.clear()
        return lines, awaiting

    def give_back(self, lines: Sequence[tuple[str, str]]) -> None:
        """Put lines back that did not reach the supervisor."""
        with self._lock:
            self._lines.extendleft(reversed(lines))

    def check(self) -> None:
        """End the run here if this was requested."""
        error = self.end_error
        is_here = threading.get_ident() == self._thread
        if error is not None and is_here and not self._is_ending:
            self._is_ending = True  # the shutdown reports phases, too
            raise error


class RunHost:
    """Executes one run for its supervisor, in the process of a `RunLoopActor`.

    Args:
        supervisor: the supervisor of the run; it created this actor and owns all its processes.
        order: the run.
        attempt: number of earlier run actors of the run.
    """

    def __init__(self, supervisor: Handle, order: RunOrder, attempt: int) -> None:
        with suppress(OSError):
            os.chdir(order.cwd)
        sys.path.extend(entry for entry in order.path if entry not in sys.path)
        self._supervisor, self._order, self._attempt = supervisor, order, attempt
        self._progress, self._interruption = WatchedProgress(order), Interruption()
        self._is_over = threading.Event()

    def run(self) -> RunEnd:
        """Execute the run to its end; called once, by the supervisor."""
        logging.getLogger().addHandler(_Forward(self._progress))
        beats = threading.Thread(target=self._beat_often, name="beats", daemon=True)
        self._try_beat()  # earlier requests count from the start
        beats.start()
        order = self._order
        try:
            end = RunEnd(self._run(order, order.experiment))
        except BaseException as raised:  # reported to watchers, whatever its class
            end = RunEnd(None, _portable(raised))
        self._is_over.set()
        beats.join()
        self._try_beat()
        return end

    def _run(self, order: RunOrder, experiment: Experiment) -> Summary:
        began_unix_s = order.began_unix_s if self._attempt == 0 else time.time()
        reporting = Reporting(self._progress, began_unix_s, self._interruption)
        resume, launcher = order.resume, SupervisedLauncher(self._supervisor, self._progress)
        if self._attempt and has_begun(order.run.path):
            resumption, log = resume or Resumption(begins=True), order.run.path / EVENTS_FILE
            end = resumption.end_noted(EventTail(log))
            if end is not None:
                retry_s = experiment.checkpoint.retry_s
                return conclude(order.run, reporting, launcher, end, retry_s)
            resume = resumption.again(EventTail(log))
        return main.run(experiment, order.run, reporting, launcher, resume=resume)

    def _beat_often(self) -> None:
        while not self._is_over.wait(_BEAT_S):
            self._try_beat()

    def _try_beat(self) -> None:
        """Report to the supervisor; if it does not answer, the next beat repeats the report."""
        lines, awaiting = self._progress.take()
        try:
            beat = self._supervisor.beat.remote(self._attempt, lines, awaiting)
            requests: UserRequests = ray.get(beat)
        except RayError as error:
            _log.debug("the supervisor of the run does not answer: %s", error)
            self._progress.give_back(lines)
            return
        if requests.stop is not None and not self._interruption.is_set():
            self._interruption.set(requests.stop)
        self._progress.end_error = requests.end


class _Forward(logging.Handler):
    """Forwards warnings of this library to the watchers of a run."""

    def __init__(self, progress: WatchedProgress) -> None:
        super().__init__(logging.WARNING)
        self._progress = progress

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.startswith("geo_ray"):
            self._progress.say(record.getMessage(), record.name)


def _portable(error: BaseException) -> BaseException:
    """Convert an error so that processes without the user's modules can unpickle it."""
    if isinstance(error, GeoRayError) and type(error).__module__.startswith("geo_ray."):
        return error
    if isinstance(error, KeyboardInterrupt):
        return KeyboardInterrupt()
    _log.error("the run ended with an unexpected error", exc_info=error)
    return InvariantError(f"{type(error).__name__}: {error}")


class SupervisedLauncher:
    """A `ProcessLauncher` whose processes belong to the run's supervisor and outlive this process.

    Args:
        supervisor: the actor.
        progress: of the run; a request to end it immediately ends a wait for new processes.
    """

    has_places: Final = False

    def __init__(self, supervisor: Handle, progress: WatchedProgress) -> None:
        self._supervisor, self._progress, self._token = supervisor, progress, 0

    def attach(self, token: int) -> Handoff | None:
        """See `ProcessLauncher.attach`."""
        self._token = token
        handoff: Handoff = self._ask("attach")
        return handoff

    def begin(self, run_id: str, regions: Sequence[str], transport: TransportConfig) -> None:
        """See `ProcessLauncher.begin`."""
        self._ask("begin", run_id, tuple(regions), transport)

    def make(self, specs: Sequence[ProcessSpec]) -> list[Handle]:
        """See `ProcessLauncher.make`."""
        made: list[Handle] = self._ask("make", list(specs), may_end=True)
        return made

    def place(self, demands: Sequence[RegionDemand], timeout_s: float) -> dict[str, PlacedRegion]:
        """See `ProcessLauncher.place`."""
        placed: dict[str, PlacedRegion] = self._ask(
            "place", list(demands), timeout_s, timeout_s=timeout_s + _ANSWER_S, may_end=True
        )
        return placed

    def remove(self, placed: Mapping[str, PlacedRegion]) -> None:
        """See `ProcessLauncher.remove`; a superseded run actor removes nothing."""
        with suppress(RegionLostError, LeaseLostError):
            self._ask("remove", dict(placed))

    def keep_only(self, handles: Sequence[Handle]) -> None:
        """See `ProcessLauncher.keep_only`."""
        self._ask("keep_only", list(handles))

    def clear(self) -> None:
        """See `ProcessLauncher.clear`."""
        self._ask("clear")

    def is_ours(self) -> bool:
        """See `ProcessLauncher.is_ours`."""
        try:
            self._ask("confirm")
        except (RegionLostError, LeaseLostError):
            return False
        return True

    def note(self, record: HandoffRecord) -> None:
        """See `ProcessLauncher.note`; does not wait."""
        self._supervisor.note.remote(self._token, record)

    def for_bridge(self, region: str, introduction: Introduction) -> BridgeKeys:
        """See `ProcessLauncher.for_bridge`."""
        keys: BridgeKeys = self._ask("for_bridge", region, introduction)
        return keys

    def for_server(self, region: str, introduction: Introduction) -> bytes:
        """See `ProcessLauncher.for_server`."""
        key: bytes = self._ask("for_server", region, introduction)
        return key

    def sign(self, region: str, request_pem: bytes) -> SignedCertificate | None:
        """See `ProcessLauncher.sign`."""
        signed: SignedCertificate | None = self._ask("sign", region, request_pem)
        return signed

    def _ask(
        self, method: str, *arguments: Any, timeout_s: float = _ANSWER_S, may_end: bool = False
    ) -> Any:
        """Call the supervisor; ``may_end``: a request to end the run ends the wait.

        Not at the end of a run, which a late request must not turn into a failure.
        """

        def waits(done: int, total: int, names: Sequence[str]) -> None:
            if may_end:
                self._progress.check()

        call = getattr(self._supervisor, method).remote(self._token, *arguments)
        return collect({"supervisor": call}, timeout_s, waits)["supervisor"]
