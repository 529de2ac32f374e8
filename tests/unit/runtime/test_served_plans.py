"""A served run of groups that follows a plan is replanned when its members change."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any, cast

import pytest

from geo_ray.base.errors import ConfigError, PlanError
from geo_ray.base.load import load_tree
from geo_ray.experiment.experiment import Experiment
from geo_ray.runs import directory as rundir
from geo_ray.runs.planning import Sources, make_plan
from geo_ray.runs.replanning import MembersPlan, plan_of_members, state_of
from geo_ray.runtime.replanning import ReplanPolicy
from geo_ray.runtime.serving import ServedPlans
from geo_ray.telemetry.event_log import EVENTS_FILE, EventLog, read_events
from geo_ray.telemetry.events import conform
from geo_ray.transport.emulation import LinkSpec
from geo_ray.transport.links import table_of

CONFIG = Path(__file__).parents[3] / "configs" / "planned_groups.yaml"
ALL = ("us", "eu", "asia")
ASIA = {
    "cloud": "aws",
    "at": "ap-south-1",
    "machines": [{"type": "p4d.24xlarge", "cap": 1, "rows_per_s": 40}],
}
GROUPS = [
    {"name": name, "group": {"nodes": nodes, "gpus_per_node": 8}}
    for name, nodes in (("us", 2), ("eu", 1), ("asia", 1))
]
DILOCO = {"kind": "diloco", "interval": 100}


class Run:
    """The directory of a run that has gone a quarter of its way, as fast as it was planned."""

    def __init__(
        self, folder: Path, strategy: dict[str, Any], mbps: float = 5.0, *more: str
    ) -> None:
        sets = [
            "task.options={size: 0.1M}",
            f"strategy={json.dumps(strategy)}",
            f"regions={json.dumps(GROUPS)}",
            f"plan.regions.asia={json.dumps(ASIA)}",
            "plan.codecs=[null]",
            f"run.dir={folder}/runs",
            *more,
        ]
        self.experiment = load_tree(CONFIG, sets, Experiment)
        pairs = [(a, b) for a in ALL for b in ALL if a != b]
        links = folder / "links.json"
        table = table_of(dict.fromkeys(pairs, LinkSpec(rate_mbps=mbps, delay_s=0.05)))
        links.write_text(table.model_dump_json(), encoding="utf-8")
        self.plan = make_plan(self.experiment, CONFIG.parent, "optimal", Sources(links=links)).plan
        self.run = rundir.create(self.experiment, CONFIG.parent, followed=self.plan)
        links.unlink()  # a run does not know it
        size = 4 * (self.plan.model.num_params if self.plan.model else 0)
        with EventLog(self.run.path / EVENTS_FILE) as log:
            for number in (1, 2):
                for region in self.plan.regions:
                    log.write(
                        "step",
                        float(number),
                        **step_of(
                            region.region, number * 2500, 2500, region.step_s, 16e-6 * size / mbps
                        ),
                    )
                    log.write("exchange", float(number), **exchange_of(region.region, size))

    def plan_for(
        self,
        members: Collection[str],
        leader: str = "us",
        interval: int | None = None,
        standby: str | None = None,
    ) -> MembersPlan:
        return plan_of_members(self.run, self.experiment, members, leader, interval, standby)


def step_of(region: str, step: int, steps: int, step_s: float, exchange_s: float) -> dict[str, Any]:
    """The fields of the event of an update with several steps."""
    return {
        "region": region,
        "step": step,
        "steps": steps,
        "samples": 8,
        "loss": 1.0,
        "compute_s": steps * step_s,
        "wait_s": 0.0,
        "start_s": 1.0,
        "exchange_s": exchange_s,
    }


def exchange_of(region: str, size: int) -> dict[str, Any]:
    return {
        "region": region,
        "seq": 1,
        "start_s": 0.0,
        "bytes_sent": size,
        "bytes_received": size,
        "blocking": True,
        "staleness": 0,
        "round": 1,
    }


class Averagers:
    """Notes what the processes of the averager are asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def ask(self, *call: Any) -> None:
        self.asked.append(call)


@pytest.fixture(autouse=True)
def _no_prices_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("GEO_RAY_PRICES", raising=False)
    monkeypatch.chdir(tmp_path)


def test_steps_and_exchanges_of_a_served_run(tmp_path: Path) -> None:
    """By hand: 1 MB in both directions within 0.5 s are 16 Mbit/s; an update of 4 steps of 2 s."""
    log_path = tmp_path / EVENTS_FILE
    with EventLog(log_path) as log:
        log.write("step", 9.0, **step_of("eu", 4, 4, 2.0, 0.0))
        log.write("exchange", 9.0, **exchange_of("eu", 500_000))
        log.write("step", 9.0, **step_of("eu", 8, 4, 2.0, 0.5))
        log.write("exchange", 9.0, **exchange_of("eu", 500_000))
        log.write("step", 4.0, **step_of("us", 7, 1, 3.0, 9.0))  # of an exchange of no known size
    state = state_of(read_events(log_path))
    assert state.steps == 7
    assert state.step_s == {"eu": pytest.approx(2.0), "us": pytest.approx(3.0)}
    assert state.exchange_mbps == {"eu": pytest.approx(16.0)}


def test_groups_get_the_best_interval_with_their_machines(tmp_path: Path) -> None:
    run = Run(tmp_path, DILOCO)
    rare = run.plan_for(ALL, interval=1)
    assert rare.as_it_goes is rare.decision and rare.decision.changed
    best = rare.decision.plan
    assert best.interval > 1 and best.machines_text == run.plan.machines_text
    again = run.plan_for(("us", "eu"), interval=best.interval)
    assert not again.decision.changed
    assert [region.region for region in again.decision.plan.regions] == ["us", "eu"]


def test_exchanges_are_predicted_as_they_were_measured(tmp_path: Path) -> None:
    """By hand: each of the remaining steps takes as long as one exchange in addition.

    The plan adds half a percent for work that is lost with spot machines.
    """
    run = Run(tmp_path, {**DILOCO, "interval": 1}, 0.5, "plan.intervals=[1]")
    assert run.plan.model is not None
    exchange_s = 2 * 4 * 8e-6 * run.plan.model.num_params / 0.5
    step_s = max(region.step_s for region in run.plan.regions)
    found = run.plan_for(ALL).decision.plan
    assert found.total_s == pytest.approx((20_000 - 5000) * (step_s + exchange_s), rel=1e-2)


@pytest.mark.parametrize("kind", ["diloco", "one_step_delay"])
def test_an_interval_that_cannot_change_is_only_reported(kind: str, tmp_path: Path) -> None:
    keeps = ["members.follow_plan=false"] if kind == "diloco" else []
    run = Run(tmp_path, {"kind": kind, "interval": 100}, 5.0, *keeps)
    found = run.plan_for(ALL, interval=1)
    assert found.as_it_goes is None
    assert found.decision.changed is (kind == "diloco")  # the other one hides its exchanges


def test_a_run_without_the_region_that_serves_it_is_not_planned(tmp_path: Path) -> None:
    run = Run(tmp_path, DILOCO)
    with pytest.raises(PlanError, match="region 'us', which serves the run, takes no part"):
        run.plan_for(("asia", "eu"))


class Loop:
    """The run loop of a served run, without its processes."""

    def __init__(self, run: Run, interval: int | None) -> None:
        self.averagers, self.told, self.interval = Averagers(), list[str](), interval
        self.plans = ServedPlans(
            run.experiment,
            cast(Any, self.averagers),
            run.plan_for,
            self.told.append,
            ReplanPolicy(0.0, 5.0),
        )
        self.events: list[dict[str, Any]] = []

    def poll(self, members: Collection[str], now_s: float) -> None:
        self.plans.tick({"members": list(members), "interval": self.interval}, now_s)
        if self.plans._watch._open is not None:
            self.plans._watch._open[1].exception()
        self.events += self.plans.news()


def test_the_coordinator_is_asked_for_the_interval_when_a_region_is_lost(tmp_path: Path) -> None:
    loop = Loop(Run(tmp_path, DILOCO), 1)
    for now_s in range(20):
        loop.poll(ALL if now_s < 10 else ("us", "eu"), float(now_s))
    (asked,) = set(loop.averagers.asked)
    assert asked[0] == "set_interval" and asked[1] > 1
    loop.averagers.asked.clear()
    loop.plans.server_replaced()  # its log may end before the change
    assert loop.averagers.asked == [asked]
    loop.plans.close()
    changed = [each for each in loop.events if each["kind"] == "interval_changed"]
    assert [(each["before"], each["interval"]) for each in changed][:1] == [(1, asked[1])]
    for each in loop.events:
        json.dumps(
            conform(each["kind"], 0.0, {k: v for k, v in each.items() if k != "kind"}).fields
        )
    assert {each["kind"] for each in loop.events} == {"interval_changed", "replanned"}
    assert any(f"changing the interval from 1 to {asked[1]}" in line for line in loop.told)


def test_a_plan_that_cannot_be_made_is_told_once(tmp_path: Path) -> None:
    loop = Loop(Run(tmp_path, DILOCO), None)
    for now_s in range(20):
        loop.poll(ALL if now_s < 2 else ("asia", "eu"), float(now_s))
    loop.plans.close()
    told = "not replanned for asia, eu: region 'us', which serves the run, takes no part"
    assert loop.told == [told] and not loop.averagers.asked and not loop.events


def test_a_run_without_a_plan_is_left_alone(tmp_path: Path) -> None:
    averagers, told = Averagers(), list[str]()
    experiment = load_tree(CONFIG, [], Experiment)
    policy = ReplanPolicy(0.0, 0.0)
    plans = ServedPlans(experiment, cast(Any, averagers), None, told.append, policy)
    for now_s, members in enumerate((ALL, ("us",), ("us",))):
        plans.tick({"members": members, "interval": 4}, float(now_s))
    plans.close()
    assert not told and not averagers.asked and not plans.news()


def test_plans_count_local_steps_and_averagers_count_exchanged_ones() -> None:
    """A worker of `halos` makes four local steps before each step that the averager counts."""
    averagers = Averagers()
    strategy = json.dumps({"kind": "halos", "local_steps": 4})
    experiment = load_tree(CONFIG, [f"strategy={strategy}", "plan=null"], Experiment)
    policy = ReplanPolicy(0.0, 0.0)
    plans = ServedPlans(experiment, cast(Any, averagers), None, lambda _: None, policy)
    plans.set_interval(12)
    plans.set_interval(3)
    plans.close()
    assert averagers.asked == [("set_interval", 3), ("set_interval", 1)]


def test_only_runs_of_groups_can_follow_a_plan() -> None:
    joined = [*GROUPS[:2], {"name": "asia", "join": True}]
    sets = [f"regions={json.dumps(joined)}"]
    with pytest.raises(
        ConfigError, match=r"plan .*: a region with `join: true` has machines and a"
    ):
        load_tree(CONFIG, sets, Experiment)
    groups = load_tree(CONFIG, ["members.follow_plan=false"], Experiment)
    assert not groups.members.follow_plan
    with pytest.raises(
        ConfigError, match=r"members\.follow_plan .*not supported where regions join"
    ):
        load_tree(CONFIG, [*sets, "plan=null", "members.follow_plan=false"], Experiment)
