"""What the jobs that came lately would bid a unit of each resource up to.

Idea: prices that start near nothing sell an empty cluster to whoever comes first, although more
jobs come than it can hold. If jobs keep coming as they did, those of ``n`` slots have the capacity
of ``n`` slots; what is scarce then, and how much, is known before it is sold. Rule: the dual prices
of

    max sum_i u_i x_i   such that   sum_i d_i_r x_i <= sum_t,s C_t_s_r  for each r,   0 <= x <= 1

with ``t`` the slots since the first of these jobs came, ``u_i`` the worth of job ``i`` at its
fastest, and ``d_i_r`` what its work takes of ``r`` with the workers and parameter servers that do
most each. When: more is asked for than there is, for long. Source: learning dual prices from a
sample, as in online linear programming (memory); its use as the least price of PD-ORS is ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from geo_ray.scheduling.model.cluster import Floats, SharedCluster
from geo_ray.scheduling.model.job import ClusterJob
from geo_ray.scheduling.model.speed import LinkUsed

_RECENT: Final = 200  # jobs that are looked at: a decision stays short, and loads change


@dataclass(frozen=True, eq=False)
class _Bid:
    slot: int
    worth: float
    units_R: Floats


class LoadFloor:
    """See the module's docstring.

    Attributes:
        price_R: of a unit in a slot.
    """

    def __init__(self, cluster: SharedCluster) -> None:
        self._cluster = cluster
        self._link = LinkUsed(float(cluster.inside_mbps_S.max()), is_inside=True)
        self._bids: dict[str, _Bid] = {}  # by job, in their order
        self.price_R = np.zeros(len(cluster.resources))

    def learn(self, job: ClusterJob) -> None:
        """Take in a job that has come; nothing is bid where there was no room at all."""
        from scipy.optimize import linprog  # slow to import

        if len(self._bids) == _RECENT:
            del self._bids[next(iter(self._bids))]
        self._bids[job.id] = self._bid(job)
        bids = list(self._bids.values())
        since = slice(min(bid.slot for bid in bids), job.arrival_slot + 1)
        capacity_R = self._cluster.capacity_TSR[since].sum(axis=(0, 1))
        if not capacity_R.any():
            self.price_R = np.zeros(len(capacity_R))
            return
        done = linprog(
            [-bid.worth for bid in bids],
            A_ub=np.stack([bid.units_R for bid in bids], axis=1),
            b_ub=capacity_R,
            bounds=(0, 1),
            method="highs",
        )
        self.price_R = -np.asarray(done.ineqlin.marginals)

    def _bid(self, job: ClusterJob) -> _Bid:
        demands, batch = job.demands, job.speed.batch.rows
        workers_W = np.arange(1, min(demands.most_workers, batch) + 1)
        servers_W = -(-workers_W // demands.workers_per_server)
        per_s_W = job.speed.rows_per_s(workers_W, servers_W, batch, self._link)
        slots_W = job.rows / (per_s_W * self._cluster.slot_s)
        least_slots = max(1, int(np.ceil(slots_W.min() - 1e-9)))
        units_R = demands.units_R(
            float((workers_W * slots_W).min()), float((servers_W * slots_W).min())
        )
        return _Bid(job.arrival_slot, job.utility.of(least_slots - 1), units_R)
