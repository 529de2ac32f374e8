"""Pollux: workers and batch by goodput, that is speed times statistical efficiency.

Idea: a larger batch is faster but each row is less effective, so workers and batch are chosen
jointly. Rule: the goodput of ``K`` workers is the maximum over batches of rows per second times
the efficiency ``(noise + M0) / (noise + M)``, from the measured gradient noise and the
planner's speed. A genetic search finds the workers of all jobs that maximize the power mean (p
= -1) of speedups over a fair share; a job that changes is discounted by its age over its age
plus a restart. When: jobs are elastic and their noise is measured. Source: goodput, mean and
restart factor from the code of Pollux (OSDI 2021); the search is similar (one-point crossover,
mutation, repair), over numbers of workers that are placed afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from geo_ray.scheduler.cluster import Floats, SharedCluster
from geo_ray.scheduler.job import ClusterJob
from geo_ray.scheduler.placement import progress_curve, put, worker_fractions
from geo_ray.scheduler.policy import SlotDecision, SlotScheduler, SlotView


@dataclass(frozen=True, slots=True)
class PolluxPolicy:
    """Pollux; see the module.

    Attributes:
        population: population of the search.
        generations: generations of the search per slot.
        batches: candidate batches between a job's own and its maximum, in geometric steps.
        most_workers: maximum workers of a job.
        change_s: seconds lost by a job whose allocation changes; also the restart in the rule.
    """

    population: int = 24
    generations: int = 20
    batches: int = 6
    most_workers: int = 64
    change_s: float = 30.0

    def begin(self, cluster: SharedCluster, seed: int) -> SlotScheduler:
        """See `SchedulingPolicy`."""
        return _Pollux(self, cluster, seed)


class _Pollux:
    def __init__(self, policy: PolluxPolicy, cluster: SharedCluster, seed: int) -> None:
        self._policy, self._cluster = policy, cluster
        self._rng = np.random.default_rng(seed)
        self._known: dict[str, tuple[Floats, np.ndarray]] = {}
        self._age: dict[str, int] = {}

    def decide(self, view: SlotView) -> SlotDecision:
        names = list(view.active)
        if not names:
            return SlotDecision({})
        self._age = {name: self._age.get(name, -1) + 1 for name in names}
        self._known = {
            name: self._known.get(name) or self._goodput(view.active[name].job) for name in names
        }
        width = max(len(curve) for curve, _ in self._known.values())
        good_JW = np.zeros((len(names), width))
        for row, name in enumerate(names):
            curve = self._known[name][0]
            good_JW[row, : len(curve)] = curve
            good_JW[row, len(curve) :] = curve[-1]
        most_J = np.array([len(self._known[name][0]) - 1 for name in names])
        fractions_J = worker_fractions(view)
        had = [view.active[name].had for name in names]
        had_J = np.array([0 if each is None else each.num_workers for each in had])
        chosen_J = self._searched(good_JW, most_J, fractions_J, np.minimum(had_J, most_J), names)
        wanted = {
            name: (int(count), int(self._known[name][1][count]))
            for name, count in zip(names, chosen_J, strict=True)
            if count
        }
        return SlotDecision(put(self._cluster, view, wanted))

    def _goodput(self, job: ClusterJob) -> tuple[Floats, np.ndarray]:
        """Return the best goodput by number of workers, and its batch."""
        batch = job.speed.batch
        sizes = np.unique(np.geomspace(batch.rows, batch.most_rows, self._policy.batches).round())
        most = min(job.demands.most_workers, batch.rows, self._policy.most_workers)
        curves = np.stack(
            [progress_curve(self._cluster, job, int(size))[: most + 1] for size in sizes]
        )
        place_W = curves.argmax(axis=0)
        return curves[place_W, np.arange(most + 1)], sizes[place_W].astype(np.int64)

    def _searched(
        self,
        good_JW: Floats,
        most_J: np.ndarray,
        fractions_J: Floats,
        had_J: np.ndarray,
        names: list[str],
    ) -> np.ndarray:
        rng, num = self._rng, len(names)
        fair_J = np.clip((1 / num / fractions_J).astype(np.int64), 1, most_J)
        base_J = good_JW[np.arange(num), fair_J]
        restart_s = self._policy.change_s
        age_s_J = np.array([self._age[name] * self._cluster.slot_s for name in names])
        retained_J = np.where(had_J > 0, age_s_J / (age_s_J + restart_s), 1.0)

        def score(many_PJ: np.ndarray) -> Floats:
            speedup_PJ = good_JW[np.arange(num), many_PJ] / base_J
            speedup_PJ = np.where(many_PJ == had_J, speedup_PJ, speedup_PJ * retained_J)
            return np.asarray(1 / (1 / np.maximum(speedup_PJ, 1e-3)).mean(axis=1))

        def repaired(many_PJ: np.ndarray) -> np.ndarray:
            for row in many_PJ:
                while row @ fractions_J > 1 + 1e-9:
                    full = np.flatnonzero(row)
                    row[rng.choice(full)] //= 2
            return many_PJ

        start_PJ = np.stack([had_J, fair_J] * (self._policy.population // 2))
        people_PJ = repaired(np.minimum(start_PJ, most_J))
        for _ in range(self._policy.generations):
            one = people_PJ[rng.integers(len(people_PJ), size=len(people_PJ))]
            two = people_PJ[rng.integers(len(people_PJ), size=len(people_PJ))]
            cut = rng.integers(0, num + 1, (len(one), 1))
            child_PJ = np.where(np.arange(num) < cut, one, two)
            changed = rng.random(child_PJ.shape) < max(0.1, 1 / num)
            grown = rng.integers(0, np.minimum(most_J, np.maximum(1, 2 * child_PJ)) + 1)
            child_PJ = repaired(np.where(changed, grown, child_PJ))
            both_PJ = np.concatenate([people_PJ, child_PJ])
            order = np.argsort(-score(both_PJ), kind="stable")[: len(people_PJ)]
            people_PJ = both_PJ[order]
        return np.asarray(people_PJ[0])
