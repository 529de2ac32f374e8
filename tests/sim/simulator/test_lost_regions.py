"""Regions are lost in the middle of simulated runs; the others go on, and end equal."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from geo_ray.base.errors import InvariantError, RegionLostError
from geo_ray.experiment.experiment import Experiment
from geo_ray.runs.resume import without_lost
from geo_ray.simulator.world import SimCheckpoint
from geo_ray.strategies.registry import STRATEGIES
from tests.support.world_support import Run, experiment, of_kind

KINDS = sorted(STRATEGIES)
STEPS = 14
REGIONS = ("a", "b", "c", "d")
UNEVEN: dict[str, Any] = {
    "regions": [{"name": name} for name in REGIONS],
    "train": {"steps": STEPS, "eval_every": 0},
    "emulate": {
        "step_s_by_region": {"a": 0.1, "b": 0.3, "c": 0.8, "d": 0.2},
        "link": {"rate_mbps": 20, "delay_s": 0.04},
    },
    "checkpoint": {"every_s": None},
    "members": {"min": 2},
}


def sections_of(kind: str) -> dict[str, Any]:
    found = of_kind(kind) | UNEVEN
    if kind == "fedavg":
        found["strategy"] = found["strategy"] | {"fraction": 0.4}
    return found


def check_members_ended(run: Run, members: set[str]) -> None:
    """Everybody who is there did all its work, and holds the same model."""
    world, kind = run.world, run.config.strategy.kind
    assert run.result is not None and set(run.result.params_P) == members
    view = world.averager.view
    assert set(view.members) == members and not view.joining
    ends = list(run.result.params_P.values())
    traits = STRATEGIES[kind]().traits
    exact = traits.in_rounds or traits.sends == "model"
    for other_P in ends:
        assert torch.isfinite(other_P).all()
        assert torch.allclose(ends[0], other_P, rtol=0, atol=0.0 if exact else 1e-4)
    for region in world.regions.values():
        region.server.work.ledger.check()
    if run.config.counts_total_rows:
        assert world.averager.samples >= run.config.rows
    else:
        assert all(region.server.version >= STEPS for region in world.regions.values())


def check_ended(run: Run, lost: list[str]) -> None:
    """The others did all their work, without those that were lost."""
    check_members_ended(run, set(REGIONS) - set(lost))
    assert run.world.averager.view.generation == 1 + len(lost)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", KINDS)
def test_the_others_go_on_without_regions_that_are_lost(data_dir, kind: str, seed: int) -> None:
    """Whenever that is, noticed at once or late, one after the other, with a checkpoint open."""
    config = experiment(**sections_of(kind))
    whole_s = Run(config, data_dir).go().result.seconds
    draw = Random(f"{kind}/{seed}")
    run, lost = Run(config, data_dir), draw.sample(REGIONS[1:], draw.choice((1, 2)))
    at_s = {name: draw.uniform(0.0, 0.95) * whole_s for name in lost}
    for name, when_s in at_s.items():
        run.world.lose_at(when_s, name, noticed_s=draw.choice((0.0, 0.05, 0.5)))
    run.world.checkpoint_at(draw.uniform(0.0, 0.95) * whole_s, 1)
    run.go()
    found = [e["region"] for e in run.of("region_lost")]
    assert set(found) <= set(lost)
    for name in set(lost) - set(found):  # the run was over before
        assert run.result.seconds <= at_s[name] + 0.5
    if set(found) == set(lost):
        check_ended(run, found)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_lost_a_region_is_saved_and_goes_on_without_it(data_dir, kind: str) -> None:
    killed = Run(experiment(**sections_of(kind)), data_dir)
    killed.world.lose_at(0.3, "c")
    killed.world.checkpoint_at(0.7, 1)
    killed.go()
    cut = killed.world.checkpoints[1]
    assert sorted(cut.regions) == ["a", "b", "d"]
    resumed = resumed_without(killed.config, data_dir, cut)
    assert resumed.world.averager.view.generation == 2
    check_ended(resumed, ["c"])


def resumed_without(config: Experiment, data_dir: Path, cut: SimCheckpoint) -> Run:
    parts = {f"{region}-ps0" for region in cut.regions}
    left, _ = without_lost(config, parts)
    run = Run(left, data_dir)
    run.world.restore(cut)
    return run.go()


@pytest.mark.parametrize("kind", ["asgd", "diloco", "halos"])
def test_rows_that_are_counted_together_are_no_fewer_after_a_resume(data_dir, kind: str) -> None:
    train = {"steps": STEPS, "eval_every": 0, "count": "total"}
    killed = Run(experiment(**sections_of(kind) | {"train": train}), data_dir)
    killed.world.lose_at(0.3, "c")
    killed.world.checkpoint_at(1.2, 1)
    killed.go()
    resumed = resumed_without(killed.config, data_dir, killed.world.checkpoints[1])
    assert resumed.config.rows == killed.config.rows
    assert resumed.world.averager.samples >= killed.config.rows


@pytest.mark.parametrize("kind", ["diloco", "halos", "sma", "nbsync"])
def test_a_run_that_only_one_region_is_left_of_goes_on_as_it_would_have(data_dir, kind) -> None:
    two = {
        "regions": [{"name": "a"}, {"name": "c"}],
        "emulate": UNEVEN["emulate"] | {"step_s_by_region": {"a": 0.1, "c": 0.8}},
        "members": {"min": 1},
    }
    killed = Run(experiment(**sections_of(kind) | two), data_dir)
    killed.world.lose_at(0.3, "c")
    killed.world.checkpoint_at(0.75, 1)
    killed.go()
    resumed = resumed_without(killed.config, data_dir, killed.world.checkpoints[1])
    assert killed.result is not None and resumed.result is not None
    assert torch.equal(killed.result.params_P["a"], resumed.result.params_P["a"])


def test_checkpoints_go_on_after_a_loss(data_dir) -> None:
    run = Run(experiment(**sections_of("sma") | {"checkpoint": {"every_s": 0.5}}), data_dir)
    run.world.lose_at(3.0, "c")
    run.go()
    (lost,) = run.of("region_lost")
    times_s = [event.t_s for event in run.of("checkpoint")]
    assert sum(at_s > lost.t_s for at_s in times_s) >= 2
    assert max(b - a for a, b in pairwise(times_s)) < 3.0  # c reports two steps of 0.8 s together


def test_the_loss_of_a_region_costs_what_its_data_were_worth(data_dir) -> None:
    """Three of four regions with like data learn nearly as much as all of them."""
    config = experiment(
        **UNEVEN
        | {"train": {"steps": 60, "eval_every": 0}, "optimizer": {"kind": "sgd", "lr": 0.3}}
    )
    whole, lost = Run(config, data_dir).go(), Run(config, data_dir)
    lost.world.lose_at(0.3 * whole.result.seconds, "c")
    lost.go()
    (all_of_it,) = [e for e in whole.of("eval") if e["final"] and e["region"] is None]
    (rest,) = [e for e in lost.of("eval") if e["final"] and e["region"] is None]
    assert all_of_it["metrics"]["loss"] < 0.9 * math.log(10)
    assert rest["metrics"]["loss"] < 1.15 * all_of_it["metrics"]["loss"]


def test_what_a_lost_region_says_is_refused_by_name(data_dir) -> None:
    run = Run(experiment(**sections_of("asgd")), data_dir)
    run.world.averager.leave("b")
    with pytest.raises(RegionLostError, match=r"'b' is no longer a member.*view 2"):
        run.world.averager.on_skip("b", 1, 1)
    with pytest.raises(InvariantError, match="'x' is no member"):
        run.world.averager.on_skip("x", 1, 1)


def test_the_averagers_own_region_cannot_be_lost_here(data_dir) -> None:
    with pytest.raises(InvariantError, match="has no standby"):
        Run(experiment(**sections_of("sma")), data_dir).world.lose_at(1.0, "a")
