"""What a strategy works on: messages between a region and the averager, and the state of both.

Shape legend: P = parameters of the region's model (or of the slice that one shard holds);
E = bytes of what models carry between regions beside their parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from geo_ray.codecs.base import Coded, LossyReport

_NOTHING = torch.empty(0, dtype=torch.uint8)


def nothing_carried() -> Tensor:
    """No carried values, uint8 (0,)."""
    return _NOTHING  # one and the same, so that messages without any are equal


@dataclass(frozen=True, slots=True)
class Outgoing:
    """What a region wants to say now.

    Attributes:
        payload_P: fp32, owned by the message (never a view of live parameters).
        wait: whether the region stands still until the reply is merged.
        fragment: which part of the model it is about, for strategies that send parts.
    """

    payload_P: Tensor
    wait: bool
    fragment: int = 0


@dataclass(frozen=True, slots=True)
class Wait:
    """The region must speak, but its last request is open: stand still until that is answered."""


@dataclass(frozen=True, slots=True)
class Update:
    """What crosses the WAN towards the averager.

    Attributes:
        region: the sender.
        epoch: incarnation of the sender; grows when it is restarted.
        seq: number of the request within the epoch, from 1.
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
        carried_E: what the region's model carries beside its parameters, uint8 (E,), at the moment
            of the update; no strategy or codec sees it.
        view: epoch of the newest view that the sender has heard of; 0: of none but the first.
    """

    region: str
    epoch: int
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
    carried_E: Tensor = field(default_factory=nothing_carried)
    view: int = 0

    @property
    def size_bytes(self) -> int:
        """Bytes of the payload on the wire, without headers."""
        return _size_bytes(self.payload_P, self.coded) + self.carried_E.numel()


@dataclass(frozen=True, slots=True)
class Border:
    """After this answer all regions hold the same model, and those who take part are others.

    Attributes:
        view: epoch of the view that begins (`geo_ray.training.membership`).
        donates: the receiver copies its state after merging the answer; newcomers begin with it.
        leaves: the receiver takes part no more.
    """

    view: int
    donates: bool = False
    leaves: bool = False


@dataclass(frozen=True, slots=True)
class Reply:
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
        coded: as in `Update`.
        against: as in `Update`.
        dropped: the update was not taken in, because it was too stale; what it carried goes with
            the next one. The payload is merged as that of any reply.
        own: the payload contains the receiver's own change, which it takes back out.
        lossy: which lossy blocks of the receiver's updates were taken in; None if nobody keeps
            books of them.
        fragment: of the update that it answers.
        share: weight that the receiver's own update has in the payload; 0 if not told.
        steps: local steps that the receiver is to take before it speaks again; None: as configured.
        seen: rows behind all updates that the averager has taken in.
        reliable: share of the blocks of the receiver's next update that are to travel reliably, for
            differential transmission; None: as configured.
        held_s: how long the averager had the update before it answered; told by its shell.
        carried_E: the regions' mean of what their models carry, uint8 (E,).
        carried_share: the receiver's weight in it.
        closing: the receiver's next update is its last word: the run ends with that round.
        gather: say the last word after the step that is being computed, as at the end of a run:
            once all have, members change, and then training goes on.
        border: the answer with which members change; None: they do not.
        view: epoch of the view in which it was given; 0: the first.
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
    share: float = 0.0
    steps: int | None = None
    seen: int = 0
    reliable: float | None = None
    held_s: float = 0.0
    carried_E: Tensor = field(default_factory=nothing_carried)
    carried_share: float = 0.0
    closing: bool = False
    gather: bool = False
    border: Border | None = None
    view: int = 0

    @property
    def size_bytes(self) -> int:
        """Bytes of the payload on the wire, without headers."""
        return _size_bytes(self.payload_P, self.coded) + self.carried_E.numel()


def _size_bytes(payload_P: Tensor, coded: Coded | None) -> int:
    return 4 * payload_P.numel() if coded is None else coded.size_bytes


@dataclass(slots=True)
class RegionState:
    """A region's model, or one shard's slice of it, as a strategy sees it.

    Attributes:
        params_P: the live fp32 parameters; strategies change them in place.
        apply_gradient: one step of the inner optimizer with the given gradient (P,).
        memory: tensors that the strategy keeps from call to call; saved in checkpoints.
        numbers: plain numbers that it keeps; saved too.
        fragments: where each part of the model lies in this slice, as (start, stop).
        step: gradients taken in since the start.
        since_send: gradients taken in since the last request.
        samples: rows behind those.
        link_busy: whether a request is open.
        room: memory for a payload of so many fp32 that goes out at once; it may be where the bridge
            reads it. It is the message's, and used again once that is answered.
        budget: local steps that the averager asked for until the next request; None: it did not.
    """

    params_P: Tensor
    apply_gradient: Callable[[Tensor], None]
    memory: dict[str, Tensor] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)
    fragments: tuple[tuple[int, int], ...] = ()
    step: int = 0
    since_send: int = 0
    samples: int = 0
    link_busy: bool = False
    budget: int | None = None
    room: Callable[[int], Tensor] = torch.empty

    def is_due(self, interval: int) -> bool:
        """Whether an exchange is due: after as many steps as the averager asked for.

        Args:
            interval: steps where it asked for nothing.
        """
        return self.since_send >= (interval if self.budget is None else self.budget)


@dataclass(slots=True)
class AveragerState:
    """The averager's state as a strategy sees it.

    Attributes:
        members: the live regions, sorted.
        memory: tensors that the strategy keeps; saved in checkpoints. Those whose name ends in
            ``/region`` go with the region.
        numbers: plain numbers that it keeps, by the same rules.
        version: number of commits: updates taken in, or rounds for strategies that work in rounds.
        waiting: updates of the open round by region.
        fragments: where each part of the model lies, as (start, stop).
        finished: regions whose last word is in, which is held until those of all are: they have
            nothing more to say, so nobody need wait for them.
        stopping: whether every answer from now on tells its region to finish.
        now_s: time of the present event by the averager's clock.
        wake_s: when the strategy wants to be woken (`AveragerTraits.on_wake`); None: not at all.
        room: memory for a vector of so many fp32 that is given to regions, such as the answer of a
            round; its owner may have it from one that nobody holds any more.
        data_rows: rows of every region's training data, as the manifest says; sites that share a
            region's rows have equal parts of them. Given when the averager is built, so it is not
            in checkpoints. Empty where nobody said (a strategy that is tried by hand).
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
    room: Callable[[int], Tensor] = torch.empty
    data_rows: Mapping[str, float] = field(default_factory=dict)

    @property
    def active(self) -> tuple[str, ...]:
        """The members that have not finished."""
        return tuple(name for name in self.members if name not in self.finished)

    def gather(self, update: Update) -> list[Update] | None:
        """Hold ``update`` until every live region has spoken.

        Returns:
            The round's updates in the order of their regions' names, or None if some are missing.
        """
        self.waiting[update.region] = update
        if any(region not in self.waiting for region in self.members):
            return None
        round_updates = [self.waiting[region] for region in self.members]
        self.waiting.clear()
        return round_updates
