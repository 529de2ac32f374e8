"""Starting a queue's actor on a cluster, and ending it."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any, Final

import ray
from ray.exceptions import RayError

from geo_ray.config.cluster import ExistingClusterConfig
from geo_ray.errors import ClusterError, QueueError
from geo_ray.queue.config import QueueConfig
from geo_ray.runtime.cluster import ray_private
from geo_ray.runtime.cluster.connect import connect
from geo_ray.runtime.queue.actor import (
    QUEUES,
    Handle,
    QueueOrder,
    queue_actor_name,
    start_queue_actor,
)

_HEAD: Final = "node:__internal_head__"
_ANSWER_S: Final = 30.0
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
            _end(found)
        actor = start_queue_actor(order, _head())
        deadline_s = time.monotonic() + longest_s
        while True:
            served: Any = ray.get(actor.served.remote(), timeout=_ANSWER_S)
            if served.is_acting:
                return
            if time.monotonic() > deadline_s:
                why = "; ".join(served.errors) or "it has not begun"
                raise QueueError(f"queue {queue.name} is not served: {why}")
            time.sleep(_LOOK_S)


def unserve_queue(name: str, cluster: ExistingClusterConfig) -> bool:
    """End the actor of a queue; return whether there was one."""
    with connect(cluster, [], namespace=QUEUES):
        found = find_queue(name)
        if found is not None:
            _end(found)
        return found is not None


def find_queue(name: str) -> Handle | None:
    """Return the actor of a queue on the connected cluster; None: there is none."""
    try:
        return ray.get_actor(queue_actor_name(name), namespace=QUEUES)
    except ValueError:
        return None


def _end(actor: Handle) -> None:
    with suppress(RayError):  # it is being started anew, or stands still
        ray.get(actor.close.remote(), timeout=_ANSWER_S)
    ray.kill(actor)


def _head() -> str | None:
    for node in ray_private.nodes():
        if node["Alive"] and _HEAD in node["Resources"]:
            return str(node["NodeID"])
    return None
