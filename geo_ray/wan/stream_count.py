"""How many streams a link deserves: pure, learned from what each number of streams carried.

One TCP stream fills a clean link, a tenth of a long lossy one, and only its own share of a link
that caps every flow. So the number is tried, not computed: while data waits for streams although
the link has no queue, the next larger number is tried; it stays if it carried more, and a smaller
one comes back if it carried the same. What was learned is forgotten after a minute.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

LEVELS: Final = (1, 2, 4, 8, 16, 32, 64, 96)
_MEMORY_S: Final = 60.0
_BETTER: Final = 1.05
_AS_GOOD: Final = 0.98
_BLEND: Final = 0.5
_WAITED: Final = 0.2  # of the time: below that, streams are not what holds the data up


@dataclass(frozen=True, slots=True)
class Stretch:
    """What happened while a link was busy.

    Attributes:
        size_bytes: acknowledged in it.
        lasted_s: from its begin to its end.
        streams: how many carried it.
        waited: share of the time in which data waited for a stream, and not for the link's window.
        is_whole: a whole burst, from silence to silence, rather than a part of a long one.
    """

    size_bytes: int
    lasted_s: float
    streams: int
    waited: float
    is_whole: bool


class StreamCount:
    """Chooses the number of data streams.

    Args:
        smallest: never fewer.
        largest: never more.
        first: to begin with.
    """

    def __init__(self, smallest: int, largest: int, first: int) -> None:
        within = [level for level in LEVELS if smallest <= level <= largest]
        self._levels = within or [smallest]
        self._index = max(i for i, n in enumerate(self._levels) if n <= max(first, self._levels[0]))
        self._scores: dict[tuple[int, int], tuple[float, float]] = {}

    @property
    def target(self) -> int:
        """How many streams there should be."""
        return self._levels[self._index]

    def observe(self, now_s: float, stretch: Stretch) -> int:
        """Learn from a stretch; returns the new target.

        A stretch with another number of streams than the target says nothing: streams are being
        opened or closed.
        """
        if stretch.streams != self.target or stretch.lasted_s <= 0.0:
            return self.target
        kind = stretch.size_bytes.bit_length() if stretch.is_whole else 0
        score = stretch.size_bytes / stretch.lasted_s
        known = self._known(now_s, kind, self._index)
        if known is not None:
            score = _BLEND * score + (1.0 - _BLEND) * known
        self._scores[kind, self._index] = (now_s, score)
        self._index = self._next(now_s, kind, score, waits=stretch.waited > _WAITED)
        return self.target

    def _next(self, now_s: float, kind: int, score: float, *, waits: bool) -> int:
        up, down = self._index + 1, self._index - 1
        if waits and up < len(self._levels):
            larger = self._known(now_s, kind, up)
            if larger is None or larger > _BETTER * score:
                return up
        if down >= 0:
            smaller = self._known(now_s, kind, down)
            if smaller is not None and smaller >= _AS_GOOD * score:
                return down
        return self._index

    def _known(self, now_s: float, kind: int, index: int) -> float | None:
        at_s, score = self._scores.get((kind, index), (-_MEMORY_S, 0.0))
        return score if now_s - at_s < _MEMORY_S else None
