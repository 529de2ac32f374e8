"""What a region's model carries beside its parameters: its workers' values become the region's.

It is one vector, beside the primary shard, whatever the number of shards. It goes with an update as
it is, outside of codec and strategy; the averager answers with the mean over the regions.

Shape legend: B = bytes of the whole vector; E = of what regions exchange.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import torch
from torch import Tensor

from geo_ray.errors import CheckpointCorruptError, InvariantError
from geo_ray.strategies.base import Reply, Update
from geo_ray.training.compute.carry_layout import CarryLayout
from geo_ray.training.server.shard import Contribution

CARRIED: Final = "carry/"
"""Of carried values among a region's tensors."""


@dataclass(slots=True)
class RegionCarry:
    """See the module's docstring.

    Attributes:
        layout: of the vector.
        present_B: the region's values, uint8 (B,).
        agreed_B: those after the last exchange, which all regions know.
        num_workers: of the region.
        alone: there are no other regions: what this one has is agreed.
        precise_B: the same with statistics of the final parameters, if they were made.
    """

    layout: CarryLayout
    present_B: Tensor
    num_workers: int = 1
    alone: bool = False
    agreed_B: Tensor = field(init=False)
    precise_B: Tensor | None = None
    _sent_E: Tensor | None = None
    _pushed: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.present_B = self.present_B.clone()
        self.agreed_B = self.present_B.clone()

    def put(self, worker: int, left_B: Tensor) -> None:
        """Hold what a worker's step left, uint8 (B,), until the region's step that uses it.

        Raises:
            InvariantError: if it has another size.
        """
        if left_B.shape != self.present_B.shape:
            raise InvariantError(
                f"worker {worker} pushed {left_B.numel()} carried bytes, not "
                f"{self.present_B.numel()}"
            )
        self._pushed[worker] = left_B

    def keep(self, share: int) -> None:
        """Copy what was pushed for a share; its place is needed before the step uses it."""
        if share in self._pushed:
            self._pushed[share] = self._pushed[share].clone()

    def apply(self, contributions: Sequence[Contribution], *, together: bool) -> None:
        """Take in one step.

        Args:
            contributions: who takes part, with how many rows; refused ones have none.
            together: the step is of all workers. If not, each counts as it would in a mean of all:
                then values stay between those that were there, however many come one by one.
        """
        used = [c for c in contributions if c.num_samples > 0 and c.worker in self._pushed]
        vectors = [self._pushed[c.worker] for c in used]
        weights = [float(c.num_samples) for c in used]
        if vectors and not together and self.num_workers > 1:
            others = sum(weights) * (self.num_workers - len(used)) / len(used)
            vectors, weights = [*vectors, self.present_B], [*weights, others]
        if vectors:
            self.present_B = self.layout.combine(vectors, weights)
        for contribution in contributions:
            self._pushed.pop(contribution.worker, None)
        if self.alone:
            self.agreed_B = self.present_B

    def note_precise(self, found: bytes | memoryview) -> None:
        """Hold what the final evaluation was made with.

        Raises:
            InvariantError: if it has another size.
        """
        if len(found) != self.present_B.numel():
            raise InvariantError(f"{len(found)} carried bytes came, not {self.present_B.numel()}")
        self.precise_B = torch.frombuffer(bytearray(found), dtype=torch.uint8)

    @property
    def final_B(self) -> Tensor:
        """Those of the final model: with statistics made anew, if they were."""
        return self.present_B if self.precise_B is None else self.precise_B

    def outgoing(self) -> Tensor:
        """What goes with an update, uint8 (E,)."""
        self._sent_E = self.present_B[: self.layout.exchanged_bytes].clone()
        return self._sent_E

    def filled(self, update: Update) -> Update:
        """A saved request; one from before the task declared anything gets the present values."""
        if update.carried_E.numel():
            return update
        return replace(update, carried_E=self.outgoing())

    def merge(self, reply: Reply) -> None:
        """Take in the mean that came with an answer.

        Raises:
            InvariantError: if it has another size.
        """
        size = self.layout.exchanged_bytes
        self.agreed_B = self.present_B.clone()
        if size == 0 or self._sent_E is None:
            return
        if not reply.carried_E.numel():  # of a checkpoint made before the task declared anything
            self._sent_E = None
            return
        if reply.carried_E.shape != (size,):
            raise InvariantError(
                f"an answer has {reply.carried_E.numel()} carried bytes, not {size}"
            )
        self.agreed_B[:size] = reply.carried_E
        self.present_B = self.layout.renewed(
            reply.carried_E, reply.carried_share, self._sent_E, self.present_B
        )
        self._sent_E = None

    def tensors(self) -> dict[str, Tensor]:
        """Copies of what a checkpoint needs."""
        found = {"present": self.present_B.clone(), "agreed": self.agreed_B.clone()}
        if self._sent_E is not None:
            found["sent"] = self._sent_E.clone()
        return {CARRIED + name: value for name, value in found.items()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Become what `tensors` gave; an old checkpoint leaves the values of the start.

        Raises:
            CheckpointCorruptError: they have another size.
        """
        present_B = carried_in(tensors)
        if present_B is None:
            return
        if present_B.shape != self.present_B.shape:
            raise CheckpointCorruptError(
                f"the checkpoint has {present_B.numel()} carried bytes, the model has "
                f"{self.present_B.numel()}"
            )
        self.present_B = present_B.clone()
        self.agreed_B = self.present_B if self.alone else tensors[CARRIED + "agreed"].clone()
        sent_E = tensors.get(CARRIED + "sent")
        self._sent_E = None if sent_E is None else sent_E.clone()


def carried_in(tensors: Mapping[str, Tensor]) -> Tensor | None:
    """A region's carried values among the tensors of its part of a checkpoint; None without any."""
    return tensors.get(CARRIED + "present")
