"""What a process that watches a run tells its user. The supervisor is a plain value."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from geo_ray.base.errors import GeoRayError, InterruptedRunError, RegionLostError, RunActorLostError
from geo_ray.runs.directory import RunDirectory
from geo_ray.runs.lease import driving, seeker_of
from geo_ray.runtime import run_actor
from geo_ray.runtime import run_client as module
from geo_ray.runtime.run_actor import RunHost
from geo_ray.runtime.run_client import RunWatcher, SignalCount
from geo_ray.runtime.run_order import RunOrder, UserRequests
from geo_ray.runtime.supervisor import RunNews, RunState
from geo_ray.telemetry.event_log import EVENTS_FILE, EventLog, EventTail, read_events
from geo_ray.telemetry.events import RunObserver
from geo_ray.telemetry.summary import Summary, summarise
from tests.support.observe_support import started

GONE = ray.exceptions.ActorDiedError()


class Supervisor:
    """Answers with these values in turn; an error is raised by the call."""

    def __init__(self, *answers: RunNews | Exception) -> None:
        self.answers = list(answers)
        self.poll_news = SimpleNamespace(remote=lambda name, since: self.answers.pop(0))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    def get(answer: Any, timeout: float) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(module.ray, "wait", lambda calls, timeout: (calls, []))
    monkeypatch.setattr(module.ray, "get", get)
    monkeypatch.setattr(module, "wait_for_ray", lambda address, timeout_s: None)
    return RunDirectory(tmp_path, tmp_path)


def watch(
    run: RunDirectory,
    supervisor: Supervisor,
    signals: SignalCount | None = None,
    *,
    is_new: bool = False,
    until_begun: bool = False,
) -> Summary | None:
    cluster: Any = SimpleNamespace(address="127.0.0.1:1")
    log = EventTail(run.path / EVENTS_FILE)
    signals = signals or SignalCount()
    watcher = RunWatcher(supervisor, run, RunObserver(), cluster, log, signals, is_new=is_new)
    return watcher.follow(until_begun=until_begun)


def finished(run: RunDirectory) -> Summary:
    """Write a run that has finished; its run actor still holds the lease, or has released it."""
    with EventLog(run.path / EVENTS_FILE) as log:
        _, _, fields = started(regions=["us"])
        log.write("run_started", 0.0, **fields)
        summary = summarise(read_events(run.path / EVENTS_FILE), startup_s=1.0)
        log.write("run_finished", 9.0, summary=summary.model_dump(), digests={})
    return summary


def failed(run: RunDirectory) -> None:
    with EventLog(run.path / EVENTS_FILE) as log:
        _, _, fields = started(regions=["us"])
        log.write("run_started", 0.0, **fields)
        log.write("run_failed", 9.0, code="REGION_LOST", message="'us' is lost", fix="Look.")


def released(run: RunDirectory, write: Callable[[RunDirectory], Any]) -> Any:
    with driving(seeker_of(run.path, lambda text: None, None)):
        return write(run)


def test_a_run_that_ended_while_the_receiver_of_events_was_slow_has_its_summary(
    run: RunDirectory,
) -> None:
    summary = released(run, finished)
    news = RunNews((), 1, RunState.RUNNING)
    assert watch(run, Supervisor(news, GONE)) == summary


def test_so_has_a_run_that_failed_its_error(run: RunDirectory) -> None:
    released(run, failed)
    with pytest.raises(RegionLostError, match="'us' is lost"):
        watch(run, Supervisor(RunNews((), 1, RunState.RUNNING), GONE))


def test_a_supervisor_that_dies_before_the_run_has_given_its_lease_back_is_lost(
    run: RunDirectory,
) -> None:
    with driving(seeker_of(run.path, lambda text: None, None)):
        finished(run)
        with pytest.raises(RunActorLostError):
            watch(run, Supervisor(RunNews((), 1, RunState.RUNNING), GONE))


def test_a_supervisor_that_dies_while_the_run_trains_is_lost(run: RunDirectory) -> None:
    with EventLog(run.path / EVENTS_FILE) as log:
        log.write("run_started", 0.0, **started(regions=["us"])[2])
    with pytest.raises(RunActorLostError):
        watch(run, Supervisor(GONE))


@pytest.mark.parametrize("error", [None, RegionLostError("'us' is lost")])
def test_the_supervisor_s_report_of_the_end_counts(
    run: RunDirectory, error: GeoRayError | None
) -> None:
    summary = released(run, finished)
    news = RunNews((), 1, RunState.OVER, None, None if error else summary, error)
    if error is None:
        assert watch(run, Supervisor(news)) == summary
        return
    with pytest.raises(RegionLostError):
        watch(run, Supervisor(news))


class Ends(Supervisor):
    """Presses Ctrl-C with its answers; notes the requests to stop and to end."""

    def __init__(self, presses: list[int], signals: SignalCount) -> None:
        self.presses, self.signals, self.asked = presses, signals, list[str]()
        self.poll_news = SimpleNamespace(remote=self._answer)
        self.stop = SimpleNamespace(remote=lambda: self.asked.append("stop"))
        self.end_now = SimpleNamespace(remote=lambda error: self.asked.append("end"))

    def _answer(self, name: str, since: int) -> RunNews:
        assert self.presses, "the watcher waits for the end although it must not"
        self.signals.number += self.presses.pop(0)
        return RunNews((), 1, RunState.RUNNING)


@pytest.mark.parametrize(
    ("has_begun", "presses", "asked"),
    [
        (False, [1, 0, 1], ["stop", "end"]),
        (False, [2], ["stop", "end"]),
        (True, [1, 0, 1, 0, 1], ["stop", "end"]),
        (True, [3], ["stop", "end"]),
    ],
)
def test_the_last_ctrl_c_does_not_wait_for_processes(
    run: RunDirectory,
    monkeypatch: pytest.MonkeyPatch,
    has_begun: bool,
    presses: list[int],
    asked: list[str],
) -> None:
    """Saves and stops, ends at once, waits no longer; before training the first one ends it."""
    killed: list[Supervisor] = []
    monkeypatch.setattr(module, "kill", killed.append)
    if has_begun:
        with EventLog(run.path / EVENTS_FILE) as log:
            log.write("run_started", 0.0, **started(regions=["us"])[2])
    signals = SignalCount()
    supervisor = Ends(presses, signals)
    with pytest.raises(KeyboardInterrupt):
        watch(run, supervisor, signals)
    assert supervisor.asked == asked and killed == [supervisor] and not presses


def test_a_supervisor_that_has_not_started_yet_is_not_waited_for(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    signals, killed = SignalCount(), list[Supervisor]()
    supervisor = Ends([1], signals)
    monkeypatch.setattr(module, "kill", killed.append)
    monkeypatch.setattr(module.ray, "wait", lambda calls, timeout: ([], calls))
    with pytest.raises(KeyboardInterrupt):
        watch(run, supervisor, signals, is_new=True)
    assert killed == [supervisor]


def test_a_supervisor_that_was_there_before_may_end_its_run(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is slow to answer; only another Ctrl-C ends the wait."""
    signals, killed = SignalCount(), list[Supervisor]()
    supervisor = Ends([1, 0, 1], signals)
    monkeypatch.setattr(module, "kill", killed.append)
    waits: list[object] = []

    def wait(calls: list[object], timeout: float) -> tuple[list[object], list[object]]:
        waits.extend(calls)
        if len(waits) == 3:
            signals.number += 1
        return [], calls

    monkeypatch.setattr(module.ray, "wait", wait)
    with pytest.raises(KeyboardInterrupt):
        watch(run, supervisor, signals)
    assert killed == [supervisor] and len(waits) == 3 and supervisor.asked == ["stop", "end"]


def test_ctrl_c_before_training_ends_the_run_although_its_supervisor_is_gone(
    run: RunDirectory,
) -> None:
    signals = SignalCount(1)
    supervisor = Ends([0], signals)
    first = supervisor.poll_news.remote
    answers: list[Any] = [first, lambda name, since: GONE]
    supervisor.poll_news = SimpleNamespace(remote=lambda n, s: answers.pop(0)(n, s))
    with pytest.raises(KeyboardInterrupt):
        watch(run, supervisor, signals)


def test_a_detached_start_that_is_interrupted_is_watched_to_its_end(run: RunDirectory) -> None:
    """Otherwise it would end unseen, or go on."""
    with EventLog(run.path / EVENTS_FILE) as log:
        log.write("run_started", 0.0, **started(regions=["us"])[2])
    stopped = RunNews((), 1, RunState.OVER, None, None, InterruptedRunError("stopped"))
    for signals in (SignalCount(), SignalCount(1)):
        supervisor = Ends([], signals)
        answers = [RunNews((), 1, RunState.RUNNING), stopped]
        supervisor.poll_news = SimpleNamespace(remote=lambda n, s, a=answers: a.pop(0))
        if not signals.number:
            assert watch(run, supervisor, signals, until_begun=True) is None
            continue
        with pytest.raises(InterruptedRunError):
            watch(run, supervisor, signals, until_begun=True)
        assert supervisor.asked == ["stop"]


def test_a_heartbeat_that_failed_is_repeated_with_the_same_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order = RunOrder("{}", RunDirectory(Path("/run"), Path("/")), None, 0.0, "/", (), None)
    beats: list[tuple[int, Any]] = []
    stop = InterruptedRunError("stopped")
    answers: list[Any] = [GONE, UserRequests(stop)]

    def beat(attempt: int, lines: Any, awaiting: object) -> Any:
        beats.append((attempt, lines))
        return answers.pop(0)

    def get(answer: Any) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(run_actor.os, "chdir", lambda path: None)
    monkeypatch.setattr(run_actor.ray, "get", get)
    host = RunHost(SimpleNamespace(beat=SimpleNamespace(remote=beat)), order, 1)
    host._progress.status("first")
    host._try_beat()
    assert not host._interruption.is_set()
    host._progress.status("second")
    host._try_beat()
    assert beats == [(1, (("first", ""),)), (1, (("first", ""), ("second", "")))]
    assert host._interruption.why is stop
