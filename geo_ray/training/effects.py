"""Effects of a region's parameter server, which its shell executes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from torch import Tensor

from geo_ray.base.types import CodedPartition, Span, StepReport
from geo_ray.training.config import REPORT_EVERY_S
from geo_ray.training.lazy_copy import Copied
from geo_ray.training.messages import ReplyMessage, UpdateMessage
from geo_ray.training.noise import NoiseReading


@dataclass(frozen=True, slots=True)
class Assignment:
    """Send the live parameters and the next rows to a worker.

    Attributes:
        worker: rank.
        version: region steps that the parameters hold.
        span: rows for the gradient; None if there is no more work.
        evaluate: evaluate these parameters first.
        done: exit, after the evaluation if there is one.
        parts: rows and weights of a coded gradient, the worker's own included.
        partition: rank whose batch partition this is; None: the worker's own.
        eval_params: evaluate the parameters known to the averager, not the live ones.
        repeats: spans whose steps a new worker must repeat first, because its predecessor had made
            them since it last sent its state.
        steps: steps that a worker which makes the optimizer's steps may make before it reports
            them.
        stride: rows from the beginning of the span of one of them to that of the next.
    """

    worker: int
    version: int
    span: Span | None
    evaluate: bool = False
    done: bool = False
    eval_params: bool = False
    parts: tuple[CodedPartition, ...] = ()
    partition: int | None = None
    repeats: tuple[Span, ...] = ()
    steps: int = 1
    stride: int = 0

    def run(self) -> Iterator[tuple[Assignment, Span]]:
        """Yield the assignments of its steps, with their spans."""
        if self.span is None:
            return
        yield self, self.span
        for number in range(1, self.steps):
            span = Span(self.span.start + number * self.stride, self.span.count)
            version = self.version + number
            yield replace(self, version=version, span=span, evaluate=False, repeats=()), span

    def ends_run(self, span: Span, refused: str | None, took_s: float) -> bool:
        """Tell whether a worker alone must report now; several workers make equal runs.

        Args:
            span: rows of the newest step.
            refused: why that step was refused, if it was.
            took_s: seconds since the run began.
        """
        is_alone = self.stride in (0, span.count)
        return is_alone and (refused is not None or took_s >= REPORT_EVERY_S)


@dataclass(frozen=True, slots=True)
class SendUpdate:
    """Encode an update (`Server.wire`), then pass it to the bridge.

    `blocking` tells whether training waits for the answer.
    """

    update: UpdateMessage
    blocking: bool

    def event(
        self, sent: UpdateMessage, reply: ReplyMessage, start_s: float, bytes_before: int
    ) -> dict[str, Any]:
        """The event of the exchange, in which the update was ``sent`` (coded)."""
        return {
            "seq": reply.seq,
            "start_s": start_s,
            "bytes_sent": sent.size_bytes,
            "bytes_received": reply.size_bytes,
            "bytes_before": bytes_before,
            "blocking": self.blocking,
            "held_s": reply.held_s,
            "staleness": max(0, reply.version - sent.base_version - 1),
            "round": reply.version,
        }


@dataclass(frozen=True, slots=True)
class StepDone:
    """A region step was applied (for the event log).

    Attributes:
        step: its number.
        samples: rows in it.
        loss: mean over them; None without any.
        compute_s: of the slowest worker.
        refused: why gradients were, if some were.
        noise: if the gradients were measured.
        learning_rate: of the newest step of the inner optimizer, the workers' or the server's;
            None if there was none.
    """

    step: int
    samples: int
    loss: float | None
    compute_s: float
    refused: tuple[str, ...] = ()
    noise: NoiseReading | None = None
    learning_rate: float | None = None

    def event(self, start_s: float, before_s: float, now_s: float) -> dict[str, Any]:
        """Return the event of the step.

        Time since the previous step (``before_s``) that was not compute is waiting, for workers or
        WAN.
        """
        return {
            "step": self.step,
            "samples": self.samples,
            "loss": self.loss,
            "compute_s": self.compute_s,
            "wait_s": max(0.0, now_s - before_s - self.compute_s),
            "start_s": start_s,
            "learning_rate": self.learning_rate,
        }

    @classmethod
    def of(
        cls,
        step: int,
        samples: int,
        reports: Iterable[StepReport],
        compute_s: float,
        noise: NoiseReading | None,
        learning_rate: float | None = None,
    ) -> StepDone:
        """Summarize the pushes of a step.

        Args:
            step: its number.
            samples: rows in it.
            reports: pushes of the workers.
            compute_s: of the slowest worker.
            noise: if the gradients were measured.
            learning_rate: of the server's optimizer; that of workers comes first.
        """
        pushes = list(reports)
        rates = [each.learning_rate for each in pushes if each.learning_rate is not None]
        learning_rate = max(rates, default=learning_rate)
        used = [(r.loss or 0.0, r.span.count) for r in pushes if not r.refused]
        loss = sum(value * n for value, n in used) / samples if samples else None
        refused = tuple(report.refused for report in pushes if report.refused)
        return cls(step, samples, loss, compute_s, refused, noise, learning_rate)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A part of a checkpoint: the control state; each shard holds its copy.

    The copies are of the moment of the event and may be written later. ``tensors`` are the wire's;
    those whose memory is reused soon are in ``lazy``.
    """

    id: int
    control: dict[str, object]
    tensors: dict[str, Tensor] = field(default_factory=dict)
    lazy: Mapping[str, Copied] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """Region steps at the snapshot."""
        return int(str(self.control["version"]))

    @property
    def round(self) -> int:
        """Round of the newest answer that the region had merged."""
        return int(str(self.control["averager_version"]))


FIRST_TRANSFER: Final = 10**17
"""First number of state transfers; smaller numbers are checkpoints."""


@dataclass(frozen=True, slots=True)
class StateTransfer:
    """The region's present state, from which joining regions start.

    Attributes:
        snapshot: control state, with the number under which each shard holds its copy.
        view: generation of the view in which the joining regions start.
    """

    snapshot: Snapshot
    view: int


@dataclass(frozen=True, slots=True)
class ActiveWorkersChanged:
    """Change of the active workers (for the event log).

    Attributes:
        step: last step before the change.
        ranks: active ranks from now on.
        rows: rows of a step; in mode ``async``, of a push of each.
    """

    step: int
    ranks: tuple[int, ...]
    rows: int

    def event(self) -> dict[str, Any]:
        """The event of the change."""
        return {"step": self.step, "workers": len(self.ranks), "rows": self.rows}


Effect = Assignment | SendUpdate | StepDone | ActiveWorkersChanged | Snapshot | StateTransfer
