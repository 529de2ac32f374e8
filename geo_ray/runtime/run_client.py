"""Starts supervised runs and watches them: forwards events, phases, results and Ctrl-C.

The watching process does not execute the run. If it dies, the run continues for `run.unattended_s`.
"""

from __future__ import annotations

import logging
import secrets
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from geo_ray.base.errors import (
    GeoRayError,
    HeadLostError,
    InvariantError,
    RayUnreachableError,
    RunActorLostError,
    RunHeldError,
)
from geo_ray.experiment.experiment import Experiment
from geo_ray.planner.plan import Plan
from geo_ray.ray_cluster.calls import Handle, failure_of, kill
from geo_ray.ray_cluster.connect import ConnectedCluster, connect, keep_logs, wait_for_ray
from geo_ray.ray_cluster.demand import by_label
from geo_ray.runs.directory import RunDirectory, lease_of
from geo_ray.runs.lease import LEASE_KEY, decode_record, has_ended
from geo_ray.runtime.run_context import Reporting
from geo_ray.runtime.run_order import Resumption, RunEnd, RunOrder, noted_end
from geo_ray.runtime.run_start import check_inputs
from geo_ray.runtime.spec import demand_of
from geo_ray.runtime.supervisor import NAMESPACE, RunNews, RunState, Supervisor, supervisor_name
from geo_ray.storage.conditional_store import LocalConditionalStore
from geo_ray.telemetry.event_log import EVENTS_FILE, LOGS_DIRECTORY, EventTail, newest_segment
from geo_ray.telemetry.events import Event, RunObserver
from geo_ray.telemetry.summary import Summary

_ASK_EVERY_S: Final = 0.15
_ANSWER_S: Final = 15.0
_START_S: Final = 60.0
_FREE_S: Final = 20.0
_END_S: Final = 20.0  # longer than a supervisor gives the run actor to end
_HEAD_S: Final = 3.0


def cluster_of(
    experiment: Experiment, observer: RunObserver
) -> AbstractContextManager[ConnectedCluster]:
    """Return the cluster of a run from `connect`, with resources for the whole run."""
    demands = by_label([demand_of(experiment, region) for region in experiment.regions])
    observer.status("starting the cluster" if experiment.cluster.kind == "local" else "connecting")
    return connect(
        experiment.cluster,
        experiment.labels,
        namespace=f"geo_ray-{experiment.name}",
        cpus_per_region=max(demand.total().get("CPU", 0.0) for demand in demands),
    )


@dataclass(frozen=True, slots=True)
class RunRequest:
    """A request to start or resume a run.

    Attributes:
        experiment: its configuration.
        run: its directory.
        resume: how the run continues; None: it starts from the beginning.
        adopts: whether the configuration differs from the one in the directory.
        plan: plan to follow from now on, if it differs from the previous one.
        detach: whether to return as soon as it trains; the run then needs no watcher.
    """

    experiment: Experiment
    run: RunDirectory
    resume: Resumption | None = None
    adopts: bool = False
    plan: Plan | None = None
    detach: bool = False

    def order(self, began_unix_s: float, log_bytes: int) -> RunOrder:
        """Return the order for the supervisor."""
        return RunOrder(
            self.experiment.model_dump_json(),
            self.run,
            self.resume and replace(self.resume, log_bytes=log_bytes),
            began_unix_s,
            str(Path.cwd()),
            tuple(sys.path),
            None if self.detach else self.experiment.run.unattended_s,
            self.adopts,
            self.plan,
        )


def drive(
    request: RunRequest, reporting: Reporting, cluster: ConnectedCluster | None = None
) -> Summary | None:
    """Start a supervised run on its cluster and watch it to its end.

    Args:
        request: the run.
        reporting: receives its progress.
        cluster: the cluster that this process is connected to; None: connect as configured.

    Returns:
        The run's summary; None if it was detached from.

    Raises:
        GeoRayError: the run ended early; the class says why.
        KeyboardInterrupt: the user ended it immediately.
    """
    reporting.status("checking task and data")
    check_inputs(request.experiment, request.run, goes_on=request.resume is not None)
    with ExitStack() as stack:
        if cluster is None:
            cluster = stack.enter_context(cluster_of(request.experiment, reporting.observer))
        log = EventTail(request.run.path / EVENTS_FILE)
        for _ in log.new():
            pass  # skip events before this run segment
        order = request.order(reporting.began_unix_s, log.read_bytes)
        reporting.status("starting the run actor")
        signals = stack.enter_context(counted_signals())  # they end a run that is starting
        supervisor, is_new = _start(order)
        watcher = RunWatcher(
            supervisor, request.run, reporting.observer, cluster, log, signals, is_new=is_new
        )
        try:
            return watcher.follow(until_begun=request.detach)
        except BaseException as error:
            keeps_logs = watcher.has_begun or not isinstance(error, KeyboardInterrupt)
            logs = request.run.path / LOGS_DIRECTORY
            if keeps_logs and cluster.local is not None and keep_logs(cluster.local.root, logs):
                reporting.status(f"what the actors printed is in {logs}")
            raise


def train_watched(
    request: RunRequest, reporting: Reporting, cluster: ConnectedCluster | None = None
) -> Summary:
    """Do as `drive` for a run without detaching."""
    summary = drive(request, reporting, cluster)
    if summary is None:
        raise InvariantError("a run that is watched to its end has no summary")
    return summary


def watch_running(
    run: RunDirectory, experiment: Experiment, observer: RunObserver, *, detach: bool = False
) -> tuple[bool, Summary | None]:
    """Watch a running run, from the start of its newest segment.

    A run that is being stopped is waited for; it does not continue unless another process resumes
    it.

    Args:
        run: its directory.
        experiment: its configuration.
        observer: receives its progress.
        detach: whether to return immediately; the run then needs no watcher.

    Returns:
        Whether the run is running; its summary, None if it was detached from.

    Raises:
        GeoRayError, KeyboardInterrupt: as for `drive`.
    """
    with cluster_of(experiment, RunObserver()) as cluster:
        supervisor, state = _find(run)
        if supervisor is not None and state is not RunState.RUNNING:
            observer.status("the run is being stopped: waiting for its end")
            while supervisor is not None:
                time.sleep(_ASK_EVERY_S)
                supervisor, state = _find(run)
                if state is RunState.RUNNING:
                    break  # another process has resumed it
        if supervisor is None:
            return False, None
        if detach:
            ray.get(supervisor.detach.remote(), timeout=_ANSWER_S)
        log = EventTail(run.path / EVENTS_FILE)
        with counted_signals() as signals:  # before the run is reported as watched
            watcher = RunWatcher(supervisor, run, observer, cluster, log, signals)
            return True, watcher.join(until_begun=detach)


def may_be_running(run: RunDirectory) -> bool:
    """Return whether a run may have a supervisor that can be watched from this process.

    Its lease is held, or was held until its holder was killed. If the run is in a bucket, the
    holder is on this machine, which then has its events.
    """
    found = (lease_of(run) or LocalConditionalStore(run.path)).read(LEASE_KEY)
    if found is None:
        return False
    record = decode_record(found.data)
    is_here = run.address is None or has_ended(record.owner) is not None
    return is_here and not record.released


def _find(run: RunDirectory, longest_s: float = _ANSWER_S) -> tuple[Handle | None, RunState]:
    """Return the supervisor of an unfinished run in this cluster, if any, and its state.

    Args:
        run: its directory.
        longest_s: longest wait for its answer.
    """
    try:
        supervisor: Any = ray.get_actor(supervisor_name(run), namespace=NAMESPACE)
        news: RunNews = ray.get(supervisor.poll_news.remote("", 0), timeout=longest_s)
    except (ValueError, RayError):  # it does not exist, has just ended, or hangs
        return None, RunState.OVER
    return None if news.state is RunState.OVER else supervisor, news.state


def _start(order: RunOrder) -> tuple[Handle, bool]:
    """Start the supervisor of a run on this node, which can access the run's directory.

    Returns:
        The supervisor, or one that another process has just started; whether it is new.

    Raises:
        RunHeldError: the run is active with another configuration, or its supervisor does not
            answer and cannot be ended.
    """
    node = ray.get_runtime_context().get_node_id()
    kind = ray.remote(Supervisor).options(
        name=supervisor_name(order.run),
        namespace=NAMESPACE,
        lifetime="detached",
        num_cpus=0,
        max_restarts=0,
        max_concurrency=16,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
    )
    deadline_s = time.monotonic() + _FREE_S
    while True:
        try:
            return kind.remote(order), True
        except ValueError as error:  # the name is taken
            running, _ = _find(order.run, _START_S)  # another process may just have started it
            with suppress(RayError):  # it has just ended
                if running is not None and ray.get(running.is_of.remote(order)):
                    return running, False
                if running is not None:
                    raise RunHeldError(
                        f"{order.run.path.name} is running with another configuration",
                        fix="Wait for its end, or stop it with `geo-ray stop`.",
                    ) from error
            with suppress(ValueError):
                kill(ray.get_actor(supervisor_name(order.run), namespace=NAMESPACE))
            if time.monotonic() > deadline_s:
                raise RunHeldError(
                    f"{order.run.path.name} has a supervisor that does not answer and does not end"
                ) from error
            time.sleep(_ASK_EVERY_S)


@dataclass(slots=True)
class SignalCount:
    """Counts the user's requests to end: Ctrl-C or SIGTERM."""

    number: int = 0


@contextmanager
def counted_signals() -> Iterator[SignalCount]:
    """Count Ctrl-C and SIGTERM in the block instead of ending; only in the main thread."""
    count = SignalCount()
    if threading.current_thread() is not threading.main_thread():
        yield count
        return

    def on_signal(number: int, _: Any) -> None:
        count.number += 1  # nothing else: a handler may run at any instruction

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, on_signal) for number in numbers}
    try:
        yield count
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class RunWatcher:
    """A process that watches a run and forwards its user's requests.

    Args:
        supervisor: the supervisor of the run.
        run: its directory.
        observer: receives phases and events.
        cluster: the cluster that this process is connected to.
        log: the run's events, positioned at the first one to forward.
        signals: the first signal saves and stops the run; the second one, or the first one before
            training, ends it immediately; the next one does not wait for its processes.
        is_new: whether this process has just created the supervisor, which has started nothing
            before it answers.
    """

    def __init__(
        self,
        supervisor: Handle,
        run: RunDirectory,
        observer: RunObserver,
        cluster: ConnectedCluster,
        log: EventTail,
        signals: SignalCount,
        *,
        is_new: bool = False,
    ) -> None:
        self._supervisor, self._run, self._observer = supervisor, run, observer
        self._cluster, self._log = cluster, log
        self._name, self._next = secrets.token_hex(4), 0
        self._signals, self._asked = signals, 0
        self._ends_at_s: float | None = None
        self._is_over, self._has_answered = False, not is_new
        self._ends_early = False  # to end the run: there is nothing to save yet
        self._newest: Event | None = None
        self.has_begun = False

    def join(self, *, until_begun: bool = False) -> Summary | None:
        """Do as `follow` for a running run, from the start of its newest segment."""
        self._observer.status("the run is active; watching it")
        for event in newest_segment(self._log):
            self._pass_on_event(event)
        return self.follow(until_begun=until_begun)

    def follow(self, *, until_begun: bool = False) -> Summary | None:
        """Watch until the run is over.

        Args:
            until_begun: return when it trains.

        Returns:
            The run's summary; None if it is still running.

        Raises:
            RunActorLostError: its supervisor died.
            HeadLostError: the head of the cluster died.
            KeyboardInterrupt: the user ended it immediately.
            GeoRayError: the run ended early.
        """
        try:
            return self._follow(until_begun=until_begun)
        except (RunActorLostError, HeadLostError):
            raise
        except BaseException as error:  # the observer raised, which ends the run
            if not self._is_over and self._ends_at_s is None:
                self._end(error)
            raise

    def _follow(self, *, until_begun: bool) -> Summary | None:
        while True:
            try:
                news = self._poll()
            except RunActorLostError:
                self._pass_on_events()
                end = self._noted_end()
                if end is None:
                    raise
                return self._result(end)
            self._pass_on_events()  # those written before the end
            if news is not None:
                self._pass_on(news)
                if news.state is RunState.OVER:
                    return self._result(RunEnd(news.summary, news.error))
            if until_begun and self.has_begun and not self._signals.number:
                return None
            self._pass_signals()
            time.sleep(_ASK_EVERY_S)

    def _result(self, end: RunEnd) -> Summary:
        self._is_over = True
        return end.result()

    def _noted_end(self) -> RunEnd | None:
        """Return how the run ended if its supervisor did not wait for this process; None: it died.

        A receiver of events may be slow. A run that is over has released its lease.
        """
        if self._newest is None or may_be_running(self._run):
            return None
        return noted_end([self._newest])

    def _poll(self) -> RunNews | None:
        """Return the news; None if the supervisor is slow to answer."""
        call = self._supervisor.poll_news.remote(self._name, self._next)
        deadline_s = time.monotonic() + (_START_S if self._next == 0 else 1.0)
        try:
            while not ray.wait([call], timeout=0.2)[0]:
                self._pass_signals()
                if time.monotonic() > deadline_s:
                    return None
            news: RunNews = ray.get(call, timeout=0)
        except GetTimeoutError:
            return None
        except RayError as error:
            if self._signals.number + self._ends_early > 1:
                raise KeyboardInterrupt from error
            raise self._lost(error) from error
        self._has_answered = True
        return news

    def _lost(self, error: RayError) -> GeoRayError:
        try:
            wait_for_ray(self._cluster.address, _HEAD_S)
        except RayUnreachableError:
            return HeadLostError(
                f"the Ray head at {self._cluster.address} is gone, and with it the run actor"
            )
        failure = failure_of(error)
        if failure.is_lost:
            return RunActorLostError(f"the run's supervisor is gone: {failure.cause}")
        return failure.as_error()

    def _pass_on(self, news: RunNews) -> None:
        self._next = news.next
        for text, logger in news.lines:
            if logger:
                logging.getLogger(logger).warning("%s", text)
            else:
                self._observer.status(text)
        wait = news.awaiting
        if wait is not None:
            self._observer.awaiting(wait.phase, wait.done, wait.total, wait.names)

    def _pass_on_events(self) -> None:
        for event in self._log.new():
            self._pass_on_event(event)

    def _pass_on_event(self, event: Event) -> None:
        self._newest = event
        self.has_begun = self.has_begun or event.kind == "run_started"
        self._observer.on_event(event)

    # ------------------------------------------------------------------ the user's requests

    def _pass_signals(self) -> None:
        number = self._signals.number
        if number and not self.has_begun:
            self._ends_early = True
        number += self._ends_early
        if number >= 1 and self._asked < 1:
            self._asked = 1
            self._supervisor.stop.remote()
        if number >= 2 and self._asked < 2:
            self._asked = 2
            self._observer.status("ending the run; Ctrl-C again does not wait for its processes")
            self._supervisor.end_now.remote(KeyboardInterrupt())
            self._ends_at_s = time.monotonic() + (_END_S if self._has_answered else 0.0)
        is_late = self._ends_at_s is not None and time.monotonic() >= self._ends_at_s
        if is_late or number >= 3:
            kill(self._supervisor)  # everything that it owns ends with it
            raise KeyboardInterrupt

    def _end(self, error: BaseException) -> None:
        """End the run with an error of the watching process."""
        plain = InvariantError(
            f"a function that receives the run's events raised {type(error).__name__}: {error}"
        )
        deadline_s = time.monotonic() + _END_S
        with suppress(RayError):
            self._supervisor.end_now.remote(plain)
            while time.monotonic() < deadline_s:
                call = self._supervisor.poll_news.remote(self._name, self._next)
                news: RunNews = ray.get(call, timeout=_END_S)
                if news.state is RunState.OVER:
                    return
                time.sleep(_ASK_EVERY_S)
        kill(self._supervisor)
