"""What simulating many workers takes of this machine, which computes them all: said beforehand."""

from __future__ import annotations

import time
from typing import Final

import torch

from geo_ray.config.experiment import Experiment
from geo_ray.data.manifest import Manifest
from geo_ray.job.build import build_worker, model_start
from geo_ray.job.data import open_readers
from geo_ray.tasks.base import Task
from geo_ray.types import Span

MANY_WORKERS: Final = 100
"""From how many workers on the cost is told."""

_TRIALS: Final = 3
_COPIES: Final = 2  # parameters and gradient


def cost_note(experiment: Experiment, task: Task, manifest: Manifest) -> str | None:
    """What is to be expected of a simulation, from a gradient computed here; None if few workers.

    Args:
        experiment: the run.
        task: its task.
        manifest: its data.
    """
    workers = sum(region.workers for region in experiment.regions)
    if workers < MANY_WORKERS:
        return None
    region = max(experiment.regions, key=lambda each: each.workers)
    buffer = model_start(task, experiment.seed).buffer()
    worker = build_worker(experiment, region.name, task, buffer, torch.zeros_like(buffer))
    train, _ = open_readers(experiment, manifest, region.name)
    rows = max(region.batch_sizes or (experiment.data.batch_size,))
    pushed_rows = rows * max(1, experiment.worker_steps)
    columns, span = train.read(0, pushed_rows), Span(0, pushed_rows)
    times_s = []
    for _ in range(_TRIALS):
        began_s = time.perf_counter()
        worker.step(columns, span)
        times_s.append(time.perf_counter() - began_s)
    push_s = sorted(times_s)[_TRIALS // 2]
    pushes = experiment.rows / pushed_rows
    memory_bytes = workers * _COPIES * buffer.numel() * buffer.element_size()
    return (
        f"regions: {workers} workers are simulated, all by one core of this machine: their "
        f"gradients, {experiment.rows:,} rows in all, take about {_duration(push_s * pushes)} if "
        f"computed one by one ({push_s * 1e3:.2g} ms for {pushed_rows} rows), and their "
        f"parameters and gradients at least {memory_bytes / 1e9:.2g} GB; fewer workers or "
        "`train.steps` take less"
    )


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.2g} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
