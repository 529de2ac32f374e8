"""How often something is started again: so many times in any stretch of time. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


@dataclass(slots=True)
class Restarts:
    """See the module's docstring.

    Attributes:
        most: times in a window.
        window_s: its length; None: the whole run.
        key: of the configuration, that says how often.
    """

    most: int
    window_s: float | None
    key: str = "train.max_worker_restarts"
    _at_s: deque[float] = field(default_factory=deque)

    def take(self, now_s: float) -> bool:
        """Whether there may be one more now; if so, it is counted."""
        while self._at_s and self.window_s is not None and now_s - self._at_s[0] >= self.window_s:
            self._at_s.popleft()
        if len(self._at_s) >= self.most:
            return False
        self._at_s.append(now_s)
        return True

    def __str__(self) -> str:
        """The limit, as the configuration has it."""
        within = "" if self.window_s is None else f" in {self.window_s:g} s"
        return f"{self.key} = {self.most}{within}"
