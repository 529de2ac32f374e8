"""Finds out, before anything is started, whether the cluster is fit for the run."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Collection, Mapping, Sequence
from importlib import metadata
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from geo_ray.errors import PreflightError
from geo_ray.runtime.cluster import ray_private
from geo_ray.runtime.cluster.demand import RegionDemand, by_label
from geo_ray.runtime.cluster.labels import on_node
from geo_ray.runtime.cluster.preflight_checks import ClusterFacts, NodeFacts, check
from geo_ray.runtime.cluster.settings import AUTH_MODE
from geo_ray.version import __version__


def preflight(
    demands: Sequence[RegionDemand],
    *,
    ask_nodes: bool,
    timeout_s: float = 60.0,
    served: Collection[str] = (),
) -> ClusterFacts:
    """Check the connected cluster against ``demands``.

    Args:
        demands: one per region.
        ask_nodes: also start a process on each node of these regions to learn its versions; not
            needed where all nodes are of this machine.
        timeout_s: longest wait for those processes.
        served: regions for which machines are rented when something waits.

    Returns:
        The facts that the verdict rests on.

    Raises:
        PreflightError: listing every problem.
    """
    demands = by_label(demands)
    facts = gather_facts([d.region for d in demands] if ask_nodes else [], timeout_s)
    problems = check(demands, facts, served)
    if problems:
        listed = "\n".join(f"  {n}. {problem}" for n, problem in enumerate(problems, 1))
        raise PreflightError(f"the cluster is not fit for this run:\n{listed}")
    return facts


def gather_facts(ask_regions: Sequence[str] = (), timeout_s: float = 60.0) -> ClusterFacts:
    """Take a snapshot of the connected cluster.

    Args:
        ask_regions: regions whose nodes are asked for their versions.
        timeout_s: longest wait for the answers.
    """
    facts = ClusterFacts(
        nodes=tuple(_node(node) for node in ray_private.nodes()),
        versions=versions(),
        dashboard=ray_private.dashboard_address(),
        auth_mode=os.environ.get(AUTH_MODE, "disabled").lower(),
    )
    asked = [node for region in ask_regions for node in facts.of_region(region)]
    answers = _ask(asked, timeout_s)
    nodes = tuple(answers.get(node.node_id, node) for node in facts.nodes)
    return ClusterFacts(nodes, facts.versions, facts.dashboard, facts.auth_mode)


def versions() -> dict[str, str]:
    """Versions of what both ends of a run must share, in this process."""
    return {
        "python": platform.python_version(),
        "ray": ray.__version__,
        "torch": metadata.version("torch"),  # without the seconds that importing it takes
        "geo_ray": __version__,
    }


def _node(node: Mapping[str, Any]) -> NodeFacts:
    return NodeFacts(
        node_id=node["NodeID"],
        address=node["NodeManagerAddress"],
        labels=dict(node["Labels"]),
        resources=dict(node["Resources"]),
        alive=node["Alive"],
    )


def _ask(nodes: Sequence[NodeFacts], timeout_s: float) -> dict[str, NodeFacts]:
    """The same nodes with versions or fault filled in, by node id."""
    task = ray.remote(num_cpus=0, max_retries=0)(versions)
    asked = [(node, task.options(label_selector=on_node(node.node_id)).remote()) for node in nodes]
    deadline = time.monotonic() + timeout_s
    answers = {}
    for node, answer in asked:
        found: dict[str, str] = {}
        fault = None
        try:
            found = ray.get(answer, timeout=max(0.0, deadline - time.monotonic()))
        except GetTimeoutError:
            fault = f"no process started there within {timeout_s:g} s"
            ray.cancel(answer, force=True)
        except RayError as error:
            fault = str(error).strip().splitlines()[-1]
        answers[node.node_id] = NodeFacts(
            node.node_id, node.address, node.labels, node.resources, node.alive, found, fault
        )
    return answers
