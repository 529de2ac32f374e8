"""Handlers that answer several calls at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final, TypeVar

from geo_ray.errors import ProgramInvalidError
from geo_ray.program.clock import ProgramClock

F = TypeVar("F", bound=Callable[..., Any])
MARK: Final = "_geo_ray_batch"
MOST_CALLS: Final = 64
"""How many calls can wait at one instance for each other."""


def batched_handler(batch_size: int, timeout_s: float) -> Callable[[F], F]:
    """Let a method answer several calls at once: it takes a list and returns one as long.

    Each call gives one argument and gets one result. Calls that wait for each other do not count as
    being answered, so `NodeGroup.calls_at_once` says how many *batches* go on at a time.

    Args:
        batch_size: calls that are enough, at most 64.
        timeout_s: how long the first call waits for others.

    Raises:
        ProgramInvalidError: the numbers make no sense.
    """
    if not 1 <= batch_size <= MOST_CALLS or not 0 <= timeout_s < threading.TIMEOUT_MAX:
        raise ProgramInvalidError(
            f"a batch of {batch_size} calls within {timeout_s:g} s: 1 to {MOST_CALLS} calls, and "
            "at least 0 s and not for ever"
        )

    def marked(method: F) -> F:
        setattr(method, MARK, (batch_size, timeout_s))
        return method

    return marked


class CallBatch:
    """Calls that wait for each other; the first of a batch carries it out for all.

    Args:
        batch_size: calls that are enough.
        timeout_s: how long the first one waits.
        clock: where they wait.
        carry_out: answers them; as many results as requests.
    """

    def __init__(
        self,
        batch_size: int,
        timeout_s: float,
        clock: ProgramClock,
        carry_out: Callable[[list[Any]], Any],
    ) -> None:
        self._size, self._timeout_s, self._clock = batch_size, timeout_s, clock
        self._carry_out = carry_out
        self._lock = threading.Lock()
        self._waiting: list[tuple[Any, Future[Any]]] = []
        self._full: Future[None] = Future()

    def answer(self, request: Any) -> Any:
        """This request's part of what comes of its batch.

        Raises:
            Exception: that of the whole batch.
        """
        mine: Future[Any] = Future()
        with self._lock:
            self._waiting.append((request, mine))
            is_first = len(self._waiting) == 1
            batch, full = self._waiting, self._full
            if len(batch) >= self._size:  # whoever comes now begins the next one
                self._waiting, self._full = [], Future()
        if len(batch) >= self._size and not full.done():
            full.set_result(None)
        if is_first:
            self._clock.wait(full, self._timeout_s)
            with self._lock:
                if self._waiting is batch:
                    self._waiting, self._full = [], Future()
            self._answer_all(batch)
        else:
            self._clock.wait(mine)
        return mine.result()

    def _answer_all(self, batch: list[tuple[Any, Future[Any]]]) -> None:
        try:
            answers = self._carry_out([request for request, _ in batch])
            if not isinstance(answers, list | tuple) or len(answers) != len(batch):
                raise TypeError(f"a batched handler was given {len(batch)} requests and returned "
                                f"{answers!r:.100} instead of a list of as many")  # fmt: skip
        except BaseException as error:
            for _, future in batch:
                future.set_exception(error)
            if not isinstance(error, Exception):
                raise
        else:
            for (_, future), value in zip(batch, answers, strict=True):
                future.set_result(value)
