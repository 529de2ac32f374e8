"""Link emulation over real sockets: bytes are held back until the link model says they arrive."""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Final

from geo_ray.clock import Clock
from geo_ray.wan import sockets
from geo_ray.wan.frame_io import WireCount, send_parts
from geo_ray.wan.frames import Frame, encode
from geo_ray.wan.link_model import CHUNK_BYTES, LinkModel

_HORIZON_S: Final = 0.05  # how far ahead of the link bytes are scheduled; what a cut can lose


class Shaper:
    """A link model in real time; outlives the connections that go through it.

    Args:
        model: one direction of a link.
        clock: the time that bytes are released by.
        run_start_s: the clock's time at which the model's time is 0.
    """

    def __init__(self, model: LinkModel, clock: Clock, run_start_s: float) -> None:
        self._model = model
        self._clock = clock
        self._run_start_s = run_start_s
        self._lock = threading.Lock()

    def now_s(self) -> float:
        """Seconds since the run began."""
        return self._clock.now_s() - self._run_start_s

    def arrival_s(self, ready_s: float, size_bytes: int) -> float:
        """See `LinkModel.transfer`."""
        with self._lock:
            return self._model.transfer(ready_s, size_bytes)

    def backlog_s(self) -> float:
        """How long the link is still busy with what it was given."""
        with self._lock:
            return self._model.free_at_s - self.now_s()


class ShapedWriter:
    """Releases a frame's bytes to the socket when the model says that they arrive.

    Loopback takes no time, so a byte that is sent at its arrival time arrives then. The delay line
    holds views of the outbox's payloads, no copies.

    Args:
        sock: a connected, blocking socket.
        shaper: the link to the peer.
    """

    def __init__(self, sock: socket.socket, shaper: Shaper) -> None:
        self.sent: dict[str, int] = {}
        self._sock = sock
        self._shaper = shaper
        self._queue: deque[tuple[float, list[memoryview], str]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._release_all, name="wan-shaper", daemon=True)
        self._thread.start()

    def send(self, frame: Frame, key: bytes, traffic: str) -> None:
        """See `Writer.send`; waits while the link has enough to do."""
        ready_s = self._shaper.now_s()
        for chunk in _regroup(encode(frame, key), CHUNK_BYTES):
            size_bytes = sum(part.nbytes for part in chunk)
            with self._changed:
                self._wait_for_link()
                if self._closed:
                    raise ConnectionAbortedError("the connection was lost")
                release_s = self._shaper.arrival_s(ready_s, size_bytes)
                self._queue.append((release_s, chunk, traffic))
                self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """See `Writer.flush`."""
        with self._changed:
            return self._changed.wait_for(lambda: self._closed or not self._queue, timeout_s)

    def close(self) -> None:
        """See `Writer.close`; the socket must have been hung up."""
        self._give_up()
        self._thread.join()

    def _wait_for_link(self) -> None:
        while not self._closed and (wait_s := self._shaper.backlog_s() - _HORIZON_S) > 0:
            self._changed.wait(wait_s)

    def _release_all(self) -> None:
        while (due := self._next_due()) is not None:
            chunk, traffic = due
            count = WireCount()
            try:
                send_parts(self._sock, chunk, count)
            except OSError:
                sockets.hang_up(self._sock)  # wakes the receiver, which ends the connection
                self._give_up()
            self.sent[traffic] = self.sent.get(traffic, 0) + count.wire_bytes
            with self._changed:
                if self._queue:
                    self._queue.popleft()
                self._changed.notify_all()

    def _next_due(self) -> tuple[list[memoryview], str] | None:
        """Wait for the first chunk's time; None when closed."""
        with self._changed:
            while not self._closed:
                if not self._queue:
                    self._changed.wait()
                    continue
                release_s, chunk, traffic = self._queue[0]
                if (wait_s := release_s - self._shaper.now_s()) <= 0:
                    return chunk, traffic
                self._changed.wait(wait_s)
        return None

    def _give_up(self) -> None:
        with self._changed:
            self._closed = True
            self._queue.clear()
            self._changed.notify_all()


def _regroup(parts: Iterable[memoryview], size_bytes: int) -> Iterator[list[memoryview]]:
    """The same bytes in groups of exactly ``size_bytes``, but for the last one."""
    group: list[memoryview] = []
    room = size_bytes
    for part in parts:
        while part.nbytes >= room:
            yield [*group, part[:room]]
            part, group, room = part[room:], [], size_bytes
        if part.nbytes:
            group.append(part)
            room -= part.nbytes
    if group:
        yield group
