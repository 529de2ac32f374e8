"""To drive a run: hold its lease from the first write to the last."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from geo_ray.lease.keeper import LeaseKeeper
from geo_ray.lease.local_store import LocalConditionalStore
from geo_ray.lease.seek import LeaseSeeker
from geo_ray.lease.store import ConditionalStore

FAR_LIVES_S: Final = 30.0
"""Of a lease in a bucket: each renewal is paid for."""


def seeker_of(
    run_dir: Path, tell: Callable[[str], None], far: ConditionalStore | None = None
) -> LeaseSeeker:
    """What seeks the lease of a run.

    Args:
        run_dir: its directory.
        tell: told why it takes a while.
        far: where the lease lies, if that is not in the directory.
    """
    if far is not None:
        return LeaseSeeker(far, str(far), tell, lives_s=FAR_LIVES_S)
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
