"""The run loop's care for the server and its standby, with actors of this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import geo_ray
from geo_ray.base.errors import (
    GeoRayError,
    InterruptedRunError,
    NonFiniteError,
    RegionLostError,
    ServerLostError,
)
from geo_ray.base.restarts import Restarts
from geo_ray.joining.service import Stage
from geo_ray.runs.directory import RunDirectory
from geo_ray.runs.replanning import Decision, MembersPlan
from geo_ray.runs.requests import Interruption
from geo_ray.runtime import averagers, served_checkpoints, serving
from geo_ray.runtime.averagers import AveragerProcesses, write_credentials
from geo_ray.runtime.replanning import ReplanPolicy
from geo_ray.runtime.run_context import Reporting
from geo_ray.runtime.served_checkpoints import ServedCheckpoints
from geo_ray.runtime.serving import AveragerActor, HolderActor, terms_of
from geo_ray.storage.checkpoint import CheckpointStore
from geo_ray.storage.places import CheckpointPlaces
from geo_ray.telemetry.event_log import read_events
from geo_ray.telemetry.events import RunObserver
from tests.integration.joining.test_serve_processes import PlannedInterval
from tests.support.join_support import Loop, train_all
from tests.support.join_support import serving as in_process
from tests.support.train_support import eventually

STEPS = 40
CONFIG: dict[str, Any] = {
    "name": "served",
    "regions": [{"name": "eu", "join": True}, {"name": "us", "join": True}],
    "strategy": {"kind": "diloco", "interval": 4},
    "train": {"steps": STEPS},
    "averager": {"standby": "auto"},
    "serve": {"host": "127.0.0.1", "port": 0},
    "transport": {"reconnect_min_s": 0.05, "reconnect_max_s": 0.2},
}


@dataclass
class Call:
    """A method of an actor, or the value that is being computed."""

    actor: Any
    name: str
    arguments: tuple[Any, ...] = ()

    def remote(self, *arguments: Any) -> Call:
        call = Call(self.actor, self.name, arguments)
        if self.name in ("publish", "release_standby", "request_stop", "lose", "end_save"):
            call.value()  # which nobody awaits
        return call

    def value(self) -> Any:
        if self.actor.is_dead:
            raise RegionLostError("an actor is lost: killed by the test")
        given = [each.value() if isinstance(each, Call) else each for each in self.arguments]
        return getattr(self.actor.own, self.name)(*given)


class Actor:
    """An actor in this process."""

    def __init__(self, kind: str, arguments: tuple[Any, ...], slot: int) -> None:
        self.own: Any = {"averager": AveragerActor, "holder": HolderActor}[kind](*arguments)
        self.is_dead, self.slot = False, slot

    def __getattr__(self, name: str) -> Call:
        return Call(self, name)

    def die(self) -> None:
        """End it as kill -9 would."""
        self.is_dead = True
        if isinstance(self.own, HolderActor):
            self.own._server._link.close(0.0)
            return
        for each in (self.own._listening, self.own._follower):
            if each is not None:
                each._endpoint.close(0.0)
                each.is_fenced = True


@dataclass
class Launcher:
    """Starts actors in this process."""

    actors: list[Actor] = field(default_factory=list)

    def make(self, specs: Any) -> list[Actor]:
        found = [Actor(each.kind, each.arguments, each.strategy) for each in specs]
        slots = [each.slot for each in (*self.actors, *found) if not each.is_dead]
        assert len(slots) == len(set(slots))
        self.actors += found
        return found


class Places:
    def strategy(self, role: str, slot: int) -> int:
        return slot


def collect(calls: Mapping[Any, Call], timeout_s: float, progress: Any = None) -> dict[Any, Any]:
    return {key: call.value() for key, call in calls.items()}


@pytest.fixture
def holders() -> int:
    return 1


@pytest.fixture
def processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, holders: int
) -> Iterator[AveragerProcesses]:
    monkeypatch.setattr(averagers, "collect", collect)
    monkeypatch.setattr(averagers, "kill", Actor.die)
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
    config = CONFIG | {"serve": CONFIG["serve"] | {"holders": holders}}
    experiment = geo_ray.load_config(config)
    write_credentials(experiment, tmp_path)
    launcher: Any = Launcher()
    places: Any = Places()
    found = AveragerProcesses(experiment, terms_of(experiment), launcher, places, tmp_path)
    found.start(None)
    yield found
    found.close()
    for actor in launcher.actors:
        actor.die()


def poll(processes: AveragerProcesses) -> dict[str, Any]:
    found: dict[str, Any] = processes.ask("poll", 1, 0)
    processes.watch(found["stalled_s"])
    return found


def await_standby(processes: AveragerProcesses) -> None:
    until_s = time.monotonic() + 60.0
    while processes._standby is None:
        assert time.monotonic() < until_s
        poll(processes)
        time.sleep(0.02)


def kinds(processes: AveragerProcesses) -> list[str]:
    return [each["kind"] for each in processes.news()]


@pytest.mark.parametrize("holders", [1, 3])
def test_lost_servers_and_standbys_are_replaced(
    processes: AveragerProcesses, tmp_path: Path
) -> None:
    run = terms_of(geo_ray.load_config(CONFIG))
    (plain := tmp_path / "plain").mkdir()
    with in_process(run, plain) as (_, where):
        wanted = train_all({name: Loop(where, name, plain).run for name in ("eu", "us")})
    given = processes.address
    await_standby(processes)
    assert kinds(processes) == ["server_standby_ready"]
    news: list[str] = []

    def each(sync: Any) -> None:
        if sync.steps in (9, 25):
            before = processes.links()
            processes.actor.die()
            poll(processes)
            await_standby(processes)
            after = processes.links()
            assert set(before) == {"eu", "us"} and min(before["eu"].values()) > 0
            for region, counts in before.items():
                assert all(after[region][name] >= count for name, count in counts.items())
        elif sync.steps == 17 and processes._standby is not None:
            processes._standby.actor.die()
            while processes._standby is not None:
                poll(processes)
            news.extend(kinds(processes))
            await_standby(processes)

    def loop(name: str) -> Any:
        return Loop(given, name, tmp_path).run(each if name == "eu" else None)

    found = train_all({name: partial(loop, name) for name in ("eu", "us")})
    for name in ("eu", "us"):
        assert not isinstance(found[name], Exception), found[name]
        assert torch.equal(found[name][0], wanted[name][0])
    last = poll(processes)
    assert (last["stage"], last["rounds"]) == (Stage.DONE.value, STEPS // 4)
    assert torch.equal(processes.fetch_model()[1], found["eu"][0])
    news += kinds(processes)
    assert news == [
        *("server_replaced", "server_standby_ready", "server_standby_lost"),
        *("server_standby_ready", "server_replaced", "server_standby_ready"),
    ]
    assert (tmp_path / "address").read_text() == processes.address + "\n"
    assert processes.address == given  # the third server has the port of the first


@pytest.mark.parametrize(("every", "lost"), [(1, None), (3, None), (1, 2)])
def test_a_checkpoint_in_every_round(
    processes: AveragerProcesses,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    every: int,
    lost: int | None,
) -> None:
    """Rounds wait here until the checkpoint of an earlier one is committed.

    An order to end a checkpoint may be lost, with a server that had it and its standby had not.
    """
    monkeypatch.setattr(served_checkpoints, "collect", collect)
    orders, remote = [0], Call.remote

    def may_be_lost(call: Call, *arguments: Any) -> Any:
        orders[0] += call.name == "end_save"
        if call.name == "end_save" and orders[0] == lost:
            return SimpleNamespace(value=lambda: None)
        return remote(call, *arguments)

    monkeypatch.setattr(Call, "remote", may_be_lost)
    experiment = geo_ray.load_config(CONFIG | {"checkpoint": {"every_rounds": every, "keep": 50}})
    store = CheckpointStore(CheckpointPlaces(str(tmp_path / "store")).root(), 50)
    checkpoints = ServedCheckpoints(store, experiment, processes, 1)
    await_standby(processes)
    found: list[dict[str, Any]] = []
    lock, seen = threading.Lock(), [0]

    def advance() -> bool:
        with lock:
            state = processes.ask("poll", 1, seen[0])
            seen[0] = state["seen"]
            trains = state["stage"] == Stage.TRAINING.value
            found.extend(checkpoints.poll(state["save"], state["rounds"], trains=trains))
            if state["save"] is None:
                return not (trains and checkpoints._is_due(state["rounds"]))
            return bool(state["save"]["stage"] == "meeting")

    def each(sync: Any) -> None:
        eventually(advance, "the checkpoint is committed, and the next one is begun if it is due")

    def loop(name: str) -> Any:
        own = Loop(processes.address, name, tmp_path, checkpoints=tmp_path / "saved" / name)
        return own.run(each)

    def end() -> None:
        eventually(lambda: poll(processes)["stage"] == Stage.DONE.value, "the run is over")
        processes.actor.end_save.remote(None)  # lets the ranks leave

    results = train_all({"eu": partial(loop, "eu"), "us": partial(loop, "us"), "end": end})
    assert not [r for r in results.values() if isinstance(r, Exception)], results
    checkpoints.close()
    steps = [event["step"] for event in found if event["kind"] == "checkpoint"]
    assert [step for step in steps if step < STEPS] == [*range(4 * every, STEPS, 4 * every)]


def test_without_a_standby_the_server_is_lost(processes: AveragerProcesses) -> None:
    processes.actor.die()
    with pytest.raises(GeoRayError, match="killed by the test"):
        poll(processes)


def test_terms_and_lists_continue_after_a_restart(
    processes: AveragerProcesses, tmp_path: Path
) -> None:
    before = processes._list
    experiment = geo_ray.load_config(CONFIG)
    processes.actor.die()
    again = AveragerProcesses(
        experiment, terms_of(experiment), processes._launcher, processes._placed, tmp_path
    )
    again.start(None)
    after = again._list
    assert before is not None and after is not None
    assert (after.term, after.version) == (before.term + 1, before.version + 1)
    assert after.addresses == before.addresses  # which the regions know
    again.close()


def test_the_server_is_closed_before_the_holders_that_it_waits_for(
    processes: AveragerProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is lost keeps back no other."""
    ended: list[str] = []

    class Holder:
        def __init__(self, name: str) -> None:
            self.close = self
            self.name = name

        def remote(self) -> Holder:
            ended.append(self.name)
            return self

        def value(self) -> None:
            if self.name == "first":
                raise RegionLostError("killed")

    server: Any = processes.actor
    monkeypatch.setattr(server.own._listening, "close", lambda: ended.append("server"))
    processes._holders = [Holder("first"), Holder("second")]  # type: ignore[list-item]
    processes.finish()
    assert ended == ["server", "first", "second"]


@pytest.mark.parametrize(
    ("error", "ids", "restarts", "is_interrupted", "is_told"),
    [
        (RegionLostError("all"), [1], 1, False, False),  # the regions find the run again
        (RegionLostError("all"), [], 1, False, True),
        (RegionLostError("all"), [1], 0, False, True),
        (RegionLostError("all"), [1], 1, True, True),
        (NonFiniteError("all"), [1], 1, False, True),
    ],
)
def test_regions_are_told_the_failure_of_a_run_that_is_not_served_again(
    processes: AveragerProcesses,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: GeoRayError,
    ids: list[int],
    restarts: int,
    is_interrupted: bool,
    is_told: bool,
) -> None:
    monkeypatch.setattr(processes, "watch", lambda _: None)  # starts no standby
    experiment, told = geo_ray.load_config(CONFIG), []
    reporting = SimpleNamespace(interruption=Interruption(), observer=RunObserver())
    if is_interrupted:
        reporting.interruption.set()
    setup: Any = SimpleNamespace(
        run=SimpleNamespace(path=tmp_path),
        experiment=experiment,
        reporting=reporting,
        lease=SimpleNamespace(token=1),
    )
    server: Any = processes.actor.own._listening
    server.service.failure = error
    close = server.close
    server.close = lambda: (told.append(True), close())
    unused: Any = None
    left = Restarts(restarts, None, "checkpoint.restarts")
    store: Any = SimpleNamespace(ids=lambda: ids)
    served = serving._Serving(setup, processes, unused, None, unused, None, store, left, unused)
    with pytest.raises(type(error)):
        served._poll()
    assert bool(told) is is_told


class Ending(RunObserver):
    """Ends a run at once when asked, as a second Ctrl-C does."""

    def __init__(self) -> None:
        self.is_asked = False

    def check(self) -> None:
        if self.is_asked:
            raise KeyboardInterrupt


@pytest.mark.parametrize("is_at_once", [False, True])
def test_regions_that_wait_for_others_are_told_that_the_run_is_stopped(
    processes: AveragerProcesses,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_at_once: bool,
) -> None:
    monkeypatch.setattr(processes, "watch", lambda _: None)  # starts no standby
    observer, unused = Ending(), cast(Any, None)
    reporting = Reporting(observer, time.time())
    setup: Any = SimpleNamespace(
        run=SimpleNamespace(path=tmp_path),
        experiment=geo_ray.load_config(CONFIG),
        reporting=reporting,
        lease=SimpleNamespace(token=1),
    )
    groups: Any = SimpleNamespace(starting={}, watch=lambda _: None)
    left = Restarts(0, None, "checkpoint.restarts")
    served = serving._Serving(setup, processes, groups, None, unused, None, unused, left, unused)

    def serve() -> str:
        with pytest.raises((InterruptedRunError, KeyboardInterrupt)) as ended:
            served.run()
        return ended.typename

    def stop() -> None:
        service = processes.actor.own._server.service
        eventually(lambda: "eu" not in service.missing(), "the first region is there")
        if is_at_once:
            observer.is_asked = True
        else:
            reporting.interruption.set()

    found = train_all(
        {"serve": serve, "stop": stop, "eu": Loop(processes.address, "eu", tmp_path).run}
    )
    assert found["serve"] == ("KeyboardInterrupt" if is_at_once else "InterruptedRunError")
    assert isinstance(found["eu"], ServerLostError)
    assert "the run has ended: it was stopped" in found["eu"].message


def keep_interval(*asked: Any) -> MembersPlan:
    """Plan for some regions, so that nothing changes."""
    present: Any = PlannedInterval(asked[2] or 4, averager=asked[1])
    decision = Decision(present, changed=False, gain=0.0, reason="stays")
    return MembersPlan(present, decision, decision)


def test_the_run_loop_saves_the_last_step_and_tells_the_end_before_it_returns(
    processes: AveragerProcesses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier checkpoint is still being written when the regions have finished."""
    monkeypatch.setattr(served_checkpoints, "collect", collect)
    experiment = geo_ray.load_config(CONFIG | {"checkpoint": {"every_rounds": 1}})
    run = RunDirectory(tmp_path / "run", tmp_path)
    run.path.mkdir()
    store = CheckpointStore(CheckpointPlaces(str(tmp_path / "store")).root(), 50)
    checkpoints = ServedCheckpoints(store, experiment, processes, 1)
    write, held, ends = checkpoints._write, list[int](), threading.Event()

    def write_late(checkpoint: int, saved: tuple[str, ...]) -> Any:
        if not held:
            held.append(checkpoint)
            assert ends.wait(60.0)
        return write(checkpoint, saved)

    monkeypatch.setattr(checkpoints, "_write", write_late)
    setup: Any = SimpleNamespace(
        run=run,
        experiment=experiment,
        reporting=Reporting(RunObserver(), time.time()),
        lease=SimpleNamespace(token=1, check=lambda: None),
    )
    groups: Any = SimpleNamespace(
        starting={},
        watch=lambda _: None,
        note=lambda _: None,
        news=lambda: [],
        finish=lambda: None,
    )
    left = Restarts(0, None, "checkpoint.restarts")
    others = ReplanPolicy(0.0, 0.0, frozenset({"eu"}))  # were planned for
    told: list[str] = []
    plans = serving.ServedPlans(experiment, processes, keep_interval, told.append, others)
    served = serving._Serving(setup, processes, groups, None, checkpoints, None, store, left, plans)

    save_last = served._save_last

    def save_last_now(*arguments: Any) -> None:
        ends.set()
        save_last(*arguments)

    monkeypatch.setattr(served, "_save_last", save_last_now)

    def serve() -> tuple[int, bool]:
        summary = served.run()
        return summary.steps, processes.actor.own._server._closing.is_set()

    def each(sync: Any) -> None:
        if sync.steps == 6:
            service = processes.actor.own._server.service
            eventually(lambda: held or service.save is not None, "a checkpoint is begun")
            eventually(lambda: told == ["replanned for eu, us: stays"], "the run is planned")

    def loop(name: str) -> Any:
        own = Loop(processes.address, name, tmp_path, checkpoints=tmp_path / "saved" / name)
        return own.run(each)

    found = train_all({"serve": serve, **{name: partial(loop, name) for name in ("eu", "us")}})
    assert not [each for each in found.values() if isinstance(each, Exception)], found
    assert found["serve"] == (STEPS, True)
    checkpoints.close()
    plans.close()
    assert held[0] < store.latest().manifest.id
    events = list(read_events(run.path / "events.jsonl"))
    (planned,) = (each.fields for each in events if each.kind == "replanned")
    assert (planned["regions"], planned["changed"]) == (["eu", "us"], False)
    steps = [each.fields["step"] for each in events if each.kind == "checkpoint"]
    assert len(steps) == 2 and steps[0] < steps[1] == STEPS
