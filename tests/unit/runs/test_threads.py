"""How many threads torch computes on in a process of a run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from geo_ray.experiment.experiment import Experiment
from geo_ray.runs.build import use_cpus

LOCAL, EXISTING = {"kind": "local"}, {"kind": "existing"}
EMULATED = {"step_s": 0.1}


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def experiment(cluster: dict[str, Any], emulate: dict[str, Any] | None) -> Experiment:
    tree = {
        "name": "threads",
        "task": {"use": "digits"},
        "data": {"generate": {}, "batch_size": 8},
        "regions": [{"name": "us-east"}, {"name": "eu-west"}],
        "strategy": {"kind": "sma"},
        "optimizer": {"kind": "sgd"},
        "train": {"steps": 2},
        "cluster": cluster,
        "emulate": emulate,
    }
    return Experiment.model_validate_json(json.dumps(tree))


@pytest.mark.parametrize(
    ("cluster", "emulate", "cpus", "threads"),
    [
        (EXISTING, None, 3.0, 3),
        (EXISTING, None, 2.5, 2),
        (EXISTING, None, 0.5, 1),
        (EXISTING, None, 0.0, 1),
        (EXISTING, EMULATED, 3.0, 3),
        (LOCAL, None, 3.0, 3),
        (LOCAL, EMULATED, 3.0, 1),
    ],
)
def test_a_process_has_the_threads_of_its_cpus(
    cluster: dict[str, Any], emulate: dict[str, Any] | None, cpus: float, threads: int
) -> None:
    use_cpus(experiment(cluster, emulate), cpus)
    assert torch.get_num_threads() == threads
