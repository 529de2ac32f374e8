"""Workers of simulated regions come and go; every strategy goes on, and ends as it should."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any, Literal

import pytest
import torch

from geo_ray.strategies.registry import STRATEGIES
from tests.support.world_support import Run, experiment, of_kind

KINDS = sorted(STRATEGIES)
TASKS = Path(__file__).parents[2] / "support" / "buffer_tasks.py"
STEPS = 14
WORKERS = {"a": 3, "b": 2, "c": 1}
ROWS = 4  # of a worker and step


def sections_of(kind: str, *, mode: str = "sync", **elastic: Any) -> dict[str, Any]:
    train = {"steps": STEPS, "eval_every": 4, "mode": mode, "elastic": elastic or None}
    found = of_kind(kind) | {
        "regions": [{"name": name, "workers": count} for name, count in WORKERS.items()],
        "train": train,
        "emulate": {
            "step_s_by_region": {"a": 0.1, "b": 0.3, "c": 0.5},
            "link": {"rate_mbps": 20, "delay_s": 0.04},
        },
        "checkpoint": {"every_s": None},
    }
    if mode == "async" and STRATEGIES[kind]().traits.in_rounds:
        found["regions"] = [{"name": name, "workers": 2} for name in WORKERS]
    return found


def unrest(run: Run, seed: str, until_s: float) -> None:
    """Workers are lost and sent away again and again; each comes back after a while, or late."""
    draw = Random(seed)
    for region in run.config.regions:
        for rank in range(region.workers):
            now_s = draw.uniform(0.0, 0.3) * until_s
            while now_s < until_s:
                what = draw.choice(("lost", "lost", "drained"))
                run.world.workers.at(now_s, region.name, rank, what)
                now_s += draw.choice((0.0, 0.02, 0.3)) * until_s
                run.world.workers.at(now_s, region.name, rank, "replaced")
                now_s += draw.uniform(0.02, 0.6) * until_s


def check_ended(run: Run) -> None:
    traits, ends = run.config.strategy.traits, list(run.result.params_P.values())
    exact = traits.in_rounds or traits.sends == "model"
    for other_P in ends:
        assert torch.isfinite(other_P).all()
        assert torch.allclose(ends[0], other_P, rtol=0, atol=0.0 if exact else 1e-4)
    for region in run.world.regions.values():
        ledger = region.server.ledger
        ledger.check()
        assert set(ledger.discarded) <= {"after_end"}
    assert {e["region"] for e in run.of("eval")} == {*WORKERS, None}
    assert sum(e["final"] for e in run.of("eval")) == 1 + len(WORKERS)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", KINDS)
def test_with_a_fixed_batch_a_run_ends_as_if_all_had_been_there(
    data_dir: Path, kind: str, seed: int
) -> None:
    quiet = Run(experiment(**sections_of(kind)), data_dir).go()
    run = Run(experiment(**sections_of(kind, min_workers=1)), data_dir)
    unrest(run, f"{kind}/{seed}", 2 * quiet.result.seconds)
    run.go()
    check_ended(run)
    assert run.of("worker_lost") and run.of("worker_replaced") and run.of("active_workers")
    traits = run.config.strategy.traits
    by_time = traits.exchange.blocking != "always" or traits.region.ends_by_total_rows
    if traits.in_rounds and not by_time:
        assert run.digests() == quiet.digests()
        assert [e["samples"] for e in run.of("step", "a")] == [
            e["samples"] for e in quiet.of("step", "a")
        ]
    assert run.result.seconds >= quiet.result.seconds or not traits.in_rounds


@pytest.mark.parametrize("kind", KINDS)
def test_where_the_batch_follows_steps_have_the_rows_of_those_who_are_there(
    data_dir: Path, kind: str
) -> None:
    config = experiment(**sections_of(kind, batch="follows"))
    until_s = 1.5 * Run(config, data_dir).go().result.seconds
    run, again = (Run(config, data_dir) for _ in range(2))
    for each in (run, again):
        unrest(each, kind, until_s)
        each.go()
    check_ended(run)
    assert run.events == again.events and run.digests() == again.digests()
    rows = ROWS * max(1, run.config.worker_steps)
    thin = 0
    for name, count in WORKERS.items():
        sizes = {e["samples"] for e in run.of("step", name)}
        assert sizes <= {(i + 1) * rows for i in range(count)}
        thin += len(sizes) > 1
    assert thin


@pytest.mark.parametrize("kind", ["asgd", "bsp", "diloco", "halos"])
def test_workers_that_push_alone_go_on_without_each_other(data_dir: Path, kind: str) -> None:
    sections = sections_of(kind, mode="async", min_workers=1)
    until_s = Run(experiment(**sections), data_dir).go().result.seconds
    run = Run(experiment(**sections), data_dir)
    unrest(run, kind, until_s)
    check_ended(run.go())


def test_the_buffers_of_a_model_are_those_of_a_run_from_which_nobody_was_missing(
    data_dir: Path,
) -> None:
    task = {"task": {"use": f"{TASKS}:Stateful", "options": {}}}
    quiet = Run(experiment(**sections_of("sma") | task), data_dir).go()
    run = Run(experiment(**sections_of("sma", min_workers=1) | task), data_dir)
    unrest(run, "buffers", 2 * quiet.result.seconds)
    check_ended(run.go())
    assert run.digests() == quiet.digests()
    for name, buffers_B in quiet.result.buffers_B.items():
        assert buffers_B is not None and buffers_B.numel() > 0
        assert torch.equal(run.result.buffers_B[name], buffers_B)


@pytest.mark.parametrize("what", ["lost", "drained"])
@pytest.mark.parametrize(("region", "rank"), [("a", 1), ("c", 0)])
def test_without_the_section_a_region_waits_for_each_worker(
    data_dir: Path, region: str, rank: int, what: Literal["lost", "drained"]
) -> None:
    config = experiment(**sections_of("sma"))
    quiet, run = Run(config, data_dir).go(), Run(config, data_dir)
    run.world.workers.at(0.25, region, rank, what)
    run.world.workers.at(50.0, region, rank, "replaced")
    run.go()
    assert run.digests() == quiet.digests() and not run.of("active_workers")
    assert run.result.seconds > 50.0


@pytest.mark.parametrize("least", [None, 2])
def test_a_worker_that_leaves_with_the_last_step_is_not_awaited(
    data_dir: Path, least: int | None
) -> None:
    config = experiment(**sections_of("sma", **({} if least is None else {"min_workers": least})))
    quiet, run = Run(config, data_dir).go(), Run(config, data_dir)
    for name, rank in (("a", 2), ("b", 1)):
        last_s = max(e.t_s for e in quiet.of("step", name))
        run.world.workers.at(last_s - 0.05, name, rank, "drained")
        run.world.workers.at(50.0, name, rank, "replaced")
    run.go()
    assert run.digests() == quiet.digests()
    assert run.result.seconds == quiet.result.seconds


def test_a_region_of_too_few_stands_still_until_one_comes(data_dir: Path) -> None:
    config = experiment(**sections_of("sma", min_workers=2))
    quiet, run = Run(config, data_dir).go(), Run(config, data_dir)
    run.world.workers.at(0.25, "a", 1, "lost")
    run.world.workers.at(0.25, "b", 1, "lost")
    run.world.workers.at(60.0, "b", 1, "replaced")
    run.go()
    assert run.digests() == quiet.digests()
    assert run.result.seconds > 60.0
    sizes = [(e["region"], e["workers"], e["rows"]) for e in run.of("active_workers")]
    assert sizes == [("a", 2, 12), ("b", 1, 8), ("b", 2, 8)]


def test_a_checkpoint_of_a_thinned_region_is_gone_on_from(data_dir: Path) -> None:
    config = experiment(**sections_of("sma", min_workers=1))
    quiet, run = Run(config, data_dir).go(), Run(config, data_dir)
    run.world.workers.at(0.15, "a", 0, "lost")
    run.world.workers.at(0.5, "a", 2, "drained")
    run.world.checkpoint_at(1.13, 1)
    assert run.go().digests() == quiet.digests()
    resumed = Run(config, data_dir)
    resumed.world.restore(run.world.checkpoints[1])
    resumed.world.workers.at(0.02, "b", 0, "lost")
    assert resumed.go().digests() == quiet.digests()
