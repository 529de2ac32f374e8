"""What is done about a Ray head that does not answer. Pure.

Ray ends every process of a node that has not reached the head for a while; until then actors that
know each other go on. So the run has to be saved before, and a head that comes back is no event.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

_VARIABLE: Final = "RAY_gcs_rpc_server_reconnect_timeout_s"
_RAYS_OWN_S: Final = 60.0
_TOLD_AFTER_S: Final = 4.0
_STOPS_AT: Final = 0.5


class HeadState(Enum):
    """How it stands with the head."""

    THERE = "there"
    SILENT = "silent"
    """It may come back."""
    GONE = "gone"
    """The run has to be saved now."""


@dataclass(slots=True)
class HeadWatch:
    """Judges what a look at the head, every few seconds, has found.

    Attributes:
        patience_s: after so many seconds Ray ends its processes.
    """

    patience_s: float
    _answered_s: float | None = None

    @property
    def stops_after_s(self) -> float:
        """Seconds of silence after which the run is saved and ended."""
        return _STOPS_AT * self.patience_s

    def see(self, now_s: float, *, answers: bool) -> HeadState:
        """Judge.

        Args:
            now_s: of the own clock.
            answers: whether the head has answered just now.
        """
        if answers or self._answered_s is None:
            self._answered_s = now_s
            return HeadState.THERE
        silent_s = now_s - self._answered_s
        if silent_s >= self.stops_after_s:
            return HeadState.GONE
        return HeadState.SILENT if silent_s >= _TOLD_AFTER_S else HeadState.THERE


def patience_s(environ: Mapping[str, str] | None = None) -> float:
    """For how long Ray waits for a head, as this node was told."""
    text = (os.environ if environ is None else environ).get(_VARIABLE, "")
    try:
        return max(1.0, float(text))
    except ValueError:
        return _RAYS_OWN_S
