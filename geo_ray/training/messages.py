"""Messages between a region and the averager: a strategy's payload with its header.

`UpdateMessage` and `ReplyMessage` travel between processes and lie in checkpoints. A strategy sees
neither: its averager's side receives and returns, and its region's side receives, the
`geo_ray.strategies.state.Update` and `Reply` that they contain.

Shape legend: P = parameters of the region's model (or of the slice that one shard holds);
E = bytes of the model's buffers that travel with its parameters.
"""

from __future__ import annotations

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
    """What crosses the WAN towards the averager.

    Attributes:
        region: the sender.
        attempt: incarnation of the sender; grows when it is restarted.
        seq: number of the request within the attempt, from 1.
        base_version: the averager's version that the sender had merged when it spoke.
        num_samples: rows behind this update; its weight in a mean by samples.
        payload_P: fp32 vector; its meaning is the strategy's.
        final: the sender has finished training; the last exchange leaves all regions equal.
        fragment: index of the part of the model, for strategies that send parts.
        coded: the payload made small; ``payload_P`` is empty then. Strategies never see it.
        against: version of the reply whose payload the coded one is a difference from; None: from
            nothing.
        loss: mean training loss of the last step behind it; known at home only.
        steps: local steps behind this update.
        step_s: seconds of one of them of late; 0 if not measured.
        exchange_s: seconds that the sender's last exchange was on its way, without what the
            averager held it; 0 if there was none.
        grad_sq: squared 2-norm of the payload as a vector, of strategies that average gradients;
            None where that is not measured.
        buffers_E: what the region's model carries beside its parameters, uint8 (E,), at the moment
            of the update; no strategy or codec sees it.
        view: generation of the newest view that the sender has heard of; 0: of none but the first.
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

    @property
    def size_bytes(self) -> int:
        """Bytes of the payload on the wire, without headers."""
        return _size_bytes(self.payload_P, self.coded) + self.buffers_E.numel()

    def content(self, version: int) -> Update:
        """What the strategy receives.

        Args:
            version: the averager's at present.
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
        )


@dataclass(frozen=True, slots=True)
class Barrier:
    """After this answer all regions hold the same model, and those who take part are others.

    Attributes:
        view: generation of the view that begins (`geo_ray.training.membership`).
        is_donor: the receiver copies its state after merging the answer; newcomers begin with it.
        leaves: the receiver takes part no more.
    """

    view: int
    is_donor: bool = False
    leaves: bool = False


@dataclass(frozen=True, slots=True)
class ReplyMessage:
    """The averager's answer to one update.

    Attributes:
        to: the region it is for.
        seq: the request it answers.
        version: the averager's version after the update.
        num_samples: rows behind the payload, over all regions that contributed.
        payload_P: fp32 vector; its meaning is the strategy's. It may be the reference of later
            messages: whoever merges it leaves it as it is.
        final: it answers a final update, after every region's final update is in.
        stop: finish training now (a target was reached).
        checkpoint: id of a checkpoint that began before this reply: copy your state for it, if that
            is not done yet, before this reply is merged.
        halt: after that, stand still for good (the run was interrupted).
        coded: as in `UpdateMessage`.
        against: as in `UpdateMessage`.
        dropped: the update was not taken in, because it was too stale; what it carried goes with
            the next one. The payload is merged as that of any reply.
        own: the payload contains the receiver's own change, which it takes back out.
        lossy: which lossy blocks of the receiver's updates were taken in; None if nobody keeps
            books of them.
        fragment: of the update that it answers.
        own_weight: weight that the receiver's own update has in the payload; 0 if not told.
        steps: local steps that the receiver is to take before it speaks again; None: as configured.
        seen: rows behind all updates that the averager has taken in.
        reliable: share of the blocks of the receiver's next update that are to travel reliably, for
            differential transmission; None: as configured.
        held_s: how long the averager had the update before it answered; told by its shell.
        buffers_E: the regions' mean of the model buffers, uint8 (E,).
        buffers_weight: the receiver's weight in it.
        draining: the receiver's next update is its last word: the run ends with that round.
        flush: say the last word after the step that is being computed, as at the end of a run:
            once all have, members change, and then training goes on.
        barrier: the answer with which members change; None: they do not.
        view: generation of the view in which it was given; 0: the first.
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

    @property
    def size_bytes(self) -> int:
        """Bytes of the payload on the wire, without headers."""
        return _size_bytes(self.payload_P, self.coded) + self.buffers_E.numel()

    @classmethod
    def sending(cls, reply: Reply, *, seq: int, version: int, own: bool = False) -> ReplyMessage:
        """The message that carries what a strategy has answered.

        Args:
            reply: the answer.
            seq: the request it answers.
            version: the averager's after the update.
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
        )

    def content(self) -> Reply:
        """What the strategy receives."""
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
        )


def _size_bytes(payload_P: Tensor, coded: Coded | None) -> int:
    return 4 * payload_P.numel() if coded is None else coded.size_bytes
