"""How much is needed now: none, as the target says, or more because a deadline comes near.

A deadline is kept as follows (after Can't Be Late, NSDI 2024: on demand once the slack is only the
change itself). ``left_s`` is how long the rest takes with the target's machines, ``slack`` what the
deadline leaves beside it. While there is more slack than a change of machines takes, spot machines
are worth their risk. Once there is not, only machines on demand count; back only with three times
as much, since a change back costs one, too. A job that is late has more machines, up to a bound.

A budget stops everything while there is still money to stop: what is spent, and what all machines
cost until the next look and until they have left. It stays so until the budget is raised. As long
before that again, runs are to be saved. Nothing is rented for which there is not the money to start
it and to stop it again, together with all others: it would be gone before it computes, and the
others sooner.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from geo_ray.autoscale.config import AutoscaleConfig
from geo_ray.autoscale.memory import AutoscalerMemory
from geo_ray.autoscale.observed import Observed
from geo_ray.autoscale.sightings import burn_usd_per_hour
from geo_ray.autoscale.target import ClusterTarget

_BACK: Final = 3.0
SPEED_STEP: Final = 0.05  # speeds follow in steps, so that a little more haste rents nothing
_SPARE: Final = 0.01  # of what is left: speeds are measured

DONE: Final = "the job is done"
HOLDS: Final = "the job is done, and another one may begin soon"
LATE: Final = "the deadline comes near"
BUDGET: Final = "the budget is used up"
UNKNOWN: Final = "what is needed is not known"


@dataclass(frozen=True, slots=True)
class RunPace:
    """What is needed.

    Attributes:
        speed: times the target's; 0: nothing is needed. Machines of a plan leave, unless the
            reason is `HOLDS`.
        only_on_demand: whether spot machines do not count.
        reason: why, if it is not simply the target.
        saves: whether runs are to be saved and stopped now, as the money is nearly used up.
    """

    speed: float
    only_on_demand: bool = False
    reason: str = ""
    saves: bool = False


def run_pace(
    config: AutoscaleConfig, target: ClusterTarget, memory: AutoscalerMemory, observed: Observed
) -> RunPace:
    """Return what is needed now; remembers whether spot machines count.

    Where that is not known the budget alone is heeded: then nothing is needed for one of two
    reasons, that it is used up (`BUDGET`), or that nobody knows (`UNKNOWN`).

    Machines stay for `calm.idle_s` after a job (`HOLDS`), unless the cluster is released.
    """
    is_over = observed.left_s is not None and observed.left_s <= 0
    if is_over:
        since_s = min(memory.pace.done_unix_s or math.inf, observed.now_unix_s)
        memory.pace.done_unix_s = since_s
        is_over = observed.now_unix_s - since_s >= config.calm.idle_s
    elif observed.is_need_known:
        memory.pace.done_unix_s = None
    if observed.is_released or is_over:
        return RunPace(0.0, reason=DONE)
    saves = False
    if target.budget_usd is not None:
        burn = burn_usd_per_hour(memory, target, observed.now_unix_s)
        needed_to_stop = burn * _stop_s(config) / 3600.0
        if memory.ledger.paid_usd + needed_to_stop >= target.budget_usd:
            memory.pace.stopped_at_usd = target.budget_usd
        stopped_usd = memory.pace.stopped_at_usd
        if stopped_usd is not None and target.budget_usd <= stopped_usd:
            return RunPace(0.0, reason=BUDGET, saves=True)
        saves = memory.ledger.paid_usd + 2.0 * needed_to_stop >= target.budget_usd
    if not observed.is_need_known:
        return RunPace(0.0, reason=UNKNOWN, saves=saves)
    if memory.pace.done_unix_s is not None:
        return RunPace(0.0, reason=HOLDS, saves=saves)
    return replace(_pace(config, target, memory, observed), saves=saves)


def affords(
    config: AutoscaleConfig,
    target: ClusterTarget,
    memory: AutoscalerMemory,
    usd_per_hour: float,
    now_unix_s: float,
) -> bool:
    """Return whether the budget has the money to start machines, and to stop them with all others.

    Args:
        config: of the autoscaler.
        target: what should run.
        memory: with what was asked for at this look, too.
        usd_per_hour: of all machines of the launch.
        now_unix_s: the present time.
    """
    if target.budget_usd is None:
        return True
    burn = usd_per_hour + burn_usd_per_hour(memory, target, now_unix_s)
    needed = burn * (config.start_s + _stop_s(config)) / 3600.0
    return memory.ledger.paid_usd + needed < target.budget_usd


def _stop_s(config: AutoscaleConfig) -> float:
    """Return how long all machines cost once they are to be stopped."""
    return config.drain_s + 2 * config.every_s


def _pace(
    config: AutoscaleConfig, target: ClusterTarget, memory: AutoscalerMemory, observed: Observed
) -> RunPace:
    if target.deadline_unix_s is None or observed.left_s is None:
        memory.pace.only_on_demand = False
        return RunPace(1.0)
    margin_s = change_s(config) + _SPARE * observed.left_s
    time_left_s = target.deadline_unix_s - observed.now_unix_s
    slack_s = time_left_s - observed.left_s
    bound_s = margin_s * (_BACK if memory.pace.only_on_demand else 1.0)
    memory.pace.only_on_demand = slack_s < bound_s
    wanted = observed.left_s / max(1e-9, time_left_s - change_s(config))
    if not 0 <= wanted <= config.most_speed:
        wanted = config.most_speed
    speed = min(config.most_speed, max(1.0, math.ceil(wanted / SPEED_STEP - 1e-9) * SPEED_STEP))
    late = LATE if memory.pace.only_on_demand or speed > 1 else ""
    return RunPace(speed, memory.pace.only_on_demand, late)


def change_s(config: AutoscaleConfig) -> float:
    """Return how long a change from spot machines to others takes."""
    return config.start_s + 2 * config.every_s
