"""Virtual time for blocking code: of all threads one runs, until it waits; then time moves on.

So nodes are written as for threads, and what they do happens in one order, whatever the machine
does: what happens earlier is first, and of what happens at the same time, what was begun first.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, Final, TypeVar

from geo_ray.errors import ProgramError, ProgramStalledError
from geo_ray.program.clock import NodeStopped
from geo_ray.program.surroundings import name_here
from geo_ray.sim.scheduler import Scheduler

T = TypeVar("T")
_LOGGER = logging.getLogger(__name__)
_JOIN_S: Final = 5.0


class _VirtualThread:
    """A thread that runs only while it has the turn."""

    def __init__(self) -> None:
        self.turn = threading.Semaphore(0)
        self.waits = 0  # how often it has waited; an earlier wait's wake-up counts no more
        self.is_waiting = False
        self.node = ""  # whose code waits


class VirtualThreads:
    """A `ProgramClock` on which waiting takes no time."""

    is_virtual = True

    def __init__(self) -> None:
        self._scheduler = Scheduler()
        self._back = threading.Semaphore(0)  # the turn, back at whoever drives
        self._mine = threading.local()
        self._living: set[_VirtualThread] = set()
        self._threads: list[threading.Thread] = []
        self._ended = False
        self._last_s = 0.0  # something happened; nobody may wait any more for what comes later

    def now_s(self) -> float:
        """See `ProgramClock.now_s`."""
        return self._scheduler.now_s

    def sleep_s(self, duration_s: float) -> None:
        """See `ProgramClock.sleep_s`."""
        if self._ended:
            raise NodeStopped
        if duration_s > 0:
            self._pass_on(duration_s)

    def wait(self, future: Future[Any], timeout_s: float | None = None) -> bool:
        """See `ProgramClock.wait`."""
        if self._ended:
            raise NodeStopped
        if not future.done():
            mine = self._me()
            wake = partial(self._wake_at_once, mine, mine.waits + 1)
            future.add_done_callback(lambda _: wake())
            self._pass_on(timeout_s)
        return future.done()

    def start(self, work: Callable[[], None]) -> None:
        """See `ProgramClock.start`; it begins when the caller waits next."""
        if self._ended:
            raise NodeStopped
        virtual = _VirtualThread()
        virtual.is_waiting = True
        thread = threading.Thread(
            target=self._carry_out, args=(virtual, work), name="virtual", daemon=True
        )
        thread.start()
        self._threads = [known for known in self._threads if known.is_alive()]
        self._threads.append(thread)
        self._living.add(virtual)
        self._scheduler.after(0.0, partial(self._resume, virtual, virtual.waits))

    def run(self, main: Callable[[], T]) -> T:
        """See `ProgramClock.run`.

        Raises:
            ProgramStalledError: all wait, and nothing will happen.
        """
        outcome: Future[T] = Future()

        def carry_out() -> None:
            try:
                outcome.set_result(main())
            except NodeStopped:
                raise
            except BaseException as error:
                outcome.set_exception(error)
            finally:
                self._ended = True

        try:
            self.start(carry_out)
            self._scheduler.run()
            if not outcome.done():
                nodes = sorted({each.node for each in self._living} - {""})
                raise ProgramStalledError(
                    f"nothing can happen any more at {self._last_s:g} s of virtual time; nodes "
                    f"that wait: {', '.join(nodes) or 'none'}"
                )
        finally:
            self._close()
        return outcome.result()

    def _close(self) -> None:
        self._ended = True
        for virtual in list(self._living):
            virtual.turn.release()
        for thread in self._threads:
            thread.join(_JOIN_S)
            if thread.is_alive():
                _LOGGER.warning("a node of a program goes on although the program has ended")

    def _pass_on(self, timeout_s: float | None) -> None:
        """Let others run until this thread is woken, or the time is over."""
        mine = self._me()
        mine.waits += 1
        mine.is_waiting = True
        mine.node = name_here()
        if timeout_s is not None:
            wake = partial(self._resume, mine, mine.waits)
            self._scheduler.after(timeout_s, wake)
        self._back.release()
        mine.turn.acquire()
        if self._ended:
            raise NodeStopped

    def _me(self) -> _VirtualThread:
        mine: _VirtualThread | None = getattr(self._mine, "thread", None)
        if mine is None:
            raise ProgramError(
                "a thread that a node has made itself waits on the virtual clock",
                fix="Let nodes do several things at once by futures, not by threads of their own.",
            )
        return mine

    def _wake_at_once(self, virtual: _VirtualThread, wait: int) -> None:
        if not self._ended:
            self._scheduler.after(0.0, partial(self._resume, virtual, wait))

    def _resume(self, virtual: _VirtualThread, wait: int) -> None:
        """Give a thread the turn if it still waits for this, and wait until it gives it back."""
        if self._ended or virtual.waits != wait or not virtual.is_waiting:
            return
        virtual.is_waiting = False
        self._last_s = self.now_s()
        virtual.turn.release()
        self._back.acquire()

    def _carry_out(self, virtual: _VirtualThread, work: Callable[[], None]) -> None:
        self._mine.thread = virtual
        virtual.turn.acquire()
        try:
            if not self._ended:
                work()
        except NodeStopped:
            pass
        finally:
            self._living.discard(virtual)
            self._back.release()
