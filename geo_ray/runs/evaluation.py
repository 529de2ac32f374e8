"""Evaluation of a run: combine the regions' statistics and keep the best model.

Statistics are added; samples never leave their region. Results are recorded, and the run stops at
its target.
"""

from __future__ import annotations

import logging
import shutil
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
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
from geo_ray.base.types import Span
from geo_ray.data.tasks.base import Stats, Task
from geo_ray.data.tasks.checked_calls import checked_metrics
from geo_ray.experiment.experiment import Experiment
from geo_ray.runs.directory import RunDirectory
from geo_ray.runs.model_file import about_model, save_trained
from geo_ray.telemetry.events import Event
from geo_ray.telemetry.summary import Best, KeepBest, Target
from geo_ray.training.parameters import digest


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A finished evaluation.

    Attributes:
        step: region steps of the evaluated parameters; the regions' last when `final`.
        region: whose parameters and held-out rows; None for all regions together.
        metrics: the task's metrics.
        samples: held-out rows behind them.
        final: made after the last exchange, when all regions agree.
        one_model: all regions have told that they evaluated the same parameters, or there is one.
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
    """Collects one region's statistics after the other.

    Attributes:
        task: turns sums into metrics.
        num_regions: how many belong together.
        intervals: steps between a region's evaluations, by region. Evaluations of the same interval
            belong together: asynchronous regions pass a due step by a push or two. A region that
            is not named is matched by the step itself.
        newest: instead, the newest evaluations of all regions belong together, as soon as each has
            made one; for regions whose numbers of steps have nothing to do with each other.
    """

    task: Task
    num_regions: int
    intervals: Mapping[str, int] = field(default_factory=dict)
    newest: bool = False
    _joined: dict[str, int] = field(default_factory=dict)  # newcomers: their first interval
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
        """Take in one region's statistics.

        Args:
            region: whose.
            step: of the evaluated parameters.
            stats: sums over its held-out rows.
            samples: how many these are.
            final: made after the last exchange.
            model: digest of the evaluated parameters, if it is told.

        Returns:
            Its evaluation, and the combined one if it was the last region of that step (or of
            that interval).
        """
        # After the last exchange all belong together, whatever their step.
        number = 0 if self.newest else step // self.intervals.get(region, 1)
        key = (-1 if final else number, final)
        group = self._open.setdefault(key, {})
        group[region] = _Reported(stats, samples, step, model)
        metrics = checked_metrics(self.task, stats)
        done = [Evaluation(step, region, metrics, samples, final, steps={region: step})]
        return done + self._complete([key])

    def admit(self, region: str, step: int) -> None:
        """A region joins that has as many steps behind it: its evaluations count from there on."""
        self._joined[region] = step // self.intervals.get(region, 1)

    def forget(self, region: str) -> list[Evaluation]:
        """Go on without a region; what it has told of open evaluations does not count.

        Returns:
            Combined evaluations that had waited for it alone.
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
            if group:  # else all whom it was of are gone
                done.append(self._combined(group, final=key[1]))
        return done

    def _reported(self, key: tuple[int, bool]) -> dict[str, _Reported]:
        """What the regions have told that an evaluation is of."""
        number, final = key
        always = final or self.newest
        reports = self._open[key].items()
        return {name: t for name, t in reports if always or number > self._joined.get(name, -1)}

    def _wanted(self, number: int, final: bool) -> int:
        """How many regions an evaluation is of."""
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
"""`Candidates.note` of one region."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """Evaluated parameters between their evaluation and its outcome: files of the run, soon gone.

    Whoever has evaluated parameters is the only one who has exactly them: the region goes on
    training, and other regions may have others. So they are written down there and then, before the
    result is told, and whoever learns the result takes the file or drops it.

    Attributes:
        directory: where the files are.
        writers: regions whose parameters may be kept: the averager's, and all where it may move.
        together: whether regions are to tell which parameters they have evaluated, so that it can
            be seen that all of them have evaluated the same.
    """

    directory: Path
    writers: frozenset[str]
    together: bool

    @classmethod
    def of(cls, experiment: Experiment, run_dir: Path) -> Candidates | None:
        """Those of a run; None if it keeps no best model."""
        if experiment.train.keep_best is None:
            return None
        names = {experiment.averager_region}
        if experiment.averager.standby is not None:  # it may move anywhere
            names |= {*experiment.region_names}
        together = regions_agree(experiment) and len(experiment.regions) > 1
        return cls(run_dir / _DIRECTORY, frozenset(names), together)

    def prepare(self, *, anew: bool = True) -> None:
        """Make the directory.

        Args:
            anew: without what an earlier process has left there.

        Raises:
            RunDirectoryError: it cannot be made.
        """
        if anew:
            self.close()
        try:
            self.directory.mkdir(exist_ok=True)
        except OSError as error:
            raise unwritable(self.directory, error) from error

    def close(self) -> None:
        """Remove the directory and all that is in it."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def note(
        self, region: str, step: int, params_P: Tensor, buffers_B: Tensor, final: bool
    ) -> str | None:
        """Write evaluated parameters down, where they may be kept.

        A disk that is full must not end a training: who wants the file will miss it, and say so.

        Args:
            region: whose.
            step: of the evaluation.
            params_P: fp32 (P,), exactly as they were evaluated.
            buffers_B: model buffers, uint8 (B,); empty if the model has none.
            final: whether it is the last one.

        Returns:
            Their digest, if it is to be told.
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
        # What is exchanged beside them is equal where parameters are; the rest is a region's own.
        return digest(params_P) if self.together else None

    def take(self, region: str, step: int, *, final: bool) -> tuple[Tensor, Tensor | None]:
        """The parameters of an evaluation, fp32 (P,), and the model buffers.

        Raises:
            RunDirectoryError: they were not written, or cannot be read.
        """
        path = self._path(region, step, final=final)
        try:
            found = load_file(path)
            return found["params"], found.get("model_buffers")
        except (OSError, SafetensorError, KeyError) as error:
            raise RunDirectoryError(
                f"the parameters that region '{region}' evaluated at step {step} cannot be read "
                f"from {path}: {error}",
                fix="Let all workers reach `run.dir`, with room for the model there.",
            ) from error

    def drop(self, region: str, step: int, *, final: bool) -> None:
        """Remove the parameters of an evaluation, if they are there."""
        self._path(region, step, final=final).unlink(missing_ok=True)

    def _path(self, region: str, step: int, *, final: bool) -> Path:
        return self.directory / f"{region}-{step}{'-final' if final else ''}.safetensors"


def regions_agree(experiment: Experiment) -> bool:
    """Whether the regions of a run evaluate one and the same model, whenever they evaluate.

    They do in rounds for which everybody waits, if what is evaluated is what the averager knows, or
    if it is the region's own model just after a round.
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
    """Keeps the best evaluated model of a run beside the last one.

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

    def consider(self, done: Evaluation, leader: str) -> Best | None:
        """Keep the model of an evaluation if it is the best so far.

        Args:
            done: every one that there is, of single regions and of all together.
            leader: the averager's region.

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


Emit = Callable[..., Event]
"""``emit(kind, t_s, **fields)``: takes one event and gives it back."""

EvalMark = tuple[int, str | None, bool]
"""What tells an evaluation from all others: step, region, whether it is the last."""


@dataclass(frozen=True, slots=True)
class EvalNotes:
    """Records an evaluation, keeps the best model, and notes when the target is reached.

    The same for real and simulated runs. To keep a model is to read and to write all of it: who
    watches a run has no time for that and gives an executor of one thread, which looks at
    evaluations in their order. What came of it is written down once it is known.

    Attributes:
        collector: combines the regions' evaluations.
        emit: takes events.
        target: of the run.
        keeper: keeps the best model; None if nobody wants it.
        executor: keeps it one evaluation at a time, in order; None: there and then.
        reports: those of which an earlier run actor has taken note.
    """

    collector: EvalCollector
    emit: Emit
    target: Target | None = None
    keeper: BestKeeper | None = None
    executor: Executor | None = None
    reports: frozenset[EvalMark] = frozenset()
    _asked: deque[tuple[int, Future[Best | None]]] = field(default_factory=deque)  # by step

    def begin(self, t_s: float) -> None:
        """Write down what is the best so far, if the run goes on with an earlier one."""
        if self.keeper is not None and self.keeper.best is not None:
            self._note_best(self.keeper.best, t_s)

    def end(self, now_s: Callable[[], float]) -> None:
        """Leave nothing behind but the best model, which is written to its end and told of.

        Args:
            now_s: when that is.
        """
        try:
            if self.executor is not None:
                self.executor.shutdown()
            self.settle(now_s())
        finally:
            if self.keeper is not None:
                self.keeper.candidates.close()

    def settle(self, t_s: float) -> None:
        """Write down what has come of keeping models, by ``t_s``."""
        while self._asked and self._asked[0][1].done():
            step, outcome = self._asked.popleft()
            try:
                best = outcome.result()
            except RunDirectoryError as error:
                log.error("the best model so far was not kept: %s", error)
                self.emit("best_failed", t_s, step=step, cause=error.message)
                continue
            if best is not None:
                self._note_best(best, t_s)

    def take(self, finished: list[Evaluation], t_s: float, leader: str) -> str | None:
        """Take in what `EvalCollector` has put together.

        Args:
            finished: evaluations in order.
            t_s: when.
            leader: the averager's region.

        Returns:
            Why the run is to stop, if it is.

        Raises:
            ConfigError: target or best model go by a metric that the task does not have.
        """
        cause = None
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
            if self.target is not None and hits(self.target, done, written):
                cause = f"{self.target.metric} reached {self.target.value:g}"
        return cause

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


def hits(target: Target, done: Evaluation, event: Event) -> bool:
    """Whether ``done``, written down as ``event``, reaches the target of the whole run.

    Raises:
        ConfigError: if the task has no such metric.
    """
    if done.final or done.region is not None:
        return False
    if target.metric not in done.metrics:
        raise no_such_metric("train.target.metric", target.metric, done.metrics)
    return target.stop and target.reached(event)


@dataclass(frozen=True, slots=True)
class EvalSetting:
    """How a worker evaluates.

    Attributes:
        rows: of a batch.
        note: takes evaluated parameters; None if nobody wants them.
        statistics: rows that running statistics are computed from before the last evaluation.
    """

    rows: int = 256
    note: Note | None = None
    statistics: tuple[Span, ...] = ()
