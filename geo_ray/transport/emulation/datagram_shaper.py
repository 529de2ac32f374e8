"""Emulates a link for datagrams over real sockets, as the link model decides."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable
from itertools import count
from typing import Final

from geo_ray.clock import Clock
from geo_ray.transport.emulation.link_model import LinkModel

_HEADERS_BYTES: Final = 28  # IP and UDP


class DatagramShaper:
    """Delays datagrams until the link model says that they arrive, and drops those that do not.

    Args:
        send: puts a datagram on the real socket; loopback takes no time.
        model: one direction of a link; the endpoint's connections use the same one.
        clock: clock by which datagrams are released.
        run_start_s: the clock's time at which the model's time is 0.
    """

    def __init__(
        self, send: Callable[[bytes], None], model: LinkModel, clock: Clock, run_start_s: float
    ) -> None:
        self._release = send
        self._model = model
        self._clock = clock
        self._run_start_s = run_start_s
        self._changed = threading.Condition()
        self._queue: list[tuple[float, int, bytes]] = []
        self._number = count()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="wan-udp-shaper", daemon=True)
        self._thread.start()

    def send(self, datagram: bytes) -> None:
        """Put a datagram on the emulated link."""
        arrival_s = self._model.datagram(self._now_s(), len(datagram) + _HEADERS_BYTES)
        if arrival_s is None:
            return
        with self._changed:
            heapq.heappush(self._queue, (arrival_s, next(self._number), datagram))
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread; datagrams on the link are lost."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _now_s(self) -> float:
        return self._clock.now_s() - self._run_start_s

    def _run(self) -> None:
        while (datagram := self._next()) is not None:
            self._release(datagram)

    def _next(self) -> bytes | None:
        with self._changed:
            while not self._closed:
                left_s = self._queue[0][0] - self._now_s() if self._queue else None
                if left_s is not None and left_s <= 0.0:
                    return heapq.heappop(self._queue)[2]
                self._changed.wait(left_s)
        return None
