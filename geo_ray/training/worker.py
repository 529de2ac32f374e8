"""A worker's computation: gradients, local steps, coded steps and exact running statistics.

The loop over steps is `runtime/worker_loop.py`, which calls this. `FlatModel` makes the module's
parameters views of one buffer.

Pure: the same rows and parameters give the same bits. Random numbers come from a generator
seeded by the position of the rows, so a replacement or a resumed run repeats a step exactly.
With `train.optimizer_on: worker` a worker keeps parameters and optimizer on its device and sends
both when its server needs them. With `RegionTraits.worker_steps` it trains several steps with its
own optimizer and pushes its change; it sends that optimizer's state for checkpoints.

Exact running statistics follow Wu and Johnson, "Rethinking 'Batch' in BatchNorm" (2021), section 3.

Shape legend: P = parameters of the model.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from operator import attrgetter
from typing import Final, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from geo_ray.base.errors import NonFiniteError, TaskStateError
from geo_ray.base.random_state import generators_restored, seed_generators, seed_of_rows
from geo_ray.base.types import CodedPartition, Span, StepReport, unused_by_all
from geo_ray.data.tasks.base import Batch, Columns, Stats, Task, num_rows
from geo_ray.data.tasks.checked_calls import (
    blamed,
    checked_collate,
    checked_evaluate,
    checked_first_loss,
    checked_loss,
    checked_model,
)
from geo_ray.data.tasks.groups import GroupRun
from geo_ray.training.optimizers import InnerOptimizer, OneOptimizer, TaskSteps
from geo_ray.training.parameters import (
    BufferLayout,
    check_module,
    count_parameters,
    exact_square_norm,
    other_size,
    pieces_of,
    square_norm,
)
from geo_ray.training.state_guard import StateChange, StateGuard
from geo_ray.training.task_steps import OptimizerSteps, TaskOptimizer

_log = logging.getLogger(__name__)


def has_statistics(module: nn.Module) -> bool:
    """Tell whether a module has running statistics that training changes."""
    was_training = module.training
    try:
        return bool(_layers(module.train()))
    finally:
        module.train(was_training)


def precise_statistics(
    task: Task, module: nn.Module, layout: BufferLayout, batches: Sequence[Batch], into_B: Tensor
) -> None:
    """Write the exact statistics over ``batches`` into a vector of model buffers.

    Each batch has the same weight; variances follow the law of total variance. Other values in the
    vector do not change.

    Args:
        task: its loss runs the model.
        module: module in training mode, with the final parameters.
        layout: layout of the vector.
        batches: batches of one size.
        into_B: uint8 (B,).
    """
    layers = _layers(module)
    if not layers or not batches:
        return
    momenta = [layer.momentum for layer in layers]
    found: list[list[tuple[Tensor, Tensor]]] = []
    try:
        for layer in layers:
            layer.momentum = 1.0  # only the last batch's values remain
        for batch in batches:
            with (
                torch.enable_grad(),
                suppress(NonFiniteError),
            ):  # as in a step: the task may draw random numbers
                checked_loss(task, module, batch)
            found.append([_of(layer) for layer in layers])
    finally:
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum
    layout.write(into_B, module)
    for layer, by_batch in zip(layers, zip(*found, strict=True), strict=True):
        means, variances = (torch.stack(part) for part in zip(*by_batch, strict=True))
        mean = means.mean(0)
        layer.get_buffer("running_mean").copy_(mean)
        layer.get_buffer("running_var").copy_((variances + (means - mean).square()).mean(0))
    layout.read_into(module, into_B)


@dataclass(slots=True)
class StatisticsCollector:
    """Combines the regions' statistics of the final parameters before their evaluation.

    Every region's first worker computes statistics over its region's rows. The final evaluation and
    the saved model use the mean over all regions. Training has ended by then, so nothing is
    delayed.

    Attributes:
        layout: layout of the vectors.
        rows: rows of each region's training data, its weight.
    """

    layout: BufferLayout
    rows: Mapping[str, float]
    _reported: dict[str, Tensor] = field(default_factory=dict)

    def add(self, region: str, buffers_B: Tensor) -> None:
        """A region's model buffers, uint8 (B,), with statistics over its own rows."""
        self._reported[region] = buffers_B

    def take(self, members: Collection[str]) -> dict[str, Tensor]:
        """Return each member's values with statistics over all, once all members have reported."""
        if not self._reported or not set(members) <= set(self._reported):
            return {}
        reported = {region: self._reported[region] for region in members}
        self._reported = {}
        return {name: self.layout.with_statistics(name, reported, self.rows) for name in reported}

    def give_up(self) -> dict[str, Tensor]:
        """Return the reported values unchanged, because other reports will not come."""
        reported, self._reported = self._reported, {}
        return reported


def _layers(module: nn.Module) -> list[_NormBase]:
    """Return the normalisation layers in training mode; some models fix theirs."""
    retained = [
        p for p in module.modules() if isinstance(p, _NormBase) and p.running_mean is not None
    ]
    return [layer for layer in retained if layer.training]


def _of(layer: _NormBase) -> tuple[Tensor, Tensor]:
    return layer.get_buffer("running_mean").clone(), layer.get_buffer("running_var").clone()


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of `Worker.step`; the gradient is in the worker's flat buffer.

    Attributes:
        loss: mean loss, or None if refused.
        refused: reason why the gradient must not be used, or None.
        grad_sq: squared 2-norm of the gradient; None if it is no plain mean of gradients.
        learning_rate: of the last local step; None if the worker makes none.
        unused: parameters without a gradient, by index in the model.
    """

    loss: float | None
    refused: str | None = None
    grad_sq: float | None = None
    learning_rate: float | None = None
    unused: Sequence[int] = ()

    def report(self, span: Span, took_s: float) -> StepReport:
        """Return the report of the step over ``span``, which took so many seconds."""
        about = (self.refused, self.grad_sq, self.learning_rate, self.unused)
        return StepReport(span, self.loss, took_s, *about)


_PAGE_BYTES: Final = 4096


def pin_memory(buffers: Sequence[Tensor]) -> None:
    """Pin buffers that a GPU copies from and to, where the driver allows it.

    Neighbours are pinned together, since a page cannot be pinned twice. They stay pinned until the
    process ends.
    """
    spans = [(b.data_ptr(), b.data_ptr() + b.numel() * b.element_size()) for b in buffers]
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if joined and start - joined[-1][1] < _PAGE_BYTES:
            joined[-1] = joined[-1][0], stop
        else:
            joined.append((start, stop))
    for start, stop in joined:
        driver = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        code = int(driver.cudaHostRegister(start, stop - start, 0))
        if code:
            _log.info("%d bytes are not pinned: CUDA error %d", stop - start, code)


@dataclass(frozen=True, slots=True)
class OwnSteps:
    """How a worker makes the optimizer's steps itself.

    Attributes:
        optimizer: optimizer, whose schedule has a length (`lasting`).
        parameters: parameters of the model.
        flat: see `InnerOptimizer`.
        most_norm: largest norm of the gradient of a step, after ``clip_norm``; None: any.
    """

    optimizer: OneOptimizer
    parameters: Sequence[GroupRun] = ()
    flat: bool = False
    most_norm: float | None = None


class Worker:
    """Computes gradients of one task on one replica of the model, and may apply them.

    A worker that applies them keeps the parameters and the optimizer's state on its device. It
    copies neither in a step, but with `load` and `store`, when the server sends or needs them.

    Attributes:
        params_P: buffer of parameters.
        grad_P: buffer for the gradient.
        buffers_B: model buffers before a step, uint8 (B,); empty if there are none.
        left_B: model buffers after a step.
        optimizer: optimizer of a worker that applies its gradients; None: the server applies them.

    Args:
        task: model, loss and evaluation.
        params_P: fp32 buffer that the parameter server fills: model buffers, if any
            (`BufferLayout.size_floats`), then the parameters.
        grad_P: fp32 buffer of the same layout for the results; may be shared memory.
        region: region, for the seed of random numbers.
        seed: run's seed.
        device: device of the model; CPU buffers are copied to and from it.
        clip_norm: largest 2-norm of a gradient; None for no clipping.
        accumulate: micro-batches of a step.
        module: replica, fresh from the task; None: make one.
        own: for a worker that applies its gradients.
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
        accumulate: int = 1,
        module: nn.Module | None = None,
        own: OwnSteps | None = None,
    ) -> None:
        self._task = task
        self._device = torch.device(device)
        module = checked_model(task, seed) if module is None else module
        self.layout = BufferLayout.of(task, module)
        before = self.layout.size_floats
        self.buffers_B, self.left_B = (v[:before].view(torch.uint8) for v in (params_P, grad_P))
        self.params_P = params_P = params_P[before:]
        self.grad_P = grad_P = grad_P[before:]
        self._guard = StateGuard(task, module)
        self._stream = f"{seed}/{region}"
        self._clip_norm = clip_norm
        self._accumulate = accumulate
        module = module.to(self._device)
        on_host = self._device.type == params_P.device.type
        if self._device.type == "cuda":
            pin_memory((self.params_P, self.grad_P))
        model_P = params_P if on_host else torch.empty_like(params_P, device=self._device)
        model_grad_P = grad_P if on_host else torch.empty_like(grad_P, device=self._device)
        model_grad_P.zero_()
        self._flat = FlatModel(module, model_P, model_grad_P)
        self._has_stepped = False
        self.optimizer: OptimizerSteps | None = None
        self._most_norm = None if own is None else own.most_norm
        if own is not None and isinstance(own.optimizer, TaskSteps):
            owned = self._flat.owned()
            self.optimizer = TaskOptimizer(task, module, *owned, params_P.numel())
        elif own is not None:
            pieces = pieces_of(own.parameters, (0, params_P.numel()))
            self.optimizer = InnerOptimizer(own.optimizer, model_P, pieces, flat=own.flat)

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

        Model buffers are written next to it. A worker that keeps the parameters applies the
        gradient.

        Args:
            columns: rows of ``span``.
            span: position in the region's stream.

        Raises:
            TaskOutputError: the task's loss is no scalar that depends on the parameters.
            TaskStateError: the step changes undeclared state or trained parameters.
        """
        self._load()
        self._flat.zero_grad()
        self._flat.module.train()
        if isinstance(self.optimizer, TaskOptimizer) and self.optimizer.makes_steps:
            return self._task_step(self.optimizer, columns, span)
        with generators_restored(self.rng_devices()):
            seed_generators(self._seed_of(span), self.rng_devices())
            losses: list[float] = []
            for part, fraction in micro_batches(columns, self._accumulate):
                loss = self._backward(part, fraction, adds=bool(losses))
                if loss is None:
                    self._flat.attach()
                    return StepResult(None, "loss_not_finite")
                losses.append(loss * fraction)
        self._has_stepped = True
        self._guard.after_step()
        if self.layout.entries:
            self.layout.read_into(self.module, self.left_B)
            if not self.layout.is_finite(self.left_B):
                return StepResult(None, "buffers_not_finite")
        grad_sq = square_norm(self._flat.grad_P)
        if not math.isfinite(grad_sq):
            return StepResult(None, "gradient_not_finite")
        if self._clip_norm is not None:
            norm = float(torch.linalg.vector_norm(self._flat.grad_P))
            if norm > self._clip_norm:
                self._flat.grad_P.mul_(self._clip_norm / norm)
                grad_sq *= (self._clip_norm / norm) ** 2
        result = StepResult(sum(losses), grad_sq=grad_sq, unused=self._flat.unused())
        if self.optimizer is not None:
            self._apply(self.optimizer, result.unused)
            return replace(result, learning_rate=self.optimizer.lr)
        if self._flat.grad_P is not self.grad_P:
            self.grad_P.copy_(self._flat.grad_P)
        return result

    def _task_step(self, optimizer: TaskOptimizer, columns: Columns, span: Span) -> StepResult:
        """Let the task make a whole step.

        Raises:
            NonFiniteError: a parameter is not finite after it.
        """
        with generators_restored(self.rng_devices()):
            seed_generators(self._seed_of(span), self.rng_devices())
            batch = checked_collate(self._task, columns, self._device)
            self._flat.drop_gradients()
            loss = optimizer.train_step(batch)
        self._flat.take_parameters()
        self._guard.after_step()
        if self.layout.entries:
            self.layout.read_into(self.module, self.left_B)
        if not math.isfinite(square_norm(self._flat.params_P)):
            raise NonFiniteError(
                f"{type(self._task).__name__}.train_step left parameters that are not finite",
                fix="Skip the optimizer's step where loss or gradients are not finite, as a "
                "GradScaler does; lower the learning rate, or clip gradients.",
            )
        self.buffers_B.copy_(self.left_B)
        if not math.isfinite(loss):
            return StepResult(None, "loss_not_finite")
        return StepResult(loss, learning_rate=optimizer.lr)

    def _backward(self, columns: Columns, fraction: float, *, adds: bool) -> float | None:
        """Compute a fraction of the mean gradient over rows.

        Args:
            columns: rows.
            fraction: factor.
            adds: add it to those of earlier rows.

        Returns:
            The rows' loss; None if it is not finite.
        """
        batch = checked_collate(self._task, columns, self._device)
        checked = checked_loss if self._has_stepped else checked_first_loss
        try:
            loss = checked(self._task, self._flat.module, batch)
        except NonFiniteError:
            return None
        with blamed(self._task, "loss (in its backward pass)"):
            part = loss if fraction == 1.0 else loss * fraction
            part.backward()  # type: ignore[no-untyped-call]
        self._flat.take_gradient(adds=adds)
        return float(loss.detach())

    def _apply(self, optimizer: OptimizerSteps, unused: Sequence[int]) -> None:
        grad_P = self._flat.grad_P
        if self._most_norm is not None:  # as `RegionModel.apply`
            norm = math.sqrt(exact_square_norm(grad_P))
            if norm > self._most_norm:
                scale = self._most_norm / norm
                is_task = isinstance(optimizer, TaskOptimizer)  # which has views of the buffer
                grad_P = grad_P.mul_(scale) if is_task else torch.mul(grad_P, scale)
        optimizer.apply(grad_P, unused)
        if isinstance(optimizer, TaskOptimizer):
            self._flat.attach()
        self.buffers_B.copy_(self.left_B)

    def load(self) -> None:
        """Take over the parameters in the buffer; for a worker that keeps them."""
        if self._flat.params_P is not self.params_P:
            # The buffer changes after the next push, which waits for the step on the device.
            self._flat.params_P.copy_(self.params_P, non_blocking=True)

    def store(self) -> None:
        """Copy the parameters that the worker keeps, and its model buffers, to those of a push."""
        self.grad_P.copy_(self._flat.params_P)
        self.left_B.copy_(self.buffers_B)

    def kept(self) -> Tensor:
        """Return a copy of the parameters that the worker keeps, fp32 (P,), on its device."""
        return self._flat.params_P.clone()

    def keep(self, params_P: Tensor) -> None:
        """Continue with the parameters of `kept`."""
        self._flat.params_P.copy_(params_P)

    def collate(self, columns: Columns, span: Span) -> Batch:
        """The rows as the model takes them; random choices are those of `step`.

        Plants the seed of those choices: wrap it in `generators_restored`.
        """
        seed_generators(self._seed_of(span), self.rng_devices())
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
        """Whether the model has running statistics among its declared model buffers."""
        return bool(self.layout.entries) and has_statistics(self.module)

    def make_precise(self, batches: Sequence[Columns]) -> None:
        """Put running statistics that the parameters really have over ``batches`` to those given.

        Leaves them in `buffers_B`, so that an evaluation uses them, until the next assignment.
        """
        self._load()
        self.module.train()
        with torch.no_grad(), generators_restored(self.rng_devices()):
            seed_generators(0, self.rng_devices())
            made = [checked_collate(self._task, columns, self._device) for columns in batches]
            precise_statistics(self._task, self.module, self.layout, made, self.buffers_B)
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
        if self.optimizer is None:
            self.load()
        self._flat.refresh()
        if self.layout.entries:
            self.layout.write(self.buffers_B, self.module)

    def _seed_of(self, span: Span) -> int:
        return seed_of_rows(self._stream, span.start)

    def rng_devices(self) -> list[int]:
        """Devices whose generators a step seeds, besides the CPU; for `generators_restored`."""
        if self._device.type != "cuda":
            return []
        index = self._device.index
        return [torch.cuda.current_device() if index is None else index]


class LocalStepsWorker:
    """Worker that makes several local steps per push.

    Args:
        worker: computes the gradients.
        optimizer: applies them to the worker's parameters.
        steps: steps per push; the rows of a push are split into as many batches.
        region_rows: rows of one batch of all the region's workers, for `train.mode: async`: the
            learning rate schedule counts the rows before a push. None: it counts the steps of the
            region, which does not depend on the number of its workers.
        parameters: parameters of the model.
        flat: see `InnerOptimizer`.
    """

    def __init__(
        self,
        worker: Worker,
        optimizer: OneOptimizer,
        steps: int,
        region_rows: int | None = None,
        parameters: Sequence[GroupRun] = (),
        *,
        flat: bool = False,
    ) -> None:
        self._worker = worker
        pieces = pieces_of(parameters, (0, worker.params_P.numel()))
        self._optimizer = InnerOptimizer(optimizer, worker.params_P, pieces, flat=flat)
        self._steps = steps
        self._region_rows = region_rows
        self._version = 0

    @property
    def optimizer(self) -> InnerOptimizer:
        """Optimizer of the local steps, whose state lasts from push to push."""
        return self._optimizer

    @property
    def params_P(self) -> Tensor:
        """Buffer of parameters, fp32 (P,)."""
        return self._worker.params_P

    @property
    def grad_P(self) -> Tensor:
        """Buffer for the change, as the vector to subtract, fp32 (P,)."""
        return self._worker.grad_P

    @property
    def buffers_B(self) -> Tensor:
        """See `Worker.buffers_B`."""
        return self._worker.buffers_B

    @property
    def left_B(self) -> Tensor:
        """See `Worker.left_B`."""
        return self._worker.left_B

    @property
    def layout(self) -> BufferLayout:
        """Layout of the model buffers."""
        return self._worker.layout

    @property
    def constants(self) -> Mapping[str, str]:
        """See `Worker.constants`."""
        return self._worker.constants

    @property
    def has_statistics(self) -> bool:
        """See `Worker.has_statistics`."""
        return self._worker.has_statistics

    def make_precise(self, batches: Sequence[Columns]) -> None:
        """See `Worker.make_precise`."""
        self._worker.make_precise(batches)

    def step(self, columns: Columns, span: Span) -> StepResult:
        """Train over ``columns`` and leave the change; the parameters are as before.

        A gradient that must not be used spoils the whole push.

        Args:
            columns: the rows of ``span``.
            span: their position in the region's stream.
        """
        params_P = self.params_P
        before_P, before_B = params_P.clone(), self.buffers_B.clone()
        losses = []
        # Not a counter of this worker, since a replacement would start at 0.
        earlier = self._version
        if self._region_rows is not None:
            earlier = span.start // (self._region_rows * self._steps)
        self._optimizer.taken = earlier * self._steps
        for i in range(self._steps):
            first, stop = (span.count * n // self._steps for n in (i, i + 1))
            part = {name: column[first:stop] for name, column in columns.items()}
            result = self._worker.step(part, Span(span.start + first, stop - first))
            if result.loss is None:
                params_P.copy_(before_P)
                self.buffers_B.copy_(before_B)
                return result
            losses.append(result.loss)
            self.buffers_B.copy_(self.left_B)
            self._optimizer.apply(self.grad_P, result.unused)
        self.grad_P.copy_(before_P).sub_(params_P)
        params_P.copy_(before_P)
        self.buffers_B.copy_(before_B)
        return StepResult(sum(losses) / len(losses), learning_rate=self._optimizer.lr)

    def on_work(self, version: int) -> None:
        """See `Worker.on_work`."""
        self._version = version
        self._worker.on_work(version)

    def take_changed(self) -> list[StateChange]:
        """See `Worker.take_changed`."""
        return self._worker.take_changed()

    def evaluate_all(self, batches: Iterable[Columns]) -> tuple[Stats, int]:
        """See `Worker.evaluate_all`."""
        return self._worker.evaluate_all(batches)


def micro_batches(columns: Columns, count: int) -> list[tuple[Columns, float]]:
    """Split rows into ``count`` nearly equal parts, or one per row if that is fewer.

    Returns:
        The parts, each with its fraction of the rows.
    """
    rows = num_rows(columns)
    count = max(1, min(count, rows))
    if count == 1:
        return [(columns, 1.0)]
    bounds = pairwise(rows * i // count for i in range(count + 1))
    return [
        ({name: column[first:stop] for name, column in columns.items()}, (stop - first) / rows)
        for first, stop in bounds
    ]


def coded_step(
    worker: Worker | LocalStepsWorker,
    parts: Sequence[CodedPartition],
    own: Span,
    read: Callable[[Span], Columns],
) -> StepResult:
    """Leave the weighted sum of the parts' mean gradients in the worker's gradient buffer.

    Args:
        worker: computes.
        parts: rows and weights; one that cannot be used spoils all.
        own: the rows whose loss is reported.
        read: gives the rows of a span.
    """
    total_P = torch.zeros_like(worker.grad_P)
    reported, unused = StepResult(None), []
    for part in parts:
        result = worker.step(read(part.span), part.span)
        if result.loss is None:
            return result
        total_P.add_(worker.grad_P, alpha=part.weight)
        unused.append(result.unused)
        reported = (
            replace(result, grad_sq=None) if part.span == own or reported.loss is None else reported
        )
    worker.grad_P.copy_(total_P)
    return replace(reported, unused=unused_by_all(unused))


class StepTime(Protocol):
    """Emulated duration of steps."""

    def __call__(self, span: Span, /) -> float:
        """Return the least seconds of the step over ``span``."""
        ...


@dataclass(frozen=True, slots=True)
class _Slot:
    """A trained parameter, the module that holds it, and its places in the two buffers.

    Attributes:
        name: its name.
        owner: module that holds it.
        leaf: its name there.
        param: the parameter.
        value: its values: a view of the buffer, or of half precision and next to it.
        grad: its gradient in the buffer.
        value_at: address of ``value``.
        grad_at: address of the gradient that the parameter has between steps; None if it has none.
        master: values in the buffer, if the parameter is of half precision.
    """

    name: str
    owner: nn.Module
    leaf: str
    param: nn.Parameter
    value: Tensor
    grad: Tensor
    value_at: int
    grad_at: int | None
    master: Tensor | None = None

    @property
    def is_held(self) -> bool:
        """Whether the module still has this parameter object."""
        return getattr(self.owner, self.leaf, None) is self.param

    @property
    def is_attached(self) -> bool:
        """Whether parameter and gradient are in the buffers; compares addresses only."""
        return (
            _address(self.param) == self.value_at
            and _address(self.param.grad) == self.grad_at
            and self.is_held
        )


class FlatModel:
    """Makes a module's parameters and gradients views of two flat buffers.

    User code can replace these views: ``module.zero_grad()`` drops gradients, and
    ``module.to(...)`` moves parameters to new memory. Call `take_gradient` after each backward and
    `attach` after other user code, so that the module always trains in the buffers. Hooks record
    which parameters receive a gradient, since a buffer of zeros does not tell.

    Parameters of half precision are next to the buffers, which have their fp32 masters: `refresh`
    rounds these to the parameters, and `take_gradient` adds the parameters' gradients.

    Args:
        module: its trainable parameters must be fp32, bf16 or fp16.
        params_P: fp32 (P,) buffer that from now on holds the parameters; its content counts.
        grad_P: fp32 (P,) buffer into which ``backward`` accumulates.

    Raises:
        TaskOutputError: if the module has other dtypes or another size.
    """

    def __init__(self, module: nn.Module, params_P: Tensor, grad_P: Tensor) -> None:
        check_module(module)
        num_params = count_parameters(module)
        if params_P.shape != (num_params,) or grad_P.shape != (num_params,):
            raise other_size(module, params_P, grad_P)
        self.module = module
        self.params_P = params_P
        self.grad_P = grad_P
        self._slots: list[_Slot] = []
        self._received: set[int] = set()  # parameters with a gradient, by index
        offset = 0
        for name, param in module.named_parameters():
            if not param.requires_grad:
                continue
            piece = slice(offset, offset + param.numel())
            value, grad = params_P[piece].view(param.shape), grad_P[piece].view(param.shape)
            path, _, leaf = name.rpartition(".")
            owner: nn.Module = attrgetter(path)(module) if path else module  # scripted ones, too
            if param.dtype == torch.float32:
                at = value.data_ptr(), grad.data_ptr()
                slot = _Slot(name, owner, leaf, param, value, grad, *at)
            else:
                half = param.detach().clone()
                slot = _Slot(name, owner, leaf, param, half, grad, half.data_ptr(), None, value)
            _attach(slot)
            param.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                self._recorder(len(self._slots))
            )
            self._slots.append(slot)
            offset += param.numel()
        self._halves = [slot for slot in self._slots if slot.master is not None]
        self.refresh()

    def refresh(self) -> None:
        """Round the masters of parameters of half precision to these parameters."""
        for slot in self._halves:
            if slot.master is not None:
                slot.value.copy_(slot.master)

    def owned(self) -> tuple[list[nn.Parameter], list[Tensor]]:
        """Return what an optimizer steps (masters, for half precision), and the gradients."""
        params = [s.param if s.master is None else nn.Parameter(s.master) for s in self._slots]
        return params, [slot.grad for slot in self._slots]

    def drop_gradients(self) -> None:
        """Leave all parameters without a gradient, before a step that the task makes."""
        for slot in self._slots:
            slot.param.grad = None

    def take_parameters(self) -> None:
        """Bring the parameters after a step of the task into the buffer, and attach the model.

        Raises:
            TaskStateError: the task replaced a parameter.
        """
        for slot in self._detached():
            if _address(slot.param) != slot.value_at:
                slot.value.copy_(slot.param.detach())
            _attach(slot)
        for slot in self._halves:
            if slot.master is not None:
                slot.master.copy_(slot.value)

    def zero_grad(self) -> None:
        """Clear all gradients, keeping them views."""
        self.grad_P.zero_()
        self._received.clear()

    def unused(self) -> tuple[int, ...]:
        """Return the indices of the parameters without a gradient since `zero_grad`.

        Call it after `take_gradient`. Gradients that the loss wrote itself count, unless zero.
        """
        missing = (i for i in range(len(self._slots)) if i not in self._received)
        return tuple(i for i in missing if not bool(self._slots[i].grad.any()))

    def _recorder(self, index: int) -> Callable[[Tensor], None]:
        def record(_: Tensor) -> None:
            self._received.add(index)

        return record

    def take_gradient(self, *, adds: bool = False) -> None:
        """Bring gradients that ``backward`` left elsewhere into the buffer, and attach the model.

        Args:
            adds: ``backward`` has added to gradients in the buffer.

        Raises:
            TaskStateError: the loss replaced a parameter, or computed with other values of it, so
                that the gradient is not one of the parameters in the buffer; or it dropped the
                gradients to which ``backward`` should add.
        """
        for slot in self._detached():
            param = slot.param
            if _address(param) != slot.value_at and not _same_values(param.detach(), slot.value):
                raise TaskStateError(
                    f"the task's loss gives the trained parameter {slot.name!r} other values "
                    f"({param.dtype}, {param.device}), which are not those that are trained",
                    fix="Change trained parameters nowhere but in the optimizer; for another "
                    "precision use autocast, or convert a copy of the model.",
                )
            if slot.master is not None:
                if param.grad is not None:
                    slot.grad.add_(param.grad.detach().to_dense())
                _attach(slot)
                continue
            if adds and _address(param.grad) != slot.grad_at:
                raise TaskStateError(
                    f"the task's loss drops the gradient of {slot.name!r} of earlier micro-batches",
                    fix="Remove zero_grad() from the loss, or train.accumulate.",
                )
            if param.grad is None:
                slot.grad.zero_()
            elif _address(param.grad) != slot.grad_at:
                slot.grad.copy_(param.grad.detach().to_dense())
            _attach(slot)

    def attach(self) -> None:
        """Make parameters and gradients views again; the values in the buffers count.

        Raises:
            TaskStateError: the task replaced a parameter.
        """
        for slot in self._detached():
            _attach(slot)

    def _detached(self) -> list[_Slot]:
        found = [slot for slot in self._slots if not slot.is_attached]
        for slot in found:
            if not slot.is_held:
                raise TaskStateError(
                    f"the task replaces the trained parameter {slot.name!r} by another object, "
                    "which is not trained",
                    fix="Make all parameters in model(seed), and keep them: convert a copy of the "
                    "model (copy.deepcopy) where another one is needed.",
                )
        return found


def _address(tensor: Tensor | None) -> int | None:
    """Address of the elements; None if there are none, or not all, as in a sparse gradient."""
    if tensor is None or tensor.layout is not torch.strided:
        return None
    return tensor.data_ptr()


def _same_values(one: Tensor, other: Tensor) -> bool:
    alike = (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
    return alike and torch.equal(one, other)


def _attach(slot: _Slot) -> None:
    slot.param.grad = None  # a gradient must fit the parameter's type and device
    slot.param.data = slot.value
    if slot.master is None:
        slot.param.grad = slot.grad.detach()  # a separate tensor, since `Module.to` moves it
