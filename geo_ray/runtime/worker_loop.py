"""The worker loop: computes assigned steps from the first request to the release, without Ray.

`WorkerActor` hosts it. Reading order: `WorkerLoop.run`, `_evaluate`, `_steps`, `_compute`. On one
host the parameters and the gradient are in memory that is shared with the shards, so a request is
only a signal. Across hosts the same requests carry the bytes (`remote_shard.py`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from geo_ray.base.threads import ThreadPoolMap
from geo_ray.base.types import Span, StepReport
from geo_ray.data.reader import ReadAhead, RegionReader
from geo_ray.runs.evaluation import EvalSetting
from geo_ray.runtime.device import ON_CPU, DeviceReport
from geo_ray.runtime.remote_shard import ShardLink, ShardLinks, WorkerModel
from geo_ray.training.effects import Assignment
from geo_ray.training.stragglers import READING
from geo_ray.training.wire_format import read_answer, stats_message
from geo_ray.training.worker import LocalStepsWorker, StepResult, StepTime, Worker, coded_step
from geo_ray.transport.wire.fields import Meta


class WorkerLoop:
    """Computes the steps that the parameter server assigns.

    Args:
        worker: computes the steps.
        links: connections to the shards, primary first.
        train: the region's training stream.
        heldout: the region's held-out rows.
        rank: this worker's rank.
        evals: evaluation settings.
        step_s: minimum duration of a step; None: no padding.
        device: reports the memory of the worker's GPU.

    Attributes:
        doing: current activity, reported to a waiting run actor; any thread may read it.
    """

    def __init__(
        self,
        worker: Worker | LocalStepsWorker,
        links: Sequence[ShardLink],
        train: RegionReader,
        heldout: RegionReader,
        *,
        rank: int,
        evals: EvalSetting,
        step_s: StepTime | None,
        device: DeviceReport = ON_CPU,
    ) -> None:
        self._worker = worker
        self._pool = ThreadPoolMap(len(links), "shard-links")
        self._links = ShardLinks(links, rank, self._pool)
        self._model = WorkerModel(worker, self._links)
        self._ahead = ReadAhead(train.read)
        self._heldout = heldout
        self._rank = rank
        self._evals = evals
        self._step_s = step_s
        self._device = device
        self.doing = "starting"

    def run(self) -> int:
        """Work until released; return the number of steps computed.

        Raises:
            TaskOutputError, DataError, TransportError: the worker stops.
        """
        steps = 0
        try:
            work = read_answer(self._rank, self._model.join())
            while True:
                began_s = time.monotonic()
                self._worker.on_work(work.version)
                for span in work.repeats:
                    self._worker.step(self._ahead.take([span])[0], span)
                if work.evaluate:
                    self._evaluate(work)
                if work.span is None:
                    return steps
                reports = self._steps(work, began_s)
                steps += len(reports)
                work = read_answer(self._rank, self._model.push(reports, work.partition))
                self._device.report(self._links.primary)
        finally:
            self._pool.close()
            self._ahead.close()

    def _steps(self, work: Assignment, began_s: float) -> list[StepReport]:
        """Make the steps of an assignment, or the first of them, and return their reports."""
        reports: list[StepReport] = []
        for step, span in work.run():
            result = self._compute(step, span)
            self._pad(step, span, began_s)
            reports.append(result.report(span, time.monotonic() - began_s))
            took_s = sum(report.compute_s for report in reports)
            if work.ends_run(span, result.refused, took_s):
                break
            began_s = time.monotonic()
        return reports

    def _compute(self, work: Assignment, span: Span) -> StepResult:
        """Read the rows and compute the step; the gradient is left in the worker's buffer."""
        self.doing = READING
        spans = [part.span for part in work.parts] or [span]
        rows = dict(zip(spans, self._ahead.take(spans), strict=True))
        self.doing = "computing"
        if work.parts:
            result = coded_step(self._worker, work.parts, span, rows.__getitem__)
        else:
            result = self._worker.step(rows[span], span)
        self._report_changed(work)
        return result

    def _evaluate(self, work: Assignment) -> None:
        """Evaluate the parameters; the final evaluation uses statistics over all regions."""
        worker, evals, model = self._worker, self._evals, None
        with self._model.judged(is_outer=work.eval_params):
            before_B = worker.buffers_B.clone()
            if work.done and evals.statistics and worker.has_statistics:
                worker.make_precise([self._ahead.take([span])[0] for span in evals.statistics])
                self._links.primary.exchange_statistics(worker.buffers_B)
            stats, rows = worker.evaluate_all(self._heldout.scan(evals.rows))
            if evals.note is not None:
                params_P = self._model.params()
                model = evals.note(work.version, params_P, worker.buffers_B, work.done)
            worker.buffers_B.copy_(before_B)
        meta, payload = stats_message(work.version, stats, rows, final=work.done, model=model)
        self._links.primary.client.request(meta, payload, timeout_s=60.0)
        self._report_changed(work)

    def _report_changed(self, work: Assignment) -> None:
        """Report model state that changes undeclared. All workers detect it; rank 0 reports it."""
        for change in self._worker.take_changed():
            if self._rank == 0:
                about = {"version": work.version, "how": change.how, "names": change.names}
                meta: Meta = {"op": "state_changed", **about}
                self._links.primary.client.request(meta, None, timeout_s=60.0)

    def _pad(self, work: Assignment, span: Span, began_s: float) -> None:
        """Sleep until the step has taken its minimum duration."""
        if self._step_s is not None:
            least_s = self._step_s(span) * max(1, len(work.parts))
            time.sleep(max(0.0, began_s + least_s - time.monotonic()))
