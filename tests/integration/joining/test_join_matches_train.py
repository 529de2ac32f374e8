"""A run that `geo-ray train` drives on a real cluster, repeated by loops that join."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import geo_ray
from geo_ray.data.manifest import load_manifest
from geo_ray.data.tasks.load import load_task
from geo_ray.joining.site import join
from geo_ray.runs.build import initial_parameters
from geo_ray.runs.data import open_readers
from tests.support.join_support import serving, terms, train_all, vector_of

STEPS, ROWS, LR = 12, 8, 0.01
STRATEGY = {"kind": "diloco", "interval": 4, "weights": "uniform"}
CONFIG: dict[str, Any] = {
    "name": "driven",
    "task": {"use": "digits", "options": {"width": 2}},
    "data": {"generate": {}, "batch_size": ROWS},
    "regions": [{"name": "eu"}, {"name": "us"}],
    "strategy": STRATEGY,
    "optimizer": {"kind": "adamw", "lr": LR, "weight_decay": 0.01},
    "train": {"steps": STEPS, "eval_every": 0},
    "seed": 5,
}


@pytest.mark.slow  # a whole run on a cluster
def test_diloco_is_that_of_geo_ray_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Any
) -> None:
    """The same rows, initial parameters and optimizer."""
    monkeypatch.chdir(tmp_path)
    run = geo_ray.train(CONFIG)
    task = load_task(run.experiment.task, tmp_path)
    manifest = load_manifest(str(run.path / "data" / "manifest.json"))

    def loop(address: str, name: str) -> Tensor:
        rows, _ = open_readers(run.experiment, manifest, name)
        model = task.model(0)
        nn.utils.vector_to_parameters(initial.clone(), model.parameters())
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
        path = tmp_path / f"{name}.pem"
        with join(address, region=name, credentials=path) as site, site.training(model) as sync:
            while not sync.done:
                columns = rows.read(sync.steps * ROWS, ROWS)
                optimizer.zero_grad()
                task.loss(model, task.collate(columns, torch.device("cpu"))).backward()
                optimizer.step()
                sync.step(rows=ROWS)
        return vector_of(model)

    initial = initial_parameters(task, run.experiment.seed)
    with serving(terms(("eu", "us"), STEPS, strategy=STRATEGY), tmp_path) as (_, address):
        found = train_all({name: partial(loop, address, name) for name in ("eu", "us")})
    driven = vector_of(run.model())
    assert float((driven - initial).abs().max()) > 1e-3
    assert torch.equal(found["eu"], found["us"])
    difference = float((found["eu"] - driven).abs().max())
    record_property("largest_difference", difference)
    print(f"largest difference: {difference:.1e}")
    assert difference <= 2e-7
