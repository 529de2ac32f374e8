"""A run is resumed without regions that its checkpoint has: they have left at the cut."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from test_lost_regions import REGIONS, UNEVEN, check_members_ended, sections_of

from geo_ray.experiment.experiment import Experiment
from geo_ray.simulator.world import SimCheckpoint
from geo_ray.strategies.registry import STRATEGIES
from geo_ray.training.assignment import Ledger
from tests.support.world_support import Run, experiment

KINDS = sorted(STRATEGIES)
STILL = [
    kind
    for kind in KINDS
    if (traits := STRATEGIES[kind]().traits).in_rounds and traits.exchange.blocking == "always"
]
"""Those whose order of updates is no question of time."""
EVEN = {"step_s": 0.3, "link": {"rate_mbps": 20, "delay_s": 0.04}}
_seconds: dict[str, float] = {}


def seconds_of(kind: str, data_dir: Path) -> float:
    """Of a whole run."""
    if kind not in _seconds:
        result = Run(experiment(**sections_of(kind)), data_dir).go().result
        assert result is not None
        _seconds[kind] = result.seconds
    return _seconds[kind]


def cut_of(config: Experiment, data_dir: Path, when_s: float) -> SimCheckpoint:
    saved = Run(config, data_dir)
    saved.world.checkpoint_at(when_s, 1)
    saved.go()
    return saved.world.checkpoints[1]


def without(config: Experiment, absent: tuple[str, ...], **averager: Any) -> Experiment:
    members = config.members.model_copy(update={"absent": absent})
    changed = config.averager.model_copy(update=averager)
    return config.model_copy(update={"members": members, "averager": changed})


def resumed(config: Experiment, data_dir: Path, cut: SimCheckpoint) -> Run:
    run = Run(config, data_dir)
    run.world.restore(cut)
    return run


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", KINDS)
def test_the_others_go_on_from_any_cut(data_dir: Path, kind: str, seed: int) -> None:
    """One, two or three are away, the averager's own region among them where it moves."""
    config, whole_s = experiment(**sections_of(kind)), seconds_of(kind, data_dir)
    draw = Random(f"{kind}/{seed}")
    absent = tuple(sorted(draw.sample(REGIONS, draw.choice((1, 1, 2, 3)))))
    there = [name for name in REGIONS if name not in absent]
    leader = "a" if "a" in there else draw.choice(there)
    cut = cut_of(config, data_dir, draw.uniform(0.02, 0.95) * whole_s)
    run = resumed(without(config, absent, region=leader), data_dir, cut)
    view = run.world.averager.view
    assert (view.members, view.left, view.generation) == (tuple(there), absent, 2)
    run.go()
    check_members_ended(run, set(there))
    for name in there:
        before = Ledger.restore(cut.regions[name][0].control["ledger"])
        assert run.world.regions[name].server.work.ledger.applied >= before.applied
    if run.config.counts_total_rows:  # the goal stays that of all regions
        assert run.world.averager.samples >= config.rows


@pytest.mark.parametrize("kind", STILL)
def test_it_is_as_if_they_had_been_lost_at_the_cut(data_dir: Path, kind: str) -> None:
    config = experiment(**sections_of(kind))
    for part in (0.35, 0.85):
        when_s = part * seconds_of(kind, data_dir)
        cut = cut_of(config, data_dir, when_s)
        lost = Run(config, data_dir)
        lost.world.lose_at(when_s, "c")
        lost.go()
        run = resumed(without(config, ("c",)), data_dir, cut).go()
        assert lost.of("region_lost") and run.digests() == lost.digests(), part


@pytest.mark.parametrize("kind", KINDS)
def test_who_was_away_comes_back_and_reads_on_where_it_was(data_dir: Path, kind: str) -> None:
    sections = sections_of(kind) | {"train": {"steps": 40, "eval_every": 0}}
    config, whole_s = experiment(**sections), seconds_of(kind, data_dir)
    draw = Random(f"{kind}/back")
    cut = cut_of(config, data_dir, draw.uniform(0.1, 0.4) * whole_s)
    before = Ledger.restore(cut.regions["c"][0].control["ledger"])
    run = resumed(without(config, ("c",)), data_dir, cut)
    run.world.change_at(draw.uniform(0.0, 0.1) * whole_s, joins=["c"])
    run.go()
    (joined,) = run.of("region_joined")
    assert (joined["region"], joined["view"]) == ("c", 3)
    check_members_ended(run, set(REGIONS))
    ledger = run.world.regions["c"].server.work.ledger
    assert ledger.cursor >= before.cursor and ledger.applied >= before.applied
    assert ledger.applied == ledger.cursor and not ledger.discarded, "no row twice, none left out"


@pytest.mark.parametrize("kind", ["sma", "asgd_ga", "diloco_streaming", "cocodc", "fedat", "halos"])
def test_a_cut_in_which_it_had_left_or_joined(data_dir: Path, kind: str) -> None:
    """One has left before the cut, another has joined; the second is away at the resume."""
    sections = sections_of(kind) | {"members": {"min": 1, "absent": ["d"]}}
    sections |= {"train": {"steps": 30, "eval_every": 0}, "emulate": EVEN}
    config = experiment(**sections)
    whole = Run(config, data_dir).go()
    saved = Run(config, data_dir)
    saved.world.change_at(0.05 * whole.result.seconds, leaves=["b"])
    saved.world.change_at(0.45 * whole.result.seconds, joins=["d"])
    saved.world.checkpoint_at(0.85 * whole.result.seconds, 1)
    saved.go()
    cut = saved.world.checkpoints[1]
    assert sorted(cut.regions) == ["a", "c", "d"]
    run = resumed(without(config, ("b", "d")), data_dir, cut)
    view = run.world.averager.view
    assert (view.members, view.left, view.generation) == (("a", "c"), ("b", "d"), 4)
    check_members_ended(run.go(), {"a", "c"})


MEETINGS: dict[str, dict[str, Any]] = {
    "shards": {"regions": [{"name": name, "ps_shards": 2} for name in REGIONS]},
    "codecs": {
        "codec": {"up": {"kind": "topk", "ratio": 0.2}, "down": {"kind": "topk", "ratio": 0.3}}
    },
    "one codec": {"codec": {"up": {"kind": "int8"}}},
    "standby": {"averager": {"region": "a", "standby": "auto"}},
    "counted together": {"train": {"steps": 14, "eval_every": 0, "count": "total"}},
    "evaluations": {"train": {"steps": 14, "eval_every": 2}},
}


@pytest.mark.parametrize("kind", ["sma", "diloco", "asgd", "asgd_ga"])
@pytest.mark.parametrize("meeting", MEETINGS)
def test_what_it_meets(data_dir: Path, kind: str, meeting: str) -> None:
    config = experiment(**sections_of(kind) | UNEVEN | MEETINGS[meeting])
    cut = cut_of(config, data_dir, 1.3)
    run = resumed(without(config, ("b", "c")), data_dir, cut).go()
    check_members_ended(run, {"a", "d"})
    combined = [e for e in run.of("eval") if e["region"] is None]
    assert (meeting != "evaluations") or combined


def test_both_copies_of_the_averager_are_the_same_afterwards(data_dir: Path) -> None:
    """Leader and standby each read the averager's part by themselves."""
    config = experiment(**sections_of("fedasync"))
    cut = cut_of(config, data_dir, 1.0)
    states = [
        resumed(without(config, ("b",), region=leader), data_dir, cut).world.averager.export()
        for leader in ("a", "d")
    ]
    (one, one_control), (other, other_control) = states
    assert one_control == other_control and one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
