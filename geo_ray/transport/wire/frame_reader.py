"""Frames out of a byte stream that comes in pieces, for sockets that do not block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, TypeAlias

import numpy as np

from geo_ray.errors import FrameError
from geo_ray.transport.wire.frames import (
    HEADER,
    Frame,
    FrameHead,
    FrameKind,
    FrameLimits,
    Header,
    parse_header,
)
from geo_ray.transport.wire.meta import Meta
from geo_ray.transport.wire.sealer import TAG_BYTES, PayloadCheck

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
