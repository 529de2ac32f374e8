"""Conversion between run configurations and jobs of a queue.

`spec_of` derives a job's specification for the schedulers from its configuration; `config_tree`
returns the configuration that a job trains.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import JsonValue

from geo_ray.base.errors import QueueRequestError, SpeedUnknownError
from geo_ray.data.tasks.load import load_task
from geo_ray.experiment.experiment import Experiment
from geo_ray.planner.profile import StepModel, fit_steps, load_profile
from geo_ray.runs.build import parameter_count
from geo_ray.runs.follow_plan import model_id
from geo_ray.runs.planning import find_profile
from geo_ray.scheduler.queue.config import QueueConfig
from geo_ray.scheduler.queue.job_spec import (
    LEAST_STEP_S,
    JobHints,
    JobRequest,
    JobSpec,
    JobTiming,
    RegionNeeds,
    Workers,
)
from geo_ray.storage.uri import is_s3, join
from geo_ray.training.config import AUTO

_FLOAT_BYTES = 4
_UNATTENDED_S = 60.0  # a job whose command was killed is observed again by its next attempt


def spec_of(experiment: Experiment, base_dir: Path, hints: JobHints) -> JobSpec:
    """Return the specification of a job for the schedulers.

    Args:
        experiment: the configuration.
        base_dir: base directory of relative paths in it.
        hints: values that the configuration does not contain.

    Raises:
        QueueRequestError: two of its regions are in one region of the cluster.
        SpeedUnknownError: its speed is unknown.
        TaskLoadError: the task cannot be loaded.
    """
    shared = len({region.label for region in experiment.regions}) < len(experiment.regions)
    moved = any(region.label != region.name for region in experiment.regions)
    if shared or moved:
        raise QueueRequestError(
            "regions of a queued job must be distinct regions of its cluster",
            fix="Omit `regions[].at`, and use the region names of the cluster's nodes.",
        )
    if hints.anywhere and not (len(experiment.regions) == 1 or experiment.counts_total_rows):
        raise QueueRequestError(
            "a job with data everywhere must count the rows of all regions",
            fix="Add `train: {count: total}`, or configure one region.",
        )
    _check_served(experiment, hints)
    task = load_task(experiment.task, base_dir)
    num_params = parameter_count(task, experiment.seed)
    size = experiment.data.batch_size
    regions = {each.name: RegionNeeds.of(each, size) for each in experiment.regions}
    workers = sum(each.workers for each in regions.values())
    steps = experiment.train.steps * max(1, experiment.worker_steps)
    least = len(regions) if experiment.is_served else experiment.members.min or len(regions)
    exchange = experiment.strategy.traits.exchange
    hides = {"never": None, "when_late": exchange.every}.get(exchange.blocking, 0.0)
    fixed_s, row_s, lan_s = _steps(experiment, base_dir, num_params, hints.rows_per_s)
    return JobSpec(
        regions=regions,
        steps=steps,
        speed=JobTiming(
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


def _check_served(experiment: Experiment, hints: JobHints) -> None:
    """Refuse runs of groups that a queue cannot start.

    Raises:
        QueueRequestError: a region is not a group that trains the task, or may not run anywhere.
        SpeedUnknownError: the speed of the groups is unknown.
    """
    if not experiment.is_served:
        return
    if len(experiment.task_regions) < len(experiment.regions):
        raise QueueRequestError(
            "the queue does not know the model of regions that have a training loop of their own",
            fix="Queue runs whose groups train a task.",
        )
    if hints.anywhere or (hints.most_workers or 0) > len(experiment.regions):
        raise QueueRequestError(
            "a group has a fixed region and number of processes",
            fix="Omit --anywhere and --most-workers.",
        )
    if hints.rows_per_s is None:
        raise SpeedUnknownError(
            "the queue does not measure the speed of groups",
            fix="Give the rows per second of a region's group, from `geo-ray profile`.",
        )


def _steps(
    experiment: Experiment, base_dir: Path, num_params: int, rows_per_s: float | None
) -> tuple[float, float, float]:
    """Return seconds of a step, of a row and of a worker: declared, emulated or measured."""
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
    path = find_profile(experiment, model_id(experiment, base_dir, num_params))
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


def run_tree(
    request: JobRequest, job_id: str, workers: Workers, averager: str, queue: QueueConfig
) -> dict[str, JsonValue]:
    """Return the configuration of a job with its allocation.

    The rows of a step in a region stay as configured, whatever the number of workers.

    Args:
        request: the job.
        job_id: its id, the name of its run directory.
        workers: workers by region; other regions are absent and may join later.
        averager: region of the averager.
        queue: the queue.
    """
    tree: dict[str, Any] = dict(request.config)
    spec = request.spec
    names = list(queue.regions) if spec.anywhere else list(spec.regions)
    by_name = {str(each["name"]): each for each in tree["regions"]}
    template = next(iter(by_name.values()))
    regions = []
    for name in names:
        needs = spec.needs(name)
        count = workers.get(name, needs.workers)
        region = dict(by_name.get(name, template)) | {"name": name, "workers": count, "copies": 1}
        if count != needs.workers:
            region |= {"batch_sizes": split_rows(needs.rows, count), "nodes": None}
        regions.append(region)
    tree["regions"] = regions
    tree["name"] = job_id
    is_served = any(region.get("group") is not None for region in regions)
    tree["cluster"] = {"kind": "existing"}
    tree["run"] = dict(tree.get("run") or {}) | {
        "dir": _runs_of(queue),
        "again": "resume",
        "unattended_s": _UNATTENDED_S,
    }
    if is_served:  # all of its regions, and no section for what it does not have
        return tree
    absent = [name for name in names if name not in workers]
    members = dict(tree.get("members") or {}) | {"absent": absent}
    if absent or spec.least_regions < len(names):
        members["min"] = spec.least_regions
    tree["members"] = members
    tree["averager"] = _averager(dict(tree.get("averager") or {}), averager, workers)
    return tree


def _averager(section: dict[str, Any], leader: str, workers: Workers) -> dict[str, Any]:
    """Return the averager's section without absent followers."""
    named = [section.get("standby"), *(section.get("next_standbys") or ())]
    able = [name for name in named if name == AUTO or (name in workers and name != leader)]
    section["region"] = leader
    if section.get("standby") is not None:
        first, *more = able or [AUTO]
        section |= {"standby": first, "next_standbys": [name for name in more if name != AUTO]}
    return section


def run_of(queue: QueueConfig, job_id: str) -> str:
    """Return the run directory or URL of all attempts of a queue's job."""
    runs = _runs_of(queue)
    return join(runs, job_id) if is_s3(runs) else str(Path(runs) / job_id)


def _runs_of(queue: QueueConfig) -> str:
    if is_s3(queue.runs):
        return join(queue.runs, queue.name)
    return str(Path(queue.runs).absolute() / queue.name)


def split_rows(rows: int, workers: int) -> list[int]:
    """Split rows among workers as evenly as possible."""
    each, more = divmod(rows, workers)
    return [each + (number < more) for number in range(workers)]


def config_tree(experiment: Experiment) -> dict[str, JsonValue]:
    """Return a configuration as plain values."""
    tree: dict[str, JsonValue] = experiment.model_dump(mode="json")
    return tree
