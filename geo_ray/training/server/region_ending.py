"""When a region's run ends, and which of its requests is the last word.

The last word says all that is left to say, and pays what codecs owe. So a request that could not
be answered before it only makes it later: at the last step what is due goes with the last word.
Where regions never stand still, that is also true of what would be under way by then.

A round that stands still has no exchange after the last step if that ended a round. Then the
exchange of that round is the last word, if codecs owe something. Regions that do not know their
last step (they end together, or at a target) are told one round before: the run is *closing*.

When members are about to change, all regions say a last word that is none: they come to a *border*
(`geo_ray.training.membership.border`), and go on.

A run that is resumed with another goal first comes to the end that its regions knew: some may have
said their last word there already, and only last words are answered together. Then it goes on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from geo_ray.training.server.plan import ServerPlan


@dataclass(slots=True)
class RegionEnding:
    """See the module's docstring.

    Attributes:
        plan: what the server is to do.
        stopped: whether it was told to finish.
        closing: whether the next request is to be the last word.
    """

    plan: ServerPlan
    stopped: bool = False
    closing: bool = False
    _ends: list[float] = field(init=False)  # steps: of goals before this one, then of this one
    _goes_on: bool = False  # what it is told to finish may be a goal before this one

    def __post_init__(self) -> None:
        self._ends = [self._own_end]

    @property
    def total_steps(self) -> float:
        """Steps after which there is a last word; infinite while that is not known."""
        return self._ends[0]

    @property
    def _own_end(self) -> float:
        steps = self.plan.steps
        return math.inf if steps is None else steps * self.plan.steps_per_round

    def is_over(self, version: int) -> bool:
        """Whether ``version`` steps are all."""
        return version >= self.total_steps

    def stop(self, version: int, *, computing: bool) -> None:
        """Finish after ``version`` steps, or after one more if that is being computed."""
        self._ends[0] = min(self.total_steps, version + (1 if computing else 0))
        self.stopped = True

    def gather(self, version: int, sent_at: int, *, computing: bool) -> None:
        """Come to a border: as `stop`, and then go on.

        Where rounds have the same steps in all regions, after those: they are to stay in step.

        Args:
            version: steps applied.
            sent_at: steps applied before the newest request.
            computing: whether a step is being computed.
        """
        end = version + (1 if computing else 0)
        if self.plan.round_steps is not None:
            end = max(version, sent_at + self.plan.round_steps)
        if not self.stopped and not self.closing and end < self.total_steps:
            self._ends.insert(0, end)
            self.stopped = self._goes_on = True

    def passed(self, version: int, *, told: bool) -> bool:
        """The last word is said and answered, or there was none to say; whether that was all.

        Args:
            version: steps applied.
            told: whether regions are still told to finish.
        """
        if not self._goes_on or told:
            return True
        self.stopped = False
        self._ends = [end for end in self._ends[1:] if end > version] or [self._own_end]
        self._goes_on = len(self._ends) > 1
        return self.is_over(version)

    def may_speak(self, version: int, step_s: float, exchange_s: float) -> bool:
        """Whether there may be a request, after ``version`` steps, beside the last word.

        Args:
            version: steps applied.
            step_s: seconds of one step of late.
            exchange_s: seconds of the last exchange; 0 if there was none.
        """
        if self.stopped:  # all regions send their final update next, or rounds would not match
            return False
        if not self.plan.has_last_word:
            return True
        pushes_at_once = 1 if self.plan.mode == "sync" else self.plan.num_workers
        left_s = (self.total_steps - version) * step_s / pushes_at_once
        too_late = self.plan.never_waits and left_s < exchange_s
        return not (self.is_over(version) or too_late)

    def is_last_word(self, version: int) -> bool:
        """Whether a round's request after ``version`` steps is the last word."""
        return self.plan.last_round_is_last_word and (self.closing or self.is_over(version))

    def has_more(self, version: int) -> bool:
        """Whether there are steps left, as far as is known."""
        return not self.stopped and not self.is_over(version)

    def export(self) -> dict[str, object]:
        """Plain values for a checkpoint."""
        goal, steps = self.plan.goal, [end for end in self._ends if math.isfinite(end)]
        return {
            "stops": [goal, self.total_steps] if self.stopped else None,
            "closes": goal if self.closing else None,
            "ends": {"goal": goal, "steps": steps, "goes_on": self._goes_on},
        }

    def restore(self, data: Mapping[str, object], version: int, *, done: bool) -> None:
        """Become what `export` saved; a run with another goal now goes on after the end it had.

        Args:
            data: the plain values.
            version: steps applied.
            done: whether the region had ended.
        """
        is_same = False
        known: list[float] = []
        ends = data.get("ends")
        if isinstance(ends, Mapping):
            is_same = ends["goal"] == self.plan.goal
            known = [float(end) for end in ends["steps"]]
        own_end, stops = self._own_end, data.get("stops")
        kept = {end for end in known if end < own_end and not (done and end <= version)}
        if isinstance(stops, list):
            for_this = stops[0] == self.plan.goal
            self.stopped = for_this or (self.plan.has_last_word and not done)
            kept |= {stops[1]} if self.stopped and stops[1] < own_end else set()
        self._ends = [*sorted(kept), own_end]
        self.closing = data.get("closes") == self.plan.goal
        was_to_go_on = isinstance(ends, Mapping) and bool(ends["goes_on"])
        self._goes_on = was_to_go_on if is_same else (not done or len(kept) > 0)
