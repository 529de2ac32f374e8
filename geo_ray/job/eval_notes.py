"""What follows from an evaluation: it is written down, may be the best so far, or reach the target.

The same for real and simulated runs. To keep a model is to read and to write all of it: who watches
a run has no time for that and gives an executor of one thread, which looks at evaluations in their
order. What came of it is written down once it is known.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field

from geo_ray.errors import RunDirectoryError
from geo_ray.job.best import BestKeeper, no_such_metric
from geo_ray.job.evals import EvalBoard, Evaluation
from geo_ray.observe.events.schema import Event
from geo_ray.observe.metrics.best import Best
from geo_ray.observe.metrics.summary import Target

log = logging.getLogger(__name__)

Emit = Callable[..., Event]
"""``emit(kind, t_s, **fields)``: takes one event and gives it back."""

EvalMark = tuple[int, str | None, bool]
"""What tells an evaluation from all others: step, region, whether it is the last."""


@dataclass(frozen=True, slots=True)
class EvalNotes:
    """See the module's docstring.

    Attributes:
        board: combines the regions' evaluations.
        emit: takes events.
        target: of the run.
        keeper: keeps the best model; None if nobody wants it.
        executor: keeps it one evaluation at a time, in order; None: there and then.
        told: those of which an earlier driver has taken note.
    """

    board: EvalBoard
    emit: Emit
    target: Target | None = None
    keeper: BestKeeper | None = None
    executor: Executor | None = None
    told: frozenset[EvalMark] = frozenset()
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

    def take(self, finished: list[Evaluation], t_s: float, home: str) -> str | None:
        """Take in what `EvalBoard` has put together.

        Args:
            finished: evaluations in order.
            t_s: when.
            home: the averager's region.

        Returns:
            Why the run is to stop, if it is.

        Raises:
            ConfigError: target or best model go by a metric that the task does not have.
        """
        cause = None
        for done in finished:
            if (done.step, done.region, done.final) in self.told:
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
            self._consider(done, t_s, home)
            if self.target is not None and hits(self.target, done, written):
                cause = f"{self.target.metric} reached {self.target.value:g}"
        return cause

    def _consider(self, done: Evaluation, t_s: float, home: str) -> None:
        if self.keeper is None:
            return
        self.keeper.check(done)
        outcome: Future[Best | None] = Future()
        if self.executor is not None:
            outcome = self.executor.submit(self.keeper.consider, done, home)
        else:
            try:
                outcome.set_result(self.keeper.consider(done, home))
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
