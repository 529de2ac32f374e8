"""Regions that are process groups lose ranks, fail and are stopped, on the shared cluster."""

from __future__ import annotations

import json
import os
import signal
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from ray.util.placement_group import placement_group_table
from safetensors.torch import load_file
from torch import nn

import geo_ray
from geo_ray.base.errors import LoopFailedError, PreflightError, RankLostError
from geo_ray.experiment.experiment import Experiment, ServeConfig
from geo_ray.experiment.regions import RegionConfig
from geo_ray.ray_cluster.connect import ConnectedCluster
from geo_ray.ray_cluster.local_cluster import LocalCluster
from geo_ray.ray_cluster.process_supervisor import descendants
from geo_ray.runs import requests
from geo_ray.telemetry.events import Event
from tests.support.train_support import WAIT_S, eventually, train

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]

LOOP = """
import os, time
from pathlib import Path
import torch, geo_ray
from torch import nn
from torch.distributed.fsdp import fully_shard

HERE = Path(__file__).parent

def train(rank: geo_ray.GroupRank) -> None:
    (HERE / f"{rank.region}-{rank.rank}.pid").write_text(str(os.getpid()))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    rows = torch.randn(8, 8)
    with rank.join() as site, site.training(model) as sync:
        for x in sync.batches([rows]):
            loss = nn.functional.cross_entropy(model(x), (x.sum(1) > 0).long())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if not (HERE / "fast").exists():
                time.sleep(0.2)
            sync.step(rows=len(x), loss=loss)

def fails(rank: geo_ray.GroupRank) -> None:
    if rank.region == "eu-west" and rank.rank == 1:
        raise ValueError("no rows here")
    train(rank)
"""


def experiment(folder: Path, steps: int = 600, loop: str = "train", **train: Any) -> Experiment:
    (folder / "my_loop.py").write_text(LOOP)
    group = {"ranks_per_node": 2, "cpus_per_rank": 0.5, "loop": f"my_loop.py:{loop}"}
    return Experiment.model_validate_json(
        json.dumps(
            {
                "name": "tiny",
                "regions": [
                    {"name": "us-east", "group": group},
                    {"name": "eu-west", "group": group},
                ],
                "strategy": {"kind": "diloco", "interval": 2},
                "train": {"steps": steps, **train},
                "serve": {"port": 0},
                "cluster": {"kind": "existing"},
                "run": {"dir": str(folder / "runs")},
            }
        )
    )


def lost_step(events: list[Event]) -> int:
    """The newest step of the region that is lost, before that."""
    kinds = [event.kind for event in events]
    before = events[: kinds.index("region_lost")]
    return max(event["step"] for event in before if event.kind == "step")


def killed(folder: Path, name: str) -> None:
    os.kill(int((folder / f"{name}.pid").read_text()), signal.SIGKILL)


def test_a_group_that_loses_a_rank_is_started_again(tmp_path: Path) -> None:
    is_killed = False

    def on_event(event: Event) -> None:
        nonlocal is_killed
        if event.kind == "step" and event["region"] == "eu-west" and not is_killed:
            is_killed = True
            killed(tmp_path, "eu-west-1")
        if event.kind == "region_joined":
            (tmp_path / "fast").touch()

    done = train(experiment(tmp_path), tmp_path, sink=on_event)
    (lost,) = done.of("worker_lost")
    assert (lost["region"], lost["worker"]) == ("eu-west", 1)
    assert "rank 1 of region 'eu-west'" in lost["cause"]
    assert [event["region"] for event in done.of("region_lost")] == ["eu-west"]
    (joined,) = done.of("region_joined")
    assert joined["region"] == "eu-west"
    (started,) = done.of("region_started")
    assert started["region"] == "eu-west"
    kinds = [event.kind for event in done.events]
    away = done.events[kinds.index("region_lost") : kinds.index("region_joined")]
    steps = [event["region"] for event in away if event.kind == "step"]
    assert set(steps) == {"us-east"}
    last = {event["region"]: event["step"] for event in done.of("step")}
    assert last["us-east"] == 600
    assert last["eu-west"] > joined["step"] > lost_step(done.events)  # it counts on
    assert done.summary.faults["worker_lost"] == 1
    assert all(torch.isfinite(each).all() for each in load_file(done.run.model).values())


@pytest.mark.parametrize("holders", [1, 2])
def test_a_group_without_restarts_is_given_up(tmp_path: Path, holders: int) -> None:
    is_killed = False

    def on_event(event: Event) -> None:
        nonlocal is_killed
        if event.kind == "step" and event["region"] == "eu-west" and not is_killed:
            is_killed = True
            killed(tmp_path, "eu-west-0")
        if event.kind == "join_failed":
            (tmp_path / "fast").touch()

    changed = experiment(tmp_path, steps=60, max_worker_restarts=0)
    served = ServeConfig(port=0, holders=holders)
    done = train(changed.model_copy(update={"serve": served}), tmp_path, sink=on_event)
    (failed,) = done.of("join_failed")
    assert "rank 0 of region 'eu-west'" in failed["cause"]
    assert "train.max_worker_restarts = 0" in failed["cause"]
    last = {event["region"]: event["step"] for event in done.of("step")}
    assert last["us-east"] == 60


def test_all_groups_are_lost(tmp_path: Path) -> None:
    is_killed = False

    def on_event(event: Event) -> None:
        nonlocal is_killed
        if event.kind == "step" and not is_killed:
            is_killed = True
            for region in ("us-east", "eu-west"):
                killed(tmp_path, f"{region}-0")

    with pytest.raises(RankLostError, match=r"rank 0 of region '(us-east|eu-west)'"):
        train(experiment(tmp_path), tmp_path, sink=on_event)


def test_a_loop_that_raises(tmp_path: Path) -> None:
    with pytest.raises(
        LoopFailedError, match=r"(?s)rank 1 of region 'eu-west': .*ValueError: no rows here .*py:29"
    ):
        train(experiment(tmp_path, loop="fails"), tmp_path)


def test_machines_without_the_gpus_of_a_group(tmp_path: Path) -> None:
    """Nothing is started, and no time passes in waiting for a place."""
    changed = experiment(tmp_path).model_dump(mode="json", exclude_unset=True)
    changed["regions"][0]["group"] |= {"ranks_per_node": None, "gpus_per_node": 64}
    lacking = Experiment.model_validate_json(json.dumps(changed))
    with pytest.raises(PreflightError, match="region 'us-east' asks for 64 GPU, its 1 node"):
        train(lacking, tmp_path)


def test_a_region_joins_next_to_a_group(tmp_path: Path) -> None:
    (tmp_path / "fast").touch()
    changed = experiment(tmp_path, steps=6)
    first, second = changed.regions
    joined = RegionConfig(name=second.name, join=True)
    served = ServeConfig(host="127.0.0.1", port=0)
    changed = changed.model_copy(update={"regions": (first, joined), "serve": served})
    folder, found = tmp_path / "runs" / "tiny" / "join", []

    def join_it() -> None:
        address = folder / "address"
        eventually(lambda: address.exists() and address.read_text().endswith("\n"), "an address")
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
        pem = folder / f"{joined.name}.pem"
        with (
            geo_ray.join(address.read_text().strip(), region=joined.name, credentials=pem) as site,
            site.training(model) as sync,
        ):
            for _ in sync.batches(range(100)):
                sync.step(rows=1)
        found.append(nn.utils.parameters_to_vector(model.parameters()).detach())

    thread = threading.Thread(target=join_it)
    thread.start()
    done = train(changed, tmp_path)
    thread.join(WAIT_S)
    saved = torch.cat([value.reshape(-1) for value in load_file(done.run.model).values()])
    assert len(saved) == len(found[0])
    assert {float(x) for x in saved} == {float(x) for x in found[0]}
    assert done.summary.samples == 6 * (2 * 8 + 1)


def test_a_stop_request_lets_loops_without_checkpoints_finish(tmp_path: Path) -> None:
    is_stopped = False

    def on_event(event: Event) -> None:
        nonlocal is_stopped
        if event.kind == "step" and not is_stopped:
            is_stopped = True
            requests.request_stop(tmp_path / "runs" / "tiny")

    done = train(experiment(tmp_path), tmp_path, sink=on_event)
    assert done.summary.steps < 600
    assert done.run.model.exists()
    assert not done.of("worker_lost")


def test_nothing_is_left(connected: ConnectedCluster, ray_cluster: LocalCluster) -> None:
    """After all these runs: no reservation and no actor."""
    states: Any = placement_group_table()
    assert {group["state"] for group in states.values()} <= {"REMOVED"}
    supervisor = ray_cluster._processes._supervisor.pid

    def actors() -> list[int]:
        found = []
        for pid in descendants(supervisor):
            with suppress(FileNotFoundError):
                if b"Actor" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
        return found

    eventually(lambda: not actors(), "all actors have ended")
