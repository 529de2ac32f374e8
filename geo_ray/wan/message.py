"""What bridges say to each other, and who they are."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, TypedDict

from geo_ray.errors import FrameError
from geo_ray.wan.frames import Buffer, Frame, FrameKind
from geo_ray.wan.meta import Meta, Scalar

TRANSPORT: Final = "transport"  # class of the transport's own frames
RESEND: Final = "resend"  # class of messages that are sent, or arrive, once more

CONTROL: Final = 0  # lanes: what has a lower number is sent first
DATA: Final = 1
BACKGROUND: Final = 2
LANES: Final = 3

_OWN: Final = ("_n", "_ack", "_kind", "_traffic")  # the transport's names within a frame's meta


@dataclass(frozen=True, slots=True)
class Identity:
    """Who an endpoint is.

    Attributes:
        run_id: the run; endpoints of different runs refuse each other.
        region: its region; one endpoint per region.
        epoch: goes up whenever the region's endpoint is started anew.
        key: the run's secret, 16 to 64 bytes.
    """

    run_id: str
    region: str
    epoch: int
    key: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Message:
    """One message between regions.

    Attributes:
        kind: what it is; up to the caller.
        meta: scalars and lists of scalars by name; names must not begin with an underscore.
        payload: C-contiguous bytes. Not copied: leave them alone until the peer acknowledged them
            (`Endpoint.flush`).
        traffic: class that its bytes are accounted to, such as "update", "reply", "control".
        lane: CONTROL, DATA or BACKGROUND. Messages of one lane arrive in order; a lower lane's
            overtake those of higher ones at every chunk.
    """

    kind: str
    meta: Meta
    payload: Buffer
    traffic: str
    lane: int = DATA


class PeerStats(TypedDict):
    """What an endpoint knows about a peer; ready for JSON.

    ``bytes_out`` and ``bytes_in`` count all bytes on the connections by class, headers included;
    "transport" are handshakes, acks and heartbeats, "resend" what passed more than once.
    ``rtt_s`` is the last heartbeat's round trip and contains queueing; ``heard_s_ago`` counts from
    the last frame. Both are None before there was one.
    """

    connected: bool
    epoch: int | None
    bytes_out: dict[str, int]
    bytes_in: dict[str, int]
    messages_out: int
    messages_in: int
    duplicates_in: int
    dropped_out: int
    reconnects: int
    rtt_s: float | None
    rtt_min_s: float | None
    outbox_messages: int
    outbox_bytes: int
    heard_s_ago: float | None
    last_error: str | None


def to_frame(message: Message, number: int, ack: int) -> Frame:
    """Wrap a message for the wire.

    Raises:
        FrameError: the message's meta uses a name of the transport.
    """
    if any(name.startswith("_") for name in message.meta):
        raise FrameError(
            f"message {message.kind!r} has meta names with a leading underscore",
            fix="Those belong to the transport; choose others.",
        )
    own: Meta = {"_n": number, "_ack": ack, "_kind": message.kind, "_traffic": message.traffic}
    return Frame(FrameKind.MESSAGE, {**message.meta, **own}, message.payload)


def from_frame(frame: Frame) -> tuple[int, int, Message]:
    """Unwrap a message.

    Returns:
        Its number, the sender's cumulative acknowledgement, and the message.

    Raises:
        FrameError: a field of the transport is missing or has another type.
    """
    number, ack = natural(frame.meta, "_n"), natural(frame.meta, "_ack")
    meta = {name: value for name, value in frame.meta.items() if name not in _OWN}
    kind, traffic = text(frame.meta, "_kind"), text(frame.meta, "_traffic")
    return number, ack, Message(kind, meta, frame.payload, traffic)


def natural(meta: Meta, name: str) -> int:
    """Field ``name`` of a received meta as an int >= 0.

    Raises:
        FrameError: it is something else.
    """
    value: Scalar | list[Scalar] = meta.get(name)
    if type(value) is not int or value < 0:
        raise FrameError(f"a frame's {name!r} is {value!r:.100} instead of a number")
    return value


def text(meta: Meta, name: str) -> str:
    """Field ``name`` of a received meta as a string.

    Raises:
        FrameError: it is something else.
    """
    value = meta.get(name)
    if type(value) is not str:
        raise FrameError(f"a frame's {name!r} is {value!r:.100} instead of a string")
    return value
