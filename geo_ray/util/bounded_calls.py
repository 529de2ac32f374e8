"""Calls to one place, none of which is waited for longer than so long.

A call that is late goes on in a thread of its own. While it does, every further one fails at once,
so that a place that hangs holds nobody up for longer than the once, and threads do not pile up.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import Any, TypeVar

from geo_ray.errors import GeoRayError

T = TypeVar("T")


class BoundedCalls:
    """See the module's docstring.

    Args:
        place: that is called, for messages.
        longest_s: longest wait for an answer; None: until the call itself ends.
        late: class of the error of a call that is not waited for.
    """

    def __init__(self, place: str, longest_s: float | None, late: type[GeoRayError]) -> None:
        self._place, self._longest_s, self._late = place, longest_s, late
        self._owed: Future[Any] | None = None

    def begin(self, call: Callable[[], T]) -> Callable[[], T]:
        """Begin a call; return what waits for its answer.

        What it returns raises what the call raises, or the error of a late call if that does not
        answer in time.
        """
        if self._longest_s is not None and self._owed is not None and not self._owed.done():
            return self._refuse
        answer: Future[T] = Future()
        self._owed = answer
        deadline_s = None if self._longest_s is None else time.monotonic() + self._longest_s
        Thread(target=_carry_out, args=(call, answer), name=self._place, daemon=True).start()
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
        raise self._late(f"{self._place} still owes the answer to an earlier call")


def _carry_out(call: Callable[[], T], answer: Future[T]) -> None:
    try:
        answer.set_result(call())
    except BaseException as error:  # whatever it is: whoever waits is told
        answer.set_exception(error)
