"""When a worker of a region evaluates: every so many steps, or rows of all regions together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from geo_ray.training.server.plan import ServerPlan


@dataclass(slots=True)
class EvalTimes:
    """The next evaluation of a region.

    Attributes:
        every: region steps between two; 0 for none.
        rows: instead, rows of all regions together between two.
        by: the worker that was asked for the newest one.
        last: what has become of the one after the end.
    """

    every: int
    rows: int | None
    by: int | None = None
    last: Literal["owed", "open", "told"] = "owed"
    _next: int = 0
    _open: bool = False  # one was asked for, and its result was not told yet
    _owed: bool = False

    @classmethod
    def of(cls, plan: ServerPlan) -> EvalTimes:
        """As a region's plan says; not at the start."""
        every = plan.eval_every * plan.steps_per_round
        return cls(every, plan.eval_rows, _next=every if plan.eval_rows is None else 0)

    @property
    def is_owed(self) -> bool:
        """Whether one was asked for, and whoever made it is gone."""
        return self._owed

    def is_due(self, version: int, seen: int) -> bool:
        """Whether to evaluate now; if so, the next one is later.

        Args:
            version: steps that the region has applied.
            seen: rows that the averager has taken in.
        """
        self._open = self._pass(version, seen) or self._owed
        self._owed = False
        return self._open

    def ask_last(self, worker: int) -> bool:
        """Whether ``worker`` is to make the one after the end: nobody else does, or has."""
        if self.last != "owed":
            return False
        self.by, self.last = worker, "open"
        return True

    def skip_last(self) -> None:
        """There is none after the end."""
        self.last = "told"

    def told(self, *, final: bool = False) -> None:
        """The result of the newest one is there, or of the one after the end."""
        self._open = False
        if final:
            self.last = "told"

    def lost(self, worker: int) -> None:
        """A worker is gone; what it was asked for and did not tell is owed by whoever comes."""
        if worker != self.by:
            return
        self._owed |= self._open
        self._open = False
        if self.last == "open":
            self.last = "owed"

    def _pass(self, version: int, seen: int) -> bool:
        """Whether a time to evaluate has been reached."""
        if self.rows is not None:
            due = seen // self.rows > self._next
            self._next = seen // self.rows
            return due
        if not self.every or version < self._next:
            return False
        self._next = (version // self.every + 1) * self.every
        return True

    def resume(self, version: int) -> None:
        """Go on at ``version``; what is due there has not been done."""
        if self.rows is None and self.every:
            self._next = -(-max(version, 1) // self.every) * self.every
