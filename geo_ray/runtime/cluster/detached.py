"""Actors that live on a head by themselves, whatever becomes of who started them."""

from __future__ import annotations

from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

Handle = Any  # a Ray actor handle; Ray gives it no useful type


def detached_actor(
    kind: type, order: object, name: str, namespace: str, node_id: str | None = None
) -> Handle:
    """Start a detached actor that Ray starts anew when it dies; the one that is there, if any.

    Args:
        kind: its class.
        order: what it is to do, all that it is made of.
        name: of it.
        namespace: where the name counts.
        node_id: of its node; None: this process's.
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
