"""The only place that calls what Ray does not promise to keep; tests call each of these."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import ray
from ray import _raylet
from ray._private import state, worker

_untyped: Any = _raylet  # a compiled module without type information


def reread_authentication() -> None:
    """Make Ray see RAY_AUTH_MODE and the token anew; it keeps those of its import otherwise."""
    _untyped.Config.initialize("")
    _untyped.AuthenticationTokenLoader.instance().reset_cache()


def nodes() -> list[dict[str, Any]]:
    """All nodes that the connected cluster ever had, with ``Alive``, ``Labels``, ``Resources``."""
    query: Any = ray.nodes
    return list(query())


def free_resources() -> dict[str, dict[str, float]]:
    """Free resources by node id (hexadecimal); a node without any may be missing."""
    query: Any = state.available_resources_per_node
    return dict(query())


@contextmanager
def messages_to(take: Callable[[str], None]) -> Iterator[None]:
    """Give what Ray tells this driver about its nodes to ``take``, instead of printing it.

    Ray prints that on standard output whatever ``log_to_driver`` says: of a raylet that died, the
    last lines of its log, one or two times.
    """
    untyped: Any = worker

    def on_message(data: Mapping[str, Any], **_: object) -> None:
        take("\n".join(map(str, data.get("lines", ()))))

    before, untyped.print_to_stdstream = untyped.print_to_stdstream, on_message
    try:
        yield
    finally:
        untyped.print_to_stdstream = before


def draining_nodes() -> dict[str, int]:
    """When nodes that are being drained will be gone, in unix ms, by node id (hexadecimal)."""
    query: Any = state.state.get_draining_nodes
    return dict(query())


def dashboard_address() -> str | None:
    """host:port of the connected cluster's dashboard; None if it has none."""
    query: Any = worker.get_dashboard_url
    return query() or None


def drain_nodes_labelled(
    address: str, key: str, value: str, deadline_unix_s: float, why: str, longest_s: float
) -> list[str]:
    """Tell Ray that the living nodes with a label will be gone; needs no connected driver.

    Args:
        address: host:port of the head.
        key: of the label.
        value: of the label.
        deadline_unix_s: when they will be gone; Ray itself ends nothing then.
        why: for people.
        longest_s: longest wait for each answer.

    Returns:
        Ids (hexadecimal) of those that Ray drains now; empty if there are none yet.
    """
    autoscaler: Any = import_module("ray.core.generated.autoscaler_pb2")
    gcs: Any = import_module("ray.core.generated.gcs_pb2")
    client = _untyped.GcsClient(address=address)
    reason = autoscaler.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    drained = []
    for info in client.get_all_node_info(timeout=longest_s).values():
        alive = info.state == gcs.GcsNodeInfo.GcsNodeState.Value("ALIVE")
        if alive and info.labels.get(key) == value:
            node = info.node_id.hex()
            deadline_ms = int(deadline_unix_s * 1000)
            accepted, _ = client.drain_node(node, reason, why, deadline_ms, timeout=longest_s)
            drained += [node] if accepted else []
    return drained
