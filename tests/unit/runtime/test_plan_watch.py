"""A run that follows a plan is planned anew for those who are left, with the planner itself."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from geo_ray.config.experiment import Experiment
from geo_ray.config.load import load_tree
from geo_ray.errors import PlanError
from geo_ray.job import rundir
from geo_ray.job.planning import Sources, make_plan
from geo_ray.job.plans.members import plan_of_members
from geo_ray.observe.events.log import EVENTS_FILE, EventLog
from geo_ray.observe.events.schema import conform
from geo_ray.planning.plan import Plan
from geo_ray.planning.replan import Decision
from geo_ray.runtime.control.membership.plan_watch import PlanWatch
from geo_ray.runtime.control.membership.replan_policy import ReplanPolicy

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

    def plan_for(self, members: Collection[str], home: str) -> tuple[Plan, Decision]:
        return plan_of_members(self.run, self.experiment, members, home)


@pytest.fixture(autouse=True)
def _no_prices_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("GEO_RAY_PRICES", raising=False)
    monkeypatch.chdir(tmp_path)


def test_it_is_told_what_is_best_for_those_who_are_left(tmp_path: Path) -> None:
    run, events, told = Run(tmp_path, slower=4.0), list[dict[str, Any]](), list[str]()

    def emit(kind: str, **fields: Any) -> None:
        json.dumps(conform(kind, 0.0, fields).fields)
        events.append({"kind": kind, **fields})

    watch = PlanWatch(ReplanPolicy(60.0, 600.0), run.plan_for, emit, told.append)
    watch.tick(ALL, "us", 0.0)
    for now_s in range(1, 100):
        watch.tick(("eu", "asia"), "eu", float(now_s))
        if watch._open is not None:
            watch._open[1].exception()
    watch.close()
    (event,) = events
    assert event["kind"] == "replanned" and event["regions"] == ["asia", "eu"]
    assert event["changed"] and event["gain"] > 0.05 and event["averager"] in ("eu", "asia")
    (line,) = told
    assert "planned anew for asia, eu" in line and "workers" in line


def test_a_run_without_a_plan_is_left_alone(tmp_path: Path) -> None:
    watch = PlanWatch(ReplanPolicy(0.0, 0.0), None, pytest.fail, pytest.fail)
    watch.tick(ALL, "us", 0.0)
    watch.tick(("us",), "us", 1.0)
    watch.close()


def test_the_question_is_for_those_who_take_part(tmp_path: Path) -> None:
    run = Run(tmp_path)
    present, decision = run.plan_for(("us", "eu"), "eu")
    assert {each.region for each in present.regions} == {"us", "eu"}
    assert {each.region for each in decision.plan.regions} == {"us", "eu"}
    assert not decision.changed and "stays" in decision.reason
    with EventLog(run.run.path / EVENTS_FILE) as log:  # the others have gone on since
        for name, number in (("us", 10_000), ("eu", 10_000)):
            fields = {"region": name, "step": number, "samples": 8, "loss": 1.0}
            log.write("step", 99.0, **fields, compute_s=0.1, wait_s=0.0, start_s=98.9)
    _, later = run.plan_for(("us", "eu"), "eu")
    assert later.plan.from_step == 10_000 and decision.plan.from_step == 5000
    everybody, _ = run.plan_for(ALL, run.plan.averager)
    assert everybody == run.plan
    with pytest.raises(PlanError, match="nothing for mars"):
        run.plan_for(("us", "mars"), "us")
