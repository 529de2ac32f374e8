"""The queue as a detached actor on the cluster's head, and how it is started and ended.

Ray restarts it when it dies, next to the job server that it submits to. Its state is in the
journal, and a lease keeps two of them apart.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import ray
from ray.exceptions import RayError

from geo_ray.base.errors import ClusterError, GeoRayError, LeaseLostError, QueueError
from geo_ray.experiment.cluster import ExistingClusterConfig
from geo_ray.ray_cluster import ray_internals
from geo_ray.ray_cluster.connect import connect
from geo_ray.ray_cluster.detached import CLOSE_ANSWER_S, QUEUES, Handle, detached_actor, end_actor
from geo_ray.runs.lease import LeaseKeeper, LeaseSeeker
from geo_ray.scheduler.queue.config import QueueConfig
from geo_ray.scheduler.queue.job_server import QueueJobServer
from geo_ray.scheduler.queue.loop import QueueLoop
from geo_ray.scheduler.queue.state import QueueLocation
from geo_ray.scheduler.queue.world import RayQueueWorld

_AGAIN_S: Final = 2.0
_LOCAL_POLL_S: Final = 1.0
_REMOTE_POLL_S: Final = 5.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class QueueOrder:
    """What a queue's actor is to do.

    Attributes:
        config: the queue.
        job_server: address of the cluster's job server.
    """

    config: QueueConfig
    job_server: str


@dataclass(frozen=True, slots=True)
class QueueServed:
    """How a queue is served.

    Attributes:
        is_acting: whether this process serves it.
        looks: that it has made.
        errors: of what could not be done; it is tried again.
    """

    is_acting: bool
    looks: int = 0
    errors: tuple[str, ...] = ()


@dataclass
class QueueActor:
    """Serves a queue from an actor of the cluster, whatever becomes of who started it.

    It is a detached actor on the head that Ray starts anew when it dies, beside the job server that
    it submits to. What it must know is in the journal, and a lease beside that keeps two of them
    apart.

    Attributes:
        order: what to do.
    """

    order: QueueOrder
    _served: QueueServed = field(default_factory=partial(QueueServed, False))
    _wake: threading.Event = field(default_factory=threading.Event)
    _ends: bool = False

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._live, name="queue", daemon=True)
        self._thread.start()

    def served(self) -> QueueServed:
        """How it is served."""
        return self._served

    def wake(self) -> None:
        """Look now: something was asked."""
        self._wake.set()

    def close(self) -> None:
        """Serve it no more, and give the lease back; jobs that run go on."""
        self._ends = True
        self._wake.set()
        self._thread.join()

    # ------------------------------------------------------------------ its life

    def _live(self) -> None:
        location = QueueLocation.of(self.order.config)
        while not self._ends:
            try:
                self._hold(location)
            except Exception as error:  # the thread must live: nobody else serves the queue
                message = str(error) if isinstance(error, GeoRayError) else repr(error)
                _log.warning("queue: %s", message)
                self._served = QueueServed(False, errors=(message,))
                self._wake.clear()
                self._wake.wait(_AGAIN_S)

    def _hold(self, location: QueueLocation) -> None:
        """Take the queue's lease and serve it until the lease is lost or the actor ends."""
        location.make()
        keeper = LeaseSeeker(location.store(), self.order.config.name, _log.info).take()
        try:
            self._serve(location, keeper)
        finally:
            keeper.close()

    def _serve(self, location: QueueLocation, keeper: LeaseKeeper) -> None:
        order = self.order
        server = QueueJobServer(order.job_server, order.config.patience.save_s)
        world = RayQueueWorld(order.config, server)
        loop = QueueLoop(order.config, location.store(), world, keeper.epoch, keeper)
        look_s = _REMOTE_POLL_S if location.is_remote else _LOCAL_POLL_S
        while not self._ends:
            self._wake.clear()
            looks = self._served.looks + 1
            try:
                errors = loop.tick(time.time())
            except LeaseLostError:
                raise
            except Exception as error:  # whatever it is: jobs run, so it looks again
                _log.exception("queue: a look failed")
                errors = (f"a look failed: {error}",)
                loop = QueueLoop(order.config, location.store(), world, keeper.epoch, keeper)
            self._served = QueueServed(True, looks, errors)
            keeper.note(f"{len(loop.state.living())} jobs")
            self._wake.wait(look_s)


def queue_actor_name(queue: str) -> str:
    """Return the name of a queue's actor among Ray's."""
    return f"geo-ray-queue-{queue}"


def start_queue_actor(order: QueueOrder, node_id: str | None = None) -> Handle:
    """Start the actor of a queue; the one that is there, if any.

    Args:
        order: what it is to do.
        node_id: of its node; None: this process's.
    """
    name = queue_actor_name(order.config.name)
    return detached_actor(QueueActor, order, name, QUEUES, node_id)


_HEAD: Final = "node:__internal_head__"
_LOOK_S: Final = 0.2


def serve_queue(queue: QueueConfig, cluster: ExistingClusterConfig, longest_s: float) -> None:
    """Start the actor of a queue, and wait until it serves.

    Args:
        queue: which.
        cluster: on which.
        longest_s: longest wait.

    Raises:
        ClusterError: there is no cluster, or it has no job server.
        QueueError: it is not served in time.
    """
    with connect(cluster, [], namespace=QUEUES) as connected:
        if connected.dashboard is None:
            raise ClusterError(
                "the cluster has no job server",
                fix="Start its head with `ray start --head --include-dashboard=true`.",
            )
        order = QueueOrder(queue, f"http://{connected.dashboard}")
        found = find_queue(queue.name)
        if found is not None:
            end_actor(found)
        deadline_s, why = time.monotonic() + longest_s, "it has not begun"
        while True:
            try:  # the one before may be found once more while it ends
                actor = start_queue_actor(order, _head())
                served: Any = ray.get(actor.served.remote(), timeout=CLOSE_ANSWER_S)
            except RayError as error:
                why = str(error).partition("\n")[0]
            else:
                if served.is_acting:
                    return
                why = "; ".join(served.errors) or why
            if time.monotonic() > deadline_s:
                raise QueueError(f"queue {queue.name} is not served: {why}")
            time.sleep(_LOOK_S)


def unserve_queue(name: str, cluster: ExistingClusterConfig) -> bool:
    """End the actor of a queue; return whether there was one."""
    with connect(cluster, [], namespace=QUEUES):
        found = find_queue(name)
        if found is not None:
            end_actor(found)
        return found is not None


def find_queue(name: str) -> Handle | None:
    """Return the actor of a queue on the connected cluster; None: there is none."""
    try:
        return ray.get_actor(queue_actor_name(name), namespace=QUEUES)
    except ValueError:
        return None


def _head() -> str | None:
    for node in ray_internals.nodes():
        if node["Alive"] and _HEAD in node["Resources"]:
            return str(node["NodeID"])
    return None
