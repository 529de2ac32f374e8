"""Whether a process sees the run's directory, told by a file that its driver has written there."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from geo_ray.util.atomic_file import save_text

SIGHT_FILE: Final = "run_id"


def show(run_dir: Path, run_id: str) -> None:
    """Let those who see the directory find that it is this run's, and not one of the same name.

    Raises:
        RunDirectoryError: it cannot be written.
    """
    save_text(run_dir / SIGHT_FILE, run_id)


def sees(run_dir: Path, run_id: str) -> bool:
    """Whether this process sees the directory that the driver of the run sees."""
    try:
        return (run_dir / SIGHT_FILE).read_text() == run_id
    except (OSError, UnicodeDecodeError):
        return False
