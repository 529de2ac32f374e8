"""Link emulation over real sockets: bytes are held back until the link model says they arrive.

Loopback takes no time, so a byte that is sent at its arrival time arrives then.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import Final

from geo_ray.clock import Clock
from geo_ray.transport.emulation.link_model import LinkModel

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

    def has_room(self) -> bool:
        """Whether the link will be idle soon unless it is given more."""
        return self.room_in_s() <= 0.0

    def room_in_s(self) -> float:
        """How long until that is so, in seconds."""
        return max(0.0, self.backlog_s() - _HORIZON_S)


def regroup(parts: Iterable[memoryview], size_bytes: int) -> Iterator[list[memoryview]]:
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
