"""The wish that a run stops, from any terminal: a file in the run's directory."""

from __future__ import annotations

from pathlib import Path

from geo_ray.errors import RunDirectoryError
from geo_ray.runtime.control.membership.member_requests import REQUESTS
from geo_ray.util.atomic_file import unwritable

_FILE = "stop"


def ask(run: Path) -> None:
    """Ask whoever drives the run in ``run`` to save a checkpoint and stop.

    Raises:
        RunDirectoryError: it cannot be written.
    """
    path = run / REQUESTS / _FILE
    try:
        path.parent.mkdir(exist_ok=True)
        path.touch()
    except OSError as error:
        raise unwritable(path, error) from error


def take(run: Path) -> bool:
    """Whether somebody has asked since the last call."""
    try:
        (run / REQUESTS / _FILE).unlink()
    except OSError:
        return False
    return True


def forget(run: Path) -> None:
    """Remove what was asked of a run that is over.

    Raises:
        RunDirectoryError: it cannot be removed.
    """
    try:
        (run / REQUESTS / _FILE).unlink(missing_ok=True)
    except OSError as error:
        raise RunDirectoryError(f"{run / REQUESTS / _FILE} cannot be removed: {error}") from error
