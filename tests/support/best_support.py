"""What a kept model comes to, found out by another way than the run's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from geo_ray.api.run import open_run
from geo_ray.data.tasks.load import load_task
from geo_ray.runs.data import open_readers, prepare_manifest
from geo_ray.telemetry.events import Event


def metrics_of(path: Path, region: str | None) -> dict[str, float]:
    """Metrics of the best model's file over the held-out rows of a region, or of all."""
    run = open_run(path)
    experiment = run.experiment
    task = load_task(experiment.task, path)
    manifest, _ = prepare_manifest(experiment, task, path, path / "data")
    module = run.model(best=True).eval()
    names = experiment.region_names if region is None else (region,)
    total: dict[str, object] = {}
    with torch.no_grad():
        for name in names:
            _, heldout = open_readers(experiment, manifest, name)
            for columns in heldout.scan(64):
                batch = task.collate(columns, torch.device("cpu"))
                for key, value in task.evaluate(module, batch).items():
                    total[key] = total.get(key, 0.0) + value
    return task.metrics(total)


def earliest_best(events: Sequence[Event], region: str | None) -> tuple[float, int]:
    """The highest accuracy of a region's evaluations, or of all regions', and its first step."""
    seen = [
        (event["metrics"]["accuracy"], event["step"])
        for event in events
        if event.kind == "eval" and event["region"] == region
    ]
    value = max(accuracy for accuracy, _ in seen)
    return value, next(step for accuracy, step in seen if accuracy == value)
