"""A run that restarts itself from a checkpoint: its clock, and restarts whose own start fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from geo_ray.base.errors import (
    CheckpointMissingError,
    GeoRayError,
    InterruptedRunError,
    PlacementError,
    PreflightError,
    RegionLostError,
    StoreError,
)
from geo_ray.base.load import load_text
from geo_ray.base.restarts import Restarts
from geo_ray.data.tasks.checked_calls import RowWork
from geo_ray.data.tasks.digits import Digits
from geo_ray.experiment.experiment import Experiment
from geo_ray.runs import directory as rundir
from geo_ray.runs.requests import Interruption
from geo_ray.runtime import main, run_finish, run_start
from geo_ray.runtime.launcher import GoneRegions, OwnProcesses
from geo_ray.runtime.run_context import BrokenError, Reporting, RunContext, Training
from geo_ray.runtime.run_order import Resumption, RunClock
from geo_ray.telemetry.event_log import EVENTS_FILE, read_events
from geo_ray.telemetry.summary import Summary, summarise
from tests.support.job_support import TEXT
from tests.support.observe_support import started, step, write
from tests.support.train_support import Phases

BEGAN_UNIX_S = 1_000_000.0
LOST = RegionLostError("the averager's region is lost")


class Driver:
    """A run actor of a run whose actors only exist by name, with a fake clock."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        sets = [f"run.dir={directory}/runs"]
        self.experiment = load_text(TEXT, sets, Experiment, "trial.yaml")
        self.run = rundir.create(self.experiment, directory)
        self.unix_s, self.told, self.slept = BEGAN_UNIX_S, list[str](), list[float]()
        self.reporting = Reporting(Phases(self.told), BEGAN_UNIX_S)
        self.start_fails: Callable[[], None] = lambda: None
        self.trains: Iterator[Callable[[Any], None]] = iter(())
        fake_time = SimpleNamespace(time=lambda: self.unix_s, monotonic=lambda: self.unix_s)

        def wait(interruption: Interruption, longest_s: float) -> bool:
            self.slept.append(longest_s)
            return interruption.is_set()

        monkeypatch.setattr(Interruption, "wait", wait)
        for module in (main, run_start, run_finish):
            monkeypatch.setattr(module, "time", fake_time)
        monkeypatch.setattr(run_start, "controller_of", self._controller)

    def broken(self, resume: Resumption | None) -> BrokenError:
        with pytest.raises(BrokenError) as found:
            self.segment(resume)
        return found.value

    def segment(self, resume: Resumption | None) -> Summary:
        """Start the processes and train, as one run actor of the run."""
        actors = SimpleNamespace(
            create=lambda regions: None,
            await_ready=lambda timeout_s, tell: self.start_fails(),
            wire=lambda origin_unix_s, timeout_s, tell: None,
            close=lambda: None,
            upload_server=None,
        )
        lease = SimpleNamespace(from_unknown=False, check=lambda: None)
        saver = SimpleNamespace(close=lambda: None)
        task = Digits(Digits.Options(width=2))
        context = RunContext(actors, self.experiment, self.run, task, saver, self.reporting, lease)  # type: ignore[arg-type]
        with run_start._training(context, GoneRegions(), resume, None, RowWork()) as training:
            return self._train(training)

    def drive(self) -> Summary:
        return main.run(self.experiment, self.run, self.reporting, OwnProcesses())

    def _controller(
        self, context: RunContext, recorder: Any, evals: Any, origin_unix_s: float
    ) -> Any:
        evals.end(lambda: 0.0)
        members = SimpleNamespace(resume=lambda gone, unhurried: None)
        return SimpleNamespace(members=members, recorder=recorder, origin_unix_s=origin_unix_s)

    def _train(self, training: Training) -> Summary:
        next(self.trains)(training.controller)
        events = read_events(self.run.path / EVENTS_FILE)
        return summarise(events, startup_s=training.startup_s)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    return Driver(tmp_path, monkeypatch)


def after(broken: BrokenError) -> Resumption:
    return Resumption(waits=True, away=broken.away, clock=broken.clock)


def test_seconds_of_a_run_are_wall_time_across_its_restarts(run: Driver) -> None:
    def trains(until_s: float, number: int) -> Callable[[Any], None]:
        def train(controller: Any) -> None:
            run.unix_s = BEGAN_UNIX_S + until_s
            kind, _, fields = step("eu", number, 0.0)
            controller.recorder.emit(kind, run.unix_s - controller.origin_unix_s, **fields)
            if number < 3:
                raise BrokenError(LOST, frozenset(), RunClock(controller.origin_unix_s, 5.0))

        return train

    run.trains = iter([trains(15.0, 1), trains(100.0, 2), trains(170.0, 3)])
    run.unix_s += 5.0  # the first start takes so long, and does not count
    first = run.broken(None)
    run.unix_s += 70.0  # each restart takes longer than training
    second = run.broken(after(first))
    run.unix_s += 60.0
    summary = run.segment(after(second))
    assert (summary.seconds, summary.startup_s) == (165.0, 5.0)
    began = [e for e in read_events(run.run.path / EVENTS_FILE) if e.kind == "run_started"]
    assert [(e.t_s, e["startup_s"]) for e in began] == [(0.0, 5.0), (80.0, 0.0), (155.0, 0.0)]


def test_only_the_start_of_a_restart_is_tried_again(run: Driver) -> None:
    def fails() -> None:
        raise LOST

    run.start_fails = fails
    with pytest.raises(RegionLostError):
        run.segment(None)
    clock = RunClock(BEGAN_UNIX_S, 5.0)
    broken = run.broken(Resumption(waits=True, away=frozenset({"us"}), clock=clock))
    assert broken.at_start and broken.cause is LOST
    assert (broken.clock, broken.away) == (clock, {"us"})


@pytest.mark.parametrize("error", [LOST, PlacementError("no place"), PreflightError("no node")])
def test_restarts_that_fail_at_their_start_are_counted_and_spaced(
    run: Driver, monkeypatch: pytest.MonkeyPatch, error: GeoRayError
) -> None:
    clock, told = RunClock(BEGAN_UNIX_S, 5.0), list[RunClock | None]()

    @contextmanager
    def start(setup: object, resume: Resumption | None) -> Iterator[Training]:
        told.append(None if resume is None else resume.clock)
        if resume is None:
            raise BrokenError(LOST, frozenset(), clock)
        with run_start._restartable(resume):
            raise error
        yield cast(Any, None)

    log = write(run.run.path / EVENTS_FILE, [started()])
    store = SimpleNamespace(latest=lambda: None)
    monkeypatch.setattr(main, "started", start)
    monkeypatch.setattr(main, "store_of", lambda *_: store)
    monkeypatch.setattr(main, "watched_head", lambda *_: nullcontext())
    at_head = SimpleNamespace(gcs_address="127.0.0.1:1")
    monkeypatch.setattr(main.ray, "get_runtime_context", lambda: at_head)
    with pytest.raises(type(error)) as ended:
        run.drive()
    assert ended.value is error
    assert told == [None, clock, clock, clock], "checkpoint.restarts is 3"
    assert run.slept == [15.0, 30.0]
    assert any("no place" in line or "is lost" in line or "no node" in line for line in run.told)
    assert [e["code"] for e in read_events(log) if e.kind == "run_failed"] == [error.code]
    run.reporting.interruption.set()  # Ctrl-C in the first pause ends it
    told.clear()
    with pytest.raises(InterruptedRunError):
        run.drive()
    assert told == [None, clock]


def test_a_store_that_is_away_when_a_run_wants_to_restart_is_waited_for(
    run: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[Exception | None] = [StoreError("away"), StoreError("away"), None]

    def latest() -> None:
        answer = answers.pop(0)
        if answer is not None:
            raise answer

    def can_restart() -> bool:
        restarts = Restarts(3, None, "checkpoint.restarts")
        broken = BrokenError(LOST, frozenset(), RunClock(BEGAN_UNIX_S, 5.0))
        setup: Any = SimpleNamespace(
            experiment=run.experiment, run=run.run, reporting=run.reporting
        )
        return main._may_restart(setup, broken, restarts)

    monkeypatch.setattr(main, "store_of", lambda *_: SimpleNamespace(latest=latest))
    assert can_restart() and answers == [] and run.slept == [1.0, 2.0]
    answers.append(CheckpointMissingError("the run has saved nothing"))
    assert not can_restart()
    run.reporting.interruption.set()  # nobody wants to wait
    answers.append(StoreError("away"))
    assert not can_restart()
