"""How many streams a link gets: pure, learned from what each number of streams carried.

One TCP stream fills a clean link, a tenth of a long lossy one, and only its own share of a link
that caps every flow. So the number is tried, not computed: while data waits for streams although
the link has no queue, the number of streams is doubled. If four times as many streams carried
hardly more, the earlier number is used again, and the next try waits for a minute, and twice as
long after each that failed. (A comparison with twice as many would not be a test: after a pause a
burst takes whole round trips, and the goodput of a lossy link varies by more than that.) A burst
that twice as many made very much slower is a test: their first flights overflowed a queue.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

LEVELS: Final = (1, 2, 4, 8, 16, 32, 64, 96)
_MEMORY_S: Final = 60.0
_BETTER: Final = 1.15
_LOOK_BACK: Final = 2  # number of doublings that are compared
_SETTLED: Final = 3  # stretches at a level before it is compared; TCP ramps up in the first
_EASY: Final = 20  # stretches without waiting after which fewer streams are tried
_LONG: Final = 0  # the kind of all long transfers
_MUCH_WORSE: Final = 0.6  # of the worst at the level below: one burst is enough to go back
_MOST_PATIENCE: Final = 16  # times the first wait
_WAITED: Final = 0.2  # share of the time; below it, streams are not what delays the data


@dataclass(frozen=True, slots=True)
class Stretch:
    """What happened while a link was busy.

    Attributes:
        size_bytes: bytes acknowledged in it.
        lasted_s: its duration.
        streams: number of streams that carried it.
        waited: share of the time in which data waited for a stream, and not for the link's window.
        is_whole: a whole burst, from silence to silence, rather than a part of a long one.
        most: streams whose first flights together fill the link's window. More streams would
            overflow the link's queue, each with so few segments that TCP must wait for timeouts.
    """

    size_bytes: int
    lasted_s: float
    streams: int
    waited: float
    is_whole: bool
    most: int = LEVELS[-1]

    @property
    def score(self) -> float:
        """The goodput in bytes per second."""
        return self.size_bytes / self.lasted_s


@dataclass(slots=True)
class _Climb:
    """The search for one kind of stretch; scores are bytes per second."""

    index: int
    seen_s: float = 0.0
    scores: list[float] = field(default_factory=list)  # scores at the present level
    path: dict[int, float] = field(default_factory=dict)  # scores of the levels below
    easy: int = 0
    blocked_until_s: float = 0.0
    patience: int = 1  # how many times `_MEMORY_S` the next failure blocks
    given_up: float = 0.0  # score of the level that carried hardly more

    def move(self, index: int) -> None:
        self.index, self.scores, self.easy = index, [], 0

    def give_up(self, now_s: float, index: int, score: float) -> None:
        """Go back to fewer streams; ``score`` is what those on trial carried."""
        self.blocked_until_s, self.given_up = now_s + self.patience * _MEMORY_S, score
        self.patience = min(2 * self.patience, _MOST_PATIENCE)
        self.path.clear()
        self.move(index)


class StreamCount:
    """Chooses the number of data streams.

    Args:
        smallest: fewest streams.
        largest: most streams.
        first: number to begin with.
    """

    def __init__(self, smallest: int, largest: int, first: int) -> None:
        within = [level for level in LEVELS if smallest <= level <= largest]
        self._levels = within or [smallest]
        self._first = max(i for i, n in enumerate(self._levels) if n <= max(first, self._levels[0]))
        self._climbs: dict[int, _Climb] = {}
        self._now_s = 0.0

    @property
    def target(self) -> int:
        """The number of streams wanted by the most demanding recent kind of traffic."""
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
        kind = self._kind(stretch, present)
        climb = self._climbs.setdefault(kind, _Climb(present))
        climb.seen_s = now_s
        if climb.index != present:  # another kind wants more
            return self.target
        climb.scores.append(stretch.score)
        below = climb.path.get(present - 1, 0.0)
        if kind != _LONG and stretch.score < _MUCH_WORSE * below:
            climb.give_up(now_s, present - 1, stretch.score)
            return self.target
        waits = stretch.waited > _WAITED
        climb.easy = 0 if waits else climb.easy + 1
        if len(climb.scores) >= _SETTLED:
            upwards = self._levels[present + 1 :]
            self._judge(now_s, climb, waits=waits and bool(upwards) and upwards[0] <= stretch.most)
        return self.target

    def _kind(self, stretch: Stretch, present: int) -> int:
        """Return the class of a stretch: bursts by size, all long transfers in one."""
        if stretch.is_whole:
            return stretch.size_bytes.bit_length()
        for kind, climb in self._climbs.items():
            on_trial = climb.index == present and len(climb.scores) < _SETTLED
            if on_trial and stretch.score < climb.path.get(present - 1, 0.0):
                return kind  # bursts last so long now that none is whole
        return _LONG

    def _judge(self, now_s: float, climb: _Climb, *, waits: bool) -> None:
        # New streams begin with a burst, so the level below is compared by its worse stretch.
        lower, upper = min(climb.scores[-_SETTLED:]), max(climb.scores[-_SETTLED:])
        before = climb.path.pop(climb.index - _LOOK_BACK, None)  # compared only once
        if before is not None and upper < _BETTER * before:
            climb.give_up(now_s, climb.index - _LOOK_BACK, upper)
        elif waits and (now_s >= climb.blocked_until_s or _BETTER * upper < climb.given_up):
            climb.given_up, climb.blocked_until_s = 0.0, now_s
            climb.patience = 1 if before is not None else climb.patience  # more did carry more
            climb.path[climb.index] = lower
            climb.move(climb.index + 1)
        elif climb.easy >= _EASY and climb.index > self._first:
            climb.path.clear()
            climb.move(climb.index - 1)
