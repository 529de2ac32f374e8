"""The gradients of a simulated run, many at once where that pays.

A gradient is needed only when the virtual time of its push has come. Until then the work waits, and
when the first of those that wait is due, all of them are computed by one batched call. That gives
the same numbers as one after another but for rounding, so it is done only where many workers are
simulated, whose order of updates no real run would repeat to the bit either. What cannot be batched
(a model with dropout, a loss that looks at values) is computed one after another.

Shape legend: P = parameters of the model, W = works in a batch.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from geo_ray.tasks.base import Batch, Columns, Task
from geo_ray.training.compute.flat import square_norm
from geo_ray.training.compute.worker import StepResult, Worker
from geo_ray.types import Span
from geo_ray.util.generators import generators_restored

MANY: Final = 16
"""From how many workers on gradients are computed together."""

_MOST_FLOATS: Final = 2**22  # parameters in one batch; beyond that nothing is gained
_LOGGER = logging.getLogger(__name__)


@dataclass(slots=True)
class PendingGradient:
    """A gradient that was asked for.

    Attributes:
        worker: whose it is.
        params_P: where it is wanted, fp32 (P,); not changed any more.
        columns: the rows.
        span: their position in the region's stream.
        grad_P: the gradient, fp32 (P,), once the result is there.
        result: what came out.
    """

    worker: Worker
    params_P: Tensor
    columns: Columns
    span: Span
    grad_P: Tensor
    result: StepResult | None = None


class Gradients:
    """Computes works in batches.

    Args:
        task: model and loss.
        module: a replica of the model; its parameters' values are of no account.
        clip_norm: largest 2-norm of a gradient; None for no clipping.
    """

    def __init__(self, task: Task, module: nn.Module, clip_norm: float | None) -> None:
        self._names = [name for name, p in module.named_parameters() if p.requires_grad]
        self._shapes = [p.shape for p in module.parameters() if p.requires_grad]
        self._sizes = [shape.numel() for shape in self._shapes]
        self._clip_norm = clip_norm
        self._waiting: list[PendingGradient] = []
        self._most = _MOST_FLOATS // sum(self._sizes)
        self._run = vmap(grad_and_value(_stateless(task, module)))
        self.works = self._most > 1

    def ask(
        self, worker: Worker, params_P: Tensor, columns: Columns, span: Span
    ) -> PendingGradient:
        """Have a gradient computed before `finish` returns it."""
        work = PendingGradient(worker, params_P, columns, span, worker.grad_P)
        self._waiting.append(work)
        return work

    def finish(
        self, work: PendingGradient, again: Callable[[], StepResult]
    ) -> tuple[StepResult, Tensor]:
        """What `work` gave, and its gradient, fp32 (P,).

        Args:
            work: of `ask`.
            again: computes it alone, for a model that cannot be batched.
        """
        if work.result is None and self.works:
            self._compute()
        if work.result is None:
            work.worker.params_P.copy_(work.params_P)
            return again(), work.worker.grad_P
        return work.result, work.grad_P

    def _compute(self) -> None:
        while self._waiting:
            some, self._waiting = self._waiting[: self._most], self._waiting[self._most :]
            try:
                self._together(some)
            except Exception as error:
                # Whatever is wrong with the task itself is said, by name, when it computes alone.
                _LOGGER.info("gradients are computed one after another: %s", error)
                self.works = False
                self._waiting.clear()

    def _together(self, works: Sequence[PendingGradient]) -> None:
        params_WP = torch.stack([work.params_P for work in works])
        parts = torch.split(params_WP, self._sizes, dim=1)
        params = {
            name: part.view(len(works), *shape)
            for name, part, shape in zip(self._names, parts, self._shapes, strict=True)
        }
        with generators_restored(works[0].worker.rng_devices()):
            batches = [work.worker.collate(work.columns, work.span) for work in works]
        grads, losses_W = self._run(params, _stacked(batches))
        grad_WP = torch.cat([grads[name].reshape(len(works), -1) for name in self._names], dim=1)
        norms = torch.linalg.vector_norm(grad_WP, dim=1).tolist()
        for i, (work, loss, norm) in enumerate(zip(works, losses_W.tolist(), norms, strict=True)):
            work.grad_P = grad_WP[i]
            if not math.isfinite(loss):
                work.result = StepResult(None, "loss_not_finite")
            elif not math.isfinite(norm):
                work.result = StepResult(None, "gradient_not_finite")
            else:
                if self._clip_norm is not None and norm > self._clip_norm:
                    work.grad_P.mul_(self._clip_norm / norm)
                work.result = StepResult(loss, grad_sq=square_norm(work.grad_P))


def _stateless(task: Task, module: nn.Module) -> Callable[[dict[str, Tensor], Batch], Tensor]:
    """The task's loss as a function of the parameters."""
    holder = _Loss(task, module)

    def loss(params: dict[str, Tensor], batch: Batch) -> Tensor:
        inside = {f"module.{name}": value for name, value in params.items()}
        return functional_call(holder, inside, (batch,))  # type: ignore[no-any-return]

    return loss


class _Loss(nn.Module):
    """So that `functional_call` reaches through `task.loss` to the model."""

    def __init__(self, task: Task, module: nn.Module) -> None:
        super().__init__()
        self.module = module.train()
        self._task = task

    def forward(self, batch: Batch) -> Tensor:
        return self._task.loss(self.module, batch)


def _stacked(batches: Sequence[Batch]) -> Any:
    """One batch with a leading dimension W; they are alike in structure and shapes.

    Raises:
        TypeError: a batch holds something else than tensors, tuples and dicts.
        RuntimeError: the shapes differ.
    """
    first = batches[0]
    if isinstance(first, Tensor):
        return torch.stack(list(batches))
    if isinstance(first, dict):
        return {key: _stacked([batch[key] for batch in batches]) for key in first}
    if isinstance(first, tuple):
        columns = [_stacked(column) for column in zip(*batches, strict=True)]
        return type(first)(*columns) if hasattr(first, "_fields") else tuple(columns)
    raise TypeError(f"a batch of {type(first).__name__} cannot be stacked")
