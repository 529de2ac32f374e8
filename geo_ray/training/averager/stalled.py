"""When nothing can happen any more, however long one waits. Pure.

Nothing can once every region that is not done stands still for the answer to a request, the
averager has taken in all of these requests and answered none, and will not answer by itself. How
long a step, an exchange or a round takes has no part in it: somebody who computes, or a message
that is on its way, is progress.
"""

from __future__ import annotations

from collections.abc import Mapping

from geo_ray.errors import StalledError
from geo_ray.training.averager.averager import Averager


def open_requests(averager: Averager) -> dict[str, int] | None:
    """The updates that an averager has taken in and not answered, by region.

    None if it may still answer them by itself, because its strategy wants to be woken.
    """
    return averager.unanswered if averager.wakes_s is None else None


def stalled_regions(
    still: Mapping[str, int | None], unanswered: Mapping[str, int] | None
) -> dict[str, int]:
    """The requests that will never be answered, by region; empty while something can happen.

    Args:
        still: the request that a region stands still for, or None, of all that are not done
            (`Server.stands_still_for`).
        unanswered: what `open_requests` gave; None also if that is not known.
    """
    waits = {region: seq for region, seq in still.items() if seq is not None}
    if unanswered is None or len(waits) < len(still):
        return {}
    return waits if all(unanswered.get(r) == seq for r, seq in waits.items()) else {}


def stalled_error(waits: Mapping[str, int]) -> StalledError:
    """The error that ends a run whose regions wait for these requests."""
    who = ", ".join(f"'{region}' (update {seq})" for region, seq in sorted(waits.items()))
    return StalledError(
        "no region makes progress: each waits for the averager's answer, and the averager for "
        f"another update of one of them: {who}"
    )
