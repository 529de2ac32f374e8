"""The range in which a plan's time and cost are expected.

Deviations of steps, links and preemptions are taken to be independent, each two of its standard
deviations wide. What was not measured is not guessed: it adds nothing, and a note says so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from geo_ray.planning.model.work import HOUR_S
from geo_ray.planning.plan import Plan
from geo_ray.transport.links.table import LinkTable

_WIDTH: Final = 2.0
_MAD_TO_SD: Final = 1.4826  # of a normal distribution


@dataclass(frozen=True, slots=True)
class Unsure:
    """Relative errors.

    Attributes:
        steps: of a step's time; None if nobody measured it.
        links: of the goodput of the worst link with the averager.
    """

    steps: float | None
    links: float


def link_error(links: LinkTable, averager: str) -> float:
    """Return the largest relative deviation among the links with ``averager``."""
    return max(
        (
            _MAD_TO_SD * record.goodput_mad_mbps / record.goodput_mbps
            for record in links.links
            if averager in record.pair and record.goodput_mbps > 0
        ),
        default=0.0,
    )


def with_range(plan: Plan, unsure: Unsure) -> Plan:
    """Return the plan with `Plan.seconds_range` and `Plan.usd_range`."""
    own_s = plan.seconds.get("compute", 0.0) + plan.seconds.get("inside the region", 0.0)
    wan_s = plan.seconds.get("between regions", 0.0) + plan.seconds.get("last exchange", 0.0)
    off_s = math.hypot(_WIDTH * (unsure.steps or 0.0) * own_s, _WIDTH * unsure.links * wan_s)
    hourly = plan.usd_per_h + plan.stands_usd_per_h
    lost_usd = plan.usd.get("work lost to preemption", 0.0)  # between none and twice as much
    off_usd = math.hypot(off_s / HOUR_S * hourly, lost_usd)
    notes = plan.notes
    if unsure.steps is None:
        notes = (*notes, "speeds were given, not measured: the range does not count their error")
    return plan.model_copy(
        update={
            "seconds_range": _around(plan.total_s, off_s),
            "usd_range": _around(plan.total_usd, off_usd),
            "notes": notes,
        }
    )


def _around(value: float, off: float) -> tuple[float, float]:
    return max(0.0, value - off), value + off
