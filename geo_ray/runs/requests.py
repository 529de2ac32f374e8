"""Requests to a run from other processes or threads: change members, or save and stop.

Files in the run's directory, taken in order and removed by the run actor::

    requests/1763912345678901234-4711.json    {"verb": "drain", "region": "eu-west"}
    requests/stop

`Interruption` is the request to stop within a process.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path
from typing import Final, Literal

from pydantic import Field, ValidationError

from geo_ray.base.errors import GeoRayError, InterruptedRunError, RunDirectoryError
from geo_ray.base.files import save_chunks, unwritable
from geo_ray.base.model import StrictModel
from geo_ray.runs.remote import REQUESTS


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


log = logging.getLogger(__name__)

_MAX_REQUEST_BYTES: Final = 4096
Verb = Literal["add", "drain", "remove"]


class MemberRequest(StrictModel):
    """One request.

    ``add`` a region that takes no part; ``drain`` one: it leaves with all it has done; ``remove``
    one at once, with what it had not sent.
    """

    verb: Verb
    region: str
    id: str = Field(default="", exclude=True, description="name of its file, once it is taken")


def request_member_change(run: Path, request: MemberRequest) -> str:
    """Leave a request for whoever drives the run in ``run``.

    Returns:
        Its id: the events that answer it have that as ``request``.

    Raises:
        RunDirectoryError: it cannot be written.
    """
    directory = run / REQUESTS
    try:
        directory.mkdir(exist_ok=True)
    except OSError as error:
        raise unwritable(directory, error) from error
    id = f"{time.time_ns():020d}-{os.getpid()}"
    save_chunks(directory / f"{id}.json", [request.model_dump_json().encode()])
    return id


def take_member_requests(run: Path) -> list[MemberRequest]:
    """The requests since the last call, oldest first; what makes no sense is removed, too."""
    found = []
    for path in sorted((run / REQUESTS).glob("*.json")):
        try:
            with path.open("rb") as file:
                text = file.read(_MAX_REQUEST_BYTES)
            path.unlink()
        except OSError as error:
            log.warning("a request is passed over: %s", error)
            continue
        try:
            request = MemberRequest.model_validate_json(text)
            found.append(request.model_copy(update={"id": path.stem}))
        except ValidationError as error:
            log.warning("%s is no request: %s", path.name, error.errors()[0]["msg"])
    return found


def forget_member_requests(run: Path) -> None:
    """Remove what nobody has taken: it was asked of a run that is over.

    Raises:
        RunDirectoryError: it cannot be removed.
    """
    for path in (run / REQUESTS).glob("*.json"):
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise RunDirectoryError(f"{path} cannot be removed: {error}") from error


_STOP_FILE = "stop"


def request_stop(run: Path) -> None:
    """Ask whoever drives the run in ``run`` to save a checkpoint and stop.

    Raises:
        RunDirectoryError: it cannot be written.
    """
    path = run / REQUESTS / _STOP_FILE
    try:
        path.parent.mkdir(exist_ok=True)
        path.touch()
    except OSError as error:
        raise unwritable(path, error) from error


def take_stop_request(run: Path) -> bool:
    """Whether somebody has asked since the last call."""
    try:
        (run / REQUESTS / _STOP_FILE).unlink()
    except OSError:
        return False
    return True


def forget_stop_request(run: Path) -> None:
    """Remove what was asked of a run that is over.

    Raises:
        RunDirectoryError: it cannot be removed.
    """
    try:
        (run / REQUESTS / _STOP_FILE).unlink(missing_ok=True)
    except OSError as error:
        raise RunDirectoryError(
            f"{run / REQUESTS / _STOP_FILE} cannot be removed: {error}"
        ) from error
