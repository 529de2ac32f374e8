"""Threads with one owner, parallel calls, and calls with a deadline.

`Workers` starts threads and joins them at the end. `ThreadPoolMap` makes a few calls in parallel,
the first of them in the calling thread. `BoundedCalls` calls one endpoint and never waits
longer than a limit: a late call continues in its own thread, and until it returns every further
call fails at once, so that an unresponsive endpoint blocks a caller only once and threads do not
pile up.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any, Final, TypeAlias, TypeVar

from geo_ray.base.errors import GeoRayError

T = TypeVar("T")
_LOGGER = logging.getLogger(__name__)
_LAST: Final = 19  # the lowest scheduling priority


def give_way() -> None:
    """Give the calling thread the lowest scheduling priority, for the rest of its life.

    Works on Linux, where threads have separate priorities; elsewhere it does nothing. Not for a
    thread that computes while it holds locks, because other threads would wait for it.
    """
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LAST)


def given_way(work: Callable[[], T]) -> T:
    """Run ``work`` in a separate thread with the lowest priority; return or raise its result."""
    with ThreadPoolExecutor(1, "gives-way", give_way) as thread:
        return thread.submit(work).result()


class Workers:
    """A set of daemon threads, which end by themselves or on request of their owner."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    def start(self, name: str, work: Callable[[], None]) -> None:
        """Run ``work`` in a new thread."""
        thread = threading.Thread(target=work, name=name, daemon=True)
        with self._lock:
            self._threads = [known for known in self._threads if known.is_alive()]
            # Start under the lock, because a thread that has not started yet would count as dead.
            thread.start()
            self._threads.append(thread)

    def join(self, timeout_s: float) -> None:
        """Wait for all but the calling thread; those that take longer are logged and left."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            with self._lock:  # repeated, because a thread may have started another
                mine = threading.current_thread()
                threads = [thread for thread in self._threads if thread is not mine]
                self._threads = []
            if not threads:
                return
            for thread in threads:
                thread.join(max(0.0, deadline_s - time.monotonic()))
                if thread.is_alive():
                    _LOGGER.warning("thread %s is still busy", thread.name)


LOOK_S: Final = 0.5
"""Longest single wait of a thread that Ctrl-C must end: Python does not end a wait for a signal
that arrived just before it."""

R = TypeVar("R")
_Job: TypeAlias = tuple[Callable[[], Any], "Future[Any]"]
_JOIN_S = 5.0


def in_turn(calls: Sequence[Callable[[], R]]) -> list[R]:
    """Run calls one after another, if they are fast or share a thread; return their results."""
    return [call() for call in calls]


class ThreadPoolMap:
    """Runs calls in parallel. Its threads are daemons, and end with `close`.

    Args:
        count: maximum parallel calls; one of them runs in the caller's thread.
        name: name of the threads.
    """

    def __init__(self, count: int, name: str) -> None:
        self._jobs: list[SimpleQueue[_Job | None]] = [SimpleQueue() for _ in range(count - 1)]
        self._threads = Workers()
        for number, jobs in enumerate(self._jobs):
            self._threads.start(f"{name}-{number + 1}", partial(_run_jobs, jobs))

    def __call__(self, calls: Sequence[Callable[[], R]]) -> list[R]:
        """Run all calls, the first one in this thread.

        Returns:
            Their results in their order, once all have ended.

        Raises:
            Exception: the error of the first failed call; all calls have ended.
        """
        first, *others = calls
        futures: list[Future[R]] = [Future() for _ in others]
        for jobs, call, future in zip(self._jobs, others, futures, strict=False):
            jobs.put((call, future))
        mine: Future[R] = Future()
        _complete(first, mine)
        for call, future in list(zip(others, futures, strict=True))[len(self._jobs) :]:
            _complete(call, future)
        ended = [mine, *futures]
        failures = [future.exception() for future in ended]  # waits for each of them
        for failure in failures:
            if failure is not None:
                raise failure
        return [future.result() for future in ended]

    def close(self) -> None:
        """End the threads; calls in progress must be released first."""
        for jobs in self._jobs:
            jobs.put(None)
        self._threads.join(_JOIN_S)


def _run_jobs(jobs: SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        _complete(*job)


def _complete(call: Callable[[], R], future: Future[R]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:  # the error belongs to the waiting caller
        future.set_exception(error)


class BoundedCalls:
    """Calls to one endpoint with a time limit.

    A late call continues in a separate thread. Until it returns, every further call fails at once,
    so that an unresponsive endpoint blocks a caller only once, and threads do not pile up.

    Args:
        place: the endpoint, for messages.
        longest_s: timeout of a call; None: until the call itself ends.
        late: class of the error of a late call.
    """

    def __init__(self, place: str, longest_s: float | None, late: type[GeoRayError]) -> None:
        self._place, self._longest_s, self._late = place, longest_s, late
        self._owed: Future[Any] | None = None

    def begin(self, call: Callable[[], T]) -> Callable[[], T]:
        """Begin a call; return a function that waits for its result.

        The function raises the error of the call, or a timeout error if the call does not end in
        time.
        """
        if self._longest_s is not None and self._owed is not None and not self._owed.done():
            return self._refuse
        answer: Future[T] = Future()
        self._owed = answer
        deadline_s = None if self._longest_s is None else time.monotonic() + self._longest_s
        Thread(target=_run_call, args=(call, answer), name=self._place, daemon=True).start()
        return lambda: self._wait(answer, deadline_s)

    def _wait(self, answer: Future[T], deadline_s: float | None) -> T:
        left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
        try:
            return answer.result(left_s)
        except TimeoutError:
            if answer.done():
                raise  # of the call itself
        raise self._late(f"{self._place} did not answer within {self._longest_s:g} s")

    def _refuse(self) -> Any:
        raise self._late(f"{self._place} has not answered an earlier call")


def _run_call(call: Callable[[], T], answer: Future[T]) -> None:
    try:
        answer.set_result(call())
    except BaseException as error:  # passed to the waiting caller
        answer.set_exception(error)
