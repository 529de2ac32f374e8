"""A configuration as a job of a queue: what the schedulers must know of it."""

from __future__ import annotations

from pathlib import Path

from geo_ray.config.experiment import Experiment
from geo_ray.errors import QueueRequestError, SpeedUnknownError
from geo_ray.job.build import parameter_count
from geo_ray.job.model_id import model_id
from geo_ray.job.profiles import find
from geo_ray.planning.model.step_model import StepModel, fit_steps
from geo_ray.planning.profile import load_profile
from geo_ray.queue.job_spec import LEAST_STEP_S, JobHints, JobPace, JobSpec, RegionNeeds
from geo_ray.tasks.load import load_task

_FLOAT_BYTES = 4


def spec_of(experiment: Experiment, base_dir: Path, hints: JobHints) -> JobSpec:
    """Return what the schedulers must know of a configuration.

    Args:
        experiment: the configuration.
        base_dir: where relative paths in it start.
        hints: what it does not say.

    Raises:
        QueueRequestError: two of its regions are in one region of the cluster.
        SpeedUnknownError: nobody knows how fast it is.
        TaskLoadError: the task cannot be loaded.
    """
    shared = len({region.label for region in experiment.regions}) < len(experiment.regions)
    moved = any(region.label != region.name for region in experiment.regions)
    if shared or moved:
        raise QueueRequestError(
            "regions of a job in a queue are regions of its cluster, each once",
            fix="Leave `regions[].at` out, and name each region as the cluster's nodes do.",
        )
    if hints.anywhere and not (len(experiment.regions) == 1 or experiment.counts_together):
        raise QueueRequestError(
            "a job whose data are anywhere trains until all regions together have seen enough rows",
            fix="Add `train: {count: together}`, or configure one region.",
        )
    task = load_task(experiment.task, base_dir)
    num_params = parameter_count(task, experiment.seed)
    size = experiment.data.batch_size
    regions = {each.name: RegionNeeds.of(each, size) for each in experiment.regions}
    workers = sum(each.workers for each in experiment.regions)
    steps = experiment.train.steps * max(1, experiment.worker_steps)
    least = experiment.members.min or len(regions)
    exchange = experiment.strategy.traits.exchange
    hides = {"never": None, "when_late": exchange.every}.get(exchange.stands_still, 0.0)
    fixed_s, row_s, lan_s = _steps(experiment, base_dir, num_params, hints.rows_per_s)
    return JobSpec(
        regions=regions,
        steps=steps,
        pace=JobPace(
            fixed_s=fixed_s,
            row_s=row_s,
            lan_s=lan_s,
            model_bytes=float(_FLOAT_BYTES * num_params / exchange.fragments),
            every=exchange.every,
            hides=hides,
        ),
        averager=experiment.averager_region,
        anywhere=hints.anywhere,
        least_regions=1 if hints.anywhere else least,
        most_workers=max(hints.most_workers or workers, len(regions)),
    )


def _steps(
    experiment: Experiment, base_dir: Path, num_params: int, rows_per_s: float | None
) -> tuple[float, float, float]:
    """Return seconds of a step, of a row and of a worker: said, emulated or measured."""
    if rows_per_s is not None:
        if not 0 < rows_per_s <= 1.0 / LEAST_STEP_S:
            raise QueueRequestError(f"no worker trains {rows_per_s:g} rows a second")
        return 0.0, 1.0 / rows_per_s, 0.0
    emulate = experiment.emulate
    if emulate is not None and all(emulate.paces(name) for name in experiment.region_names):
        fixed_s = max(emulate.step_of(name, 0, 0.0) for name in experiment.region_names)
        row_s = max(
            emulate.step_of(name, worker, 1.0) - emulate.step_of(name, worker, 0.0)
            for name in experiment.region_names
            for worker in range(experiment.regions[0].workers)
        )
        return fixed_s, row_s, 0.0
    path = find(experiment, model_id(experiment, base_dir, num_params))
    if path is None:
        raise SpeedUnknownError(f"no profile of {experiment.task.use} was found")
    points = load_profile(path).steps
    fits = [fit_steps(name, points) for name in experiment.region_names]
    return (
        max(fit.fixed_s for fit in fits),
        max(_slowest(fit) for fit in fits),
        max(fit.lan_s for fit in fits),
    )


def _slowest(fit: StepModel) -> float:
    return max(fit.row_s.values())
