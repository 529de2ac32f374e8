"""The processes of a served run as objects in one process: Ray only transports their calls."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import Tensor

from geo_ray.base.errors import RegionLostError, ServerLostError
from geo_ray.experiment.experiment import Experiment
from geo_ray.joining.endpoints import address_text
from geo_ray.joining.save_round import SaveStage
from geo_ray.joining.server import JoinServer
from geo_ray.joining.service import Stage
from geo_ray.joining.site import JoinedTraining
from geo_ray.runs.checkpoints import SAVED_REGIONS
from geo_ray.runs.replanning import Decision, MembersPlan
from geo_ray.runtime import averagers as averagers_module
from geo_ray.runtime import served_checkpoints
from geo_ray.runtime.averagers import AveragerProcesses, write_credentials
from geo_ray.runtime.launcher import ProcessSpec, class_of
from geo_ray.runtime.replanning import ReplanPolicy
from geo_ray.runtime.served_checkpoints import ServedCheckpoints, read_saved
from geo_ray.runtime.serving import ServedPlans, terms_of
from geo_ray.runtime.spec import demand_of, demands_of
from geo_ray.storage.checkpoint import CheckpointStore
from geo_ray.storage.manifest import CheckpointManifest
from tests.integration.joining.test_serve import CONFIG
from tests.support.join_support import WAIT_S, Loop, terms, train_all
from tests.support.join_support import serving as in_process

STEPS, SLOW = 24, 8


class Call:
    """A method of an actor; its call is made at once."""

    def __init__(self, actor: Actor, name: str) -> None:
        self.actor, self.name = actor, name

    def remote(self, *arguments: Any) -> Any:
        if self.actor.is_killed:
            return RegionLostError("the process is lost")
        try:
            return getattr(self.actor.real, self.name)(*arguments)
        except Exception as error:
            return error


class Actor:
    """Stands for the handle of an actor."""

    def __init__(self, real: Any) -> None:
        self.real, self.is_killed = real, False

    def __getattr__(self, name: str) -> Call:
        return Call(self, name)


def collect(calls: Mapping[str, Any], _: float, progress: Any = None) -> dict[str, Any]:
    for each in calls.values():
        if isinstance(each, Exception):
            raise each
    return dict(calls)


class Launcher:
    """Makes processes as objects."""

    def __init__(self) -> None:
        self.made: list[tuple[str, Actor]] = []

    def make(self, specs: list[ProcessSpec]) -> list[Actor]:
        found = [Actor(class_of(each.kind)(*each.arguments)) for each in specs]
        self.made += zip([each.kind for each in specs], found, strict=True)
        return found

    def close(self) -> None:
        for _, each in self.made:
            if each.real._listening is not None:
                each.real.close()
            elif each.real._follower is not None:  # the standby
                each.real._follower.close()


class Places:
    def strategy(self, role: str, rank: int = 0) -> None:
        assert role == "bridge" and rank >= 0


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (averagers_module, served_checkpoints):
        monkeypatch.setattr(module, "collect", collect)
    monkeypatch.setattr(averagers_module, "kill", kill)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Actors set the threads of their processes, on which the last bits depend."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def kill(actor: Actor) -> None:
    """End an averager's process, as far as others notice."""
    actor.is_killed = True
    if actor.real._listening is not None:
        actor.real._listening._fence("killed by the test")


def experiment_of(holders: int, **changes: Any) -> Experiment:
    sections = {
        "train": {"steps": STEPS},
        "serve": CONFIG["serve"] | {"holders": holders},
        "checkpoint": {"every_s": 0.01},
        **changes,
    }
    return Experiment.model_validate_json(json.dumps(CONFIG | sections))


class Served:
    """A run that is served by such processes; the test is its run loop."""

    def __init__(
        self,
        folder: Path,
        holders: int,
        resumes: bool = False,
        follows_plan: bool = False,
        **changes: Any,
    ) -> None:
        self.experiment, self.launcher = experiment_of(holders, **changes), Launcher()
        self.store = CheckpointStore(folder / "checkpoints")
        write_credentials(self.experiment, folder)
        self.processes = AveragerProcesses(
            self.experiment,
            terms_of(self.experiment),
            self.launcher,  # type: ignore[arg-type]
            Places(),  # type: ignore[arg-type]
            folder,
        )
        saved = read_saved(self.store.latest(), self.experiment) if resumes else None
        self.processes.start(saved)
        self.checkpoints = ServedCheckpoints(self.store, self.experiment, self.processes, 1)
        self.seen, self.events = 0, list[dict[str, Any]]()
        self.is_planned, shown = threading.Event(), list[str]()
        self.plans = ServedPlans(
            self.experiment,
            self.processes,
            plan_for if follows_plan else None,
            shown.append,
            ReplanPolicy(0.0, 0.0),
        )

    def poll(self) -> dict[str, Any]:
        found: dict[str, Any] = self.processes.ask("poll", 1, self.seen)
        self.seen = found["seen"]
        if found["failure"] is not None:
            raise found["failure"]
        self.processes.watch(found["stalled_s"])
        trains = found["stage"] == Stage.TRAINING.value
        self.events += self.checkpoints.poll(found["save"], found["rounds"], trains=trains)
        if trains:
            self.plans.tick(found, time.monotonic())
            self.is_planned.set()
        self.events += [*found["events"], *self.plans.news()]
        return found

    def run(self, kill: int | None = None) -> Tensor | None:
        """Poll to the end; or until a holder is lost that is killed after a checkpoint."""
        until_s = time.monotonic() + WAIT_S
        while time.monotonic() < until_s:
            try:
                stage = self.poll()["stage"]
            except RegionLostError:
                assert kill is not None
                return None
            if kill is not None and self.store.ids():
                actor = self.launcher.made[kill][1]
                actor.is_killed = True
                actor.real.close()
            elif stage == Stage.DONE.value:
                layout, params_P = self.processes.fetch_model()
                assert layout.size == params_P.numel()
                self._save_last()
                return params_P
            time.sleep(0.02)
        raise AssertionError("the run does not end")

    def _save_last(self) -> None:
        """As the run loop does."""
        self._await_checkpoint()
        if self.checkpoints.begin_last():
            self._await_checkpoint()
        self.processes.ask("end_save", None)

    def _await_checkpoint(self) -> None:
        until_s = time.monotonic() + WAIT_S
        while self.checkpoints.is_open and time.monotonic() < until_s:
            self.poll()
            time.sleep(0.02)

    @property
    def server(self) -> Any:
        """The process that serves the run now."""
        return cast(Actor, self.processes.actor).real._server

    @property
    def made(self) -> list[CheckpointManifest]:
        """The checkpoints that exist; their files are complete."""
        folders = sorted(self.store._root.ids())
        assert folders == self.store.ids()  # nothing remains of others
        return [self.store.open(each).manifest for each in folders]

    def close(self) -> None:
        self.plans.close()
        self.checkpoints.close()
        self.processes.close()
        self.launcher.close()


class PlannedInterval(NamedTuple):
    """Stands for a plan, of which only the interval counts."""

    interval: int
    averager: str = "eu"
    regions: tuple[()] = ()
    total_s: float = 1.0
    total_usd: float = 1.0


def plan_for(
    members: Collection[str], averager: str, interval: int | None, _: str | None
) -> MembersPlan:
    """Exchange after each step if a region is alone."""
    before, after = PlannedInterval(interval or 4), PlannedInterval(1 if len(members) == 1 else 3)
    assert averager == before.averager
    decision = Decision(cast(Any, after), before != after, 0.5, "for the test")
    return MembersPlan(cast(Any, before), decision, decision)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "run"


@pytest.mark.parametrize("holders", [1, 3])
def test_the_run_loop_fetches_the_model_from_all_holders(holders: int, folder: Path) -> None:
    served = Served(folder, holders)
    assert len(demands_of(served.experiment)[0].bundles) == holders
    first, second = (demand_of(served.experiment, each) for each in served.experiment.regions)
    assert (len(first.bundles), len(second.bundles)) == (holders, 1)  # as local clusters provide
    assert [kind for kind, _ in served.launcher.made] == ["averager"] + ["holder"] * (holders - 1)
    try:
        loops = {n: Loop(served.processes.address, n, folder).run for n in ("eu", "us")}
        found = train_all({**loops, "serve": served.run})
        assert not [each for each in found.values() if isinstance(each, Exception)], found
        assert torch.equal(found["serve"], found["eu"][0])
        assert torch.equal(found["serve"], found["us"][0])
        listening = [each.real._listening.address for _, each in served.launcher.made]
        places = [served.processes.address, *served.processes.holder_addresses]
        assert places == [address_text(each) for each in listening]
        links = [served.processes.ask_holder(h, "links") for h in range(holders)]
        assert all(set(each) == {"eu", "us"} for each in links)
        assert min(each["eu"]["received"] for each in links) > 0
        whole = served.processes.links()["eu"]["received"]
        assert whole >= sum(each["eu"]["received"] for each in links)
    finally:
        served.close()


def test_a_lost_holder_continues_from_the_newest_checkpoint(folder: Path) -> None:
    (plain := folder.parent / "plain").mkdir()
    run = terms(("eu", "us"), STEPS, strategy=CONFIG["strategy"])
    with in_process(run, plain) as (_, there):
        expected = train_all({name: Loop(there, name, plain).run for name in ("eu", "us")})
    served = Served(folder, 3)

    def slow(sync: JoinedTraining) -> None:
        """Leave time for a checkpoint, and for the loss."""
        until_s = time.monotonic() + WAIT_S
        while sync.steps == SLOW and not served.store.ids() and time.monotonic() < until_s:
            time.sleep(0.02)
        if sync.steps > SLOW:
            time.sleep(0.1)

    loops = {n: Loop("", n, folder, checkpoints=folder / "saved" / n) for n in ("eu", "us")}
    try:
        placed = {n: replace(e, address=served.processes.address) for n, e in loops.items()}
        calls = {name: partial(loop.run, slow) for name, loop in placed.items()}
        found = train_all({**calls, "serve": partial(served.run, kill=1)})
        assert found["serve"] is None
        assert {type(found[name]) for name in loops} == {ServerLostError}, found
    finally:
        served.close()
    assert len(served.store.latest().manifest.parts) == 3
    again = Served(folder, 2, resumes=True)
    try:
        placed = {n: replace(e, address=again.processes.address) for n, e in loops.items()}
        found = train_all({**{n: e.run for n, e in placed.items()}, "serve": again.run})
        assert not [each for each in found.values() if isinstance(each, Exception)], found
        for name in loops:
            assert torch.equal(found[name][0], expected[name][0])
        assert torch.equal(found["serve"], expected["eu"][0])
    finally:
        again.close()


@pytest.mark.parametrize("holders", [1, 2])
def test_the_interval_follows_the_members(holders: int, folder: Path) -> None:
    """A region is lost and joins again; the run is planned each time."""
    served, is_alone = Served(folder, holders, follows_plan=True), threading.Event()

    class KilledError(Exception):
        pass

    def intervals() -> list[int]:
        return [e["interval"] for e in served.events if e["kind"] == "interval_changed"]

    def until(count: int) -> None:
        until_s = time.monotonic() + WAIT_S
        while len(intervals()) < count and time.monotonic() < until_s:
            time.sleep(0.02)

    def each(sync: JoinedTraining) -> None:
        """Wait for the plans: of the region alone, and of both again."""
        if sync.steps == 5:
            until(1)
        elif sync.steps == 8:
            is_alone.set()
            until_s = time.monotonic() + WAIT_S
            service = served.processes.actor.real._server.service
            while not service.waiting and time.monotonic() < until_s:
                time.sleep(0.02)
        elif sync.steps == 9:
            until(2)

    def fail(sync: JoinedTraining) -> None:
        if sync.steps == 5:
            assert served.is_planned.wait(WAIT_S)  # for both regions
            raise KilledError

    def twice() -> Any:
        loop = Loop(served.processes.address, "us", folder)
        with pytest.raises(KilledError):
            loop.run(fail)
        assert is_alone.wait(WAIT_S)
        return loop.run()

    try:
        eu = partial(Loop(served.processes.address, "eu", folder).run, each)
        found = train_all({"eu": eu, "us": twice, "serve": served.run})
        assert not [each for each in found.values() if isinstance(each, Exception)], found
        assert torch.equal(found["eu"][0], found["us"][0])
        assert torch.equal(found["eu"][0], found["serve"])
    finally:
        served.close()
    assert intervals() == [1, 3]
    steps = {
        name: [e["step"] for e in served.events if e["kind"] == "step" and e["region"] == name]
        for name in ("eu", "us")
    }
    assert steps["eu"][:3] == [4, 8, 9] and steps["us"][0] == 4
    assert steps["us"][1:] == steps["eu"][-len(steps["us"]) + 1 :]
    assert {b - a for a, b in pairwise(steps["us"][2:-1])} == {3}


def test_the_last_checkpoint_replaces_that_of_the_last_round(folder: Path) -> None:
    """It has what the loop does after its last `sync.step`; no exchange follows."""
    served = Served(folder, 2, checkpoint={"every_rounds": 1})

    def each(sync: JoinedTraining) -> None:
        """Wait in the last round until its checkpoint has begun."""
        until_s = time.monotonic() + WAIT_S
        while sync.steps == STEPS - 1 and time.monotonic() < until_s:
            save = served.server.service.save
            if save is not None and save.stage is SaveStage.MEETING:
                return
            time.sleep(0.02)

    try:
        loops = {
            n: partial(
                Loop(served.processes.address, n, folder, checkpoints=folder / "saved" / n).run,
                each,
            )
            for n in ("eu", "us")
        }
        found = train_all({**loops, "serve": served.run})
        assert not [each for each in found.values() if isinstance(each, Exception)], found
    finally:
        served.close()
    made = [e["step"] for e in served.events if e["kind"] == "checkpoint"]
    assert made[-2:] == [STEPS, STEPS]
    steps = [each.step for each in served.made]
    assert steps[-1] == STEPS and len(set(steps)) == len(steps) > 1


@pytest.mark.parametrize("where", ["meeting", "part", "saved", "ready", "fetching"])
def test_a_checkpoint_during_which_the_server_is_lost_is_whole_or_absent(
    where: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The standby continues; the next checkpoint is whole, and the run continues from it."""
    (plain := folder.parent / "plain").mkdir()
    run = terms(("eu", "us"), STEPS, strategy=CONFIG["strategy"])
    with in_process(run, plain) as (_, there):
        expected = train_all({name: Loop(there, name, plain).run for name in ("eu", "us")})
    died, dying, lost = threading.Event(), threading.Lock(), list[int]()

    def may_die() -> bool:
        return not died.is_set() and served.processes._standby is not None

    def die() -> None:
        with dying:
            if not died.is_set():
                lost.append(served.server.service.save.id)
                kill(cast(Actor, served.processes.actor))
                died.set()

    on_message, remote = JoinServer._on_message, Call.remote

    def received(server: JoinServer, peer: str, message: Any) -> None:
        if message.kind == where and may_die():
            die()
        on_message(server, peer, message)

    def called(call: Call, *arguments: Any) -> Any:
        answer = remote(call, *arguments)
        if call.name == "poll" and not isinstance(answer, Exception) and may_die():
            save = answer["save"]
            if save is not None and save["stage"] == where:
                die()
        if (call.name, where) == ("saved_piece", "fetching") and may_die():
            die()
        return answer

    monkeypatch.setattr(JoinServer, "_on_message", received)
    served = Served(folder, 2, averager={"standby": "auto"}, checkpoint={"every_rounds": 1})
    monkeypatch.setattr(Call, "remote", called)

    def each(sync: JoinedTraining) -> None:
        """Wait in the second round until the standby is ready; leave time for checkpoints."""
        until_s = time.monotonic() + WAIT_S
        while sync.steps == 5 and time.monotonic() < until_s:
            if served.processes._standby is not None:
                break
            time.sleep(0.02)
        if sync.steps < STEPS - 1:
            time.sleep(0.1)

    loops = {n: Loop("", n, folder, checkpoints=folder / "saved" / n) for n in ("eu", "us")}
    try:
        placed = {n: replace(e, address=served.processes.address) for n, e in loops.items()}
        calls = {name: partial(loop.run, each) for name, loop in placed.items()}
        found = train_all({**calls, "serve": served.run})
        assert died.is_set()
        assert not [one for one in found.values() if isinstance(one, Exception)], found
        for name in loops:
            assert torch.equal(found[name][0], expected[name][0])
        later = [each for each in served.made if each.id > lost[0]]
        assert len(later) > 1
        for manifest in served.made:
            assert len(manifest.parts) == 2
            assert manifest.extra[SAVED_REGIONS] == ["eu", "us"]
    finally:
        served.close()
    first = later[0]
    assert first.step < STEPS
    for manifest in later[1:]:
        shutil.rmtree(folder / "checkpoints" / f"ckpt-{manifest.id:08d}")
    again = Served(folder, 2, resumes=True)
    try:
        firsts: dict[str, int] = {}
        placed = {n: replace(e, address=again.processes.address) for n, e in loops.items()}

        def note(sync: JoinedTraining, name: str) -> None:
            firsts.setdefault(name, sync.steps)

        calls = {n: partial(e.run, partial(note, name=n)) for n, e in placed.items()}
        found = train_all({**calls, "serve": again.run})
        assert not [one for one in found.values() if isinstance(one, Exception)], found
        assert firsts == dict.fromkeys(loops, first.step + 1)
        for name in loops:
            assert torch.equal(found[name][0], expected[name][0])
    finally:
        again.close()
