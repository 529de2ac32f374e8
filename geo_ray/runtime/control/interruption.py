"""A wish from outside that a run saves a checkpoint and ends."""

from __future__ import annotations

import threading

from geo_ray.errors import GeoRayError, InterruptedRunError


class Interruption:
    """Any thread may ask; the first one that does says why."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._why: GeoRayError | None = None

    @property
    def why(self) -> GeoRayError:
        """What the run ends with."""
        return self._why or InterruptedRunError("the run was interrupted")

    def is_set(self) -> bool:
        """Whether somebody has asked."""
        return self._event.is_set()

    def wait(self, longest_s: float) -> bool:
        """Wait until somebody asks, for at most so long; say whether somebody has."""
        return self._event.wait(longest_s)

    def set(self, why: GeoRayError | None = None) -> None:
        """Ask.

        Args:
            why: what the run ends with; None: it was interrupted.
        """
        if not self._event.is_set():
            self._why = why
        self._event.set()
