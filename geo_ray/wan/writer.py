"""How a connection's frames leave; `geo_ray.wan.shaper` has the other way."""

from __future__ import annotations

import socket
from typing import Protocol

from geo_ray.wan.frame_io import WireCount, send_frame
from geo_ray.wan.frames import Frame


class Writer(Protocol):
    """Sends frames on one connection; used by one thread at a time."""

    sent: dict[str, int]
    """Bytes on the wire by class."""

    def send(self, frame: Frame, key: bytes, traffic: str) -> None:
        """Send a frame, or queue it for its time; OSError if the connection is lost."""

    def flush(self, timeout_s: float) -> bool:
        """Wait until nothing is queued; whether that was reached."""

    def close(self) -> None:
        """Drop what is queued and join the thread, if there is one."""


class DirectWriter:
    """Hands frames straight to the socket: no thread, no copy.

    Args:
        sock: a connected, blocking socket.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sent: dict[str, int] = {}
        self._sock = sock

    def send(self, frame: Frame, key: bytes, traffic: str) -> None:
        """See `Writer.send`."""
        count = WireCount()
        try:
            send_frame(self._sock, frame, key, count=count)
        finally:
            self.sent[traffic] = self.sent.get(traffic, 0) + count.wire_bytes

    def flush(self, timeout_s: float) -> bool:
        """See `Writer.flush`."""
        return True

    def close(self) -> None:
        """See `Writer.close`."""
