"""The cost of time and traffic at a plan's prices, for predictions and runs alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from geo_ray.planning.plan import Plan

MACHINES: Final = "machines"
STANDS: Final = "servers and disks"
EGRESS: Final = "egress"
_HOUR_S: Final = 3600.0


@dataclass(frozen=True, slots=True)
class Bill:
    """Prices of a plan.

    Attributes:
        machines_usd_per_h: of all machines together.
        stands_usd_per_h: of servers and disks.
        usd_per_gb: egress by source and destination.
    """

    machines_usd_per_h: float
    stands_usd_per_h: float
    usd_per_gb: Mapping[str, Mapping[str, float]]

    @classmethod
    def of(cls, plan: Plan) -> Bill:
        """Return the prices of a plan."""
        return cls(plan.usd_per_h, plan.stands_usd_per_h, plan.usd_per_gb)

    def unpriced(self, sent_bytes: Mapping[tuple[str, str], float]) -> list[tuple[str, str]]:
        """Return the pairs with traffic but without a price, in order."""
        return sorted(
            (src, dst)
            for (src, dst), count in sent_bytes.items()
            if count and dst not in self.usd_per_gb.get(src, {})
        )

    def usd(self, seconds: float, sent_bytes: Mapping[tuple[str, str], float]) -> dict[str, float]:
        """Return dollars by term.

        Args:
            seconds: seconds that machines are kept, from renting on.
            sent_bytes: bytes by (source, destination); traffic without a price is free only inside
                a region, so the plan must know all other pairs.

        Raises:
            KeyError: the plan has no price for a pair with traffic.
        """
        hours = seconds / _HOUR_S
        egress = sum(
            count * 1e-9 * self.usd_per_gb[src][dst]
            for (src, dst), count in sent_bytes.items()
            if count
        )
        return {
            MACHINES: hours * self.machines_usd_per_h,
            STANDS: hours * self.stands_usd_per_h,
            EGRESS: egress,
        }
