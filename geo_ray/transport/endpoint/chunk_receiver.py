"""Receives the chunks of a connection's streams, and acknowledges them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from geo_ray.errors import FrameError
from geo_ray.transport.endpoint.session_side import SessionSide
from geo_ray.transport.endpoint.stream import Stream
from geo_ray.transport.wire.frames import Frame, FrameKind
from geo_ray.transport.wire.message import RESEND, TRANSPORT, Piece, read_piece
from geo_ray.transport.wire.meta import Meta

_ACKS_PER_FRAME: Final = 900  # three numbers each
ACK_META_BYTES: Final = 32 * 1024  # largest header of an acknowledgement


class ChunkReceiver:
    """Receives the chunks of a connection and acknowledges them; only the loop's thread may use it.

    Args:
        session: session of the connection.
        epoch: the peer's incarnation.

    Attributes:
        owes: whether something is not acknowledged yet.
    """

    def __init__(self, session: SessionSide, epoch: int) -> None:
        self._session = session
        self._epoch = epoch
        self._placing: dict[Stream, tuple[Piece, Callable[[], None]]] = {}
        self._acks: list[int] = []  # lane, number, offset
        self._told: list[int] = []  # numbers up to which delivery was acknowledged to the peer

    @property
    def owes(self) -> bool:
        """Whether something is not acknowledged yet."""
        return bool(self._acks) or self._told != self._session.delivered()

    def place(self, stream: Stream, kind: FrameKind, meta: Meta, size_bytes: int) -> memoryview:
        """Return the buffer for a frame's payload; see `FrameReader`."""
        if kind is not FrameKind.CHUNK:
            if size_bytes:
                raise FrameError(f"a {kind.name} frame with a payload of {size_bytes} bytes")
            return memoryview(b"")
        piece, divert = read_piece(meta), partial(Stream.divert, stream)
        self._placing[stream] = (piece, divert)
        return self._session.place(self._epoch, piece, size_bytes, divert)

    def take(self, stream: Stream, frame: Frame, wire_bytes: int) -> None:
        """Hand a complete chunk to the session."""
        piece, _ = self._placing.pop(stream)
        payload = frame.payload if isinstance(frame.payload, memoryview) else memoryview(b"")
        is_new = self._session.complete(self._epoch, piece, payload)
        stream.account_in(piece.traffic if is_new else RESEND, wire_bytes)
        self._acks += [piece.lane, piece.number, piece.offset]

    def forget(self, stream: Stream) -> None:
        """Let another stream receive what an ended stream was receiving."""
        placing = self._placing.pop(stream, None)
        if placing is not None:
            self._session.abandon(*placing)

    def acknowledge(self, control: Stream) -> None:
        """Acknowledge the chunks that have arrived."""
        told = self._session.delivered()
        cut = 3 * _ACKS_PER_FRAME
        while self._acks or told != self._told:
            some, self._acks, self._told = self._acks[:cut], self._acks[cut:], told
            meta: Meta = {"delivered": [*told], "chunks": [*some]}
            control.put(Frame(FrameKind.ACK, meta), TRANSPORT)
