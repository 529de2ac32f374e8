"""Plans of random small jobs against exhaustive enumeration."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

import geo_ray
from geo_ray.api.plan import PlanInputs, PlanResult
from geo_ray.base.errors import PlanInfeasibleError
from geo_ray.base.load import load_tree, text_of
from geo_ray.data.tasks.load import load_task
from geo_ray.experiment.experiment import Experiment
from geo_ray.runs.build import parameter_count
from geo_ray.runs.follow_plan import model_id
from geo_ray.runs.planning import subject_of
from tests.support.plan_enumerator import Question, every_plan, loss_of
from tests.support.plan_scenarios import RATES, limits_of, links_file, scenario, with_own_networks

PARTS, SCENARIOS = 8, 25


def measured_loss(rng: random.Random, config: dict[str, Any], path: Path) -> dict[str, Any]:
    """Write a possible loss measurement for the configuration; return it with its content."""
    experiment = load_tree(text_of(config, path.parent), (), Experiment)
    num_params = parameter_count(load_task(experiment.task, path.parent), experiment.seed)
    subject = subject_of(experiment, path.parent, model_id(experiment, path.parent, num_params))
    seeds = rng.choice([2, 3, 3, 5, 11])
    plain = [rng.uniform(1, 3) for _ in range(seeds)]
    slope, noise = rng.choice([0.001, 0.004, 0.012]), rng.choice([0.0, 0.0005, 0.003])

    def ended(base: list[Any], more: float) -> list[Any]:
        diverges = rng.random() < 0.08
        found = [b and b * (1 + more + rng.gauss(0, noise)) for b in base]
        return [None, *found[1:]] if diverges else found

    points = {
        (h, None): ended(plain, slope * math.log(h) * rng.uniform(0.5, 1.5))
        for h in rng.sample([1, 4, 8, 16, 64, 256], rng.randint(1, 4))
    }
    at = rng.choice([h for h, _ in points])
    for codec in rng.sample(["fp16", "int8", "int4", "chunked_topk"], rng.randint(0, 4)):
        points[at, codec] = ended(points[at, None], rng.uniform(-0.002, 0.01))
    file = {
        "version": 1,
        "subject": subject.model_dump(),
        "steps": 200,
        "seeds": list(range(seeds)),
        "plain": plain,
        "codecs_at": at,
        "points": [
            {"interval": h, "codec": c, "losses": found} for (h, c), found in points.items()
        ],
    }
    path.write_text(json.dumps(file))
    return file


CASES = [
    pytest.param("equal", 0, SCENARIOS),
    pytest.param("own", 1, 6),
    *(pytest.param("equal", part, SCENARIOS, marks=pytest.mark.slow) for part in range(1, PARTS)),
    *(pytest.param("own", part, SCENARIOS, marks=pytest.mark.slow) for part in range(PARTS)),
]


@pytest.mark.parametrize(("networks", "part", "scenarios"), CASES)
def test_no_plan_is_better_than_the_one_that_is_found(
    networks: str, part: int, scenarios: int, tmp_path: Path
) -> None:
    rng = random.Random(part)
    seen = {"tiers": 0, "infeasible": 0, "limited": 0, "never": 0, "measured": 0}
    for number in range(scenarios):
        tiers = rng.random() < 0.7
        config, question = scenario(rng, tiers)
        if networks == "own":
            with_own_networks(random.Random(f"networks {part} {number}"), config)
        prices, links = tmp_path / "prices.json", links_file(question, tmp_path / "links.json")
        prices.write_text(json.dumps({"records": question.prices, "rates": RATES}))
        inputs = PlanInputs(prices=[prices], links=links)
        own_rng = random.Random(f"loss {part} {number}")
        if own_rng.random() < 0.5:
            path = tmp_path / "loss.json"
            measured = measured_loss(own_rng, config, path)
            question = Question(**{**vars(question), "measured": measured})
            inputs = PlanInputs(prices=[prices], links=links, loss=path)
        try:
            num_params = planned(config, inputs).plan.model.num_params
        except PlanInfeasibleError as error:
            why = (
                "no available machines",
                "loss_budget",
                "no machine with enough memory",
                "have memory for",
            )
            assert any(words in str(error) for words in why), error
            continue
        seen["measured"] += question.measured is not None
        question = Question(**{**vars(question), "num_params": num_params})
        plans = list(every_plan(question))
        limits = limits_of(rng, plans)
        deadline_s = limits.get("deadline_h", math.inf) * 3600
        budget_usd = limits.get("budget_usd", math.inf)
        config["plan"] |= limits
        allowed = [p for p in plans if p.seconds <= deadline_s and p.usd <= budget_usd]
        where = f"part {part}, scenario {number}: {limits}"
        seen["tiers"] += tiers
        seen["limited"] += bool(limits)
        if not allowed:
            seen["infeasible"] += 1
            with pytest.raises(PlanInfeasibleError):
                planned(config, inputs)
            continue
        made = planned(config, inputs)
        is_money = config["plan"]["objective"] == "cost"
        best = min(p.usd if is_money else p.seconds for p in allowed)
        ours = made.usd if is_money else made.seconds
        assert made.seconds <= deadline_s * (1 + 1e-8) and made.usd <= budget_usd * (1 + 1e-8)
        assert best * (1 - 1e-9) <= ours, where
        seen["never"] += question.blocking == "never"
        assert ours <= best * (1 + 1.01e-4), where
        assert made.plan.gap <= 1.01e-4, where
        assert ours * (1 - made.plan.gap) <= best * (1 + 1e-9), f"{where}: the gap is not true"
        alike = [p for p in plans if math.isclose(p.seconds, made.seconds, rel_tol=1e-9)]
        assert any(math.isclose(p.usd, made.usd, rel_tol=1e-9) for p in alike), where
        expected = loss_of(question, made.plan.interval, made.plan.codec)
        assert made.plan.loss.expected == pytest.approx(expected, rel=1e-9, abs=1e-12), where
        assert made.plan.loss.measured == (question.measured is not None)
    if scenarios == SCENARIOS and networks == "equal":
        assert min(seen.values()) > 0, seen


def planned(config: dict[str, Any], inputs: PlanInputs) -> PlanResult:
    return geo_ray.plan(config, inputs=inputs)
