"""Reads a worker's next rows while it computes on the present ones.

Which rows a worker gets is up to its region's server, so what comes next is a guess: as far on as
the last ones were. It is made once two assignments in a row were equally far apart. Rows depend on
their place in the stream alone, so a wrong guess costs a read and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from queue import SimpleQueue

from geo_ray.data.columns import Columns
from geo_ray.types import Span
from geo_ray.util.threads import Workers

_JOIN_S = 5.0


class ReadAhead:
    """See the module's docstring. All reading is on one thread, a daemon that ends with `close`.

    Args:
        read: gives so many rows from a place of the stream.
    """

    def __init__(self, read: Callable[[int, int], Columns]) -> None:
        self._read = read
        self._jobs: SimpleQueue[tuple[Span, Future[Columns]] | None] = SimpleQueue()
        self._ahead: dict[Span, Future[Columns]] = {}
        self._last: Span | None = None
        self._stride = 0
        self._threads = Workers()
        self._threads.start("read-ahead", self._carry_out)

    def take(self, spans: Sequence[Span]) -> list[Columns]:
        """The rows of an assignment; those of the next one are being read when it returns.

        Args:
            spans: at least one; the same number every time.

        Raises:
            DataError: whatever stops the reader, at these rows only.
        """
        known = self._ahead.keys()
        reads = [self._ahead.pop(span) if span in known else self._ask(span) for span in spans]
        for wrong in self._ahead.values():
            wrong.cancel()
        self._ahead = {}
        found = [read.result() for read in reads]
        first, last = spans[0], self._last
        stride = 0 if last is None else first.start - last.start
        if stride > 0 and stride == self._stride:
            following = [replace(span, start=span.start + stride) for span in spans]
            self._ahead = {span: self._ask(span) for span in following}
        self._last, self._stride = first, stride
        return found

    def close(self) -> None:
        """End the thread; what was read ahead is dropped."""
        self._jobs.put(None)
        self._threads.join(_JOIN_S)

    def _ask(self, span: Span) -> Future[Columns]:
        future: Future[Columns] = Future()
        self._jobs.put((span, future))
        return future

    def _carry_out(self) -> None:
        while (job := self._jobs.get()) is not None:
            span, future = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(self._read(span.start, span.count))
            except BaseException as error:  # it belongs to who needs these rows, if anybody does
                future.set_exception(error)
