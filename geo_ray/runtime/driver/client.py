"""Client of the driver actor: starts a driven run and watches it.

If this process dies the run continues, and the next client watches it.
"""

from __future__ import annotations

import logging
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from geo_ray.base.errors import (
    DriverLostError,
    GeoRayError,
    HeadLostError,
    InvariantError,
    RayUnreachableError,
    RunHeldError,
)
from geo_ray.experiment.experiment import Experiment
from geo_ray.planner.plan import Plan
from geo_ray.ray_cluster.calls import failure_of, kill
from geo_ray.ray_cluster.connect import ConnectedCluster, wait_for_ray
from geo_ray.runs.directory import RunDirectory
from geo_ray.runs.lease import LEASE_KEY, decode_record, has_ended
from geo_ray.runtime.driver.driver_actor import DriveOrder, DriverActor, DriverTold, driver_name
from geo_ray.runtime.driver.run_cluster import Reporting, cluster_of
from geo_ray.runtime.driver.train import Resumption
from geo_ray.storage.conditional_store import LocalConditionalStore
from geo_ray.telemetry.event_log import EVENTS_FILE, EventTail, newest_stretch
from geo_ray.telemetry.events import Event
from geo_ray.telemetry.summary import Summary

Handle = Any  # a Ray actor handle; Ray gives it no useful type

_ASK_EVERY_S: Final = 0.15
_ANSWER_S: Final = 15.0  # longer than a lease lives: who is silent for so long does not drive
_START_S: Final = 60.0
_FREE_S: Final = 20.0
_END_S: Final = 10.0
_HEAD_S: Final = 3.0
_RESTARTS: Final = 20
_AGAIN_S: Final = 60.0  # until a driver that was killed is there again
_log = logging.getLogger(__name__)


def is_driven(run_dir: Path) -> bool:
    """Whether a process may be driving a run: then it is worth looking for its driver."""
    found = LocalConditionalStore(run_dir).read(LEASE_KEY)
    if found is None:
        return False
    record = decode_record(found.data)
    return not record.released and has_ended(record.owner) is not True


def find_driver(run_dir: Path, namespace: str) -> Handle | None:
    """The living driver of a run, if it has one on the cluster that this process is connected to.

    One that is over, or does not answer, is none.
    """
    until_s = time.monotonic() + _ANSWER_S
    while True:
        try:
            handle: Any = ray.get_actor(driver_name(run_dir), namespace=namespace)
            told: Any = ray.get(handle.hear.remote("", 0), timeout=_ANSWER_S)
            return None if told.is_over else handle
        except ActorUnavailableError:  # it was killed, and is being started again
            if time.monotonic() > until_s:
                return None
            time.sleep(_ASK_EVERY_S)
        except (ValueError, RayError):  # there is none, it has just died, or it stands still
            return None


def start_driver(order: DriveOrder) -> Handle:
    """Have a run driven, beside this process: both must see its directory.

    Returns:
        The driver: one that another process has just started, if there is one.

    Raises:
        RunHeldError: what drove the run cannot be ended.
        DriverLostError: it does not start.
    """
    name, namespace = driver_name(order.run.path), order.cluster.namespace
    deadline_s = time.monotonic() + _FREE_S
    while True:
        try:
            return _new_driver(order, name, namespace)
        except ValueError as error:  # the name is taken
            living = find_driver(order.run.path, namespace)
            if living is not None:
                return living
            with suppress(ValueError):
                kill(ray.get_actor(name, namespace=namespace))
            if time.monotonic() > deadline_s:
                raise RunHeldError(
                    f"{order.run.path.name} is being driven by an actor that does not answer"
                ) from error
            time.sleep(_ASK_EVERY_S)


def _new_driver(order: DriveOrder, name: str, namespace: str) -> Handle:
    node = ray.get_runtime_context().get_node_id()
    return (
        ray.remote(DriverActor)
        .options(
            name=name,
            namespace=namespace,
            lifetime="detached",
            num_cpus=0,
            max_restarts=_RESTARTS,
            max_concurrency=8,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        )
        .remote(order, str(Path.cwd()), sys.path)
    )


class RunFront:
    """One process that watches a run and passes its user's wishes on.

    Args:
        driver: the run's driver.
        run_dir: the run's directory.
        reporting: who is told phases and events; its other fields are of no use here.
        cluster: that this process is connected to.
        tail: of the run's events, at the first that is to be told.
    """

    def __init__(
        self,
        driver: Handle,
        run_dir: Path,
        reporting: Reporting,
        cluster: ConnectedCluster,
        tail: EventTail,
    ) -> None:
        self._driver, self._run_dir, self._reporting = driver, run_dir, reporting
        self._cluster, self._tail = cluster, tail
        self._name, self._next = secrets.token_hex(4), 0
        self._signals, self._asked = 0, 0
        self._ends_at_s: float | None = None
        self._away_s: float | None = None
        self.has_begun = False

    def follow(self, *, until_begun: bool = False) -> Summary | None:
        """Watch until the run is over.

        Args:
            until_begun: only until it trains.

        Returns:
            What it came to; None if it goes on.

        Raises:
            DriverLostError: its driver died.
            HeadLostError: so did the head of the cluster.
            KeyboardInterrupt: it was ended at once.
            GeoRayError: whatever ended it early.
        """
        with self._signals_counted():
            try:
                return self._follow(until_begun=until_begun)
            except (DriverLostError, HeadLostError):
                raise
            except Exception as error:  # who is given the events raised: that ends the run
                if not self._is_over:
                    self._end(error)
                raise

    _is_over = False

    def _follow(self, *, until_begun: bool) -> Summary | None:
        while True:
            told = self._hear()
            self._pass_on()  # what was written before it said that it is over
            if told is not None:
                self._tell(told)
                if told.is_over:
                    self._is_over = True
                    if told.error is not None:
                        raise told.error
                    if told.summary is None:
                        raise InvariantError("a run ended without a summary and without an error")
                    return told.summary
            if until_begun and self.has_begun:
                return None
            self._pass_signals()
            time.sleep(_ASK_EVERY_S)

    def _hear(self) -> DriverTold | None:
        """What the driver has to say; None if it is slow to answer."""
        try:
            first_s = _START_S if self._next == 0 else 1.0
            ref = self._driver.hear.remote(self._name, self._next)
            deadline_s = time.monotonic() + first_s
            while not ray.wait([ref], timeout=0.2)[0]:
                self._pass_signals()
                if time.monotonic() > deadline_s:
                    return None
            told: DriverTold = ray.get(ref, timeout=0)
        except GetTimeoutError:
            return None
        except RayError as error:
            if self._signals > 1:
                raise KeyboardInterrupt from error
            if not self._is_coming_back(error):
                raise self._lost(error) from error
            return None
        self._away_s = None
        if told.next < self._next:  # it was started again, and knows nothing of what was asked
            self._next = self._asked = 0
            return None
        return told

    def _is_coming_back(self, error: RayError) -> bool:
        """Whether the driver was killed and is being started again.

        A call that was under way may fail with what killed the driver, such as `OutOfMemoryError`;
        only `ActorDiedError` says that Ray does not start it again.
        """
        if isinstance(error, ActorDiedError) or not failure_of(error).is_lost:
            return False
        if self._away_s is None:
            self._away_s = time.monotonic()
            self._reporting.status("the run's driver was killed: it is started again")
        return time.monotonic() - self._away_s < _AGAIN_S

    def _lost(self, error: RayError) -> GeoRayError:
        try:
            wait_for_ray(self._cluster.address, _HEAD_S)
        except RayUnreachableError:
            return HeadLostError(
                f"the Ray head at {self._cluster.address} is gone, and with it the run's driver"
            )
        failure = failure_of(error)
        if failure.is_lost:
            return DriverLostError(f"the run's driver is gone: {failure.cause}")
        return failure.as_error()

    def _tell(self, told: DriverTold) -> None:
        self._next = told.next
        for text, logger in told.lines:
            if logger:
                logging.getLogger(logger).warning("%s", text)
            else:
                self._reporting.status(text)
        if told.awaiting is not None:
            self._reporting.awaiting(*told.awaiting)

    def _pass_on(self) -> None:
        for event in self._tail.new():
            self.has_begun = self.has_begun or event.kind == "run_started"
            self._give(event)

    def _give(self, event: Event) -> None:
        for sink in self._reporting.sinks:
            sink(event)

    # ------------------------------------------------------------------ the user's wishes

    @contextmanager
    def _signals_counted(self) -> Iterator[None]:
        """Ctrl-C or SIGTERM: save and stop; before training, or the second time: at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def on_signal(number: int, _: Any) -> None:
            self._signals += 1  # and no more: it may have come in the middle of anything

        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, on_signal) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _pass_signals(self) -> None:
        signals = self._signals
        if signals and not self.has_begun:
            signals = max(signals, 2)
        if signals >= 1 and self._asked < 1:
            self._asked = 1
            self._driver.interrupt.remote()
        if signals >= 2 and self._asked < 2:
            self._asked = 2
            self._signals = signals
            self._driver.end_now.remote(KeyboardInterrupt())
            self._ends_at_s = time.monotonic() + _END_S
        if self._ends_at_s is not None and time.monotonic() > self._ends_at_s:
            kill(self._driver)  # its actors and reservations end with it
            raise KeyboardInterrupt

    def _end(self, error: Exception) -> None:
        """End the run; longer than it takes to say so is not waited for."""
        deadline_s = time.monotonic() + _END_S
        with suppress(RayError):
            self._driver.end_now.remote(_plain(error))
            while time.monotonic() < deadline_s:
                told: DriverTold = ray.get(
                    self._driver.hear.remote(self._name, self._next), timeout=_END_S
                )
                if told.is_over:
                    return
                time.sleep(_ASK_EVERY_S)
        kill(self._driver)


def _plain(error: Exception) -> Exception:
    """An error that every process can read."""
    return InvariantError(f"what was given the run's events raised {type(error).__name__}: {error}")


def passed(tail: EventTail) -> EventTail:
    """The tail, past all that there is."""
    for _ in tail.new():
        pass
    return tail


def tail_of(run_dir: Path) -> EventTail:
    """The tail of a run's events, at its beginning."""
    return EventTail(run_dir / EVENTS_FILE)


@dataclass(frozen=True, slots=True)
class Driven:
    """What is to be driven.

    Attributes:
        experiment: the run's configuration.
        run: its directory.
        resume: which checkpoint to go on from; None: begin.
        adopts: whether the configuration is another one than the directory has.
        plan: to follow from now on, if it is another one than before.
        detach: whether to leave it alone as soon as it trains.
    """

    experiment: Experiment
    run: RunDirectory
    resume: Resumption | None = None
    adopts: bool = False
    plan: Plan | None = None
    detach: bool = False


def drive(what: Driven, reporting: Reporting) -> Summary | None:
    """Have a run driven by an actor, and watch it to its end.

    Returns:
        What it came to; None if it was left alone.

    Raises:
        GeoRayError: whatever ends the run early; the class says what.
        KeyboardInterrupt: it was ended at once.
    """
    with cluster_of(what.experiment, reporting.status) as cluster:
        tail = passed(tail_of(what.run.path))
        resume = what.resume and replace(what.resume, log_bytes=tail.read_bytes)
        order = DriveOrder(
            what.experiment.model_dump_json(),
            what.run,
            resume,
            replace(cluster, local=None),
            reporting.began_unix_s,
            what.adopts,
            what.plan,
            what.detach,
        )
        reporting.status("starting the run's driver")
        front = RunFront(start_driver(order), what.run.path, reporting, cluster, tail)
        return front.follow(until_begun=what.detach)


def attach(
    run_dir: Path,
    experiment: Experiment,
    watched: Callable[[Handle, ConnectedCluster], Summary | None],
) -> tuple[bool, Summary | None]:
    """Look for a run's living driver, and watch it if there is one.

    Args:
        run_dir: the run's directory.
        experiment: its configuration.
        watched: what to do with the driver that is found.

    Returns:
        Whether there is one; what the run came to.
    """
    with cluster_of(experiment, lambda text: None) as cluster:
        driver = find_driver(run_dir, f"geo_ray-{experiment.name}")
        if driver is None:
            return False, None
        return True, watched(driver, cluster)


def watch(
    driver: Handle, cluster: ConnectedCluster, run_dir: Path, reporting: Reporting, *, detach: bool
) -> Summary | None:
    """Watch a run that goes on, from where its newest stretch began.

    Returns:
        What it came to; None if it was left alone.

    Raises:
        GeoRayError, KeyboardInterrupt: as for `drive`.
    """
    tail = tail_of(run_dir)
    reporting.status("the run goes on; watching it")
    front = RunFront(driver, run_dir, reporting, cluster, tail)
    for event in newest_stretch(tail):
        front.has_begun = True
        for sink in reporting.sinks:
            sink(event)
    return front.follow(until_begun=detach)
