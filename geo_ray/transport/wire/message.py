"""Messages between endpoints, and the identity of an endpoint."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, TypedDict

from geo_ray.base.errors import FrameError
from geo_ray.transport.wire.fields import Meta, count, text
from geo_ray.transport.wire.frames import Buffer

TRANSPORT: Final = "transport"  # class of the transport's own frames
RESEND: Final = "resend"  # class of messages that are sent, or arrive, once more

CONTROL: Final = 0  # lanes: what has a lower number is sent first
DATA: Final = 1
BACKGROUND: Final = 2
LANES: Final = 3
ALL_LANES: Final = range(CONTROL, LANES)
CONTROL_LANE: Final = range(CONTROL, DATA)
DATA_LANES: Final = range(DATA, LANES)

_OWN: Final = (
    "_l",
    "_n",
    "_o",
    "_size",
    "_kind",
    "_traffic",
)  # the transport's names within a frame's meta


@dataclass(frozen=True, slots=True)
class EndpointIdentity:
    """Who an endpoint is.

    Attributes:
        run_id: the run; endpoints of different runs refuse each other.
        region: its region; one endpoint per region.
        attempt: increases with every restart of the region's endpoint.
        key: the run's secret, 16 to 64 bytes.
    """

    run_id: str
    region: str
    attempt: int
    key: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Message:
    """One message between regions.

    Attributes:
        kind: name of the kind, chosen by the caller.
        meta: scalars and lists of scalars by name; names must not begin with an underscore.
        payload: C-contiguous bytes. Not copied: they must not change until the peer has
            acknowledged them (`Endpoint.flush`).
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
    """An endpoint's counters for a peer, as plain values for JSON.

    ``bytes_sent`` and ``bytes_received`` count all bytes on the connections by class, headers
    included; "transport" are handshakes, acks and heartbeats, "resend" what passed more than once.
    ``rtt_s`` is the last heartbeat's round trip and contains queueing; ``since_received_s`` counts
    from the last received bytes. Both are None before there was one. ``streams`` are the open data
    streams, ``window_bytes`` what may be under way, ``estimate`` a `LinkEstimate` of the way there,
    ``encrypted`` whether TLS carries the connection.
    """

    connected: bool
    attempt: int | None
    bytes_sent: dict[str, int]
    bytes_received: dict[str, int]
    messages_out: int
    messages_in: int
    duplicates_in: int
    dropped_out: int
    reconnects: int
    rtt_s: float | None
    rtt_min_s: float | None
    streams: int
    encrypted: bool
    window_bytes: int
    estimate: dict[str, float | None]
    outbox_messages: int
    outbox_bytes: int
    since_received_s: float | None
    last_error: str | None


def check_message(message: Message) -> None:
    """Check whether a message can be sent.

    Raises:
        FrameError: its meta uses a name of the transport, or its lane does not exist.
    """
    if any(name.startswith("_") for name in message.meta):
        raise FrameError(
            f"message {message.kind!r} has meta names with a leading underscore",
            fix="Those belong to the transport; choose others.",
        )
    if message.lane not in range(LANES):
        raise FrameError(f"message {message.kind!r} wants lane {message.lane} of {LANES}")


def to_meta(lane: int, number: int, offset: int, size_bytes: int, message: Message) -> Meta:
    """Return a chunk's header; that of a message's first chunk also describes the message."""
    own: Meta = {
        "_l": lane,
        "_n": number,
        "_o": offset,
        "_size": size_bytes,
        "_traffic": message.traffic,
    }
    return own if offset else {**message.meta, **own, "_kind": message.kind}


@dataclass(frozen=True, slots=True)
class Piece:
    """Where a received chunk belongs.

    Attributes:
        lane: its message's lane.
        number: its message's number there.
        offset: where it begins in the payload.
        size_bytes: the whole payload's length.
        traffic: class of its bytes.
        message: what the message is, without payload; in its first chunk only.
    """

    lane: int
    number: int
    offset: int
    size_bytes: int
    traffic: str
    message: Message | None


def read_piece(meta: Meta) -> Piece:
    """Read what `to_meta` wrote.

    Raises:
        FrameError: a field of the transport is missing or invalid.
    """
    lane, number, offset = count(meta, "_l"), count(meta, "_n"), count(meta, "_o")
    if lane >= LANES or not number:
        raise FrameError(f"a chunk of message {number} in lane {lane} of {LANES}")
    traffic, message = text(meta, "_traffic"), None
    if not offset:
        rest = {name: value for name, value in meta.items() if name not in _OWN}
        message = Message(text(meta, "_kind"), rest, b"", traffic, lane)
    return Piece(lane, number, offset, count(meta, "_size"), traffic, message)
