"""A worker from its first request to its release: the only loop of a worker, without Ray."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from geo_ray.base.threads import Together
from geo_ray.base.types import Span, StepReport
from geo_ray.data.reader import ReadAhead, RegionReader
from geo_ray.runs.evaluation import Note
from geo_ray.runtime.exchange.messages import read_answer, report_meta, stats_message
from geo_ray.runtime.remote_shard import ShardLink, ShardLinks
from geo_ray.training.effects import Assignment
from geo_ray.training.stragglers import READING
from geo_ray.training.worker import LocalStepsWorker, StepResult, Worker, coded_step
from geo_ray.transport.wire.fields import Meta


@dataclass(frozen=True, slots=True)
class EvalSetting:
    """How a worker evaluates.

    Attributes:
        rows: of a batch.
        note: takes evaluated parameters; None if nobody wants them.
        statistics: rows over which running statistics are made anew before the last evaluation.
    """

    rows: int = 256
    note: Note | None = None
    statistics: tuple[Span, ...] = ()


class StepTime(Protocol):
    """How long steps are padded to."""

    def __call__(self, span: Span, /) -> float:
        """Return the seconds that the step over some rows takes at least."""
        ...


class WorkerLoop:
    """A worker over sockets: pulls parameters and rows, pushes gradients, until it is sent home.

    On one host all buffers are shared memory: the model's parameters and gradients *are* the
    buffer, a push or pull only signals. Across hosts the same requests carry the bytes.

    Args:
        worker: computes.
        links: to the shards, primary first.
        train: the region's training stream.
        heldout: its held-out rows.
        rank: this worker's rank.
        evals: how it evaluates.
        step_s: how long the step over some rows is padded to; None for no padding.

    Attributes:
        doing: what it is doing, for whoever waits for it; any thread may read it.
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
    ) -> None:
        self._worker = worker
        self._together = Together(len(links), "shard-links")
        self._links = ShardLinks(links, rank, self._together)
        self._ahead = ReadAhead(train.read)
        self._heldout = heldout
        self._rank = rank
        self._evals = evals
        self._step_s = step_s
        self.doing = "starting"

    def run(self) -> int:
        """Work until sent home.

        Returns:
            The number of steps computed.

        Raises:
            TaskOutputError, DataError, TransportError: whatever stops this worker.
        """
        try:
            return self._run()
        finally:
            self._together.close()
            self._ahead.close()

    def _run(self) -> int:
        steps = 0
        answer = self._ask({"op": "join"}, push=False)
        while True:
            began_s = time.monotonic()
            self._worker.on_work(answer.version)
            if answer.evaluate:
                self._evaluate(answer)
                self._tell_changed(answer)
            if answer.span is None:
                return steps
            result = self._step(answer, answer.span)
            self._tell_changed(answer)
            if self._step_s is not None:
                least_s = self._step_s(answer.span) * max(1, len(answer.parts))
                time.sleep(max(0.0, began_s + least_s - time.monotonic()))
            elapsed_s = time.monotonic() - began_s
            found = (result.refused, result.grad_sq)
            report = StepReport(answer.span, result.loss, elapsed_s, *found)
            steps += 1
            answer = self._ask(report_meta(report), push=True, share=answer.share)

    def _step(self, answer: Assignment, span: Span) -> StepResult:
        self.doing = READING
        if not answer.parts:
            (columns,) = self._ahead.take([span])
            self.doing = "computing"
            return self._worker.step(columns, span)
        spans = [part.span for part in answer.parts]
        rows = dict(zip(spans, self._ahead.take(spans), strict=True))
        self.doing = "computing"
        return coded_step(self._worker, answer.parts, span, rows.__getitem__)

    def _tell_changed(self, answer: Assignment) -> None:
        """Tell of state that changes although nobody declared it; what one finds, all do."""
        for change in self._worker.take_changed():
            if self._rank == 0:
                about = {"version": answer.version, "how": change.how, "names": change.names}
                meta: Meta = {"op": "state_changed", **about}
                self._links.primary.client.request(meta, None, timeout_s=60.0)

    def _ask(self, meta: Meta, *, push: bool, share: int | None = None) -> Assignment:
        return read_answer(self._rank, self._links.ask(meta, push=push, share=share))

    def _evaluate(self, answer: Assignment) -> None:
        if answer.eval_params:
            self._links.pull(judged=True)
        worker, evals, model = self._worker, self._evals, None
        is_precise = answer.done and bool(evals.statistics) and worker.has_statistics
        before_B = worker.carried_B.clone()
        if is_precise:
            worker.make_precise([self._ahead.take([span])[0] for span in evals.statistics])
            self._links.primary.share_statistics(worker.carried_B)
        stats, rows = worker.evaluate_all(self._heldout.scan(evals.rows))
        if evals.note is not None:
            model = evals.note(answer.version, worker.params_P, worker.carried_B, answer.done)
        worker.carried_B.copy_(before_B)
        if answer.eval_params:
            self._links.pull(judged=False)
        meta, payload = stats_message(answer.version, stats, rows, final=answer.done, model=model)
        self._links.primary.client.request(meta, payload, timeout_s=60.0)
