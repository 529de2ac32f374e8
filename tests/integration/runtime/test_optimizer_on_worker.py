"""A worker that keeps parameters and optimizer: the results are those of the parameter server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.region_support import InProcess, experiment_of

ONE_WORKER = [{"name": "us-east"}, {"name": "eu-west"}]
ADAMW = {
    "kind": "adamw",
    "lr": 0.01,
    "schedule": {"kind": "cosine", "warmup_steps": 2},
}


def digests(directory: Path, on: str, *, shared: bool = True, **changes: Any) -> list[str]:
    train = {"steps": 7, "eval_every": 3, "optimizer_on": on} | changes.pop("train", {})
    sections = {"regions": ONE_WORKER, "optimizer": ADAMW, "train": train} | changes
    directory = directory / on
    directory.mkdir()
    with InProcess(experiment_of(**sections), directory) as run:
        found = run.run(shared=shared)
        run.check_books()
    return found


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"shared": False},
        {"strategy": {"kind": "diloco", "interval": 3}},
        {"train": {"clip_norm": 0.5, "clip_mean_norm": 0.3}},
        {"regions": [{"name": "us-east", "ps_shards": 3}, {"name": "eu-west", "ps_shards": 3}]},
        {"regions": [{"name": "us-east"}, {"name": "eu-west", "workers": 2}]},
        {"optimizer": {"kind": "muon", "lr": 0.01}},
        {"optimizer": {"kind": "adafactor", "lr": 0.01}},
        {"regions": [{"name": "us-east"}]},
        {"train": {"state_every": 1}},
    ],
)
def test_the_results_are_those_of_the_server(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert digests(tmp_path, "worker", **changes) == digests(tmp_path, "server", **changes)
