"""The autoscaler on a real Ray cluster whose nodes are its machines."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from geo_ray.cloud.autoscaler.actions import actions_text
from geo_ray.cloud.autoscaler.actor import (
    AutoscaleOrder,
    RayNodes,
    find_autoscaler,
    start_autoscaler,
)
from geo_ray.cloud.autoscaler.journal import JOURNAL_KEY
from geo_ray.cloud.autoscaler.observation import LabelWanted, PendingGroup
from geo_ray.cloud.autoscaler.state import decode_memory
from geo_ray.cloud.autoscaler.target import ClusterTarget, MachineKind, RegionTarget
from geo_ray.cloud.cluster.local_program import RayMachineProgram
from geo_ray.cloud.local import LocalCatalog, LocalOffer, LocalProvider, write_catalog
from geo_ray.cloud.provider import Machine, MachineState, Market, Pool
from geo_ray.experiment.autoscale import AutoscaleConfig, CalmConfig, RetryConfig
from geo_ray.ray_cluster import ray_internals
from geo_ray.ray_cluster.connect import ConnectedCluster
from geo_ray.ray_cluster.labels import MACHINE_LABEL, REGION_LABEL
from geo_ray.storage.conditional_store import LocalConditionalStore

LONGEST_S = 300.0


def answer(method: Any, *arguments: Any) -> Any:
    """Call a method of an actor that may be restarting."""
    deadline_s = time.monotonic() + LONGEST_S
    while True:
        try:
            return ray.get(method.remote(*arguments), timeout=LONGEST_S)
        except ray.exceptions.ActorUnavailableError:
            assert time.monotonic() < deadline_s
            time.sleep(0.1)


def until(what: Callable[[], object], longest_s: float = LONGEST_S) -> None:
    deadline_s = time.monotonic() + longest_s
    while not what():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.1)


def idler(region: str) -> Any:
    """Start an actor in a region that reserves no resources."""

    class Idler:  # in here, so that it goes to the node by value
        def there(self) -> bool:
            return True

    made: Any = ray.remote(num_cpus=0)(Idler)
    started = made.options(label_selector={REGION_LABEL: region}).remote()
    assert ray.get(started.there.remote(), timeout=LONGEST_S)
    return started


def small_target(region: str, rows_per_s: float = 20.0) -> ClusterTarget:
    kind = MachineKind("small", 10.0, 4)
    return ClusterTarget((RegionTarget(region, "here", rows_per_s, (kind,), None, (None,), 0),))


@pytest.mark.parametrize("strategy", ["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"])
def test_pending_demand_is_reported_as_requested(
    connected: ConnectedCluster, strategy: Any
) -> None:
    region = f"mars-{secrets.token_hex(2)}"
    selector = {REGION_LABEL: region, "disk": "!in(slow,none)"}
    group = placement_group(
        [{"CPU": 2.0}, {"CPU": 1.0, "GPU": 1.0}],
        strategy=strategy,
        bundle_label_selector=[selector] * 2,
    )
    nodes = RayNodes()

    def mine() -> list[PendingGroup]:
        return [each for each in nodes.pending() if each.bundles[0].regions() == {region}]

    until(mine)
    (found,) = mine()
    labels = {LabelWanted(REGION_LABEL, (region,)), LabelWanted("disk", ("none", "slow"), False)}
    assert found.strategy == strategy
    assert [dict(each.resources) for each in found.bundles] == [
        {"CPU": 2.0},
        {"CPU": 1.0, "GPU": 1.0},
    ]
    assert all(set(each.labels) == labels for each in found.bundles)
    remove_placement_group(group)
    until(lambda: not mine())


def test_tasks_wait_each_for_itself_and_those_of_a_group_for_their_group(
    connected: ConnectedCluster,
) -> None:
    region = f"mars-{secrets.token_hex(2)}"
    place: Any = ray.remote(num_cpus=3)(lambda: None)
    asked = [place.options(label_selector={REGION_LABEL: region}).remote() for _ in range(5)]
    node = f"{'0' * 55}1"
    given = place.options(label_selector={"ray.io/node-id": node}).remote()
    group = placement_group([{"CPU": 0.01}])
    assert group.wait(LONGEST_S)
    inside = place.options(
        num_cpus=0.01,
        scheduling_strategy=PlacementGroupSchedulingStrategy(group),
        runtime_env={"env_vars": {"A": "1"}},
    )
    busy = [inside.remote() for _ in range(2)]
    nodes = RayNodes()

    def counts() -> list[tuple[str, int]]:
        return [
            (each.strategy, bundle.count)
            for each in nodes.pending()
            for bundle in each.bundles
            if bundle.regions() == {region}
        ]

    until(lambda: counts() == [("independent", 5)])
    told = nodes.pending()
    assert not any("_group_" in name for each in told for b in each.bundles for name in b.resources)
    assert not any(w.values == (node,) for each in told for b in each.bundles for w in b.labels)
    for each in (*asked, given):
        ray.cancel(each, force=True)
    ray.get(busy, timeout=LONGEST_S)
    remove_placement_group(group)


def test_nodes_are_busy_while_anything_is_reserved(connected: ConnectedCluster) -> None:
    node = next(n for n in ray_internals.nodes() if n["Alive"] and n["Resources"].get("CPU"))
    region = node["Labels"][REGION_LABEL]
    pool = Pool("here", None, "small", Market.SPOT)
    address = node["NodeManagerAddress"]
    labels = {REGION_LABEL: region}
    machine = Machine("m", "r", pool, MachineState.RUNNING, 0.0, address, labels)
    nodes = RayNodes()
    until(lambda: not nodes.observe([machine])["m"].is_busy)
    selector = [{REGION_LABEL: region}]
    group = placement_group([{"CPU": 1.0}], bundle_label_selector=selector)
    until(lambda: nodes.observe([machine])["m"].is_busy)
    remove_placement_group(group)
    until(lambda: not nodes.observe([machine])["m"].is_busy)
    assert nodes.observe([machine])["m"].resources["CPU"] == node["Resources"]["CPU"]
    waiter = idler(region)
    until(lambda: nodes.observe([machine])["m"].is_busy)
    assert not nodes.end_idle(machine, "idle")
    ray.kill(waiter)
    until(lambda: not nodes.observe([machine])["m"].is_busy)
    elsewhere = Machine("m", "r", pool, MachineState.RUNNING, 0.0, address, {REGION_LABEL: "venus"})
    assert nodes.observe([elsewhere]) == {}
    assert nodes.end_idle(elsewhere, "it has no node")
    assert ray_internals.drain_node("ff" * 28, "nobody", 0) in (True, False)


@pytest.fixture
def provider(connected: ConnectedCluster, tmp_path: Path) -> Iterator[LocalProvider]:
    root = tmp_path / "cloud"
    offers = tuple(
        LocalOffer(region="here", type="small", market=market, usd_per_hour=usd)
        for market, usd in ((Market.SPOT, 0.3), (Market.ON_DEMAND, 1.0))
    )
    catalog = LocalCatalog(offers=offers, cpus={"small": 2}, owner_pid=os.getpid())
    write_catalog(root, catalog)
    token = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
    made = LocalProvider(root, RayMachineProgram(connected.address, token, agent=False))
    yield made
    made.terminate([m.id for m in made.list_machines("actor")])
    until(lambda: not living(made))
    # The cluster is shared with other tests, which count its nodes.
    until(
        lambda: (
            not [n for n in ray_internals.nodes() if n["Alive"] and MACHINE_LABEL in n["Labels"]]
        )
    )


@pytest.fixture
def started(provider: LocalProvider) -> Iterator[Callable[[AutoscaleOrder, str], Any]]:
    """Start an autoscaler that ends with the test."""
    actors: list[Any] = []

    def start(order: AutoscaleOrder, namespace: str) -> Any:
        actors.append(start_autoscaler(order, namespace))
        return actors[-1]

    yield start
    for actor in actors:
        ray.kill(actor)


def living(provider: LocalProvider) -> list[str]:
    found = provider.list_machines("actor")
    return sorted(m.id for m in found if m.state in (MachineState.PENDING, MachineState.RUNNING))


@pytest.mark.timeout(900)
def test_machines_come_are_replaced_and_end_whatever_becomes_of_the_autoscaler(
    connected: ConnectedCluster, provider: LocalProvider, tmp_path: Path, started: Any
) -> None:
    region = f"mars-{secrets.token_hex(2)}"
    (tmp_path / "journal").mkdir()
    config = AutoscaleConfig(
        every_s=1.0,
        floor="none",
        start_s=5.0,
        drain_s=5.0,
        calm=CalmConfig(idle_s=1.0),
        retry=RetryConfig(missing_s=60.0),
    )
    order = AutoscaleOrder(
        "actor",
        provider,
        LocalConditionalStore(tmp_path / "journal"),
        config,
        small_target(region),
        made=12,
    )
    actor: Any = started(order, connected.namespace)
    assert find_autoscaler("actor", connected.namespace) == actor
    with pytest.raises(ValueError, match="other has no autoscaler"):
        find_autoscaler("other", connected.namespace)

    def status() -> Any:
        return answer(actor.status)

    def nodes() -> list[str]:
        return sorted(
            n["NodeID"]
            for n in ray_internals.nodes()
            if n["Alive"] and n["Labels"].get(REGION_LABEL) == region
        )

    selector = [{REGION_LABEL: region}] * 2
    group = placement_group(
        [{"CPU": 1.0}] * 2, strategy="STRICT_SPREAD", bundle_label_selector=selector
    )
    assert group.wait(LONGEST_S)  # from no node at all
    first = living(provider)
    assert len(first) == len(nodes()) == 2
    text = "\n".join(actions_text(status().actions))
    assert "launch 2 x small spot" in text
    assert "1 USD/h" in text and "0.3 USD/h" in text
    assert status().usd_per_hour == pytest.approx(0.6), text

    ray.kill(actor, no_restart=False)
    provider.preempt(first[0], notice_s=8.0)
    until(lambda: first[0] not in living(provider) and len(living(provider)) == 2)
    until(lambda: len(nodes()) == 2)
    assert first[1] in living(provider)
    # What the agent of a machine does, whose cloud has told it alone.
    gone_s = time.time() + LONGEST_S
    drained = ray_internals.drain_nodes_labelled(
        connected.address, MACHINE_LABEL, first[1], gone_s, "the cloud reclaims it", 10.0
    )
    assert len(drained) == 1
    until(lambda: first[1] not in living(provider) and len(living(provider)) == 2, LONGEST_S / 2)

    answer(actor.follow, small_target(region, 30.0))
    ray.kill(actor, no_restart=False)
    until(lambda: len(living(provider)) == 3)

    remove_placement_group(group)
    answer(actor.release)
    ray.kill(actor, no_restart=False)
    until(lambda: not living(provider))
    assert sum(row.paid_usd for _, _, row in status().spend) > 0


@pytest.mark.timeout(900)
def test_without_a_plan_what_waits_rents_what_runs_stays_and_what_is_idle_ends(
    connected: ConnectedCluster, provider: LocalProvider, tmp_path: Path, started: Any
) -> None:
    region = f"mars-{secrets.token_hex(2)}"
    (tmp_path / "journal").mkdir()
    store = LocalConditionalStore(tmp_path / "journal")
    store.write(JOURNAL_KEY, b"{", None)
    config = AutoscaleConfig(
        every_s=1.0,
        floor="none",
        machine_resources={"small": {"CPU": 2.0}},
        start_s=5.0,
        drain_s=5.0,
        calm=CalmConfig(idle_s=2.0),
        retry=RetryConfig(missing_s=60.0),
    )
    order = AutoscaleOrder(
        "actor",
        provider,
        store,
        config,
        small_target(region, 0.0),
    )
    actor: Any = started(order, connected.namespace)
    selector = [{REGION_LABEL: region}]
    large = placement_group([{"CPU": 9.0}], bundle_label_selector=selector)
    apart = placement_group(
        [{"CPU": 0.5}] * 2, strategy="STRICT_SPREAD", bundle_label_selector=selector * 2
    )
    assert apart.wait(LONGEST_S)
    assert len(living(provider)) == 2
    status = ray.get(actor.status.remote(), timeout=LONGEST_S)
    assert any("the journal could not be read and is saved as" in each for each in status.errors)
    found = store.read(JOURNAL_KEY)
    assert found is not None
    assert set(decode_memory(found.data).instances) == set(living(provider))
    assert any("a bundle of 9 CPU" in note and "small with 2 CPU" in note for note in status.notes)

    # An actor that reserves nothing keeps one of the two; the other one ends.
    waiter = idler(region)
    assert ray.get(waiter.there.remote(), timeout=LONGEST_S)  # while it starts, nobody sees it
    remove_placement_group(apart)
    until(lambda: len(living(provider)) == 1)
    time.sleep(4 * config.every_s)
    assert len(living(provider)) == 1
    assert ray.get(waiter.there.remote(), timeout=LONGEST_S)
    ray.kill(waiter)
    until(lambda: not living(provider))
    remove_placement_group(large)
