"""The queue as a detached actor on the head of the cluster, and functions that start and end it.

Ray restarts the actor when it dies. Its state is in the journal, and a lease prevents two actors
from serving the same queue.
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
    """Specification of a queue's actor.

    Attributes:
        config: the queue.
        job_server: address of the cluster's job server.
    """

    config: QueueConfig
    job_server: str


@dataclass(frozen=True, slots=True)
class QueueServed:
    """State of serving a queue.

    Attributes:
        is_acting: whether this process serves it.
        iterations: number of iterations.
        errors: failed steps, which are retried.
    """

    is_acting: bool
    iterations: int = 0
    errors: tuple[str, ...] = ()


@dataclass
class QueueActor:
    """Serves a queue in an actor that outlives its creator.

    The actor is detached, runs on the head and is restarted by Ray. Its state is in the journal,
    and a lease prevents two actors from serving the same queue.

    Attributes:
        order: specification.
    """

    order: QueueOrder
    _served: QueueServed = field(default_factory=partial(QueueServed, False))
    _wake: threading.Event = field(default_factory=threading.Event)
    _ends: bool = False

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._live, name="queue", daemon=True)
        self._thread.start()

    def served(self) -> QueueServed:
        """Return the state of serving the queue."""
        return self._served

    def wake(self) -> None:
        """Run an iteration now: a request was submitted."""
        self._wake.set()

    def close(self) -> None:
        """Stop serving and release the lease; running jobs continue."""
        self._ends = True
        self._wake.set()
        self._thread.join()

    # ------------------------------------------------------------------ its life

    def _live(self) -> None:
        location = QueueLocation.of(self.order.config)
        while not self._ends:
            try:
                self._hold(location)
            except Exception as error:  # the thread must survive: no other process serves the queue
                message = str(error) if isinstance(error, GeoRayError) else repr(error)
                _log.warning("queue: %s", message)
                self._served = QueueServed(False, errors=(message,))
                self._wake.clear()
                self._wake.wait(_AGAIN_S)

    def _hold(self, location: QueueLocation) -> None:
        """Hold the lease of the queue and serve it until the lease is lost or the actor ends."""
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
        loop = QueueLoop(order.config, location.store(), world, keeper.token, keeper)
        look_s = _REMOTE_POLL_S if location.is_remote else _LOCAL_POLL_S
        while not self._ends:
            self._wake.clear()
            iterations = self._served.iterations + 1
            try:
                errors = loop.tick(time.time())
            except LeaseLostError:
                raise
            except Exception as error:  # the loop continues: jobs are running
                _log.exception("queue: an iteration failed")
                errors = (f"an iteration failed: {error}",)
                loop = QueueLoop(order.config, location.store(), world, keeper.token, keeper)
            self._served = QueueServed(True, iterations, errors)
            keeper.note(f"{len(loop.state.living())} jobs")
            self._wake.wait(look_s)


def queue_actor_name(queue: str) -> str:
    """Return the actor name of a queue."""
    return f"geo-ray-queue-{queue}"


def start_queue_actor(order: QueueOrder, node_id: str | None = None) -> Handle:
    """Start the actor of a queue, or return the running one.

    Args:
        order: specification.
        node_id: node of the actor; None: the node of this process.
    """
    name = queue_actor_name(order.config.name)
    return detached_actor(QueueActor, order, name, QUEUES, node_id)


_HEAD: Final = "node:__internal_head__"
_LOOK_S: Final = 0.2


def serve_queue(queue: QueueConfig, cluster: ExistingClusterConfig, longest_s: float) -> None:
    """Start the actor of a queue and wait until it serves.

    Args:
        queue: the queue.
        cluster: its cluster.
        longest_s: timeout.

    Raises:
        ClusterError: the cluster does not exist, or has no job server.
        QueueError: the queue is not served in time.
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
        deadline_s, why = time.monotonic() + longest_s, "it has not started"
        while True:
            try:  # an ending actor may be found once more
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
    """Terminate the actor of a queue; return whether there was one."""
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
