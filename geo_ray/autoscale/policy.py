"""What is to be done now about the machines of a cluster.

Pure: everything comes in, and nothing happens but what is returned.

The order: what is seen is taken into the memory; how much is needed; for each region the server's
machine and the workers'; what leaves; what nobody waits for. Where a region does not answer nothing
is done, and all others go on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from geo_ray.autoscale.actions import Action, Alternative, Drain, End, Launch
from geo_ray.autoscale.config import AutoscaleConfig
from geo_ray.autoscale.memory import AutoscalerMemory, Duty, Intent, Parting, outstanding
from geo_ray.autoscale.notes import unjoined_notes
from geo_ray.autoscale.observed import Observed
from geo_ray.autoscale.offers import Losses, offers_of
from geo_ray.autoscale.pace import RunPace, run_pace
from geo_ray.autoscale.posts import Post, PostChoice, PostKeeper
from geo_ray.autoscale.sightings import (
    DRAINED,
    NO_NODE_CAME,
    NOTICE,
    Sightings,
    burn_usd_per_hour,
)
from geo_ray.autoscale.target import (
    REGION_LABEL,
    ROLE_LABEL,
    ClusterTarget,
    MachineRole,
    RegionTarget,
)
from geo_ray.providers.base import LaunchRequest

_PRICES_S: Final = 60.0
_PRICES_LOOKS: Final = 4


@dataclass(frozen=True, slots=True)
class Decided:
    """What the policy answers.

    Attributes:
        memory: to be written before anything is done.
        actions: to be done, in this order.
        pace: how much was needed.
        usd_per_hour: what all machines cost, those that are on their way included.
        alternatives: by region and role, the pools as they were judged for the launches.
        notes: what somebody should look at.
    """

    memory: AutoscalerMemory
    actions: tuple[Action, ...]
    pace: RunPace
    usd_per_hour: float
    alternatives: tuple[tuple[str, tuple[Alternative, ...]], ...] = ()
    notes: tuple[str, ...] = ()


class AutoscalePolicy:
    """See the module's docstring.

    Args:
        config: of the autoscaler.
        cluster: its name, which all its machines bear.
        id: of its own, which tells it from others of its name; empty: its name does.
        made: how often it was made.
    """

    def __init__(self, config: AutoscaleConfig, cluster: str, id: str = "", made: int = 1) -> None:
        self._config, self._cluster, self._made = config, cluster, made
        own = id or hashlib.sha256(cluster.encode()).hexdigest()[:10]
        self.prefix = f"as-{own}-"

    @property
    def prices_every_s(self) -> float:
        """How often prices are asked for: at every fourth look, and once a minute at least."""
        return min(_PRICES_S, _PRICES_LOOKS * self._config.every_s)

    def decide(
        self, target: ClusterTarget, memory: AutoscalerMemory, observed: Observed
    ) -> Decided:
        """Return what is to be done.

        Args:
            target: what should run.
            memory: of the last time; is not changed.
            observed: what is seen now.
        """
        memory = memory.copied()
        now_s = observed.now_unix_s
        if observed.machines is None:
            burn = burn_usd_per_hour(memory, target, now_s)
            return Decided(memory, (), RunPace(0.0, reason="nothing is known"), burn)
        orphans = Sightings(self._config, target, memory, observed, self.prefix).take_in()
        pace = run_pace(self._config, target, memory, observed)
        losses = self._losses(target, memory, observed)
        actions: list[Action] = []
        shown = []
        for region in target.regions:
            if region.at in observed.silent:
                continue
            for post in self._posts(region, pace, self._demand(region, memory, observed)):
                if post.rows_per_s <= 0:
                    self._call_off(memory, post)
                duties, intents = self._of(memory, post.region, post.role)
                offers = offers_of(
                    region,
                    post.kinds,
                    memory,
                    observed.stocks,
                    losses,
                    now_s,
                    self._config.retry.first_s,
                )
                keeper = PostKeeper(self._config, memory, post, offers, losses, now_s)
                choice = keeper.decide(duties, intents, observed.left_s)
                actions += self._carry_out(memory, region, post, choice, now_s)
                if choice.launches:
                    shown.append((f"{post.region}/{post.role}", choice.alternatives))
        actions += self._strangers(target, memory, observed)
        actions += self._ends(memory, observed)
        actions += self._again(memory, observed)
        burn = burn_usd_per_hour(memory, target, now_s)
        notes = tuple(unjoined_notes(memory))
        return Decided(memory, (*actions, *orphans), pace, burn, tuple(shown), notes)

    # ------------------------------------------------------------------ what is needed

    def _demand(self, region: RegionTarget, memory: AutoscalerMemory, observed: Observed) -> float:
        """Return the speed that what runs and what waits needs, where no plan says it."""
        if region.rows_per_s > 0:
            return region.rows_per_s
        least = min((kind.rows_per_s for kind in region.kinds), default=0.0)
        total = observed.pending.get(region.name, 0) * least
        for duty in self._of(memory, region.name, "worker")[0]:
            node = observed.node(duty.machine.id)
            # Whoever has just been told to leave counts once more: it is replaced at once, and what
            # ran there waits for a place by itself after that.
            stays = duty.parting in (None, Parting(NOTICE), Parting(DRAINED))
            if stays and node.is_ready and node.is_busy:
                kind = region.kind(duty.machine.pool.type, "worker")
                total += kind.rows_per_s if kind else 0.0
        return total

    def _posts(self, region: RegionTarget, pace: RunPace, rows_per_s: float) -> list[Post]:
        wanted = rows_per_s * pace.speed
        name, only, reason = region.name, pace.only_on_demand, pace.reason
        floor = min(region.floor, 1)
        found = []
        if region.server is not None:
            server = replace(region.server, rows_per_s=1.0, cap=max(1, region.server.cap))
            need = 1.0 if wanted > 0 else 0.0
            found.append(Post(name, "server", need, (server,), 0, bool(floor) or only, reason))
            floor = 0
        found.append(Post(name, "worker", wanted, region.kinds, floor, only, reason))
        if pace.speed <= 0:
            return [replace(post, is_over=True) for post in found]
        return found

    def _losses(
        self, target: ClusterTarget, memory: AutoscalerMemory, observed: Observed
    ) -> Losses:
        """Return what preemptions cost: before anything runs, by the cheapest that could."""
        weight_h = self._config.hazard_weight_h
        free = Losses.of(target, weight_h, 0.0)
        usual = 0.0
        for region in target.regions:
            now_s = observed.now_unix_s
            offers = offers_of(region, region.kinds, memory, observed.stocks, free, now_s)
            scores = [o.full_usd_per_hour / o.kind.rows_per_s for o in offers if o.usd_per_hour]
            usual += min(scores, default=0.0) * region.rows_per_s
        burn = burn_usd_per_hour(memory, target, observed.now_unix_s)
        return Losses.of(target, weight_h, max(usual, burn))

    def _of(
        self, memory: AutoscalerMemory, region: str, role: MachineRole
    ) -> tuple[list[Duty], list[Intent]]:
        duties = [
            each for each in memory.duties.values() if _place(each.machine.labels) == (region, role)
        ]
        intents = [
            each
            for each in memory.intents.values()
            if _place(each.request.labels) == (region, role)
        ]
        return duties, intents

    # ------------------------------------------------------------------ what is done

    def _carry_out(
        self,
        memory: AutoscalerMemory,
        region: RegionTarget,
        post: Post,
        choice: PostChoice,
        now_s: float,
    ) -> list[Action]:
        actions: list[Action] = []
        for pool, (count, reason, usd) in choice.launches.items():
            memory.launches += 1
            request = LaunchRequest(
                f"{self.prefix}{self._made}-{memory.epoch}-{memory.launches}",
                self._cluster,
                pool,
                count,
                region.labels(pool, post.role),
                now_s + self._config.life_h * 3600.0,
            )
            memory.intents[request.request_id] = Intent(request, reason, usd, now_s, now_s)
            actions.append(Launch(request, post.region, reason, choice.alternatives))
        for duty, reason in choice.drains:
            actions.append(self._drain(duty, post.region, reason, now_s))
        return actions

    def _drain(self, duty: Duty, region: str, reason: str, now_s: float) -> Drain:
        until_s = now_s + self._config.drain_s
        if duty.machine.ends_unix_s is not None:
            until_s = min(until_s, duty.machine.ends_unix_s)
        duty.parting = Parting(reason, until_s)
        return Drain(duty.machine.id, region, reason, until_s)

    def _call_off(self, memory: AutoscalerMemory, post: Post) -> None:
        """Forget what was asked for and is not needed: what comes of it all the same is ended."""
        for intent in self._of(memory, post.region, post.role)[1]:
            del memory.intents[intent.request.request_id]

    def _strangers(
        self, target: ClusterTarget, memory: AutoscalerMemory, observed: Observed
    ) -> list[Action]:
        """Send away machines of regions and roles that the target does not have any more."""
        known = {(each.name, "worker") for each in target.regions}
        known |= {(each.name, "server") for each in target.regions if each.server is not None}
        now_s = observed.now_unix_s
        return [
            self._drain(duty, duty.machine.labels.get(REGION_LABEL, ""), "not in the plan", now_s)
            for duty in memory.duties.values()
            if _place(duty.machine.labels) not in known
            and duty.machine.pool.region not in observed.silent
            and (duty.parting is None or duty.parting.until_unix_s is None)
        ]

    def _ends(self, memory: AutoscalerMemory, observed: Observed) -> list[Action]:
        """End what was drained and is free, or has had its time."""
        found: list[Action] = []
        for duty in memory.duties.values():
            parting = duty.parting
            if parting is None or parting.until_unix_s is None:
                continue
            if duty.machine.pool.region in observed.silent:
                continue
            node = observed.node(duty.machine.id)
            is_over = observed.now_unix_s >= parting.until_unix_s
            if is_over or not node.is_busy or parting.reason == NO_NODE_CAME:
                region = duty.machine.labels.get(REGION_LABEL, "")
                found.append(End(duty.machine.id, region, parting.reason))
        return found

    def _again(self, memory: AutoscalerMemory, observed: Observed) -> list[Action]:
        """Send requests again of which nothing was seen: the clouds make each only once."""
        found: list[Action] = []
        now_s = observed.now_unix_s
        for intent in memory.intents.values():
            if intent.request.pool.region in observed.silent:
                continue
            waited_s = now_s - intent.sent_unix_s
            if waited_s >= self._config.retry.resend_s and outstanding(memory, intent) > 0:
                intent.sent_unix_s = now_s
                intent.sends += 1
                region = intent.request.labels.get(REGION_LABEL, "")
                found.append(Launch(intent.request, region, "nothing was seen of it yet"))
        return found


def _place(labels: Mapping[str, str]) -> tuple[str, str]:
    return labels.get(REGION_LABEL, ""), labels.get(ROLE_LABEL, "worker")
