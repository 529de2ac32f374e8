"""Measures a job: a few short runs of itself on real actors, folded into a profile.

Every run is what `geo-ray train` would do with fewer steps, so what is measured is what will run:
workers, servers, exchanges and links of the cluster at hand.
"""

from __future__ import annotations

import os
import platform
import shutil
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from geo_ray.config.experiment import Experiment
from geo_ray.errors import InterruptedRunError
from geo_ray.job import rundir
from geo_ray.job.profile_grid import Corner, experiment_of
from geo_ray.job.profile_points import (
    evaluation_s,
    exchange_point,
    first_step_s,
    noise_point,
    step_points,
)
from geo_ray.job.rundir import RunDirectory
from geo_ray.observe.events.log import EVENTS_FILE, read_events
from geo_ray.planning.profile import Profile, StartPoint
from geo_ray.runtime.driver.run_cluster import Reporting, cluster_of, with_its_driver
from geo_ray.runtime.driver.train import train
from geo_ray.transport.links.table import LinkTable, load_links, table_of


def measure(
    experiment: Experiment,
    base_dir: Path,
    corners: Sequence[Corner],
    machines: Mapping[str, str],
    known: Profile,
    steps: int,
    reporting: Reporting,
) -> Generator[Profile]:
    """Run every corner and add what it tells to ``known``; gives the profile after each of them.

    All runs are on one cluster, which for local ones is most of what starting takes. Only the first
    run tells how long a start takes, and it is the one with the most workers: later ones find none
    of the processes that Ray starts ahead.

    Args:
        experiment: the configuration.
        base_dir: where relative paths in it start.
        corners: short runs to make.
        machines: instance type by region.
        known: the profile so far; may be empty.
        steps: of each run that count.
        reporting: who wants to know.

    Raises:
        InterruptedRunError: by the user; what was given before stands.
        GeoRayError: whatever ends a run early.
    """
    if not corners:
        return
    profile = known
    place = rundir.local_root(experiment).absolute() / "profiles" / "runs"
    told_unix_s = reporting.began_unix_s
    with cluster_of(experiment, reporting.status) as cluster:
        before_s = time.time() - told_unix_s  # a run of its own takes that long to come so far
        ordered = sorted(corners, key=lambda corner: -corner.workers)
        for number, corner in enumerate(ordered, 1):
            what = f"{number}/{len(corners)} {corner.workers} workers, {corner.rows} rows"
            short = experiment_of(corner, experiment, steps, str(place), base_dir)
            run = rundir.create(short, base_dir)
            told = Reporting(
                lambda text, what=what: reporting.status(f"{what}: {text}"),  # type: ignore[misc]
                reporting.sinks,
                time.time() - before_s,
            )
            try:
                summary = train(with_its_driver(short), run, told, stands=cluster)
            except InterruptedRunError:
                shutil.rmtree(run.path)
                raise InterruptedRunError(
                    f"interrupted in run {number} of {len(corners)}",
                    fix="Type the same command again: what was measured is kept.",
                ) from None
            profile = _with_run(profile, short, run, corner, machines)
            if number == 1:
                profile = _with_start(profile, short, run, summary.startup_s or 0.0)
            shutil.rmtree(run.path)  # of a run that failed its logs stay
            with suppress(OSError):  # others may lie there
                place.rmdir()
            now_unix_s = time.time()
            spent_s = profile.spent_s + now_unix_s - told_unix_s
            told_unix_s = now_unix_s
            profile = profile.model_copy(update={"spent_s": spent_s})
            yield profile


def _with_run(
    profile: Profile,
    short: Experiment,
    run: RunDirectory,
    corner: Corner,
    machines: Mapping[str, str],
) -> Profile:
    """The profile with what one run tells."""
    events = list(read_events(run.path / EVENTS_FILE))
    links = _links(short, run.links)
    point = exchange_point(events, short.averager_region, corner.codec, links)
    took_s = evaluation_s(events)
    profile = profile.with_steps(step_points(events, short, machines))
    profile = profile.with_exchanges([] if point is None else [point])
    return profile.model_copy(
        update={
            "links": profile.links.with_records(links.links),
            "noise": noise_point(events) or profile.noise,
            "evaluation_s": max(took_s or 0.0, profile.evaluation_s),
        }
    )


def _with_start(
    profile: Profile, short: Experiment, run: RunDirectory, startup_s: float
) -> Profile:
    workers = sum(region.workers for region in short.regions)
    start_s = startup_s + first_step_s(list(read_events(run.path / EVENTS_FILE)))
    return profile.with_start(StartPoint(workers=workers, start_s=start_s))


def hardware(experiment: Experiment) -> str:
    """Where it is measured, in a few words."""
    cores = os.cpu_count() or 1
    return f"{platform.machine()}, {cores} cores, {experiment.device}"


def _links(experiment: Experiment, learned: Path) -> LinkTable:
    """The links that the configuration emulates, else what the run learned about real ones."""
    specs = experiment.links()
    if specs:
        return table_of(specs)
    return load_links(learned) if learned.exists() else LinkTable()
