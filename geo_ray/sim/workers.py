"""Workers of simulated regions that are lost, sent away, and replaced, at given times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Literal

from geo_ray.job.eval_notes import Emit
from geo_ray.sim.region import SimRegion
from geo_ray.sim.scheduler import Scheduler

WorkerEvent = Literal["lost", "dismissed", "replaced"]


class SimWorkers:
    """What happens to workers; see the module's docstring.

    Args:
        regions: those that take part; may change.
        scheduler: virtual time.
        emit: takes the events.
    """

    def __init__(self, regions: Mapping[str, SimRegion], scheduler: Scheduler, emit: Emit) -> None:
        self._regions = regions
        self._scheduler = scheduler
        self._emit = emit
        self._coming: Counter[str] = Counter()  # replacements that have not happened yet
        self._standing: set[str] = set()  # regions that wait for one

    def at(self, when_s: float, region: str, rank: int, what: WorkerEvent) -> None:
        """Let something happen to a worker at ``when_s``, unless the run is over by then.

        Args:
            when_s: when.
            region: of the worker.
            rank: its rank.
            what: its process ends; or it is told that its machine will be gone; or a new one of
                its rank is there.
        """
        self._coming[region] += what == "replaced"
        self._scheduler.idly_at(when_s, partial(self._happen, region, rank, what))

    def _happen(self, name: str, rank: int, what: WorkerEvent) -> None:
        self._coming[name] -= what == "replaced"
        region, now_s = self._regions.get(name), self._scheduler.now_s
        if region is not None:
            about = {"region": name, "worker": rank}
            if what == "lost":
                self._emit("worker_lost", now_s, cause="its process ended", **about)
                region.lose_worker(rank)
            elif what == "dismissed":
                self._emit("worker_left", now_s, cause="its machine will be gone", **about)
                region.dismiss_worker(rank)
            else:
                epoch = region.replace_worker(rank)
                self._emit("worker_replaced", now_s, epoch=epoch, **about)
        stands = region is not None and region.lacks_workers and self._coming[name] > 0
        if stands and name not in self._standing:
            self._standing.add(name)
            self._scheduler.hold()
        elif not stands and name in self._standing:
            self._standing.discard(name)
            self._scheduler.let_go()
