"""Time, waiting and threads of a program, which are the machine's or virtual."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Final, Protocol, TypeVar

T = TypeVar("T")
_LOGGER = logging.getLogger(__name__)
_IDLE_S: Final = 10.0


class NodeStopped(BaseException):
    """Ends a node's thread where it waits, once the program has ended.

    Like `SystemExit` it is no `Exception`: a node that tries again whatever fails must end, too.
    """


class ProgramClock(Protocol):
    """What the launchers of one process differ in."""

    is_virtual: bool

    def now_s(self) -> float:
        """Seconds since an arbitrary, fixed origin."""

    def sleep_s(self, duration_s: float) -> None:
        """Return after that long.

        Raises:
            NodeStopped: the program has ended.
        """

    def wait(self, future: Future[Any], timeout_s: float | None = None) -> bool:
        """Whether a future is done, after at most that long.

        Raises:
            NodeStopped: the program has ended.
        """

    def start(self, work: Callable[[], None]) -> None:
        """Let ``work`` go on beside the caller; it raises nothing but `NodeStopped`."""

    def run(self, main: Callable[[], T]) -> T:
        """What ``main`` returns or raises; what it has started ends with it."""


class RealClock:
    """The machine's clock and threads, all of them daemons: none keeps a process alive."""

    is_virtual = False

    def __init__(self) -> None:
        self._ended: Future[None] = Future()
        self._jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0

    def now_s(self) -> float:
        """See `ProgramClock.now_s`."""
        return time.monotonic()

    def sleep_s(self, duration_s: float) -> None:
        """See `ProgramClock.sleep_s`."""
        if duration_s > 0:
            wait((self._ended,), duration_s)
        if self._ended.done():
            raise NodeStopped

    def wait(self, future: Future[Any], timeout_s: float | None = None) -> bool:
        """See `ProgramClock.wait`."""
        if not future.done():
            wait((future, self._ended), timeout_s, FIRST_COMPLETED)
            if self._ended.done() and not future.done():
                raise NodeStopped
        return future.done()

    def start(self, work: Callable[[], None]) -> None:
        """See `ProgramClock.start`; threads are used again, because starting one costs more."""
        if self._ended.done():
            raise NodeStopped
        with self._lock:
            self._jobs.put(work)
            if self._idle > 0:
                self._idle -= 1
                return
        threading.Thread(target=self._work, name="program", daemon=True).start()

    def run(self, main: Callable[[], T]) -> T:
        """See `ProgramClock.run`."""
        try:
            return main()
        finally:
            self.close()

    def close(self) -> None:
        """Wake whoever waits; a thread that computes ends when it waits next."""
        with self._lock:
            if self._ended.done():
                return
            self._ended.set_result(None)
            for _ in range(self._idle):
                self._jobs.put(lambda: None)

    def _work(self) -> None:
        while not self._ended.done():
            try:
                work = self._jobs.get(timeout=_IDLE_S)
            except Empty:
                with self._lock:
                    if self._jobs.empty():
                        self._idle -= 1
                        return
                continue
            with suppress(NodeStopped):
                work()
            with self._lock:
                self._idle += 1
