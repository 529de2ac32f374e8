"""The interval between exchanges changes in the middle of simulated runs."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from test_lost_regions import check_members_ended, sections_of

from geo_ray.experiment.experiment import Experiment
from geo_ray.strategies.registry import STRATEGIES
from geo_ray.training.averager import interval_of
from geo_ray.training.command_log import ChangeInterval, execute
from tests.support.world_support import Run, experiment

REGIONS = ("a", "b", "c", "d")
STEPS, FIRST, THEN = 48, 2, 6


def config_of(kind: str, absent: tuple[str, ...] = (), **more: Any) -> Experiment:
    sections = sections_of(kind)
    options: dict[str, Any] = {"interval": FIRST}
    if "by_speed" in STRATEGIES[kind].model_fields:
        options["by_speed"] = False
    sections["strategy"] = sections["strategy"] | options
    train = {"steps": STEPS, "eval_every": 0}
    return experiment(**sections | {"train": train, "members": {"min": 1, "absent": absent}} | more)


KINDS = [
    "ama",
    "asgd_ga",
    "async_local_sgd",
    "dc_asgd",
    "diloco",
    "fedasync",
    "fedat",
    "fedavg",
    "fedgsync",
    "gaia",
    "halos",
    "muloco",
    "sma",
    "sparseloco",
]


def pace_at(run: Run, when_s: float, steps: int) -> None:
    world = run.world
    world._scheduler.at(when_s, lambda: execute(world.averager, ChangeInterval(steps)))


def spacings(run: Run, region: str, from_s: float) -> list[int]:
    """Steps between a region's updates from some time on, without the final update."""
    begun_s = [e["start_s"] for e in run.of("exchange") if e["region"] == region]
    steps_s = [e.t_s for e in run.of("step") if e["region"] == region]
    marks = [sum(step_s <= at_s + 1e-9 for step_s in steps_s) for at_s in begun_s if at_s >= from_s]
    return [b - a for a, b in pairwise(marks)][:-1]


def test_all_that_can_be_paced_are_here() -> None:
    found = []
    for kind in sorted(STRATEGIES):
        options = {"by_speed": False} if "by_speed" in STRATEGIES[kind].model_fields else {}
        if STRATEGIES[kind].model_validate(options).traits.exchange.adjustable_interval:
            found.append(kind)
    assert found == KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_regions_exchange_as_often_as_they_are_told_from_then_on(data_dir: Path, kind: str) -> None:
    quiet = Run(config_of(kind), data_dir).go()
    assert quiet.result is not None
    run = Run(config_of(kind), data_dir)
    pace_at(run, 0.05 * quiet.result.seconds, THEN)
    run.go()
    check_members_ended(run, set(run.config.region_names))
    told_s = 0.15 * quiet.result.seconds
    found = [spacings(run, region, told_s) for region in run.config.region_names]
    assert sum(map(bool, found)) >= 3  # who is fast is done sooner
    assert min(min(each) for each in found if each) >= THEN
    assert len(run.of("exchange")) < len(quiet.of("exchange"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_joining_region_and_a_resumed_run_have_it(data_dir: Path, kind: str) -> None:
    config = config_of(kind, absent=("d",))
    quiet = Run(config, data_dir).go()
    assert quiet.result is not None
    whole_s = quiet.result.seconds
    run = Run(config, data_dir)
    pace_at(run, 0.1 * whole_s, THEN)
    run.world.change_at(0.3 * whole_s, joins=["d"])
    run.world.checkpoint_at(0.6 * whole_s, 1)
    run.go()
    check_members_ended(run, set(REGIONS))
    assert interval_of(run.world.averager.state) == THEN
    saved = run.world.checkpoints.get(1)
    if saved is None or not saved.is_whole:
        pytest.skip("the checkpoint met the barrier")
    resumed = Run(config_of(kind), data_dir)
    resumed.world.restore(saved)
    resumed.go()
    check_members_ended(resumed, set(REGIONS))
    assert interval_of(resumed.world.averager.state) == THEN
    found = spacings(resumed, "a", 0.0)
    assert min(found, default=THEN) >= THEN


@pytest.mark.parametrize("interval", [FIRST, 3])
def test_who_resumes_with_another_interval_means_it(data_dir: Path, interval: int) -> None:
    config = config_of("diloco")
    run = Run(config, data_dir)
    pace_at(run, 0.1, THEN)
    run.world.checkpoint_at(0.4 * seconds_of(config, data_dir), 1)
    run.go()
    changed = config.strategy.model_copy(update={"interval": interval})
    resumed = Run(config.model_copy(update={"strategy": changed}), data_dir)
    resumed.world.restore(run.world.checkpoints[1])
    assert interval_of(resumed.world.averager.state) == (THEN if interval == FIRST else None)
    resumed.go()
    check_members_ended(resumed, set(REGIONS))


def seconds_of(config: Experiment, data_dir: Path) -> float:
    result = Run(config, data_dir).go().result
    assert result is not None
    return result.seconds
