"""The benchmark of the memory of all processes sums them by kind."""

from __future__ import annotations

import json

import pytest
import yaml

from benchmarks.joining import all_memory
from geo_ray.experiment.experiment import Experiment


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        ("ray::PrimaryActor", "PrimaryActor"),
        ("ray::WorkerActor.run", "WorkerActor"),
        ("ray::IDLE", "IDLE"),
        ("/x/python -m geo_ray.cli.main train a.yaml --plain", "command"),
        ("/x/python -m benchmarks.joining.all_memory --out /dev/null --loop geo-ray://a", "loop"),
        ("/x/python -m benchmarks.joining.all_memory --server /tmp/a", "server without Ray"),
        ("/x/python -m geo_ray.ray_cluster.process_supervisor", "cluster's supervisor"),
        ("/x/site-packages/ray/core/src/ray/raylet/raylet --a", "Ray"),
        ("sleep 5", "other"),
    ],
)
def test_kinds_of_processes(command: str, kind: str) -> None:
    assert all_memory.kind_of(command) == kind


def test_sizes_are_summed_by_kind() -> None:
    found = all_memory.by_kind([(1, "sleep"), (2, "ray::A.f"), (3, "ray::A"), (4, "ray::B")])
    assert found == {"A": [2, 3], "B": [4], "other": [1]}
    assert list(found) == ["A", "B", "other"]


@pytest.mark.parametrize("content", [all_memory.TRAIN, all_memory.GROUPS, all_memory.SERVE])
def test_runs_are_configurations(content: str) -> None:
    Experiment.model_validate_json(json.dumps(yaml.safe_load(content)))
