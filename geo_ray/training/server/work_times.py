"""Measures how long each worker of a region has computed what it was given. Pure.

The usual time is the median over the newest steps. A worker's first step, which may compile or
fetch, and steps with an evaluation before them are no usual ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Final

READING: Final = "reading"
"""What a worker says of itself while it waits for its rows."""
_NEWEST: Final = 32


@dataclass(frozen=True, slots=True)
class Computing:
    """What one worker is doing.

    Attributes:
        epoch: its incarnation.
        for_s: seconds since it was given rows.
        is_usual: whether its step is to take the usual time.
    """

    epoch: int
    for_s: float
    is_usual: bool


@dataclass(slots=True)
class _Work:
    epoch: int
    began_s: float
    is_usual: bool
    evaluates: bool


class WorkTimes:
    """See the module's docstring. Times are seconds of one clock."""

    def __init__(self) -> None:
        self._open: dict[int, _Work] = {}
        self._epochs: dict[int, int] = {}  # of workers that have made a step
        self._took_s: deque[float] = deque(maxlen=_NEWEST)

    def begin(self, worker: int, epoch: int, now_s: float, *, evaluates: bool) -> None:
        """A worker was given rows.

        Args:
            worker: its rank.
            epoch: its incarnation.
            now_s: the present time.
            evaluates: whether it evaluates first.
        """
        is_first = self._epochs.get(worker) != epoch
        self._open[worker] = _Work(epoch, now_s, not (is_first or evaluates), evaluates)

    def evaluated(self, worker: int, now_s: float) -> None:
        """It has evaluated; its step begins now."""
        work = self._open.get(worker)
        if work is not None and work.evaluates:
            work.began_s, work.evaluates = now_s, False
            work.is_usual = self._epochs.get(worker) == work.epoch

    def end(self, worker: int, now_s: float) -> None:
        """It has pushed what it computed."""
        work = self._open.pop(worker, None)
        if work is None:
            return
        self._epochs[worker] = work.epoch
        if work.is_usual:
            self._took_s.append(now_s - work.began_s)

    def forget(self, worker: int) -> None:
        """It is gone, or waits for others."""
        self._open.pop(worker, None)

    @property
    def usual_s(self) -> float | None:
        """The usual time of a step; None until one was measured."""
        return median(self._took_s) if self._took_s else None

    def computing(self, now_s: float) -> Mapping[int, Computing]:
        """The workers that compute, by rank."""
        return {
            worker: Computing(work.epoch, now_s - work.began_s, work.is_usual)
            for worker, work in self._open.items()
        }
