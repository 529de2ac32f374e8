"""Workers of a real run are killed; their region continues, and ends as if none had died."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray import _raylet
from ray.core.generated import autoscaler_pb2
from test_train_faults import actors, check_whole, final_digests, regions_node

from geo_ray.experiment.cluster import LocalClusterConfig
from geo_ray.ray_cluster import ray_internals
from geo_ray.ray_cluster.labels import REGION_LABEL
from geo_ray.ray_cluster.local_cluster import LocalCluster
from geo_ray.ray_cluster.settings import driver_environment
from geo_ray.telemetry.events import Event
from tests.support.train_support import experiment_of, simulate, train

pytestmark = pytest.mark.timeout(900)
STEPS = 70


@pytest.fixture
def short_tmp() -> Iterator[Path]:
    """An empty directory with a short name; pytest's are too long for sockets."""
    path = Path(f"/tmp/gw{os.getpid()}")
    path.mkdir()
    yield path
    path.rmdir()  # fails if anything is left


@pytest.mark.slow
def test_one_is_killed_and_comes_back_another_is_killed_for_good(
    ray_cluster: LocalCluster, tmp_path: Path
) -> None:
    experiment = experiment_of(
        tmp_path,
        strategy={"kind": "bsp"},
        regions=[{"name": "us-east", "workers": 2}, {"name": "eu-west"}],
        train={
            "steps": STEPS,
            "eval_every": 20,
            "step_timeout_s": 60,
            "elastic": {"min_workers": 1},
            "max_worker_restarts": 1,
            "restart_window_s": None,
        },
        emulate={"step_s": 0.3},
        checkpoint={"every_s": 2.0},
    )
    killed: list[int] = []
    first: list[int] = []

    def kill_twice(event: Event) -> None:
        node = regions_node(ray_cluster, "us-east")
        if event.kind == "step" and event["step"] == 3 and not killed:
            first.extend(actors(node, "WorkerActor"))
            killed.append(first[0])
            os.kill(first[0], signal.SIGKILL)
        # The one before is back: now the other one of the start.
        if event.kind == "active_workers" and event["workers"] == 2 and len(killed) == 1:
            killed.append(first[1])
            os.kill(first[1], signal.SIGKILL)

    done = train(experiment, tmp_path, sink=kill_twice)
    assert len(killed) == 2, "the replacement came too late for this test"
    check_whole(done, simulate(experiment, tmp_path))
    lost = [event["worker"] for event in done.of("worker_lost")]
    (replaced,) = done.of("worker_replaced")
    assert sorted(lost) == [0, 1] and replaced["worker"] == lost[0] and replaced["attempt"] == 2
    assert [event["workers"] for event in done.of("active_workers")] == [1, 2, 1]
    thin, whole, last = (event["step"] for event in done.of("active_workers"))
    assert thin < whole <= last < STEPS, "steps went on meanwhile"
    assert {e["samples"] for e in done.of("step") if e["region"] == "us-east"} == {32}


@pytest.mark.slow
def test_a_killed_worker_with_the_optimizer_is_replaced_and_nothing_changes(
    ray_cluster: LocalCluster, tmp_path: Path
) -> None:
    experiment = experiment_of(
        tmp_path,
        strategy={"kind": "sma", "interval": 10},
        optimizer={"kind": "adamw", "lr": 0.003},
        regions=[{"name": "us-east"}, {"name": "eu-west"}],
        train={"steps": 40, "eval_every": 20, "optimizer_on": "worker"},
        emulate={"step_s": 0.3},
        checkpoint={"every_s": 2.0},
    )
    killed: list[int] = []

    def kill_at_step_15(event: Event) -> None:
        if event.kind == "step" and event["step"] == 15 and not killed:
            killed.append(actors(regions_node(ray_cluster, "us-east"), "WorkerActor")[0])
            os.kill(killed[0], signal.SIGKILL)

    done = train(experiment, tmp_path, sink=kill_at_step_15)
    on_server = {"train": experiment.train.model_copy(update={"optimizer_on": "server"})}
    check_whole(done, simulate(experiment.model_copy(update=on_server), tmp_path))
    (replaced,) = done.of("worker_replaced")
    assert replaced["attempt"] == 2 and len(done.of("checkpoint")) > 2


@pytest.mark.slow
def test_others_continue_without_a_killed_worker_with_its_optimizer(
    ray_cluster: LocalCluster, tmp_path: Path
) -> None:
    experiment = experiment_of(
        tmp_path,
        strategy={"kind": "diloco", "interval": 10},
        optimizer={"kind": "adamw", "lr": 0.003},
        regions=[{"name": "us-east", "workers": 2}, {"name": "eu-west"}],
        train={"steps": STEPS, "eval_every": 20, "optimizer_on": "worker"},
        emulate={"step_s": 0.3},
        checkpoint={"every_s": 2.0},
    )
    killed: list[int] = []

    def kill_at_step_15(event: Event) -> None:
        if event.kind == "step" and event["region"] == "us-east" and event["step"] == 15:
            killed.append(actors(regions_node(ray_cluster, "us-east"), "WorkerActor")[0])
            os.kill(killed[0], signal.SIGKILL)

    done = train(experiment, tmp_path, sink=kill_at_step_15)
    assert len(final_digests(done.events)) == 1
    (lost,), (replaced,) = done.of("worker_lost"), done.of("worker_replaced")
    assert lost["worker"] == replaced["worker"] and replaced["attempt"] == 2
    assert [event["workers"] for event in done.of("active_workers")] == [1, 2]
    assert len(done.of("checkpoint")) > 2
    rows = [e["samples"] for e in done.of("step") if e["region"] == "us-east"]
    assert rows[0] == rows[-1] == 2 * min(rows)


@pytest.mark.slow
def test_a_worker_leaves_the_node_that_will_be_gone_and_nothing_is_lost(
    short_tmp: Path, tmp_path: Path
) -> None:
    """Server and workers have a machine each, of which one of a worker is taken away."""
    experiment = experiment_of(
        tmp_path,
        strategy={"kind": "bsp"},
        regions=[{"name": "us-east", "workers": 2}],
        train={"steps": 60, "eval_every": 20, "elastic": {"min_workers": 1}},
        emulate={"step_s": 0.3},
        checkpoint={"every_s": 2.0},
    )
    noticed: list[str] = []

    def drain_at_step_3(event: Event) -> None:
        if event.kind != "step" or event["step"] != 3 or noticed:
            return
        free = {n["NodeID"]: 0.0 for n in ray_internals.nodes() if REGION_LABEL in n["Labels"]}
        free |= {
            node: amounts.get("CPU", 0.0)
            for node, amounts in ray_internals.free_resources().items()
            if node in free
        }
        noticed.append(min(free, key=lambda node: free[node]))  # the server takes half of its own
        drain(cluster.address, noticed[0])

    config = LocalClusterConfig(temp_dir=str(short_tmp))
    with (
        LocalCluster(config, ["us-east"] * 3, cpus_per_region=1.0) as cluster,
        driver_environment(cluster.environment | {"RAY_ADDRESS": cluster.address}),
    ):
        done = train(experiment, tmp_path, sink=drain_at_step_3)
    check_whole(done, simulate(experiment, tmp_path))
    assert done.of("worker_left")[0]["worker"] in (0, 1)
    assert not done.of("worker_lost")
    thin = done.of("active_workers")[0]
    assert thin["workers"] == 1 and 3 <= thin["step"] < 60


def drain(address: str, node: str) -> None:
    """Give Ray notice that a node will be gone."""
    client = _raylet.GcsClient(address=address)
    reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    accepted, why = client.drain_node(node, reason, "spot", int((time.time() + 120) * 1000))
    assert accepted, why
