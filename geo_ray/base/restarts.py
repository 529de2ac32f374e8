"""Limit of restarts within a time window. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


@dataclass(slots=True)
class Restarts:
    """Restart limit; see the module's docstring.

    Attributes:
        most: maximum restarts in a window.
        window_s: length of the window; None: the whole run.
        key: key of the configuration.
    """

    most: int
    window_s: float | None
    key: str = "train.max_worker_restarts"
    _at_s: deque[float] = field(default_factory=deque)

    def take(self, now_s: float) -> bool:
        """Return whether another restart is allowed now; if so, count it."""
        if not self.is_left(now_s):
            return False
        self._at_s.append(now_s)
        return True

    def is_left(self, now_s: float) -> bool:
        """Return whether another restart is allowed now."""
        while self._at_s and self.window_s is not None and now_s - self._at_s[0] >= self.window_s:
            self._at_s.popleft()
        return len(self._at_s) < self.most

    def __str__(self) -> str:
        """The limit, as in the configuration."""
        within = "" if self.window_s is None else f" in {self.window_s:g} s"
        return f"{self.key} = {self.most}{within}"
