"""What a driver is told to do, and what it tells: plain values that Ray carries."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from geo_ray.config.experiment import Experiment
from geo_ray.config.own import context
from geo_ray.job.rundir import RunDirectory
from geo_ray.observe.metrics.summary import Summary
from geo_ray.planning.plan import Plan
from geo_ray.runtime.cluster.connect import ConnectedCluster
from geo_ray.runtime.driver.train import Resumption


@dataclass(frozen=True, slots=True)
class DriveOrder:
    """A run to be driven to its end.

    Attributes:
        experiment_json: its configuration.
        run: its directory.
        resume: as for `geo_ray.runtime.driver.train.train`.
        cluster: to run on.
        began_unix_s: time of day of the user's command.
        adopts: whether the configuration is another one than the directory has.
        plan: to follow from now on, if it is another one than before.
        is_detached: whether nobody is meant to watch.
    """

    experiment_json: str
    run: RunDirectory
    resume: Resumption | None
    cluster: ConnectedCluster
    began_unix_s: float
    adopts: bool = False
    plan: Plan | None = None
    is_detached: bool = False

    @property
    def experiment(self) -> Experiment:
        """The configuration as a tree."""
        given = context(self.run.base_dir)
        return Experiment.model_validate_json(self.experiment_json, context=given)


@dataclass(frozen=True, slots=True)
class DriverTold:
    """What a driver has to say to who watches it; events are in the run's log.

    Attributes:
        lines: phases since the last time, in order, and warnings, each with its logger's name.
        next: the number of the first line that is not among them.
        awaiting: (phase, done, total, names) of a wait that is going on.
        is_over: whether the run has ended.
        summary: what it came to.
        error: what ended it early.
    """

    lines: Sequence[tuple[str, str]]
    next: int
    awaiting: tuple[str, int, int, Sequence[str]] | None = None
    is_over: bool = False
    summary: Summary | None = None
    error: BaseException | None = field(default=None)


def driver_name(run_dir: Path) -> str:
    """The name of a run's driver among the actors of its namespace: there is at most one."""
    return f"driver-{hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()[:16]}"
