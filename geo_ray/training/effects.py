"""What the lead of a region's parameter server wants done, for its shell to carry out."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from geo_ray.sync.base import Update
from geo_ray.types import Part, Span


@dataclass(frozen=True, slots=True)
class Answer:
    """Give the live parameters to a worker, and its next work.

    Attributes:
        worker: its rank.
        version: region steps that the parameters hold.
        span: the rows to compute a gradient from; None if there is no more work.
        evaluate: whether to evaluate these parameters first.
        done: leave, after the evaluation if there is one.
        parts: rows and weights of a coded gradient, if that is what to push; the worker's own
            among them.
        judged: not the live parameters are to be evaluated, but those that the averager knows.
    """

    worker: int
    version: int
    span: Span | None
    evaluate: bool = False
    done: bool = False
    judged: bool = False
    parts: tuple[Part, ...] = ()


@dataclass(frozen=True, slots=True)
class Send:
    """Encode an update (`Server.wire`), then give it to the bridge.

    `blocking` says whether the region stands still for it.
    """

    update: Update
    blocking: bool


@dataclass(frozen=True, slots=True)
class StepDone:
    """A region step was applied (for the event log)."""

    step: int
    samples: int
    loss: float | None
    compute_s: float
    refused: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A checkpoint's part was taken: each shard holds its copy, here is the control state.

    The copies are of the moment of the event; writing them may take its time. ``tensors`` are the
    wire's.
    """

    id: int
    control: dict[str, object]
    tensors: dict[str, Tensor] = field(default_factory=dict)


Effect = Answer | Send | StepDone | Snapshot
