"""A few calls at the same time: one in the caller's thread, the others in threads that wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeAlias, TypeVar

from geo_ray.util.threads import Workers

R = TypeVar("R")
_Job: TypeAlias = tuple[Callable[[], Any], "Future[Any]"]
_JOIN_S = 5.0


def in_turn(calls: Sequence[Callable[[], R]]) -> list[R]:
    """One call after the other, where they are quick or share a thread; results in their order."""
    return [call() for call in calls]


class Together:
    """Runs calls at the same time. Its threads are daemons, and end with `close`.

    Args:
        count: most calls at once; one of them is in the caller's thread.
        name: of the threads.
    """

    def __init__(self, count: int, name: str) -> None:
        self._jobs: list[SimpleQueue[_Job | None]] = [SimpleQueue() for _ in range(count - 1)]
        self._threads = Workers()
        for number, jobs in enumerate(self._jobs):
            self._threads.start(f"{name}-{number + 1}", partial(_carry_out, jobs))

    def __call__(self, calls: Sequence[Callable[[], R]]) -> list[R]:
        """Make all calls, of which the first is in this thread.

        Returns:
            Their results in their order, once all have ended.

        Raises:
            Exception: that of the first call, in their order, that failed; nothing runs any more.
        """
        first, *others = calls
        futures: list[Future[R]] = [Future() for _ in others]
        for jobs, call, future in zip(self._jobs, others, futures, strict=False):
            jobs.put((call, future))
        mine: Future[R] = Future()
        _end(first, mine)
        for call, future in list(zip(others, futures, strict=True))[len(self._jobs) :]:
            _end(call, future)
        ended = [mine, *futures]
        failures = [future.exception() for future in ended]  # waits for each of them
        for failure in failures:
            if failure is not None:
                raise failure
        return [future.result() for future in ended]

    def close(self) -> None:
        """End the threads; calls that are being made are to be released first."""
        for jobs in self._jobs:
            jobs.put(None)
        self._threads.join(_JOIN_S)


def _carry_out(jobs: SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        _end(*job)


def _end(call: Callable[[], R], future: Future[R]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:  # it belongs to who waits for the result
        future.set_exception(error)
