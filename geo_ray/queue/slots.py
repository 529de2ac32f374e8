"""The policy of an era: asked at every slot's beginning, and made again from what it was asked.

A policy remembers what it has promised. That memory is not written down: whoever goes on with a
queue asks a new policy the same questions in the same order, from the journal, and so has one that
remembers the same. Eras keep that short.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from geo_ray.queue.config import QueueConfig
from geo_ray.queue.entries import SlotEntry
from geo_ray.queue.model import (
    WINDOW_SLOTS,
    adapted,
    allocation_of,
    cluster_job,
    cluster_of,
    given_of,
    see_room,
    work_rows,
)
from geo_ray.queue.state import EraState, QueuedJob
from geo_ray.scheduling.model.cluster import SharedCluster
from geo_ray.scheduling.policies.base import (
    JobProgress,
    SlotDecision,
    SlotScheduler,
    SlotView,
)
from geo_ray.scheduling.policies.registry import policy_named

ERA_SLOTS: Final = 400


class QueueSlots:
    """See the module's docstring.

    Args:
        config: the queue.
        era: as the journal has it.
        jobs: all that it has, by name.
    """

    def __init__(self, config: QueueConfig, era: EraState, jobs: Mapping[str, QueuedJob]) -> None:
        self._config, self._era, self._jobs = config, era, jobs
        self._begun: tuple[SharedCluster, SlotScheduler] | None = None
        self._arrived: dict[str, int] = {}
        self._gone: list[str] = []
        self._before: SlotEntry | None = None
        for entry in era.slots:
            self._ask(entry)
            self._before = entry

    @property
    def number(self) -> int:
        """Of the era."""
        return self._era.number

    def decide(self, question: SlotEntry) -> SlotEntry:
        """Return a slot with the policy's answer.

        Args:
            question: the slot with what is seen.
        """
        decision, cluster = self._ask(question)
        payoffs = {each.job: each.payoff for each in decision.admissions}
        turned_away = tuple(each.job for each in decision.admissions if not each.is_admitted)
        given = {name: given_of(each, cluster) for name, each in decision.allocations.items()}
        answer = {"given": given, "payoffs": payoffs, "turned_away": turned_away}
        return question.model_copy(update=answer)

    def answered(self, entry: SlotEntry) -> None:
        """Note what came of a slot, which the next one is shown."""
        self._before = entry

    def _ask(self, entry: SlotEntry) -> tuple[SlotDecision, SharedCluster]:
        if self._begun is None:
            cluster = cluster_of(self._config, entry.room, ERA_SLOTS + WINDOW_SLOTS)
            policy = adapted(policy_named(self._config.policy), self._config.worth_per_usd)
            self._begun = (cluster, policy.begin(cluster, self._era.number))
        cluster, scheduler = self._begun
        see_room(cluster, self._config, entry.room, entry.slot)
        self._gone += entry.gone
        if not entry.jobs:  # policies are asked about jobs; who is gone is told with the next ones
            return SlotDecision({}), cluster
        gone, self._gone = self._gone, []
        for name in entry.arrived:
            self._arrived[name] = entry.slot
        active = {name: self._progress(name, entry, cluster) for name in entry.jobs}
        view = SlotView(
            entry.slot,
            [active[name].job for name in entry.arrived],
            active,
            cluster.capacity_TSR[entry.slot],
            gone,
            frozenset(name for name in entry.jobs if entry.jobs[name].admitted),
            frozenset(name for name in entry.jobs if entry.jobs[name].lost),
        )
        return scheduler.decide(view), cluster

    def _progress(self, name: str, entry: SlotEntry, cluster: SharedCluster) -> JobProgress:
        seen, job = entry.jobs[name], self._jobs[name]
        spec = job.request.spec
        arrival = self._arrived[name]
        slot_s = self._config.slot_s
        began_unix_s = self._era.began_unix_s + arrival * slot_s
        shown_unix_s = began_unix_s if job.shown_unix_s is None else job.shown_unix_s
        waited = max(0.0, round((began_unix_s - shown_unix_s) / slot_s))
        one = cluster_job(name, spec, seen, arrival, waited, cluster)
        before, had = self._before, None
        kept = before is not None and name in before.given and name not in before.held
        if before is not None and kept and before.jobs[name].regions == seen.regions:
            had = allocation_of(before.given[name], spec, cluster)
        return JobProgress(one, work_rows(spec, seen), seen.attained_s, had, seen.waited)
