"""When a region's first worker evaluates: every so many steps, or rows of all regions together."""

from __future__ import annotations

from dataclasses import dataclass

from geo_ray.training.server.plan import ServerPlan


@dataclass(slots=True)
class EvalTimes:
    """The next evaluation of a region.

    Attributes:
        every: region steps between two; 0 for none.
        rows: instead, rows of all regions together between two.
    """

    every: int
    rows: int | None
    _next: int = 0
    _open: bool = False  # one was asked for, and its result was not told yet
    _owed: bool = False

    @classmethod
    def of(cls, plan: ServerPlan) -> EvalTimes:
        """As a region's plan says; not at the start."""
        every = plan.eval_every * plan.steps_per_round
        return cls(every, plan.eval_rows, every if plan.eval_rows is None else 0)

    def is_due(self, version: int, seen: int) -> bool:
        """Whether to evaluate now; if so, the next one is later.

        Args:
            version: steps that the region has applied.
            seen: rows that the averager has taken in.
        """
        self._open = self._pass(version, seen) or self._owed
        self._owed = False
        return self._open

    def told(self) -> None:
        """The result of the newest one is there."""
        self._open = False

    def lost(self) -> None:
        """Who evaluated is gone; what was not told is owed by whoever comes."""
        self._owed |= self._open
        self._open = False

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
