"""A worker that trains some steps by itself before it pushes: what it pushes is its change.

For strategies with `RegionTraits.worker_steps`. The optimizer is the worker's
own; its state never travels, lives as long as the worker, and is in no checkpoint: a replacement,
or a resumed run, begins with a fresh one.

Shape legend: P = parameters of the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from geo_ray.tasks.base import Columns, Stats
from geo_ray.tasks.groups import GroupRun
from geo_ray.training.compute.carry_layout import CarryLayout
from geo_ray.training.compute.group_pieces import pieces_of
from geo_ray.training.compute.optimizers import InnerOptimizer, OneOptimizer
from geo_ray.training.compute.state_guard import StateChange
from geo_ray.training.compute.worker import StepResult, Worker
from geo_ray.types import Span


class LocalSteps:
    """Has the face of a `Worker`, and one inside.

    Args:
        worker: computes the gradients.
        optimizer: applies them to its parameters.
        steps: per push; the rows of a push are cut into as many batches.
        region_rows: of a batch of each of the region's workers together, to know from a push's
            place in the stream how many came before.
        groups: of the parameters, if they are not all alike.
    """

    def __init__(
        self,
        worker: Worker,
        optimizer: OneOptimizer,
        steps: int,
        region_rows: int = 1,
        groups: Sequence[GroupRun] = (),
    ) -> None:
        self._worker = worker
        pieces = pieces_of(groups, (0, worker.params_P.numel()))
        self._optimizer = InnerOptimizer(optimizer, worker.params_P, pieces)
        self._steps = steps
        self._region_rows = region_rows

    @property
    def params_P(self) -> Tensor:
        """Where the parameters are read from, fp32 (P,)."""
        return self._worker.params_P

    @property
    def grad_P(self) -> Tensor:
        """Where the change is left, as what is to be subtracted, fp32 (P,)."""
        return self._worker.grad_P

    @property
    def carried_B(self) -> Tensor:
        """See `Worker.carried_B`."""
        return self._worker.carried_B

    @property
    def left_B(self) -> Tensor:
        """See `Worker.left_B`."""
        return self._worker.left_B

    @property
    def layout(self) -> CarryLayout:
        """Of what the model carries."""
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
        before_P, before_B = params_P.clone(), self.carried_B.clone()
        losses = []
        # From the stream, since nobody saves what a worker counts.
        self._optimizer.taken = span.start // self._region_rows
        for i in range(self._steps):
            first, stop = (span.count * n // self._steps for n in (i, i + 1))
            part = {name: column[first:stop] for name, column in columns.items()}
            result = self._worker.step(part, Span(span.start + first, stop - first))
            if result.loss is None:
                params_P.copy_(before_P)
                self.carried_B.copy_(before_B)
                return result
            losses.append(result.loss)
            self.carried_B.copy_(self.left_B)
            self._optimizer.apply(self.grad_P)
        self.grad_P.copy_(before_P).sub_(params_P)
        params_P.copy_(before_P)
        self.carried_B.copy_(before_B)
        return StepResult(sum(losses) / len(losses))

    def on_work(self, version: int) -> None:
        """See `Worker.on_work`."""
        self._worker.on_work(version)

    def take_changed(self) -> list[StateChange]:
        """See `Worker.take_changed`."""
        return self._worker.take_changed()

    def evaluate_all(self, batches: Iterable[Columns]) -> tuple[Stats, int]:
        """See `Worker.evaluate_all`."""
        return self._worker.evaluate_all(batches)
