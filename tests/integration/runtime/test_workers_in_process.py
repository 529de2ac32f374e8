"""Workers come and go while a region's real sockets carry its steps; no Ray."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from geo_ray.experiment.experiment import Experiment
from tests.support.region_support import (
    WAIT_S,
    Gate,
    InProcess,
    WorkerThread,
    eventually,
    experiment_of,
)

TRAIN = {"steps": 6, "eval_every": 3}


def elastic(shards: int = 1, **more: Any) -> Experiment:
    regions = [
        {"name": "us-east", "workers": 2},
        {"name": "eu-west", "workers": 3, "ps_shards": shards},
    ]
    return experiment_of(regions=regions, train=TRAIN | {"elastic": more or {"min_workers": 1}})


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the experiment without missing workers."""
    with InProcess(elastic(), tmp_path_factory.mktemp("undisturbed")) as world:
        first, second = world.run()
        assert first == second
        return first


def others(world: InProcess, but: Sequence[tuple[str, int]]) -> dict[tuple[str, int], WorkerThread]:
    return {
        (name, rank): site.start(rank)
        for name, site in world.sites.items()
        for rank in range(site.region.workers)
        if (name, rank) not in but
    }


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "bytes"])
def test_one_worker_does_the_work_of_three(
    undisturbed: str, tmp_path: Path, shards: int, shared: bool
) -> None:
    """Two are lost before they have pushed anything, and never come back."""
    with InProcess(elastic(shards), tmp_path) as world:
        site = world.sites["eu-west"]
        lost = [("eu-west", 1), ("eu-west", 2)]
        rest = others(world, [*lost, ("eu-west", 0)])
        clients = [client for _, rank in lost for client in site.join(rank, shared=shared)]
        for _, rank in lost:  # as if they had joined and then died without a word
            site.primary.lose(rank, attempt=1)
        last = site.start(0, shared=shared)
        for worker in rest.values():
            worker.result()
        assert last.result() == 18
        for client in clients:
            client.close()
        world.check_books()
        assert [s.digest for s in world.sites.values()] == [undisturbed] * 2


@pytest.mark.parametrize("shards", [1, 2])
def test_one_that_dies_in_mid_step_is_stood_in_for_and_comes_back(
    undisturbed: str, tmp_path: Path, shards: int
) -> None:
    gate = Gate(steps=3)
    with InProcess(elastic(shards), tmp_path, gate=gate) as world:
        site = world.sites["eu-west"]
        workers = others(world, [("eu-west", 2)])
        clients = site.join(2, shared=False)
        asked = clients[0].request({"op": "join"}, timeout_s=WAIT_S)
        assert asked[0]["start"] == 16
        for client in clients:
            client.close()
        eventually(lambda: site.server.version >= 1, "the others go on")
        workers["eu-west", 2] = site.start(2, attempt=2)
        eventually(lambda: 2 in site.server.work.workers.joined, "it is back")
        gate.open()
        assert sum(worker.result() for worker in workers.values()) == 12 + 18
        world.check_books()
        assert [s.digest for s in world.sites.values()] == [undisturbed] * 2
        sizes = [
            e["workers"] for e in site.event_buffer.take(1000) if e["kind"] == "active_workers"
        ]
        assert sizes == [2, 3]


def test_a_worker_that_is_asked_to_leave_loses_nothing(undisturbed: str, tmp_path: Path) -> None:
    gate = Gate(steps=2)
    with InProcess(elastic(), tmp_path, gate=gate) as world:
        site = world.sites["eu-west"]
        workers = others(world, [])
        eventually(lambda: gate.reached == set(world.sites), "all work")
        site.primary.drain(0)
        gate.open()
        assert workers.pop(("eu-west", 0)).result() < 6
        workers["eu-west", 0] = site.start(0, attempt=2)
        for worker in workers.values():
            worker.result()
        world.check_books()
        assert [s.digest for s in world.sites.values()] == [undisturbed] * 2


@pytest.mark.parametrize("shards", [1, 2])
def test_where_the_batch_follows_lost_rows_come_first_in_the_next_step(
    tmp_path: Path, shards: int
) -> None:
    with InProcess(elastic(shards, batch="follows", rate="linear"), tmp_path) as world:
        site = world.sites["eu-west"]
        workers = others(world, [("eu-west", 2)])
        clients = site.join(2, shared=False)
        clients[0].request({"op": "join"}, timeout_s=WAIT_S)
        for client in clients:
            client.close()
        for worker in workers.values():
            worker.result()
        world.check_books()
        events = site.event_buffer.take(1000)
        assert [e["samples"] for e in events if e["kind"] == "step"] == [16] * 6
        assert (site.server.ledger.cursor, site.server.ledger.applied) == (96, 96)
        first, second = (s.digest for s in world.sites.values())
        assert first == second
