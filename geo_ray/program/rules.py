"""What a program must keep to. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter

from geo_ray.errors import ProgramInvalidError, ProgramRegionError
from geo_ray.program.node import NodeGroup, edges_of
from geo_ray.util.user_class import or_meant


def check_groups(program: str, groups: Sequence[NodeGroup]) -> None:
    """Check nodes, groups and handles.

    Raises:
        ProgramInvalidError: they contradict themselves.
    """
    names = Counter(node.name for group in groups for node in group.nodes)
    if not names:
        raise ProgramInvalidError(f"program {program!r} has no nodes")
    for name, count in names.items():
        if count > 1 or not name or "/" in name:
            raise ProgramInvalidError(f"node {name!r}: names are unique, and without '/'")
    for group in groups:
        _check_group(group)
        for node in group.nodes:
            if not isinstance(node.args, tuple):
                raise ProgramInvalidError(
                    f"args of node {node.name!r} are no tuple, but {type(node.args).__name__}",
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
        ProgramInvalidError: a link leads nowhere, or a place is none.
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
                f"node {source!r} holds a handle of {target!r}, which is not there"
                f"{or_meant(target, nodes)}"
            )
        if nodes[source].make is not None and nodes[target].make is None:
            raise ProgramInvalidError(
                f"node {source!r} holds a handle of {target!r}, which another node brings up"
            )
        callees[source].add(target)
    try:
        TopologicalSorter(callees).prepare()
    except CycleError as error:
        circle = " -> ".join(reversed(error.args[1]))
        raise ProgramInvalidError(
            f"handles lead in a circle: {circle}",
            fix="Let one of them return what the other needs instead of calling it: then no two "
            "nodes can ever wait for each other.",
        ) from None
