"""Prices of resources by site and slot: exponential in how much of them is promised.

``p = L (U / L)^(rho / C)``: with nothing promised a price is L, which any job can pay; with all of
it U, which none can. Both are learned from the jobs that have come so far, each when it comes:

    U_r = max_i u_i(fastest) / d_i_r          worth per unit, if it finishes as fast as it can
    L   = min_i u_i(until the end) / (2 T sum_{s,r} C)      worth per unit, if it finishes last

``d_i_r`` is what the job uses of ``r`` in all its slots together at its fastest (``tight``), or the
demand of one worker and one parameter server, as in the paper. ``L`` is kept within a factor
``e^span`` of U, since a job that is worth nothing when late would make it 0.

The analysis takes what a job has in a slot to be small beside ``C``, so that the price hardly moves
while it is sold. For a job that has much of a slot, `surcharge` gives what the rise adds.

With ``load_share`` no price is less than that part of what the load so far bids; see `LoadFloor`.

Source: PD-ORS (arXiv 2108.02917); the form is reconstructed from memory, its constants are derived
anew, tight bounds and the span are ours.
"""

from __future__ import annotations

import math

import numpy as np

from geo_ray.scheduling.model.cluster import Floats, SharedCluster
from geo_ray.scheduling.model.job import ClusterJob
from geo_ray.scheduling.model.speed import LinkUsed
from geo_ray.scheduling.pricing.load_floor import LoadFloor


class PriceBoard:
    """See the module's docstring.

    Attributes:
        promised_TSR: what is given away of each slot.
    """

    def __init__(
        self,
        cluster: SharedCluster,
        *,
        tight: bool = True,
        span: float = 6.0,
        load_share: float = 0.0,
    ) -> None:
        self._cluster = cluster
        self._tight = tight
        self._span = span
        self._load_share = load_share
        self._floor = LoadFloor(cluster)
        self.promised_TSR = np.zeros(cluster.capacity_TSR.shape)
        self._top_R = np.zeros(len(cluster.resources))
        self._low = math.inf
        self._units = float(cluster.capacity_TSR[0].sum()) * cluster.slots
        self._link = LinkUsed(float(cluster.inside_mbps_S.max()), is_inside=True)

    def learn(self, job: ClusterJob, *, is_new: bool = True) -> None:
        """Take in the bounds of a job that has come.

        Args:
            job: the job.
            is_new: whether it adds to the load; one that was taken on before does not once more.
        """
        demands, batch = job.demands, job.speed.batch.rows
        workers = min(demands.most_workers, batch)
        servers = demands.servers(workers)
        per_s = float(job.speed.rows_per_s(workers, servers, batch, self._link))
        slots = max(1, math.ceil(job.rows / (per_s * self._cluster.slot_s) - 1e-9))
        best = job.utility.of(slots - 1)
        if self._tight:
            share = job.rows / (per_s * self._cluster.slot_s)
            used_R = demands.units_R(workers, servers) * share
        else:
            used_R = demands.units_R(1, 1)
        paid = used_R > 0
        self._top_R[paid] = np.maximum(self._top_R[paid], best / used_R[paid])
        last = job.utility.of(self._cluster.slots - job.arrival_slot)
        self._low = min(self._low, last / (2 * self._units))
        if self._load_share and is_new:
            self._floor.learn(job)

    @property
    def bounds(self) -> tuple[Floats, Floats]:
        """The largest and the least price of each resource, (R,) each."""
        floor_R = self._load_share * self._floor.price_R
        top_R = np.maximum(np.maximum(self._top_R, 1e-12), floor_R)
        low_R = np.maximum(min(self._low, float(top_R.min())), top_R * math.exp(-self._span))
        return top_R, np.maximum(low_R, floor_R)

    def surcharge(self, slot: int, used_SR: Floats) -> float:
        """Return how much more some use of a slot costs if prices rise while it is sold.

        That is the integral of the price from what is promised to that and the use, less the use at
        the price before.

        Args:
            slot: which.
            used_SR: of each site's resources.
        """
        top_R, low_R = self.bounds
        capacity_SR = self._cluster.capacity_TSR[slot]
        growth_SR = np.divide(
            np.log(top_R / low_R), capacity_SR, out=np.zeros_like(used_SR), where=capacity_SR > 0
        )
        before_SR = low_R * np.exp(growth_SR * np.minimum(self.promised_TSR[slot], capacity_SR))
        rise_SR = growth_SR * used_SR
        factor_SR = np.divide(
            np.expm1(rise_SR), rise_SR, out=np.ones_like(used_SR), where=rise_SR > 0
        )
        return float((used_SR * before_SR * (factor_SR - 1.0)).sum())

    def prices(self, slots: slice, capacity_NSR: Floats) -> Floats:
        """Return the prices of some slots, (N, S, R).

        Args:
            slots: which.
            capacity_NSR: what there is in them, as it is expected.
        """
        top_R, low_R = self.bounds
        promised_NSR = self.promised_TSR[slots]
        share_NSR = np.divide(
            promised_NSR, capacity_NSR, out=np.zeros_like(promised_NSR), where=capacity_NSR > 0
        )
        share_NSR = np.minimum(share_NSR, 1.0)
        return np.asarray(low_R * np.exp(share_NSR * np.log(top_R / low_R)))
