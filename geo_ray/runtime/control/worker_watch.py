"""Watches over the workers of a run: hears when one ends, replaces it, sends it away on notice.

What is done about a loss is decided by `RunPolicy`; how a region goes on meanwhile, by its server.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import ray

from geo_ray.errors import GeoRayError
from geo_ray.runtime.cluster.ray_failures import failure_of
from geo_ray.runtime.control.actor_group import ActorGroup
from geo_ray.runtime.control.calls import kill
from geo_ray.runtime.control.group_worker import GroupWorker
from geo_ray.runtime.control.notices import DrainNotices
from geo_ray.runtime.control.policy import RunPolicy

Place = tuple[str, int]
"""Region and rank."""


@dataclass(slots=True)
class _Coming:
    """A replacement that was requested, and does not work yet.

    Attributes:
        worker: it.
        asked_s: when it was requested.
        has_started: whether its process runs.
    """

    worker: GroupWorker
    asked_s: float = field(default_factory=time.monotonic)
    has_started: bool = False


@dataclass(slots=True)
class WorkerWatch:
    """See the module's docstring.

    Attributes:
        actors: of the run.
        policy: decides.
        emit: takes events of now: a kind, and its fields by name.
        hear_all: takes in what servers have to say, before a loss is judged.
        notices: of machines that will be gone.
        leaves: whether a region leaves as a whole for such a notice.
    """

    actors: ActorGroup
    policy: RunPolicy
    emit: Callable[..., None]
    hear_all: Callable[[], None]
    notices: DrainNotices
    leaves: Callable[[str], bool] = lambda region: False
    _status: dict[str, Mapping[str, Any]] = field(default_factory=dict)  # of servers, by region
    _sent_away: dict[Place, GroupWorker] = field(default_factory=dict)
    _coming: dict[Place, _Coming] = field(default_factory=dict)

    def note(self, region: str, status: Mapping[str, Any]) -> None:
        """What a region's server told of itself."""
        self._status[region] = status

    def go_on(self, requested: Collection[Place]) -> None:
        """Another driver has requested replacements in these places, which do not work yet."""
        for place in requested:
            worker = self.actors.workers.get(place)
            if worker is not None:
                self._coming[place] = _Coming(worker)

    def replace_hung(self, worker: GroupWorker, cause: str) -> None:
        """End a worker that hangs, which counts as lost.

        Raises:
            WorkerLostError: workers are lost more often than allowed.
        """
        kill(worker.handle)
        self._lost(worker, cause, None)

    @property
    def are_out(self) -> bool:
        """Whether any worker is still to come home."""
        return any(
            worker.steps is None and not self._is_too_late(worker)
            for worker in self.actors.workers.values()
        )

    def collect(self, timeout_s: float) -> None:
        """Take in who has ended, and do what is due.

        Args:
            timeout_s: longest wait for somebody to end.

        Raises:
            WorkerLostError: if workers die more often than allowed.
            GeoRayError: what a worker found wrong with task or data.
        """
        busy = {w.ref: w for w in self.actors.workers.values() if w.is_out}
        if not busy:
            time.sleep(timeout_s)
        ready = ray.wait(list(busy), num_returns=1, timeout=timeout_s)[0] if busy else []
        for ref in ready:
            worker = busy[ref]
            try:
                steps = int(ray.get(ref))
            except ray.exceptions.RayError as error:
                self.hear_all()  # events that led to it; perhaps its whole region is lost
                failure = failure_of(error)
                self._lost(worker, failure.cause, None if failure.is_lost else failure.as_error())
            else:
                self._home(worker, steps)
        now_s = time.monotonic()
        for place in self.policy.replacements(now_s):
            gone = self.actors.workers.get(place)
            if gone is not None and gone.ref is None:  # not if its region has come back with it
                self._replace(gone)
        self._heed(now_s)
        self._see_coming(now_s)

    def _see_coming(self, now_s: float) -> None:
        """Tell of replacements whose process runs, and of those that work."""
        for place, coming in list(self._coming.items()):
            region, rank = place
            worker = coming.worker
            if self.actors.workers.get(place) is not worker or worker.ref is None:
                del self._coming[place]
                continue
            about = {"region": region, "worker": rank, "epoch": worker.epoch}
            took_s = now_s - coming.asked_s
            joined = self._status.get(region, {}).get("here", {}).get(rank) == worker.epoch
            works = joined or worker.steps is not None
            if not coming.has_started and (works or worker.has_begun):
                coming.has_started = True
                self.emit("worker_started", **about, took_s=took_s)
            if works:
                del self._coming[place]
                self.emit("worker_replaced", **about, took_s=took_s)

    def _is_too_late(self, worker: GroupWorker) -> bool:
        """Whether it has not begun before its region was through: nobody waits for it."""
        status = self._status.get(worker.region, {})
        phase = status.get("phase")
        if (worker.epoch == 1 and worker.is_out) or phase not in {"done", "halted"}:
            return False
        judged = phase == "halted" or bool(status.get("judged"))
        return judged and worker.rank not in status.get("here", ())

    def _lost(self, worker: GroupWorker, cause: str, error: GeoRayError | None) -> None:
        place = (worker.region, worker.rank)
        self._forget_sent(worker)
        decision = self.policy.worker_lost(
            place,
            cause,
            error,
            is_present=self.actors.workers.get(place) is worker,
            goes_on=self._goes_on_without(worker),
            now_s=time.monotonic(),
        )
        if decision == "ignore":
            return
        if error is not None and decision is error:
            raise error
        self.emit("worker_lost", region=worker.region, worker=worker.rank, cause=cause)
        if isinstance(decision, GeoRayError):
            raise decision
        worker.ref = None
        self.actors.tell_lost(worker)
        if decision == "replace":
            self._replace(worker)

    def _goes_on_without(self, worker: GroupWorker) -> bool:
        """Whether enough others of its region are there."""
        elastic = self.actors.spec.experiment.train.elastic
        if elastic is None:
            return False
        ranks = self.actors.spec.region(worker.region).workers
        others = [
            other
            for other in self.actors.workers.values()
            if other.region == worker.region and other is not worker and other.is_out
        ]
        return len(others) >= elastic.least(ranks)

    def _home(self, worker: GroupWorker, steps: int) -> None:
        place = (worker.region, worker.rank)
        was_sent = self._forget_sent(worker)
        if not was_sent or self.actors.workers.get(place) is not worker:
            worker.steps = steps
            return
        worker.ref = None
        if self.policy.worker_left(place, time.monotonic()) == "replace":
            self._replace(worker)

    def _forget_sent(self, worker: GroupWorker) -> bool:
        """Whether this very one was sent away; another may have come into its place since."""
        place = (worker.region, worker.rank)
        if self._sent_away.get(place) is not worker:
            return False
        del self._sent_away[place]
        return True

    def _replace(self, worker: GroupWorker) -> None:
        fresh = self.actors.replace_worker(worker)
        place = worker.region, worker.rank
        self._coming[place] = _Coming(fresh)
        self.emit("worker_requested", region=place[0], worker=place[1], epoch=fresh.epoch)

    def _heed(self, now_s: float) -> None:
        """Send away, with nothing lost, whoever is on a machine that will be gone."""
        nodes = {
            place: node
            for place, worker in self.actors.workers.items()
            if self._sent_away.get(place) is not worker and (node := worker.node_id()) is not None
        }
        for place in self.notices.concern(nodes, now_s):
            region, rank = place
            if self.leaves(region):  # they come home at its last border
                continue
            self._sent_away[place] = self.actors.workers[place]
            cause = f"its node {nodes[place][:8]} is being drained"
            self.emit("worker_left", region=region, worker=rank, cause=cause)
            self.actors.send_away(self.actors.workers[place])
