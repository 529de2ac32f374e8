"""Jobs whose regions are process groups: a queue gives them all machines or none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from geo_ray.base.errors import QueueRequestError, SpeedUnknownError
from geo_ray.base.load import load_tree
from geo_ray.cloud.autoscaler.observation import LabelWanted, PendingBundle, PendingGroup
from geo_ray.cloud.autoscaler.packing import CapacityOffer, MachineCapacity, pack
from geo_ray.experiment.experiment import Experiment
from geo_ray.ray_cluster.labels import REGION_LABEL
from geo_ray.runtime.spec import demands_of
from geo_ray.scheduler.queue.inbox import _check_size
from geo_ray.scheduler.queue.job_config import config_tree, run_tree, spec_of
from geo_ray.scheduler.queue.job_spec import JobHints, JobRequest, SubmitRequest
from geo_ray.scheduler.queue.loop import target_of
from tests.support.queue_support import queue_config, sim_queue


def experiment(path: Path, **changes: Any) -> Experiment:
    values = {
        "name": "gangs",
        "task": {"use": "bytelm", "options": {"size": "0.1M"}},
        "data": {"generate": {}, "batch_size": 4},
        "regions": [
            {"name": "us", "group": {"nodes": 3, "gpus_per_node": 4, "cpus_per_rank": 2}},
            {"name": "eu", "group": {"nodes": 1, "gpus_per_node": 8}},
        ],
        "strategy": {"kind": "diloco", "interval": 10},
        "optimizer": {"kind": "adamw", "lr": 0.001},
        "train": {"steps": 100},
        **changes,
    }
    file = path / "gangs.yaml"
    file.write_text(json.dumps(values), encoding="utf-8")
    return load_tree(file, (), Experiment)


def request(found: Experiment, path: Path) -> JobRequest:
    spec = spec_of(found, path, JobHints(rows_per_s=100.0))
    return JobRequest(name="gangs", config=config_tree(found), spec=spec)


def test_a_group_is_one_worker_with_all_of_its_resources(tmp_path: Path) -> None:
    spec = request(experiment(tmp_path), tmp_path).spec
    us, eu = spec.regions["us"], spec.regions["eu"]
    assert (us.workers, us.gpus, us.cpus, us.rows) == (1, 12, 24, 48)
    assert (us.machines, us.machine_gpus, us.machine_cpus) == (3, 4, 8)
    assert (eu.workers, eu.gpus, eu.cpus, eu.rows) == (1, 8, 8, 32)
    assert (spec.least_regions, spec.most_workers) == (2, 2)


@pytest.mark.parametrize(
    ("cpus", "gpus", "machines"), [(64, 4, 3), (64, 8, 2), (8, 8, 3), (64, 16, 1)]
)
def test_parts_of_a_group_are_not_divided(
    tmp_path: Path, cpus: float, gpus: float, machines: int
) -> None:
    needs = request(experiment(tmp_path), tmp_path).spec.regions["us"]
    assert needs.machines_of(cpus, gpus) == machines


def test_the_run_has_its_groups_as_configured(tmp_path: Path) -> None:
    found = experiment(tmp_path)
    tree = run_tree(
        request(found, tmp_path),
        "job-1",
        {"us": 1, "eu": 1},
        "eu",
        queue_config(regions={"us": {}, "eu": {}}),
    )
    file = tmp_path / "job.yaml"
    file.write_text(json.dumps(tree), encoding="utf-8")
    made = load_tree(file, (), Experiment)
    assert made.regions == found.regions
    assert (made.name, made.cluster.kind) == ("job-1", "existing")


def test_what_a_queue_cannot_give_groups(tmp_path: Path) -> None:
    found = experiment(tmp_path)
    with pytest.raises(SpeedUnknownError, match="does not measure"):
        spec_of(found, tmp_path, JobHints())
    with pytest.raises(QueueRequestError, match="fixed region"):
        spec_of(found, tmp_path, JobHints(rows_per_s=1.0, most_workers=5))
    with pytest.raises(QueueRequestError, match="loop of their own"):
        spec_of(experiment_of_loops(tmp_path), tmp_path, JobHints(rows_per_s=1.0))


def experiment_of_loops(path: Path) -> Experiment:
    values = {
        "name": "loops",
        "regions": [
            {"name": "us", "group": {"loop": "loop.py:train"}},
            {"name": "eu", "join": True},
        ],
        "strategy": {"kind": "diloco", "interval": 10},
        "train": {"steps": 100},
    }
    file = path / "loops.yaml"
    file.write_text(json.dumps(values), encoding="utf-8")
    return load_tree(file, (), Experiment)


@pytest.mark.parametrize(
    ("machines", "fits"),
    [
        ({"gpus": 8, "cpus": 96, "cap": 2}, True),
        ({"gpus": 8, "cpus": 96, "cap": 1}, False),  # two parts fit on one, three do not
        ({"gpus": 2, "cpus": 96, "cap": 99}, False),
        ({"gpus": 8, "cpus": 4, "cap": 99}, False),
    ],
)
def test_a_job_that_can_never_fit_is_refused(
    tmp_path: Path, machines: dict[str, float], fits: bool
) -> None:
    values = {"type": "p", "at": "us-east-1", "usd_per_hour": 1.0, **machines}
    config = queue_config(
        autoscaler="a",
        regions={"us": {"machines": values}, "eu": {"machines": {**values, "gpus": 8, "cpus": 96}}},
    )
    job = SubmitRequest(id="1", sent_unix_s=0.0, job=request(experiment(tmp_path), tmp_path))
    if fits:
        _check_size(config, job)
        return
    with pytest.raises(QueueRequestError, match="its group has 3 parts of 4 GPUs and 8 CPUs"):
        _check_size(config, job)


@pytest.mark.parametrize(("most", "launched"), [(3, {"a": 2}), (2, {"a": 2}), (1, {})])
def test_the_autoscaler_launches_a_whole_group_or_nothing(
    tmp_path: Path, most: int, launched: dict[str, int]
) -> None:
    """Three parts of 4 GPUs on machines of 8: two machines, or none."""
    demand = next(each for each in demands_of(experiment(tmp_path)) if each.region == "us")
    here = LabelWanted(REGION_LABEL, ("us",))
    bundles = tuple(PendingBundle(each.resources(), (here,)) for each in demand.bundles)
    assert [each.resources["GPU"] for each in bundles] == [4, 4, 4]
    labels = {REGION_LABEL: "us"}
    machine = MachineCapacity("a", "us", labels, {"CPU": 96.0, "GPU": 8.0})
    found = pack([PendingGroup(bundles, "PACK")], (), [CapacityOffer(machine, 10.0, most)])
    assert found.rented == launched
    assert found.missed == (set() if launched else {0})


def test_a_job_of_groups_starts_with_all_of_them_or_waits(tmp_path: Path) -> None:
    """us needs 12 GPUs: two machines of 8, because a part of 4 GPUs is not divided."""
    machine = {"type": "p", "at": "us-east-1", "gpus": 8, "cpus": 96, "cap": 2, "usd_per_hour": 1}
    regions = {"us": {"machines": machine}, "eu": {"machines": {**machine, "at": "eu-west-1"}}}
    queue = sim_queue(tmp_path, regions=regions, autoscaler="c")
    queue.world.capacity = {"us": (8.0, 192.0), "eu": (16.0, 192.0)}
    queue.submit("red", request(experiment(tmp_path), tmp_path))
    queue.run(5.0)
    assert queue.state.jobs["gangs"].attempt is None  # 8 of 12 GPUs: nothing starts
    queue.world.capacity = {"us": (16.0, 192.0), "eu": (16.0, 192.0)}
    queue.run(30.0)
    attempt = queue.state.jobs["gangs"].attempt
    assert attempt is not None and dict(attempt.workers) == {"us": 1, "eu": 1}
    target = target_of(queue.state, queue.config)
    assert {each.name: each.rows_per_s for each in target.regions} == {"us": 2.0, "eu": 1.0}
