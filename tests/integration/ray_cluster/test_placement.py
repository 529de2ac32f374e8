"""Placement and preflight on a real cluster of three regions with 8 CPUs each."""

from __future__ import annotations

import time

import pytest
import ray

from geo_ray.base.errors import PlacementError, PreflightError
from geo_ray.ray_cluster.connect import ConnectedCluster
from geo_ray.ray_cluster.demand import Bundle, RegionDemand
from geo_ray.ray_cluster.labels import REGION_LABEL
from geo_ray.ray_cluster.placement import place, remove
from geo_ray.ray_cluster.preflight import preflight, versions


def demand(region: str, workers: int = 1, cpus: float = 1.0, gpus: float = 0.0) -> RegionDemand:
    worker = Bundle("worker", cpus, gpus)
    return RegionDemand(region, (Bundle("ps", 0.5), Bundle("bridge", 0), *[worker] * workers))


@ray.remote(num_cpus=0.5)
class Here:
    def region(self) -> str:
        return ray.get_runtime_context().get_node_labels()[REGION_LABEL]


def test_processes_land_in_their_regions(connected: ConnectedCluster) -> None:
    placed = place([demand(region, 2) for region in connected.regions], timeout_s=30)
    assert list(placed) == list(connected.regions)
    last = connected.regions[-1]
    actor = Here.options(scheduling_strategy=placed[last].strategy("worker", 1)).remote()
    assert ray.get(actor.region.remote(), timeout=60) == last
    remove(placed)
    remove(placed)  # harmless
    with pytest.raises(ray.exceptions.RayError):  # it is killed when Ray comes to it
        for _ in range(600):
            ray.get(actor.region.remote(), timeout=60)
            time.sleep(0.1)


def test_unknown_region(connected: ConnectedCluster) -> None:
    with pytest.raises(PlacementError) as caught:
        place([demand(connected.regions[0]), demand("mars")], timeout_s=1)
    assert "region 'mars' asks for" in caught.value.message
    assert "INFEASIBLE" in caught.value.message
    assert "'us-east'" in caught.value.message  # what exists
    assert "region 'us-east' asks for" not in caught.value.message  # that one was placed


def test_no_room_left_and_nothing_stays_reserved(connected: ConnectedCluster) -> None:
    first, second, third = connected.regions
    with pytest.raises(PlacementError) as caught:
        place([demand(first, 7), demand(second, 8), demand(third, 7)], timeout_s=1)
    assert f"region '{second}' asks for" in caught.value.message
    assert "free of 8 CPU" in caught.value.message
    placed = place([demand(region, 7) for region in connected.regions], timeout_s=30)
    remove(placed)


def test_preflight_passes(connected: ConnectedCluster) -> None:
    facts = preflight([demand(region, 7) for region in connected.regions], ask_nodes=True)
    assert facts.regions() == tuple(sorted(connected.regions))
    asked = [facts.of_region(region)[0] for region in connected.regions]
    assert [node.versions for node in asked] == [versions()] * 3
    assert [node.fault for node in asked] == [None] * 3
    assert facts.auth_mode == "token"


def test_preflight_lists_every_problem(connected: ConnectedCluster) -> None:
    bad = [demand("eu-wst"), demand("us-east", 8), demand("ap-south", gpus=1.0)]
    with pytest.raises(PreflightError) as caught:
        preflight(bad, ask_nodes=False)
    message = caught.value.message
    assert "1. no node is in region 'eu-wst'" in message
    assert "did you mean 'eu-west'?" in message
    assert "2. region 'us-east' asks for 8.501 CPU, its 1 node(s) have 8 CPU" in message
    assert "3. region 'ap-south' asks for 1 GPU" in message
