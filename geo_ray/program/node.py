"""What programs are made of: nodes in groups, and handles by which they call each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from geo_ray.errors import InvariantError


@dataclass(frozen=True, slots=True)
class NodeHandle:
    """Stands for a node in another node's arguments; a caller takes its place where that runs."""

    node: str

    def __getattr__(self, name: str) -> object:
        raise AttributeError(
            f"the handle of {self.node!r} has no {name!r}: a handle is called where a node runs, "
            "so give it to a node"
        )


@dataclass(frozen=True, slots=True)
class ProgramNode:
    """What one node is made of.

    Attributes:
        name: unique in its program.
        make: called where the node runs, once the nodes that it calls stand; what it returns
            answers calls of its methods. A method ``run`` is started then, and the program ends
            when every ``run`` has returned. None: another node brings it up, and it is only shown.
        args: for ``make``: plain values, and handles in any depth, each of which is an edge.
    """

    name: str
    make: Callable[..., object] | None
    args: tuple[object, ...] = ()

    @property
    def handle(self) -> NodeHandle:
        """A reference to give to other nodes."""
        return NodeHandle(self.name)


@dataclass(frozen=True, slots=True)
class NodeRestarts:
    """How often an instance that failed is made anew.

    Attributes:
        most: times in a window; 0 is never.
        window_s: its length; None: as long as the program runs.
    """

    most: int = 0
    window_s: float | None = 60.0


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """Nodes that share a place and a policy.

    Attributes:
        region: where they run.
        nodes: what they are.
        replicas: instances of each node; calls go to them in turn.
        cpus: of each instance; Ray reserves them, threads and processes do not.
        gpus: the same.
        machine: ``cloud:type`` of the machine that an instance is priced as; None: costs nothing.
        restarts: of each instance.
        calls_at_once: how many calls an instance answers at the same time; ``run`` goes on beside.
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
        node: what it is made of.
        group: where it belongs.
        replica: its number.
    """

    name: str
    node: ProgramNode
    group: NodeGroup
    replica: int = 0

    @property
    def make(self) -> Callable[..., object]:
        """What makes it.

        Raises:
            InvariantError: another node brings it up.
        """
        if self.node.make is None:
            raise InvariantError(f"{self.name} is not started by itself")
        return self.node.make


@dataclass(frozen=True, slots=True)
class NodeEdge:
    """One node holds a handle of another.

    Attributes:
        source: who calls.
        target: who is called.
        source_region: where the caller is.
        target_region: where the called is.
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
    """The names of a node's instances."""
    if group.replicas == 1:
        return (node.name,)
    return tuple(f"{node.name}/{i}" for i in range(group.replicas))


def handles_in(value: object) -> tuple[str, ...]:
    """Names of the nodes whose handles are in a value, each once."""
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
    """Source and target of every edge, whether the target is there or not."""
    return [
        (node.name, target)
        for group in groups
        for node in group.nodes
        for target in handles_in(node.args)
    ]
