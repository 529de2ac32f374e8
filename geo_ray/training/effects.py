"""What a region's parameter server wants done, for its shell to carry out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from torch import Tensor

from geo_ray.base.types import CodedPartition, Span, StepReport
from geo_ray.training.lazy_copy import LazyCopy
from geo_ray.training.messages import ReplyMessage, UpdateMessage
from geo_ray.training.noise import NoiseReading


@dataclass(frozen=True, slots=True)
class Assignment:
    """Give the live parameters to a worker, and its next work.

    Attributes:
        worker: its rank.
        version: region steps that the parameters hold.
        span: the rows to compute a gradient from; None if there is no more work.
        evaluate: whether to evaluate these parameters first.
        done: leave, after the evaluation if there is one.
        parts: rows and weights of a coded gradient, if that is what to push; the worker's own
            among them.
        partition: whose part of the step it is; None: the worker's own.
        eval_params: not the live parameters are to be evaluated, but those that the averager knows.
    """

    worker: int
    version: int
    span: Span | None
    evaluate: bool = False
    done: bool = False
    eval_params: bool = False
    parts: tuple[CodedPartition, ...] = ()
    partition: int | None = None


@dataclass(frozen=True, slots=True)
class SendUpdate:
    """Encode an update (`Server.wire`), then hand it to the bridge.

    `blocking` says whether the region stands still for it.
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
    """

    step: int
    samples: int
    loss: float | None
    compute_s: float
    refused: tuple[str, ...] = ()
    noise: NoiseReading | None = None

    def event(self, start_s: float, before_s: float, now_s: float) -> dict[str, Any]:
        """The event of the step.

        Since the step before (``before_s``), what was not compute was waiting, for workers or WAN.
        """
        return {
            "step": self.step,
            "samples": self.samples,
            "loss": self.loss,
            "compute_s": self.compute_s,
            "wait_s": max(0.0, now_s - before_s - self.compute_s),
            "start_s": start_s,
        }

    @classmethod
    def of(
        cls,
        step: int,
        samples: int,
        reports: Iterable[StepReport],
        compute_s: float,
        noise: NoiseReading | None,
    ) -> StepDone:
        """What the pushes of a step amount to."""
        pushes = list(reports)
        used = [(r.loss or 0.0, r.span.count) for r in pushes if not r.refused]
        loss = sum(value * n for value, n in used) / samples if samples else None
        refused = tuple(report.refused for report in pushes if report.refused)
        return cls(step, samples, loss, compute_s, refused, noise)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A checkpoint's part was taken: each shard holds its copy, here is the control state.

    The copies are of the moment of the event; writing them may take its time. ``tensors`` are the
    wire's; those that lie where something else is put soon are in ``lazy``, too.
    """

    id: int
    control: dict[str, object]
    tensors: dict[str, Tensor] = field(default_factory=dict)
    lazy: Mapping[str, LazyCopy] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """Steps of the region up to then."""
        return int(str(self.control["version"]))

    @property
    def round(self) -> int:
        """Of the newest answer that the region had merged then."""
        return int(str(self.control["averager_version"]))


FIRST_TRANSFER: Final = 10**17
"""Numbers from here on are of copies that are handed over, and not of checkpoints."""


@dataclass(frozen=True, slots=True)
class StateTransfer:
    """The region's state of now is what newcomers begin with.

    Attributes:
        snapshot: with the number under which each shard holds its copy.
        view: generation of the view that they begin in.
    """

    snapshot: Snapshot
    view: int


@dataclass(frozen=True, slots=True)
class ActiveWorkersChanged:
    """Other workers than before take part (for the event log).

    Attributes:
        step: after which.
        ranks: of those that do now.
        rows: of a step of theirs; in mode ``async``, of a push of each.
    """

    step: int
    ranks: tuple[int, ...]
    rows: int

    def event(self) -> dict[str, Any]:
        """The event of the change."""
        return {"step": self.step, "workers": len(self.ranks), "rows": self.rows}


Effect = Assignment | SendUpdate | StepDone | ActiveWorkersChanged | Snapshot | StateTransfer
