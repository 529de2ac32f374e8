"""Any strategy with any codecs, saved at any time, goes on to the same or to a later end.

A run that gets more steps first completes its previous end, where some regions may have sent
their final update.

Cases are drawn by seed; what a configuration refuses is drawn again.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from geo_ray.base.errors import ConfigError
from geo_ray.experiment.experiment import Experiment
from geo_ray.simulator.network import FRAME_BYTES
from geo_ray.strategies.registry import STRATEGIES
from tests.support.world_support import BASE, Run, experiment, of_kind

UP = [
    None,
    {"kind": "int8"},
    {"kind": "int4"},
    {"kind": "fp16"},
    {"kind": "topk", "ratio": 0.05},
    {"kind": "chunked_topk"},
    {"kind": "randomk"},
    {"kind": "powersgd"},
    {"kind": "identity"},
    {"kind": "bisparse"},
    {"kind": "dgt", "block_bytes": 64, "reliable_fraction": 0.4},
]
DOWN = [None, {"kind": "int8"}, {"kind": "topk", "ratio": 0.05}, {"kind": "nonzeros"}]


def strategy(random: Random, kind: str) -> dict[str, Any]:
    fields = STRATEGIES[kind].model_fields
    options: dict[str, Any] = dict(of_kind(kind)["strategy"])
    if "interval" in fields:
        options["interval"] = random.choice([2, 3, 4])
    if "fragments" in fields:
        options |= {"fragments": 2, "interval": 4}
    if "tau" in fields:
        options["tau"] = 1
    if "quorum" in fields and kind == "decoupled":
        options["quorum"] = random.choice([1, 2])
    if "staleness" in fields:
        options["staleness"] = {"bound": random.choice([None, 1, 2])}
    if "max_local_steps" in fields:
        options["max_local_steps"] = 3
    return options


def drawn(random: Random, only: str | None = None) -> Experiment:
    """A small experiment that the configuration does not refuse; ``only``: its strategy."""
    while True:
        kind = only or random.choice(sorted(STRATEGIES))
        codec = {"up": random.choice(UP), "down": random.choice(DOWN)}
        codec |= {"last_error": random.choice([None, None, 0.0, 0.2])}
        train = BASE["train"] | {"steps": random.randint(3, 9)}
        if random.random() < 0.3:
            train["count"] = "total"
        step_s = {"a": 0.5, "b": random.choice([0.5, 0.5, 0.9])}
        sections = of_kind(kind, train=train, codec=codec) | {
            "strategy": strategy(random, kind),
            "regions": [{"name": "a", "ps_shards": random.choice([1, 2])}, {"name": "b"}],
            "emulate": {
                "link": {"rate_mbps": random.choice([0.2, 10]), "delay_s": 0.1},
                "step_s_by_region": step_s,
            },
            "seed": random.randint(0, 99),
        }
        if sections["codec"].get("up") is None:
            sections["codec"] = codec
        try:
            return experiment(**sections)
        except ConfigError:
            continue


def more_steps(config: Experiment, more: int) -> Experiment:
    train = config.train.model_copy(update={"steps": config.train.steps + more})
    return config.model_copy(update={"train": train})


def check(run: Run) -> None:
    """What holds at every end."""
    config, traits = run.config, run.config.strategy.traits
    for name, region in run.world.regions.items():
        region.server.ledger.check()
        if not config.counts_total_rows:
            assert region.server.version == config.train.steps, name
    if config.counts_total_rows:
        assert run.world.averager.samples >= config.rows
    first_P, second_P = run.result.params_P.values()
    assert bool(torch.isfinite(first_P).all())
    if traits.in_rounds:
        assert torch.equal(first_P, second_P)
    else:
        tolerance = 1e-5 + 2 * (config.codec.last_error or 0.0)
        assert float((first_P - second_P).abs().max()) <= tolerance * float(first_P.abs().max())
    if traits.exchange.last == "always" and not config.counts_total_rows:
        for name in run.world.regions:
            steps = run.of("step", name)
            begun_s = [event["start_s"] for event in run.of("exchange", name)]
            # One that has only to end repeats the request that was open, and then ends.
            most = 1 if steps else 2
            end_s = steps[-1].t_s if steps else 0.0
            assert sum(at_s >= end_s for at_s in begun_s) <= most, (name, end_s, begun_s)


def case(seed: int, data_dir: Path) -> None:
    """One case: to the end, and again from what was saved on the way."""
    random = Random(seed)
    config = drawn(random)
    first = Run(config, data_dir)
    straight_s = Run(config, data_dir).go().result.seconds
    first.world.checkpoint_at(random.uniform(0.0, straight_s), 1)
    first.go()
    check(first)
    saved = first.world.checkpoints.get(1)
    if saved is None or not saved.is_whole:
        return  # it began so late that the run was over
    more = random.choice([0, 0, 1, 2, 5])
    again = Run(more_steps(config, more), data_dir)
    again.world.restore(saved)
    again.go()
    check(again)
    exchange, traits = config.strategy.traits.exchange, config.strategy.traits
    if not more and traits.in_rounds and exchange.blocking == "always":
        lossy = config.codec.up is not None and config.codec.up.traits.differential is not None
        if not (lossy or config.counts_total_rows):
            assert again.digests() == first.digests()


@pytest.mark.parametrize("seed", range(24))
def test_it_ends_well(seed: int, data_dir: Path) -> None:
    case(seed, data_dir)


def around_the_end(run: Run) -> list[float]:
    """Times at which a checkpoint may divide a finished run's last steps and final updates.

    Regions hear of it 0.1 s after the averager.
    """
    events = [event.t_s for event in run.events if event.kind in {"step", "exchange"}]
    last_s = min(run.of("step", name)[-1].t_s for name in run.world.regions)
    late = [at_s for at_s in events if at_s >= last_s]
    moments = {at_s + by_s for at_s in late for by_s in (-0.11, -0.05, -0.01, 0.01)}
    return sorted(at_s for at_s in moments if 0 < at_s < run.result.seconds)


@pytest.mark.parametrize("kind", sorted(STRATEGIES))
def test_a_run_saved_around_its_end_gets_more_steps(kind: str, data_dir: Path) -> None:
    random = Random(kind)
    for _ in range(2):
        config = drawn(random, kind)
        moments = around_the_end(Run(config, data_dir).go())
        for at_s in random.sample(moments, 2):
            first = Run(config, data_dir)
            first.world.checkpoint_at(at_s, 1)
            first.go()
            saved = first.world.checkpoints.get(1)
            if saved is None or not saved.is_whole:
                continue
            again = Run(more_steps(config, random.randint(1, 6)), data_dir)
            again.world.restore(saved)
            extended(again.go())


def extended(run: Run) -> None:
    """What holds at the end of a run that got more steps."""
    config, sent = run.config, run.result.sent_bytes
    for name, region in run.world.regions.items():
        region.server.ledger.check()
        assert config.counts_total_rows or region.server.version == config.train.steps, name
    assert not config.counts_total_rows or run.world.averager.samples >= config.rows
    assert not run.world.averager.unanswered
    first_P, second_P = run.result.params_P.values()
    if config.strategy.traits.in_rounds:
        assert len(set(run.digests().values())) == 1
    else:
        tolerance = 1e-5 + 2 * (config.codec.last_error or 0.0)
        assert float((first_P - second_P).abs().max()) <= tolerance * float(first_P.abs().max())
    if config.codec.up is None or config.codec.up.traits.differential is None:
        said = sum(event["bytes_sent"] + FRAME_BYTES for event in run.of("exchange", "b"))
        assert sent["b", "a"]["update"] == said
