"""What ends a bridge's work: kept for the controller, and told at once to whoever waits."""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Callable

from geo_ray.errors import AveragerFailedError, GeoRayError
from geo_ray.util.blame import summary

log = logging.getLogger(__name__)

Hear = Callable[[GeoRayError], None]


class BridgeFailure:
    """The first failure of a bridge; those that follow from it are logged only.

    A message counts as received before it is handled. So an error in a handler, or in a thread that
    nobody waits for, would be lost, and with it the answer to an update: here it ends the run.

    Args:
        region: of the bridge.
    """

    def __init__(self, region: str) -> None:
        self._region = region
        self._lock = threading.Lock()
        self._hearers: list[Hear] = []
        self._first: GeoRayError | None = None

    @property
    def first(self) -> GeoRayError | None:
        """The failure; None while all goes well."""
        return self._first

    def listen(self, hear: Hear) -> None:
        """Let ``hear`` be told: later, or now if there is a failure already."""
        with self._lock:
            self._hearers.append(hear)
            first = self._first
        if first is not None:
            hear(first)

    def note(self, error: Exception, doing: str) -> GeoRayError:
        """Something failed.

        Args:
            error: an error of geo_ray's tree as it is; any other becomes one that names its line.
            doing: what failed, for people.

        Returns:
            The typed error.
        """
        typed = self._typed(error, doing)
        if typed is not error:
            log.error("%s", typed.message, exc_info=error)
        with self._lock:
            if self._first is not None:
                return typed
            self._first = typed
            hearers = list(self._hearers)
        log.error("the bridge of region '%s' failed: %s", self._region, typed)
        for hear in hearers:
            hear(typed)
        return typed

    def _typed(self, error: Exception, doing: str) -> GeoRayError:
        if isinstance(error, GeoRayError):
            return error
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return AveragerFailedError(
            f"the bridge of region '{self._region}' failed at {doing}: {summary(error)} "
            f"({frame.filename}:{frame.lineno})"
        )
