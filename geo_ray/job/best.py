"""Keeps the best evaluated model of a run beside the last one."""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path

from pydantic import ValidationError
from safetensors import SafetensorError, safe_open

from geo_ray.config.experiment import Experiment
from geo_ray.errors import ConfigError
from geo_ray.job.candidates import Candidates, regions_agree
from geo_ray.job.evals import Evaluation
from geo_ray.job.model_file import about_model, save_trained
from geo_ray.job.rundir import RunDirectory
from geo_ray.observe.metrics.best import Best, KeepBest
from geo_ray.tasks.base import Task

log = logging.getLogger(__name__)

_ABOUT = "best"  # the file's metadata: `Best` as JSON


class BestKeeper:
    """See the module's docstring.

    An evaluation counts if it is of one model. Where regions agree, that is the one of all regions
    together; where they differ, it is the averager's region's own.

    Attributes:
        best: so far, of this run and of what it goes on with; None without any.
        candidates: where evaluated parameters are found.

    Args:
        rule: what is best.
        experiment: the run.
        task: gives the module.
        run: where the model goes.
        candidates: where evaluated parameters are found.
    """

    def __init__(
        self,
        rule: KeepBest,
        experiment: Experiment,
        task: Task,
        run: RunDirectory,
        candidates: Candidates,
    ) -> None:
        self.candidates = candidates
        self._rule = rule
        self._experiment = experiment
        self._task = task
        self._path = run.best_model
        self._agree = regions_agree(experiment)
        self.best = rule.known(load_best(run.best_model))

    @classmethod
    def of(
        cls, experiment: Experiment, task: Task, run: RunDirectory, *, attaches: bool = False
    ) -> BestKeeper | None:
        """What keeps the best model of a run that begins or goes on; None if nothing is to.

        Args:
            experiment: the run.
            task: gives the module.
            run: its directory.
            attaches: whether the run's processes go on: what they have left to be kept stays.

        Raises:
            RunDirectoryError: the run's directory cannot be written.
        """
        rule, candidates = experiment.train.keep_best, Candidates.of(experiment, run.path)
        if rule is None or candidates is None:
            return None
        candidates.prepare(anew=not attaches)
        return cls(rule, experiment, task, run, candidates)

    def check(self, done: Evaluation) -> None:
        """Refuse an evaluation that says nothing of what is best.

        Raises:
            ConfigError: the task has no such metric.
        """
        if self._rule.metric not in done.metrics:
            raise no_such_metric("train.keep_best.metric", self._rule.metric, done.metrics)

    def consider(self, done: Evaluation, home: str) -> Best | None:
        """Keep the model of an evaluation if it is the best so far.

        Args:
            done: every one that there is, of single regions and of all together.
            home: the averager's region.

        Returns:
            What is known of the model if it was kept; it is `best` from now on.

        Raises:
            ConfigError: the task has no such metric.
            RunDirectoryError: it is the best, but could not be kept; the best before stays.
        """
        self.check(done)
        if (done.region is None) != self._agree:
            return None
        try:
            if not (home in done.steps and done.one_model and self._is_better(done)):
                return None
            return self._keep(done, home)
        finally:
            for region, step in done.steps.items():
                self.candidates.drop(region, step, final=done.final)

    def _is_better(self, done: Evaluation) -> bool:
        return self._rule.is_better(done.metrics[self._rule.metric], self.best)

    def _keep(self, done: Evaluation, home: str) -> Best:
        alone = len(self._experiment.regions) == 1
        best = Best(
            metric=self._rule.metric,
            mode=self._rule.mode,
            value=done.metrics[self._rule.metric],
            step=done.step,
            region=None if alone else done.region,
            samples=done.samples,
            metrics=dict(done.metrics),
        )
        params_P, carried_B = self.candidates.take(home, done.steps[home], final=done.final)
        about = about_model(self._experiment, best.step, best.metrics)
        about[_ABOUT] = best.model_dump_json()
        save_trained(self._task, self._experiment.seed, params_P, self._path, about, carried_B)
        self.best = best
        return best


def load_best(path: Path) -> Best | None:
    """What the file of a best model says of itself; None if there is none, or it says nothing."""
    if not path.exists():
        return None
    try:
        with safe_open(path, "pt") as file:
            return Best.model_validate_json((file.metadata() or {})[_ABOUT])
    except (OSError, SafetensorError, KeyError, ValidationError) as error:
        log.warning("%s does not say what it is the best by, and does not count: %s", path, error)
        return None


def no_such_metric(key: str, metric: str, there: Collection[str]) -> ConfigError:
    """The error to raise where a configuration names a metric that the task does not give."""
    return ConfigError(
        f"{key}: the task's evaluation has no '{metric}'",
        fix=f"Set {key} to {' or '.join(sorted(there))}.",
    )
