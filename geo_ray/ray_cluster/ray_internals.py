"""The only module that uses unstable parts of Ray; tests call each of these functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

import ray
from ray import _raylet
from ray._private import state, worker

_LONGEST_S: Final = 10.0
_untyped: Any = _raylet  # a compiled module without type information


def reread_authentication() -> None:
    """Make Ray read RAY_AUTH_MODE and the token again; it caches those of its import otherwise."""
    _untyped.Config.initialize("")
    _untyped.AuthenticationTokenLoader.instance().reset_cache()


def nodes() -> list[dict[str, Any]]:
    """Return all nodes that the cluster ever had, with ``Alive``, ``Labels``, ``Resources``."""
    query: Any = ray.nodes
    return list(query())


def free_resources() -> dict[str, dict[str, float]]:
    """Free resources by node id (hexadecimal); a node without any may be missing."""
    query: Any = state.available_resources_per_node
    return dict(query())


@contextmanager
def messages_to(take: Callable[[str], None]) -> Iterator[None]:
    """Pass Ray's messages about nodes to ``take``, instead of printing them.

    Ray prints them on standard output regardless of ``log_to_driver``: for a raylet that died, the
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
    """Return when draining nodes will be gone, in unix ms, by node id (hexadecimal)."""
    query: Any = state.state.get_draining_nodes
    return dict(query())


WantedLabel = tuple[str, tuple[str, ...], bool]
"""A label's key and values, and whether the label must have one of them, or none."""

WantedBundle = tuple[dict[str, float], tuple[WantedLabel, ...], int]
"""Resources, labels of the node, and the number of such bundles."""


def pending_bundles() -> list[tuple[str, list[WantedBundle]]]:
    """Return pending bundles of the connected cluster, grouped by placement group.

    Each group has its strategy (PACK, SPREAD, STRICT_PACK, STRICT_SPREAD), a task or an actor has
    none. Tasks and actors that wait for a placement group are omitted.
    """
    resource_state = _resource_state()
    found = []
    for gang in resource_state.pending_gang_resource_requests:
        strategy = gang.details.rpartition(":")[2].partition("|")[0]  # "id:PACK|PENDING"
        chosen = gang.bundle_selectors[0].resource_requests if gang.bundle_selectors else ()
        found.append((strategy, [(*_wanted(request), 1) for request in chosen]))
    for request in resource_state.pending_resource_requests:
        wanted, labels = _wanted(request.request)
        if not any("_group_" in name for name in wanted):
            found.append(("", [(wanted, labels, request.count)]))
    return found


@dataclass(frozen=True, slots=True)
class NodeUse:
    """Use of a node.

    Attributes:
        is_busy: whether anything runs there, is reserved there, or is stored there for others.
        resources: total resources.
    """

    is_busy: bool
    resources: Mapping[str, float]


def node_uses() -> dict[str, NodeUse]:
    """Return the use of running nodes, including drained ones, by id (hexadecimal).

    Ray considers a node idle that has neither resources in use nor workers at work, such as actors
    without reservations; it considers a draining node idle in any case.
    """
    found = {}
    for node in _resource_state().node_states:
        if node.status == 2:  # NodeStatus.DEAD
            continue
        free = dict(node.available_resources)
        total = {
            name: amount
            for name, amount in node.total_resources.items()
            if "_group_" not in name and not name.startswith(("node:", "object_store"))
        }
        is_reserved = any(free.get(name, 0.0) < total[name] - 1e-6 for name in total)
        is_running = node.status == 1  # NodeStatus.RUNNING
        found[node.node_id.hex()] = NodeUse(is_reserved or is_running, total)
    return found


def drain_node(
    node_id: str, message: str, deadline_unix_ms: int, *, only_idle: bool = False
) -> bool:
    """Notify a node that it will be reclaimed; nothing new is started there.

    Args:
        node_id: its id (hexadecimal).
        message: the reason, for logs.
        deadline_unix_ms: when it will be gone.
        only_idle: only if nothing runs there; it then ends at once.

    Returns:
        Whether Ray accepted; it refuses for unknown nodes.
    """
    # DRAIN_NODE_REASON_IDLE_TERMINATION and DRAIN_NODE_REASON_PREEMPTION.
    reason = 1 if only_idle else 2
    accepted, _ = _gcs().drain_node(node_id, reason, message, deadline_unix_ms, timeout=_LONGEST_S)
    return bool(accepted)


def _resource_state() -> Any:
    from ray.autoscaler.v2 import sdk

    untyped: Any = sdk
    return untyped.get_cluster_resource_state(_gcs())


def _gcs() -> Any:
    if not ray.is_initialized():  # the next line would start a cluster
        raise RuntimeError("this process is not connected to a Ray cluster")
    return _untyped.GcsClient(address=ray.get_runtime_context().gcs_address)


def _wanted(request: Any) -> tuple[dict[str, float], tuple[WantedLabel, ...]]:
    labels = []
    for selector in request.label_selectors[:1]:
        for constraint in selector.label_constraints:
            is_in = constraint.operator == 1  # LABEL_OPERATOR_IN
            values = tuple(sorted(constraint.label_values))
            labels.append((constraint.label_key, values, is_in))
    return dict(request.resources_bundle), tuple(sorted(labels))


def dashboard_address() -> str | None:
    """Return host:port of the connected cluster's dashboard; None if it has none."""
    query: Any = worker.get_dashboard_url
    return query() or None


def drain_nodes_labelled(
    address: str, key: str, value: str, deadline_unix_s: float, why: str, longest_s: float
) -> list[str]:
    """Notify Ray that the running nodes with a label will be gone; needs no connection.

    Args:
        address: host:port of the head.
        key: key of the label.
        value: value of the label.
        deadline_unix_s: when they will be gone; Ray itself ends nothing then.
        why: the reason, for logs.
        longest_s: longest wait for each answer.

    Returns:
        Ids (hexadecimal) of the nodes that Ray drains now; empty if there are none yet.
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
    """Return the id of an actor (hexadecimal), from any of its handles."""
    return str(handle._actor_id.hex())
