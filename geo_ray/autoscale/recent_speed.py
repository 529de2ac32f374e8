"""How long the rest of a job takes with all its machines, from the steps that it has made.

Planned speeds are predictions. While machines are missing the job is slower, which says nothing of
what it could do; so the fastest of the recent looks counts, and the plan until there are any.
"""

from __future__ import annotations

from collections import deque
from typing import Final

_LOOKS: Final = 64
_LEAST_S: Final = 30.0


class RecentSpeed:
    """Steps over time of one job.

    Args:
        planned_step_s: seconds of a step as planned.
    """

    def __init__(self, planned_step_s: float) -> None:
        self._planned_step_s = planned_step_s
        self._last: tuple[float, float] | None = None
        self._step_s: deque[float] = deque(maxlen=_LOOKS)

    def see(self, step: float, now_s: float) -> None:
        """Take in how many steps are done; fewer than before after a resume."""
        if self._last is None or step < self._last[0]:
            self._last = (step, now_s)
            return
        before, since_s = self._last
        if now_s - since_s >= _LEAST_S and step > before:
            self._step_s.append((now_s - since_s) / (step - before))
            self._last = (step, now_s)

    @property
    def step_s(self) -> float:
        """Seconds of a step with all machines."""
        return min(self._step_s, default=self._planned_step_s)

    def left_s(self, steps_left: float) -> float:
        """Return the seconds that some steps take."""
        return max(0.0, steps_left) * self.step_s
