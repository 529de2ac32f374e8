"""To have a run driven on a cluster that is there, and to go on watching one that is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from geo_ray.config.experiment import Experiment
from geo_ray.job.rundir import RunDirectory
from geo_ray.observe.events.log import newest_stretch
from geo_ray.observe.metrics.summary import Summary
from geo_ray.planning.plan import Plan
from geo_ray.runtime.cluster.connect import ConnectedCluster
from geo_ray.runtime.driver.front import (
    Handle,
    RunFront,
    find_driver,
    passed,
    start_driver,
    tail_of,
)
from geo_ray.runtime.driver.order import DriveOrder
from geo_ray.runtime.driver.run_cluster import Reporting, cluster_of
from geo_ray.runtime.driver.train import Resumption


@dataclass(frozen=True, slots=True)
class Driven:
    """What is to be driven.

    Attributes:
        experiment: the run's configuration.
        run: its directory.
        resume: which checkpoint to go on from; None: begin.
        adopts: whether the configuration is another one than the directory has.
        plan: to follow from now on, if it is another one than before.
        detach: whether to leave it alone as soon as it trains.
    """

    experiment: Experiment
    run: RunDirectory
    resume: Resumption | None = None
    adopts: bool = False
    plan: Plan | None = None
    detach: bool = False


def drive(what: Driven, reporting: Reporting) -> Summary | None:
    """Have a run driven by an actor, and watch it to its end.

    Returns:
        What it came to; None if it was left alone.

    Raises:
        GeoRayError: whatever ends the run early; the class says what.
        KeyboardInterrupt: it was ended at once.
    """
    with cluster_of(what.experiment, reporting.status) as cluster:
        tail = passed(tail_of(what.run.path))
        resume = what.resume and replace(what.resume, log_bytes=tail.read_bytes)
        order = DriveOrder(
            what.experiment.model_dump_json(),
            what.run,
            resume,
            replace(cluster, local=None),
            reporting.began_unix_s,
            what.adopts,
            what.plan,
            what.detach,
        )
        reporting.status("starting the run's driver")
        front = RunFront(start_driver(order), what.run.path, reporting, cluster, tail)
        return front.follow(until_begun=what.detach)


def attach(
    run_dir: Path,
    experiment: Experiment,
    watched: Callable[[Handle, ConnectedCluster], Summary | None],
) -> tuple[bool, Summary | None]:
    """Look for a run's living driver, and watch it if there is one.

    Args:
        run_dir: the run's directory.
        experiment: its configuration.
        watched: what to do with the driver that is found.

    Returns:
        Whether there is one; what the run came to.
    """
    with cluster_of(experiment, lambda text: None) as cluster:
        driver = find_driver(run_dir, f"geo_ray-{experiment.name}")
        if driver is None:
            return False, None
        return True, watched(driver, cluster)


def watch(
    driver: Handle, cluster: ConnectedCluster, run_dir: Path, reporting: Reporting, *, detach: bool
) -> Summary | None:
    """Watch a run that goes on, from where its newest stretch began.

    Returns:
        What it came to; None if it was left alone.

    Raises:
        GeoRayError, KeyboardInterrupt: as for `drive`.
    """
    tail = tail_of(run_dir)
    reporting.status("the run goes on; watching it")
    front = RunFront(driver, run_dir, reporting, cluster, tail)
    for event in newest_stretch(tail):
        front.has_begun = True
        for sink in reporting.sinks:
            sink(event)
    return front.follow(until_begun=detach)
