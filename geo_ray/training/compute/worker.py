"""A worker's step: rows in, gradient out. Pure: the same rows and parameters give the same bits.

Random numbers (dropout, augmentation) come from a generator seeded by the position of the rows, so
a step that is done again by a replacement, or after a resume, gives the same gradient, and no state
of a generator has to be saved.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from geo_ray.errors import NonFiniteError
from geo_ray.tasks.base import Batch, Columns, Stats, Task, num_rows
from geo_ray.tasks.guard import (
    blamed,
    checked_collate,
    checked_evaluate,
    checked_first_loss,
    checked_loss,
    checked_model,
)
from geo_ray.training.compute.carry_layout import CarryLayout
from geo_ray.training.compute.flat import FlatModel, square_norm
from geo_ray.training.compute.precise import has_statistics, precise_statistics
from geo_ray.training.compute.state_guard import StateChange, StateGuard
from geo_ray.types import Span
from geo_ray.util.generators import generators_restored, plant


@dataclass(frozen=True, slots=True)
class StepResult:
    """What `Worker.step` found; the gradient lies in the worker's flat buffer.

    Attributes:
        loss: mean loss, or None if refused.
        refused: why the gradient must not be used, or None.
        grad_sq: squared 2-norm of the gradient as it is used; None if that is no plain mean of
            gradients.
    """

    loss: float | None
    refused: str | None = None
    grad_sq: float | None = None


class Worker:
    """Computes gradients of one task on one replica of the model.

    Attributes:
        params_P: where the parameters are read from.
        grad_P: where the gradient is left.
        carried_B: where carried values are read from, uint8 (B,); empty if there are none.
        left_B: where they are left.

    Args:
        task: model, loss and evaluation.
        params_P: fp32 buffer that the parameter server fills: what the model carries, if it does
            (`CarryLayout.size_floats`), then the parameters.
        grad_P: fp32 buffer for the same after a step; may be shared memory.
        region: for the seed of random numbers.
        seed: the run's seed.
        device: where the model computes; buffers on the CPU are copied to and fro if it is another.
        clip_norm: largest 2-norm of a gradient; None for no clipping.
        module: the replica, fresh from the task; None: it is made now.
    """

    def __init__(
        self,
        task: Task,
        params_P: Tensor,
        grad_P: Tensor,
        *,
        region: str,
        seed: int,
        device: str = "cpu",
        clip_norm: float | None = None,
        module: nn.Module | None = None,
    ) -> None:
        self._task = task
        self._device = torch.device(device)
        module = checked_model(task, seed) if module is None else module
        self.layout = CarryLayout.of(task, module)
        before = self.layout.size_floats
        self.carried_B, self.left_B = (v[:before].view(torch.uint8) for v in (params_P, grad_P))
        self.params_P = params_P = params_P[before:]
        self.grad_P = grad_P = grad_P[before:]
        self._guard = StateGuard(task, module)
        self._stream = f"{seed}/{region}"
        self._clip_norm = clip_norm
        module = module.to(self._device)
        on_host = self._device.type == params_P.device.type
        model_P = params_P if on_host else torch.empty_like(params_P, device=self._device)
        model_grad_P = grad_P if on_host else torch.empty_like(grad_P, device=self._device)
        model_grad_P.zero_()
        self._flat = FlatModel(module, model_P, model_grad_P)
        self._has_stepped = False

    @property
    def module(self) -> nn.Module:
        """The replica."""
        return self._flat.module

    @property
    def constants(self) -> Mapping[str, str]:
        """See `state_guard.constants_of`."""
        return self._guard.constants

    def on_work(self, version: int) -> None:
        """See `StateGuard.on_work`."""
        self._guard.on_work(version)

    def take_changed(self) -> list[StateChange]:
        """See `StateGuard.take_changed`."""
        return self._guard.take_changed()

    def step(self, columns: Columns, span: Span) -> StepResult:
        """Compute the mean gradient over ``columns`` into the gradient buffer.

        What the model carries is left beside it.

        Args:
            columns: the rows of ``span``.
            span: their position in the region's stream.

        Raises:
            TaskOutputError: if the task's loss is no scalar that depends on the parameters.
            TaskStateError: if the step changes what nobody declared, or trained parameters.
        """
        self._load()
        self._flat.zero_grad()
        self._flat.module.train()
        with generators_restored(self.rng_devices()):
            plant(self._seed_of(span), self.rng_devices())
            batch = checked_collate(self._task, columns, self._device)
            checked = checked_loss if self._has_stepped else checked_first_loss
            try:
                loss = checked(self._task, self._flat.module, batch)
            except NonFiniteError:
                self._flat.attach()
                return StepResult(None, "loss_not_finite")
            with blamed(self._task, "loss (in its backward pass)"):
                loss.backward()  # type: ignore[no-untyped-call]
        self._has_stepped = True
        self._flat.take_gradient()
        self._guard.after_step()
        if self.layout.entries:
            self.layout.read_into(self.module, self.left_B)
            if not self.layout.is_finite(self.left_B):
                return StepResult(None, "carried_not_finite")
        grad_sq = square_norm(self._flat.grad_P)
        if not math.isfinite(grad_sq):
            return StepResult(None, "gradient_not_finite")
        if self._clip_norm is not None:
            norm = float(torch.linalg.vector_norm(self._flat.grad_P))
            if norm > self._clip_norm:
                self._flat.grad_P.mul_(self._clip_norm / norm)
                grad_sq *= (self._clip_norm / norm) ** 2
        if self._flat.grad_P is not self.grad_P:
            self.grad_P.copy_(self._flat.grad_P)
        return StepResult(float(loss.detach()), grad_sq=grad_sq)

    def collate(self, columns: Columns, span: Span) -> Batch:
        """The rows as the model takes them; random choices are those of `step`.

        Plants the seed of those choices: wrap it in `generators_restored`.
        """
        plant(self._seed_of(span), self.rng_devices())
        return checked_collate(self._task, columns, self._device)

    def evaluate(self, columns: Columns) -> Stats:
        """Additive statistics of the parameters in the buffer over ``columns``."""
        self._load()
        self._flat.module.eval()
        with torch.no_grad():
            batch = checked_collate(self._task, columns, self._device)
            try:
                return checked_evaluate(self._task, self._flat.module, batch)
            finally:
                self._flat.attach()

    @property
    def has_statistics(self) -> bool:
        """Whether the model keeps running statistics that are carried."""
        return bool(self.layout.entries) and has_statistics(self.module)

    def make_precise(self, batches: Sequence[Columns]) -> None:
        """Put running statistics that the parameters really have over ``batches`` to those given.

        Leaves them in `carried_B`, so that an evaluation uses them, until the next assignment.
        """
        self._load()
        self.module.train()
        with torch.no_grad(), generators_restored(self.rng_devices()):
            plant(0, self.rng_devices())
            made = [checked_collate(self._task, columns, self._device) for columns in batches]
            precise_statistics(self._task, self.module, self.layout, made, self.carried_B)
        self._flat.attach()

    def evaluate_all(self, batches: Iterable[Columns]) -> tuple[Stats, int]:
        """Sum the statistics over all batches.

        Returns:
            The sums, and the number of rows behind them.
        """
        self._guard.look()
        totals: Stats = {}
        rows = 0
        for columns in batches:
            for name, value in self.evaluate(columns).items():
                totals[name] = totals[name] + value if name in totals else value
            rows += num_rows(columns)
        return totals, rows

    def _load(self) -> None:
        if self._flat.params_P is not self.params_P:
            self._flat.params_P.copy_(self.params_P)
        if self.layout.entries:
            self.layout.write(self.carried_B, self.module)

    def _seed_of(self, span: Span) -> int:
        key = f"{self._stream}/{span.start}".encode()
        return int.from_bytes(hashlib.blake2b(key, digest_size=7).digest(), "big")

    def rng_devices(self) -> list[int]:
        """Whose generators a step plants, beside the CPU's; for `generators_restored`."""
        return [torch.cuda.current_device()] if self._device.type == "cuda" else []
