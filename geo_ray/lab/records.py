"""The directories of the labs of this machine, and the removal of those without owner."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from geo_ray.base.errors import LabError, LabUnavailableError, LabUnknownError
from geo_ray.lab.relay import CONTROL_FILE
from geo_ray.lab.relay_client import RelayClient
from geo_ray.lab.teardown import is_alive, read_record, take_down

BASE: Final = Path("/run/geo_ray_lab")
_QUIT_S: Final = 40.0
_YOUNG_S: Final = 60.0


def new_lab() -> tuple[str, Path]:
    """A fresh lab id and its private directory."""
    while True:
        lab_id = secrets.token_hex(3)
        directory = BASE / lab_id
        try:
            BASE.mkdir(mode=0o700, exist_ok=True)
            directory.mkdir(mode=0o700)
        except (FileExistsError, FileNotFoundError):  # another lab's end has removed BASE
            continue
        return lab_id, directory


def labs() -> dict[str, dict[str, Any]]:
    """Return the records of all labs of this machine by id, including those without a relay.

    Raises:
        LabUnavailableError: this user may not read them.
    """
    try:
        found = sorted(BASE.iterdir()) if BASE.is_dir() else []
    except PermissionError as error:
        raise LabUnavailableError(f"labs are root's: {error}") from error
    return {path.name: read_record(path) for path in found if path.is_dir()}


def find(lab_id: str | None) -> str:
    """Return the id of the lab that is meant.

    Args:
        lab_id: as given by the user; None means the only one there is.

    Raises:
        LabUnknownError: there is no such lab, or none is named and there are several.
    """
    running = [name for name, record in labs().items() if is_alive(record.get("relay"))]
    if lab_id is None and len(running) == 1:
        return running[0]
    if lab_id in running:
        return str(lab_id)
    named = "no lab is up" if not running else f"running labs: {', '.join(running)}"
    wanted = "" if lab_id is None else f"there is no lab '{lab_id}'; "
    raise LabUnknownError(f"{wanted}{named}")


def down(lab_id: str) -> None:
    """Take down the remains of a lab."""
    directory = BASE / lab_id
    record = read_record(directory)
    if is_alive(record.get("relay")):
        with contextlib.suppress(LabError):
            RelayClient(directory / CONTROL_FILE).ask("quit")
        deadline_s = time.monotonic() + _QUIT_S
        while is_alive(record["relay"]) and time.monotonic() < deadline_s:
            time.sleep(0.01)
    take_down(directory)


def reap() -> list[str]:
    """Take down labs whose relay and owner have ended.

    Returns:
        The ids of these labs.
    """
    reaped = []
    for lab_id, record in labs().items():
        if not is_alive(record.get("relay")) and not is_alive(record.get("owner")):
            if not record and _is_young(BASE / lab_id):
                continue  # another process is making this lab now
            take_down(BASE / lab_id)
            reaped.append(lab_id)
    return reaped


@contextmanager
def locked() -> Iterator[None]:
    """Hold the lock that all labs of this machine share, for changes of the host itself.

    The caller has a lab: `BASE` exists as long as any lab does.
    """
    file = os.open(BASE, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def _is_young(directory: Path) -> bool:
    try:
        return time.time() - directory.stat().st_mtime < _YOUNG_S
    except OSError:
        return False
