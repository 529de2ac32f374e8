"""Simulate a configuration and write the files of a real run."""

from __future__ import annotations

import logging
import time
from operator import attrgetter
from typing import Final

import torch

from geo_ray.base.errors import ConfigError
from geo_ray.base.types import Span
from geo_ray.data.manifest import Manifest
from geo_ray.data.tasks.base import Task
from geo_ray.data.tasks.checked_calls import RowWork
from geo_ray.data.tasks.load import load_task
from geo_ray.experiment.experiment import Experiment
from geo_ray.experiment.regions import RegionConfig
from geo_ray.runs.build import build_worker, check_absent, model_start, use_one_thread
from geo_ray.runs.data import open_readers, prepare_manifest
from geo_ray.runs.directory import RunDirectory, followed_plan
from geo_ray.runs.evaluation import BestKeeper
from geo_ray.runs.model_file import about_model, save_trained
from geo_ray.runs.recorder import Recorder
from geo_ray.runs.report import account
from geo_ray.runs.start_checks import check_evaluation, warn_at_start
from geo_ray.simulator.world import LAN_S, World
from geo_ray.telemetry.event_log import EVENTS_FILE, EventLog, failure_noted
from geo_ray.telemetry.events import RunObserver
from geo_ray.telemetry.summary import Summary, Summing, save_summary
from geo_ray.training.parameters import digest

MANY_WORKERS: Final = 100
"""Number of workers from which on the cost of a simulation is reported."""

_TRIALS: Final = 3
_COPIES: Final = 2  # parameters and gradient


def cost_note(experiment: Experiment, task: Task, manifest: Manifest) -> str | None:
    """Estimate the cost of a simulation from one gradient; None for few workers.

    Args:
        experiment: experiment.
        task: task.
        manifest: data.
    """
    workers = sum(region.workers for region in experiment.regions)
    if workers < MANY_WORKERS:
        return None
    region = max(experiment.regions, key=attrgetter("workers"))
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


_log = logging.getLogger(__name__)


def with_workers(experiment: Experiment) -> Experiment:
    """Return the experiment with workers instead of groups, which compute the same to rounding.

    Raises:
        ConfigError: a region has a loop of its own.
    """
    own = [region.name for region in experiment.regions if not region.trains_task]
    if own:
        raise ConfigError(
            f"regions with their own training loops cannot be simulated: {', '.join(own)}",
            fix="Simulate a `task`, or train with `geo-ray train`.",
        )
    regions = [
        region
        if region.group is None
        else RegionConfig(name=region.name, at=region.at, workers=region.group.world_size)
        for region in experiment.regions
    ]
    return experiment.model_copy(update={"regions": tuple(regions)})


def simulate(
    experiment: Experiment,
    run: RunDirectory,
    observer: RunObserver,
) -> Summary:
    """Simulate the experiment to its end.

    Args:
        experiment: experiment.
        run: run directory.
        observer: receives the progress.

    Raises:
        GeoRayError: invalid configuration, task or data.
    """
    use_one_thread()
    plan = followed_plan(run)
    experiment = with_workers(experiment)
    observer.status("preparing task and data")
    task = load_task(experiment.task, run.base_dir)
    manifest, _ = prepare_manifest(experiment, task, run.base_dir, run.data)
    check_evaluation(experiment, task, manifest)
    warn_at_start(experiment, manifest, simulated=True)
    if (note := cost_note(experiment, task, manifest)) is not None:
        _log.warning("%s", note)
    summing = Summing(experiment.train.target)
    with failure_noted(run.path), EventLog(run.path / EVENTS_FILE) as log:
        recorder = Recorder(log, [observer.on_event, summing.feed])
        keeper = BestKeeper.of(experiment, task, run)
        check_absent(experiment)
        lan_s = LAN_S if plan is None else 0.0  # the emulated steps of a plan include its LAN
        world = World(experiment, task, manifest, recorder.emit, lan_s, keeper)
        recorder.started(
            experiment, run.path.name, 0.0, simulated=True, **RowWork.of(task).fields()
        )
        try:
            result = world.run()
        finally:
            if keeper is not None:
                keeper.candidates.close()
        final_P = result.params_P[experiment.averager_region]
        usd = account(run, summing.totals)
        summary = summing.summary(usd=usd, digest=digest(final_P))
        recorder.emit(
            "run_finished",
            result.seconds,
            summary=summary.model_dump(),
            digests={name: digest(params_P) for name, params_P in result.params_P.items()},
        )
    about = about_model(experiment, summary.steps, summary.eval)
    buffers_B = result.buffers_B[experiment.averager_region]
    save_trained(task, experiment.seed, final_P, run.model, about, buffers_B)
    save_summary(summary, run.path)
    return summary
