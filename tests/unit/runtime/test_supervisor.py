"""The supervisor of a run: its run actors, watchers, and what it owns. Actors are plain values."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import ray

from geo_ray.base.errors import (
    HeadLostError,
    InterruptedRunError,
    InvariantError,
    LeaseLostError,
    RunActorLostError,
)
from geo_ray.ray_cluster.keys import LAN_KEY, Introduction
from geo_ray.runs.directory import RunDirectory
from geo_ray.runtime import supervisor as module
from geo_ray.runtime.launcher import OwnProcesses, ProcessSpec
from geo_ray.runtime.run_order import RunEnd, RunOrder, UserRequests
from geo_ray.runtime.supervisor import RunState, Supervisor
from geo_ray.transport.config import TransportConfig
from geo_ray.transport.security.process_keys import SecretReceiver

RUN = ("run-1", ("eu", "us"), TransportConfig())


class Process:
    """Stands for a handle."""

    def __init__(self, number: int) -> None:
        self._actor_id = number.to_bytes(4, "big")


class Processes(OwnProcesses):
    """Makes none."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Process] = []

    def make(self, specs: Sequence[ProcessSpec]) -> list[Any]:
        made = [Process(len(self.made) + i) for i, _ in enumerate(specs)]
        self.made += made
        return made


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []
    monkeypatch.setattr(module, "head_answers", lambda: True)
    monkeypatch.setattr(ray, "kill", lambda handle, no_restart: found.append(handle))
    return found


class Call:
    """The run actor's call of `run`: still running, over, or lost."""

    def __init__(self) -> None:
        self.outcome: RunEnd | Exception | None = None


class FakeRay:
    """The clock, and calls of run actors that are plain values."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def wait(self, calls: list[Call], timeout: float) -> tuple[list[Call], list[Call]]:
        return [call for call in calls if call.outcome is not None], []

    def get(self, call: Call) -> RunEnd:
        if isinstance(call.outcome, Exception):
            raise call.outcome
        assert call.outcome is not None
        return call.outcome


class Supervised(Supervisor):
    """A supervisor whose watch is called by the test."""

    ended: list[int]

    def _supervise(self) -> None:
        """Start nothing."""

    def _start(self) -> None:
        self._attempt += 1
        self._has_trained, self._beat_s = False, module.time.monotonic()
        self._call = Call()

    def _kill_actor(self) -> None:
        self.ended = [*getattr(self, "ended", []), self._attempt]

    def look(self, world: FakeRay, seconds: float) -> None:
        """Let time pass in which it looks every second."""
        for _ in range(int(seconds)):
            world.now_s += 1.0
            self._watch(world.now_s)


ORDER = RunOrder("{}", RunDirectory(Path("/run"), Path("/")), None, 0.0, "/", (), 3600.0)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    world = FakeRay()
    monkeypatch.setattr(module.ray, "wait", world.wait)
    monkeypatch.setattr(module.ray, "get", world.get)
    monkeypatch.setattr(module, "time", world)
    return world


@pytest.fixture
def supervisor(killed: list[Any], world: FakeRay) -> Supervised:
    made = Supervised(ORDER)
    made._processes = Processes()
    made._start()
    return made


def order(attempt: int, place: tuple[str, int] | None = None) -> ProcessSpec:
    kind: Any = "bridge" if place is None else "worker"
    return ProcessSpec(kind, (), 1.0, 0.0, None, place, attempt)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "command",
    [
        lambda s: s.attach(1),
        lambda s: s.confirm(1),
        lambda s: s.begin(1, *RUN),
        lambda s: s.note(1, None),
        lambda s: s.keep_only(1, []),
        lambda s: s.clear(1),
        lambda s: s.make(1, [order(1)]),
        lambda s: s.place(1, [], 1.0),
        lambda s: s.remove(1, {}),
        lambda s: s.for_bridge(1, "eu", None),
        lambda s: s.for_server(1, "eu", None),
        lambda s: s.sign(1, "eu", b""),
    ],
)
def test_a_superseded_run_actor_commands_nothing(
    supervisor: Supervised, command: Callable[[Supervised], object], killed: list[Any]
) -> None:
    supervisor.attach(1)
    supervisor.make(1, [order(1)])
    supervisor.attach(2)
    with pytest.raises(LeaseLostError, match="holder 2"):
        command(supervisor)
    assert not killed
    assert len(supervisor.make(2, [order(2)])) == 1


def test_its_process_is_there_before_pytorch_is_loaded() -> None:
    code = "import sys, geo_ray.runtime.supervisor; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_unused_processes_end_with_the_next_run_actor(
    supervisor: Supervised, killed: list[Any]
) -> None:
    supervisor.attach(1)
    first, second, third = supervisor.make(1, [order(1), order(1, ("eu", 0)), order(4, ("eu", 0))])
    handoff = supervisor.attach(2)
    assert handoff.record is None
    assert (dict(handoff.attempts), handoff.newest_attempt) == ({("eu", 0): 4}, 4)
    supervisor.keep_only(2, [first, second])
    assert killed == [third]
    supervisor.clear(2)
    assert killed == [third, first, second]
    assert dict(supervisor.attach(2).attempts) == {("eu", 0): 4}, "no incarnation comes twice"


def test_keys_are_of_one_run_and_leave_it_sealed_only(supervisor: Supervised) -> None:
    supervisor.attach(1)
    receiver = SecretReceiver()
    told = Introduction(receiver.public)
    with pytest.raises(InvariantError, match="before a run began"):
        supervisor.for_server(1, "eu", told)
    keys = []
    for _ in range(2):
        supervisor.begin(1, *RUN)
        sealed = supervisor.for_server(1, "eu", told)
        keys.append(receiver.open(sealed, LAN_KEY))
        assert keys[-1] not in sealed
        assert receiver.open(supervisor.for_server(1, "eu", told), LAN_KEY) == keys[-1]
        assert receiver.open(supervisor.for_server(1, "us", told), LAN_KEY) != keys[-1]
        assert keys[-1] not in pickle.dumps(supervisor.attach(1))
    assert keys[0] != keys[1]


def lost() -> ray.exceptions.ActorDiedError:
    return ray.exceptions.ActorDiedError()


def test_a_run_actor_that_dies_is_replaced_and_commands_of_the_first_are_refused(
    supervisor: Supervised, world: FakeRay, killed: list[Any]
) -> None:
    supervisor.attach(1)
    (process,) = supervisor.make(1, [order(1)])
    supervisor.note(1, cast(Any, "record"))
    supervisor._call.outcome = lost()
    supervisor._watch(world.now_s)
    assert supervisor._attempt == 1 and not killed, "its processes go on"
    assert supervisor.attach(2).record == "record"
    assert supervisor.beat(0, [("late", "")], None) == UserRequests()
    news = supervisor.poll_news("me", 0)
    assert [text for text, _ in news.lines] == [
        "the run actor was killed (The actor died unexpectedly before finishing this task): "
        "restarting it"
    ]
    assert news.state is RunState.RUNNING
    with pytest.raises(LeaseLostError):
        supervisor.remove(1, {})
    supervisor._call.outcome = RunEnd(None, InterruptedRunError("stopped"))
    supervisor._watch(world.now_s)
    assert killed == [process]
    ended = supervisor.poll_news("me", news.next)
    assert ended.state is RunState.OVER and isinstance(ended.error, InterruptedRunError)


def test_a_run_actor_that_never_trains_is_not_replaced_for_ever(
    supervisor: Supervised, world: FakeRay
) -> None:
    for _ in range(3):
        supervisor._call.outcome = lost()
        supervisor._watch(world.now_s)
    assert supervisor._attempt == 2
    assert isinstance(supervisor.poll_news("me", 0).error, RunActorLostError)


def test_a_run_actor_that_hangs_is_killed_and_replaced(
    supervisor: Supervised, world: FakeRay
) -> None:
    for _ in range(3):
        supervisor.look(world, 59)
        supervisor.beat(0, [], None)
    assert supervisor._attempt == 0
    supervisor.look(world, 60)
    assert (supervisor._attempt, supervisor.ended) == (1, [0])


def test_time_in_which_the_supervisor_was_stopped_itself_does_not_count(
    supervisor: Supervised, world: FakeRay
) -> None:
    supervisor.look(world, 50)
    world.now_s += 5000.0  # its machine was suspended: neither beats nor watchers were heard
    supervisor.look(world, 9)
    assert supervisor._attempt == 0 and supervisor.poll_news("", 0).state is RunState.RUNNING
    supervisor.look(world, 2)
    assert supervisor._attempt == 1, "60 s without a beat have been seen"
    supervisor.end_now(KeyboardInterrupt())
    world.now_s += 100.0
    supervisor._watch(world.now_s)
    assert supervisor.poll_news("", 0).state is RunState.ENDING


def test_user_requests_are_returned_at_the_next_beat(
    supervisor: Supervised, world: FakeRay
) -> None:
    assert supervisor.beat(0, [("a", ""), ("b", "log")], None) == UserRequests()
    assert supervisor.poll_news("me", 1).lines == [("b", "log")]
    supervisor.stop()
    requests = supervisor.beat(0, [], None)
    assert isinstance(requests.stop, InterruptedRunError) and requests.end is None
    assert supervisor.poll_news("me", 2).state is RunState.STOPPING
    error = KeyboardInterrupt()
    supervisor.end_now(error)
    assert supervisor.beat(0, [], None).end is error
    supervisor._call.outcome = lost()
    supervisor._watch(world.now_s)
    news = supervisor.poll_news("me", 2)
    assert news.state is RunState.OVER and news.error is error, "it is not started again"


def test_a_run_actor_that_does_not_end_at_once_is_killed(
    supervisor: Supervised, world: FakeRay
) -> None:
    supervisor.end_now(KeyboardInterrupt())
    supervisor.look(world, 9)
    assert supervisor.poll_news("me", 0).state is RunState.ENDING
    supervisor.look(world, 2)
    assert supervisor.poll_news("me", 0).state is RunState.OVER and supervisor.ended == [0]


def test_a_run_without_a_watcher_is_saved_and_ended(supervisor: Supervised, world: FakeRay) -> None:
    for _ in range(70):
        supervisor.look(world, 50)
        supervisor.poll_news("me", 0)
        supervisor.beat(0, [], None)
    assert supervisor.beat(0, [], None).stop is None
    for _ in range(72):
        supervisor.look(world, 50)
        supervisor.poll_news("", 0)  # asks how it stands, and does not watch
        supervisor.beat(0, [], None)
    stop = supervisor.beat(0, [], None).stop
    assert stop is not None and "the run had no watcher for 1:00:00" in stop.message


def test_it_ends_once_watchers_have_received_the_end(
    supervisor: Supervised, world: FakeRay
) -> None:
    supervisor.poll_news("a", 0)
    supervisor.poll_news("b", 0)
    supervisor._finish(RunEnd(None))
    world.now_s += 1.0
    supervisor.poll_news("a", 0)
    assert not supervisor._is_finished(), "b has not heard"
    supervisor.poll_news("b", 0)
    assert not supervisor._is_finished(), "b may not have its answer yet"
    world.now_s += 0.5
    assert supervisor._is_finished()


def test_places_requested_by_a_superseded_run_actor_are_released(
    supervisor: Supervised, monkeypatch: pytest.MonkeyPatch
) -> None:
    placed, removed = {"eu": SimpleNamespace(region="eu")}, list[Any]()

    def place(demands: object, timeout_s: float) -> dict[str, Any]:
        supervisor.attach(2)  # the next run actor comes while the first one waits
        return placed

    monkeypatch.setattr(supervisor._processes, "place", place)
    monkeypatch.setattr(module, "remove", removed.append)
    supervisor.attach(1)
    with pytest.raises(LeaseLostError, match="holder 2"):
        supervisor.place(1, [], 1.0)
    assert removed == [placed]


def unresponsive(monkeypatch: pytest.MonkeyPatch, answers: list[bool]) -> None:
    """Let the head answer like this, and then as it did last."""
    monkeypatch.setattr(
        module, "head_answers", lambda: answers.pop(0) if len(answers) > 1 else answers[0]
    )


def test_processes_left_by_an_unresponsive_head_are_ended_by_the_next_command(
    supervisor: Supervised, monkeypatch: pytest.MonkeyPatch, killed: list[Any]
) -> None:
    given_back, answers = list[Any](), [False]
    monkeypatch.setattr(
        module, "remove", lambda placed: answers[0] and (given_back.append(placed) or True)
    )
    placed = {"eu": SimpleNamespace(region="eu")}
    monkeypatch.setattr(supervisor._processes, "place", lambda demands, timeout_s: placed)
    supervisor.attach(1)
    (process,) = supervisor.make(1, [order(1)])
    supervisor.place(1, [], 1.0)
    unresponsive(monkeypatch, answers)
    supervisor.clear(1)
    supervisor.remove(1, cast(Any, placed))
    assert not killed and not given_back
    answers[0] = True
    supervisor.clear(1)
    assert killed == [process] and given_back == [placed]
    supervisor.clear(1)
    assert killed == [process], "they are forgotten"


def test_a_run_begins_once_the_processes_before_have_ended(
    supervisor: Supervised, monkeypatch: pytest.MonkeyPatch, killed: list[Any]
) -> None:
    supervisor.attach(1)
    (process,) = supervisor.make(1, [order(1)])
    unresponsive(monkeypatch, [False] * 20 + [True])
    supervisor.begin(1, *RUN)
    assert killed == [process]
    supervisor.make(1, [order(1)])
    unresponsive(monkeypatch, [False])
    with pytest.raises(HeadLostError):
        supervisor.begin(1, *RUN)
    assert killed == [process]


def test_a_run_that_is_detached_from_needs_no_watcher(
    supervisor: Supervised, world: FakeRay
) -> None:
    supervisor.detach()
    for _ in range(80):
        supervisor.look(world, 50)
        supervisor.beat(0, [], None)
    assert supervisor.beat(0, [], None).stop is None


def test_it_knows_whether_the_same_run_is_asked_for(supervisor: Supervised) -> None:
    assert supervisor.is_of(replace(ORDER, began_unix_s=5.0, unattended_s=None))
    assert not supervisor.is_of(replace(ORDER, experiment_json='{"seed": 1}'))
    assert not supervisor.is_of(replace(ORDER, plan=cast(Any, "a plan")))


def test_an_end_that_ray_disturbs_is_no_death_of_the_run_actor(
    supervisor: Supervised, world: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(token: int | None = None) -> bool:
        raise ray.exceptions.RaySystemError("the head is away")

    monkeypatch.setattr(supervisor, "_clear", fails)
    supervisor._call.outcome = RunEnd(None, InterruptedRunError("stopped"))
    with pytest.raises(ray.exceptions.RaySystemError):
        supervisor._watch(world.now_s)
    news = supervisor.poll_news("me", 0)
    assert supervisor._attempt == 0 and news.state is RunState.OVER
    assert isinstance(news.error, InterruptedRunError)


def test_a_terminated_run_actor_ends_nothing() -> None:
    """Ray's own handler raises `SystemExit` in the run loop, which would be how the run ended."""
    code = (
        "import os, signal, sys, time\n"
        "from geo_ray.runtime import run_actor\n"
        "from geo_ray.runtime.supervisor import RunLoopActor\n"
        "run_actor.RunHost = lambda *arguments: None\n"
        "RunLoopActor(None, None, 0)\n"
        "try:\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    time.sleep(60)\n"
        "finally:\n"
        "    print('the run loop went on')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
