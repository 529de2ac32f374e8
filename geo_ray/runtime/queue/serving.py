"""Starting a queue's actor on a cluster, and ending it."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any, Final

import ray
from ray.exceptions import RayError
from ray.util import list_named_actors

from geo_ray.config.cluster import ExistingClusterConfig
from geo_ray.errors import ClusterError, QueueError
from geo_ray.queue.config import QueueConfig
from geo_ray.runtime.cluster import ray_private
from geo_ray.runtime.cluster.connect import connect
from geo_ray.runtime.cluster.detached import Handle
from geo_ray.runtime.queue.actor import (
    QUEUES,
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
        deadline_s, why = time.monotonic() + longest_s, "it has not begun"
        while True:
            try:  # the one before may be found once more while it ends
                actor = start_queue_actor(order, _head())
                served: Any = ray.get(actor.served.remote(), timeout=_ANSWER_S)
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
            _end(found)
        return found is not None


def end_queues() -> list[str]:
    """End the actors of all queues of the connected cluster; return their names."""
    query: Any = list_named_actors
    named: list[dict[str, str]] = query(all_namespaces=True)
    names = [str(each["name"]) for each in named if each["namespace"] == QUEUES]
    for name in names:
        with suppress(ValueError):  # it has just ended
            _end(ray.get_actor(name, namespace=QUEUES))
    return names


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
