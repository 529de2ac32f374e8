"""Messages between bridges and the coordinator about a round: typed records and their encoding.

Received messages are validated before use. Records from a region to the coordinator name no
sender, because the connection identifies it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from geo_ray.transport.overlay.plan import PROBE, RESULT, SUM, SendOrder
from geo_ray.transport.wire.fields import Meta, amount, below, count, wrong
from geo_ray.transport.wire.frames import Buffer, view_of
from geo_ray.transport.wire.message import CONTROL, DATA, Message
from geo_ray.transport.wire.record import CountList, Field, Known, OneOf, Only, Record, Rows


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
    """Send orders of a region (from the coordinator).

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
    """An order was executed (to the coordinator).

    Attributes:
        rnd: the round.
        attempt: the order's.
        send: the order.
        size_bytes: bytes acknowledged by that region since the last such report on it.
        busy_s: for how long something was in flight to it meanwhile.
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
        rnd: the round of the parts in flight to it.
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


CONTROL_MESSAGE: Final = "overlay"
PART: Final = "overlay_part"

_ABOUT: Final = "a."  # prefix of the fields that a caller added
_MAX_MASK: Final = 2**62


class _About:
    """The codec of a caller's fields: a separate header, under names with a prefix."""

    names: tuple[str, ...] = ()

    def write(self, value: Meta) -> Meta:
        """See `ValueCodec`."""
        return {_ABOUT + name: item for name, item in value.items()}

    def read(self, meta: Meta, payload: Buffer | None = None, **known: Any) -> Meta:
        """See `ValueCodec`."""
        return {n.removeprefix(_ABOUT): v for n, v in meta.items() if n.startswith(_ABOUT)}


def _make_order(src: int, dst: int, phase: int, first: int, stop: int, need: int) -> SendOrder:
    if first >= stop:
        raise wrong("first", first, f"below 'stop' ({stop})")
    return SendOrder(src, dst, phase, first, stop, need)


def _order_of(src: str) -> Record[SendOrder]:
    phase, need = Field("phase", below(PROBE + 1)), Field("need", below(_MAX_MASK))
    return Record(_make_order, Known("src", src), _to("dst"), phase, "first stop", need)


def _to(name: str) -> Field:
    return Field(name, count, limit="num_regions")


_ABOUT_IT: Final = Field("about", _About())
_BUSY: Final = Field("busy_s", amount)
_PART: Final = Record(
    SegmentPart,
    "rnd attempt",
    Field("phase", below(RESULT + 1)),
    "index",
    Field("mask", below(_MAX_MASK)),
    Field("weight", amount),
    "wants_ack=ack acked",
    Known("data"),
)
_ONE: Final = Field("send", Only(_order_of("sender")))
_ALL: Final = Field("sends", Rows(_order_of("me")))
_CONTROL: Final = OneOf[ControlMessage](
    "word",
    {
        "Ready": Record(Ready, "rnd", _ABOUT_IT),
        "Orders": Record(Orders, "rnd attempt", _ALL),
        "Ack": Record(SegmentAck, "count"),
        "Sent": Record(Sent, "rnd attempt", _ONE, "size_bytes=bytes", _BUSY, "starved"),
        "Whole": Record(Whole, "rnd"),
        "Stuck": Record(Stuck, "rnd", _to("dst")),
        "Starved": Record(Starved, "rnd"),
        "Fetch": Record(Fetch, "rnd", _to("source")),
        "Want": Record(Want, "rnd", Field("ranges", Rows(CountList("first", "stop")))),
        "Commit": Record(Commit, "rnd", _ABOUT_IT, "attempt"),
    },
)


def part_message(part: SegmentPart) -> Message:
    """Return a part as a message; its bytes are not copied."""
    traffic = "update" if part.phase == SUM else "reply"
    return Message(PART, _PART.write(part), part.data, traffic, DATA)


def read_part(message: Message) -> SegmentPart:
    """The inverse of `part_message`.

    Raises:
        FrameError: a field is missing, or of the wrong type or range.
    """
    return _PART.read(message.meta, data=view_of(message.payload))


def control_message(control: ControlMessage) -> Message:
    """Return a control message as a message of the transport."""
    return Message(CONTROL_MESSAGE, _CONTROL.write(control), b"", "control", CONTROL)


def read_control(message: Message, sender: int, me: int, num_regions: int) -> ControlMessage:
    """The inverse of `control_message`.

    Args:
        message: the received message.
        sender: number of the sending region.
        me: number of this region.
        num_regions: N.

    Raises:
        FrameError: a field is missing, or of the wrong type or range.
    """
    return _CONTROL.read(message.meta, sender=sender, me=me, num_regions=num_regions)
