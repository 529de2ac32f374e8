"""Detached actors on the head node, which outlive the process that started them.

`end_queues` ends those of all queues; `served_regions` asks the autoscaler actor for the regions
that it rents machines for.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import ray
from ray.exceptions import RayError
from ray.util import list_named_actors
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

QUEUES: Final = "geo_ray-queues"
"""Ray namespace of all queues' actors."""


CLOSE_ANSWER_S: Final = 30.0


def end_queues() -> list[str]:
    """End the actors of all queues of the connected cluster; return their names."""
    query: Any = list_named_actors
    named: list[dict[str, str]] = query(all_namespaces=True)
    names = [str(each["name"]) for each in named if each["namespace"] == QUEUES]
    for name in names:
        with suppress(ValueError):  # it has just ended
            end_actor(ray.get_actor(name, namespace=QUEUES))
    return names


def end_actor(actor: Handle) -> None:
    """Let a queue's actor close, then end it."""
    with suppress(RayError):  # it is restarting or hangs
        ray.get(actor.close.remote(), timeout=CLOSE_ANSWER_S)
    ray.kill(actor)


Handle = Any  # a Ray actor handle, for which Ray has no useful type


def detached_actor(
    kind: type, order: object, name: str, namespace: str, node_id: str | None = None
) -> Handle:
    """Start a detached actor that Ray restarts after its death, or return the existing one.

    Args:
        kind: its class.
        order: its constructor argument.
        name: its name.
        namespace: Ray namespace of the name.
        node_id: its node; None: this process's.
    """
    node = node_id or ray.get_runtime_context().get_node_id()
    return (
        ray.remote(kind)
        .options(
            name=name,
            namespace=namespace,
            get_if_exists=True,
            lifetime="detached",
            num_cpus=0,
            max_restarts=-1,
            max_concurrency=4,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        )
        .remote(order)
    )


NAMESPACE: Final = "geo_ray-autoscalers"
NAME_PREFIX: Final = "geo-ray-autoscaler-"
_STATUS_TIMEOUT_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class ServedRegions:
    """Regions that an autoscaler rents machines for.

    Attributes:
        regions: the regions.
        longest_s: longest time from the launch of a machine to its node.
    """

    regions: tuple[str, ...] = ()
    longest_s: float = 0.0


def served_regions() -> ServedRegions:
    """Ask the autoscalers of the connected cluster, if any."""
    query: Any = list_named_actors
    named: list[dict[str, str]] = query(all_namespaces=True)
    names = [
        each["name"]
        for each in named
        if each["namespace"] == NAMESPACE and str(each["name"]).startswith(NAME_PREFIX)
    ]
    return _merged([_asked(name) for name in names])


def _asked(name: str) -> ServedRegions:
    find: Any = ray.get_actor
    try:
        actor = find(name, namespace=NAMESPACE)
        found: Any = ray.get(actor.served.remote(), timeout=_STATUS_TIMEOUT_S)
    except (ValueError, RayError):  # it has ended or is restarting
        return ServedRegions()
    return found if isinstance(found, ServedRegions) else ServedRegions()


def _merged(found: Sequence[ServedRegions]) -> ServedRegions:
    names = dict.fromkeys(name for each in found for name in each.regions)
    return ServedRegions(tuple(names), max((each.longest_s for each in found), default=0.0))
