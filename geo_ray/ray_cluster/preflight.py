"""Checks whether a cluster fits a run, before any process starts.

`problems_of` is pure and evaluates a snapshot of facts. Where an autoscaler serves a region, nodes
may be missing: pending placement is the demand that machines are rented for, and new nodes are
checked when they arrive.
"""

from __future__ import annotations

import difflib
import ipaddress
import os
import platform
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from geo_ray.base.errors import PreflightError
from geo_ray.base.version import __version__
from geo_ray.ray_cluster import ray_internals
from geo_ray.ray_cluster.demand import RegionDemand, by_label, describe_amounts
from geo_ray.ray_cluster.detached import ServedRegions, served_regions
from geo_ray.ray_cluster.labels import REGION_LABEL, TYPE_LABEL, on_node
from geo_ray.ray_cluster.settings import AUTH_MODE


@dataclass(frozen=True)
class NodeFacts:
    """One node as reported by Ray.

    Attributes:
        node_id: Ray's id in hexadecimal.
        address: its IP address.
        labels: its labels.
        resources: total resources, by Ray's names.
        alive: whether Ray considers it alive.
        versions: versions found there by name (python, ray, torch, geo_ray); empty if not asked.
        fault: why a process could not be started there; None if it could, or was not tried.
    """

    node_id: str
    address: str
    labels: Mapping[str, str]
    resources: Mapping[str, float]
    alive: bool = True
    versions: Mapping[str, str] = field(default_factory=dict)
    fault: str | None = None


@dataclass(frozen=True)
class ClusterFacts:
    """A snapshot of a cluster.

    Attributes:
        nodes: every node, including dead ones.
        versions: this process's versions, by the names of `NodeFacts.versions`.
        dashboard: host:port of the dashboard, or None.
        auth_mode: ``token`` or ``disabled``.
    """

    nodes: tuple[NodeFacts, ...]
    versions: Mapping[str, str]
    dashboard: str | None
    auth_mode: str

    def of_region(self, region: str) -> tuple[NodeFacts, ...]:
        """The running nodes of one region."""
        return tuple(n for n in self.nodes if n.alive and n.labels.get(REGION_LABEL) == region)

    def regions(self) -> tuple[str, ...]:
        """Regions of running nodes, sorted."""
        found = {n.labels[REGION_LABEL] for n in self.nodes if n.alive and REGION_LABEL in n.labels}
        return tuple(sorted(found))


@dataclass(frozen=True)
class Problem:
    """A problem and its fix."""

    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.what}; {self.fix}"


def problems_of(
    demands: Sequence[RegionDemand], facts: ClusterFacts, served: Collection[str] = ()
) -> list[Problem]:
    """Return everything that prevents ``demands`` from running on the cluster.

    Resources in use are ignored: they may be free when the processes are placed.

    Args:
        demands: one per region of nodes.
        facts: facts about the cluster.
        served: regions for which machines are rented on demand: they may lack nodes.
    """
    if not any(node.alive for node in facts.nodes):
        return [Problem("the cluster has no running node", "start one with `ray start`")]
    problems: list[Problem] = []
    for demand in demands:
        nodes = facts.of_region(demand.region)
        if demand.region in served:
            problems += _unfit(nodes, facts.versions)
        elif nodes:
            problems += _too_little(demand, nodes)
            problems += _unfit(nodes, facts.versions)
        else:
            problems.append(_unknown_region(demand.region, facts))
    problems += _unauthenticated(facts)
    return problems


def _unknown_region(region: str, facts: ClusterFacts) -> Problem:
    known = facts.regions()
    what = f"no node is in region '{region}'"
    for node in facts.nodes:
        for key, value in node.labels.items():
            if node.alive and value == region and key != REGION_LABEL:
                return Problem(
                    f"{what}: node {node.address} has the label {key}={value}",
                    f"start it with `ray start --labels {REGION_LABEL}={region}`",
                )
    if not known:
        return Problem(
            f"{what}: no node has the label {REGION_LABEL}",
            f"start each node with `ray start --labels {REGION_LABEL}=REGION`",
        )
    near = difflib.get_close_matches(region, known, n=1)
    hint = f" (did you mean '{near[0]}'?)" if near else ""
    return Problem(
        f"{what}: nodes are labelled {', '.join(known)}{hint}",
        f"correct regions.*.name, or start a node with `--labels {REGION_LABEL}={region}`",
    )


def _too_little(demand: RegionDemand, nodes: Sequence[NodeFacts]) -> Iterator[Problem]:
    short = False
    for name, wanted in demand.total().items():
        has = sum(node.resources.get(name, 0.0) for node in nodes)
        if has < wanted:
            short = True
            yield Problem(
                f"region '{demand.region}' asks for {describe_amounts({name: wanted})}, its "
                f"{len(nodes)} node(s) have {describe_amounts({name: has})}",
                "add nodes there, or ask for fewer or smaller processes",
            )
    if short:
        return
    lacking = False
    for kind, wanted in Counter(b.node_type for b in demand.bundles if b.node_type).items():
        own = [node for node in nodes if node.labels.get(TYPE_LABEL) == kind]
        spread = sum(b.node_type == kind and b.role == "worker" for b in demand.bundles)
        if len(own) < max(1, spread):
            lacking = True
            label = f"{REGION_LABEL}={demand.node_label},{TYPE_LABEL}={kind}"
            yield Problem(
                f"region '{demand.region}' asks for {max(1, spread)} node(s) of type {kind} for "
                f"{wanted} bundle(s), and has {len(own)}",
                f"start such nodes with `ray start --labels {label}`, or leave out regions.*.nodes",
            )
    if lacking:
        return
    for bundle in dict.fromkeys(demand.bundles):
        needs = bundle.resources()
        kind = bundle.node_type
        fit = [node for node in nodes if not kind or node.labels.get(TYPE_LABEL) == kind]
        if not any(all(n.resources.get(k, 0.0) >= v for k, v in needs.items()) for n in fit):
            yield Problem(
                f"no single node of region '{demand.region}' has room for one {bundle}",
                "use larger nodes, or ask for less per process",
            )


def _unfit(nodes: Sequence[NodeFacts], expected: Mapping[str, str]) -> Iterator[Problem]:
    for node in nodes:
        where = f"node {node.address} of region '{node.labels[REGION_LABEL]}'"
        if node.fault is not None:
            yield Problem(
                f"{where} cannot run geo_ray: {node.fault}",
                "install the same release of geo_ray there, or submit it with the job",
            )
        for name, version in sorted(node.versions.items()):
            wanted = expected.get(name, version)
            if _comparable(name, version) != _comparable(name, wanted):
                yield Problem(
                    f"{where} has {name} {version}, this process has {wanted}",
                    f"install {name} {wanted} there",
                )


def _comparable(name: str, version: str) -> str:
    if name == "python":
        return ".".join(version.split(".")[:2])
    return version.partition("+")[0]  # 2.13.0+cpu and 2.13.0+cu128 are the same release


def _unauthenticated(facts: ClusterFacts) -> Iterator[Problem]:
    """Report missing authentication: Ray's own ports are reachable from other hosts in any case."""
    alive = [node.address for node in facts.nodes if node.alive]
    hosts = {"loopback" if _is_loopback(address) else address for address in alive}
    if facts.auth_mode != "token" and len(hosts) > 1:
        also = f"; its dashboard listens at {facts.dashboard}" if facts.dashboard else ""
        yield Problem(
            f"the cluster has {len(hosts)} hosts and no token: any program that reaches a port of "
            f"Ray can run code on every node{also}",
            "set RAY_AUTH_MODE=token and the same token on every node",
        )


def _is_loopback(address: str) -> bool:
    """Return whether an address is a loopback address."""
    try:
        return ipaddress.ip_address(address.strip("[]")).is_loopback
    except ValueError:
        return address == "localhost"


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
        ask_nodes: also start a process on each node of these regions to query its versions; not
            needed if all nodes are on this machine.
        timeout_s: longest wait for those processes.
        served: regions for which machines are rented on demand.

    Returns:
        The facts behind the verdict.

    Raises:
        PreflightError: lists every problem.
    """
    demands = by_label(demands)
    facts = gather_facts([d.region for d in demands] if ask_nodes else [], timeout_s)
    problems = problems_of(demands, facts, served)
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
        nodes=tuple(_node(node) for node in ray_internals.nodes()),
        versions=versions(),
        dashboard=ray_internals.dashboard_address(),
        auth_mode=os.environ.get(AUTH_MODE, "disabled").lower(),
    )
    asked = [node for region in ask_regions for node in facts.of_region(region)]
    answers = _ask(asked, timeout_s)
    nodes = tuple(answers.get(node.node_id, node) for node in facts.nodes)
    return ClusterFacts(nodes, facts.versions, facts.dashboard, facts.auth_mode)


def versions() -> dict[str, str]:
    """Return the versions, in this process, of what both ends of a run must share."""
    return {
        "python": platform.python_version(),
        "ray": ray.__version__,
        "torch": metadata.version("torch"),  # importing it would take seconds
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
    """Return the nodes with versions or fault filled in, by node id."""
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


@dataclass(frozen=True, slots=True)
class CheckedCluster:
    """A checked cluster, which may still lack machines.

    Attributes:
        served: regions that an autoscaler serves.
        waited: those of the run among them.
        nodes: nodes present in these.
    """

    served: ServedRegions = field(default_factory=ServedRegions)
    waited: tuple[str, ...] = ()
    nodes: frozenset[str] = frozenset()

    @property
    def longest_s(self) -> float:
        """Longest time until all machines are present; 0: all are."""
        return self.served.longest_s if self.waited else 0.0

    def check_joining(self, demands: Sequence[RegionDemand], status: Callable[[str], None]) -> None:
        """Check nodes that arrived while the run was placed.

        Args:
            demands: one per region.
            status: receives the phase.

        Raises:
            PreflightError: a node is not fit.
        """
        if self.waited and _nodes(self.waited) - self.nodes:
            status("checking the new machines")
            preflight(demands, ask_nodes=True, served=self.served.regions)


def check_cluster(demands: Sequence[RegionDemand], status: Callable[[str], None]) -> CheckedCluster:
    """Check the present nodes.

    Args:
        demands: one per region.
        status: receives a note on awaited machines.

    Raises:
        PreflightError: the cluster is not fit.
    """
    served = served_regions()
    preflight(demands, ask_nodes=True, served=served.regions)
    waited = tuple(sorted({demand.node_label for demand in demands} & set(served.regions)))
    if waited:
        status(
            f"placing processes; machines of {', '.join(waited)} are rented where there are none"
        )
    return CheckedCluster(served, waited, _nodes(waited))


def _nodes(regions: Sequence[str]) -> frozenset[str]:
    return frozenset(
        node["NodeID"]
        for node in ray_internals.nodes()
        if node["Alive"] and node["Labels"].get(REGION_LABEL) in regions
    )
