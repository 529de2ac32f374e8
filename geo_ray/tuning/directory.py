"""The directory of a search: where it is, and whether a search may begin or go on there.

Imports no Ray, so that a wrong directory is reported before Ray is loaded.
"""

from __future__ import annotations

from pathlib import Path

from geo_ray.config.experiment import Experiment
from geo_ray.errors import TuningDirectoryError
from geo_ray.job import rundir
from geo_ray.tuning.config import TuningConfig


def directory_of(config: TuningConfig, start: Experiment, out: Path | None) -> Path:
    """Return the directory of a search.

    Args:
        config: the search.
        start: its base.
        out: what the user named; None: the default, ``runs/tune-NAME``.
    """
    return Path(out or rundir.local_root(start) / f"tune-{config.name}").absolute()


def check_directory(out: Path, *, resume: bool) -> None:
    """Check that a new search has a new directory, and one that is resumed an existing one.

    Raises:
        TuningDirectoryError: it is the other way round.
    """
    if resume and not out.exists():
        raise TuningDirectoryError(
            f"there is no search in {out} to go on with",
            fix="Name the directory of one with --out, or leave out --resume to begin it.",
        )
    if not resume and out.exists():
        raise TuningDirectoryError(f"{out} exists")
