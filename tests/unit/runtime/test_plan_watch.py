"""A run that follows a plan is replanned for the remaining regions, by the planner itself."""

from __future__ import annotations

import json
import threading
from collections.abc import Collection
from pathlib import Path
from typing import Any, cast

import pytest

from geo_ray.base.errors import PlanError
from geo_ray.base.load import load_tree
from geo_ray.experiment.experiment import Experiment
from geo_ray.runs import directory as rundir
from geo_ray.runs.planning import Sources, make_plan
from geo_ray.runs.replanning import MembersPlan, can_follow, free_of, plan_of_members
from geo_ray.runtime.replanning import CurrentLeader, PlanFor, PlanWatch, ReplanPolicy
from geo_ray.telemetry.event_log import EVENTS_FILE, EventLog
from geo_ray.telemetry.events import conform

CONFIG = Path(__file__).parents[3] / "configs" / "planned.yaml"
ALL = ("asia", "eu", "us")


class Run:
    """The directory of a run that has gone a quarter of its way, as fast as it was planned."""

    def __init__(self, directory: Path, slower: float = 1.0) -> None:
        sets = ["task.options={size: 0.1M}", "plan.deadline_h=100", f"run.dir={directory}/runs"]
        self.experiment = load_tree(CONFIG, sets, Experiment)
        self.plan = make_plan(self.experiment, CONFIG.parent, "optimal", Sources()).plan
        self.run = rundir.create(self.experiment, CONFIG.parent, followed=self.plan)
        with EventLog(self.run.path / EVENTS_FILE) as log:
            for region in self.plan.regions:
                took_s = slower * region.step_s
                fields = {"region": region.region, "step": 5000, "samples": 8, "loss": 1.0}
                times = {"compute_s": took_s, "wait_s": 0.0, "start_s": 9.0 - took_s}
                log.write("step", 9.0, **fields, **times)

    def plan_for(
        self,
        members: Collection[str],
        leader: str,
        interval: int | None = None,
        standby: str | None = None,
    ) -> MembersPlan:
        return plan_of_members(self.run, self.experiment, members, leader, interval, standby)


class Loop:
    """Notes what is asked of a run loop."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.told: list[str] = []
        self.paced: list[int] = []
        self.moves = 0

    def emit(self, kind: str, **fields: Any) -> None:
        json.dumps(conform(kind, 0.0, fields).fields)
        self.events.append({"kind": kind, **fields})

    def show(self, text: str) -> None:
        self.told.append(text)

    def set_interval(self, interval: int) -> None:
        self.paced.append(interval)

    def move_averager(self) -> None:
        self.moves += 1


def watch_of(policy: ReplanPolicy, plan_for: PlanFor | None, loop: Loop) -> PlanWatch:
    return PlanWatch(policy, plan_for, cast(Any, loop))


@pytest.fixture(autouse=True)
def _no_prices_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("GEO_RAY_PRICES", raising=False)
    monkeypatch.chdir(tmp_path)


def test_the_best_plan_for_the_remaining_regions_is_reported(tmp_path: Path) -> None:
    run, loop = Run(tmp_path, slower=4.0), Loop()
    watch = watch_of(ReplanPolicy(60.0, 600.0), run.plan_for, loop)
    watch.tick(ALL, CurrentLeader("us"), 0.0)
    for now_s in range(1, 100):
        watch.tick(("eu", "asia"), CurrentLeader("eu"), float(now_s))
        if watch._open is not None:
            watch._open[1].exception()
    watch.close()
    assert not loop.moves
    event = loop.events.pop()
    assert [e["kind"] for e in loop.events] == ["interval_changed"] * len(loop.paced)
    assert event["kind"] == "replanned" and event["regions"] == ["asia", "eu"]
    assert event["changed"] and event["gain"] > 0.05 and event["averager"] in ("eu", "asia")
    line = loop.told.pop()
    assert "replanned for asia, eu" in line and "workers" in line and " rows a step" in line


def test_a_run_without_a_plan_is_left_alone(tmp_path: Path) -> None:
    loop = Loop()
    watch = watch_of(ReplanPolicy(0.0, 0.0), None, loop)
    watch.tick(ALL, CurrentLeader("us"), 0.0)
    watch.tick(("us",), CurrentLeader("us"), 1.0)
    watch.leader_moved()
    watch.close()
    assert not loop.events and not loop.told and not loop.paced and not loop.moves


def test_the_plan_is_for_the_present_members(tmp_path: Path) -> None:
    run = Run(tmp_path)
    found = run.plan_for(("us", "eu"), "eu")
    present, decision = found.present, found.decision
    assert {each.region for each in present.regions} == {"us", "eu"}
    assert {each.region for each in decision.plan.regions} == {"us", "eu"}
    assert not decision.changed and "stays" in decision.reason
    with EventLog(run.run.path / EVENTS_FILE) as log:  # the others have gone on since
        for name, number in (("us", 10_000), ("eu", 10_000)):
            fields = {"region": name, "step": number, "samples": 8, "loss": 1.0}
            log.write("step", 99.0, **fields, compute_s=0.1, wait_s=0.0, start_s=98.9)
    later = run.plan_for(("us", "eu"), "eu").decision
    assert later.plan.from_step == 10_000 and decision.plan.from_step == 5000
    assert run.plan_for(ALL, run.plan.averager).present == run.plan
    with pytest.raises(PlanError, match="nothing for mars"):
        run.plan_for(("us", "mars"), "us")


def test_an_interval_that_is_far_from_the_best_is_changed_as_the_run_goes(tmp_path: Path) -> None:
    """With the machines as they are; the next question begins with the new one."""
    run, loop = Run(tmp_path), Loop()
    assert can_follow(run.experiment)
    rare = run.plan_for(ALL, run.plan.averager, 1)
    assert rare.as_it_goes is not None and rare.as_it_goes.changed and rare.as_it_goes.gain > 0.05
    best = rare.as_it_goes.plan.interval
    assert best > 1
    assert [r.workers for r in rare.as_it_goes.plan.regions] == [
        r.workers for r in run.plan.regions
    ]
    again = run.plan_for(ALL, run.plan.averager, best)
    assert again.as_it_goes is not None and not again.as_it_goes.changed

    def plan_for(
        members: Collection[str], leader: str, interval: int | None, standby: str | None
    ) -> MembersPlan:
        return run.plan_for(members, leader, interval or 1)

    watch = watch_of(ReplanPolicy(0.0, 5.0), plan_for, loop)
    for now_s in range(40):
        watch.tick(ALL if now_s < 10 else ("us", "eu"), CurrentLeader("us"), float(now_s))
        if watch._open is not None:
            watch._open[1].exception()
    watch.leader_moved()  # the new one may not have heard it
    watch.close()
    assert len(loop.paced) == 2 and loop.paced[0] == loop.paced[1] > 1 and not loop.moves
    assert [e["kind"] for e in loop.events].count("interval_changed") == 1
    line = f"changing the interval from 1 to {loop.paced[0]}"
    assert any(line in told for told in loop.told)


def test_settings_that_cannot_change_are_only_reported(tmp_path: Path) -> None:
    run = Run(tmp_path)
    fixed = run.experiment.members.model_copy(update={"follow_plan": False})
    assert not can_follow(run.experiment.model_copy(update={"members": fixed}))


def test_a_run_resumed_with_an_interval_is_replanned_for_its_members(
    tmp_path: Path,
) -> None:
    """It was best for those who were there then; the question begins with it."""
    run, asked = Run(tmp_path), list[tuple[tuple[str, ...], int | None]]()

    def plan_for(
        members: Collection[str], leader: str, interval: int | None, standby: str | None
    ) -> MembersPlan:
        asked.append((tuple(members), interval))
        return run.plan_for(members, leader, interval)

    watch = watch_of(ReplanPolicy(60.0, 600.0), plan_for, Loop())
    for now_s in range(200):
        watch.tick(ALL, CurrentLeader("us"), float(now_s), None if now_s < 3 else 512)
        if watch._open is not None:
            watch._open[1].exception()
    watch.close()
    assert asked == [(ALL, 512)]


def test_an_answer_for_former_members_is_dropped(tmp_path: Path) -> None:
    """A region came back, or the averager moved, while the run was planned; it is planned again."""
    loop, asked = Loop(), list[tuple[tuple[str, ...], str]]()
    may_answer = threading.Event()
    planned = Run(tmp_path).plan_for(("us", "eu"), "us", 1)

    def plan_for(
        members: Collection[str], leader: str, interval: int | None, standby: str | None
    ) -> MembersPlan:
        asked.append((tuple(members), leader))
        assert may_answer.wait(60.0)
        return planned

    policy = ReplanPolicy(0.0, 5.0)
    watch = watch_of(policy, plan_for, loop)
    us, eu = CurrentLeader("us"), CurrentLeader("eu")
    looks = [(ALL, us), (("us", "eu"), us), (ALL, us)]  # back before there was an answer
    looks += [(("us", "eu"), us)] * 4 + [(("us", "eu"), eu)] * 12
    for now_s, (members, leader) in enumerate(looks):
        may_answer.clear()
        watch.tick(members, leader, float(now_s))
        may_answer.set()
        if watch._open is not None:
            watch._open[1].result()
    watch.close()
    assert asked == [(("eu", "us"), "us"), (("eu", "us"), "us"), (("eu", "us"), "eu")]
    assert len(loop.paced) == 1 and not loop.moves


def test_the_averager_moves_to_its_standby_where_that_is_better(tmp_path: Path) -> None:
    run, loop = Run(tmp_path), Loop()
    free = free_of(run.experiment, "eu")
    assert free.averagers == ("eu",) and not free_of(run.experiment, None).averagers
    behind = run.experiment.averager.model_copy(update={"max_divergence": 1.0})
    assert not free_of(run.experiment.model_copy(update={"averager": behind}), "eu").averagers
    alone = run.plan_for(ALL, "asia", 1).as_it_goes
    assert alone is not None and alone.plan.averager == "asia"

    def plan_for(
        members: Collection[str], leader: str, interval: int | None, standby: str | None
    ) -> MembersPlan:
        return run.plan_for(members, leader, 1, standby)

    watch = watch_of(ReplanPolicy(0.0, 5.0), plan_for, loop)
    for now_s in range(40):
        watch.tick(("us", "asia") if now_s else ALL, CurrentLeader("asia", "us"), float(now_s))
        if watch._open is not None:
            watch._open[1].exception()
    watch.close()
    (sent,) = [event for event in loop.events if event["kind"] == "averager_moves"]
    assert loop.moves == 1 and (sent["before"], sent["averager"]) == ("asia", "us")
    assert any("moving the averager from asia to us" in line for line in loop.told)
