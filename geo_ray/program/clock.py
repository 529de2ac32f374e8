"""Clock, threads and context of a program's nodes, on real or virtual time.

With `VirtualThreads` one thread runs at a time until it waits, then time advances. Nodes use
ordinary threads, and events happen in the same order on every machine: by time, then by start.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Final, Protocol, TypeVar

from geo_ray.base.errors import ProgramError, ProgramStalledError
from geo_ray.base.threads import LOOK_S
from geo_ray.simulator.clock import Scheduler

T = TypeVar("T")
_LOGGER = logging.getLogger(__name__)
_IDLE_S: Final = 10.0


class NodeStopped(BaseException):
    """Ends a waiting thread of a node once the program has ended.

    Like `SystemExit` it is no `Exception`: a node that retries after every error must end, too.
    """


class ProgramClock(Protocol):
    """The clock and threads of a launcher."""

    is_virtual: bool

    def now_s(self) -> float:
        """Return seconds since an arbitrary, fixed origin."""

    def sleep_s(self, duration_s: float) -> None:
        """Return after that many seconds.

        Raises:
            NodeStopped: the program has ended.
        """

    def wait(self, future: Future[Any], timeout_s: float | None = None) -> bool:
        """Wait for at most that many seconds; return whether the future is done.

        Raises:
            NodeStopped: the program has ended.
        """

    def start(self, work: Callable[[], None]) -> None:
        """Run ``work`` next to the caller; it may only raise `NodeStopped`."""

    def run(self, main: Callable[[], T]) -> T:
        """Run ``main`` and return its result; started threads end with it."""


def _only_wake() -> None:
    """Do nothing; wakes a thread to check whether the program has ended."""


class RealClock:
    """The machine's clock and daemon threads, which keep no process alive."""

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
        self._wait_for((self._ended,), duration_s)
        if self._ended.done():
            raise NodeStopped

    def wait(self, future: Future[Any], timeout_s: float | None = None) -> bool:
        """See `ProgramClock.wait`."""
        if not future.done():
            self._wait_for((future, self._ended), timeout_s)
            if self._ended.done() and not future.done():
                raise NodeStopped
        return future.done()

    @staticmethod
    def _wait_for(futures: Sequence[Future[Any]], timeout_s: float | None) -> None:
        """Wait until one of the futures is done, and look again from time to time: see `LOOK_S`."""
        until_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while not any(each.done() for each in futures):
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                return
            wait(futures, min(LOOK_S, left_s), FIRST_COMPLETED)

    def start(self, work: Callable[[], None]) -> None:
        """See `ProgramClock.start`; threads are reused, because starting one costs more."""
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
        """Wake all waiting threads; a computing thread ends at its next wait."""
        with self._lock:
            if self._ended.done():
                return
            self._ended.set_result(None)
            for _ in range(self._idle):
                self._jobs.put(_only_wake)

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


_HERE: ContextVar[NodeContext] = ContextVar("geo_ray program node")


@dataclass(frozen=True, slots=True)
class NodeContext:
    """Context of a running node, as returned by `here`.

    Attributes:
        name: of the instance.
        region: of its group.
        replica: its number among the node's instances.
        on: threads, processes, ray or virtual.
        clock: its time and sleep also work on the virtual clock.
    """

    name: str
    region: str
    replica: int
    on: str
    clock: ProgramClock

    def takes_s(self, duration_s: float) -> None:
        """Declare the duration of a computation; on the virtual clock that much time passes.

        On other clocks this does nothing.
        """
        if self.clock.is_virtual:
            self.clock.sleep_s(duration_s)


def here() -> NodeContext:
    """Return the context of the node whose code calls this.

    Raises:
        ProgramError: it is called outside a node, or in a thread that a node has made.
    """
    found = _HERE.get(None)
    if found is None:
        raise ProgramError("here() was called outside a node", fix="Call it in a node's methods.")
    return found


def name_here() -> str:
    """Return the name of the instance whose code calls this; empty outside of nodes."""
    found = _HERE.get(None)
    return "" if found is None else found.name


@contextmanager
def in_context(context: NodeContext) -> Iterator[None]:
    """Let `here` return this context."""
    token = _HERE.set(context)
    try:
        yield
    finally:
        _HERE.reset(token)


_JOIN_S: Final = 5.0


class _VirtualThread:
    """A thread that runs only in its turn."""

    def __init__(self) -> None:
        self.turn = threading.Semaphore(0)
        self.waits = 0  # number of waits; the wake-up of an earlier wait is ignored
        self.is_waiting = False
        self.node = ""  # node whose code waits


class VirtualThreads:
    """A `ProgramClock` on which waiting takes no time."""

    is_virtual = True

    def __init__(self) -> None:
        self._scheduler = Scheduler()
        self._back = threading.Semaphore(0)  # returns the turn to the scheduling thread
        self._mine = threading.local()
        self._running: set[_VirtualThread] = set()
        self._threads: list[threading.Thread] = []
        self._ended = False
        self._last_s = 0.0  # time of the last event

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
            future.add_done_callback(partial(self._wake_at_once, mine, mine.waits + 1))
            self._pass_on(timeout_s)
        return future.done()

    def start(self, work: Callable[[], None]) -> None:
        """See `ProgramClock.start`; it begins at the caller's next wait."""
        if self._ended:
            raise NodeStopped
        virtual = _VirtualThread()
        virtual.is_waiting = True
        thread = threading.Thread(
            target=self._execute, args=(virtual, work), name="virtual", daemon=True
        )
        thread.start()
        self._threads = [known for known in self._threads if known.is_alive()]
        self._threads.append(thread)
        self._running.add(virtual)
        self._scheduler.after(0.0, partial(self._resume, virtual, virtual.waits))

    def run(self, main: Callable[[], T]) -> T:
        """See `ProgramClock.run`.

        Raises:
            ProgramStalledError: all threads wait, and no event is left.
        """
        outcome: Future[T] = Future()

        def execute() -> None:
            try:
                outcome.set_result(main())
            except NodeStopped:
                raise
            except BaseException as error:
                outcome.set_exception(error)
            finally:
                self._ended = True

        try:
            self.start(execute)
            self._scheduler.run()
            if not outcome.done():
                nodes = sorted({each.node for each in self._running} - {""})
                raise ProgramStalledError(
                    f"no event is left at {self._last_s:g} s of virtual time; waiting "
                    f"nodes: {', '.join(nodes) or 'none'}"
                )
        finally:
            self._close()
        return outcome.result()

    def _close(self) -> None:
        self._ended = True
        for virtual in list(self._running):
            virtual.turn.release()
        for thread in self._threads:
            thread.join(_JOIN_S)
            if thread.is_alive():
                _LOGGER.warning("a node of a program still runs although the program has ended")

    def _pass_on(self, timeout_s: float | None) -> None:
        """Let other threads run until this one is woken, or the time is over."""
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
                "a thread that a node created itself waits on the virtual clock",
                fix="Use futures instead of threads for concurrent work in a node.",
            )
        return mine

    def _wake_at_once(self, virtual: _VirtualThread, wait: int, _: object) -> None:
        if not self._ended:
            self._scheduler.after(0.0, partial(self._resume, virtual, wait))

    def _resume(self, virtual: _VirtualThread, wait: int) -> None:
        """Give a waiting thread the turn, and wait until it returns the turn."""
        if self._ended or virtual.waits != wait or not virtual.is_waiting:
            return
        virtual.is_waiting = False
        self._last_s = self.now_s()
        virtual.turn.release()
        self._back.acquire()

    def _execute(self, virtual: _VirtualThread, work: Callable[[], None]) -> None:
        self._mine.thread = virtual
        virtual.turn.acquire()
        try:
            if not self._ended:
                work()
        except NodeStopped:
            pass
        finally:
            self._running.discard(virtual)
            self._back.release()
