"""Whether the holder of a lease lives, for who only looks. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from geo_ray.lease.claim import PATIENCE
from geo_ray.lease.record import LeaseRecord


@dataclass(slots=True)
class LeaseWatch:
    """Looks at one lease again and again, and judges by its own clock."""

    _newest: LeaseRecord | None = None
    _since_s: float = 0.0
    _is_heard: bool = False

    def see(self, record: LeaseRecord, now_s: float) -> bool | None:
        """Judge what was just read.

        Args:
            record: the lease.
            now_s: of the own clock, read after ``record`` was.

        Returns:
            Whether its holder was heard in the time that it lives; None if that is not known yet.
        """
        if record != self._newest:
            self._is_heard = self._newest is not None
            self._newest, self._since_s = record, now_s
        if self.left_s(now_s) <= 0:
            return False
        return True if self._is_heard else None

    def left_s(self, now_s: float) -> float:
        """Seconds until the holder counts as silent, if nothing changes."""
        if self._newest is None:
            return 0.0
        return self._since_s + PATIENCE * self._newest.lives_s - now_s
