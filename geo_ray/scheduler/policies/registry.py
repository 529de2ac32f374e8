"""All policies by name. To add one, add a file to this package and an entry to the table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from geo_ray.base.errors import ScheduleInputError
from geo_ray.base.plugins import Plugins
from geo_ray.base.text import nearest_word
from geo_ray.scheduler.policy import SchedulingPolicy

POLICIES: Final = Plugins[Callable[[], SchedulingPolicy]](
    {
        "pd_ors": "geo_ray.scheduler.policies.pd_ors:PdOrsPolicy",
        "pd_ors_load": "geo_ray.scheduler.policies.pd_ors:pd_ors_load",
        "oasis": "geo_ray.scheduler.policies.pd_ors:oasis",
        "fifo": "geo_ray.scheduler.policies.fifo:FifoPolicy",
        "drf": "geo_ray.scheduler.policies.drf:DrfPolicy",
        "dorm": "geo_ray.scheduler.policies.dorm:DormPolicy",
        "optimus": "geo_ray.scheduler.policies.optimus:OptimusPolicy",
        "tiresias": "geo_ray.scheduler.policies.tiresias:TiresiasPolicy",
        "ones": "geo_ray.scheduler.policies.ones:OnesPolicy",
        "pollux": "geo_ray.scheduler.policies.pollux:PolluxPolicy",
    }
)
"""Factory of each policy with its defaults."""


def policy_named(name: str) -> SchedulingPolicy:
    """Return a policy with its defaults.

    Raises:
        ScheduleInputError: the name is unknown.
    """
    if name not in POLICIES:
        near = nearest_word(name, POLICIES)
        hint = f"; did you mean {near}?" if near else ""
        raise ScheduleInputError(
            f"unknown policy '{name}'{hint}", fix=f"Choose among {', '.join(POLICIES)}."
        )
    return POLICIES[name]()
