"""Decides when a process of a run counts as hung: first it is named, later it is replaced. Pure.

A worker is late if its step takes far longer than usual. The limits follow from the measured time
of steps. A worker's first step and an evaluation have no usual time, so they get ten times as long.
A worker that answers that it waits for its rows is named, and not replaced: another one would wait
for the same store. Servers and bridges answer while they work: one that does not is named here,
and counts as lost after the time that `Polls` has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from geo_ray.training.server.work_times import READING, Computing

NAMED_S: Final = 10.0
REPLACED_S: Final = 60.0
_NAMED_TIMES: Final = 3.0
_REPLACED_TIMES: Final = 20.0
_UNUSUAL: Final = 10.0
_OF_TIMEOUT: Final = 0.8  # others that wait give up at `train.step_timeout_s`


@dataclass(frozen=True, slots=True)
class Hangs:
    """The limits of a run.

    Attributes:
        step_timeout_s: `train.step_timeout_s` of the run.
    """

    step_timeout_s: float | None = None

    def judge(
        self, computing: Computing, usual_s: float | None, doing: str | None
    ) -> Literal["fine", "named", "replaced"]:
        """What to do about a worker.

        Args:
            computing: what its server says of it.
            usual_s: the usual time of a step there.
            doing: what it says of itself; None: it has not answered lately, or was not asked.
        """
        if computing.for_s < self.named_after_s(usual_s, is_usual=computing.is_usual):
            return "fine"
        late = computing.for_s >= self.replaced_after_s(usual_s, is_usual=computing.is_usual)
        return "replaced" if late and doing != READING else "named"

    def named_after_s(self, usual_s: float | None, *, is_usual: bool) -> float:
        """After how many seconds of a step a worker is named."""
        least_s = max(NAMED_S, _NAMED_TIMES * (usual_s or 0.0))
        return least_s if is_usual else _UNUSUAL * least_s

    def replaced_after_s(self, usual_s: float | None, *, is_usual: bool) -> float:
        """After how many seconds of a step a worker is replaced."""
        limit_s = max(REPLACED_S, _REPLACED_TIMES * (usual_s or 0.0))
        if not is_usual:
            return _UNUSUAL * limit_s
        if self.step_timeout_s is not None:
            return min(limit_s, _OF_TIMEOUT * self.step_timeout_s)
        return limit_s
