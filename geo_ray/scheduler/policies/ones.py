"""ONES: an evolutionary search over the assignment of accelerators, with growing batches.

Idea: elasticity through the batch size, and a continuous search. Rule: a genome assigns a job, or
none, to each worker position; the population persists between slots. *Refresh* removes jobs
that ended and fills idle positions with waiting jobs; *uniform crossover* swaps positions of
two genomes; *uniform mutation* resets positions, which are filled again. The genomes with the
smallest expected remaining use survive: ``sum_j c_j Y_j (1 / rho_j - 1) / X_j`` over running
jobs, with ``c`` positions, ``Y`` finished rows and ``X`` speed. The progress ``rho`` is unknown
and drawn from a Beta distribution, whose parameters are the finished work and the further work
of jobs that ended. *Reorder*, which makes the genes of a job adjacent, is done by the
placement. A job's batch may double with every slot that it trained, and halves when more jobs
wait than run. A change costs about a second, without a restart. When: many short jobs of
unknown length on a cluster with enough accelerators; if jobs wait, Optimus and Tiresias
complete them sooner. Source: the abstract of ONES (SC 2021, arXiv 2108.03645); operators and
score are reconstructed, and the unknown regressor behind the Beta distribution is replaced by
the mean of jobs that ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from geo_ray.scheduler.cluster import Floats, SharedCluster
from geo_ray.scheduler.placement import progress_curve, put, worker_fractions
from geo_ray.scheduler.policy import SlotDecision, SlotScheduler, SlotView

_NONE = ""


@dataclass(frozen=True, slots=True)
class OnesPolicy:
    """ONES; see the module.

    Attributes:
        population: surviving genomes.
        generations: generations per slot.
        mutation: fraction of positions that a mutation resets.
        most_places: maximum genes of a genome.
        change_s: seconds lost by a job whose allocation changes.
    """

    population: int = 16
    generations: int = 8
    mutation: float = 0.1
    most_places: int = 256
    change_s: float = 1.0

    def begin(self, cluster: SharedCluster, seed: int) -> SlotScheduler:
        """See `SchedulingPolicy`."""
        return _Ones(self, cluster, seed)


class _Ones:
    def __init__(self, policy: OnesPolicy, cluster: SharedCluster, seed: int) -> None:
        self._policy, self._cluster = policy, cluster
        self._rng = np.random.default_rng(seed)
        self._genomes: list[list[str]] = []
        self._limit: dict[str, int] = {}
        self._done: dict[str, float] = {}
        self._ended: list[float] = []

    def decide(self, view: SlotView) -> SlotDecision:
        self._remember(view)
        names = list(view.active)
        fractions = worker_fractions(view)
        places = int(min(self._policy.most_places, max(1, 1 / max(1e-9, np.median(fractions)))))
        curves = {
            name: progress_curve(self._cluster, each.job, self._limit[name])
            for name, each in view.active.items()
        }
        left = self._drawn_left(view)
        genomes = [self._refreshed(genome, names, curves, places) for genome in self._genomes]
        while len(genomes) < self._policy.population:
            genomes.append(self._refreshed([], names, curves, places))
        for _ in range(self._policy.generations):
            children = []
            for _ in range(self._policy.population // 2):
                one, two = self._rng.integers(len(genomes), size=2)
                swap = self._rng.random(places) < 0.5
                pairs = zip(genomes[one], genomes[two], swap, strict=True)
                child = [b if is_swapped else a for a, b, is_swapped in pairs]
                reset = self._rng.random(places) < self._policy.mutation
                child = [_NONE if gone else gene for gene, gone in zip(child, reset, strict=True)]
                children.append(self._refreshed(child, names, curves, places))
            genomes += children
            genomes.sort(key=partial(self._score, left=left, curves=curves))
            genomes = genomes[: self._policy.population]
        self._genomes = genomes
        best = genomes[0]
        wanted = {
            name: (count, self._limit[name])
            for name in names
            if (count := min(best.count(name), len(curves[name]) - 1))
        }
        return SlotDecision(put(self._cluster, view, wanted))

    def _remember(self, view: SlotView) -> None:
        for name in [name for name in self._done if name not in view.active]:
            self._ended.append(self._done.pop(name))
            self._limit.pop(name, None)
        running = sum(each.had is not None for each in view.active.values())
        is_crowded = len(view.active) - running > running
        for name, each in view.active.items():
            batch = each.job.speed.batch
            limit = self._limit.get(name, batch.rows)
            if each.had is not None:
                limit = limit * 2
            if is_crowded:
                limit //= 2
            self._limit[name] = max(batch.rows, min(batch.most_rows, limit))
            self._done[name] = each.job.rows - each.rows_left

    def _drawn_left(self, view: SlotView) -> dict[str, float]:
        """Return the sampled remaining rows of each job; the true number is not used."""
        typical = float(np.mean(self._ended)) if self._ended else 0.0
        found = {}
        for name, each in view.active.items():
            unit = max(1.0, typical or each.job.speed.batch.rows * 1000.0) / 10
            done = max(unit, self._done[name])
            more = max(1.0, (typical - done) / unit)
            rho = float(self._rng.beta(1 + done / unit, 1 + more))
            found[name] = done * (1 / max(1e-3, rho) - 1)
        return found

    def _refreshed(
        self, genome: list[str], names: list[str], curves: dict[str, Floats], places: int
    ) -> list[str]:
        alive = set(names)
        retained = [gene if gene in alive else _NONE for gene in genome[:places]]
        retained += [_NONE] * (places - len(retained))
        counts: dict[str, int] = {}
        for gene in retained:
            counts[gene] = counts.get(gene, 0) + 1
        idle = [place for place, gene in enumerate(retained) if gene == _NONE]
        waiting = [name for name in names if name not in counts]
        self._rng.shuffle(waiting)
        for place in idle:
            if waiting:
                name = waiting.pop()
            else:
                open_ = [name for name in names if counts.get(name, 0) < len(curves[name]) - 1]
                if not open_:
                    break
                name = open_[int(self._rng.integers(len(open_)))]
            retained[place] = name
            counts[name] = counts.get(name, 0) + 1
        return retained

    def _score(self, genome: list[str], left: dict[str, float], curves: dict[str, Floats]) -> float:
        total = 0.0
        counts: dict[str, int] = {}
        for gene in genome:
            if gene != _NONE:
                counts[gene] = counts.get(gene, 0) + 1
        for name, count in counts.items():
            used = min(count, len(curves[name]) - 1)
            total += count * left[name] / float(curves[name][used])
        return total
