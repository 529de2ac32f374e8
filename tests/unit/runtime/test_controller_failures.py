"""What a controller does about trouble, in which order; it and its policies are the real ones.

Only the actors are not there: of each, a list has what it was asked.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from geo_ray.base.errors import GeoRayError, InvariantError, LeaseLostError, RegionLostError
from geo_ray.data.tasks.load import load_task
from geo_ray.experiment.experiment import Experiment
from geo_ray.ray_cluster.calls import Polls, check_not_closing
from geo_ray.ray_cluster.keys import RunKeys
from geo_ray.runs.evaluation import EvalCollector, EvalNotes
from geo_ray.runs.recorder import Recorder
from geo_ray.runs.requests import MemberRequest, Verb
from geo_ray.runtime import actor_group, checkpoints, controller, process_watch
from geo_ray.runtime import process_watch as worker_watch
from geo_ray.runtime.actor_group import ActorGroup, GroupWorker, _DrainReport
from geo_ray.runtime.checkpoints import Saver
from geo_ray.runtime.controller import Controller
from geo_ray.runtime.launcher import GoneRegions
from geo_ray.runtime.policies import LossHealth
from geo_ray.runtime.process_watch import AWAY_S, WorkerWatch
from geo_ray.runtime.regions import JoinEnded
from geo_ray.runtime.replanning import LinkNotes
from geo_ray.runtime.spec import RunSpec
from geo_ray.storage.checkpoint import CheckpointStore
from geo_ray.storage.folders import directory_of
from geo_ray.storage.manifest import AVERAGER_PART, shard_part_name
from geo_ray.storage.parts import write_part
from geo_ray.telemetry.event_log import EventLog
from geo_ray.telemetry.events import Event
from geo_ray.telemetry.summary import EarlyStop
from geo_ray.training.membership import AveragerLeader, View

Key = tuple[str, str]
HOME = "us"  # the last by name, and the last of the configuration


class _Call:
    def __init__(self, answer: Callable[..., object]) -> None:
        self.remote = answer


class _Absent:
    """Stands where an actor's handle would; calls of a dead one fail when an answer is wanted."""

    def __init__(self, calls: list[tuple[str, ...]], region: str) -> None:
        self._calls, self._region = calls, region
        self.is_dead = False
        self.answers: dict[str, Callable[..., object]] = {}

    def __getattr__(self, method: str) -> _Call:
        def remote(*args: object) -> object:
            if self.is_dead:
                return RegionLostError(f"the bridge of '{self._region}' is dead")
            self._calls.append((self._region, method, *(str(each) for each in args)))
            return self.answers.get(method, lambda *_: None)(*args)

        return _Call(remote)


class _Told(Polls):
    """Gives the news of the test, one after the other, then none."""

    def __init__(self) -> None:
        super().__init__(60.0)
        self.news: list[tuple[dict[Key, dict[str, Any]], dict[Key, str]]] = []

    def ask(
        self, handles: Mapping[Key, Any], wait_s: float
    ) -> tuple[dict[Key, dict[str, Any]], dict[Key, str]]:
        return self.news.pop(0) if self.news else ({}, {})


def _value(refs: Mapping[Any, Any], timeout_s: float) -> dict[Any, Any]:
    for each in refs.values():
        if isinstance(each, GeoRayError):
            raise each
    return dict(refs)


class Run:
    """A controller of the regions eu, asia and us, whose bridge has the averager."""

    def __init__(
        self, path: Path, log: EventLog, absent: Collection[str] = (), **sections: object
    ) -> None:
        tree = {
            "name": "tiny",
            "task": {"use": "digits"},
            "data": {"generate": {}},
            "regions": [{"name": name} for name in ("eu", "asia", HOME)],
            "strategy": {"kind": "sma"},
            "optimizer": {"kind": "sgd"},
            "train": {"steps": 1},
            "members": {"min": 1},
            "averager": {"region": HOME, "standby": "asia"},
            **sections,
        }
        experiment = Experiment.model_validate_json(json.dumps(tree))
        text = experiment.model_dump_json()
        spec = RunSpec(text, str(path), str(path), "", "run", str(path))
        names = experiment.region_names
        self.actors = ActorGroup(spec, {}, RunKeys("run", names, experiment.transport))
        self.calls: list[tuple[str, ...]] = []
        for name in [each for each in names if each not in absent]:
            self.actors.bridges[name] = _Absent(self.calls, name)
            self.actors.primaries[name] = _Absent(self.calls, f"{name}/ps")
        self.events: list[Event] = []
        recorder = Recorder(log, [self.events.append])
        task = load_task(experiment.task, path)
        self.checkpoints = path / "checkpoints"
        self.store = CheckpointStore(self.checkpoints, keep=2)
        saver = Saver(self.store, experiment, "d" * 64, 1, LossHealth())
        self.polls = _Told()
        self.controller = Controller(
            experiment,
            self.actors,
            recorder,
            EvalNotes(EvalCollector(task, len(names)), recorder.emit),
            saver,
            time.time(),
            LinkNotes(path / "links.json"),
            _polls=self.polls,
        )

    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]

    def told(self, method: str) -> list[tuple[str, ...]]:
        return [call for call in self.calls if call[1] == method]


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EventLog]:
    for module in (controller, checkpoints):
        monkeypatch.setattr(module, "collect", _value)
    monkeypatch.setattr(checkpoints.ray, "wait", lambda refs, timeout: (refs, []))
    for module in (actor_group, process_watch):
        monkeypatch.setattr(module, "kill", lambda handle: None)
    monkeypatch.setattr(actor_group, "head_answers", lambda: True)
    with EventLog(tmp_path / "events.jsonl") as opened:
        yield opened
    assert not ray.is_initialized(), "a call of Ray's would start or join a cluster"


@pytest.fixture
def run(tmp_path: Path, log: EventLog) -> Run:
    return Run(tmp_path, log)


@pytest.fixture
def paused(tmp_path: Path, log: EventLog) -> Run:
    """A run that waits for eu, with a checkpoint due at any time."""
    run = Run(tmp_path, log, members={}, checkpoint={"every_s": 1e-6})
    run.polls.news = [({}, {("ps", "eu"): "killed"})]
    run.controller._poll()
    run.controller._handle_all({})
    assert run.kinds() == ["region_lost", "run_paused"]
    assert {call[2] for call in run.told("pause")} == {"True"}
    return run


def test_of_regions_lost_together_the_averagers_goes_first(run: Run) -> None:
    """A region lost with the leader is reported to the standby, not to a bridge that is gone."""
    run.actors.bridges[HOME].is_dead = True
    run.polls.news = [({}, {("ps", "eu"): "killed", ("ps", HOME): "killed"})]
    run.controller._poll()
    lost = [event.fields["region"] for event in run.events if event.kind == "region_lost"]
    assert lost == [HOME, "eu"]
    assert run.actors.leader.region == "asia"
    assert run.told("report_dead") == [
        ("asia", "report_dead", HOME),
        ("asia", "report_dead", "eu"),
    ]


def test_the_averager_and_its_standby_lost_together_end_the_run(run: Run) -> None:
    run.polls.news = [({}, {("ps", "asia"): "killed", ("ps", HOME): "killed"})]
    with pytest.raises(RegionLostError, match="the parameter server of region 'asia' is lost"):
        run.controller._poll()


def test_losses_are_reported_again_to_a_moved_averager(run: Run) -> None:
    """The old leader may have received the report without forwarding it."""
    run.polls.news = [({}, {("ps", "eu"): "killed"})]
    run.controller._poll()
    assert run.told("report_dead") == [(HOME, "report_dead", "eu")]
    run.calls.clear()
    moved = {"leader": AveragerLeader("asia", 2), "is_standby": False}
    run.controller._follow_averager({("bridge", "asia"): {"status": moved}})
    assert run.told("report_dead") == [("asia", "report_dead", "eu")]
    run.calls.clear()
    run.controller._follow_averager({("bridge", "asia"): {"status": moved}})
    assert run.told("report_dead") == []  # once for each home


def test_a_last_checkpoint_that_the_averager_does_not_begin_is_begun_again(run: Run) -> None:
    """An averager that is new does not know yet what each region has."""
    asked = run.actors.bridges[HOME]
    refusals = [False, False]

    def request(checkpoint: int, halt: bool) -> bool:
        return refusals.pop() if refusals else True

    def snapshot(names: list[str], checkpoint: int, halt: bool) -> None:
        folder = directory_of(run.checkpoints, checkpoint)
        parts = [write_part(folder, name, {"x": torch.ones(2)}, {}) for name in names]
        run.controller.checkpoints.add({"id": checkpoint, "parts": parts, "step": 1})

    asked.answers["request_checkpoint"] = request
    for name, primary in run.actors.primaries.items():
        names = [shard_part_name(name, 0)] + ([AVERAGER_PART] if name == HOME else [])
        primary.answers["snapshot"] = partial(snapshot, names)
    run.controller._save_end()
    run.controller.saver.close()
    assert len(run.told("request_checkpoint")) == 3
    saved = [event for event in run.events if event.kind == "checkpoint"]
    assert len(saved) == 1
    newest = run.store.latest()
    assert newest is not None and newest.manifest.id == run.controller.policy.newest_saved


def test_a_checkpoint_that_is_due_in_a_pause_is_made(paused: Run) -> None:
    paused.controller._keep_time()
    assert [call[3] for call in paused.told("request_checkpoint")] == ["False"]
    paused.controller._handle_all({})
    assert paused.controller.quorum.is_paused


def test_ctrl_c_in_a_pause_saves_and_lets_workers_finish(paused: Run) -> None:
    paused.calls.clear()
    paused.controller.interrupted.set()
    paused.controller._keep_time()
    assert [call[3] for call in paused.told("request_checkpoint")] == ["True"]
    paused.controller._handle_all({})
    assert paused.kinds()[2:] == ["stop_requested", "run_resumed"]
    assert sorted(paused.told("pause")) == [
        (f"{name}/ps", "pause", "False") for name in ("asia", HOME)
    ]


def test_a_target_that_is_reached_in_a_pause_ends_it(paused: Run) -> None:
    """An evaluation may be complete only then; regions that are not needed are not awaited."""
    paused.calls.clear()
    paused.controller._stop(EarlyStop(reason="target", cause="accuracy reached 0.9"))
    assert paused.told("request_stop") == [(HOME, "request_stop")]
    paused.controller._handle_all({})
    assert paused.kinds()[2:] == ["stop_requested", "run_resumed"]
    assert {call[2] for call in paused.told("pause")} == {"False"}


def _is_due(run: Run, region: str) -> bool:
    """Whether a lost region is brought back now."""
    return run.controller.members.regions[region].backoff.take(time.monotonic())


def _join(run: Run, region: str) -> None:
    """A region joins that was absent or lost."""
    members = run.controller.members
    members.regions[region].move("start")
    members._on(JoinEnded(region, has_joined=True))


def _look(run: Run, view: View, *asked: tuple[Verb, str]) -> None:
    requests = [MemberRequest(verb=verb, region=region) for verb, region in asked]
    run.controller.members.requests = lambda: requests
    run.controller.members.tick({("bridge", HOME): {"view": view}})


def test_a_barrier_between_a_poll_and_a_request_ends_nothing(run: Run) -> None:
    """A region that is to leave is asked for again and again; it may just have left."""
    before = View(("asia", "eu", HOME))
    after = before.changed((), ("eu",))

    def change(joins: tuple[str, ...], leaves: tuple[str, ...], donor: str) -> object:
        try:
            return after.changed(joins, leaves, donor)
        except InvariantError as error:
            return error

    _look(run, before, ("drain", "eu"))
    run.actors.bridges[HOME].answers["change_members"] = change
    _look(run, before)
    assert len(run.told("change_members")) >= 2 and run.controller.members.is_leaving
    _look(run, after)
    assert run.kinds() == ["members_accepted", "region_drained"]
    assert not run.controller.members.is_leaving


def test_two_that_are_asked_to_leave_at_once_leave_enough(tmp_path: Path, log: EventLog) -> None:
    run = Run(tmp_path, log, members={"min": 2})
    _look(run, View(("asia", "eu", HOME)), ("drain", "eu"), ("drain", "asia"))
    assert [e.fields["region"] for e in run.events if e.kind == "members_refused"] == ["asia"]


def test_a_region_that_dies_while_leaving_stays_away(tmp_path: Path, log: EventLog) -> None:
    run = Run(tmp_path, log, members={})
    _look(run, View(("asia", "eu", HOME)), ("drain", "eu"))
    run.polls.news = [({}, {("ps", "eu"): "killed"})]
    run.controller._poll()
    assert run.kinds() == ["members_accepted", "region_lost"]
    assert run.controller.members.regions.awaited == []
    run.controller._keep_quorum()
    assert not run.controller.quorum.is_paused


def test_an_answer_names_the_request_that_it_is_of(tmp_path: Path, log: EventLog) -> None:
    run = Run(tmp_path, log, members={"min": 2})
    asked = [("drain", "eu", "1"), ("drain", "asia", "2"), ("remove", "eu", "3")]
    requests = [MemberRequest(verb=v, region=r, id=id) for v, r, id in asked]  # type: ignore[arg-type]
    run.controller.members.requests = lambda: requests
    run.controller.members.tick({("bridge", HOME): {"view": View(("asia", "eu", HOME))}})
    answers = [(e.kind, e.fields["request"]) for e in run.events if e.kind.startswith("members_")]
    assert answers == [
        ("members_accepted", "1"),
        ("members_refused", "2"),
        ("members_accepted", "3"),
    ]


def test_a_region_that_does_not_leave_can_be_removed(run: Run) -> None:
    view = View(("asia", "eu", HOME))
    _look(run, view, ("drain", "eu"))
    _look(run, view, ("drain", "eu"), ("remove", "eu"))
    assert run.kinds() == ["members_accepted", "members_refused", "members_accepted", "region_lost"]
    _look(run, view.without("eu"))
    assert not run.controller.members.is_leaving and run.controller.members.regions.awaited == []


def test_a_running_but_unreachable_bridge_counts_as_dead(run: Run) -> None:
    def reached(region: str, away_s: float | None) -> None:
        status = {"phase": "training"} | ({} if away_s is None else {"bridge_away_s": away_s})
        run.polls.news = [({("ps", region): {"status": status, "events": []}}, {})]
        run.controller._poll()

    reached("eu", None)
    reached("eu", AWAY_S - 1)
    assert "eu" in run.actors.bridges
    reached("eu", AWAY_S + 1)
    assert "eu" not in run.actors.bridges
    assert run.kinds() == ["bridge_requested"]  # the region goes on
    reached(HOME, AWAY_S + 1)
    assert run.actors.leader.region == "asia"
    assert ("asia", "report_dead", HOME, "True") in run.calls
    run.actors.standby = None
    reached("asia", AWAY_S + 1)  # the averager lives there now, and nobody stands by
    assert "asia" in run.actors.bridges and run.kinds() == ["bridge_requested"] * 2


def test_an_outdated_report_of_a_server_ends_no_other_bridge(run: Run) -> None:
    run.controller.bridges._linked_s["eu"] = time.monotonic() - 1.0
    status = {"phase": "training", "bridge_away_s": AWAY_S + 1}
    run.polls.news = [({("ps", "eu"): {"status": status, "events": []}}, {})]
    run.controller._poll()
    assert "eu" in run.actors.bridges


def test_workers_that_came_back_with_their_region_are_not_replaced(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One was to be replaced later, another was sent away, when their region was lost."""
    replaced: list[GroupWorker] = []
    watch = run.controller.workers
    monkeypatch.setattr(WorkerWatch, "_replace", lambda self, worker: replaced.append(worker))
    monkeypatch.setattr(WorkerWatch, "_heed", lambda self, now_s: None)
    gone = GroupWorker("eu", 0, 1, None)
    sent = GroupWorker("eu", 1, 1, None, ref="work")
    run.controller.policy._later = [("eu", 0)]
    watch._sent_away = {("eu", 1): sent}
    back = [GroupWorker("eu", rank, 2, None, ref=f"work {rank}") for rank in (0, 1)]
    run.actors.workers = {("eu", worker.rank): worker for worker in back}
    watch._leader(back[1], 7)
    assert back[1].steps == 7 and not replaced, "it has done its work"
    run.actors.workers["eu", 0].steps = 7
    watch.collect(0.0)
    assert not replaced
    run.actors.workers = {("eu", 0): gone}
    run.controller.policy._later = [("eu", 0)]
    watch.collect(0.0)
    assert replaced == [gone]


def test_another_run_actor_brings_back_regions_lost_before_it(
    tmp_path: Path, log: EventLog
) -> None:
    run = Run(tmp_path, log, absent=["eu"])
    run.controller.members.resume(GoneRegions(("eu",)), unhurried=())
    assert run.controller.members.regions.awaited == ["eu"]
    assert _is_due(run, "eu")


def test_an_excluded_region_stays_away_and_its_rows_are_stored(
    tmp_path: Path, log: EventLog
) -> None:
    run = Run(tmp_path, log, absent=["eu"])
    members = run.controller.members
    left = GoneRegions(away=("eu",), rows={"eu": {"cursor": 4}})
    members.resume(left, unhurried=())
    run.controller._handle_all({})
    run.controller._keep_quorum()
    assert not run.controller.quorum.is_paused and members.regions.lost == []
    assert (members.gone, members.regions.away) == (left, {"eu"})
    assert run.controller.saver._extra["rows"] == {"eu": {"cursor": 4}}
    _join(run, "eu")
    run.actors.primaries["eu"] = _Absent(run.calls, "eu/ps")
    assert members.gone == GoneRegions()


@pytest.mark.parametrize(("least", "waits"), [(None, False), (None, True), (2, False), (3, False)])
def test_a_resumed_run_waits_only_if_configured(
    tmp_path: Path, log: EventLog, least: int | None, waits: bool
) -> None:
    """For regions lost before its checkpoint; those lost later are waited for as always."""
    run = Run(tmp_path, log, absent=["eu"], members={"min": least})
    run.controller.members.resume(GoneRegions(("eu",)), unhurried=() if waits else ["eu"])
    run.controller._keep_quorum()
    assert run.controller.quorum.is_paused is (waits or least == 3)
    _join(run, "eu")
    run.actors.primaries["eu"] = _Absent(run.calls, "eu/ps")
    run.controller._keep_quorum()
    assert not run.controller.quorum.is_paused
    run.polls.news = [({}, {("ps", "eu"): "killed"})]
    run.controller._poll()
    run.controller._keep_quorum()
    assert run.controller.quorum.is_paused is (least != 2)


def test_every_checkpoint_records_lost_regions_but_not_drained_ones(run: Run) -> None:
    members, view = run.controller.members, View(("asia", "eu", HOME))
    run.polls.news = [({}, {("ps", "eu"): "killed"})]
    run.controller._poll()
    run.controller._handle_all({})
    assert run.controller.saver._extra["lost"] == ["eu"] and not members.regions.away
    _look(run, view.without("eu"), ("remove", "eu"))
    run.controller._handle_all({})
    assert run.controller.saver._extra["lost"] == [] and members.regions.away == {"eu"}
    _look(run, view.without("eu"), ("drain", "asia"))
    _look(run, view.without("eu").changed((), ("asia",)))
    assert members.regions.away == {"eu", "asia"}
    _join(run, "asia")
    assert members.regions.away == {"eu"}


def test_without_rejoining_lost_regions_are_remembered(tmp_path: Path, log: EventLog) -> None:
    run = Run(tmp_path, log, absent=["eu"], members={"min": 1, "rejoin": False})
    run.controller.members.resume(GoneRegions(("eu",)), unhurried=())
    assert (
        run.controller.members.regions.lost == ["eu"]
        and run.controller.members.regions.awaited == []
    )
    assert not _is_due(run, "eu")


class _Places:
    """Takes places back; of each, its region."""

    def __init__(self) -> None:
        self.given_back: list[str] = []

    def remove(self, placed: Mapping[str, object]) -> None:
        self.given_back += placed

    def note(self, book: object) -> None:
        pass


def _notice(run: Run, **left_s: float) -> _Places:
    """Machines of regions' servers will be gone in so many seconds."""
    run.actors.launcher = places = _Places()  # type: ignore[assignment]
    run.actors.placed |= dict.fromkeys(run.actors.primaries, "place")  # type: ignore[arg-type]
    regions = {region: time.time() + each for region, each in left_s.items()}
    run.controller.members.notices._report = _DrainReport(frozenset(), regions)
    return places


def test_a_region_on_notice_leaves_at_a_barrier_and_will_return(
    tmp_path: Path, log: EventLog
) -> None:
    run = Run(tmp_path, log, members={})
    members, view = run.controller.members, View(("asia", "eu", HOME))
    places = _notice(run, eu=120.0)
    _look(run, view)
    assert run.told("change_members")[0][2:4] == ("()", "('eu',)")
    assert members.is_leaving and members.leaves_on_notice("eu") and not run.events
    _look(run, view.changed((), ("eu",)))
    (drained,) = run.events
    assert drained.kind == "region_drained"
    assert drained.fields == {"region": "eu", "cause": "notice"}
    assert places.given_back == ["eu"] and "eu" not in run.actors.placed
    assert members.regions.lost == members.regions.awaited == ["eu"] and not members.regions.away
    assert _is_due(run, "eu")
    run.controller._keep_quorum()
    assert run.controller.quorum.is_paused  # as for any that is lost, without members.min
    run.controller._handle_all({})
    assert run.controller.saver._extra["lost"] == ["eu"]  # a restart brings it back, too


def test_a_region_on_notice_without_a_barrier_is_dropped_in_time(run: Run) -> None:
    view = View(("asia", "eu", HOME))
    _notice(run, eu=120.0)
    _look(run, view)
    run.actors.workers["eu", 0] = GroupWorker("eu", 0, 1, None, ref="work", node="n")
    places = _notice(run, eu=1.0)
    _look(run, view)
    assert run.kinds() == ["region_lost"] and places.given_back == ["eu"]
    assert run.actors._idle == {}, "its workers are on that machine"
    assert (
        run.controller.members.regions.awaited == ["eu"] and not run.controller.members.is_leaving
    )


def test_for_a_notice_the_averager_moves_before_its_region_leaves(run: Run) -> None:
    _notice(run, **{HOME: 120.0})
    view = View(("asia", "eu", HOME))
    _look(run, view)
    assert ("asia", "report_dead", HOME, "True") in run.calls
    assert not run.told("change_members")
    moved = {"leader": AveragerLeader("asia", 2), "is_standby": False}
    run.controller._follow_averager({("bridge", "asia"): {"status": moved}})
    run.controller.members.tick({("bridge", "asia"): {"view": view}})
    assert run.told("change_members")[0][:4] == ("asia", "change_members", "()", f"('{HOME}',)")


@pytest.mark.parametrize(
    "sections",
    [
        {"averager": {"region": HOME}},
        {"members": {"rejoin": False}},
        {"members": {}, "overlay": {"kind": "binary"}, "strategy": {"kind": "bsp"}},
    ],
)
def test_a_needed_region_stays_and_its_workers_leave_alone(
    tmp_path: Path, log: EventLog, sections: dict[str, object]
) -> None:
    run = Run(tmp_path, log, **{"averager": {"region": HOME}} | sections)
    _notice(run, **{HOME: 120.0})
    _look(run, View(("asia", "eu", HOME)))
    assert not run.controller.members.are_changing and not run.calls
    assert not run.controller.members.leaves_on_notice(HOME)


def test_workers_of_a_region_that_leaves_are_not_sent_away_by_themselves(run: Run) -> None:
    _notice(run, eu=120.0)
    for region in ("eu", "asia"):
        run.actors.workers[region, 0] = GroupWorker(region, 0, 1, None, ref="work", node="n")
    notices = run.controller.workers.notices
    notices._asked_s = time.monotonic()
    notices._report = _DrainReport({"n"}, notices.regions)
    run.controller.workers._heed(time.monotonic())
    assert [call[0] for call in run.told("drain_worker")] == ["asia/ps"]


def test_an_unplaced_worker_does_not_delay_a_leaving_region(run: Run) -> None:
    _notice(run, eu=120.0)
    view = View(("asia", "eu", HOME))
    _look(run, view)
    run.actors.workers["eu", 0] = GroupWorker("eu", 0, 2, None, ref="work", node="n")
    run.actors.workers["eu", 1] = GroupWorker("eu", 1, 2, None, ref="work")
    _look(run, view.changed((), ("eu",)))
    assert run.kinds() == []  # it says its last words
    run.actors.workers["eu", 0].steps = 3
    _look(run, view.changed((), ("eu",)))
    assert run.kinds() == ["region_drained"]


def test_a_place_on_a_machine_with_a_notice_is_given_back_before_a_return(run: Run) -> None:
    run.polls.news = [({}, {("ps", "eu"): "killed"})]
    run.controller._poll()
    places = _notice(run, eu=120.0)
    run.actors.placed["eu"] = "place"  # type: ignore[assignment]
    run.controller.members.regions["eu"].backoff.due_s = None
    _look(run, View(("asia", HOME)))
    assert places.given_back == ["eu"] and run.kinds() == ["region_lost"]


def test_a_user_cancels_the_return_of_a_region_that_left_on_notice(run: Run) -> None:
    view = View(("asia", "eu", HOME))
    _notice(run, eu=120.0)
    _look(run, view)
    _look(run, view.changed((), ("eu",)))
    assert _is_due(run, "eu")
    _look(run, view.changed((), ("eu",)), ("remove", "eu"))
    assert run.controller.members.regions.awaited == [] and run.controller.members.regions.away == {
        "eu"
    }


def test_a_superseded_run_actor_calls_and_replaces_nothing(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overtaken() -> None:
        raise LeaseLostError("the run was taken over")

    monkeypatch.setattr(run.controller.recorder, "check", overtaken)
    run.polls.news = [({}, {("bridge", "eu"): "its processes are another's"})]
    with pytest.raises(LeaseLostError):
        run.controller._poll()
    assert run.polls.news and "eu" in run.actors.bridges and run.kinds() == []


def test_a_worker_that_ray_ended_for_want_of_memory_is_replaced(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`OutOfMemoryError` and `NodeDiedError` are no `RayActorError`, and mean the same."""
    replaced: list[GroupWorker] = []
    monkeypatch.setattr(WorkerWatch, "_replace", lambda self, worker: replaced.append(worker))
    monkeypatch.setattr(WorkerWatch, "_heed", lambda self, now_s: None)
    monkeypatch.setattr(worker_watch.ray, "wait", lambda refs, **_: (refs, []))
    for error in (
        ray.exceptions.OutOfMemoryError("the node is running low on memory\nNode: 1"),
        ray.exceptions.NodeDiedError("the node is gone"),
    ):
        monkeypatch.setattr(worker_watch.ray, "get", partial(_raise, error))
        worker = GroupWorker("eu", 0, 1, None, ref="work")
        run.actors.workers = {("eu", 0): worker}
        run.controller.workers.collect(0.0)
        assert replaced.pop() is worker and worker.ref is None
    causes = [event.fields["cause"] for event in run.events if event.kind == "worker_lost"]
    assert causes == ["the node is running low on memory", "the node is gone"]


def _raise(error: Exception, *_: object) -> None:
    raise error


def test_at_the_end_no_thread_calls_ray(run: Run) -> None:
    """A region that is being brought back, a bridge that is replaced: both wait for Ray."""
    asked = threading.Event()

    def bring_up() -> None:
        asked.set()
        while True:
            check_not_closing()
            time.sleep(0.01)

    found = run.actors.threads.submit("join-eu", bring_up)
    assert asked.wait(60.0)
    run.controller.close()
    assert isinstance(found.exception(0.0), RegionLostError)
    assert not [each for each in threading.enumerate() if each.name.startswith("ray-")]
    run.controller.close()


def test_all_are_lost_with_the_process_that_owns_them(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No region continues without another then, and the error names what was killed."""
    monkeypatch.setattr(type(run.actors.launcher), "is_ours", lambda self: False)
    run.polls.news = [({}, {("ps", "eu"): "its owner has died"})]
    with pytest.raises(RegionLostError, match="the process that owned the run's processes"):
        run.controller._poll()
    assert run.kinds() == []
