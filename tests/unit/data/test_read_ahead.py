"""Rows are those of the reader, whatever was guessed; the next ones are read meanwhile."""

from __future__ import annotations

import threading
from random import Random

import numpy as np
import pytest

from geo_ray.base.errors import ShardCorruptError
from geo_ray.base.types import Span
from geo_ray.data.reader import ReadAhead

WAIT_S = 20.0


class Rows:
    """A stream whose row is its place; notes what was read."""

    def __init__(self) -> None:
        self.read_at: list[int] = []
        self.seen = threading.Condition()
        self.bad: set[int] = set()

    def read(self, start: int, count: int) -> dict[str, np.ndarray]:
        with self.seen:
            self.read_at.append(start)
            self.seen.notify_all()
        if start in self.bad:
            raise ShardCorruptError(f"rows at {start}")
        return {"x": np.arange(start, start + count)}

    def await_read(self, start: int) -> None:
        with self.seen:
            assert self.seen.wait_for(lambda: start in self.read_at, WAIT_S), self.read_at


def take(ahead: ReadAhead, *spans: Span) -> None:
    for span, columns in zip(spans, ahead.take(spans), strict=True):
        assert columns["x"].tolist() == list(range(span.start, span.start + span.count))


def test_the_next_rows_are_read_before_they_are_asked_for() -> None:
    rows = Rows()
    ahead = ReadAhead(rows.read)
    for start in (0, 16, 32):
        take(ahead, Span(start, 8))
    rows.await_read(48)  # nobody asked for them
    take(ahead, Span(48, 8))
    rows.await_read(64)
    ahead.close()
    assert rows.read_at == [0, 16, 32, 48, 64]


def test_coded_steps_read_all_their_parts_ahead() -> None:
    rows = Rows()
    ahead = ReadAhead(rows.read)
    for start in (0, 16, 32):
        take(ahead, Span(start, 8), Span(start + 8, 8))
    rows.await_read(56)
    ahead.close()


def test_any_order_gives_the_rows_of_the_reader() -> None:
    random, rows = Random(3), Rows()
    ahead = ReadAhead(rows.read)
    place = 0
    for _ in range(200):
        take(ahead, Span(place, random.choice((4, 8))))
        place = random.choice((place + 16, place + 16, place, place + 24, 0))
    ahead.close()


def test_an_error_is_raised_only_at_rows_that_are_needed() -> None:
    rows = Rows()
    rows.bad = {48}
    ahead = ReadAhead(rows.read)
    for start in (0, 16, 32):
        take(ahead, Span(start, 8))
    rows.await_read(48)
    take(ahead, Span(40, 8))  # a lost worker's rows came first
    with pytest.raises(ShardCorruptError, match="rows at 48"):
        take(ahead, Span(48, 8))
    ahead.close()


def test_closing_leaves_no_thread_behind() -> None:
    ahead = ReadAhead(Rows().read)
    take(ahead, Span(0, 4))
    ahead.close()
    assert "read-ahead" not in [thread.name for thread in threading.enumerate()]
