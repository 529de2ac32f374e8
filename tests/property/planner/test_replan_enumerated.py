"""Replans of random small runs with age tiers, against exhaustive enumeration."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import geo_ray
from geo_ray.api.config import source_of
from geo_ray.api.plan import PlanInputs
from geo_ray.base.errors import PlanInfeasibleError
from geo_ray.base.load import load_tree
from geo_ray.experiment.experiment import Experiment
from geo_ray.planner.plan import Plan
from geo_ray.runs.planning import Sources
from geo_ray.runs.replanning import State, replanned
from tests.support.plan_enumerator import Enumerated, Question, Running, every_plan, going_on
from tests.support.plan_scenarios import RATES, limits_of, links_file, scenario

PARTS, SCENARIOS = 8, 25
FIRST = 1  # the other parts are more of the same


def rented_since(rng: random.Random, plan: Plan, run_h: float) -> Plan:
    """The plan after an earlier replan: some machines were launched later."""
    regions = []
    for region in plan.regions:
        machines = []
        for each in region.machines:
            later = rng.randint(0, each.count) if rng.random() < 0.5 else 0
            since_h = rng.choice([run_h, rng.uniform(0, run_h)])
            parts = [(each.count - later, 0.0), (later, since_h)]
            machines += [
                each.model_copy(update={"count": n, "since_h": at_h}) for n, at_h in parts if n
            ]
        since_h = rng.choice([0.0, rng.uniform(0, run_h)])
        update = {"machines": tuple(machines), "server_since_h": since_h}
        regions.append(region.model_copy(update=update))
    return plan.model_copy(update={"regions": tuple(regions)})


def running_of(plan: Plan, state: State) -> Running:
    """State of a run that follows a plan."""
    machines: dict[tuple[str, str, str], list[float]] = {}
    faster, servers = {}, {}
    for region in plan.regions:
        m, step_s, fixed_s = state.step_s[region.region], region.step_s, region.fixed_s
        for each in region.machines:
            ages_h = machines.setdefault((region.region, each.type, each.market), [])
            ages_h += [max(0.0, state.run_h - each.since_h)] * each.count
            quicker = (step_s - fixed_s) / (m - fixed_s) if m > fixed_s else step_s / m
            faster[region.region, each.type] = quicker
        if region.server is not None:
            age_h = max(0.0, state.run_h - region.server_since_h)
            servers[region.region] = region.server, age_h
    return Running(plan.steps - state.steps, machines, faster, servers, plan.codec)


@pytest.mark.parametrize(
    "part",
    [part if part < FIRST else pytest.param(part, marks=pytest.mark.slow) for part in range(PARTS)],
)
def test_what_is_decided_is_what_all_plans_say(part: int, tmp_path: Path) -> None:
    rng = random.Random(1000 + part)
    seen = dict.fromkeys(("changed", "stays", "infeasible", "kept", "over"), 0)
    for number in range(SCENARIOS):
        config, question = scenario(rng, tiers=True)
        where = f"part {part}, scenario {number}"
        prices, links = tmp_path / "prices.json", links_file(question, tmp_path / "links.json")
        prices.write_text(json.dumps({"records": question.prices, "rates": RATES}))
        inputs = PlanInputs(prices=[prices], links=links)
        policy = rng.choice(["optimal", "cloudless", "everything"])
        try:
            present = geo_ray.plan(config, policy=policy, inputs=inputs).plan
        except PlanInfeasibleError:
            continue
        run_h = rng.choice([0.0, rng.uniform(0.0, 8.0)])
        present = rented_since(rng, present, run_h)
        for_rest = {"steps": rng.randint(1, int(present.steps) - 1), "run_h": run_h}
        step_s = {r.region: r.step_s * rng.choice([1, 1, 0.4, 3]) for r in present.regions}
        state = State(step_s=step_s, **for_rest)
        for region in config["plan"]["regions"].values():  # quota and stock are as they are now
            for machine in region["machines"]:
                machine["cap"] = rng.choice([machine["cap"]] * 3 + [0])
        assert present.model is not None
        question = replace(
            question, num_params=present.model.num_params, running=running_of(present, state)
        )
        on = going_on(question, present.averager, present.interval)
        plans = list(every_plan(question))
        limits = limits_of(rng, [*plans, on])
        config["plan"] |= limits
        hold(config, question, (present, state, on, plans), Sources([prices], links), seen, where)
    assert min(seen.values()) > 0, seen


def hold(
    config: dict[str, Any],
    question: Question,
    run: tuple[Plan, State, Enumerated, list[Enumerated]],
    sources: Sources,
    seen: dict[str, int],
    where: str,
) -> None:
    """Compare the decision with all plans."""
    present, state, on, plans = run
    experiment = load_tree(source_of(config, None), [], Experiment)
    deadline_s = config["plan"].get("deadline_h", math.inf) * 3600
    budget_usd = config["plan"].get("budget_usd", math.inf)
    allowed = [p for p in plans if p.seconds <= deadline_s and p.usd <= budget_usd]
    is_money = config["plan"]["objective"] == "cost"
    on_is_allowed = on.seconds <= deadline_s and on.usd <= budget_usd

    def decide() -> Any:
        return replanned(experiment, Path(), present, state, Path("none"), sources)

    if not allowed and not on_is_allowed:
        seen["infeasible"] += 1
        with pytest.raises(PlanInfeasibleError):
            decide()
        return
    decision = decide()
    worth = min((p.usd if is_money else p.seconds for p in allowed), default=math.inf)
    stays = on.usd if is_money else on.seconds
    ours = decision.plan.total_usd if is_money else decision.plan.total_s
    slack = 1.01e-4
    seen["over"] += not on_is_allowed
    seen["changed" if decision.changed else "stays"] += 1
    if not decision.changed:
        assert on_is_allowed and worth >= 0.95 * stays * (1 - slack), where
        assert math.isclose(decision.plan.total_s, on.seconds, rel_tol=1e-9), where
        assert math.isclose(decision.plan.total_usd, on.usd, rel_tol=1e-9), where
        return
    assert not on_is_allowed or worth <= 0.95 * stays * (1 + 1e-9), where
    assert worth * (1 - 1e-9) <= ours <= worth * (1 + slack), where
    assert ours * (1 - decision.plan.gap) <= worth * (1 + 1e-9), f"{where}: the gap is not true"
    alike = [p for p in plans if math.isclose(p.seconds, decision.plan.total_s, rel_tol=1e-9)]
    made = decision.plan
    assert any(math.isclose(p.usd, made.total_usd, rel_tol=1e-9) for p in alike), where
    # What is written says how old machines will be when it is asked again.
    kept = [m for region in made.regions for m in region.machines if m.since_h < state.run_h]
    seen["kept"] += bool(kept)
    priced = {
        (region.region, m.type, m.market, m.since_h): m.usd_per_h
        for region in made.regions
        for m in region.machines
    }
    hours = made.total_s / 3600
    for (name, type_, market, since_h), usd_per_h in priced.items():
        place = config["plan"]["regions"][name]
        record = question.price(place, item="instance", type=type_, market=market)
        usd = question.usd_of_hours(record, max(0.0, state.run_h - since_h), hours)
        assert math.isclose(usd_per_h, usd / hours, rel_tol=1e-9), where
