"""Workers that push changes of several steps have optimizers, whose states are in checkpoints."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from geo_ray.base.types import StepReport
from geo_ray.strategies.registry import STRATEGIES
from geo_ray.training.shard import Shard
from geo_ray.training.task_steps import in_memory
from tests.support.world_support import Run, check_ended, experiment, of_kind

KINDS = sorted(k for k, each in STRATEGIES.items() if each().traits.region.worker_steps)
STEPS = 9
ADAMW = {"kind": "adamw", "lr": 0.01, "schedule": {"kind": "linear", "warmup_steps": 3}}
MOMENTUM = {"kind": "momentum", "lr": 0.05, "momentum": 0.9}
ONE, SEVERAL = {"a": 1, "b": 1}, {"a": 2, "b": 3}


def run_of(
    kind: str,
    data_dir: Path,
    workers: dict[str, int],
    *,
    shards: int = 1,
    optimizer: dict[str, Any] = ADAMW,
    **train: Any,
) -> Run:
    regions = [{"name": n, "workers": w, "ps_shards": shards} for n, w in workers.items()]
    config = experiment(
        **of_kind(kind)
        | {
            "regions": regions,
            "optimizer": optimizer,
            "train": {"steps": STEPS, "eval_every": 4} | train,
            "emulate": {
                "step_s_by_region": {"a": 0.1, "b": 0.3},
                "link": {"rate_mbps": 20, "delay_s": 0.04},
            },
            "checkpoint": {"every_s": None},
        }
    )
    return Run(config, data_dir)


def checkpoint_of(run: Run, when_s: float) -> Any:
    """The checkpoint that begins at a time of the run."""
    run.world.checkpoint_at(when_s, 1)
    run.go()
    cut = run.world.checkpoints[1]
    assert cut.is_whole
    return cut


def saved_in(cut: Any, region: str, rank: int) -> dict[str, Tensor]:
    """The state of a worker's optimizer in a checkpoint."""
    prefix = f"optimizer/workers/{rank}/" if rank else "optimizer/"
    _, shards = cut.regions[region]
    parts = [
        {name.removeprefix(prefix): value for name, value in tensors.items() if prefix in name}
        for tensors, _ in shards
    ]
    names = sorted(name for name in parts[0] if "/" not in name)
    joined = [[part[name] for part in parts] for name in names]
    return {
        name: torch.cat(values) if values[0].dim() else values[0]
        for name, values in zip(names, joined, strict=True)
    }


def stored_in(run: Run, region: str, rank: int) -> dict[str, Tensor]:
    """The state that the shards store for a worker."""
    parts = [shard.moments(rank) for shard in run.world.regions[region]._shards]
    return {name: in_memory(value) for name, value in parts[0].items()}


def test_the_strategies_are_those_of_the_guide() -> None:
    assert KINDS == ["halos", "hfa"]


@pytest.mark.parametrize(
    ("workers", "shards", "optimizer"),
    [(ONE, 1, ADAMW), (ONE, 3, MOMENTUM), (SEVERAL, 1, MOMENTUM), (SEVERAL, 3, ADAMW)],
)
def test_a_resumed_run_has_the_bits_of_an_undisturbed_one(
    data_dir: Path, workers: dict[str, int], shards: int, optimizer: dict[str, Any]
) -> None:
    def run() -> Run:
        return run_of("hfa", data_dir, workers, shards=shards, optimizer=optimizer)

    whole = run().go()
    for fraction in (0.23, 0.5, 0.68):
        killed = run()
        cut = checkpoint_of(killed, fraction * whole.result.seconds)
        resumed = run()
        resumed.world.restore(cut)
        check_ended(resumed.go())
        assert killed.digests() == whole.digests() == resumed.digests()


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_has_the_optimizer_of_each_worker(
    data_dir: Path, kind: str, mode: str
) -> None:
    workers = {"a": 3, "b": 3}
    seconds = run_of(kind, data_dir, workers, mode=mode).go().result.seconds
    for fraction in (0.3, 0.6):
        cut = checkpoint_of(run_of(kind, data_dir, workers, mode=mode), fraction * seconds)
        for region in workers:
            states = [saved_in(cut, region, rank) for rank in range(3)]
            for rank, state in enumerate(states):
                assert state["exp_avg"].any() and state["exp_avg_sq"].any()
                assert not torch.equal(state["exp_avg"], states[rank - 1]["exp_avg"])
        resumed = run_of(kind, data_dir, workers, mode=mode)
        resumed.world.restore(cut)
        check_ended(resumed.go())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "train",
    [
        {},
        {"mode": "async"},
        {"elastic": {"min_workers": 1}},
        {"elastic": {"min_workers": 1, "batch": "follows"}},
        {"mode": "async", "elastic": {"min_workers": 1}},
    ],
)
def test_checkpoints_do_not_wait_for_workers_that_are_lost(
    data_dir: Path, kind: str, train: dict[str, Any]
) -> None:
    workers = {"a": 2, "b": 2}
    seconds = run_of(kind, data_dir, workers, **train).go().result.seconds
    run, draw = run_of(kind, data_dir, workers, **train), Random(kind)
    for name, count in workers.items():
        for rank in range(count):
            now_s = draw.uniform(0.1, 0.4) * seconds
            while now_s < seconds:
                what = draw.choice(("lost", "drained"))
                run.world.workers.at(now_s, name, rank, what)  # type: ignore[arg-type]
                now_s += draw.choice((0.02, 0.3)) * seconds
                run.world.workers.at(now_s, name, rank, "replaced")
                now_s += draw.uniform(0.1, 0.6) * seconds
    for number in range(1, 6):
        run.world.checkpoint_at(0.16 * number * seconds, number)
    check_ended(run.go())
    assert len(run.world.checkpoints) == 5
    assert all(cut.is_whole for cut in run.world.checkpoints.values())


def test_with_spare_workers_a_checkpoint_is_written(data_dir: Path) -> None:
    stragglers = {"kind": "backup_workers", "spares": 1}
    run = run_of("hfa", data_dir, {"a": 3, "b": 3}, stragglers=stragglers)
    cut = checkpoint_of(run, 2.0)
    assert all(saved_in(cut, name, rank) for name in "ab" for rank in range(3))


@pytest.mark.parametrize("shards", [1, 3])
def test_a_worker_that_is_asked_to_leave_loses_no_state(data_dir: Path, shards: int) -> None:
    whole = run_of("hfa", data_dir, SEVERAL, shards=shards).go()
    run = run_of("hfa", data_dir, SEVERAL, shards=shards)
    run.world.workers.at(0.4 * whole.result.seconds, "b", 1, "drained")
    run.world.workers.at(3 * whole.result.seconds, "b", 1, "replaced")
    check_ended(run.go())
    assert run.digests() == whole.digests()


def test_a_new_worker_gets_the_newest_saved_state(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = run_of("hfa", data_dir, SEVERAL).go().result.seconds
    run = run_of("hfa", data_dir, SEVERAL)
    got: list[dict[str, Tensor]] = []
    moments = Shard.moments

    def given(shard: Shard, worker: int) -> Any:
        got.append(moments(shard, worker))
        return got[-1]

    monkeypatch.setattr(Shard, "moments", given)
    run.world.workers.at(0.6 * seconds, "b", 1, "lost")
    run.world.workers.at(0.7 * seconds, "b", 1, "replaced")
    cut = checkpoint_of(run, 0.3 * seconds)
    saved = saved_in(cut, "b", 1)
    state = got[-1]
    assert saved.keys() == state.keys() and saved["exp_avg"].any()
    for name, value in saved.items():
        assert torch.equal(in_memory(state[name]), value), name


def test_with_another_number_of_workers_states_stay_with_their_ranks(data_dir: Path) -> None:
    """A worker without a state gets that of the first; states of removed workers are dropped."""
    cut = checkpoint_of(run_of("hfa", data_dir, {"a": 2, "b": 3}), 2.0)
    saved = {name: [saved_in(cut, name, rank) for rank in range(3)] for name in "ab"}
    assert not saved["a"][2]
    run = run_of("hfa", data_dir, {"a": 3, "b": 1})
    run.world.restore(cut)
    for rank, expected in ((0, 0), (1, 1), (2, 0)):
        state = stored_in(run, "a", rank)
        assert torch.equal(state["exp_avg"], saved["a"][expected]["exp_avg"])
    names = {name for shard in run.world.regions["b"]._shards for name in shard.export()[0]}
    assert "optimizer/exp_avg" in names and not any("workers/" in name for name in names)
    check_ended(run.go())


def test_with_another_number_of_workers_the_schedule_continues(data_dir: Path) -> None:
    """It counts the region's steps; before the resume a step had other rows."""
    before = run_of("hfa", data_dir, {"a": 2, "b": 3})
    cut = checkpoint_of(before, 2.0)
    run = run_of("hfa", data_dir, {"a": 3, "b": 1})
    run.world.restore(cut)
    run.go()
    for region in "ab":
        rates = {event["step"]: event["learning_rate"] for event in before.of("step", region)}
        resumed = run.of("step", region)
        assert resumed and min(event["step"] for event in resumed) > 1
        for event in resumed:
            assert event["learning_rate"] == rates[event["step"]]


def test_a_state_comes_after_the_step_unless_that_waits(data_dir: Path) -> None:
    """The second worker has not pushed: it computes, or a pause keeps it from its step."""
    region = run_of("hfa", data_dir, {"a": 2, "b": 2}).world.regions["a"]
    server, (shard,) = region.server, region._shards
    server.join(0)
    work = {each.worker: each for each in server.join(1)}
    for rank in (0, 1, 0):
        shard.put(rank, torch.zeros_like(shard.params_S))
        report = StepReport(work[rank].span, 1.0, 1.0)
        work |= {each.worker: each for each in server.push(rank, report) if hasattr(each, "span")}
    assert server.lacking == {0, 1}
    assert not server.ask_optimizer(0)
    assert server.ask_optimizer(0, is_paused=True)
    server.leave(1)
    assert server.ask_optimizer(0) and server.lacking == {0}


@pytest.mark.parametrize(("mode", "lacking"), [("async", {1}), ("sync", {0, 1})])
def test_a_checkpoint_needs_one_state_of_each_worker_that_does_not_wait_for_others(
    data_dir: Path, mode: str, lacking: set[int]
) -> None:
    """The first worker sends its state and pushes again before the second sends one."""
    region = run_of("halos", data_dir, {"a": 2, "b": 2}, mode=mode).world.regions["a"]
    server, (shard,) = region.server, region._shards
    work = {each.worker: each for each in [*server.join(0), *server.join(1)]}

    def push(rank: int) -> None:
        shard.put(rank, torch.zeros_like(shard.params_S))
        report = StepReport(work[rank].span, 1.0, 1.0)
        work.update({e.worker: e for e in server.push(rank, report) if hasattr(e, "span")})

    push(0)
    push(1)
    server.begin_saving()
    assert server.lacking == {0, 1}
    server.on_optimizer(0)
    push(0)
    push(1)
    assert server.lacking == lacking
