"""Evaluation of a run: combines the regions' statistics and saves the best model.

Statistics are added; samples never leave their region. Results are recorded, and the run stops at
its target.
"""

from __future__ import annotations

import logging
import math
import shutil
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from geo_ray.base.errors import ConfigError, RunDirectoryError
from geo_ray.base.files import TEMPORARY_SUFFIX, unwritable
from geo_ray.base.text import counted, number_text
from geo_ray.base.types import Span
from geo_ray.data.tasks.base import Stats, Task
from geo_ray.data.tasks.checked_calls import checked_metrics
from geo_ray.experiment.experiment import Experiment
from geo_ray.runs.directory import RunDirectory
from geo_ray.runs.model_file import about_model, save_trained
from geo_ray.telemetry.events import Event
from geo_ray.telemetry.summary import Best, EarlyStop, KeepBest
from geo_ray.training.config import TrainConfig
from geo_ray.training.parameters import digest


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A finished evaluation.

    Attributes:
        step: region steps of the evaluated parameters; in a combined evaluation, the largest of any
            region.
        region: region of the parameters and held-out rows; None for all regions.
        metrics: the task's metrics.
        samples: number of held-out rows.
        final: made after the last exchange, when all regions have the same model.
        one_model: whether all regions reported the same parameters, or there is one region.
        steps: each region's own step.
    """

    step: int
    region: str | None
    metrics: dict[str, float]
    samples: int
    final: bool = False
    one_model: bool = True
    steps: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Reported:
    stats: Stats
    samples: int
    step: int
    model: str | None


@dataclass(slots=True)
class EvalCollector:
    """Collects the statistics of regions.

    Attributes:
        task: converts sums to metrics.
        num_regions: number of regions that are combined.
        intervals: steps between a region's evaluations, by region. Evaluations of the same interval
            are combined, because asynchronous regions exceed a due step by a push or two. Other
            regions are matched by step.
        newest: combine the newest evaluations of all regions instead, once each has made one; for
            regions with unrelated numbers of steps.
    """

    task: Task
    num_regions: int
    intervals: Mapping[str, int] = field(default_factory=dict)
    newest: bool = False
    # Interval in which a region joined; only its evaluations of later intervals count.
    _joined: dict[str, int] = field(default_factory=dict)
    _open: dict[tuple[int, bool], dict[str, _Reported]] = field(default_factory=dict)

    def add(
        self,
        region: str,
        step: int,
        stats: Stats,
        samples: int,
        *,
        final: bool = False,
        model: str | None = None,
    ) -> list[Evaluation]:
        """Add one region's statistics.

        Args:
            region: name of the region.
            step: step of the evaluated parameters.
            stats: sums over its held-out rows.
            samples: number of these rows.
            final: whether it was made after the last exchange.
            model: digest of the evaluated parameters, if reported.

        Returns:
            Its evaluation, and the combined one if it was the last region of that step (or of
            that interval).
        """
        # After the last exchange all evaluations are combined, whatever their step.
        number = 0 if self.newest else step // self.intervals.get(region, 1)
        key = (-1 if final else number, final)
        group = self._open.setdefault(key, {})
        group[region] = _Reported(stats, samples, step, model)
        metrics = checked_metrics(self.task, stats)
        done = [Evaluation(step, region, metrics, samples, final, steps={region: step})]
        return done + self._complete([key])

    def admit(self, region: str, step: int) -> None:
        """Add a region that joins at a step; its later evaluations count."""
        self._joined[region] = step // self.intervals.get(region, 1)

    def forget(self, region: str) -> list[Evaluation]:
        """Remove a region, and its statistics in incomplete evaluations.

        Returns:
            Combined evaluations that waited only for this region.
        """
        waiting = [key for key in self._open if len(self._reported(key)) < self._wanted(*key)]
        if self._joined.pop(region, None) is None:
            self.num_regions -= 1
        for group in self._open.values():
            group.pop(region, None)
        return self._complete(waiting)

    def _complete(self, keys: Sequence[tuple[int, bool]]) -> list[Evaluation]:
        done = []
        for key in keys:
            group = self._reported(key)
            if len(group) != self._wanted(*key):
                continue
            if key[1] or not self.newest:
                del self._open[key]
            if group:  # empty if all its regions are gone
                done.append(self._combined(group, final=key[1]))
        return done

    def _reported(self, key: tuple[int, bool]) -> dict[str, _Reported]:
        """Return the reports of the regions that count for an evaluation."""
        number, final = key
        always = final or self.newest
        reports = self._open[key].items()
        return {name: t for name, t in reports if always or number > self._joined.get(name, -1)}

    def _wanted(self, number: int, final: bool) -> int:
        """Return the number of regions of an evaluation."""
        always = final or self.newest
        return self.num_regions + sum(always or number > first for first in self._joined.values())

    def _combined(self, group: Mapping[str, _Reported], *, final: bool) -> Evaluation:
        ordered = [group[name] for name in sorted(group)]
        total = {n: sum_of([reports.stats[n] for reports in ordered]) for n in ordered[0].stats}
        rows = sum(reports.samples for reports in ordered)
        steps = {name: reports.step for name, reports in sorted(group.items())}
        models = {reports.model for reports in ordered}
        one_model = len(ordered) == 1 or (len(models) == 1 and None not in models)
        metrics = checked_metrics(self.task, total)
        return Evaluation(max(steps.values()), None, metrics, rows, final, one_model, steps)


def sum_of(
    arrays: list[np.ndarray[tuple[int, ...], np.dtype[np.float64]]],
) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Sum arrays of one shape (K,) in order."""
    total = arrays[0].copy()
    for array in arrays[1:]:
        total += array
    return total


log = logging.getLogger(__name__)

_DIRECTORY = "candidates"

Note = Callable[[int, Tensor, Tensor, bool], str | None]
"""`Candidates.note`, bound to one region: writes evaluated parameters to a file."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """Files with evaluated parameters, kept until the result of the evaluation is known.

    Only the process that evaluated parameters has exactly these: the region continues to train,
    and other regions may have other parameters. Therefore they are written before the result is
    reported, and the receiver of the result uses or deletes the file.

    Attributes:
        directory: directory of the files.
        writers: regions whose parameters may be saved: the averager's, and all if it may move.
        reports_digest: whether regions report a digest of the evaluated parameters, to verify that
            all of them evaluated the same.
    """

    directory: Path
    writers: frozenset[str]
    reports_digest: bool

    @classmethod
    def of(cls, experiment: Experiment, run_dir: Path) -> Candidates | None:
        """Return the candidates of a run; None if it saves no best model."""
        if experiment.train.keep_best is None:
            return None
        names = {experiment.averager_region}
        if experiment.averager.standby is not None:  # it may move to any region
            names |= {*experiment.region_names}
        reports_digest = regions_agree(experiment) and len(experiment.regions) > 1
        return cls(run_dir / _DIRECTORY, frozenset(names), reports_digest)

    def prepare(self, *, fresh: bool = True) -> None:
        """Create the directory.

        Args:
            fresh: whether to remove files of an earlier process.

        Raises:
            RunDirectoryError: the directory cannot be created.
        """
        if fresh:
            self.close()
        try:
            self.directory.mkdir(exist_ok=True)
        except OSError as error:
            raise unwritable(self.directory, error) from error

    def close(self) -> None:
        """Remove the directory and its files."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def note(
        self, region: str, step: int, params_P: Tensor, buffers_B: Tensor, final: bool
    ) -> str | None:
        """Write evaluated parameters, if the region is a writer.

        A full disk must not end the training: the receiver reports the missing file.

        Args:
            region: name of the region.
            step: step of the evaluation.
            params_P: evaluated parameters, fp32 (P,).
            buffers_B: model buffers, uint8 (B,); empty if the model has none.
            final: whether it is the last evaluation.

        Returns:
            Their digest, if digests are reported.
        """
        if region in self.writers:
            path = self._path(region, step, final=final)
            temporary = path.with_suffix(TEMPORARY_SUFFIX)
            try:
                tensors = {"params": params_P.detach()}
                if buffers_B.numel():
                    tensors["model_buffers"] = buffers_B.clone()
                save_file(tensors, temporary)
                temporary.replace(path)
            except (OSError, SafetensorError) as error:
                log.warning("the evaluated parameters cannot be written to %s: %s", path, error)
                temporary.unlink(missing_ok=True)
        # Exchanged model buffers are equal if the parameters are; others are local to a region.
        return digest(params_P) if self.reports_digest else None

    def take(self, region: str, step: int, *, final: bool) -> tuple[Tensor, Tensor | None]:
        """Read the parameters of an evaluation, fp32 (P,), and the model buffers.

        Raises:
            RunDirectoryError: the file is missing, or cannot be read.
        """
        path = self._path(region, step, final=final)
        try:
            found = load_file(path)
            return found["params"], found.get("model_buffers")
        except (OSError, SafetensorError, KeyError) as error:
            raise RunDirectoryError(
                f"the parameters that region '{region}' evaluated at step {step} cannot be read "
                f"from {path}: {error}",
                fix="Give all workers access to `run.dir`, with space for the model.",
            ) from error

    def drop(self, region: str, step: int, *, final: bool) -> None:
        """Remove the parameters of an evaluation, if present."""
        self._path(region, step, final=final).unlink(missing_ok=True)

    def _path(self, region: str, step: int, *, final: bool) -> Path:
        return self.directory / f"{region}-{step}{'-final' if final else ''}.safetensors"


def regions_agree(experiment: Experiment) -> bool:
    """Return whether all regions always evaluate the same model.

    This holds in synchronous rounds, if the averager's model is evaluated, or the region's own
    model just after a round.
    """
    train, traits = experiment.train, experiment.strategy.traits
    if len(experiment.regions) == 1:
        return True
    if train.mode == "async" or train.stragglers is not None or experiment.counts_total_rows:
        return False
    up = experiment.codec.up
    if up is not None and up.traits.differential is not None:
        return False
    exchange = traits.exchange
    if not traits.in_rounds or exchange.blocking != "always":
        return False
    if train.evaluate == "outer" and traits.region.eval_params is not None:
        return True
    return exchange.fragments == 1 and train.eval_every % exchange.every == 0


_ABOUT = "best"  # the file's metadata: `Best` as JSON


class BestKeeper:
    """Saves the best evaluated model of a run, in addition to the last one.

    An evaluation counts if it belongs to one model: if regions agree, the combined evaluation;
    otherwise that of the averager's region.

    Attributes:
        best: the best model, including earlier segments of the run; None if there is none.
        candidates: files with evaluated parameters.

    Args:
        rule: comparison of models.
        experiment: the run.
        task: builds the module.
        run: directory of the model.
        candidates: files with evaluated parameters.
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
        """Return the keeper of a run's best model; None if no best model is saved.

        Args:
            experiment: the run.
            task: builds the module.
            run: directory of the run.
            attaches: whether the run's processes continue; their candidate files then stay.

        Raises:
            RunDirectoryError: the run's directory cannot be written.
        """
        rule, candidates = experiment.train.keep_best, Candidates.of(experiment, run.path)
        if rule is None or candidates is None:
            return None
        candidates.prepare(fresh=not attaches)
        return cls(rule, experiment, task, run, candidates)

    def check(self, done: Evaluation) -> None:
        """Reject an evaluation without the compared metric.

        Raises:
            ConfigError: the task has no such metric.
        """
        if self._rule.metric not in done.metrics:
            raise no_such_metric("train.keep_best.metric", self._rule.metric, done.metrics)

    def consider(self, done: Evaluation, leader: str) -> Best | None:
        """Save the model of an evaluation if it is the best.

        Args:
            done: an evaluation of a single region or of all regions.
            leader: the averager's region.

        Returns:
            The description of the model if it was saved, which is then `best`.

        Raises:
            ConfigError: the task has no such metric.
            RunDirectoryError: it is the best, but cannot be saved; the previous one stays.
        """
        self.check(done)
        if (done.region is None) != self._agree:
            return None
        try:
            if not (leader in done.steps and done.one_model and self._is_better(done)):
                return None
            return self._keep(done, leader)
        finally:
            for region, step in done.steps.items():
                self.candidates.drop(region, step, final=done.final)

    def _is_better(self, done: Evaluation) -> bool:
        return self._rule.is_better(done.metrics[self._rule.metric], self.best)

    def _keep(self, done: Evaluation, leader: str) -> Best:
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
        params_P, buffers_B = self.candidates.take(leader, done.steps[leader], final=done.final)
        about = about_model(self._experiment, best.step, best.metrics)
        about[_ABOUT] = best.model_dump_json()
        save_trained(self._task, self._experiment.seed, params_P, self._path, about, buffers_B)
        self.best = best
        return best


def load_best(path: Path) -> Best | None:
    """Return the metadata of a best model's file, or None."""
    if not path.exists():
        return None
    try:
        with safe_open(path, "pt") as file:
            return Best.model_validate_json((file.metadata() or {})[_ABOUT])
    except (OSError, SafetensorError, KeyError, ValidationError) as error:
        log.warning("%s has no valid metadata and is ignored: %s", path, error)
        return None


def no_such_metric(key: str, metric: str, there: Collection[str]) -> ConfigError:
    """Return the error about a metric that the task does not have."""
    return ConfigError(
        f"{key}: the task's evaluation has no '{metric}'",
        fix=f"Set {key} to {' or '.join(sorted(there))}.",
    )


Emit = Callable[..., Event]
"""``emit(kind, t_s, **fields)``: records an event and returns it."""

EvalMark = tuple[int, str | None, bool]
"""Key of an evaluation: step, region, whether it is the last."""


class StoppingRule:
    """Decides after an evaluation of all regions whether the run ends early.

    Evaluations of single regions, and the last one, do not count.

    Args:
        train: target and patience of the run.
        known: earlier events of the run. A resumed run repeats evaluations after its checkpoint;
            the newest one of a step counts.
        is_strict: whether an evaluation must have the metrics. Otherwise a missing one is logged
            once; loops of users may report it later.
    """

    def __init__(
        self, train: TrainConfig, known: Iterable[Event] = (), *, is_strict: bool = True
    ) -> None:
        self._is_strict = is_strict
        self._target, self._patience, self._watched = train.target, train.patience, train.watched
        self._missing: set[str] = set()  # metrics whose lack was logged
        self._values: list[tuple[int, float]] = []  # of the watched metric, by step
        self._best: float | None = None
        self._without = 0  # evaluations since the best one
        if self._patience is None:
            return
        for event in known:
            if _is_common(event) and self._watched.metric in event["metrics"]:
                self._note(event["step"], _number(event["metrics"][self._watched.metric]))

    def after(self, event: Event) -> EarlyStop | None:
        """Return why the run ends after an `eval` event, or None.

        Raises:
            ConfigError: the task does not have the metric of the target or of the patience.
        """
        if (self._target is None and self._patience is None) or not _is_common(event):
            return None
        metrics, target, watched = event["metrics"], self._target, self._watched.metric
        key = "train.keep_best.metric" if self._is_strict else "train.patience"
        is_new = self._patience is not None and self._has(key, watched, metrics)
        if is_new:
            self._note(event["step"], _number(metrics[watched]))
        has_target = target is not None and self._has("train.target.metric", target.metric, metrics)
        if has_target and target is not None and target.stop and target.reached(event):
            cause = f"{target.metric} reached {target.value:g}"
            return EarlyStop(reason="target", cause=cause)
        if self._patience is None or not is_new or self._without < self._patience:
            return None
        best = "" if self._best is None else f"; the best was {number_text(self._best)}"
        cause = f"{watched} has not improved in {counted(self._without, 'evaluation')}{best}"
        return EarlyStop(reason="patience", cause=cause)

    def _has(self, key: str, metric: str, metrics: Mapping[str, object]) -> bool:
        if metric not in metrics and self._is_strict:
            raise no_such_metric(key, metric, metrics)
        if metric not in metrics and metric not in self._missing:
            self._missing.add(metric)
            log.warning(
                "%s has no effect: the regions' evaluations have no '%s', but %s",
                key,
                metric,
                ", ".join(sorted(metrics)) or "nothing",
            )
        return metric in metrics

    def _note(self, step: int, value: float) -> None:
        if self._values and step <= self._values[-1][0]:
            earlier = [pair for pair in self._values if pair[0] < step]
            self._values, self._best, self._without = [], None, 0
            for pair in earlier:
                self._note(*pair)
        self._values.append((step, value))
        is_usable = math.isfinite(value)
        if is_usable and (self._best is None or self._watched.improves(value, self._best)):
            self._best, self._without = value, 0
        else:
            self._without += 1


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _is_common(event: Event) -> bool:
    return event.kind == "eval" and event["region"] is None and not event.fields.get("final")


@dataclass(frozen=True, slots=True)
class EvalNotes:
    """Records evaluations, saves the best model, and notes when the target is reached.

    The same for real and simulated runs. Saving a model reads and writes all of it, so the run
    actor passes an executor of one thread, which processes evaluations in order. The result is
    recorded once it is known.

    Attributes:
        collector: combines the regions' evaluations.
        emit: records events.
        stopping: decides when an evaluation ends the run; None: none does.
        keeper: saves the best model; None if no best model is saved.
        executor: runs the keeper in order; None: runs it synchronously.
        reports: evaluations that an earlier run actor has recorded.
    """

    collector: EvalCollector
    emit: Emit
    stopping: StoppingRule | None = None
    keeper: BestKeeper | None = None
    executor: Executor | None = None
    reports: frozenset[EvalMark] = frozenset()
    _asked: deque[tuple[int, Future[Best | None]]] = field(default_factory=deque)  # by step

    def begin(self, t_s: float) -> None:
        """Record the best model, if the run continues with an earlier one."""
        if self.keeper is not None and self.keeper.best is not None:
            self._note_best(self.keeper.best, t_s)

    def end(self, now_s: Callable[[], float]) -> None:
        """Finish saving the best model, record it, and remove the candidate files.

        Args:
            now_s: time of the event.
        """
        try:
            if self.executor is not None:
                self.executor.shutdown()
            self.settle(now_s())
        finally:
            if self.keeper is not None:
                self.keeper.candidates.close()

    def settle(self, t_s: float) -> None:
        """Record the results of saved models, until ``t_s``."""
        while self._asked and self._asked[0][1].done():
            step, outcome = self._asked.popleft()
            try:
                best = outcome.result()
            except RunDirectoryError as error:
                log.error("the best model was not saved: %s", error)
                self.emit("best_failed", t_s, step=step, cause=error.message)
                continue
            if best is not None:
                self._note_best(best, t_s)

    def take(self, finished: list[Evaluation], t_s: float, leader: str) -> EarlyStop | None:
        """Record finished evaluations.

        Args:
            finished: evaluations in order.
            t_s: time of the event.
            leader: the averager's region.

        Returns:
            The reason to stop the run, or None.

        Raises:
            ConfigError: target, patience or best model use a metric that the task does not have.
        """
        stop = None
        for done in finished:
            if (done.step, done.region, done.final) in self.reports:
                continue
            written = self.emit(
                "eval",
                t_s,
                step=done.step,
                region=done.region,
                metrics=done.metrics,
                samples=done.samples,
                final=done.final,
            )
            self._consider(done, t_s, leader)
            if self.stopping is not None:
                stop = self.stopping.after(written) or stop
        return stop

    def _consider(self, done: Evaluation, t_s: float, leader: str) -> None:
        if self.keeper is None:
            return
        self.keeper.check(done)
        outcome: Future[Best | None] = Future()
        if self.executor is not None:
            outcome = self.executor.submit(self.keeper.consider, done, leader)
        else:
            try:
                outcome.set_result(self.keeper.consider(done, leader))
            except RunDirectoryError as error:
                outcome.set_exception(error)
        self._asked.append((done.step, outcome))
        self.settle(t_s)

    def _note_best(self, best: Best, t_s: float) -> None:
        self.emit("best_kept", t_s, **best.model_dump())


@dataclass(frozen=True, slots=True)
class EvalSetting:
    """Evaluation settings of a worker.

    Attributes:
        rows: rows per batch.
        note: receives evaluated parameters; None if unused.
        statistics: rows from which running statistics are computed before the last evaluation.
    """

    rows: int = 256
    note: Note | None = None
    statistics: tuple[Span, ...] = ()
