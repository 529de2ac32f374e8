"""A box on the way that ends TCP and buffers without limit in front of a slow line, for tests."""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from contextlib import suppress

from tests.support.proxy_support import Relay

_PIECE_BYTES = 8192


class _Line:
    """One direction of the slow line: all connections share it, whatever they are handed waits."""

    def __init__(self, bytes_per_s: float, delay_s: float) -> None:
        self.held_bytes = 0
        self.most_held_bytes = 0
        self._bytes_per_s = bytes_per_s
        self._delay_s = delay_s
        self._free_s = 0.0
        self._queue: deque[tuple[float, socket.socket, bytes]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def put(self, sink: socket.socket, piece: bytes) -> None:
        with self._changed:
            self._free_s = max(self._free_s, time.monotonic()) + len(piece) / self._bytes_per_s
            self._queue.append((self._free_s + self._delay_s, sink, piece))
            self.held_bytes += len(piece)
            self.most_held_bytes = max(self.most_held_bytes, self.held_bytes)
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self.thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._queue)
                if self._closed:
                    return
                when_s, sink, piece = self._queue.popleft()
            time.sleep(max(0.0, when_s - time.monotonic()))
            with suppress(OSError):
                sink.sendall(piece) if piece else sink.shutdown(socket.SHUT_WR)
            with self._changed:
                self.held_bytes -= len(piece)


class SlowProxy:
    """Listens on ``address``, passes on to ``target`` at a rate, and takes all it is sent at once.

    Args:
        target: where to.
        bytes_per_s: rate of the line, in each direction.
        delay_s: of the line, in each direction.
        connections: more than that are refused; 1 leaves a link its control stream only.
    """

    def __init__(
        self,
        target: tuple[str, int],
        bytes_per_s: float,
        delay_s: float,
        connections: int = 1000,
    ) -> None:
        self._lines = [_Line(bytes_per_s, delay_s) for _ in range(2)]
        self._relay = Relay(target, self._pump, lambda accepted: accepted < connections)
        self.address = self._relay.address

    @property
    def most_held_bytes(self) -> int:
        """The most that was on the line towards the target at one time, its buffer included."""
        return self._lines[0].most_held_bytes

    def __enter__(self) -> SlowProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self._relay.close()
        for line in self._lines:
            line.close()

    def _pump(self, _: int, direction: int, source: socket.socket, sink: socket.socket) -> None:
        line = self._lines[direction]
        with suppress(OSError):
            while piece := source.recv(_PIECE_BYTES):
                line.put(sink, piece)
        line.put(sink, b"")
