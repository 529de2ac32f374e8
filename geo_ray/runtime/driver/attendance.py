"""When a run that nobody watches ends by itself. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Attendance:
    """Whether somebody watches a run.

    Attributes:
        longest_s: for how long nobody may watch; None: for ever.
        heard_s: when somebody was last heard.
    """

    longest_s: float | None
    heard_s: float

    def hear(self, now_s: float) -> None:
        """Somebody watches."""
        self.heard_s = max(self.heard_s, now_s)

    def is_over(self, now_s: float) -> bool:
        """Whether nobody has watched for too long."""
        return self.longest_s is not None and now_s - self.heard_s >= self.longest_s
