"""Workers that push changes of several steps have optimizers: over real sockets and in threads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from geo_ray.storage.folders import LocalFolder, directory_of
from geo_ray.storage.parts import read_part
from geo_ray.training.checkpoint_parts import wire_tensors
from tests.support.region_support import (
    Gate,
    InProcess,
    Site,
    WorkerThread,
    eventually,
    experiment_of,
)
from tests.support.world_support import Run

ADAMW = {"kind": "adamw", "lr": 0.01, "weight_decay": 0.1}
# No exchange comes before the checkpoint, so that the averager's part is that of a new run.
STRATEGIES = {
    "hfa": {"kind": "hfa", "k1": 2, "k2": 4},
    "halos": {"kind": "halos", "local_steps": 2, "interval": 64},
}
STEPS = 7
Parts = dict[str, list[tuple[dict[str, Tensor], dict[str, Any]]]]


def config_of(kind: str, *, workers: int = 2, shards: int = 1, **train: Any) -> Any:
    names = ("us-east", "eu-west")
    return experiment_of(
        regions=[{"name": n, "workers": workers, "ps_shards": shards} for n in names],
        strategy=STRATEGIES[kind],
        optimizer=ADAMW,
        train={"steps": STEPS, "eval_every": 3} | train,
    )


def simulated(config: Any, directory: Path) -> list[str]:
    directory.mkdir()
    found = Run(config, directory).go().digests()
    return [found[region.name] for region in config.regions]


def started(world: InProcess, *, shared: bool = True) -> list[WorkerThread]:
    return [
        site.start(rank, shared=shared)
        for site in world.sites.values()
        for rank in range(site.region.workers)
    ]


def parts_of(world: InProcess, checkpoint: int = 1) -> Parts:
    """All parts of a checkpoint, once they are written."""
    return {name: _parts(world, site, checkpoint) for name, site in world.sites.items()}


def _parts(world: InProcess, site: Site, checkpoint: int) -> Any:
    events: list[dict[str, Any]] = []
    eventually(
        lambda: (
            events.extend(site.event_buffer.take(1000))
            or [e for e in events if e["kind"] in ("parts", "part_failed")]
        ),
        "the parts are written",
    )
    (event,) = [e for e in events if e["kind"] in ("parts", "part_failed")]
    folder = LocalFolder(directory_of(world.parts, checkpoint))
    return [read_part(folder, part) for part in event["parts"]]


def snapshot(world: InProcess, checkpoint: int = 1) -> None:
    directory_of(world.parts, checkpoint).mkdir(parents=True)
    for site in world.sites.values():
        site.primary.snapshot(checkpoint, halt=False)


def saved_in(parts: Any, rank: int) -> dict[str, Tensor]:
    """The state of a worker's optimizer in the parts of its region."""
    prefix = f"optimizer/workers/{rank}/" if rank else "optimizer/"
    names = [n for n in parts[0][0] if n.startswith(prefix) and "/" not in n.removeprefix(prefix)]
    joined = {name.removeprefix(prefix): [tensors[name] for tensors, _ in parts] for name in names}
    return {n: torch.cat(values) if values[0].dim() else values[0] for n, values in joined.items()}


def restore(world: InProcess, parts: Parts) -> None:
    for name, site in world.sites.items():
        for shard, (tensors, meta) in zip(site.shards, parts[name], strict=True):
            shard.restore(tensors, meta["counters"])
        tensors, meta = parts[name][0]
        site.server.restore(meta["control"], wire_tensors(tensors))


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "bytes"])
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_resumed_run_has_the_bits_of_an_undisturbed_one(
    tmp_path: Path, workers: int, shards: int, shared: bool
) -> None:
    """The checkpoint begins while all workers are in their second step."""
    gate, config = Gate(steps=2), config_of("hfa", workers=workers, shards=shards)
    expected = simulated(config, tmp_path / "whole")
    with InProcess(config, tmp_path, gate=gate) as world:
        threads = started(world, shared=shared)
        eventually(lambda: len(gate.workers) == len(threads), "all are in their second step")
        snapshot(world)
        gate.open()
        parts = parts_of(world)
        for thread in threads:
            thread.result()
        assert [s.digest for s in world.sites.values()] == expected
    assert all(int(meta[0][1]["control"]["version"]) == 2 for meta in parts.values())
    (tmp_path / "again").mkdir()
    with InProcess(config, tmp_path / "again") as world:
        restore(world, parts)
        assert world.run(shared=shared) == expected
        world.check_books()


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("kind", STRATEGIES)
def test_a_checkpoint_has_the_optimizer_of_each_worker(
    tmp_path: Path, kind: str, mode: str
) -> None:
    gate, config = Gate(steps=2), config_of(kind, mode=mode)
    with InProcess(config, tmp_path, gate=gate) as world:
        threads = started(world)
        eventually(lambda: len(gate.workers) == len(threads), "all are in their second step")
        snapshot(world)
        gate.open()
        parts = parts_of(world)
        for thread in threads:
            thread.result()
    for each in parts.values():
        own, other = (saved_in(each, rank)["exp_avg"] for rank in (0, 1))
        assert own.any() and other.any() and not torch.equal(own, other)


@pytest.mark.parametrize("shards", [1, 3])
def test_a_new_worker_gets_the_newest_saved_state(tmp_path: Path, shards: int) -> None:
    """The state is that after the last step, so the result is that of a run without losses."""
    gate, config = Gate(steps=2), config_of("hfa", shards=shards)
    with InProcess(config, tmp_path, gate=gate) as world:
        threads, sites = started(world), [*world.sites.values()]
        eventually(lambda: len(gate.workers) == len(threads), "all are in their second step")
        snapshot(world)
        for each in sites:
            each.primary.pause(True)
        gate.open()
        saved, site = saved_in(parts_of(world)["eu-west"], 1), world.sites["eu-west"]
        site.primary.lose(1, attempt=1)
        loop = site.loop(1, attempt=2)
        found = loop._links.moments()
        assert saved["exp_avg"].any() and saved.keys() == found.keys()
        assert all(torch.equal(value, found[name]) for name, value in saved.items())
        for each in sites:
            each.primary.pause(False)
        threads[3] = WorkerThread(loop)
        threads[3].start()
        for thread in threads:
            thread.result()
        digests = [each.digest for each in sites]
    assert digests == simulated(config, tmp_path / "whole")


@pytest.mark.parametrize("shards", [1, 3])
def test_a_worker_that_is_asked_to_leave_loses_no_state(tmp_path: Path, shards: int) -> None:
    gate, config = Gate(steps=2), config_of("hfa", shards=shards)
    with InProcess(config, tmp_path, gate=gate) as world:
        threads, site = started(world), world.sites["eu-west"]
        eventually(lambda: len(gate.workers) == len(threads), "all are in their second step")
        site.primary.drain(1)
        gate.open()
        assert threads[3].result() == 2
        threads[3] = site.start(1, attempt=2)
        for thread in threads:
            thread.result()
        digests = [each.digest for each in world.sites.values()]
    assert digests == simulated(config, tmp_path / "whole")


@pytest.mark.parametrize("kind", STRATEGIES)
def test_a_checkpoint_does_not_wait_for_a_lost_worker(tmp_path: Path, kind: str) -> None:
    """The other worker has pushed its part of a step, which cannot be completed."""
    gate, config = Gate(steps=2), config_of(kind)
    with InProcess(config, tmp_path, gate=gate) as world:
        threads, site = started(world), world.sites["eu-west"]
        eventually(lambda: site.server.version == 1, "the first step is made")
        eventually(lambda: len(gate.workers) == len(threads), "all are in their second step")
        site.primary.lose(1, attempt=1)
        snapshot(world)
        gate.open()
        parts = parts_of(world)["eu-west"]
        assert saved_in(parts, 0)["exp_avg"].any() and not saved_in(parts, 1)
        threads[3] = site.start(1, attempt=2)
        for thread in threads:
            thread.result()
        world.check_books()
