"""Send and receive frames on blocking sockets, and parse them from non-blocking ones.

Blocking: parts are gathered on sending and received into the caller's buffer. Non-blocking:
`FrameReader` extracts frames from a byte stream that arrives in pieces.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from geo_ray.base.errors import FrameError
from geo_ray.transport.wire import sockets
from geo_ray.transport.wire.fields import Meta
from geo_ray.transport.wire.frames import (
    HEADER,
    PIECE_BYTES,
    TAG_BYTES,
    Frame,
    FrameHead,
    FrameKind,
    FrameLimits,
    Header,
    PayloadCheck,
    PayloadOpener,
    encode,
    parse_header,
    view_of,
)

Into: TypeAlias = Callable[[int, Meta], memoryview | None]


@dataclass(slots=True)
class WireCount:
    """Counts what passed a socket, also when a frame is cut off in the middle.

    Attributes:
        wire_bytes: all bytes so far.
    """

    wire_bytes: int = 0


def send_frame(
    sock: socket.socket,
    frame: Frame,
    key: bytes,
    *,
    digest_payload: bool = True,
    encrypt: bool = False,
    number: int = 0,
    count: WireCount | None = None,
) -> int:
    """Send a frame, gathering its parts without copying the payload.

    Args:
        sock: a connected stream socket, blocking or with a timeout.
        frame: what to send.
        key: 1 to 64 bytes, shared with the receiver.
        digest_payload: False leaves the payload's tag out; the receiver must agree.
        encrypt: see `encode`.
        number: see `encode`.
        count: told what the kernel took, piece by piece.

    Returns:
        Bytes on the wire.

    Raises:
        FrameError: the frame cannot be encoded; nothing was sent.
        OSError: the connection is lost (`ConnectionError`) or slow (`TimeoutError`).
    """
    count = count or WireCount()
    before = count.wire_bytes
    pending: list[memoryview] = []
    pending_bytes = 0
    parts = encode(frame, key, digest_payload=digest_payload, encrypt=encrypt, number=number)
    for part in parts:
        pending.append(part)
        pending_bytes += part.nbytes
        if pending_bytes >= PIECE_BYTES:
            send_parts(sock, pending, count)
            pending, pending_bytes = [], 0
    if pending:
        send_parts(sock, pending, count)
    return count.wire_bytes - before


def send_plain(sock: socket.socket, frame: Frame, key: bytes) -> None:
    """`send_frame` with its defaults, for a handshake."""
    send_frame(sock, frame, key)


def send_parts(sock: socket.socket, parts: Iterable[memoryview], count: WireCount) -> None:
    """Send all of ``parts`` with as few calls as the kernel allows.

    Raises:
        OSError: the connection is lost or slow.
    """
    rest = list(parts)
    while rest:
        try:
            sent = sock.sendmsg(rest)
        except BlockingIOError as error:  # see `sockets.block`
            raise TimeoutError("the peer takes nothing") from error
        count.wire_bytes += sent
        while rest and sent >= rest[0].nbytes:
            sent -= rest.pop(0).nbytes
        if rest and sent:
            rest[0] = rest[0][sent:]


def recv_head(
    sock: socket.socket,
    limits: FrameLimits,
    *,
    timeout_s: float | None = None,
    count: WireCount | None = None,
) -> FrameHead:
    """Receive a header and its meta, unauthenticated; at most ``max_meta_bytes`` are allocated.

    Args:
        sock: a connected stream socket.
        limits: what is taken.
        timeout_s: for header and meta together; None leaves the socket's own timeout.
        count: told what arrived.

    Raises:
        FrameError: not a frame, or over a limit.
        PeerRefusedError: the peer speaks another protocol version.
        OSError: the connection ended or the time is up (`TimeoutError`).
    """
    count = count or WireCount()
    deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
    header = bytearray(HEADER.size)
    _recv_exactly(sock, memoryview(header), deadline_s, count)
    parsed = parse_header(header, limits)
    meta = bytearray(parsed.meta_bytes)
    _recv_exactly(sock, memoryview(meta), deadline_s, count)
    return FrameHead(parsed, bytes(meta))


def recv_frame(
    sock: socket.socket,
    key: bytes,
    limits: FrameLimits,
    into: Into | None = None,
    *,
    timeout_s: float | None = None,
    number: int = 0,
    count: WireCount | None = None,
) -> Frame:
    """Receive a frame.

    After any error the stream is out of step: close the connection.

    Args:
        sock: a connected stream socket.
        key: shared with the sender.
        limits: what is taken, checked before any allocation.
        into: called with the payload's length in bytes and the authenticated meta; may return a
            writable buffer of at least that length, or None for a fresh one.
        timeout_s: for header and meta together, then for each pause within the payload; None
            leaves the socket's own timeout.
        number: see `encode`.
        count: told what arrived.

    Returns:
        The frame; its payload is a view of the buffer, of the payload's length.

    Raises:
        FrameError: not a frame, over a limit, or a digest or tag is wrong.
        PeerRefusedError: the peer speaks another protocol version.
        OSError: the connection ended or the time is up (`TimeoutError`).
    """
    count = count or WireCount()
    head = recv_head(sock, limits, timeout_s=timeout_s, count=count)
    meta = head.verified_meta(key, number)
    payload_bytes = head.header.payload_bytes
    if not payload_bytes:
        return Frame(head.header.kind, meta)
    target = into(payload_bytes, meta) if into is not None else None
    # Not zeroed: memory is only taken as it is filled.
    target = view_of(np.empty(payload_bytes, np.uint8).data if target is None else target)
    if target.nbytes < payload_bytes:
        raise FrameError(
            f"a payload of {payload_bytes} bytes does not fit its buffer of {target.nbytes}"
        )
    payload = target[:payload_bytes]
    if timeout_s is not None:
        sockets.block(sock, timeout_s)
    if head.header.has_tag:
        kind = PayloadOpener if head.header.is_encrypted else PayloadCheck
        _recv_checked(sock, payload, kind(head.header.digest, key), count)
    else:
        _recv_payload(sock, payload, count)
    return Frame(head.header.kind, meta, payload)


def _recv_checked(
    sock: socket.socket,
    payload: memoryview,
    check: PayloadCheck | PayloadOpener,
    count: WireCount,
) -> None:
    for start in range(0, payload.nbytes, PIECE_BYTES):
        piece = payload[start : start + PIECE_BYTES]
        _recv_payload(sock, piece, count)
        check.update(piece)
    tag = bytearray(TAG_BYTES)
    _recv_payload(sock, memoryview(tag), count)
    if not check.has_tag(bytes(tag)):
        raise FrameError("a payload's tag is wrong: damaged on the way")


def _recv_exactly(
    sock: socket.socket, view: memoryview, deadline_s: float | None, count: WireCount
) -> None:
    while view.nbytes:
        if deadline_s is not None:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("no complete frame in time")
            sock.settimeout(left_s)
        view = view[_recv_some(sock, view, count) :]


def _recv_payload(sock: socket.socket, view: memoryview, count: WireCount) -> None:
    while view.nbytes:
        view = view[_recv_some(sock, view, count, socket.MSG_WAITALL) :]


def _recv_some(sock: socket.socket, view: memoryview, count: WireCount, flags: int = 0) -> int:
    try:
        got = sock.recv_into(view, 0, flags)
    except BlockingIOError as error:  # see `sockets.block`
        raise TimeoutError("the peer sends nothing") from error
    if not got:
        raise ConnectionResetError("the peer closed the connection")
    count.wire_bytes += got
    return got


Place: TypeAlias = Callable[[FrameKind, Meta, int], memoryview]
"""Takes a frame's kind, authenticated meta and payload length; returns a buffer for the payload."""

_SMALL_BYTES: Final = 4096


class FrameReader:
    """Parses one connection's bytes; payloads are received straight into their place.

    Usage: receive into `room()`, then call `took(n)`, which yields the complete frames.

    Args:
        key: shared with the sender, who numbers its frames from 0 in their digests.
        limits: what is taken, checked before any allocation.
        place: where payloads go.
    """

    def __init__(self, key: bytes, limits: FrameLimits, place: Place) -> None:
        self._key = key
        self._limits = limits
        self._place = place
        self._small = bytearray(_SMALL_BYTES)  # heads, tags, and the bytes right behind them
        self._begin = 0
        self._end = 0
        self._header: Header | None = None
        self._meta: Meta = {}
        self._payload: memoryview | None = None
        self._filled = 0
        self._check: PayloadCheck | None = None
        self._frame_bytes = 0
        self._count = 0  # frames whose head was authenticated

    @property
    def is_within_payload(self) -> bool:
        """Whether a payload has begun and is not complete."""
        return self._payload is not None and self._filled < self._payload.nbytes

    def room(self) -> memoryview:
        """Return the buffer for the next bytes; never empty."""
        if self.is_within_payload and self._begin == self._end and self._payload is not None:
            return self._payload[self._filled :]
        if self._begin == self._end:
            self._begin = self._end = 0
        if self._end == len(self._small):
            self._make_room()
        return memoryview(self._small)[self._end :]

    def took(self, count: int) -> Iterator[tuple[Frame, int]]:
        """Take in ``count`` bytes received into `room()`; yield the frames that are complete now.

        Yields:
            A frame, and its bytes on the wire.

        Raises:
            FrameError: not a frame, over a limit, or a digest or tag is wrong; the stream is out
                of step.
            PeerRefusedError: the peer speaks another protocol version.
        """
        if self.is_within_payload and self._begin == self._end and self._payload is not None:
            self._fill(self._payload[self._filled : self._filled + count])
        else:
            self._end += count
        while (frame := self._next()) is not None:
            yield frame, self._frame_bytes

    def divert(self) -> None:
        """Move the rest of the present payload to a fresh buffer, because its place is taken."""
        if self._payload is not None:
            self._payload = np.empty(self._payload.nbytes, np.uint8).data

    def _make_room(self) -> None:
        held = bytes(self._small[self._begin : self._end])
        size = len(self._small) if self._begin else 2 * len(self._small)  # a long meta
        self._small = bytearray(max(size, _SMALL_BYTES))
        self._small[: len(held)] = held
        self._begin, self._end = 0, len(held)

    def _fill(self, piece: memoryview) -> None:
        self._filled += piece.nbytes
        if self._check is not None:
            self._check.update(piece)

    def _take(self, count: int) -> bytes | None:
        if self._end - self._begin < count:
            return None
        taken = bytes(self._small[self._begin : self._begin + count])
        self._begin += count
        return taken

    def _next(self) -> Frame | None:
        """Return a frame of the received bytes, or None if more bytes are needed."""
        if self._header is None:
            head = self._take(HEADER.size)
            if head is None:
                return None
            self._header = parse_header(head, self._limits)
        if self._payload is None and not self._begin_payload(self._header):
            return None
        return self._finish(self._header)

    def _begin_payload(self, header: Header) -> bool:
        raw = self._take(header.meta_bytes)
        if raw is None:
            return False
        self._meta = FrameHead(header, raw).verified_meta(self._key, self._count)
        self._count += 1
        self._payload = self._place(header.kind, self._meta, header.payload_bytes)
        if self._payload.nbytes != header.payload_bytes:
            raise FrameError(
                f"a payload of {header.payload_bytes} bytes got a place of {self._payload.nbytes}"
            )
        self._filled = 0
        self._check = PayloadCheck(header.digest, self._key) if header.has_tag else None
        return True

    def _finish(self, header: Header) -> Frame | None:
        payload = self._payload
        if payload is None:
            return None
        early = min(payload.nbytes - self._filled, self._end - self._begin)
        if early:
            piece = payload[self._filled : self._filled + early]
            piece[:] = memoryview(self._small)[self._begin : self._begin + early]
            self._begin += early
            self._fill(piece)
        if self._filled < payload.nbytes:
            return None
        if self._check is not None:
            tag = self._take(TAG_BYTES)
            if tag is None:
                return None
            if not self._check.has_tag(tag):
                raise FrameError("a payload's tag is wrong: damaged on the way")
        tail_bytes = TAG_BYTES if self._check is not None and payload.nbytes else 0
        self._frame_bytes = HEADER.size + header.meta_bytes + payload.nbytes + tail_bytes
        frame = Frame(header.kind, self._meta, payload)
        self._header, self._payload, self._check = None, None, None
        return frame
