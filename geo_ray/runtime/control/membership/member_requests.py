"""What users ask of a run's members, from any terminal: files in the run's directory.

    requests/1763912345678901234-4711.json    {"verb": "drain", "region": "eu-west"}

Whoever drives the run takes them in their order, and removes each as it does.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Final, Literal

from pydantic import Field, ValidationError

from geo_ray.config.base import StrictModel
from geo_ray.errors import RunDirectoryError
from geo_ray.job.far.copy import REQUESTS as REQUESTS
from geo_ray.util.atomic_file import save_chunks, unwritable

log = logging.getLogger(__name__)

_MOST_BYTES: Final = 4096
Verb = Literal["add", "drain", "remove"]


class MemberRequest(StrictModel):
    """One request.

    ``add`` a region that takes no part; ``drain`` one: it leaves with all it has done; ``remove``
    one at once, with what it had not sent.
    """

    verb: Verb
    region: str
    id: str = Field(default="", exclude=True, description="name of its file, once it is taken")


def ask(run: Path, request: MemberRequest) -> str:
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


def take(run: Path) -> list[MemberRequest]:
    """The requests since the last call, oldest first; what makes no sense is removed, too."""
    found = []
    for path in sorted((run / REQUESTS).glob("*.json")):
        try:
            with path.open("rb") as file:
                text = file.read(_MOST_BYTES)
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


def forget(run: Path) -> None:
    """Remove what nobody has taken: it was asked of a run that is over.

    Raises:
        RunDirectoryError: it cannot be removed.
    """
    for path in (run / REQUESTS).glob("*.json"):
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise RunDirectoryError(f"{path} cannot be removed: {error}") from error
