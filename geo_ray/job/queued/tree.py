"""A job of a queue as the configuration that is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import JsonValue

from geo_ray.config.experiment import Experiment
from geo_ray.queue.config import QueueConfig
from geo_ray.queue.job_spec import JobRequest, Workers
from geo_ray.stores.uri import is_s3, join
from geo_ray.training.averager.config import AUTO


def run_tree(
    request: JobRequest, job_id: str, workers: Workers, averager: str, queue: QueueConfig
) -> dict[str, JsonValue]:
    """Return the configuration of a job with what it was given.

    A step has as many rows in a region as configured, whatever the number of workers.

    Args:
        request: the job.
        job_id: its id, which names its run directory.
        workers: by region; regions that are left out are absent, and may join later.
        averager: where it lives.
        queue: whose job it is.
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
    tree["cluster"] = {"kind": "existing"}
    tree["run"] = dict(tree.get("run") or {}) | {
        "dir": _runs_of(queue),
        "again": "resume",
        "driver": "process",
    }
    absent = [name for name in names if name not in workers]
    members = dict(tree.get("members") or {}) | {"absent": absent}
    if absent or spec.least_regions < len(names):
        members["min"] = spec.least_regions
    tree["members"] = members
    tree["averager"] = _averager(dict(tree.get("averager") or {}), averager, workers)
    return tree


def _averager(section: dict[str, Any], home: str, workers: Workers) -> dict[str, Any]:
    """The averager's section with who is there: who is absent, or hosts it, cannot stand by."""
    named = [section.get("standby"), *(section.get("next_standbys") or ())]
    able = [name for name in named if name == AUTO or (name in workers and name != home)]
    section["region"] = home
    if section.get("standby") is not None:
        first, *more = able or [AUTO]
        section |= {"standby": first, "next_standbys": [name for name in more if name != AUTO]}
    return section


def run_of(queue: QueueConfig, job_id: str) -> str:
    """Return the run directory, or its address, of all attempts of a queue's job."""
    runs = _runs_of(queue)
    return join(runs, job_id) if is_s3(runs) else str(Path(runs) / job_id)


def _runs_of(queue: QueueConfig) -> str:
    if is_s3(queue.runs):
        return join(queue.runs, queue.name)
    return str(Path(queue.runs).absolute() / queue.name)


def split_rows(rows: int, workers: int) -> list[int]:
    """Return the rows of each of so many workers, which together are ``rows``."""
    each, more = divmod(rows, workers)
    return [each + (number < more) for number in range(workers)]


def config_tree(experiment: Experiment) -> dict[str, JsonValue]:
    """Return a configuration as plain values."""
    tree: dict[str, JsonValue] = experiment.model_dump(mode="json")
    return tree
