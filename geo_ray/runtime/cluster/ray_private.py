"""The only place that calls what Ray does not promise to keep; tests call each of these."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Final

import ray
from ray import _raylet
from ray._private import state, worker

_LONGEST_S: Final = 10.0
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


def pending_bundles() -> list[tuple[dict[str, float], dict[str, str], str]]:
    """What waits for a place on the connected cluster: resources, labels wanted, and its group.

    Labels are those that must have one value; the group is that of bundles that must be on nodes of
    their own, empty for all others. Tasks and actors count as often as they are waiting.
    """
    resource_state = _resource_state()
    found = []
    for gang in resource_state.pending_gang_resource_requests:
        apart = gang.details if "STRICT_SPREAD" in gang.details else ""
        chosen = gang.bundle_selectors[0].resource_requests if gang.bundle_selectors else ()
        found += [(*_wanted(request), apart) for request in chosen]
    for request in resource_state.pending_resource_requests:
        found += [(*_wanted(request.request), "")] * request.count
    return found


def busy_nodes() -> dict[str, bool]:
    """Whether anything is reserved on living nodes, drained ones included, by id (hexadecimal)."""
    found = {}
    for node in _resource_state().node_states:
        if node.status == 2:  # NodeStatus.DEAD
            continue
        free = dict(node.available_resources)
        found[node.node_id.hex()] = any(
            free.get(name, 0.0) < amount - 1e-6
            for name, amount in node.total_resources.items()
            if name in ("CPU", "GPU", "memory")
        )
    return found


def drain_node(node_id: str, message: str, deadline_unix_ms: int) -> bool:
    """Tell a node that it will be taken away; nothing new is started there.

    Returns:
        Whether Ray took note; it does not of a node that it does not know.
    """
    # DRAIN_NODE_REASON_PREEMPTION is 2; the other reason is refused while anything runs.
    accepted, _ = _gcs().drain_node(node_id, 2, message, deadline_unix_ms, timeout=_LONGEST_S)
    return bool(accepted)


def _resource_state() -> Any:
    from ray.autoscaler.v2 import sdk

    untyped: Any = sdk
    return untyped.get_cluster_resource_state(_gcs())


def _gcs() -> Any:
    return _untyped.GcsClient(address=ray.get_runtime_context().gcs_address)


def _wanted(request: Any) -> tuple[dict[str, float], dict[str, str]]:
    labels = {}
    for selector in request.label_selectors[:1]:
        for constraint in selector.label_constraints:
            if constraint.operator == 1 and len(constraint.label_values) == 1:
                labels[constraint.label_key] = constraint.label_values[0]
    return dict(request.resources_bundle), labels


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


def actor_id(handle: Any) -> str:
    """The id of an actor (hexadecimal), whoever has the handle."""
    return str(handle._actor_id.hex())
