"""Inputs and outputs of strategies: payloads with control fields, and the state of both sides.

`geo_ray.training.messages` defines the messages that contain them.

Shape legend: P = parameters of the region's model (or of the slice that one shard holds).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import torch
from torch import Tensor

_PIECE: Final = 2**16  # elements; a few vectors of so many stay in a core's cache


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A region's next message.

    Attributes:
        payload_P: fp32, owned by the message (never a view of live parameters).
        wait: whether training waits until the reply is merged.
        fragment: fragment of the model, for strategies that send parts.
    """

    payload_P: Tensor
    wait: bool
    fragment: int = 0


@dataclass(frozen=True, slots=True)
class Wait:
    """A message is due, but the last request is open: wait until that is answered."""


@dataclass(frozen=True, slots=True)
class Update:
    """A region's update, as the averager's side of a strategy receives it.

    Attributes:
        region: the sender.
        payload_P: fp32 vector, decoded; its meaning is the strategy's. It is valid until the update
            is answered, so keep a copy.
        num_samples: rows behind this update; its weight in a mean by samples.
        lag: versions that the averager has committed since the one that the sender knew.
        final: the sender has finished training; all regions must be equal after this update.
        fragment: index of the part of the model, for strategies that send parts.
        steps: local steps behind this update.
        step_s: recent duration of one of them in seconds; 0 if not measured.
        exchange_s: seconds that the sender's last exchange took, without the time that the
            averager held it; 0 if there was none.
        grad_sq: squared 2-norm of the payload, of strategies that average gradients; None where
            that is not measured.
        unused: parameters that had no gradient in any step behind this update, by index.
    """

    region: str
    payload_P: Tensor
    num_samples: int
    lag: int = 0
    final: bool = False
    fragment: int = 0
    steps: int = 0
    step_s: float = 0.0
    exchange_s: float = 0.0
    grad_sq: float | None = None
    unused: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer of the averager to a region's update: payload and control fields.

    Attributes:
        to: receiver.
        payload_P: fp32 vector, as long as the update's; its meaning depends on the strategy. It may
            be the reference of later messages: `Strategy.on_reply` must not change it.
        num_samples: rows behind the payload, over all contributing regions.
        final: answer to a final update, given once the final updates of all regions are in.
        fragment: fragment of the answered update.
        own_weight: weight of the receiver's own update in the payload; 0 if unknown.
        steps: local steps until the receiver's next update; None: as configured.
        reliable: fraction of the blocks of the receiver's next update to send reliably, for
            differential transmission; None: as configured.
        dropped: the update was discarded: its content is sent again with the next one.
        continues: training continues after this answer to a final update, because only the members
            change; another final update follows. Clear what a final update leaves behind. Set by
            the averager.
        next_fragment: fragment of the receiver's next update, if the strategy chooses it here.
        unused: parameters that had no gradient in any region, if the payload is a gradient.
    """

    to: str
    payload_P: Tensor
    num_samples: int = 0
    final: bool = False
    fragment: int = 0
    own_weight: float = 0.0
    steps: int | None = None
    reliable: float | None = None
    dropped: bool = False
    continues: bool = False
    next_fragment: int = 0
    unused: Sequence[int] = ()

    @classmethod
    def answering(cls, update: Update, payload_P: Tensor) -> Reply:
        """Return the answer to ``update`` with a payload, and its number of rows."""
        return cls(update.region, payload_P, update.num_samples, update.final, update.fragment)


class InnerStep(Protocol):
    """One step of the inner optimizer."""

    def __call__(self, grad_P: Tensor, /) -> None:
        """Step with a gradient (P,)."""


class Allocator(Protocol):
    """Gives memory for vectors, as `torch.empty` does."""

    def __call__(self, size: int, /) -> Tensor:
        """A fp32 vector of ``size`` elements, whatever they are."""


@dataclass(slots=True)
class RegionState:
    """A region's model, or one shard's slice of it, as a strategy sees it.

    Attributes:
        params_P: the live fp32 parameters; strategies change them in place.
        apply_gradient: one step of the inner optimizer with the given gradient (P,).
        memory: tensors that the strategy stores between calls; saved in checkpoints.
        numbers: plain numbers that it stores; saved too.
        fragments: where each part of the model lies in this slice, as (start, stop).
        step: gradients taken in since the start.
        since_send: gradients taken in since the last request.
        samples: rows behind those.
        link_busy: whether a request is open.
        allocate: returns memory for an outgoing payload of that many fp32 values, possibly in the
            memory that the bridge reads. The message owns it; it is reused once the message is
            answered.
        budget: local steps that the averager asked for until the next request; None: it did not.
    """

    params_P: Tensor
    apply_gradient: InnerStep
    memory: dict[str, Tensor] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)
    fragments: tuple[tuple[int, int], ...] = ()
    step: int = 0
    since_send: int = 0
    samples: int = 0
    link_busy: bool = False
    budget: int | None = None
    allocate: Allocator = torch.empty

    def change_since(self, start_P: Tensor) -> Tensor:
        """Return ``start_P - params_P`` in the memory that it is sent from."""
        if start_P.device.type != "cpu":
            return start_P - self.params_P
        buffer_P = self.allocate(start_P.numel())
        return torch.sub(start_P, self.params_P, out=buffer_P)

    def snapshot(self) -> Tensor:
        """Return a copy of the parameters."""
        return self.params_P.clone()

    def adopt(self, outer_P: Tensor, change_P: Tensor) -> None:
        """Subtract a change from the outer parameters, and continue from them."""
        # Each goes through memory once.
        pieces = (torch.split(vector_P, _PIECE) for vector_P in (outer_P, self.params_P, change_P))
        for outer, params, change in zip(*pieces, strict=True):
            params.copy_(outer.sub_(change))

    def continue_from(self, start_P: Tensor) -> None:
        """Set the parameters."""
        self.params_P.copy_(start_P)

    def stored(self, payload_P: Tensor) -> Tensor:
        """Return a reply's payload for `memory`: a copy, because its memory is used again."""
        return payload_P.clone()

    def is_due(self, interval: int) -> bool:
        """Tell whether an exchange is due, by the averager's interval if it asked for one.

        Args:
            interval: configured number of steps.
        """
        return self.since_send >= (interval if self.budget is None else self.budget)


@dataclass(slots=True)
class AveragerState:
    """The averager's state as a strategy sees it.

    Attributes:
        members: active regions, sorted.
        memory: strategy's tensors; saved in checkpoints. Tensors whose name ends in ``/region``
            belong to the region and leave with it.
        numbers: strategy's plain numbers, by the same rules.
        version: number of commits: updates taken in, or rounds for strategies that work in rounds.
            `answer_all` increments it; other code must do so itself.
        waiting: updates of the open round by region.
        fragments: position of each fragment of the model, as (start, stop).
        finished: regions whose final update has arrived and is held until those of all have. No
            region needs to wait for them.
        stopping: whether every answer from now on asks its region to finish.
        now_s: time of the present event by the averager's clock.
        wake_s: time of the next `Strategy.on_wake`; None: none.
        allocate: returns memory for a vector of that many fp32 values that is sent to regions, such
            as the answer of a round. Their content is arbitrary. Vectors without references are
            reused.
        reuses_updates: whether the memory of a round's updates may become its answer: nothing else
            reads it.
        data_rows: rows of every region's training data, from the manifest; sites that share a
            region's rows have equal parts of them. Set when the averager is built, so not in
            checkpoints. Empty if unknown (a strategy in a test).
    """

    members: tuple[str, ...]
    memory: dict[str, Tensor] = field(default_factory=dict)
    version: int = 0
    waiting: dict[str, Update] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)
    fragments: tuple[tuple[int, int], ...] = ()
    finished: frozenset[str] = frozenset()
    stopping: bool = False
    now_s: float = 0.0
    wake_s: float | None = None
    allocate: Allocator = torch.empty
    reuses_updates: bool = False
    data_rows: Mapping[str, float] = field(default_factory=dict)

    @property
    def active(self) -> tuple[str, ...]:
        """The members that have not finished."""
        return tuple(name for name in self.members if name not in self.finished)

    def gather(self, update: Update) -> list[Update] | None:
        """Hold ``update`` until every live region has reported.

        Returns:
            The round's updates in the order of their regions' names, or None if some are missing.
        """
        self.waiting[update.region] = update
        if any(region not in self.waiting for region in self.members):
            return None
        round_updates = [self.waiting[region] for region in self.members]
        self.waiting.clear()
        return round_updates
