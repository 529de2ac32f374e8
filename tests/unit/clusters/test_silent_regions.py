"""A cluster is taken down as far as its regions answer, and the rest is told."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from geo_ray.autoscale.replay.sim_cloud import SimulatedCloud, forever
from geo_ray.clouds.price_book import shipped_book
from geo_ray.clusters import down
from geo_ray.clusters.asked import asked_cluster
from geo_ray.clusters.head import head_request
from geo_ray.clusters.own_machines import OwnMachines, check_name_is_free
from geo_ray.config.experiment import Experiment
from geo_ray.config.load import load_tree
from geo_ray.config.source import override_items
from geo_ray.errors import ClusterNameTakenError, RegionsSilentError
from geo_ray.job.planning import Sources, make_plan
from geo_ray.providers.base import LaunchRequest, Market, Pool

CONFIG = Path(__file__).resolve().parents[3] / "configs" / "cluster_local.yaml"
FAR = Pool("far", None, "small", Market.SPOT)
NEAR = Pool("near", None, "small", Market.SPOT)


def test_down_ends_what_answers_and_then_says_that_it_is_not_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = override_items({"provider.state": str(tmp_path)})
    experiment = load_tree(CONFIG, items, Experiment)
    plan = make_plan(experiment, CONFIG.parent, "optimal", Sources()).plan
    found = asked_cluster(experiment, plan, shipped_book(), "local", time.time())
    record, state = found.record, found.state
    state.make()
    state.write(record, None)
    markets = {pool: forever(0.3) for pool in (FAR, NEAR, record.head.pool)}
    cloud = SimulatedCloud(markets, time.time)
    mine = OwnMachines(cloud, record.id)
    monkeypatch.setattr(down, "open_clouds", lambda *_: mine)
    mine.launch(head_request(record))
    mine.launch(LaunchRequest("one", record.name, FAR, 2))
    mine.launch(LaunchRequest("two", record.name, NEAR, 3))
    OwnMachines(cloud, "ffffffffff").launch(LaunchRequest("three", record.name, NEAR, 1))
    cloud.silent = {FAR.region}
    with pytest.raises(RegionsSilentError, match="far"):
        down.end_cluster(state, lambda _: None, at_once=True)
    left = [each.machine for each in cloud.alive()]
    assert [each.pool for each in left if each.cluster_id == record.id] == [FAR, FAR]
    with pytest.raises(ClusterNameTakenError, match="ffffffffff"):
        check_name_is_free(cloud, record.name, record.id, state.shown)
    assert state.known().phase == "ending"
    cloud.silent = set()
    ended = down.end_cluster(state, lambda _: None, at_once=True)
    assert ended.machines == 6
    assert [each.machine.cluster_id for each in cloud.alive()] == ["ffffffffff"]
    assert state.known().phase == "down"
