"""What a connection asks of the session that it belongs to.

A connection names itself by the id of its link: a session answers only the one that it has now.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Protocol

from geo_ray.transport.endpoint.outbox import Chunk, Key
from geo_ray.transport.flow.control import FlowControl
from geo_ray.transport.wire.message import Piece


class SessionSide(Protocol):
    """The session's side that faces its connections; any thread may call."""

    flow: FlowControl

    def next_chunk(
        self, link_id: str, lanes: range, chunk_bytes: int, now_s: float, shares: int = 1
    ) -> Chunk | None:
        """See `Outbox.next_chunk`; None for a connection that was replaced."""

    def has_chunk(self, lanes: range) -> bool:
        """See `Outbox.has_chunk`."""

    def straggler(
        self,
        link_id: str,
        sent_before_s: float,
        times: int,
        now_s: float,
        but: Container[Key],
    ) -> Chunk | None:
        """See `Outbox.straggler`; None for a connection that was replaced."""

    def acknowledged(self, link_id: str, keys: list[Key], delivered: list[int]) -> list[Chunk]:
        """Take in an ACK; return the chunks that it newly acknowledges, none if replaced."""

    def give_back(self, link_id: str, chunks: list[Chunk]) -> None:
        """See `Outbox.give_back`; nothing happens for a connection that was replaced."""

    def in_flight_bytes(self, lanes: range) -> int:
        """See `Outbox.in_flight_bytes`."""

    def place(
        self, epoch: int, piece: Piece, size_bytes: int, divert: Callable[[], None]
    ) -> memoryview:
        """See `Assembly.place`."""

    def abandon(self, piece: Piece, divert: Callable[[], None]) -> None:
        """See `Assembly.abandon`."""

    def complete(self, epoch: int, piece: Piece, payload: memoryview) -> bool:
        """See `Assembly.complete`; whether the chunk was new."""

    def delivered(self) -> list[int]:
        """Return, by lane, the number up to which messages were delivered here."""

    def settled(self) -> None:
        """Note that nothing is owed to the peer any more."""

    def note_error(self, error: Exception) -> None:
        """Remember why a stream could not be made, or ended."""
