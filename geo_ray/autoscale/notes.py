"""What the autoscaler cannot mend by itself, in words for whoever looks at the cluster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from geo_ray.autoscale.demand.pending import amounts_text
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


def resource_notes(said: Mapping[str, Mapping[str, float]], memory: AutoscalerMemory) -> list[str]:
    """Return where Ray finds less on a type of machine than the configuration says."""
    found = []
    for type_ in sorted(said):
        has = memory.resources.get(type_)
        lacking = {
            name: amount
            for name, amount in said[type_].items()
            if has is not None and has.get(name, 0.0) < amount * (1 - 1e-6)
        }
        if has is not None and lacking:
            there = {name: has.get(name, 0.0) for name in lacking}
            found.append(
                f"autoscale.machine_resources has {amounts_text(lacking)} of {type_}, and Ray "
                f"finds {amounts_text(there)} there: what Ray finds counts"
            )
    return found
