"""How often machines of a pool are taken back, learned from what was seen.

A Gamma prior whose mean is the assumed rate: after ``n`` preemptions in ``h`` machine hours the
rate is ``(rate0 * weight_h + n) / (weight_h + h)``. What was seen counts half as much after a day,
since pools change. One event that takes several machines of a pool counts once for each.
"""

from __future__ import annotations

from typing import Final

from geo_ray.autoscale.memory import PoolRecord

HALF_LIFE_S: Final = 86_400.0


def learn(record: PoolRecord, now_unix_s: float, hours: float, preemptions: int = 0) -> None:
    """Take in machine hours, and machines that were taken back."""
    if record.as_of_unix_s and now_unix_s > record.as_of_unix_s:
        kept = 0.5 ** ((now_unix_s - record.as_of_unix_s) / HALF_LIFE_S)
        record.preemptions *= kept
        record.hours *= kept
    record.as_of_unix_s = max(record.as_of_unix_s, now_unix_s)
    record.hours += hours
    record.preemptions += preemptions
    if preemptions:
        record.taken_unix_s = now_unix_s


def rate_per_h(record: PoolRecord | None, assumed_per_h: float, weight_h: float) -> float:
    """Return the expected preemptions of one machine in an hour.

    Args:
        record: what was seen; None: nothing.
        assumed_per_h: before anything was seen.
        weight_h: machine hours that this weighs.
    """
    if record is None:
        return assumed_per_h
    return (assumed_per_h * weight_h + record.preemptions) / (weight_h + record.hours)
