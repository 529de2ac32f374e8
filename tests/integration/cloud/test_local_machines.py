"""Local machines join a real Ray cluster, receive notices, and leave no processes."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray

from geo_ray.cloud.cluster.local_program import RayMachineProgram
from geo_ray.cloud.local import LocalCatalog, LocalOffer, LocalProvider, write_catalog
from geo_ray.cloud.provider import LaunchRequest, MachineState, Market, Pool
from geo_ray.experiment.cluster import LocalClusterConfig
from geo_ray.ray_cluster import ray_internals
from geo_ray.ray_cluster.labels import MACHINE_LABEL, REGION_LABEL, on_node
from geo_ray.ray_cluster.local_cluster import LocalCluster
from geo_ray.ray_cluster.settings import AUTH_TOKEN_PATH, driver_environment

pytestmark = pytest.mark.timeout(900)  # nodes take long to start beside other work
WAIT_S = 240.0  # never reached
POOL = Pool("north", None, "small", Market.SPOT)


@ray.remote(num_cpus=1)
class Busy:
    def works(self) -> bool:
        return True


def eventually(found: Callable[[], Any], what: Callable[[], str] = str) -> Any:
    deadline = time.monotonic() + WAIT_S
    while not (value := found()):
        assert time.monotonic() < deadline, what()
        time.sleep(0.1)
    return value


def test_machines_join_are_drained_by_their_agents_and_die(tmp_path: Path) -> None:
    root = tmp_path / "cloud"
    offer = LocalOffer(region="north", type="small", market=Market.SPOT, usd_per_hour=0.3)
    catalog = LocalCatalog(offers=(offer,), cpus={"small": 3}, owner_pid=os.getpid())
    write_catalog(root, catalog)
    with tempfile.TemporaryDirectory(prefix="gr", dir="/tmp") as base:
        config = LocalClusterConfig(temp_dir=base)
        with (
            LocalCluster(config, []) as cluster,
            driver_environment(cluster.environment),
        ):
            token = Path(cluster.environment[AUTH_TOKEN_PATH])
            provider = LocalProvider(root, RayMachineProgram(cluster.address, token))
            ray.init(cluster.address, log_to_driver=False)
            try:
                check_life(provider)
            finally:
                ray.shutdown()
                provider.terminate([m.id for m in provider.list_machines("demo")])
    eventually(
        lambda: all(m.state is MachineState.ENDED for m in provider.list_machines("demo")),
        lambda: str(provider.list_machines("demo")),
    )
    token_files = [path for path in root.rglob("*") if path.is_file()]
    assert not any(b"RAY_AUTH_TOKEN=" in path.read_bytes() for path in token_files)


def check_life(provider: LocalProvider) -> None:
    wanted = LaunchRequest("r", "demo", POOL, 2, {REGION_LABEL: "north"})
    assert list(provider.launch(wanted)) == []

    def nodes() -> dict[str, dict[str, Any]]:
        return {
            node["Labels"][MACHINE_LABEL]: node
            for node in ray_internals.nodes()
            if node["Alive"] and MACHINE_LABEL in node["Labels"]
        }

    def logs() -> str:
        return "\n".join(str(provider.logs(m.id)) for m in provider.list_machines("demo"))

    joined = eventually(lambda: nodes() if len(nodes()) == 2 else None, logs)
    first, second = provider.list_machines("demo")
    assert set(joined) == {first.id, second.id}
    assert joined[first.id]["NodeManagerAddress"] == first.address
    assert joined[first.id]["Labels"][REGION_LABEL] == "north"
    assert joined[first.id]["Resources"]["CPU"] == 3.0

    busy = Busy.options(label_selector=on_node(joined[first.id]["NodeID"])).remote()
    assert ray.get(busy.works.remote(), timeout=WAIT_S)  # an idle node would go at once
    provider.preempt(first.id, notice_s=60)
    began = time.monotonic()
    draining = eventually(ray_internals.draining_nodes, logs)
    print(f"from the notice to drained: {time.monotonic() - began:.2f} s")
    assert ray.get(busy.works.remote(), timeout=WAIT_S), "Ray ends nothing that runs there"
    assert set(draining) == {joined[first.id]["NodeID"]}
    assert draining[joined[first.id]["NodeID"]] == pytest.approx(
        next(m.ends_unix_s for m in provider.list_machines("demo") if m.id == first.id) * 1000,
        abs=1000,
    )
    provider.preempt(second.id, notice_s=0)  # a power cut
    eventually(lambda: second.id not in nodes(), logs)
