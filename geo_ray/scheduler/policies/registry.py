"""Policies by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from geo_ray.base.errors import ScheduleInputError
from geo_ray.base.text import nearest_word
from geo_ray.scheduler.policies.dorm import DormPolicy
from geo_ray.scheduler.policies.drf import DrfPolicy
from geo_ray.scheduler.policies.fifo import FifoPolicy
from geo_ray.scheduler.policies.ones import OnesPolicy
from geo_ray.scheduler.policies.optimus import OptimusPolicy
from geo_ray.scheduler.policies.pd_ors import PdOrsPolicy, oasis, pd_ors_load
from geo_ray.scheduler.policies.pollux import PolluxPolicy
from geo_ray.scheduler.policies.tiresias import TiresiasPolicy
from geo_ray.scheduler.policy import SchedulingPolicy

POLICIES: Final[Mapping[str, Callable[[], SchedulingPolicy]]] = {
    "pd_ors": PdOrsPolicy,
    "pd_ors_load": pd_ors_load,
    "oasis": oasis,
    "fifo": FifoPolicy,
    "drf": DrfPolicy,
    "dorm": DormPolicy,
    "optimus": OptimusPolicy,
    "tiresias": TiresiasPolicy,
    "ones": OnesPolicy,
    "pollux": PolluxPolicy,
}


def policy_named(name: str) -> SchedulingPolicy:
    """Return a policy with its defaults.

    Raises:
        ScheduleInputError: there is none of that name.
    """
    if name not in POLICIES:
        near = nearest_word(name, POLICIES)
        hint = f"; did you mean {near}?" if near else ""
        raise ScheduleInputError(
            f"there is no policy '{name}'{hint}", fix=f"Choose among {', '.join(POLICIES)}."
        )
    return POLICIES[name]()
