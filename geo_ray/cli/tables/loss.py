"""The table of `geo-ray profile --loss`."""

from __future__ import annotations

import math

from rich.box import SIMPLE_HEAD

from geo_ray.observe.fitted_table import FittedTable
from geo_ray.planning.loss_profile import LossProfile
from geo_ray.planning.loss_table import AssumedLoss, differences


def loss_table(profile: LossProfile) -> FittedTable:
    """What each interval and codec costs: mean, what plans count, and what they would assume."""
    table = FittedTable(box=SIMPLE_HEAD)
    table.add_column("every", justify="right")
    for heading in ("codec", "against"):
        table.add_column(heading)
    for heading in ("mean", "counts", "else assumed"):
        table.add_column(heading, justify="right")
    for (interval, codec), each in differences(profile).items():
        assumed = AssumedLoss().loss(1 if codec else interval, codec, trains_on=False)
        diverged = math.isinf(each.mean)
        table.add_row(
            f"{interval} steps",
            codec or "none",
            "no codec" if codec else "bsp",
            "diverged" if diverged else f"{each.mean:+.2%}",
            "never" if diverged else f"{each.upper:.2%}",
            f"{assumed:.2%}",
        )
    return table
