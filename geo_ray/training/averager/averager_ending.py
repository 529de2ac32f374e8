"""When the averager tells regions to finish, and to which end they come first.

The other side is `geo_ray.training.server.region_ending`. Where codecs owe something that only the
last word of a round pays, regions are told one round before (`Reply.closing`). A run that is
resumed with another goal first comes to the end that its regions knew, if some had said their last
word there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from geo_ray.strategies.base import AveragerState, Reply
from geo_ray.training.averager.averager_books import AveragerBooks
from geo_ray.training.averager.pace import paced


@dataclass(slots=True)
class AveragerEnding:
    """See the module's docstring.

    Attributes:
        state: the strategy's, which is told whether every answer tells its region to finish.
        announces: whether regions must be told of the last round, to pay in it what codecs owe.
        has_last_words: whether there is always an exchange after the last step.
        goal: what the run is to do, in words; at a resume with another goal it goes on, although it
            was told to finish.
        enough: rows of all regions together after which they are told to finish; None: no limit.
        samples: rows behind all updates so far.
    """

    state: AveragerState
    announces: bool
    has_last_words: bool
    goal: str = ""
    enough: int | None = None
    samples: int = 0
    _first: str | None = None  # the goal before this one, to whose end regions come first
    _closing: bool = False  # the next round is to be the last

    @property
    def stopping(self) -> bool:
        """Whether regions are told to finish, or to do so with their next round."""
        return (self.state.stopping and self._first is None) or self._closing

    @property
    def goes_on(self) -> bool:
        """Whether a round that was announced as the last one was too short to be it."""
        return self.announces and self.enough is not None and not self.stopping

    def stop(self) -> None:
        """Tell every region, with its next answer, to finish, or to do so with one round more."""
        if self.announces:
            self._closing = True
        else:
            self.state.stopping, self._first = True, None

    def count(self, samples: int) -> None:
        """Rows behind an update."""
        self.samples += samples
        self.state.stopping |= self._has_enough

    def passed(self) -> None:
        """All last words are in; if they were those of an end before, there is another one."""
        if self._first is not None:
            self._first, self.state.stopping = None, self._has_enough

    def marked(self, reply: Reply) -> Reply:
        """The answer, with what it tells of the end, and of the way there."""
        reply = replace(paced(reply, self.state), stop=self.state.stopping, seen=self.samples)
        if not self.announces or reply.final:
            return reply
        # The next round will have as many rows as this one.
        is_next = self.enough is not None and self.samples + reply.num_samples >= self.enough
        return replace(reply, closing=self._closing or is_next)

    def export(self, books: AveragerBooks) -> dict[str, object]:
        """Plain values for a checkpoint."""
        stops = (self._first or self.goal) if self.state.stopping else None
        found: dict[str, object] = {"samples": self.samples, "stops": stops}
        if self._closing or any(reply.closing for reply in books.answers.values()):
            found["closes"] = [self.goal, self._closing]
        return found

    def is_closed(self, control: Mapping[str, object]) -> bool:
        """Whether the run that was saved was closing for the same goal as this one has."""
        closes = control.get("closes")
        return isinstance(closes, list) and closes[0] == self.goal

    def restore(self, control: Mapping[str, object], books: AveragerBooks) -> None:
        """Become what `export` saved; ``books`` are restored."""
        self.samples = int(str(control.get("samples", 0)))
        closes = control.get("closes")
        self._closing = isinstance(closes, list) and self.is_closed(control) and bool(closes[1])
        goal = control.get("stops")
        is_earlier = goal not in {None, self.goal} and self.has_last_words
        self._first = str(goal) if is_earlier and books.is_ending else None
        self.state.stopping = goal == self.goal or self._first is not None
        books.keep_stops(self.state.stopping, of_last_words=goal == self.goal)

    def export_exact(self) -> list[object]:
        """Plain values for an averager of the same run, which begins nothing anew."""
        return [self.state.stopping, self._first, self._closing]

    def restore_exact(self, values: Sequence[Any]) -> None:
        """Become what `export_exact` gave, after `restore`."""
        self.state.stopping, self._first, self._closing = values

    @property
    def _has_enough(self) -> bool:
        return self.enough is not None and self.samples >= self.enough
