"""How many streams a link deserves: pure, learned from what each number of streams carried.

One TCP stream fills a clean link, a tenth of a long lossy one, and only its own share of a link
that caps every flow. So the number is tried, not computed: while data waits for streams although
the link has no queue, twice as many are opened. If four times as many carried hardly more, those
that were enough come back, and the next try has to wait for a minute. (Twice as many would be no
test: after a pause a burst takes whole round trips, and a lossy link varies by more than that.)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

LEVELS: Final = (1, 2, 4, 8, 16, 32, 64, 96)
_MEMORY_S: Final = 60.0
_BETTER: Final = 1.15
_LOOK_BACK: Final = 2  # levels
_SETTLED: Final = 3  # stretches at a level before it is judged; TCP ramps up in the first
_EASY: Final = 20  # stretches without waiting after which fewer are tried
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
        most: streams whose first flights together fill the link's window. More would only overflow
            the link's queue, each with so few segments that TCP must wait for timeouts.
    """

    size_bytes: int
    lasted_s: float
    streams: int
    waited: float
    is_whole: bool
    most: int = LEVELS[-1]

    @property
    def score(self) -> float:
        """Bytes per second."""
        return self.size_bytes / self.lasted_s


@dataclass(slots=True)
class _Climb:
    """The search for one kind of stretch; scores are bytes per second."""

    index: int
    seen_s: float = 0.0
    scores: list[float] = field(default_factory=list)  # at the present level
    path: dict[int, float] = field(default_factory=dict)  # of the levels on the way up
    easy: int = 0
    blocked_until_s: float = 0.0
    given_up: float = 0.0  # score of the level that was one too many

    def move(self, index: int) -> None:
        self.index, self.scores, self.easy = index, [], 0


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
        self._first = max(i for i, n in enumerate(self._levels) if n <= max(first, self._levels[0]))
        self._climbs: dict[int, _Climb] = {}
        self._now_s = 0.0

    @property
    def target(self) -> int:
        """How many streams there should be: as the most demanding kind of traffic lately wants."""
        fresh = [c.index for c in self._climbs.values() if self._now_s - c.seen_s < _MEMORY_S]
        return self._levels[max(fresh, default=self._first)]

    def observe(self, now_s: float, stretch: Stretch) -> int:
        """Learn from a stretch; returns the new target.

        A stretch with another number of streams than the target says nothing: streams are being
        opened or closed.
        """
        self._now_s = now_s
        if stretch.streams != self.target or stretch.lasted_s <= 0.0:
            return self.target
        present = self._levels.index(self.target)
        climb = self._climbs.setdefault(self._kind(stretch, present), _Climb(present))
        climb.seen_s = now_s
        if climb.index != present:  # another kind wants more: this one has nothing to say
            return self.target
        climb.scores.append(stretch.score)
        waits = stretch.waited > _WAITED
        climb.easy = 0 if waits else climb.easy + 1
        if len(climb.scores) >= _SETTLED:
            upwards = self._levels[present + 1 :]
            self._judge(now_s, climb, waits=waits and bool(upwards) and upwards[0] <= stretch.most)
        return self.target

    def _kind(self, stretch: Stretch, present: int) -> int:
        """Bursts are compared with those of their size, parts of long transfers with each other."""
        if stretch.is_whole:
            return stretch.size_bytes.bit_length()
        for kind, climb in self._climbs.items():
            on_trial = climb.index == present and len(climb.scores) < _SETTLED
            if on_trial and stretch.score < climb.path.get(present - 1, 0.0):
                return kind  # with so many streams bursts take so long that none is whole
        return 0

    def _judge(self, now_s: float, climb: _Climb, *, waits: bool) -> None:
        # New streams begin with a burst: the level below is judged by its worse stretch.
        lower, upper = min(climb.scores[-_SETTLED:]), max(climb.scores[-_SETTLED:])
        before = climb.path.pop(climb.index - _LOOK_BACK, None)  # judged once
        if before is not None and upper < _BETTER * before:
            climb.blocked_until_s, climb.given_up = now_s + _MEMORY_S, upper
            climb.path.clear()
            climb.move(climb.index - _LOOK_BACK)
        elif waits and (now_s >= climb.blocked_until_s or _BETTER * upper < climb.given_up):
            climb.given_up, climb.blocked_until_s = 0.0, now_s
            climb.path[climb.index] = lower
            climb.move(climb.index + 1)
        elif climb.easy >= _EASY and climb.index > self._first:
            climb.path.clear()
            climb.move(climb.index - 1)
