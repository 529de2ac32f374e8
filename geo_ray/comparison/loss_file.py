"""The file that a loss is measured into: nothing that it has is lost before there is better."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from geo_ray.comparison.loss_run import LossTask, is_of
from geo_ray.errors import ProfileError
from geo_ray.planning.loss_profile import LossProfile, load_loss_profile
from geo_ray.planning.profile import save_profile


@dataclass(frozen=True, slots=True)
class LossFile:
    """Where one measurement goes.

    Attributes:
        path: the file.
        known: what an earlier, perhaps interrupted measurement of the very same has.
        writes: what is written on the way: the file itself, or one beside it while there is a
            measurement of something else, or an older one, that plans may still go by.
    """

    path: Path
    known: LossProfile | None
    writes: Path

    def keep(self, found: LossProfile) -> None:
        """Write what is measured so far."""
        save_profile(found, self.writes)

    def finish(self) -> None:
        """Put the measurement, which is complete, into its place."""
        if self.writes != self.path and self.writes.exists():
            self.writes.replace(self.path)


def opened(path: Path, task: LossTask, *, fresh: bool) -> LossFile:
    """The file for a measurement.

    Args:
        path: the file; need not exist.
        task: what will be measured.
        fresh: use nothing of what is there.

    Raises:
        ProfileError: what is there cannot be read, and ``fresh`` does not say to leave it.
    """
    beside = path.with_name(f"{path.name}.partial")
    if fresh:
        beside.unlink(missing_ok=True)
        return LossFile(path, None, beside if path.exists() else path)
    if not path.exists():
        return LossFile(path, None, path)
    there = load_loss_profile(path)
    if is_of(task, there):
        return LossFile(path, there, path)
    known = _partial(beside, task)
    if known is None:
        beside.unlink(missing_ok=True)
    return LossFile(path, known, beside)


def _partial(path: Path, task: LossTask) -> LossProfile | None:
    """What an interrupted measurement has left; None if it is of something else."""
    if not path.exists():
        return None
    try:
        found = load_loss_profile(path)
    except ProfileError:
        return None
    return found if is_of(task, found) else None
