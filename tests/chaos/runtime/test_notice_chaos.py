"""A cloud takes a worker's machine back in mid-run: the notice's whole way, and no sample lost."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from test_train_faults import check_whole

from geo_ray.cloud.cluster.local_program import RayMachineProgram
from geo_ray.cloud.local import LocalCatalog, LocalOffer, LocalProvider, write_catalog
from geo_ray.cloud.provider import LaunchRequest, MachineState, Market
from geo_ray.experiment.cluster import LocalClusterConfig
from geo_ray.ray_cluster import ray_internals
from geo_ray.ray_cluster.labels import MACHINE_LABEL, REGION_LABEL
from geo_ray.ray_cluster.local_cluster import LocalCluster
from geo_ray.ray_cluster.settings import AUTH_TOKEN_PATH, driver_environment
from geo_ray.telemetry.events import Event
from tests.support.train_support import experiment_of, simulate, train

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]
WAIT_S = 240.0  # never reached
CLUSTER = "notice"


@pytest.fixture
def short_tmp() -> Iterator[Path]:
    """An empty directory with a short name; pytest's are too long for sockets."""
    path = Path(f"/tmp/gn{os.getpid()}")
    path.mkdir()
    yield path
    path.rmdir()  # fails if anything is left


def test_a_worker_leaves_the_machine_that_is_taken_back(short_tmp: Path, tmp_path: Path) -> None:
    experiment = experiment_of(
        tmp_path,
        strategy={"kind": "bsp"},
        regions=[{"name": "us-east", "workers": 2}],
        train={"steps": 60, "eval_every": 20, "elastic": {"min_workers": 1}},
        emulate={"step_s": 0.3},
        checkpoint={"every_s": 2.0},
    )
    offer = LocalOffer(region="us-east", type="small", market=Market.SPOT, usd_per_hour=0.1)
    root = tmp_path / "cloud"
    write_catalog(root, LocalCatalog(offers=(offer,), owner_pid=os.getpid()))
    noticed: list[str] = []

    def take_one_back(event: Event) -> None:
        if event.kind != "step" or event["step"] != 3 or noticed:
            return
        machines = {
            node["NodeID"]: node["Labels"][MACHINE_LABEL]
            for node in ray_internals.nodes()
            if MACHINE_LABEL in node["Labels"]
        }
        free = {node: each.get("CPU", 0.0) for node, each in ray_internals.free_resources().items()}
        # the server takes half of its own machine
        noticed.append(machines[min(machines, key=lambda node: free.get(node, 0.0))])
        provider.preempt(noticed[0], notice_s=8)

    with (
        LocalCluster(LocalClusterConfig(temp_dir=str(short_tmp)), []) as cluster,
        driver_environment(cluster.environment | {"RAY_ADDRESS": cluster.address}),
    ):
        program = RayMachineProgram(cluster.address, Path(cluster.environment[AUTH_TOKEN_PATH]))
        provider = LocalProvider(root, program)
        wanted = LaunchRequest("r", CLUSTER, offer.pool, 3, {REGION_LABEL: "us-east"})
        assert list(provider.launch(wanted)) == []
        try:
            wait_for_nodes(cluster.address, 3)
            done = train(experiment, tmp_path, sink=take_one_back)
        finally:
            provider.terminate([m.id for m in provider.list_machines(CLUSTER)])
            wait_for_the_end(provider)
    check_whole(done, simulate(experiment, tmp_path))
    assert noticed and len(done.of("worker_left")) == 1
    assert not done.of("worker_lost")
    assert done.of("active_workers")[0]["workers"] == 1


def wait_for_nodes(address: str, count: int) -> None:
    ray.init(address, log_to_driver=False)
    try:
        deadline = time.monotonic() + WAIT_S
        while sum(MACHINE_LABEL in node["Labels"] for node in ray_internals.nodes()) < count:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        ray.shutdown()


def wait_for_the_end(provider: LocalProvider) -> None:
    deadline = time.monotonic() + WAIT_S
    while any(m.state is not MachineState.ENDED for m in provider.list_machines(CLUSTER)):
        assert time.monotonic() < deadline
        time.sleep(0.1)
