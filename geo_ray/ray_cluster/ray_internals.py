"""The only place that calls what Ray does not promise to keep; tests call each of these."""

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


WantedLabel = tuple[str, tuple[str, ...], bool]
"""A label's key, values, and whether it must be one of them, or none."""

WantedBundle = tuple[dict[str, float], tuple[WantedLabel, ...], int]
"""Resources, labels of the node, and how many are like this."""


def pending_bundles() -> list[tuple[str, list[WantedBundle]]]:
    """What waits for a place on the connected cluster: bundles of one placement group together.

    With each group its strategy (PACK, SPREAD, STRICT_PACK, STRICT_SPREAD), with a task or an actor
    none. What waits for a place within a placement group waits for that group, and is left out.
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
    """What is done with a node.

    Attributes:
        is_busy: whether anything runs there, is reserved there, or is kept there for others.
        resources: in all.
    """

    is_busy: bool
    resources: Mapping[str, float]


def node_uses() -> dict[str, NodeUse]:
    """How living nodes are used, drained ones included, by id (hexadecimal).

    Ray counts a node as idle that has neither resources in use nor workers at work, such as actors
    that reserve nothing; one that is drained it counts as such, whatever runs there.
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
    """Tell a node that it will be taken away; nothing new is started there.

    Args:
        node_id: which (hexadecimal).
        message: why.
        deadline_unix_ms: when it will be gone.
        only_idle: not while anything runs there; then it ends at once.

    Returns:
        Whether Ray took note; it does not of a node that it does not know.
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
    if not ray.is_initialized():  # else the next line would start a cluster
        raise RuntimeError("this process is not connected to a cluster of Ray's")
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
