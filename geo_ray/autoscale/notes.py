"""What the autoscaler cannot mend by itself, in words for whoever looks at the cluster."""

from __future__ import annotations

from typing import Final

from geo_ray.autoscale.memory import AutoscalerMemory

TOLD_UNJOINED: Final = 3
"""Launches of a pool in a row whose nodes did not come, before it is said where to look."""


def unjoined_notes(memory: AutoscalerMemory) -> list[str]:
    """Return what to look at where machines come and their nodes do not."""
    found = []
    for key in sorted(memory.pools):
        record = memory.pools[key]
        if record.unjoined < TOLD_UNJOINED:
            continue
        pool = record.pool
        found.append(
            f"{pool.type} {pool.market.value} in {pool.zone or pool.region}: machines of "
            f"{record.unjoined} launches in a row came, and their nodes did not. Look at the image "
            "(has it the head's releases of geo_ray and Ray?), at the security group (do machines "
            "there reach the head's ports?), and at the token's secret (may their role read it?)"
        )
    return found
