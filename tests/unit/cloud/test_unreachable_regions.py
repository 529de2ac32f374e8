"""Ending a cluster with unreachable regions: the others end, and the rest is reported."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from geo_ray.base.errors import ClusterNameTakenError, RegionsUnreachableError
from geo_ray.base.load import load_tree, override_items
from geo_ray.cloud.autoscaler.journal import Journal
from geo_ray.cloud.autoscaler.observation import Observed
from geo_ray.cloud.autoscaler.policy import AutoscalePolicy
from geo_ray.cloud.autoscaler.state import AutoscalerState
from geo_ray.cloud.autoscaler.target import ClusterTarget, MachineKind, RegionTarget
from geo_ray.cloud.backtest.simulated_cloud import SimulatedCloud, forever
from geo_ray.cloud.cluster import down, providers
from geo_ray.cloud.cluster.head import find_head, head_request
from geo_ray.cloud.cluster.providers import ClusterMachines, RemoteProvider, check_name_is_free
from geo_ray.cloud.cluster.spec import cluster_spec
from geo_ray.cloud.provider import Availability, LaunchRequest, Market, Pool
from geo_ray.experiment.autoscale import AutoscaleConfig
from geo_ray.experiment.experiment import Experiment
from geo_ray.prices.price_book import bundled_book
from geo_ray.runs.planning import Sources, make_plan

CONFIG = Path(__file__).resolve().parents[3] / "configs" / "cluster_local.yaml"
FAR = Pool("far", None, "small", Market.SPOT)
NEAR = Pool("near", None, "small", Market.SPOT)


class Scene:
    """A cluster with a running head, in a simulated cloud."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing_s: float) -> None:
        items = override_items({
            "provider.state": str(tmp_path), "autoscale.retry.missing_s": missing_s
        })  # fmt: skip
        experiment = load_tree(CONFIG, items, Experiment)
        plan = make_plan(experiment, CONFIG.parent, "optimal", Sources()).plan
        found = cluster_spec(experiment, plan, bundled_book(), "local", time.time())
        self.record, self.state = found.record, found.state
        self.state.make()
        self.state.write(self.record, None)
        markets = {pool: forever(0.3) for pool in (FAR, NEAR, self.record.head.pool)}
        self.cloud = SimulatedCloud(markets, time.time)
        self.mine = ClusterMachines(self.cloud, self.record.id)
        monkeypatch.setattr(down, "open_clouds", lambda *_: self.mine)
        self.mine.launch(head_request(self.record))


def test_down_ends_what_answers_and_then_says_that_it_is_not_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(tmp_path, monkeypatch, 90.0)
    record, state, cloud, mine = scene.record, scene.state, scene.cloud, scene.mine
    mine.launch(LaunchRequest("one", record.name, FAR, 2))
    mine.launch(LaunchRequest("two", record.name, NEAR, 3))
    ClusterMachines(cloud, "ffffffffff").launch(LaunchRequest("three", record.name, NEAR, 1))
    cloud.unreachable = {FAR.region}
    with pytest.raises(RegionsUnreachableError, match="far"):
        down.end_cluster(state, lambda _: None, at_once=True)
    left = [each.machine for each in cloud.alive()]
    assert [each.pool for each in left if each.cluster_id == record.id] == [FAR, FAR]
    with pytest.raises(ClusterNameTakenError, match="ffffffffff"):
        check_name_is_free(cloud, record.name, record.id, state.shown)
    assert state.known().phase == "ending"
    cloud.unreachable = set()
    ended = down.end_cluster(state, lambda _: None, at_once=True)
    assert ended.machines == 6
    assert [each.machine.cluster_id for each in cloud.alive()] == ["ffffffffff"]
    assert state.known().phase == "down"


def test_an_autoscaler_ends_machines_and_learns_where_the_head_is_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(tmp_path, monkeypatch, 3.0)
    addresses: list[str | None] = []

    def opened(_: object, __: object, address: str | None = None, longest_s: float = 0.0) -> Any:
        addresses.append(address)
        return scene.mine

    monkeypatch.setattr(providers, "open_clouds", opened)
    provider = RemoteProvider(scene.state, scene.record.made)
    home = scene.record.head.pool
    scene.cloud.unreachable = {home.region}
    scene.mine.launch(LaunchRequest("one", scene.record.name, NEAR, 1))
    (one,) = [each.machine for each in scene.cloud.alive() if each.machine.pool == NEAR]
    provider.terminate([one.id])
    assert [each.machine.pool for each in scene.cloud.alive()] == [home]
    with pytest.raises(RegionsUnreachableError):
        provider.launch(LaunchRequest("two", scene.record.name, NEAR, 1))
    scene.cloud.unreachable = set()
    monkeypatch.setattr(providers, "find_head", lambda *_: None)  # not listed yet
    provider.launch(LaunchRequest("three", scene.record.name, NEAR, 1))
    monkeypatch.setattr(providers, "find_head", find_head)
    monkeypatch.setattr(providers, "head_address", lambda *_: "10.0.0.2:6379")
    for name in ("four", "five"):
        provider.launch(LaunchRequest(name, scene.record.name, NEAR, 1))
    assert addresses == [None, "10.0.0.2:6379"]


@pytest.mark.parametrize("sent_s_ago", [0.0, 1.0])
def test_down_waits_for_what_was_called_off_and_may_still_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent_s_ago: float
) -> None:
    scene = Scene(tmp_path, monkeypatch, 3.0)
    journal = Journal(scene.state.store(), 1)
    memory = journal.read().copied()
    memory.withdrawn["late"] = time.time() - sent_s_ago
    journal.write(memory)
    said: list[str] = []

    def tell(text: str) -> None:
        said.append(text)
        if text.startswith("waiting"):  # the cloud lists it only now
            scene.mine.launch(LaunchRequest("late", scene.record.name, NEAR, 2))

    down.end_cluster(scene.state, tell, at_once=True)
    assert not scene.cloud.alive() and any(text.startswith("waiting") for text in said)


def test_down_waits_for_nothing_that_was_called_off_long_ago(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(tmp_path, monkeypatch, 3.0)
    journal = Journal(scene.state.store(), 1)
    memory = journal.read().copied()
    memory.withdrawn["early"] = time.time() - 4.0
    journal.write(memory)
    said: list[str] = []
    down.end_cluster(scene.state, said.append, at_once=True)
    assert not any(text.startswith("waiting") for text in said)


def test_what_is_called_off_is_remembered_for_as_long_as_a_cloud_may_hide_it() -> None:
    """The policy, from the first launch of a plan to its release."""
    config = AutoscaleConfig()
    kind = MachineKind(NEAR.type, 1.0, 2, markets=(Market.SPOT,))
    target = ClusterTarget((RegionTarget("near", "near", 2.0, (kind,), floor=0),))
    policy = AutoscalePolicy(config, "demo")
    availabilities = {NEAR: Availability(NEAR, 0.3)}
    seen = Observed(1000.0, (), availabilities=availabilities, left_s=5000.0)
    decided = policy.decide(target, AutoscalerState(token=1), seen)
    (asked,) = decided.memory.pending_launches
    over = replace(seen, now_unix_s=1010.0, left_s=0.0, is_released=True)
    decided = policy.decide(target, decided.memory, over)
    assert not decided.memory.pending_launches and decided.memory.withdrawn == {asked: 1000.0}
    later = replace(over, now_unix_s=1000.0 + config.retry.missing_s)
    assert not policy.decide(target, decided.memory, later).memory.withdrawn


def test_down_ends_reachable_machines_if_the_state_of_the_head_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(down, "_SILENT_S", 0.5)
    scene = Scene(tmp_path, monkeypatch, 3.0)
    scene.mine.launch(LaunchRequest("two", scene.record.name, NEAR, 3))
    home = scene.record.head.pool
    scene.cloud.unreachable = {home.region}
    said: list[str] = []
    with pytest.raises(RegionsUnreachableError, match=home.region):
        down.end_cluster(scene.state, said.append)
    assert [each.machine.pool for each in scene.cloud.alive()] == [home]
    assert any("the head has not reported" in text for text in said)
    scene.cloud.unreachable = set()
    down.end_cluster(scene.state, said.append)
    assert not scene.cloud.alive()
