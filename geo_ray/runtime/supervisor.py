"""The supervisor of a run: a small detached actor that owns everything the run loop needs.

Placement groups, processes and keys belong to it, so they survive the death of a run actor. It
starts the run actor as its child and restarts it when it dies or hangs; the run then continues with
the running processes or from its newest checkpoint. It executes no user code. When it ends or is
killed, Ray ends everything that it owns.
"""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from geo_ray.base.errors import (
    GeoRayError,
    HeadLostError,
    InterruptedRunError,
    LeaseLostError,
    RunActorLostError,
)
from geo_ray.base.text import coarse_text
from geo_ray.ray_cluster.calls import Handle, failure_of, kill
from geo_ray.ray_cluster.connect import head_answers
from geo_ray.ray_cluster.demand import RegionDemand
from geo_ray.ray_cluster.keys import BridgeKeys, Introduction
from geo_ray.ray_cluster.placement import PlacedRegion, remove
from geo_ray.ray_cluster.ray_internals import actor_id
from geo_ray.runs.directory import RunDirectory
from geo_ray.runtime.launcher import Handoff, HandoffRecord, OwnProcesses, ProcessSpec, load_classes
from geo_ray.runtime.run_order import RunEnd, RunOrder, StartWait, UserRequests
from geo_ray.telemetry.summary import Summary
from geo_ray.transport.config import TransportConfig
from geo_ray.transport.security.process_keys import SignedCertificate

log = logging.getLogger(__name__)

NAMESPACE: Final = "geo_ray-runs"
"""Ray namespace of all runs' supervisors."""

_TICK_S: Final = 0.1
_MOST_LINES: Final = 1000
_MOST_RESTARTS: Final = 20
_MOST_FAILED_STARTS: Final = 3  # consecutive run actors that die before the run trains
_HUNG_S: Final = 60.0
_ENDS_S: Final = 10.0  # limit for an immediate end of the run actor
_AWAY_AFTER_S: Final = 5.0  # a watcher without a request for this long has left
_LINGERS_S: Final = 20.0  # for watchers that have not received the run's end yet
_ANSWERED_S: Final = 0.5  # until the last answer has reached its watcher
_PAUSED_S: Final = 5.0  # between two iterations: this process itself was stopped
_HEAD_BACK_S: Final = 15.0  # wait of a start for an unresponsive head, which is cached for 10 s


@dataclass(slots=True)
class WatcherLiveness:
    """Tracks whether a run has a watcher.

    Attributes:
        longest_s: longest time without a watcher; None: unlimited.
        last_seen_s: time of the last request of a watcher.
    """

    longest_s: float | None
    last_seen_s: float

    def saw_watcher(self, now_s: float) -> None:
        """Record a request of a watcher."""
        self.last_seen_s = max(self.last_seen_s, now_s)

    def pass_over(self, seconds: float, now_s: float) -> None:
        """Exclude a period that ends now and in which no request could arrive."""
        self.last_seen_s = min(now_s, self.last_seen_s + seconds)

    def is_over(self, now_s: float) -> bool:
        """Return whether the run had no watcher for too long."""
        return self.longest_s is not None and now_s - self.last_seen_s >= self.longest_s


@dataclass(slots=True)
class RestartBudget:
    """Limits the restarts of the run actor. Pure."""

    restarts: int = 0
    failed_starts: int = 0

    def take(self, *, has_trained: bool) -> bool:
        """Record the death of the run actor.

        Args:
            has_trained: whether the run trained under it.

        Returns:
            Whether to start another run actor.
        """
        self.restarts += 1
        self.failed_starts = 0 if has_trained else self.failed_starts + 1
        return self.restarts <= _MOST_RESTARTS and self.failed_starts < _MOST_FAILED_STARTS


class RunState(Enum):
    """The state of a supervised run."""

    RUNNING = "running"
    STOPPING = "stopping"
    """The run ends after a checkpoint is saved."""
    ENDING = "ending"
    """The run ends immediately."""
    OVER = "over"


@dataclass(frozen=True, slots=True)
class RunNews:
    """News for a watcher of a run; events are in the run's log.

    Attributes:
        lines: phases since the last request, in order, and warnings, each with its logger's name.
        next: number of the first line after them.
        state: state of the run.
        awaiting: the wait in progress.
        summary: the run's summary.
        error: the error that ended it early.
    """

    lines: Sequence[tuple[str, str]]
    next: int
    state: RunState
    awaiting: StartWait | None = None
    summary: Summary | None = None
    error: BaseException | None = None


class RunLoopActor:
    """The process of a run's loop. It imports the loop, as the supervisor's process has no PyTorch.

    Args:
        supervisor: the supervisor of the run; it created this actor and owns all its processes.
        order: the run.
        attempt: number of earlier run actors of the run.
    """

    def __init__(self, supervisor: Handle, order: RunOrder, attempt: int) -> None:
        from geo_ray.runtime.run_actor import RunHost

        # SIGTERM ends the process, which is then replaced. Ray's own handler would raise
        # `SystemExit` in the run loop and end the run.
        signal.signal(signal.SIGTERM, _exit)
        self._loop = RunHost(supervisor, order, attempt)

    def process_id(self) -> int:
        """Return the process id of this actor on its node."""
        return os.getpid()

    def run(self) -> RunEnd:
        """Execute the run to its end; called once, by the supervisor."""
        return self._loop.run()


def _exit(_number: int, _frame: object) -> None:
    os._exit(1)


def supervisor_name(run: RunDirectory) -> str:
    """Return the name of a run's supervisor in `NAMESPACE`; a run has at most one."""
    place = run.address or str(run.path.resolve())
    return f"run-{hashlib.sha256(place.encode()).hexdigest()[:16]}"


class Supervisor:
    """The actor's class; see the module. Watchers and the run actor call its methods.

    Commands of the run actor carry the fencing token of its lease; commands of earlier run actors
    are refused.

    Args:
        order: the run.
    """

    def __init__(self, order: RunOrder) -> None:
        self._order = order
        self._lock = threading.Lock()
        self._state = RunState.RUNNING
        # Owned by the run.
        self._token = 0
        self._processes = OwnProcesses()
        self._made: dict[str, Handle] = {}  # by actor id
        self._placed: dict[str, PlacedRegion] = {}
        self._record: HandoffRecord | None = None
        self._attempts: dict[tuple[str, int], int] = {}
        self._newest_attempt = 0
        # State of the run actor.
        self._attempt = -1
        self._has_trained = False
        self._budget = RestartBudget()
        self._actor: Handle = None
        self._call: Any = None
        self._pid: Any = None
        self._beat_s = 0.0
        # State for watchers, and their requests.
        self._lines: deque[tuple[str, str]] = deque(maxlen=_MOST_LINES)
        self._next = 0
        self._awaiting: StartWait | None = None
        self._watchers: dict[str, tuple[float, bool]] = {}
        self._liveness = WatcherLiveness(order.unattended_s, time.monotonic())
        self._requests = UserRequests()
        self._ends_by_s = 0.0
        self._looked_s = time.monotonic()
        self._end = RunEnd(None)
        self._over_s = 0.0
        threading.Thread(target=self._supervise, name="supervise", daemon=True).start()

    # ------------------------------------------------------------------ watchers

    def poll_news(self, watcher: str, since: int) -> RunNews:
        """Return the news for a watcher.

        Args:
            watcher: its name; "" asks without watching.
            since: number of the first line that it has not received.
        """
        now_s = time.monotonic()
        with self._lock:
            if watcher:
                self._liveness.saw_watcher(now_s)
                self._watchers[watcher] = (now_s, self._state is RunState.OVER)
            first = self._next - len(self._lines)
            lines = [line for i, line in enumerate(self._lines, first) if i >= since]
            end = self._end
            return RunNews(lines, self._next, self._state, self._awaiting, end.summary, end.error)

    def is_of(self, order: RunOrder) -> bool:
        """Return whether the run has this configuration and follows this plan."""
        mine = self._order
        return (mine.experiment_json, mine.plan) == (order.experiment_json, order.plan)

    def detach(self) -> None:
        """Let the run continue without a watcher."""
        with self._lock:
            self._liveness.longest_s = None

    def stop(self) -> None:
        """Save a checkpoint and end the run."""
        self._stop(InterruptedRunError("the run was interrupted"))

    def end_now(self, error: BaseException) -> None:
        """End the run immediately, with this error."""
        with self._lock:
            if self._state in (RunState.RUNNING, RunState.STOPPING):
                self._state = RunState.ENDING
                self._requests = UserRequests(self._requests.stop, error)
                self._ends_by_s = time.monotonic() + _ENDS_S

    def _stop(self, why: GeoRayError) -> None:
        with self._lock:
            if self._state is RunState.RUNNING:
                self._state = RunState.STOPPING
                self._requests = UserRequests(why)

    # ------------------------------------------------------------------ the run actor reports

    def beat(
        self, attempt: int, lines: Sequence[tuple[str, str]], awaiting: StartWait | None
    ) -> UserRequests:
        """Process a report of the run actor, and return the users' requests.

        Args:
            attempt: number of the run actor; reports of a replaced one are ignored.
            lines: as for `RunNews`.
            awaiting: the wait in progress.
        """
        with self._lock:
            if attempt == self._attempt:
                self._beat_s = time.monotonic()
                self._lines.extend(lines)
                self._next += len(lines)
                self._awaiting = awaiting
            return self._requests

    # ------------------------------------------------------------------ what the run owns

    def attach(self, token: int) -> Handoff:
        """Return the state left by an earlier run actor, whose commands are refused from now on.

        Args:
            token: fencing token of the caller's lease.
        """
        with self._lock:
            self._check(token)
            self._token = token
            return Handoff(self._record, dict(self._attempts), self._newest_attempt)

    def confirm(self, token: int) -> None:
        """Return if this is the current run actor."""
        self._check(token)

    def begin(
        self, token: int, run_id: str, regions: Sequence[str], transport: TransportConfig
    ) -> None:
        """See `ProcessLauncher.begin`.

        Raises:
            HeadLostError: existing processes cannot be ended.
        """
        deadline_s = time.monotonic() + _HEAD_BACK_S
        while not self._clear(token):
            if time.monotonic() > deadline_s:
                raise HeadLostError("cannot end the processes of the run: the head does not answer")
            time.sleep(_TICK_S)
        self._processes.begin(run_id, regions, transport)

    def note(self, token: int, record: HandoffRecord) -> None:
        """See `ProcessLauncher.note`."""
        self._check(token)
        self._record, self._has_trained = record, True

    def keep_only(self, token: int, handles: Sequence[Handle]) -> None:
        """See `ProcessLauncher.keep_only`."""
        self._keep_only(token, handles)

    def clear(self, token: int) -> None:
        """See `ProcessLauncher.clear`."""
        self._clear(token)

    def make(self, token: int, specs: Sequence[ProcessSpec]) -> list[Handle]:
        """See `ProcessLauncher.make`."""
        self._check(token)
        made = self._processes.make(specs)
        with self._lock:
            if token == self._token:
                self._made |= {actor_id(handle): handle for handle in made}
                for spec in specs:
                    self._newest_attempt = max(self._newest_attempt, spec.attempt)
                    if spec.place is not None:
                        newest = max(self._attempts.get(spec.place, 0), spec.attempt)
                        self._attempts[spec.place] = newest
                return made
        for handle in made:
            kill(handle)
        raise self._overtaken(token)

    def place(
        self, token: int, demands: Sequence[RegionDemand], timeout_s: float
    ) -> dict[str, PlacedRegion]:
        """See `ProcessLauncher.place`."""
        self._check(token)
        placed = self._processes.place(demands, timeout_s)
        with self._lock:
            if token == self._token:
                self._placed |= placed
                return placed
        self._remove(placed.values())
        raise self._overtaken(token)

    def remove(self, token: int, placed: Mapping[str, PlacedRegion]) -> None:
        """See `ProcessLauncher.remove`."""
        self._check(token)
        if self._remove(placed.values()):
            self._forget_places(placed)

    def for_bridge(self, token: int, region: str, introduction: Introduction) -> BridgeKeys:
        """See `ProcessLauncher.for_bridge`."""
        self._check(token)
        return self._processes.for_bridge(region, introduction)

    def for_server(self, token: int, region: str, introduction: Introduction) -> bytes:
        """See `ProcessLauncher.for_server`."""
        self._check(token)
        return self._processes.for_server(region, introduction)

    def sign(self, token: int, region: str, request_pem: bytes) -> SignedCertificate | None:
        """See `ProcessLauncher.sign`."""
        self._check(token)
        return self._processes.sign(region, request_pem)

    def _check(self, token: int) -> None:
        if token < self._token:
            raise self._overtaken(token)

    def _overtaken(self, token: int) -> LeaseLostError:
        return LeaseLostError(
            f"the run was taken over by holder {self._token} of its lease; this process was "
            f"holder {token}"
        )

    def _clear(self, token: int | None = None) -> bool:
        are_ended = self._keep_only(token, ())
        with self._lock:
            placed, self._record = dict(self._placed), None
        are_free = self._remove(placed.values())
        if are_free:
            self._forget_places(placed)
        return are_ended and are_free

    def _keep_only(self, token: int | None, handles: Sequence[Handle]) -> bool:
        """End all other processes; those that an unresponsive head cannot end stay with the run.

        Args:
            token: fencing token of the caller; None: the supervisor itself.
            handles: processes to keep.

        Returns:
            Whether the others were ended.
        """
        wanted = {actor_id(handle) for handle in handles}
        with self._lock:
            if token is not None:
                self._check(token)
            others = {key: each for key, each in self._made.items() if key not in wanted}
        if others and not head_answers():
            log.warning("%d processes still run: the Ray head does not answer", len(others))
            return False
        for handle in others.values():
            kill(handle)
        with self._lock:
            self._made = {key: each for key, each in self._made.items() if key not in others}
        return True

    def _remove(self, placed: Iterable[PlacedRegion]) -> bool:
        return remove({each.region: each for each in placed})

    def _forget_places(self, regions: Container[str]) -> None:
        with self._lock:
            left = {name: each for name, each in self._placed.items() if name not in regions}
            self._placed = left

    # ------------------------------------------------------------------ supervision

    def _supervise(self) -> None:
        """Start the run actor, watch it, and end this process after the run."""
        try:
            self._start()
            load_classes()  # in parallel with the run actor, which loads the same
            while not self._is_finished():
                time.sleep(_TICK_S)
                if self._state is not RunState.OVER:
                    self._watch(time.monotonic())
        except BaseException:
            log.exception("the supervisor of a run failed")
        finally:
            os._exit(0)  # Ray ends everything that this process owns

    def _start(self) -> None:
        with self._lock:
            self._attempt += 1
            self._has_trained, self._beat_s = False, time.monotonic()
        runtime = ray.get_runtime_context()
        here = NodeAffinitySchedulingStrategy(runtime.get_node_id(), soft=False)
        kind = ray.remote(RunLoopActor).options(
            num_cpus=0, max_restarts=0, max_concurrency=1, scheduling_strategy=here
        )
        self._actor = kind.remote(runtime.current_actor, self._order, self._attempt)
        self._pid = self._actor.process_id.remote()
        self._call = self._actor.run.remote()

    def _watch(self, now_s: float) -> None:
        self._pass_over(now_s)
        if ray.wait([self._call], timeout=0)[0]:
            try:
                end = ray.get(self._call)
            except RayError as error:
                self._replace(failure_of(error).cause)
            else:
                self._finish(end)
            return
        if self._state is RunState.ENDING and now_s > self._ends_by_s:
            self._kill_actor()
            self._finish(RunEnd(None, self._requests.end))
        elif now_s - self._beat_s >= _HUNG_S:
            self._kill_actor()
            self._replace(f"it has not answered for {now_s - self._beat_s:.0f} s")
        elif self._liveness.is_over(now_s):
            longest_s = coarse_text(self._liveness.longest_s or 0.0)
            self._stop(InterruptedRunError(f"the run had no watcher for {longest_s}"))

    def _pass_over(self, now_s: float) -> None:
        """Exclude a period in which this process was stopped: no request could arrive."""
        with self._lock:
            gone_s, self._looked_s = now_s - self._looked_s, now_s
            if gone_s >= _PAUSED_S:
                self._liveness.pass_over(gone_s, now_s)
                self._beat_s = min(now_s, self._beat_s + gone_s)
                self._ends_by_s += gone_s

    def _replace(self, cause: str) -> None:
        """Start another run actor in place of one that has died."""
        if self._state is RunState.ENDING:
            self._finish(RunEnd(None, self._requests.end))
        elif self._budget.take(has_trained=self._has_trained):
            self._say(f"the run actor was killed ({cause}): restarting it")
            self._start()
        else:
            self._finish(RunEnd(None, RunActorLostError(f"the run actor is gone: {cause}")))

    def _finish(self, end: RunEnd) -> None:
        """End everything that the run owns, before watchers receive the end."""
        try:
            self._clear()
        finally:
            with self._lock:
                self._end, self._state, self._over_s = end, RunState.OVER, time.monotonic()

    def _say(self, text: str) -> None:
        with self._lock:
            self._lines.append((text, ""))
            self._next += 1
            self._awaiting = None

    def _kill_actor(self) -> None:
        """Kill the run actor, even if a signal has stopped it; it is on this node."""
        kill(self._actor)
        with suppress(RayError, OSError):
            os.kill(ray.get(self._pid, timeout=0), signal.SIGKILL)

    def _is_finished(self) -> bool:
        """Return whether the run is over and every watcher has received its end."""
        if self._state is not RunState.OVER:
            return False
        now_s = time.monotonic()
        with self._lock:
            since_s = now_s - self._over_s
            newest_s = max((at_s for at_s, _ in self._watchers.values()), default=self._over_s)
            heard = [
                is_over for at_s, is_over in self._watchers.values() if now_s - at_s < _AWAY_AFTER_S
            ]
        if since_s >= _LINGERS_S:
            return True
        return now_s - newest_s >= _ANSWERED_S and bool(heard) and all(heard)
