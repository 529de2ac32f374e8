"""Asks the runs of a name to save and stop, in whichever directories they are.

Each is asked once for each driver that it has: who submits it again is asked again. A run that
cannot be read or asked does not keep the others from being asked.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

from geo_ray.errors import GeoRayError
from geo_ray.job.status import StatusReader
from geo_ray.runtime.autoscaler.named_run import runs_named
from geo_ray.runtime.control import stop_requests

_NO_DRIVER: Final = -1
_log = logging.getLogger(__name__)


class RunStops:
    """See the module.

    Args:
        path: of the first run of the name.
        since_unix_s: runs to which nobody has written since then are over.
    """

    def __init__(self, path: Path, since_unix_s: float) -> None:
        self._path, self._since_unix_s = path, since_unix_s
        self._readers: dict[Path, StatusReader] = {}
        self._asked: dict[Path, int] = {}  # the epoch of the driver that was asked

    def ask(self) -> list[Path]:
        """Ask those that go on, or may, and were not asked yet; return these."""
        asked = []
        for path in self._there():
            try:
                epoch = self._going(path)
                if epoch is None or self._asked.get(path) == epoch:
                    continue
                stop_requests.ask(path)
            except Exception as error:  # of this run alone, whatever it is
                _log.warning("the run in %s is not stopped: %s", path, error)
                continue
            self._asked[path] = epoch
            asked.append(path)
        return asked

    def any_going(self) -> bool:
        """Whether one that was asked has not ended, or may not have."""
        for path in self._asked:
            try:
                if self._readers[path].read().is_going is not False:
                    return True
            except Exception as error:  # as above
                _log.warning("how the run in %s stands is not known: %s", path, error)
        return False

    def _there(self) -> list[Path]:
        try:
            return [found.path for found in runs_named(self._path, self._since_unix_s)]
        except GeoRayError as error:
            _log.warning("runs in %s are not stopped: %s", self._path.parent, error.message)
            return []

    def _going(self, path: Path) -> int | None:
        """Return the epoch of a run's driver; None: it is over, or a run of another name.

        Whether a driver on another computer lives takes a while to see: till then it may.
        """
        if path not in self._readers:
            self._readers[path] = StatusReader(path)
        reader = self._readers[path]
        if reader.config.name != self._path.name:
            return None
        status = reader.read()
        if status.is_going is False:
            return None
        return _NO_DRIVER if status.driver is None else status.driver.epoch
