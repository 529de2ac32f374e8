"""Requests to a run from other processes or threads: change members, or save and stop.

Requests are files in the run's directory, which the run actor processes in order and removes::

    requests/1763912345678901234-4711.json    {"verb": "drain", "region": "eu-west"}
    requests/stop

`Interruption` is a stop request within a process.
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
    """A stop request; any thread may set it, and the first one determines the reason."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._why: GeoRayError | None = None

    @property
    def why(self) -> GeoRayError:
        """Return the error with which the run ends."""
        return self._why or InterruptedRunError("the run was interrupted")

    def is_set(self) -> bool:
        """Return whether a stop was requested."""
        return self._event.is_set()

    def wait(self, longest_s: float) -> bool:
        """Wait for a request until the timeout; return whether there is one."""
        return self._event.wait(longest_s)

    def set(self, why: GeoRayError | None = None) -> None:
        """Request the stop.

        Args:
            why: error with which the run ends; None: interrupted.
        """
        if not self._event.is_set():
            self._why = why
        self._event.set()


log = logging.getLogger(__name__)

_MAX_REQUEST_BYTES: Final = 4096
Verb = Literal["add", "drain", "remove"]


class MemberRequest(StrictModel):
    """A request.

    ``add`` a region that is not a member; ``drain`` a region, which leaves after all its work has
    been exchanged; ``remove`` a region at once, without its unsent updates.
    """

    verb: Verb
    region: str
    id: str = Field(default="", exclude=True, description="name of its file, once read")


def request_member_change(run: Path, request: MemberRequest) -> str:
    """Store a request for the run actor of the run in ``run``.

    Returns:
        Its id, which the answering events have as ``request``.

    Raises:
        RunDirectoryError: the request cannot be written.
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
    """Return the new requests, oldest first; invalid ones are removed as well."""
    found = []
    for path in sorted((run / REQUESTS).glob("*.json")):
        try:
            with path.open("rb") as file:
                text = file.read(_MAX_REQUEST_BYTES)
            path.unlink()
        except OSError as error:
            log.warning("a request is ignored: %s", error)
            continue
        try:
            request = MemberRequest.model_validate_json(text)
            found.append(request.model_copy(update={"id": path.stem}))
        except ValidationError as error:
            log.warning("%s is not a request: %s", path.name, error.errors()[0]["msg"])
    return found


def forget_member_requests(run: Path) -> None:
    """Remove unprocessed requests of an ended run.

    Raises:
        RunDirectoryError: a file cannot be removed.
    """
    for path in (run / REQUESTS).glob("*.json"):
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise RunDirectoryError(f"{path} cannot be removed: {error}") from error


_STOP_FILE = "stop"


def request_stop(run: Path) -> None:
    """Request that the run actor of the run in ``run`` saves a checkpoint and stops.

    Raises:
        RunDirectoryError: the request cannot be written.
    """
    path = run / REQUESTS / _STOP_FILE
    try:
        path.parent.mkdir(exist_ok=True)
        path.touch()
    except OSError as error:
        raise unwritable(path, error) from error


def take_stop_request(run: Path) -> bool:
    """Return whether a stop was requested since the last call."""
    try:
        (run / REQUESTS / _STOP_FILE).unlink()
    except OSError:
        return False
    return True


def forget_stop_request(run: Path) -> None:
    """Remove a stop request of an ended run.

    Raises:
        RunDirectoryError: the file cannot be removed.
    """
    try:
        (run / REQUESTS / _STOP_FILE).unlink(missing_ok=True)
    except OSError as error:
        raise RunDirectoryError(
            f"{run / REQUESTS / _STOP_FILE} cannot be removed: {error}"
        ) from error
