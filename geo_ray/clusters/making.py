"""Who makes or ends a cluster does it alone: others wait for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from geo_ray.clusters.state import ClusterState
from geo_ray.errors import ClusterBusyError, ClusterStateError, RunDirectoryError, RunHeldError
from geo_ray.lease.driving import FAR_LIVES_S
from geo_ray.lease.keeper import LeaseKeeper
from geo_ray.lease.seek import LIVES_S, LeaseSeeker

_AGAIN_S: Final = 0.5


@contextmanager
def alone(
    state: ClusterState, doing: str, tell: Callable[[str], None], longest_s: float = 600.0
) -> Iterator[LeaseKeeper]:
    """Be the only one that makes or ends a cluster while the block runs.

    Who is killed meanwhile is waited for as long as its lease lives, on the same machine not at
    all.

    Args:
        state: of the cluster.
        doing: what this is, for others that wait.
        tell: told that another one is at work.
        longest_s: longest wait.

    Raises:
        ClusterBusyError: another one was at work all the time.
        ClusterStateError: whether one is cannot be read.
    """
    lives_s = FAR_LIVES_S if state.is_far else LIVES_S
    deadline_s = time.monotonic() + longest_s
    has_told = False

    def looking(_: str) -> None:
        tell("looking whether another command that works on it still lives")

    while True:
        try:
            keeper = LeaseSeeker(state.making(), state.name, looking, lives_s=lives_s).take()
            break
        except RunDirectoryError as error:
            raise ClusterStateError(
                f"whether another command works on {state.name} cannot be read in {state.shown}: "
                f"{error.message}",
                fix="If none does, remove making/lease.json there, and the autoscaler's "
                "lease.json beside it if that is torn, too.",
            ) from error
        except RunHeldError as error:
            if time.monotonic() > deadline_s:
                raise ClusterBusyError(
                    f"another command has made or ended {state.name} for {longest_s:.0f} s: "
                    f"{error.message.partition(': ')[2]}"
                ) from None
            if not has_told:
                has_told = True
                tell(f"waiting for another command: {error.message.partition(': ')[2]}")
            time.sleep(_AGAIN_S)
    try:
        keeper.note(doing)
        yield keeper
    finally:
        keeper.close()
