"""What can be wrong with a cluster for a demand: pure checks over a snapshot of facts."""

from __future__ import annotations

import difflib
import ipaddress
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from geo_ray.runtime.cluster.demand import RegionDemand, describe_amounts
from geo_ray.runtime.cluster.labels import REGION_LABEL, TYPE_LABEL


@dataclass(frozen=True)
class NodeFacts:
    """One node as Ray tells of it.

    Attributes:
        node_id: Ray's id in hexadecimal.
        address: its IP address.
        labels: its labels.
        resources: what it has in all, by Ray's names.
        alive: whether Ray counts on it.
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
        nodes: every node, dead ones too.
        versions: the driver's versions, by the names of `NodeFacts.versions`.
        dashboard: host:port of the dashboard, or None.
        auth_mode: ``token`` or ``disabled``.
    """

    nodes: tuple[NodeFacts, ...]
    versions: Mapping[str, str]
    dashboard: str | None
    auth_mode: str

    def of_region(self, region: str) -> tuple[NodeFacts, ...]:
        """The living nodes of one region."""
        return tuple(n for n in self.nodes if n.alive and n.labels.get(REGION_LABEL) == region)

    def regions(self) -> tuple[str, ...]:
        """Regions that living nodes carry, sorted."""
        found = {n.labels[REGION_LABEL] for n in self.nodes if n.alive and REGION_LABEL in n.labels}
        return tuple(sorted(found))


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, and what to do about it."""

    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.what}; {self.fix}"


def check(
    demands: Sequence[RegionDemand], facts: ClusterFacts, served: Collection[str] = ()
) -> list[Problem]:
    """Everything that keeps ``demands`` from running on the cluster, at once.

    What is free at the moment is not looked at: it may change until the processes are placed.

    Args:
        demands: one per region of nodes.
        facts: of the cluster.
        served: regions for which machines are rented when something waits: they may lack nodes.
    """
    if not any(node.alive for node in facts.nodes):
        return [Problem("the cluster has no living node", "start one with `ray start`")]
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
        apart = sum(b.node_type == kind and b.role == "worker" for b in demand.bundles)
        if len(own) < max(1, apart):
            lacking = True
            label = f"{REGION_LABEL}={demand.node_label},{TYPE_LABEL}={kind}"
            yield Problem(
                f"region '{demand.region}' asks for {max(1, apart)} node(s) of type {kind} for "
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
    return version.partition("+")[0]  # 2.13.0+cpu and 2.13.0+cu128 are one release


def _unauthenticated(facts: ClusterFacts) -> Iterator[Problem]:
    """Ray's own ports are open to other hosts whatever the dashboard listens at."""
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
    """Whether an address is of its own machine only."""
    try:
        return ipaddress.ip_address(address.strip("[]")).is_loopback
    except ValueError:
        return address == "localhost"
