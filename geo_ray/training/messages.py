"""Messages between a region and the averager: a strategy's payload with its header.

`UpdateMessage` and `ReplyMessage` travel between processes and are stored in checkpoints. A
strategy sees only their content: `geo_ray.strategies.state.Update` and `Reply`.

Shape legend: P = parameters of the region's model (or of the slice that one shard holds);
E = bytes of the exchanged model buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from geo_ray.codecs.base import Coded, LossyReport
from geo_ray.strategies.state import Reply, Update

_NOTHING = torch.empty(0, dtype=torch.uint8)


def no_buffers() -> Tensor:
    """No model buffers, uint8 (0,)."""
    return _NOTHING  # one and the same, so that messages without any are equal


@dataclass(frozen=True, slots=True)
class UpdateMessage:
    """Message from a region to the averager.

    Attributes:
        region: sender.
        attempt: incarnation of the sender; grows with every restart.
        seq: number of the request within the attempt, from 1.
        base_version: averager's version that the sender had merged.
        num_samples: rows behind this update; its weight in a mean by samples.
        payload_P: fp32 vector; its meaning depends on the strategy.
        final: the sender has finished training; the last exchange makes all regions equal.
        fragment: index of the model's part, for strategies that send parts.
        coded: encoded payload; ``payload_P`` is then empty. Strategies never see it.
        against: version of the reply that the encoded payload is a difference from; None: no
            reference.
        loss: mean training loss of the last step; not transmitted.
        steps: local steps behind this update.
        step_s: recent seconds per step; 0 if not measured.
        exchange_s: seconds of the sender's last exchange, without the time at the averager; 0 if
            there was none.
        grad_sq: squared 2-norm of the payload, for strategies that average gradients; None if not
            measured.
        buffers_E: model buffers at the moment of the update, uint8 (E,); strategies and codecs do
            not see them.
        view: generation of the newest membership view known to the sender; 0: the first.
        unused: see `Update`.
    """

    region: str
    attempt: int
    seq: int
    base_version: int
    num_samples: int
    payload_P: Tensor
    final: bool = False
    fragment: int = 0
    coded: Coded | None = None
    against: int | None = None
    loss: float | None = None
    steps: int = 0
    step_s: float = 0.0
    exchange_s: float = 0.0
    grad_sq: float | None = None
    buffers_E: Tensor = field(default_factory=no_buffers)
    view: int = 0
    unused: Sequence[int] = ()

    @property
    def size_bytes(self) -> int:
        """Bytes of the payload on the wire, without headers."""
        return _size_bytes(self.payload_P, self.coded) + self.buffers_E.numel()

    def content(self, version: int) -> Update:
        """Return the strategy's view of the update.

        Args:
            version: averager's present version.
        """
        return Update(
            self.region,
            self.payload_P,
            self.num_samples,
            max(0, version - self.base_version),
            self.final,
            self.fragment,
            self.steps,
            self.step_s,
            self.exchange_s,
            self.grad_sq,
            self.unused,
        )


@dataclass(frozen=True, slots=True)
class Barrier:
    """Membership barrier: after this answer all regions are equal, and the members change.

    Attributes:
        view: generation of the new view (`geo_ray.training.membership`).
        is_donor: the receiver copies its state after merging the answer, for joining regions.
        leaves: the receiver leaves the run.
    """

    view: int
    is_donor: bool = False
    leaves: bool = False


@dataclass(frozen=True, slots=True)
class ReplyMessage:
    """Answer of the averager to one update.

    Attributes:
        to: receiver.
        seq: answered request.
        version: averager's version after the update.
        num_samples: rows behind the payload, over all contributing regions.
        payload_P: fp32 vector; its meaning depends on the strategy. Read-only: it may be the
            reference of later messages.
        final: answer to a final update, given once the final updates of all regions have arrived.
        stop: finish training now (a target was reached).
        checkpoint: id of a checkpoint that began before this reply; the receiver copies its state
            before it merges the reply.
        halt: pause after that copy (the run was interrupted).
        coded: as in `UpdateMessage`.
        against: as in `UpdateMessage`.
        dropped: the update was discarded because it was too stale; its content goes with the next
            one. The payload is merged as usual.
        own: the payload contains the receiver's own change, which the receiver subtracts.
        lossy: lossy blocks of the receiver's updates that were taken in; None if not tracked.
        fragment: fragment of the answered update.
        own_weight: weight of the receiver's own update in the payload; 0 if unknown.
        steps: local steps until the receiver's next exchange; None: as configured.
        seen: rows behind all updates that the averager has taken in.
        reliable: fraction of the blocks of the receiver's next update to send reliably, for
            differential transmission; None: as configured.
        held_s: seconds from the update's arrival at the averager to the answer; set by the shell.
        buffers_E: mean of the regions' model buffers, uint8 (E,).
        buffers_weight: weight of the receiver in that mean.
        draining: the receiver's next update is its final update; the run ends with that round.
        flush: send a final update after the step in progress; training continues after the
            barrier.
        barrier: membership change that this answer completes; None: no change.
        view: generation of the view in which the answer was given; 0: the first.
        next_fragment: fragment of the receiver's next update, if the strategy chooses it.
        unused: see `Reply`.
    """

    to: str
    seq: int
    version: int
    num_samples: int
    payload_P: Tensor
    final: bool = False
    stop: bool = False
    checkpoint: int | None = None
    halt: bool = False
    coded: Coded | None = None
    against: int | None = None
    dropped: bool = False
    own: bool = False
    lossy: LossyReport | None = None
    fragment: int = 0
    own_weight: float = 0.0
    steps: int | None = None
    seen: int = 0
    reliable: float | None = None
    held_s: float = 0.0
    buffers_E: Tensor = field(default_factory=no_buffers)
    buffers_weight: float = 0.0
    draining: bool = False
    flush: bool = False
    barrier: Barrier | None = None
    view: int = 0
    next_fragment: int = 0
    unused: Sequence[int] = ()

    @property
    def size_bytes(self) -> int:
        """Bytes of the payload on the wire, without headers."""
        return _size_bytes(self.payload_P, self.coded) + self.buffers_E.numel()

    @classmethod
    def sending(cls, reply: Reply, *, seq: int, version: int, own: bool = False) -> ReplyMessage:
        """Build the message for a strategy's reply.

        Args:
            reply: strategy's reply.
            seq: answered request.
            version: averager's version after the update.
            own: see the attribute.
        """
        return cls(
            reply.to,
            seq,
            version,
            reply.num_samples,
            reply.payload_P,
            reply.final,
            fragment=reply.fragment,
            own_weight=reply.own_weight,
            steps=reply.steps,
            reliable=reply.reliable,
            own=own,
            dropped=reply.dropped,
            next_fragment=reply.next_fragment,
            unused=reply.unused,
        )

    def content(self) -> Reply:
        """Return the strategy's view of the reply."""
        return Reply(
            self.to,
            self.payload_P,
            self.num_samples,
            self.final,
            self.fragment,
            self.own_weight,
            self.steps,
            self.reliable,
            self.dropped,
            continues=self.barrier is not None,
            next_fragment=self.next_fragment,
            unused=self.unused,
        )


def _size_bytes(payload_P: Tensor, coded: Coded | None) -> int:
    return 4 * payload_P.numel() if coded is None else coded.size_bytes
