"""What bridges and the coordinator send each other about a round, as typed records.

`wire` puts them into messages. The records that a region sends to the coordinator name no sender:
the connection shows who it is.
"""

from __future__ import annotations

from dataclasses import dataclass

from geo_ray.overlay.plan import SendOrder
from geo_ray.transport.wire.frames import Buffer
from geo_ray.transport.wire.meta import Meta


@dataclass(frozen=True, slots=True)
class Ready:
    """A region has its contribution (to the coordinator).

    Attributes:
        rnd: number of the round, the same in all regions.
        about: what the caller wants to know of the contribution where the sums meet.
    """

    rnd: int
    about: Meta


@dataclass(frozen=True, slots=True)
class Orders:
    """What a region is to send (from the coordinator).

    Attributes:
        rnd: the round.
        attempt: counts how often the round's sums were begun; a higher one voids what was summed.
        sends: the region's orders.
    """

    rnd: int
    attempt: int
    sends: tuple[SendOrder, ...]


@dataclass(frozen=True, slots=True)
class SegmentPart:
    """One segment (between any two regions).

    Attributes:
        rnd: the round.
        attempt: see `Orders`.
        phase: SUM or RESULT.
        index: number of the segment.
        mask: for sums: whose contributions it holds.
        weight: for sums: the sum of their weights.
        wants_ack: the sender waits for an acknowledgement.
        data: fp32 bytes.
        acked: so many parts of the receiver have arrived; 0 says nothing.
    """

    rnd: int
    attempt: int
    phase: int
    index: int
    mask: int
    weight: float
    wants_ack: bool
    data: Buffer
    acked: int = 0


@dataclass(frozen=True, slots=True)
class SegmentAck:
    """So many parts of yours have arrived, over all rounds (between any two regions)."""

    count: int


@dataclass(frozen=True, slots=True)
class Sent:
    """An order is carried out (to the coordinator).

    Attributes:
        rnd: the round.
        attempt: the order's.
        send: the order.
        size_bytes: what was acknowledged by that region since the last such report on it.
        busy_s: for how long something was under way to it meanwhile.
        starved: there was often nothing to send: the link can do that much at least.
    """

    rnd: int
    attempt: int
    send: SendOrder
    size_bytes: int
    busy_s: float
    starved: bool = False


@dataclass(frozen=True, slots=True)
class Whole:
    """The whole result of a round is here (to the coordinator)."""

    rnd: int


@dataclass(frozen=True, slots=True)
class Stuck:
    """A region acknowledges nothing (to the coordinator).

    Attributes:
        rnd: the round of what is under way to it.
        dst: the region.
    """

    rnd: int
    dst: int


@dataclass(frozen=True, slots=True)
class Starved:
    """The round is committed, but no more of its result arrives (to the coordinator)."""

    rnd: int


@dataclass(frozen=True, slots=True)
class Fetch:
    """Ask region ``source`` for what you lack of a result (from the coordinator)."""

    rnd: int
    source: int


@dataclass(frozen=True, slots=True)
class Want:
    """Send me these segments of a result (between any two regions).

    Attributes:
        rnd: the round.
        ranges: (first, stop) of each run of segments.
    """

    rnd: int
    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Commit:
    """The round counts (from the coordinator).

    Attributes:
        rnd: the round.
        attempt: the one whose result counts.
        about: for the region's caller.
    """

    rnd: int
    attempt: int
    about: Meta


ControlMessage = (
    Ready | Orders | SegmentAck | Sent | Whole | Stuck | Starved | Fetch | Want | Commit
)
"""Everything but the parts, which carry the bulk."""
