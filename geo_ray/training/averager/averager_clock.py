"""The averager's own clock, which goes on after a resume from where the checkpoint was taken."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class AveragerClock:
    """See the module's docstring."""

    _ahead_s: float = 0.0  # of its host's clock
    _saved_s: float | None = None  # at the cut that it was restored from

    def own_s(self, host_s: float) -> float:
        """The time of the present event, which is at ``host_s`` of its host's clock."""
        if self._saved_s is not None:
            self._ahead_s, self._saved_s = self._saved_s - host_s, None
        return host_s + self._ahead_s

    def host_s(self, own_s: float | None) -> float | None:
        """A time of this clock by that of its host; None of None."""
        return None if own_s is None else own_s - self._ahead_s

    def restore(self, saved_s: object) -> None:
        """Go on from what was exported, at the next event."""
        self._saved_s = None if saved_s is None else float(str(saved_s))
