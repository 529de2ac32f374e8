"""Updates as large as the model: where and how long they are held, and the waits for them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from geo_ray.strategies import local_steps
from geo_ray.strategies.state import Outgoing, RegionState
from tests.support.region_support import (
    WAIT_S,
    InProcess,
    Site,
    WorkerThread,
    eventually,
    experiment_of,
)

DILOCO = {"kind": "diloco", "interval": 2}
WAITS, OTHER = "eu-west", "us-east"


def start(world: InProcess, region: str) -> list[WorkerThread]:
    return [world.sites[region].start(rank) for rank in (0, 1)]


def await_update(world: InProcess, region: str) -> Site:
    """Until the averager has the region's update, and waits for the other region's."""
    averager = world.averager
    assert averager is not None
    eventually(lambda: region in averager.state.waiting, f"the update of {region}")
    return world.sites[region]


@pytest.mark.parametrize("region", [WAITS, OTHER])
def test_an_update_is_made_where_the_bridge_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, region: str
) -> None:
    """In the memory that both see: there is no vector that it was copied from."""
    made: dict[int, list[int]] = {}
    outgoing = local_steps.outgoing

    def noted(state: RegionState, *, wait: bool = True) -> Outgoing:
        found = outgoing(state, wait=wait)
        made.setdefault(id(state), []).append(found.payload_P.data_ptr())
        return found

    monkeypatch.setattr(local_steps, "outgoing", noted)
    with InProcess(experiment_of(strategy=DILOCO), tmp_path) as world:
        workers = start(world, region)
        site = await_update(world, region)
        line = site.primary._line
        assert line is not None
        request, client = site.server.open_request, line.client
        assert request is not None and client is not None
        assert client.is_shared(request.update.payload_P)
        assert made[id(site.shards[0].state)] == [request.update.payload_P.data_ptr()]
        assert request.update.payload_P.any()
        buffer_P = site.primary._payload_buffer(request.update.payload_P.numel())
        assert not client.is_shared(buffer_P)  # the update is needed until it is answered
        workers += start(world, OTHER if region == WAITS else WAITS)
        for worker in workers:
            worker.result()
        assert len({site.digest for site in world.sites.values()}) == 1
        for site in world.sites.values():
            assert len(set(made[id(site.shards[0].state)])) == 1


def test_a_coded_update_is_not_made_where_uncoded_ones_lie(tmp_path: Path) -> None:
    """What is owed of it may be kept from its payload."""
    codec = {"up": {"kind": "int8"}}
    with InProcess(experiment_of(strategy=DILOCO, codec=codec), tmp_path) as world:
        first, second = world.run()
        assert first == second
        for site in world.sites.values():
            assert site.shards[0].state.allocate is torch.empty


@pytest.mark.parametrize("region", [WAITS, OTHER])
def test_a_checkpoint_holds_an_update_whose_place_its_answer_takes(
    tmp_path: Path, region: str
) -> None:
    with InProcess(experiment_of(strategy=DILOCO), tmp_path) as world:
        workers = start(world, region)
        site = await_update(world, region)
        (snapshot,) = site.primary._snapshot(1, halt=False)  # and its writer is slow
        request = site.server.open_request
        assert request is not None
        live_P = request.update.payload_P
        before_P, before_params_P = live_P.clone(), site.shards[0].params_S.clone()
        workers += start(world, OTHER if region == WAITS else WAITS)
        for worker in workers:
            worker.result()
        assert not torch.equal(live_P, before_P)
        (copy,) = snapshot.lazy.values()
        assert torch.equal(copy.whole(), before_P)
        tensors, _ = site.shards[0].take_snapshot(1)
        assert torch.equal(tensors["params"], before_params_P)


def test_a_region_reports_its_state_while_it_computes(tmp_path: Path) -> None:
    """A step of a large model takes seconds with the lock held; the controller asks meanwhile."""
    with InProcess(experiment_of(), tmp_path) as world, ThreadPoolExecutor(1) as pool:
        primary = world.sites[WAITS].primary
        with primary._changed:
            status = pool.submit(primary.status).result(WAIT_S)
        assert status["phase"] == "training" and status["failure"] is None
        world.run()
        assert primary.status()["phase"] == "done" and primary.status()["version"] == 6
