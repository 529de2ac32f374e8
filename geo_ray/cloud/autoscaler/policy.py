"""The autoscaler's policy: from observations and state to actions. Pure.

Order: the observations update the state; deadline and budget set the required speed; in each region
the server machine and the workers are adjusted; surplus machines are drained; drained machines end.
An unreachable region is skipped. The deadline rule is that of Can't Be Late (NSDI 2024): use spot
machines while the slack exceeds the time of a change, then only on-demand machines. A higher speed
may cost less for the whole job. The speeds between the required one and `most_speed` are compared
in steps of 5 %, and the cheapest is chosen. Its cost is the price per hour of all workers times
``compute_fraction / speed + 1 - compute_fraction``: ``speed`` is that of the slowest region
relative to its target, and ``compute_fraction`` the planned fraction of time in which machines
compute. The budget rule stops all machines as soon as the rest of the budget is only just enough to
pay them until they have ended.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Final

from geo_ray.cloud.autoscaler.actions import Action, Alternative, Drain, End, Launch
from geo_ray.cloud.autoscaler.demand import WAITS, DemandChoice, DemandKeeper, DemandRegion
from geo_ray.cloud.autoscaler.node_group import (
    ENOUGH,
    NodeGroupChoice,
    NodeGroupPolicy,
    NodeGroupSpec,
    exchange_markup,
)
from geo_ray.cloud.autoscaler.observation import (
    REPLACED,
    UNWANTED,
    Observed,
    PendingGroup,
    StateUpdater,
    amounts_text,
    burn_usd_per_hour,
)
from geo_ray.cloud.autoscaler.pools import Losses, offers_of
from geo_ray.cloud.autoscaler.state import (
    AutoscalerState,
    InstanceState,
    ManagedInstance,
    PendingLaunch,
    outstanding,
)
from geo_ray.cloud.autoscaler.target import (
    REGION_LABEL,
    ROLE_LABEL,
    ClusterTarget,
    MachineRole,
    RegionTarget,
)
from geo_ray.cloud.provider import HEAD_ROLE, LaunchRequest
from geo_ray.experiment.autoscale import AutoscaleConfig

_BACK: Final = 3.0
SPEED_STEP: Final = 0.05  # speeds change in steps, so that small changes launch nothing
_SPARE: Final = 0.01  # margin on the remaining work, since speeds are measured

DONE: Final = "the job is complete"
HOLDS: Final = "the job is complete; another one may begin soon"
LATE: Final = "the deadline is near"
BUDGET: Final = "the budget is used up"
UNKNOWN: Final = "the demand is unknown"


@dataclass(frozen=True, slots=True)
class RequiredSpeed:
    """Required speed.

    Attributes:
        speed: multiple of the target's speed; 0: no machine is needed. Machines of a plan then
            leave unless the reason is `HOLDS`.
        only_on_demand: whether spot machines are excluded.
        reason: why the speed differs from the target's.
        saves: whether runs must be saved and stopped because the budget is nearly used up.
    """

    speed: float
    only_on_demand: bool = False
    reason: str = ""
    saves: bool = False


def required_speed(
    config: AutoscaleConfig, target: ClusterTarget, memory: AutoscalerState, observed: Observed
) -> RequiredSpeed:
    """Return the required speed. Records in the state whether spot machines are allowed.

    If the demand is unknown, only the budget is checked: the speed is 0, with the reason `BUDGET`
    if the budget is used up and `UNKNOWN` otherwise.

    Machines stay for `calm.idle_s` after a job (`HOLDS`) unless the cluster is released.
    """
    is_over = observed.left_s is not None and observed.left_s <= 0
    if is_over:
        since_s = min(memory.required.done_unix_s or math.inf, observed.now_unix_s)
        memory.required.done_unix_s = since_s
        is_over = observed.now_unix_s - since_s >= config.calm.idle_s
    elif observed.is_need_known:
        memory.required.done_unix_s = None
    if observed.is_released or is_over:
        return RequiredSpeed(0.0, reason=DONE)
    saves = False
    if target.budget_usd is not None:
        burn = burn_usd_per_hour(memory, target, observed.now_unix_s)
        needed_to_stop = burn * _stop_s(config) / 3600.0
        if memory.ledger.paid_usd + needed_to_stop >= target.budget_usd:
            memory.required.stopped_at_usd = target.budget_usd
        stopped_usd = memory.required.stopped_at_usd
        if stopped_usd is not None and target.budget_usd <= stopped_usd:
            return RequiredSpeed(0.0, reason=BUDGET, saves=True)
        saves = memory.ledger.paid_usd + 2.0 * needed_to_stop >= target.budget_usd
    if not observed.is_need_known:
        return RequiredSpeed(0.0, reason=UNKNOWN, saves=saves)
    if memory.required.done_unix_s is not None:
        return RequiredSpeed(0.0, reason=HOLDS, saves=saves)
    return replace(_required(config, target, memory, observed), saves=saves)


def affords(
    config: AutoscaleConfig,
    target: ClusterTarget,
    memory: AutoscalerState,
    usd_per_hour: float,
    now_unix_s: float,
) -> bool:
    """Return whether the budget covers starting more machines and then stopping all machines.

    Args:
        config: configuration of the autoscaler.
        target: what should run.
        memory: state, including the requests of this iteration.
        usd_per_hour: price of all machines of the launch.
        now_unix_s: current time.
    """
    if target.budget_usd is None:
        return True
    burn = usd_per_hour + burn_usd_per_hour(memory, target, now_unix_s)
    needed = burn * (config.start_s + _stop_s(config)) / 3600.0
    return memory.ledger.paid_usd + needed < target.budget_usd


def _stop_s(config: AutoscaleConfig) -> float:
    """Return the seconds for which machines are charged after the decision to stop them."""
    return config.drain_s + 2 * config.every_s


def _required(
    config: AutoscaleConfig, target: ClusterTarget, memory: AutoscalerState, observed: Observed
) -> RequiredSpeed:
    if target.deadline_unix_s is None or observed.left_s is None:
        memory.required.only_on_demand = False
        return RequiredSpeed(1.0)
    margin_s = change_s(config) + _SPARE * observed.left_s
    time_left_s = target.deadline_unix_s - observed.now_unix_s
    slack_s = time_left_s - observed.left_s
    bound_s = margin_s * (_BACK if memory.required.only_on_demand else 1.0)
    memory.required.only_on_demand = slack_s < bound_s
    wanted = observed.left_s / max(1e-9, time_left_s - change_s(config))
    if not 0 <= wanted <= config.most_speed:
        wanted = config.most_speed
    speed = min(config.most_speed, max(1.0, math.ceil(wanted / SPEED_STEP - 1e-9) * SPEED_STEP))
    late = LATE if memory.required.only_on_demand or speed > 1 else ""
    return RequiredSpeed(speed, memory.required.only_on_demand, late)


def change_s(config: AutoscaleConfig) -> float:
    """Return the seconds that a change from spot to on-demand machines takes."""
    return config.start_s + 2 * config.every_s


TOLD_UNJOINED: Final = 3
"""Consecutive launches without a joined node after which the status shows a note."""


def unjoined_notes(memory: AutoscalerState) -> list[str]:
    """Return notes about pools whose machines start but whose nodes do not join."""
    found = []
    for key in sorted(memory.pools):
        record = memory.pools[key]
        if record.unjoined < TOLD_UNJOINED:
            continue
        pool = record.pool
        found.append(
            f"{pool.type} {pool.market.value} in {pool.zone or pool.region}: machines of "
            f"{record.unjoined} consecutive launches started, and their nodes did not join. Check "
            "the image (same releases of geo_ray and Ray as the head?), the security group "
            "(can machines reach the ports of the head?), and the secret of the token "
            "(can their role read it?)"
        )
    return found


def resource_notes(said: Mapping[str, Mapping[str, float]], memory: AutoscalerState) -> list[str]:
    """Return notes about machine types on which Ray finds less than configured."""
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
                f"finds {amounts_text(there)} there; the value of Ray is used"
            )
    return found


_PRICES_S: Final = 60.0
_PRICES_LOOKS: Final = 4

STRANGER: Final = "not in the plan"


@dataclass(frozen=True, slots=True)
class Decided:
    """Decision of the policy.

    Attributes:
        memory: new state, written before any action.
        actions: actions to execute, in this order.
        required: required speed.
        usd_per_hour: cost of all machines, requested ones included.
        alternatives: scored pools of the launches, by region and role.
        notes: findings that need the attention of the user.
    """

    memory: AutoscalerState
    actions: tuple[Action, ...]
    required: RequiredSpeed
    usd_per_hour: float
    alternatives: tuple[tuple[str, tuple[Alternative, ...]], ...] = ()
    notes: tuple[str, ...] = ()


class AutoscalePolicy:
    """Decides which machines of a cluster are launched, drained and ended.

    The class is pure: all inputs are arguments, and the result is a `Decided`. See the module for
    the order of the rules.

    Args:
        config: configuration of the autoscaler.
        cluster: name of the cluster, a tag of all its machines.
        id: unique id of the cluster; empty: the name is unique.
        made: how many clusters of this name were created.
    """

    def __init__(self, config: AutoscaleConfig, cluster: str, id: str = "", made: int = 1) -> None:
        self._config, self._cluster, self._made = config, cluster, made
        own = id or hashlib.sha256(cluster.encode()).hexdigest()[:10]
        self.prefix = f"as-{own}-"

    @property
    def prices_every_s(self) -> float:
        """Interval at which prices are read: every fourth iteration, at least once a minute."""
        return min(_PRICES_S, _PRICES_LOOKS * self._config.every_s)

    def decide(self, target: ClusterTarget, memory: AutoscalerState, observed: Observed) -> Decided:
        """Return the actions and the new state.

        Args:
            target: what should run.
            memory: state of the last iteration; not modified.
            observed: observations.
        """
        memory = memory.copied()
        now_s = observed.now_unix_s
        if observed.machines is None:
            burn = burn_usd_per_hour(memory, target, now_s)
            return Decided(memory, (), RequiredSpeed(0.0, reason="nothing is known yet"), burn)
        last_s = max(
            (instance.observed_unix_s for instance in memory.instances.values()), default=now_s
        )
        StateUpdater(self._config, target, memory, observed, self.prefix).apply()
        if (
            observed.left_s is not None
            and observed.left_s <= 0
            and _serves_others(target, observed)
        ):
            observed = replace(observed, left_s=None)
        required = required_speed(self._config, target, memory, observed)
        if required.reason == UNKNOWN:  # only account costs and check the budget
            _leave_out_time(memory, max(0.0, now_s - last_s))
            return Decided(memory, (), required, burn_usd_per_hour(memory, target, now_s))
        self._keep_busy(memory, observed)
        since_unix_s = now_s - self._config.retry.missing_s
        memory.withdrawn = {k: s for k, s in memory.withdrawn.items() if s > since_unix_s}
        losses = self._losses(target, memory, observed)
        required = replace(required, speed=self._speed(target, memory, observed, required, losses))
        actions = self._drains_again(memory, observed)
        shown, too_dear = [], list[str]()
        for region in target.regions:
            is_planned = region.rows_per_s > 0 or required.speed <= 0
            if region.at in observed.unreachable or required.reason == HOLDS or not is_planned:
                for place in ("worker", "server"):  # skipped: its surplus timer restarts
                    memory.region(f"{region.name}/{place}").surplus_unix_s = None
                continue
            for node_group in self._node_groups(region, required):
                instances, pending_launches = self._of(memory, node_group.region, node_group.role)
                offers = offers_of(
                    region,
                    node_group.kinds,
                    memory,
                    observed.availabilities,
                    losses,
                    now_s,
                    self._config.retry.first_s,
                )
                keeper = NodeGroupPolicy(self._config, memory, node_group, offers, losses, now_s)
                choice = keeper.decide(instances, pending_launches, observed.left_s)
                if choice.withdraws:
                    self._withdraw(memory, pending_launches)
                too_dear += self._leave_out_too_dear(target, memory, choice, now_s)
                actions += self._execute(memory, region, node_group.role, choice, now_s)
                if choice.launches:
                    shown.append((f"{node_group.region}/{node_group.role}", choice.alternatives))
        if too_dear and not (memory.instances or memory.pending_launches):
            memory.required.stopped_at_usd = (
                target.budget_usd
            )  # not even the first launch of a plan is affordable
        demand = self._demand(target, memory, observed, required, losses)
        for (name, role), choice in demand.node_groups.items():
            at = target.region(name)
            if at is not None:
                too_dear += self._leave_out_too_dear(target, memory, choice, now_s)
                actions += self._execute(memory, at, role, choice, now_s)
            if choice.launches:
                shown.append((f"{name}/{role}", choice.alternatives))
        unneeded = demand.unneeded | self._unneeded(target, memory, observed, required)
        actions += self._surplus(target, memory, observed, required)
        self._withdraw(memory, self._expired(memory, unneeded, now_s))
        actions += self._ends(memory, observed)
        actions += self._again(memory, observed, unneeded)
        burn = burn_usd_per_hour(memory, target, now_s)
        notes = (
            *unjoined_notes(memory),
            *resource_notes(self._config.machine_resources, memory),
            *sorted(demand.notes),
            *sorted(set(too_dear)),
        )
        return Decided(memory, tuple(actions), required, burn, tuple(shown), notes)

    # ------------------------------------------------------------------ what is needed

    def _demand(
        self,
        target: ClusterTarget,
        memory: AutoscalerState,
        observed: Observed,
        required: RequiredSpeed,
        losses: Losses,
    ) -> DemandChoice:
        """Decide by pending demand, for the regions without a planned speed."""
        if required.speed <= 0:
            return DemandChoice()
        now_s, first_s = observed.now_unix_s, self._config.retry.first_s
        regions = []
        for region in target.regions:
            if region.rows_per_s > 0 or region.at in observed.unreachable:
                continue
            offers = [
                offers_of(region, kinds, memory, observed.availabilities, losses, now_s, first_s)
                for kinds in (region.kinds, (region.server,) if region.server else ())
            ]
            regions.append(DemandRegion(region, *offers))
        only = required.only_on_demand
        startable = replace(observed, pending=_that_can_begin(target, observed))
        keeper = DemandKeeper(self._config, regions, memory, startable, only_on_demand=only)
        return keeper.decide()

    def _node_groups(self, region: RegionTarget, required: RequiredSpeed) -> list[NodeGroupSpec]:
        """Return the node groups that a plan needs in a region; none at speed 0."""
        wanted = region.rows_per_s * required.speed
        name, only, reason = region.name, required.only_on_demand, required.reason
        floor = min(region.floor, 1)
        found = []
        if region.server is not None:
            server = replace(region.server, rows_per_s=1.0, cap=max(1, region.server.cap))
            need = 1.0 if wanted > 0 else 0.0
            found.append(
                NodeGroupSpec(name, "server", need, (server,), 0, bool(floor) or only, reason)
            )
            floor = 0
        found.append(NodeGroupSpec(name, "worker", wanted, region.kinds, floor, only, reason))
        return found

    def _speed(
        self,
        target: ClusterTarget,
        memory: AutoscalerState,
        observed: Observed,
        required: RequiredSpeed,
        losses: Losses,
    ) -> float:
        """Return the cheapest speed at which workers finish the job, at least the required one.

        Machines are whole, so a region may be faster than needed. That shortens the job only as far
        as all regions are faster. The speed is chosen with the first launches and then once per
        `calm.dwell_s`; while machines are missing it may fall to what the existing ones reach.
        """
        regions = [each for each in target.regions if each.rows_per_s > 0]
        record, now_s = memory.required, observed.now_unix_s
        present = max(required.speed, record.speed)
        if required.speed <= 0 or not regions:
            return required.speed
        if any(each.at in observed.unreachable for each in regions):
            return present
        node_groups = []
        for region in regions:
            node_group = self._node_groups(region, replace(required, speed=1.0))[-1]
            offers = offers_of(
                region, node_group.kinds, memory, observed.availabilities, losses, now_s
            )
            keeper = NodeGroupPolicy(self._config, memory, node_group, offers, losses, now_s)
            node_groups.append((keeper, region, *self._of(memory, region.name, "worker")))
        states = [
            keeper.state(instances, pending_launches)
            for keeper, _, instances, pending_launches in node_groups
        ]
        have = min(
            state.rows_per_s / each.rows_per_s for state, each in zip(states, regions, strict=True)
        )
        most, markup = self._config.most_speed, exchange_markup(self._config, observed.left_s)
        is_rested = now_s - record.speed_unix_s >= self._config.calm.dwell_s
        if all(state.is_empty for state in states):
            markup = 1.0
        elif have < present * ENOUGH:
            most, markup = present, None
        elif not is_rested or markup is None or not all(state.is_quiet for state in states):
            return present
        else:
            record.speed_unix_s = now_s  # also if the speed is unchanged
        best, least = required.speed, math.inf
        speed = required.speed
        while speed <= max(most, required.speed) * (1 + 1e-9):
            costs = [
                (
                    keeper.cost(instances, pending_launches, speed * region.rows_per_s, markup),
                    region.rows_per_s,
                )
                for keeper, region, instances, pending_launches in node_groups
            ]
            reached = min(rows_per_s / needed for (_, rows_per_s), needed in costs)
            if reached < speed * ENOUGH and math.isfinite(least):
                break
            reached = min(reached, max(most, required.speed))
            time = target.compute_fraction / max(reached, 1e-9) + 1.0 - target.compute_fraction
            usd = time * sum(usd for (usd, _), _ in costs)
            if usd < least * (1 - 1e-6):
                best, least = speed, usd
            speed += SPEED_STEP
        if best != record.speed:
            record.speed, record.speed_unix_s = best, now_s
        return best

    def _losses(self, target: ClusterTarget, memory: AutoscalerState, observed: Observed) -> Losses:
        """Return the cost of a preemption. Before anything runs, assume the cheapest machines."""
        weight_h = self._config.preemption_weight_h
        free = Losses.of(target, weight_h, 0.0)
        usual = 0.0
        for region in target.regions:
            now_s = observed.now_unix_s
            offers = offers_of(region, region.kinds, memory, observed.availabilities, free, now_s)
            scores = [o.full_usd_per_hour / o.kind.rows_per_s for o in offers if o.usd_per_hour]
            usual += min(scores, default=0.0) * region.rows_per_s
        burn = burn_usd_per_hour(memory, target, observed.now_unix_s)
        return Losses.of(target, weight_h, max(usual, burn))

    def _of(
        self, memory: AutoscalerState, region: str, role: MachineRole
    ) -> tuple[list[ManagedInstance], list[PendingLaunch]]:
        instances = [
            each
            for each in memory.instances.values()
            if _place(each.machine.labels) == (region, role) and each.reason != UNWANTED
        ]
        pending_launches = [
            each
            for each in memory.pending_launches.values()
            if _place(each.request.labels) == (region, role)
        ]
        return instances, pending_launches

    # ------------------------------------------------------------------ what is done

    def _execute(
        self,
        memory: AutoscalerState,
        region: RegionTarget,
        role: MachineRole,
        choice: NodeGroupChoice,
        now_s: float,
    ) -> list[Action]:
        actions: list[Action] = []
        for pool, (count, reason, usd) in choice.launches.items():
            memory.launches += 1
            request = LaunchRequest(
                f"{self.prefix}{self._made}-{memory.token}-{memory.launches}",
                self._cluster,
                pool,
                count,
                region.labels(pool, role),
                now_s + self._config.life_h * 3600.0,
            )
            memory.pending_launches[request.request_id] = PendingLaunch(
                request, reason, usd, now_s, now_s
            )
            actions.append(Launch(request, region.name, reason, choice.alternatives))
        for instance, reason in choice.drains:
            actions.append(self._drain(instance, reason, now_s, memory.token))
        return actions

    def _leave_out_too_dear(
        self, target: ClusterTarget, memory: AutoscalerState, choice: NodeGroupChoice, now_s: float
    ) -> list[str]:
        """Skip launches that the rest of the budget could not start and stop; return notes."""
        rented_usd = 0.0
        notes = []
        for pool, (count, _, usd) in list(choice.launches.items()):
            if affords(self._config, target, memory, rented_usd + count * usd, now_s):
                rented_usd += count * usd
                continue
            del choice.launches[pool]
            where = pool.zone or pool.region
            notes.append(
                f"{count} x {pool.type} {pool.market.value} in {where} for {count * usd:.4g} USD/h "
                "are not launched: the rest of the budget could not start and stop "
                "them"
            )
        return notes

    def _drain(self, instance: ManagedInstance, reason: str, now_s: float, token: int) -> Drain:
        until_s = now_s + self._config.drain_s
        if instance.machine.ends_unix_s is not None:
            until_s = min(until_s, instance.machine.ends_unix_s)
        instance.drain(reason, until_s, token)
        return Drain(instance.machine.id, _place(instance.machine.labels)[0], reason, until_s)

    def _drains_again(self, memory: AutoscalerState, observed: Observed) -> list[Action]:
        """Drain machines again whose drain may never have reached the node.

        If another autoscaler decided the drain, the machine gets its full time again, since the
        length of the outage is unknown.
        """
        found: list[Action] = []
        for instance in memory.instances.values():
            before, node = instance.termination, observed.node(instance.machine.id)
            if instance.state is not InstanceState.DRAINING or before is None:
                continue
            if not (node.is_ready and node.is_busy) or node.leaves_unix_s is not None:
                continue
            again = self._drain(instance, before.reason, observed.now_unix_s, memory.token)
            if before.token == memory.token and before.deadline_unix_s is not None:
                instance.termination = before
                again = replace(again, until_unix_s=before.deadline_unix_s)
            found.append(again)
        return found

    def _withdraw(self, memory: AutoscalerState, pending_launches: Sequence[PendingLaunch]) -> None:
        """Forget requests that are no longer needed; machines that they still deliver are ended."""
        for pending_launch in pending_launches:
            if outstanding(memory, pending_launch) > 0:
                memory.withdrawn[pending_launch.request.request_id] = pending_launch.sent_unix_s
            del memory.pending_launches[pending_launch.request.request_id]

    def _expired(
        self, memory: AutoscalerState, unneeded: Set[str], now_s: float
    ) -> list[PendingLaunch]:
        """Return requests that were unneeded for a long time; they are not sent again."""
        idle_s = self._config.calm.idle_s
        return [
            pending_launch
            for name, pending_launch in memory.pending_launches.items()
            if name in unneeded and now_s - pending_launch.sent_unix_s >= idle_s
        ]

    def _unneeded(
        self,
        target: ClusterTarget,
        memory: AutoscalerState,
        observed: Observed,
        required: RequiredSpeed,
    ) -> set[str]:
        """Return requests that no region of the target needs now: all of them during `HOLDS`."""
        places = _places(target)
        return {
            name
            for name, pending_launch in memory.pending_launches.items()
            if (required.reason == HOLDS or _place(pending_launch.request.labels) not in places)
            and pending_launch.request.pool.region not in observed.unreachable
        }

    def _surplus(
        self,
        target: ClusterTarget,
        memory: AutoscalerState,
        observed: Observed,
        required: RequiredSpeed,
    ) -> list[Action]:
        """Drain machines of regions and roles that the target does not have.

        Machines of a plan leave `calm.idle_s` after the target has dropped them. Machines launched
        for pending demand, and all machines while the target plans nothing, leave after
        `calm.idle_s` without work. A target that names them again within that time keeps them. When
        the job or the budget ends, all leave at once and their requests are withdrawn.
        """
        now_s, places = observed.now_unix_s, _places(target)
        is_over = required.speed <= 0 and required.reason != HOLDS
        if is_over:
            unneeded = self._unneeded(target, memory, observed, required)
            self._withdraw(memory, [memory.pending_launches[name] for name in sorted(unneeded)])
        is_planned = any(each.rows_per_s > 0 for each in target.regions)
        found: list[Action] = []
        for instance in memory.instances.values():
            may_change = instance.stays or instance.state is InstanceState.LEAVING
            is_unreachable = instance.machine.pool.region in observed.unreachable
            if not may_change or is_unreachable or _place(instance.machine.labels) in places:
                continue
            node = observed.node(instance.machine.id)
            if is_over or instance.leaves_for in REPLACED:
                reason = required.reason if is_over else STRANGER
                found.append(self._drain(instance, reason, now_s, memory.token))
                continue
            is_of_plan = is_planned and instance.reason != WAITS
            if not is_of_plan and node.is_ready and node.is_busy:
                instance.idle_unix_s = None
            elif instance.idle_unix_s is None:
                instance.idle_unix_s = now_s
            elif now_s - instance.idle_unix_s < self._config.calm.idle_s:
                continue
            elif is_of_plan:
                found.append(self._drain(instance, STRANGER, now_s, memory.token))
            else:
                instance.release(STRANGER, now_s)
        return found

    def _keep_busy(self, memory: AutoscalerState, observed: Observed) -> None:
        """Keep idle machines that were going to leave but are busy again."""
        for instance in memory.instances.values():
            node = observed.node(instance.machine.id)
            is_at_work = node.is_ready and node.is_busy
            if instance.state is InstanceState.RELEASING and is_at_work:
                instance.keep()
                instance.idle_unix_s = None

    def _ends(self, memory: AutoscalerState, observed: Observed) -> list[Action]:
        """End drained machines that are idle or have reached their deadline."""
        found: list[Action] = []
        for instance in memory.instances.values():
            termination = instance.termination
            if termination is None or termination.deadline_unix_s is None:
                continue  # not terminating, or waiting for a replacement
            if instance.machine.pool.region in observed.unreachable:
                continue
            node = observed.node(instance.machine.id)
            is_over = observed.now_unix_s >= termination.deadline_unix_s
            if is_over or not node.is_busy or instance.state is InstanceState.TERMINATING:
                region = instance.machine.labels.get(REGION_LABEL, "")
                only_idle = instance.state is InstanceState.RELEASING
                found.append(End(instance.machine.id, region, termination.reason, only_idle))
        return found

    def _again(
        self, memory: AutoscalerState, observed: Observed, unneeded: Set[str]
    ) -> list[Action]:
        """Resend requests without a listed machine; clouds execute each request only once.

        Requests that nothing needs at the moment are skipped; they may be needed again.
        """
        found: list[Action] = []
        now_s = observed.now_unix_s
        for pending_launch in memory.pending_launches.values():
            is_unreachable = pending_launch.request.pool.region in observed.unreachable
            if is_unreachable or pending_launch.request.request_id in unneeded:
                continue
            waited_s = now_s - pending_launch.sent_unix_s
            is_due = waited_s >= self._config.retry.resend_s
            is_due |= waited_s < 0  # the clock of an earlier head was ahead
            if is_due and outstanding(memory, pending_launch) > 0:
                pending_launch.sent_unix_s = now_s
                pending_launch.sends += 1
                region = pending_launch.request.labels.get(REGION_LABEL, "")
                found.append(
                    Launch(pending_launch.request, region, "no machine of it is listed yet")
                )
        return found


def _leave_out_time(memory: AutoscalerState, passed_s: float) -> None:
    """Exclude the time since the last iteration from idle and surplus times."""
    for instance in memory.instances.values():
        if instance.idle_unix_s is not None:
            instance.idle_unix_s += passed_s
    for place in memory.regions.values():
        if place.surplus_unix_s is not None:
            place.surplus_unix_s += passed_s


def _place(labels: Mapping[str, str]) -> tuple[str, str]:
    return labels.get(REGION_LABEL, ""), labels.get(ROLE_LABEL, "worker")


def _places(target: ClusterTarget) -> set[tuple[str, str]]:
    """Return the regions and roles of a target."""
    found = {(each.name, "worker") for each in target.regions}
    return found | {(each.name, "server") for each in target.regions if each.server is not None}


def _serves_others(target: ClusterTarget, observed: Observed) -> bool:
    """Return whether processes run on, or wait for, machines of planned regions.

    After the end of the cluster's run they belong to other runs, whose end is unknown.
    """
    planned = {region.name for region in target.regions if region.rows_per_s > 0}
    nodes = [
        observed.node(machine.id)
        for machine in observed.machines or ()
        if machine.labels.get(ROLE_LABEL) != HEAD_ROLE
        and machine.labels.get(REGION_LABEL) in planned
    ]
    return any(node.is_ready and node.is_busy for node in nodes) or any(
        bundle.regions() & planned
        for group in _that_can_begin(target, observed)
        for bundle in group.items()
    )


def _that_can_begin(target: ClusterTarget, observed: Observed) -> tuple[PendingGroup, ...]:
    """Return pending groups without those that wait for an unreachable region."""
    unreachable = {each.name for each in target.regions if each.at in observed.unreachable}
    return tuple(
        group
        for group in observed.pending
        if not any(bundle.regions() and bundle.regions() <= unreachable for bundle in group.items())
    )
