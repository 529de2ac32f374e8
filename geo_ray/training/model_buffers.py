"""Exchange of model buffers, such as running statistics: within a region and at the averager.

They form one vector next to the primary shard and travel with an update outside of codec and
strategy. The averager keeps the newest values of every region and answers with their mean by
rows.

Shape legend: B = bytes of the whole vector; E = of what regions exchange.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import torch
from torch import Tensor

from geo_ray.base.errors import CheckpointCorruptError, InvariantError, NonFiniteError
from geo_ray.training.messages import ReplyMessage, UpdateMessage
from geo_ray.training.parameters import BufferLayout
from geo_ray.training.shard import Contribution

REGION_PREFIX: Final = "buffers/"
"""Prefix of model buffers among a region's tensors."""


@dataclass(slots=True)
class RegionBuffers:
    """A region's model buffers, combined from those of its workers.

    They are one vector next to the primary shard, whatever the number of shards. It travels with an
    update outside of codec and strategy; the averager answers with the mean over the regions.

    Shape legend: B = bytes of the whole vector; E = bytes that regions exchange.

    Attributes:
        layout: layout of the vector.
        present_B: region's values, uint8 (B,).
        agreed_B: values after the last exchange, known to all regions.
        num_workers: number of workers.
        alone: whether this is the only region; its values are then agreed.
        precise_B: values with exact statistics of the final parameters, if computed.
    """

    layout: BufferLayout
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
        """Store a worker's values after its step, uint8 (B,), until the region's step uses them.

        Raises:
            InvariantError: wrong size.
        """
        if left_B.shape != self.present_B.shape:
            raise InvariantError(
                f"worker {worker} pushed {left_B.numel()} bytes of model buffers, not "
                f"{self.present_B.numel()}"
            )
        self._pushed[worker] = left_B

    def keep(self, partition: int) -> None:
        """Copy the pushed values of a partition before their memory is reused."""
        if partition in self._pushed:
            self._pushed[partition] = self._pushed[partition].clone()

    def apply(self, contributions: Sequence[Contribution], *, synchronous: bool) -> None:
        """Apply one step.

        Args:
            contributions: partitions with their rows; refused ones have none.
            synchronous: whether the step combines all workers. If false, each contribution has the
                weight that it would have in a mean over all workers, so values stay within the
                range of the contributions.
        """
        used = [c for c in contributions if c.num_samples > 0 and c.worker in self._pushed]
        vectors = [self._pushed[c.worker] for c in used]
        weights = [float(c.num_samples) for c in used]
        if vectors and not synchronous and self.num_workers > 1:
            others = sum(weights) * (self.num_workers - len(used)) / len(used)
            vectors, weights = [*vectors, self.present_B], [*weights, others]
        if vectors:
            self.present_B = self.layout.combine(vectors, weights)
        for contribution in contributions:
            self._pushed.pop(contribution.worker, None)
        if self.alone:
            self.agreed_B = self.present_B

    def take_state(self, worker: int) -> None:
        """Take over the values that a worker has `put`, which makes the optimizer's steps."""
        self.present_B = self._pushed.pop(worker).clone()
        if self.alone:
            self.agreed_B = self.present_B

    def note_precise(self, found: bytes | memoryview) -> None:
        """Store the values of the final evaluation.

        Raises:
            InvariantError: wrong size.
        """
        if len(found) != self.present_B.numel():
            raise InvariantError(
                f"{len(found)} bytes of model buffers came, not {self.present_B.numel()}"
            )
        self.precise_B = torch.frombuffer(bytearray(found), dtype=torch.uint8)

    @property
    def final_B(self) -> Tensor:
        """Values of the final model, with exact statistics if computed."""
        return self.present_B if self.precise_B is None else self.precise_B

    def outgoing(self) -> Tensor:
        """Return the values that travel with an update, uint8 (E,)."""
        self._sent_E = self.present_B[: self.layout.exchanged_bytes].clone()
        return self._sent_E

    def filled(self, update: UpdateMessage) -> UpdateMessage:
        """Return a saved request; without buffers, it gets the present values."""
        if update.buffers_E.numel():
            return update
        return replace(update, buffers_E=self.outgoing())

    def merge(self, reply: ReplyMessage) -> None:
        """Merge the mean of an answer.

        Raises:
            InvariantError: wrong size.
        """
        size = self.layout.exchanged_bytes
        self.agreed_B = self.present_B.clone()
        if size == 0 or self._sent_E is None:
            return
        if not reply.buffers_E.numel():  # of a checkpoint made before the task declared anything
            self._sent_E = None
            return
        if reply.buffers_E.shape != (size,):
            raise InvariantError(
                f"an answer has {reply.buffers_E.numel()} bytes of model buffers, not {size}"
            )
        self.agreed_B[:size] = reply.buffers_E
        self.present_B = self.layout.renewed(
            reply.buffers_E, reply.buffers_weight, self._sent_E, self.present_B
        )
        self._sent_E = None

    def tensors(self) -> dict[str, Tensor]:
        """Return copies for a checkpoint."""
        found = {"present": self.present_B.clone(), "agreed": self.agreed_B.clone()}
        if self._sent_E is not None:
            found["sent"] = self._sent_E.clone()
        return {REGION_PREFIX + name: value for name, value in found.items()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the result of `tensors`; without any, the initial values stay.

        Raises:
            CheckpointCorruptError: wrong size.
        """
        present_B = stored_buffers(tensors)
        if present_B is None:
            return
        if present_B.shape != self.present_B.shape:
            raise CheckpointCorruptError(
                f"the checkpoint has {present_B.numel()} bytes of model buffers, the model has "
                f"{self.present_B.numel()}"
            )
        self.present_B = present_B.clone()
        self.agreed_B = self.present_B if self.alone else tensors[REGION_PREFIX + "agreed"].clone()
        sent_E = tensors.get(REGION_PREFIX + "sent")
        self._sent_E = None if sent_E is None else sent_E.clone()


def stored_buffers(tensors: Mapping[str, Tensor]) -> Tensor | None:
    """A region's model buffers among the tensors of its part of a checkpoint; None without any."""
    return tensors.get(REGION_PREFIX + "present")


AVERAGER_PREFIX: Final = "buffers/"
"""Prefix of model buffers in the averager's part of a checkpoint."""


@dataclass(slots=True)
class AveragerBuffers:
    """The model buffers of all regions, in the averager: their mean over regions.

    The averager stores the newest values of every region and answers with their mean by rows. In a
    round these are the round's values. A region whose last update has no rows keeps its previous
    weight.

    Shape legend: E = bytes that regions exchange.

    Attributes:
        layout: layout of the vectors; empty if there are no model buffers.
    """

    layout: BufferLayout = field(default_factory=partial(BufferLayout, ()))
    _newest: dict[str, Tensor] = field(default_factory=dict)
    _rows: dict[str, float] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        """E, the bytes with every update; 0 without model buffers."""
        return self.layout.exchanged_bytes

    def check(self, update: UpdateMessage) -> None:
        """Refuse invalid values.

        Raises:
            InvariantError: wrong size.
            NonFiniteError: NaN or infinity.
        """
        what = f"update {update.seq} of region '{update.region}'"
        if update.buffers_E.shape != (self.size_bytes,):
            raise InvariantError(
                f"{what} has {update.buffers_E.numel()} bytes of model buffers, not "
                f"{self.size_bytes}"
            )
        if self.size_bytes and not self.layout.is_finite(update.buffers_E):
            raise NonFiniteError(f"the model buffers of {what} are not finite; refused")

    def take(self, update: UpdateMessage) -> None:
        """Store the values of an update."""
        if not self.size_bytes:
            return
        self._newest[update.region] = update.buffers_E.clone()
        if update.num_samples:
            self._rows[update.region] = float(update.num_samples)

    def join(self, region: str, donor: str) -> None:
        """A region begins as a copy of another one."""
        if donor in self._newest:
            self._newest[region] = self._newest[donor]
        if donor in self._rows:
            self._rows[region] = self._rows[donor]

    def leave(self, region: str) -> None:
        """Remove a region."""
        self._newest.pop(region, None)
        self._rows.pop(region, None)

    def attach(self, replies: Sequence[ReplyMessage]) -> list[ReplyMessage]:
        """The answers with the mean."""
        if not self.size_bytes or not self._newest or not replies:
            return list(replies)
        names = sorted(self._newest)
        least = min(self._rows.values(), default=1.0)
        weights = [self._rows.get(name, least) for name in names]
        mean_E = self.layout.combine([self._newest[name] for name in names], weights)
        fractions = {n: w / sum(weights) for n, w in zip(names, weights, strict=True)}
        return [
            replace(r, buffers_E=mean_E, buffers_weight=fractions.get(r.to, 0.0)) for r in replies
        ]

    def export(self) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Tensors and plain values for a checkpoint; the tensors never change."""
        return {AVERAGER_PREFIX + name: value for name, value in self._newest.items()}, dict(
            self._rows
        )

    def restore(self, tensors: Mapping[str, Tensor], rows: object) -> None:
        """Restore the result of `export`."""
        self._newest = {
            name.removeprefix(AVERAGER_PREFIX): value.clone()
            for name, value in tensors.items()
            if name.startswith(AVERAGER_PREFIX)
        }
        known = rows if isinstance(rows, Mapping) else {}
        self._rows = {str(name): float(value) for name, value in known.items()}
