"""The autoscaler on a real Ray cluster, with machines that are nodes of it."""

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

from geo_ray.autoscale.config import AutoscaleConfig, CalmConfig, RetryConfig
from geo_ray.autoscale.status import actions_text
from geo_ray.autoscale.target import ClusterTarget, MachineKind, RegionTarget
from geo_ray.lease.local_store import LocalConditionalStore
from geo_ray.providers.base import Machine, MachineState, Market, Pool
from geo_ray.providers.local.catalog import LocalCatalog, LocalOffer, write_catalog
from geo_ray.providers.local.node import RayMachineProgram
from geo_ray.providers.local.provider import LocalProvider
from geo_ray.runtime.autoscaler.actor import AutoscaleOrder, start_autoscaler
from geo_ray.runtime.autoscaler.ray_nodes import RayNodes
from geo_ray.runtime.cluster import ray_private
from geo_ray.runtime.cluster.connect import ConnectedCluster
from geo_ray.runtime.cluster.labels import MACHINE_LABEL, REGION_LABEL

LONGEST_S = 300.0


def until(what: Callable[[], object], longest_s: float = LONGEST_S) -> None:
    deadline_s = time.monotonic() + longest_s
    while not what():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.1)


def small_target(region: str, rows_per_s: float = 20.0) -> ClusterTarget:
    kind = MachineKind("small", 10.0, 4)
    return ClusterTarget((RegionTarget(region, "here", rows_per_s, (kind,), None, (None,), 0),))


def test_what_waits_for_a_place_is_counted_in_machines(connected: ConnectedCluster) -> None:
    region = f"mars-{secrets.token_hex(2)}"
    selector = {REGION_LABEL: region}
    group = placement_group(
        [{"CPU": 2.0}] * 3, strategy="PACK", bundle_label_selector=[selector] * 3
    )
    apart = placement_group(
        [{"CPU": 1.0}] * 2, strategy="STRICT_SPREAD", bundle_label_selector=[selector] * 2
    )
    nodes = RayNodes({"small": {"CPU": 4.0}}, small_target(region))
    until(lambda: nodes.pending() == {region: 3})  # one of the two that must be apart
    remove_placement_group(apart)
    until(lambda: nodes.pending() == {region: 2})
    remove_placement_group(group)
    until(lambda: not nodes.pending())


def test_nodes_are_busy_while_anything_is_reserved(connected: ConnectedCluster) -> None:
    node = next(n for n in ray_private.nodes() if n["Alive"] and n["Resources"].get("CPU"))
    region = node["Labels"][REGION_LABEL]
    pool = Pool("here", None, "small", Market.SPOT)
    address = node["NodeManagerAddress"]
    labels = {REGION_LABEL: region}
    machine = Machine("m", "r", pool, MachineState.RUNNING, 0.0, address, labels)
    nodes = RayNodes()
    until(lambda: not nodes.seen([machine])["m"].is_busy)
    selector = [{REGION_LABEL: region}]
    group = placement_group([{"CPU": 1.0}], bundle_label_selector=selector)
    until(lambda: nodes.seen([machine])["m"].is_busy)
    remove_placement_group(group)
    until(lambda: not nodes.seen([machine])["m"].is_busy)
    elsewhere = Machine("m", "r", pool, MachineState.RUNNING, 0.0, address, {REGION_LABEL: "venus"})
    assert nodes.seen([elsewhere]) == {}
    assert ray_private.drain_node("ff" * 28, "nobody", 0) in (True, False)


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


def living(provider: LocalProvider) -> list[str]:
    found = provider.list_machines("actor")
    return sorted(m.id for m in found if m.state in (MachineState.PENDING, MachineState.RUNNING))


@pytest.mark.timeout(900)
def test_machines_come_are_replaced_and_end_whatever_becomes_of_the_autoscaler(
    connected: ConnectedCluster, provider: LocalProvider, tmp_path: Path
) -> None:
    region = f"mars-{secrets.token_hex(2)}"
    (tmp_path / "journal").mkdir()
    config = AutoscaleConfig(
        every_s=1.0,
        floor="none",
        start_s=5.0,
        drain_s=5.0,
        calm=CalmConfig(idle_s=1.0),
        retry=RetryConfig(missing_s=5.0),
    )
    order = AutoscaleOrder(
        "actor",
        provider,
        LocalConditionalStore(tmp_path / "journal"),
        config,
        small_target(region),
    )
    actor: Any = start_autoscaler(order, connected.namespace)

    def status() -> Any:
        return ray.get(actor.status.remote(), timeout=LONGEST_S)

    def nodes() -> list[str]:
        return sorted(
            n["NodeID"]
            for n in ray_private.nodes()
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
    assert status().usd_per_hour == pytest.approx(0.6)

    ray.kill(actor, no_restart=False)
    provider.preempt(first[0], notice_s=8.0)
    until(lambda: first[0] not in living(provider) and len(living(provider)) == 2)
    until(lambda: len(nodes()) == 2)
    assert first[1] in living(provider)
    # What the agent of a machine does, whose cloud has told it alone.
    gone_s = time.time() + LONGEST_S
    drained = ray_private.drain_nodes_labelled(
        connected.address, MACHINE_LABEL, first[1], gone_s, "the cloud takes it back", 10.0
    )
    assert len(drained) == 1
    until(lambda: first[1] not in living(provider) and len(living(provider)) == 2, LONGEST_S / 2)

    remove_placement_group(group)
    ray.get(actor.release.remote(), timeout=LONGEST_S)
    until(lambda: not living(provider))
    assert sum(row.paid_usd for _, _, row in status().spend) > 0
    ray.kill(actor)
