"""Typed records that bridges and the coordinator send each other about a round.

`wire` puts them into messages. Records from a region to the coordinator name no sender, because the
connection identifies it.
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
        about: facts about the contribution for the averager.
    """

    rnd: int
    about: Meta


@dataclass(frozen=True, slots=True)
class Orders:
    """What a region is to send (from the coordinator).

    Attributes:
        rnd: the round.
        attempt: counts the starts of the round's sums; a higher one voids earlier sums.
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
        mask: for sums: set of regions whose contributions are in it.
        weight: for sums: the sum of their weights.
        wants_ack: the sender waits for an acknowledgement.
        data: fp32 bytes.
        acked: number of the receiver's parts that have arrived; 0 acknowledges none.
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
    """Number of the receiver's parts that arrived over all rounds (between any two regions)."""

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
        starved: whether there was often nothing to send, so that the goodput is a lower bound.
    """

    rnd: int
    attempt: int
    send: SendOrder
    size_bytes: int
    busy_s: float
    starved: bool = False


@dataclass(frozen=True, slots=True)
class Whole:
    """A region has the complete result of a round (to the coordinator)."""

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
    """The round is committed, but a region receives no more of its result (to the coordinator)."""

    rnd: int


@dataclass(frozen=True, slots=True)
class Fetch:
    """Order to ask region ``source`` for missing segments of a result (from the coordinator)."""

    rnd: int
    source: int


@dataclass(frozen=True, slots=True)
class Want:
    """Request for segments of a result (between any two regions).

    Attributes:
        rnd: the round.
        ranges: (first, stop) of each run of segments.
    """

    rnd: int
    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Commit:
    """The round is committed (from the coordinator).

    Attributes:
        rnd: the round.
        attempt: the attempt whose result counts.
        about: facts for the region's caller.
    """

    rnd: int
    attempt: int
    about: Meta


ControlMessage = (
    Ready | Orders | SegmentAck | Sent | Whole | Stuck | Starved | Fetch | Want | Commit
)
"""All messages but the parts, which carry the data."""
