"""Transfers the copy of a region's state to a joining region, from bridge to bridge.

The joining region requests the pieces in order, a few ahead, so no process holds more of the copy
than these. They use the background lane, so other messages overtake them.

    joining server ── StreamedParts ──▶ its bridge ── copy_wanted ──▶ donor's bridge ──▶ donor's
                  ◀──  piece  ───────────── ◀── copy_piece ──────────────────────── servers
"""

from __future__ import annotations

import io
import logging
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as LateError
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, Final, Protocol

import ray

from geo_ray.base.errors import CheckpointCorruptError, GeoRayError, LinkDownError
from geo_ray.ray_cluster.calls import failure_of
from geo_ray.runtime.exchange.direct import Routes
from geo_ray.training.wire_format import read_refusal, refusal_meta
from geo_ray.transport.wire import fields
from geo_ray.transport.wire.fields import Meta
from geo_ray.transport.wire.message import BACKGROUND, CONTROL, Message

PIECE_BYTES: Final = 4 << 20
PIECES_AHEAD: Final = 4  # for all shards of a region together
_UNANSWERED_S: Final = 60.0
_WANTED, _PIECE, _REFUSED = "copy_wanted", "copy_piece", "copy_refused"
_TRAFFIC: Final = "join"
_log = logging.getLogger(__name__)


class PieceReader(Protocol):
    """Reads pieces of files."""

    def __call__(self, file: str, offset: int, num_bytes: int, /) -> bytes:
        """Return a piece of a file, of at most that many bytes.

        Raises:
            GeoRayError: the piece is not available.
        """
        ...


class Sender(Protocol):
    """Sends messages to other regions."""

    def __call__(self, peer: str, message: Message, /) -> None:
        """Send a message to another region."""
        ...


class PendingPiece(Protocol):
    """A requested piece."""

    def __call__(self) -> bytes:
        """Wait for the piece and return it."""
        ...


class PieceFetcher(Protocol):
    """Requests pieces of files from another machine."""

    def __call__(self, file: str, offset: int, num_bytes: int, /) -> PendingPiece:
        """Request a piece; calling the result waits for it."""
        ...


class Closer(Protocol):
    """Closes a connection."""

    def __call__(self) -> None:
        """End it."""
        ...


def keep_open() -> None:
    """Close nothing."""


@dataclass(slots=True)
class CopyTransfer:
    """A bridge's end of the transfer, for both directions.

    Attributes:
        send: sends messages to other regions.
    """

    send: Sender
    _reader: PieceReader | None = None
    _wanted: dict[int, tuple[str, Future[bytes]]] = field(default_factory=dict)  # by number
    _numbers: Iterator[int] = field(default_factory=partial(count, 1))
    _readers: ThreadPoolExecutor = field(
        default_factory=partial(ThreadPoolExecutor, 2, "state-pieces")
    )

    def serve(self, reader: PieceReader) -> None:
        """Serve pieces of a copy from now on, instead of any previous copy.

        Args:
            reader: raises a `GeoRayError` for a missing piece.
        """
        self._reader = reader

    def fetch(self, donor: str, file: str, offset: int, num_bytes: int) -> bytes:
        """Fetch a piece from another region; blocks.

        Raises:
            LinkDownError: it did not arrive within a minute.
            GeoRayError: the other region cannot provide it.
        """
        number, wanted = next(self._numbers), Future[bytes]()
        self._wanted[number] = donor, wanted
        meta: Meta = {"number": number, "file": file, "offset": offset, "bytes": num_bytes}
        try:
            self.send(donor, Message(_WANTED, meta, b"", _TRAFFIC, CONTROL))
            return wanted.result(_UNANSWERED_S)
        except LateError as error:
            raise LinkDownError(
                f"region '{donor}' sent nothing of {file} for {_UNANSWERED_S:g} s"
            ) from error
        finally:
            self._wanted.pop(number, None)

    def routes(self) -> Routes:
        """Handlers of its messages."""
        return {_WANTED: self._on_wanted, _PIECE: self._on_piece, _REFUSED: self._on_refused}

    def close(self) -> None:
        """End all waits for a piece with an error."""
        self._readers.shutdown(wait=False, cancel_futures=True)
        for _, wanted in list(self._wanted.values()):
            with suppress(Exception):  # it has just arrived
                wanted.set_exception(LinkDownError("the bridge closes"))

    def _on_wanted(self, peer: str, message: Message) -> None:
        meta = message.meta
        file, offset = fields.text(meta, "file"), fields.count(meta, "offset")
        size_bytes = min(fields.count(meta, "bytes"), PIECE_BYTES)
        about: Meta = {"number": fields.count(meta, "number")}
        self._readers.submit(self._give, peer, about, (file, offset, size_bytes))

    def _give(self, peer: str, about: Meta, which: tuple[str, int, int]) -> None:
        file = which[0]
        try:
            if self._reader is None:
                raise CheckpointCorruptError(f"{file}: nothing is transferred here")
            piece = self._reader(*which)
            reply = Message(_PIECE, about, piece, _TRAFFIC, BACKGROUND)
        except GeoRayError as error:
            reply = Message(_REFUSED, refusal_meta(0, error) | about, b"", _TRAFFIC, CONTROL)
        try:
            self.send(peer, reply)
        except GeoRayError as error:  # the other region stops asking
            _log.warning("region '%s' was not given a piece of %s: %s", peer, file, error)

    def _on_piece(self, peer: str, message: Message) -> None:
        self._end(peer, message, bytes(message.payload))

    def _on_refused(self, peer: str, message: Message) -> None:
        self._end(peer, message, read_refusal(message.meta)[1])

    def _end(self, peer: str, message: Message, reply: bytes | GeoRayError) -> None:
        donor, wanted = self._wanted.get(fields.count(message.meta, "number"), ("", None))
        if wanted is None or wanted.done() or donor != peer:  # no longer awaited
            return
        if isinstance(reply, bytes):
            wanted.set_result(reply)
        else:
            wanted.set_exception(reply)


def answer_of(asked: Any, timeout_s: float | None = None) -> Any:
    """Return the answer of another actor.

    Raises:
        GeoRayError: the error that it raised.
        LinkDownError: it is gone, or did not answer in time.
    """
    try:
        return ray.get(asked, timeout=timeout_s)
    except ray.exceptions.RayError as error:
        failure = failure_of(error)
        reply = failure.raised or LinkDownError(f"an actor does not answer: {failure.cause}")
        raise reply from error


@dataclass(frozen=True, slots=True)
class StreamedParts:
    """A `PartSource` on another machine, read in pieces.

    Attributes:
        donor: name of the source, for messages.
        fetch: starts to fetch a piece (file, offset, bytes); calling the result waits for it.
        ahead: number of concurrent requests.
        close: called when a file is closed.
    """

    donor: str
    fetch: PieceFetcher
    ahead: int
    close: Closer = keep_open

    def name_of(self, file: str) -> str:
        """See `PartSource.name_of`."""
        return f"{file} of {self.donor}"

    def open(self, file: str, num_bytes: int | None = None) -> io.RawIOBase:
        """See `PartSource.open`; pieces are requested as they are read."""
        if num_bytes is None:
            raise CheckpointCorruptError(f"{self.name_of(file)}: its size is unknown")
        return _StreamedFile(self, file, num_bytes)


class _StreamedFile(io.RawIOBase):
    def __init__(self, parts: StreamedParts, file: str, num_bytes: int) -> None:
        self._parts, self._file, self._left = parts, file, num_bytes
        self._asked = 0
        self._coming: deque[tuple[int, PendingPiece]] = deque()
        self._piece = memoryview(b"")

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        super().close()
        self._parts.close()

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        if not self._piece:
            self._ask()
            if not self._coming:
                return 0
            size, come = self._coming.popleft()
            piece = come()
            if len(piece) != size:
                name = self._parts.name_of(self._file)
                raise CheckpointCorruptError(f"{name}: it ends early")
            self._piece = memoryview(piece)
            self._ask()
        size = min(len(buffer), len(self._piece))
        buffer[:size] = self._piece[:size]
        self._piece = self._piece[size:]
        return size

    def _ask(self) -> None:
        while self._left and len(self._coming) < self._parts.ahead:
            size = min(PIECE_BYTES, self._left)
            self._coming.append((size, self._parts.fetch(self._file, self._asked, size)))
            self._asked, self._left = self._asked + size, self._left - size
