"""Dorm: partitions that follow the load, by an integer program.

Idea: choosing all partitions jointly gives high utilization; limiting changes keeps jobs
undisturbed. Rule: in each slot, the workers of all active jobs maximize the sum of dominant
resource shares, subject to: no share falls below ``1 - fairness_loss`` of the equal share (as
far as feasible), and at most ``change_fraction`` of the running jobs change. Jobs that keep
their allocation are placed first. When: utilization matters most. Source: the abstract of Dorm
names utilization, fairness and adjustment; the program is reconstructed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from geo_ray.scheduler.cluster import Allocation, SharedCluster
from geo_ray.scheduler.placement import SiteCapacity
from geo_ray.scheduler.policy import JobProgress, SlotDecision, SlotScheduler, SlotView


@dataclass(frozen=True, slots=True)
class DormPolicy:
    """Dorm; see the module.

    Attributes:
        fairness_loss: allowed fraction below the equal share.
        change_fraction: maximum fraction of running jobs that change per slot.
        limit_s: time limit of the solver, which then returns its best solution.
        change_s: seconds lost by a job whose partition changes.
    """

    fairness_loss: float = 0.5
    change_fraction: float = 0.2
    limit_s: float = 1.0
    change_s: float = 30.0

    def begin(self, cluster: SharedCluster, seed: int) -> SlotScheduler:
        """See `SchedulingPolicy`."""
        del seed  # deterministic
        return _Dorm(self, cluster)


class _Dorm:
    def __init__(self, policy: DormPolicy, cluster: SharedCluster) -> None:
        self._policy, self._cluster = policy, cluster

    def decide(self, view: SlotView) -> SlotDecision:
        capacity = SiteCapacity(self._cluster, view.capacity_SR)
        jobs = list(view.active.values())
        wanted = self._workers(jobs, view.capacity_SR.sum(axis=0))
        given: dict[str, Allocation] = {}
        for each, workers in zip(jobs, wanted, strict=True):
            had = each.had
            if had is not None and had.num_workers == workers and capacity.fits(each.job, had):
                capacity.take(each.job, had)
                given[each.job.id] = had
        for each, workers in zip(jobs, wanted, strict=True):
            if each.job.id in given:
                continue
            count = int(workers)
            while count > 0:
                found = capacity.place(each.job, count)
                if found is not None and found.num_workers <= self._most(each):
                    capacity.take(each.job, found)
                    given[each.job.id] = found
                    break
                count //= 2  # the sum over all sites exceeds what any placement fits
        return SlotDecision(given)

    def _workers(self, jobs: list[JobProgress], total_R: np.ndarray) -> np.ndarray:
        """Solve for the workers of each job over aggregated sites; 1 each if infeasible."""
        from scipy.optimize import Bounds, LinearConstraint, milp  # slow import
        from scipy.sparse import coo_matrix

        num = len(jobs)
        total_R = np.maximum(1e-9, total_R)
        per_worker = [
            each.job.demands.units_R(1, 1 / each.job.demands.workers_per_server) for each in jobs
        ]
        fraction = np.array([float((units_R / total_R).max()) for units_R in per_worker])
        most = np.array([self._most(each) for each in jobs])
        had = np.array([0 if each.had is None else each.had.num_workers for each in jobs])
        running = had > 0
        least = np.floor((1 - self._policy.fairness_loss) / num / np.maximum(fraction, 1e-12))
        least = np.minimum(least, most)
        # Variables: workers of each job, then whether each running job changes.
        rows, cols, data, low, high = [], [], [], [], []
        for r in range(len(total_R)):
            for place in range(num):
                rows.append(r)
                cols.append(place)
                data.append(per_worker[place][r])
            low.append(-np.inf)
            high.append(total_R[r])
        row = len(total_R)
        for place in np.flatnonzero(running).tolist():
            for sign in (1.0, -1.0):
                rows += [row, row]
                cols += [place, num + place]
                data += [sign, -float(max(most[place], had[place]))]
                low.append(-np.inf)
                high.append(sign * float(had[place]))
                row += 1
        rows += [row] * num
        cols += list(range(num, 2 * num))
        data += [1.0] * num
        low.append(-np.inf)
        high.append(float(math.ceil(self._policy.change_fraction * running.sum())))
        lower = np.concatenate([np.where(running, np.minimum(least, had), least), np.zeros(num)])
        upper = np.concatenate([most, running.astype(float)])
        for floor in (lower, np.zeros(2 * num)):  # retry without fairness if infeasible
            done = milp(
                -np.concatenate([fraction, np.zeros(num)]),
                constraints=LinearConstraint(
                    coo_matrix((data, (rows, cols)), shape=(row + 1, 2 * num)).tocsr(), low, high
                ),
                bounds=Bounds(floor, upper),
                integrality=np.concatenate([np.ones(num), np.zeros(num)]),
                options={"time_limit": self._policy.limit_s, "mip_rel_gap": 0.01},
            )
            if done.x is not None:
                return np.asarray(np.round(done.x[:num]).astype(np.int64))
        return np.ones(num, dtype=np.int64)

    def _most(self, each: JobProgress) -> int:
        return min(each.job.demands.most_workers, each.job.speed.batch.rows)
