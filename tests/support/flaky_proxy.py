"""A TCP proxy that damages, cuts, stalls or refuses what goes through it, for tests."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from tests.support.proxy_support import Relay

# (which connection, direction 0 = to the target, offset of the piece, the piece) -> the piece as
# it is passed on, or None to cut the connection
Alter = Callable[[int, int, int, bytes], bytes | None]


class FlakyProxy:
    """Listens on ``address`` and passes everything on to ``target``, through ``alter``."""

    def __init__(self, target: tuple[str, int], alter: Alter = lambda *args: args[3]) -> None:
        self.alter = alter
        self.refusing = False
        self.piece_bytes = 65536  # longest piece
        self._flowing = threading.Event()
        self._flowing.set()
        self._relay = Relay(target, self._pump, lambda _: not self.refusing)
        self.address = self._relay.address

    @property
    def accepted(self) -> int:
        return self._relay.accepted

    def cut(self) -> None:
        """End every connection that is there."""
        self._relay.cut()

    def stall(self) -> None:
        """Swallow nothing and pass nothing on, like a route that vanished."""
        self._flowing.clear()

    def resume(self) -> None:
        """Pass on what waited."""
        self._flowing.set()

    def __enter__(self) -> FlakyProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self._flowing.set()
        self._relay.close()

    def _pump(self, index: int, direction: int, source: socket.socket, sink: socket.socket) -> None:
        offset = 0
        with suppress(OSError):
            while piece := source.recv(self.piece_bytes):
                self._flowing.wait()
                altered = self.alter(index, direction, offset, piece)
                if altered is None:
                    break
                offset += len(piece)
                sink.sendall(altered)
        for sock in (source, sink):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
