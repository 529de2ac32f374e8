"""Link emulation over real sockets: bytes are delayed until the link model says they arrive.

Loopback takes no time, so a byte that is sent at its arrival time arrives then.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import Final

from geo_ray.clock import Clock
from geo_ray.transport.emulation.link_model import LinkModel

_HORIZON_S: Final = 0.05  # bytes are scheduled so far ahead; a cut loses at most that


class Shaper:
    """A link model in real time; it outlives the connections that use it.

    Args:
        model: one direction of a link.
        clock: clock by which bytes are released.
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
        """Return for how long the link is still busy with the bytes it was given."""
        with self._lock:
            return self._model.free_at_s - self.now_s()

    def has_room(self) -> bool:
        """Return whether the link will soon be idle unless it is given more."""
        return self.room_in_s() <= 0.0

    def room_in_s(self) -> float:
        """Return the seconds until `has_room` holds."""
        return max(0.0, self.backlog_s() - _HORIZON_S)


def regroup(parts: Iterable[memoryview], size_bytes: int) -> Iterator[list[memoryview]]:
    """Yield the same bytes in groups of exactly ``size_bytes``; the last group may be shorter."""
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
