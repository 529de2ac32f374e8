"""Regions with several workers, each with the optimizer: their changes are averaged."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from geo_ray.base.errors import NonFiniteError
from geo_ray.base.types import Span
from geo_ray.data.tasks.load import load_task
from geo_ray.strategies.registry import STRATEGIES
from geo_ray.training.worker import StepResult, Worker
from tests.support.averaged_workers import plain_diloco
from tests.support.world_support import Run, check_ended, experiment, of_kind

KINDS = sorted(k for k, each in STRATEGIES.items() if each().traits.region.local_optimizer)
ROUNDS = [
    kind
    for kind in KINDS
    if STRATEGIES[kind]().traits.in_rounds
    and STRATEGIES[kind]().traits.exchange.blocking == "always"
]
"""Strategies whose results do not depend on times."""
ADAMW = {"kind": "adamw", "lr": 0.01, "schedule": {"kind": "linear", "warmup_steps": 3}}
STEPS = 14
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))]


def run_of(kind: str, data_dir: Path, **changes: Any) -> Run:
    sections = (
        {"optimizer": ADAMW}
        | of_kind(kind)
        | {
            "regions": [
                {"name": "a", "workers": 2},
                {"name": "b", "workers": 3, "batch_sizes": [4, 2, 3]},
                {"name": "c"},
            ],
            "train": {"steps": STEPS, "eval_every": 4, "optimizer_on": "worker"},
            "emulate": {
                "step_s_by_region": {"a": 0.1, "b": 0.3, "c": 0.5},
                "link": {"rate_mbps": 20, "delay_s": 0.04},
            },
            "checkpoint": {"every_s": None},
        }
        | changes
    )
    return Run(experiment(**sections), data_dir)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("batches", [(4, 4), (5, 2)])
def test_diloco_is_that_of_plain_pytorch(data_dir: Path, shards: int, batches: Any) -> None:
    regions = [
        {"name": name, "workers": 2, "ps_shards": shards, "batch_sizes": list(batches)}
        for name in "ab"
    ]
    outer = {"kind": "nesterov", "lr": 0.7, "momentum": 0.9}
    run = run_of(
        "diloco",
        data_dir,
        regions=regions,
        strategy={"kind": "diloco", "interval": 5, "outer": outer},
        optimizer={"kind": "adamw", "lr": 0.01, "weight_decay": 0.1},
        emulate={"step_s": 0.2},
    ).go()
    readers = {
        name: lambda first, count, region=region: region._train.read(first, count)
        for name, region in run.world.regions.items()
    }
    expected_P = plain_diloco(
        load_task(run.config.task, data_dir),
        run.config.seed,
        readers,
        batches,
        steps=STEPS,
        interval=5,
        outer_lr=0.7,
        momentum=0.9,
        lr=0.01,
        weight_decay=0.1,
    )
    for params_P in run.result.params_P.values():
        torch.testing.assert_close(params_P, expected_P, rtol=0, atol=2e-6)
    check_ended(run)


@pytest.mark.parametrize("kind", KINDS)
def test_every_strategy_ends_as_it_should(data_dir: Path, kind: str) -> None:
    check_ended(run_of(kind, data_dir).go())


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", KINDS)
def test_lost_workers_cost_their_rows_and_nothing_else(
    data_dir: Path, kind: str, seed: int
) -> None:
    whole = run_of(kind, data_dir).go()
    run, draw = run_of(kind, data_dir), Random(f"{kind}/{seed}")
    for name, workers in (("a", 2), ("b", 3)):
        for rank in range(workers):
            now_s = 0.0
            while now_s < whole.result.seconds:
                now_s += draw.uniform(0.1, 0.7) * whole.result.seconds
                run.world.workers.at(now_s, name, rank, "lost")
                now_s += draw.choice((0.0, 0.05, 0.2)) * whole.result.seconds
                run.world.workers.at(now_s, name, rank, "replaced")
    check_ended(run.go())
    for region in run.world.regions.values():
        ledger = region.server.ledger
        assert set(ledger.discarded) <= {"worker_lost", "after_end"}
        assert (
            ledger.applied
            + sum(ledger.discarded.values())
            + sum(span.count for span in ledger.returned)
            == ledger.cursor
        )


@pytest.mark.parametrize("kind", ROUNDS)
def test_a_worker_that_is_asked_to_leave_loses_no_rows(data_dir: Path, kind: str) -> None:
    whole = run_of(kind, data_dir).go()
    run = run_of(kind, data_dir)
    run.world.workers.at(0.4 * whole.result.seconds, "b", 1, "drained")
    run.world.workers.at(0.6 * whole.result.seconds, "b", 1, "replaced")
    check_ended(run.go())
    assert not run.world.regions["b"].server.ledger.discarded["worker_lost"]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_goes_on_from_where_it_was(data_dir: Path, kind: str, seed: int) -> None:
    whole = run_of(kind, data_dir).go()
    killed = run_of(kind, data_dir)
    when_s = Random(f"{kind}/{seed}").uniform(0.05, 0.9) * whole.result.seconds
    killed.world.checkpoint_at(when_s, 1)
    killed.go()
    cut = killed.world.checkpoints[1]
    assert cut.is_whole
    resumed = run_of(kind, data_dir)
    resumed.world.restore(cut)
    check_ended(resumed.go())
    if kind in ROUNDS:
        assert killed.digests() == whole.digests() == resumed.digests()


@pytest.mark.parametrize("step_s", [2.0, 0.1])
def test_too_many_refused_steps_within_a_run_end_it(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch, step_s: float
) -> None:
    """Steps 3 to 6 are refused, and those after them are not."""
    step = Worker.step

    def refused(worker: Worker, columns: Any, span: Span) -> StepResult:
        if 16 <= span.start < 48:
            return StepResult(None, "loss_not_finite")
        return step(worker, columns, span)

    monkeypatch.setattr(Worker, "step", refused)
    run = run_of(
        "diloco",
        data_dir,
        strategy={"kind": "diloco", "interval": 12},
        regions=[{"name": "a", "workers": 2}, {"name": "b", "workers": 2}],
        train={"steps": 12, "eval_every": 0, "optimizer_on": "worker", "max_refused_steps": 3},
        emulate={"step_s": step_s},
    )
    with pytest.raises(NonFiniteError, match="refused 3 steps in a row"):
        run.go()
