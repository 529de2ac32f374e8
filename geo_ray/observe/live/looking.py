"""Looks at a run, or a queue, again and again, and shows it; seldom while nobody watches."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final, Generic, Protocol, TypeVar

from geo_ray.errors import GeoRayError, InvariantError
from geo_ray.observe.live.board import Board
from geo_ray.observe.live.page import reading_sections, waiting_sections

_SLICE_EVENTS: Final = 10_000
_AT_ONCE_S: Final = 0.01  # between two slices, in which who asks is answered
_log = logging.getLogger(__name__)


V = TypeVar("V", covariant=True)
S = TypeVar("S")


class ViewReader(Protocol[V]):
    """What is looked at; `geo_ray.job.live` has the readers of a run and of a queue."""

    @property
    def is_far(self) -> bool:
        """Whether a look costs requests to a bucket."""

    def read(self, most_events: int) -> float:
        """Read on; give which part was read. Raises while there is nothing."""

    def view(self) -> V:
        """Give what is shown."""


class Looking(Generic[S]):
    """A thread that looks, until `close`.

    Args:
        run: what the user called the run.
        reader: reads it.
        board: where it is shown.
        watchers: how many watch at this moment.
        on_change: called after a change of the board.
        every_s: seconds between two looks.
        draw: what is read, as sections of the page.
    """

    def __init__(
        self,
        run: str,
        reader: ViewReader[S],
        board: Board,
        watchers: Callable[[], int],
        on_change: Callable[[], None],
        every_s: float = 1.0,
        *,
        draw: Callable[[S], dict[str, str]],
    ) -> None:
        self._draw = draw
        self._run, self._reader, self._board = run, reader, board
        self._watchers, self._on_change = watchers, on_change
        self._every_s = every_s
        self._is_drawn = False
        self._wake, self._ends = threading.Event(), False
        self._thread = threading.Thread(target=self._go, name="looking", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Look now: somebody has come."""
        self._wake.set()

    def close(self) -> None:
        """Look no more; a second call does nothing."""
        self._ends = True
        self._wake.set()
        self._thread.join(timeout=60.0)

    def _go(self) -> None:
        while not self._ends:
            self._wake.clear()
            try:
                self._look()
            except GeoRayError as error:
                self._put(waiting_sections(self._run, f"{error.code}: {error.message}", error.fix))
            except Exception as error:  # one look that fails is not the last
                _log.exception("a look at %s failed", self._run)
                what = f"{InvariantError.code}: {type(error).__name__}: {error}"
                self._put(waiting_sections(self._run, what, InvariantError.advice))
            self._wake.wait(self._pause_s())

    def _pause_s(self) -> float:
        pause_s = self._every_s * (5 if self._reader.is_far else 1)
        return pause_s if self._watchers() else 10 * pause_s

    def _look(self) -> None:
        while (share := self._reader.read(_SLICE_EVENTS)) < 1.0 and not self._ends:
            self._put(reading_sections(self._run, share))
            threading.Event().wait(_AT_ONCE_S)
        if self._watchers() or not self._is_drawn:  # who comes first finds something
            self._is_drawn = True
            self._put(self._draw(self._reader.view()))

    def _put(self, sections: dict[str, str]) -> None:
        if self._board.put(sections):
            self._on_change()
