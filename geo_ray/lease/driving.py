"""To drive a run: hold its lease from the first write to the last."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from geo_ray.lease.keeper import LeaseKeeper
from geo_ray.lease.local_store import LocalConditionalStore
from geo_ray.lease.seek import LeaseSeeker


def seeker_of(run_dir: Path, tell: Callable[[str], None]) -> LeaseSeeker:
    """What seeks the lease of a run.

    Args:
        run_dir: its directory.
        tell: told why it takes a while.
    """
    path = run_dir.absolute()
    near = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return LeaseSeeker(LocalConditionalStore(path), str(near), tell)


@contextmanager
def driving(seeker: LeaseSeeker) -> Iterator[LeaseKeeper]:
    """Hold the lease of a run while the block runs.

    Raises:
        RunHeldError: another process drives the run.
        RunDirectoryError: the lease cannot be read or written.
    """
    keeper = seeker.take()
    try:
        yield keeper
    finally:
        keeper.close()
