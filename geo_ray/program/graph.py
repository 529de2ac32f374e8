"""A program as a value: groups of nodes, handles between them, and links between their regions.

Contains its validation, its text form, and `load_program`, which loads a program from a file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from geo_ray.base.errors import (
    GeoRayError,
    InvariantError,
    ProgramInvalidError,
    ProgramLoadError,
    ProgramRegionError,
)
from geo_ray.base.text import duration_text
from geo_ray.base.user_code import error_place, error_summary, import_file, or_meant
from geo_ray.transport.emulation import LinkSpec


@dataclass(frozen=True, slots=True)
class NodeHandle:
    """Reference to a node in another node's arguments, replaced by a caller at its creation."""

    node: str

    def __getattr__(self, name: str) -> object:
        raise AttributeError(
            f"the handle of {self.node!r} has no {name!r}: a handle can be called only inside a "
            "node that received it as an argument"
        )


class NodeFactory(Protocol):
    """Creates a node: a class, or a function that returns an object."""

    def __call__(self, *args: Any) -> object:
        """Create it from the arguments of the `ProgramNode`."""


@dataclass(frozen=True, slots=True)
class ProgramNode:
    """Definition of a node.

    Attributes:
        name: unique in its program.
        make: called where the node runs, once the nodes that it calls are ready; the returned
            object answers calls of its methods. Its method ``run`` is started then, and the
            program ends when every ``run`` has returned. None: another node creates it, and it is
            only shown.
        args: for ``make``: plain values, and handles in any depth, each of which is an edge.
    """

    name: str
    make: NodeFactory | None
    args: tuple[object, ...] = ()

    @property
    def handle(self) -> NodeHandle:
        """A reference to pass to other nodes."""
        return NodeHandle(self.name)


@dataclass(frozen=True, slots=True)
class NodeRestarts:
    """How often a failed instance restarts.

    Attributes:
        most: restarts in a window; 0 for none.
        window_s: its length; None: as long as the program runs.
    """

    most: int = 0
    window_s: float | None = 60.0


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """Nodes that share a region and a policy.

    Attributes:
        region: the region that they run in.
        nodes: the definitions.
        replicas: instances of each node; calls go to them in turn.
        cpus: of each instance; Ray reserves them, threads and processes do not.
        gpus: the same.
        machine: ``cloud:type`` of the machine that an instance is priced as; None: costs nothing.
        restarts: of each instance.
        calls_at_once: how many calls an instance answers at the same time, next to ``run``.
    """

    region: str
    nodes: tuple[ProgramNode, ...]
    replicas: int = 1
    cpus: float = 1.0
    gpus: float = 0.0
    machine: str | None = None
    restarts: NodeRestarts = NodeRestarts()
    calls_at_once: int = 1


@dataclass(frozen=True, slots=True)
class NodeInstance:
    """One replica of a node.

    Attributes:
        name: of the node, with ``/`` and a number where there are several.
        node: its definition.
        group: its group.
        replica: its number.
    """

    name: str
    node: ProgramNode
    group: NodeGroup
    replica: int = 0

    @property
    def make(self) -> NodeFactory:
        """The factory of the node.

        Raises:
            InvariantError: another node creates it.
        """
        if self.node.make is None:
            raise InvariantError(f"{self.name} is started by another node")
        return self.node.make


@dataclass(frozen=True, slots=True)
class NodeEdge:
    """One node holds a handle of another.

    Attributes:
        source: calling node.
        target: called node.
        source_region: region of the caller.
        target_region: region of the called node.
    """

    source: str
    target: str
    source_region: str
    target_region: str

    @property
    def crosses(self) -> bool:
        """Whether calls leave the region."""
        return self.source_region != self.target_region


def instance_names(node: ProgramNode, group: NodeGroup) -> tuple[str, ...]:
    """Return the names of a node's instances."""
    if group.replicas == 1:
        return (node.name,)
    return tuple(f"{node.name}/{i}" for i in range(group.replicas))


def handles_in(value: object) -> tuple[str, ...]:
    """Return the names of the nodes whose handles are in a value, each once."""
    return tuple(dict.fromkeys(_handles(value)))


def _handles(value: object) -> Iterator[str]:
    match value:
        case NodeHandle(node=name):
            yield name
        case dict():
            for each in value.values():
                yield from _handles(each)
        case list() | tuple():
            for each in value:
                yield from _handles(each)


def edges_of(groups: Sequence[NodeGroup]) -> list[tuple[str, str]]:
    """Return source and target of every edge, even if the target does not exist."""
    return [
        (node.name, target)
        for group in groups
        for node in group.nodes
        for target in handles_in(node.args)
    ]


def check_groups(program: str, groups: Sequence[NodeGroup]) -> None:
    """Check nodes, groups and handles.

    Raises:
        ProgramInvalidError: they are inconsistent.
    """
    names = Counter(node.name for group in groups for node in group.nodes)
    if not names:
        raise ProgramInvalidError(f"program {program!r} has no nodes")
    for name, count in names.items():
        if count > 1 or not name or "/" in name:
            raise ProgramInvalidError(f"node {name!r}: names must be unique and without '/'")
    for group in groups:
        _check_group(group)
        for node in group.nodes:
            if not isinstance(node.args, tuple):
                raise ProgramInvalidError(
                    f"args of node {node.name!r} is not a tuple, but {type(node.args).__name__}",
                    fix="A single argument needs a comma: (argument,).",
                )
    _check_handles(groups)


def check_regions(
    groups: Sequence[NodeGroup],
    links: Iterable[tuple[str, str]],
    places: Mapping[str, str],
) -> None:
    """Check that all name the same regions.

    Raises:
        ProgramRegionError: one of them is unknown.
        ProgramInvalidError: a link or a place is invalid.
    """
    known = tuple(dict.fromkeys(group.region for group in groups))
    for a, b in links:
        _check_known(f"the link from {a} to {b}", (a, b), known)
        if a == b:
            raise ProgramInvalidError(f"a link leads from {a} to itself")
    _check_known("places", places, known)
    if places:
        for region in known:
            _check_known(f"a group in {region}", (region,), tuple(places))
    for region, place in places.items():
        if not all(place.partition(":")):
            raise ProgramInvalidError(f"the place of {region} is {place!r}: write cloud:region")


def _check_group(group: NodeGroup) -> None:
    names = ", ".join(node.name for node in group.nodes)
    window_s = group.restarts.window_s
    for wrong, what in (
        (group.replicas < 1, f"replicas = {group.replicas}: at least 1"),
        (group.cpus < 0 or group.gpus < 0, "cpus and gpus: at least 0"),
        (group.restarts.most < 0, f"restarts.most = {group.restarts.most}: at least 0"),
        (window_s is not None and window_s <= 0, f"restarts.window_s = {window_s}: above 0"),
        (group.calls_at_once < 1, f"calls_at_once = {group.calls_at_once}: at least 1"),
        (
            group.machine is not None and not all(group.machine.partition(":")),
            f"machine = {group.machine!r}: write cloud:type",
        ),
    ):
        if wrong:
            raise ProgramInvalidError(f"the group of {names} in {group.region}: {what}")


def _check_known(who: str, names: Iterable[str], known: tuple[str, ...]) -> None:
    for name in names:
        if name not in known:
            raise ProgramRegionError(f"{who}: there is no region {name!r}{or_meant(name, known)}")


def _check_handles(groups: Sequence[NodeGroup]) -> None:
    nodes = {node.name: node for group in groups for node in group.nodes}
    callees: dict[str, set[str]] = {name: set() for name in nodes}
    for source, target in edges_of(groups):
        if target not in nodes:
            raise ProgramInvalidError(
                f"node {source!r} holds a handle of {target!r}, which does not exist"
                f"{or_meant(target, nodes)}"
            )
        if nodes[source].make is not None and nodes[target].make is None:
            raise ProgramInvalidError(
                f"node {source!r} holds a handle of {target!r}, which another node starts"
            )
        callees[source].add(target)
    try:
        TopologicalSorter(callees).prepare()
    except CycleError as error:
        circle = " -> ".join(reversed(error.args[1]))
        raise ProgramInvalidError(
            f"handles form a cycle: {circle}",
            fix="Let one of them return what the other needs instead of calling it: then no two "
            "nodes can wait for each other.",
        ) from None


def graph_text(
    name: str,
    groups: Sequence[NodeGroup],
    edges: Sequence[NodeEdge],
    links: Mapping[tuple[str, str], LinkSpec],
) -> str:
    """Return the text form: regions with their nodes, then edges; cross-region edges are marked."""
    lines = [f"program {name}"]
    for region in dict.fromkeys(group.region for group in groups):
        lines.append(f"  {region}")
        for group in groups:
            if group.region == region:
                lines += [f"    {node.name}{_group_text(group)}" for node in group.nodes]
    for edge in edges:
        way = ""
        if edge.crosses:
            spec = links.get((edge.source_region, edge.target_region))
            way = f"   [{edge.source_region} => {edge.target_region}{_link_text(spec)}]"
        lines.append(f"  {edge.source} -> {edge.target}{way}")
    return "\n".join(lines)


def _group_text(group: NodeGroup) -> str:
    parts = [f" x {group.replicas}"] if group.replicas > 1 else []
    parts += [f" on {group.machine}"] if group.machine else []
    if group.restarts.most:
        within = group.restarts.window_s
        window = "" if within is None else f" in {duration_text(within)}"
        parts.append(f", {group.restarts.most} restarts{window}")
    return "".join(parts)


def _link_text(spec: LinkSpec | None) -> str:
    if spec is None:
        return ""
    rate = "" if spec.rate_mbps is None else f", {spec.rate_mbps:g} Mbit/s"
    return f"{rate}, {spec.delay_s * 1000:g} ms"


@dataclass(frozen=True, slots=True)
class Program:
    """A whole job, validated on creation.

    Attributes:
        name: of the program.
        groups: its nodes.
        links: between regions, by source and destination; one direction counts for both unless the
            other is given. A missing link takes no time.
        places: of regions, as ``cloud:region`` in the price book; needed for prices alone.
        seed: of the links' random values.

    Raises:
        ProgramInvalidError: it is inconsistent.
        ProgramRegionError: a link or a group names an unknown region.
    """

    name: str
    groups: tuple[NodeGroup, ...]
    links: Mapping[tuple[str, str], LinkSpec] = field(default_factory=dict)
    places: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        check_groups(self.name, self.groups)
        check_regions(self.groups, self.links, self.places)

    @property
    def nodes(self) -> dict[str, tuple[ProgramNode, NodeGroup]]:
        """Every node with its group, by name."""
        return {node.name: (node, group) for group in self.groups for node in group.nodes}

    @property
    def regions(self) -> tuple[str, ...]:
        """Regions of its nodes, in the order of the groups."""
        return tuple(dict.fromkeys(group.region for group in self.groups))

    @property
    def instances(self) -> tuple[NodeInstance, ...]:
        """Every replica of every started node."""
        return tuple(
            NodeInstance(name, node, group, replica)
            for node, group in self.nodes.values()
            if node.make is not None
            for replica, name in enumerate(instance_names(node, group))
        )

    @property
    def edges(self) -> tuple[NodeEdge, ...]:
        """All edges between nodes."""
        regions = {node.name: group.region for node, group in self.nodes.values()}
        return tuple(
            NodeEdge(source, target, regions[source], regions[target])
            for source, target in edges_of(self.groups)
        )

    @property
    def both_ways(self) -> dict[tuple[str, str], LinkSpec]:
        """The links of both directions."""
        back = {(b, a): spec for (a, b), spec in self.links.items()}
        return back | dict(self.links)

    def __str__(self) -> str:
        return graph_text(self.name, self.groups, self.edges, self.both_ways)


def load_program(where: str, base_dir: Path | None = None) -> Program:
    """Load the program of ``FILE.py:NAME``: a `Program`, or a function that returns one.

    Args:
        where: the name may be left out if the file has one program.
        base_dir: where a relative path starts; None: the working directory.

    Raises:
        ProgramLoadError: there is none.
        ProgramError: it is invalid.
    """
    file, _, name = where.partition(".py:")
    path = (base_dir or Path.cwd()) / (f"{file}.py" if name else where)
    if path.suffix != ".py":
        raise ProgramLoadError(f"{where} is not of the form FILE.py or FILE.py:NAME")
    module = import_file(path, "program", ProgramLoadError)
    own = _programs(module)
    if not name:
        if len(own) != 1:
            listed = ", ".join(own) or "none"
            raise ProgramLoadError(f"{path.name} has {len(own)} programs instead of one: {listed}")
        (name,) = own
    found: Any = vars(module).get(name)
    if found is None:
        raise ProgramLoadError(f"{path.name} has no program {name!r}{or_meant(name, own)}")
    if not isinstance(found, Program) and callable(found):
        try:
            found = found()
        except GeoRayError:
            raise
        except Exception as error:
            raise ProgramLoadError(
                f"{error_place(error, path)}: {name}(): {error_summary(error)}"
            ) from error
    if not isinstance(found, Program):
        raise ProgramLoadError(
            f"{name} of {path.name} is not a program, but {type(found).__name__}"
        )
    return found


def _programs(module: ModuleType) -> list[str]:
    return [name for name, value in vars(module).items() if isinstance(value, Program)]
