"""Serves a queue from an actor of the cluster, whatever becomes of who started it.

It is a detached actor on the head that Ray starts anew when it dies, beside the job server that it
submits to. What it must know is in the journal, and a lease beside that keeps two of them apart.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field
from typing import Final

from geo_ray.errors import GeoRayError, LeaseLostError
from geo_ray.lease.keeper import LeaseKeeper
from geo_ray.lease.seek import LeaseSeeker
from geo_ray.queue.config import QueueConfig
from geo_ray.queue.loop import QueueLoop
from geo_ray.queue.place import QueuePlace
from geo_ray.runtime.cluster.detached import Handle, detached_actor
from geo_ray.runtime.queue.job_server import QueueJobServer
from geo_ray.runtime.queue.world import RayQueueWorld

QUEUES: Final = "geo_ray-queues"
"""Ray namespace of all queues' actors."""
_AGAIN_S: Final = 2.0
_NEAR_LOOK_S: Final = 1.0
_FAR_LOOK_S: Final = 5.0
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
    """See the module's docstring.

    Attributes:
        order: what to do.
    """

    order: QueueOrder
    _served: QueueServed = field(default_factory=lambda: QueueServed(False))
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
        place = QueuePlace.of(self.order.config)
        while not self._ends:
            try:
                self._hold(place)
            except Exception as error:  # the thread must live: nobody else serves the queue
                told = str(error) if isinstance(error, GeoRayError) else repr(error)
                _log.warning("queue: %s", told)
                self._served = QueueServed(False, errors=(told,))
                self._wake.clear()
                self._wake.wait(_AGAIN_S)

    def _hold(self, place: QueuePlace) -> None:
        """Take the queue's lease and serve it until the lease is lost or the actor ends."""
        place.make()
        keeper = LeaseSeeker(place.store(), self.order.config.name, _log.info).take()
        try:
            self._serve(place, keeper)
        finally:
            keeper.close()

    def _serve(self, place: QueuePlace, keeper: LeaseKeeper) -> None:
        order = self.order
        server = QueueJobServer(order.job_server, order.config.patience.save_s)
        world = RayQueueWorld(order.config, server)
        loop = QueueLoop(order.config, place.store(), world, keeper.epoch, keeper.check)
        look_s = _FAR_LOOK_S if place.is_far else _NEAR_LOOK_S
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
                loop = QueueLoop(order.config, place.store(), world, keeper.epoch, keeper.check)
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
