"""Regions join, leave and come back in the middle of simulated runs."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from test_lost_regions import check_members_ended, sections_of

from geo_ray.experiment.experiment import Experiment
from geo_ray.strategies.registry import STRATEGIES
from tests.support.world_support import Run, experiment

KINDS = sorted(STRATEGIES)
REGIONS = ("a", "b", "c", "d")
STEPS = 30


def config_of(kind: str, absent: tuple[str, ...] = ("d",), **more: Any) -> Experiment:
    train = {"steps": STEPS, "eval_every": 0}
    members = {"min": 2, "absent": absent}
    return experiment(**sections_of(kind) | {"members": members, "train": train} | more)


def seconds_of(config: Experiment, data_dir: Path) -> float:
    result = Run(config, data_dir).go().result
    assert result is not None
    return result.seconds


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", KINDS)
def test_a_region_joins_at_any_time(data_dir: Path, kind: str, seed: int) -> None:
    config = config_of(kind)
    whole_s = seconds_of(config, data_dir)
    draw = Random(f"{kind}/{seed}")
    run = Run(config, data_dir)
    run.world.change_at(draw.uniform(0.0, 0.5) * whole_s, joins=["d"])
    run.go()
    (joined,) = run.of("region_joined")
    check_members_ended(run, set(REGIONS))
    handed_s = joined.t_s - joined["took_s"]
    donor = [e for e in run.of("exchange") if e["region"] != "d" and e.t_s <= handed_s]
    assert joined["round"] == max((e["round"] for e in donor), default=0)
    steps = [e["step"] for e in run.of("step") if e["region"] != "d" and e.t_s <= handed_s]
    assert 0 <= joined["step"] <= max(steps, default=0)
    assert joined["view"] == 2 and joined["bytes"] >= 4 * run.world.regions["a"].params_P.numel()
    assert run.world.regions["d"].server.work.ledger.applied > 0


@pytest.mark.parametrize("kind", KINDS)
def test_two_enter_at_one_barrier_and_one_of_them_may_be_lost_there(
    data_dir: Path, kind: str
) -> None:
    config = config_of(kind, absent=("c", "d"))
    whole_s = seconds_of(config, data_dir)
    draw = Random(f"{kind}/together")
    run, at_s = Run(config, data_dir), draw.uniform(0.0, 0.4) * whole_s
    run.world.change_at(at_s, joins=["c", "d"])
    if draw.random() < 0.5:
        run.world.lose_at(at_s + draw.uniform(0.0, 0.3) * whole_s, "d", noticed_s=0.1)
    run.go()
    joined, lost = run.of("region_joined"), {e["region"] for e in run.of("region_lost")}
    assert {e["view"] for e in joined} <= {2, 3}, "one barrier for both"
    check_members_ended(run, {"a", "b", "c"} | ({"d"} - lost))


@pytest.mark.parametrize("kind", KINDS)
def test_a_region_leaves_loses_nothing_and_comes_back(data_dir: Path, kind: str) -> None:
    config = config_of(kind, absent=())
    whole_s = seconds_of(config, data_dir)
    draw = Random(kind)
    run = Run(config, data_dir)
    run.world.change_at(draw.uniform(0.0, 0.2) * whole_s, leaves=["b"])
    run.world.change_at(draw.uniform(0.45, 0.6) * whole_s, joins=["b"])
    run.go()
    (left,), (joined,) = run.of("region_drained"), run.of("region_joined")
    assert left["region"] == joined["region"] == "b" and left.t_s < joined.t_s
    check_members_ended(run, set(REGIONS))
    ledger = run.world.regions["b"].server.work.ledger  # no row twice, none left out
    assert ledger.applied == ledger.cursor and not ledger.discarded
    assert run.world.averager.view.generation == 3


@pytest.mark.parametrize("kind", KINDS)
def test_members_change_while_checkpoints_are_made_and_others_are_lost(
    data_dir: Path, kind: str
) -> None:
    """A joining region dies, a region is lost while another joins, and checkpoints are taken."""
    config = config_of(kind, checkpoint={"every_s": 0.4})
    whole_s = seconds_of(config, data_dir)
    draw = Random(f"{kind}/trouble")
    run = Run(config, data_dir)
    at_s = draw.uniform(0.0, 0.3) * whole_s
    run.world.change_at(at_s, joins=["d"])
    run.world.lose_at(at_s + draw.uniform(0.0, 0.1) * whole_s, "d")
    run.world.change_at(at_s + 0.15 * whole_s, joins=["d"])
    run.world.lose_at(at_s + draw.uniform(0.1, 0.3) * whole_s, "b", noticed_s=0.3)
    run.go()
    lost = {event["region"] for event in run.of("region_lost")}
    there = {"a", "c"} | ({"b"} - lost) | {n for n in "d" if n in run.world.averager.view.members}
    check_members_ended(run, there)
    assert run.of("checkpoint")


@pytest.mark.parametrize(
    "kind", ["sma", "muloco", "asgd_ga", "diloco_streaming", "cocodc", "fedat", "halos"]
)
def test_a_run_with_a_joining_region_is_saved_and_goes_on(data_dir: Path, kind: str) -> None:
    config = config_of(kind)
    whole_s = seconds_of(config, data_dir)
    killed = Run(config, data_dir)
    killed.world.change_at(0.1 * whole_s, joins=["d"])
    killed.world.checkpoint_at(0.7 * whole_s, 1)
    killed.go()
    cut = killed.world.checkpoints[1]
    assert sorted(cut.regions) == list(REGIONS)
    resumed = Run(config_of(kind, absent=()), data_dir)
    resumed.world.restore(cut)
    resumed.go()
    check_members_ended(resumed, set(REGIONS))
    assert resumed.world.averager.view.generation == 2
    assert killed.result is not None and resumed.result is not None
    if STRATEGIES[kind]().traits.in_rounds:  # others go by the times of a new beginning
        both = killed.result.params_P["d"], resumed.result.params_P["d"]
        assert torch.equal(*both)


@pytest.mark.parametrize(
    "codec", [{"up": {"kind": "topk", "ratio": 0.1}}, {"down": {"kind": "int8"}}]
)
@pytest.mark.parametrize("kind", ["sma", "diloco", "asgd_ga", "bsp"])
def test_joining_regions_owe_nothing_and_are_owed_nothing(
    data_dir: Path, kind: str, codec: dict[str, Any]
) -> None:
    config = config_of(kind, codec=codec)
    run = Run(config, data_dir)
    run.world.change_at(0.3 * seconds_of(config, data_dir), joins=["d"])
    check_members_ended(run.go(), set(REGIONS))


def test_a_region_that_had_it_from_the_start_learns_no_more(data_dir: Path) -> None:
    """Three of four from the start, and the fourth soon: nearly as good as all of them."""
    train = {"steps": 60, "eval_every": 0}
    more = {"train": train, "optimizer": {"kind": "sgd", "lr": 0.3}}
    whole = Run(config_of("sma", absent=(), **more), data_dir).go()
    late = Run(config_of("sma", **more), data_dir)
    late.world.change_at(0.2 * seconds_of(late.config, data_dir), joins=["d"])
    late.go()
    (best,) = [e for e in whole.of("eval") if e["final"] and e["region"] is None]
    (last,) = [e for e in late.of("eval") if e["final"] and e["region"] is None]
    assert last["samples"] == best["samples"]
    assert last["metrics"]["loss"] < 1.2 * best["metrics"]["loss"]
