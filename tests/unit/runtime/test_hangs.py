"""A process that has stopped or hangs is named, and a worker is replaced after a while."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_controller_failures import Run, _Call
from test_controller_failures import log as log

from geo_ray.runtime import process_watch
from geo_ray.runtime import process_watch as worker_watch
from geo_ray.runtime.actor_group import GroupWorker
from geo_ray.runtime.policies import Hangs
from geo_ray.runtime.process_watch import WorkerWatch
from geo_ray.telemetry.event_log import EventLog
from geo_ray.training.stragglers import READING, Computing


@pytest.mark.parametrize(
    ("for_s", "usual_s", "is_usual", "doing", "verdict"),
    [
        (9.0, 0.1, True, None, "fine"),
        (11.0, 0.1, True, None, "named"),
        (59.0, 0.1, True, None, "named"),
        (61.0, 0.1, True, None, "replaced"),
        (61.0, 0.1, True, "computing", "replaced"),
        (999.0, 0.1, True, READING, "named"),
        (25.0, 10.0, True, None, "fine"),  # a step that usually takes long
        (35.0, 10.0, True, None, "named"),
        (199.0, 10.0, True, None, "named"),
        (201.0, 10.0, True, None, "replaced"),
        (90.0, None, False, None, "fine"),  # a first step, or an evaluation
        (110.0, None, False, None, "named"),
        (599.0, None, False, None, "named"),
        (601.0, None, False, None, "replaced"),
    ],
)
def test_limits_follow_from_measured_steps(
    for_s: float, usual_s: float | None, is_usual: bool, doing: str | None, verdict: str
) -> None:
    assert Hangs().judge(Computing(1, for_s, is_usual), usual_s, doing) == verdict


def test_a_configured_limit_counts_before_others_give_up_waiting() -> None:
    assert Hangs(50.0).replaced_after_s(0.1, is_usual=True) == 40.0
    assert Hangs(1000.0).replaced_after_s(0.1, is_usual=True) == 60.0
    assert Hangs(50.0).replaced_after_s(0.1, is_usual=False) == 600.0


class Worker:
    """Stands for an actor that answers, or does not."""

    def __init__(self, doing: str | None) -> None:
        self.answer = doing
        self.doing = _Call(lambda: self)


@pytest.fixture
def hung(tmp_path: Path, log: EventLog, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run whose worker eu/0 can be asked what it is doing."""
    run = Run(tmp_path, log)
    run.told_user = []  # type: ignore[attr-defined]
    monkeypatch.setattr(type(run.controller), "show", lambda _, text: run.told_user.append(text))

    def wait(refs: list[Worker], **_: object) -> tuple[list[Worker], list[Worker]]:
        return [ref for ref in refs if ref.answer is not None], []

    monkeypatch.setattr(process_watch.ray, "wait", wait)
    monkeypatch.setattr(process_watch.ray, "get", lambda ref: ref.answer)
    monkeypatch.setattr(worker_watch, "kill", lambda handle: None)
    run.actors.workers["eu", 0] = GroupWorker("eu", 0, 1, Worker(None), ref="work")
    return run


def look(
    run: Run, for_s: float, attempt: int = 1, **unresponsive_s: float
) -> list[tuple[Any, str]]:
    status = {"usual_s": 0.2, "computing": {0: Computing(attempt, for_s, True)}}
    unresponsive = {("bridge", region): s for region, s in unresponsive_s.items()}
    return run.controller.hang_watch.look({"eu": status}, unresponsive)


def unresponsive(run: Run) -> list[tuple[str, str]]:
    told = [event.fields for event in run.events if event.kind == "process_unresponsive"]
    return [(fields["region"], fields["process"]) for fields in told]


def test_a_stopped_worker_is_named_once_and_then_replaced(hung: Run) -> None:
    told: list[str] = hung.told_user  # type: ignore[attr-defined]
    assert look(hung, 5.0) == [] and not told and not unresponsive(hung)
    assert look(hung, 12.0) == look(hung, 13.0) == []
    assert unresponsive(hung) == [("eu", "worker 0")]
    assert told == ["worker eu/0: its step takes 12 s (usually 0.2 s), and it does not answer"]
    ((worker, cause),) = look(hung, 61.0)
    assert worker is hung.actors.workers["eu", 0] and "61 s" in cause
    assert look(hung, 61.0, attempt=2) == [], "what is told of another incarnation"


def test_a_worker_that_continues_is_no_longer_reported(hung: Run) -> None:
    told: list[str] = hung.told_user  # type: ignore[attr-defined]
    look(hung, 12.0)
    look(hung, 0.1)
    assert told[-1] == ""
    look(hung, 12.0)
    assert unresponsive(hung) == [("eu", "worker 0")] * 2


def test_a_worker_that_waits_for_its_rows_is_not_replaced(hung: Run) -> None:
    hung.actors.workers["eu", 0].handle = Worker(READING)
    look(hung, 12.0)
    assert look(hung, 999.0) == []
    assert hung.told_user  # type: ignore[attr-defined]


def test_servers_and_bridges_that_do_not_answer_are_named(hung: Run) -> None:
    look(hung, 0.1, eu=9.0)
    assert not unresponsive(hung)
    look(hung, 0.1, eu=11.0, asia=2.0)
    assert unresponsive(hung) == [("eu", "bridge")]
    assert hung.told_user == [  # type: ignore[attr-defined]
        "the bridge of region 'eu' has not answered for 11 s"
    ]


def test_a_hung_worker_is_killed_and_counts_as_lost(
    hung: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[object] = []
    monkeypatch.setattr(worker_watch, "kill", killed.append)
    replaced: list[GroupWorker] = []
    monkeypatch.setattr(WorkerWatch, "_replace", lambda self, worker: replaced.append(worker))
    worker = hung.actors.workers["eu", 0]
    hung.controller.workers.replace_hung(worker, "its step takes 61 s")
    assert killed == [worker.handle] and replaced == [worker]
    (lost,) = [event for event in hung.events if event.kind == "worker_lost"]
    assert lost.fields["cause"] == "its step takes 61 s"


def test_a_replacement_is_requested_starts_and_works(
    hung: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh = GroupWorker("eu", 0, 2, None, ref="work")

    def replace(worker: GroupWorker) -> GroupWorker:
        hung.actors.workers["eu", 0] = fresh
        return fresh

    monkeypatch.setattr(WorkerWatch, "_heed", lambda self, now_s: None)
    monkeypatch.setattr(worker_watch.ray, "wait", lambda refs, **_: ([], refs))
    monkeypatch.setattr(type(hung.actors), "replace_worker", lambda self, worker: replace(worker))
    workers = hung.controller.workers

    def told() -> list[str]:
        workers.collect(0.0)
        return [kind for kind in hung.kinds() if kind.startswith("worker_")]

    workers.replace_hung(hung.actors.workers["eu", 0], "hung")
    assert told() == ["worker_lost", "worker_requested"]
    workers.note("eu", {"here": {0: 1}})
    assert told()[2:] == [], "its predecessor is what the server knows"
    fresh.node = "n"
    assert told()[2:] == told()[2:] == ["worker_started"]
    workers.note("eu", {"here": {0: 2}})
    assert told()[2:] == told()[2:] == ["worker_started", "worker_replaced"]


def test_a_finished_worker_has_worked(hung: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkerWatch, "_heed", lambda self, now_s: None)
    worker = hung.actors.workers["eu", 0]
    worker.steps = 3
    hung.controller.workers.resume({("eu", 0)})
    hung.controller.workers.collect(0.0)
    assert hung.kinds() == ["worker_started", "worker_replaced"]
