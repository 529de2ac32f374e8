"""Programs as values: what they refuse, and how they read."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from geo_ray.base.errors import InvariantError, ProgramInvalidError, ProgramRegionError
from geo_ray.program.graph import (
    NodeGroup,
    NodeHandle,
    NodeInstance,
    NodeRestarts,
    Program,
    ProgramNode,
    handles_in,
)
from geo_ray.transport.emulation import LinkSpec

A, B = ProgramNode("a", object), ProgramNode("b", dict, (NodeHandle("a"),))
LINK = LinkSpec(rate_mbps=10, delay_s=0.05)


def program(*groups: NodeGroup, **more: Any) -> Program:
    return Program("p", groups, **more)


def test_it_prints_as_a_graph() -> None:
    shown = ProgramNode("shown", None, (A.handle,))
    groups = (
        NodeGroup("eu", (A,), replicas=3, restarts=NodeRestarts(2)),
        NodeGroup("us", (B,), machine="aws:m5.large", restarts=NodeRestarts(1, None)),
        NodeGroup("eu", (shown,)),
    )
    assert str(program(*groups, links={("eu", "us"): LINK})) == (
        "program p\n"
        "  eu\n"
        "    a x 3, 2 restarts in 1:00\n"
        "    shown\n"
        "  us\n"
        "    b on aws:m5.large, 1 restarts\n"
        "  b -> a   [us => eu, 10 Mbit/s, 50 ms]\n"
        "  shown -> a"
    )
    assert "[us => eu]" in str(program(*groups))


def test_instances_and_edges() -> None:
    groups = (NodeGroup("eu", (A,), replicas=2), NodeGroup("us", (B, ProgramNode("c", None))))
    found = program(*groups)
    assert [(i.name, i.replica) for i in found.instances] == [("a/0", 0), ("a/1", 1), ("b", 0)]
    assert [(e.source, e.target, e.crosses) for e in found.edges] == [("b", "a", True)]
    assert found.regions == ("eu", "us")


def test_a_link_counts_in_both_directions_unless_both_are_given() -> None:
    groups = (NodeGroup("eu", (A,)), NodeGroup("us", (B,)))
    back = LinkSpec(delay_s=1.0)
    assert program(*groups, links={("eu", "us"): LINK}).both_ways["us", "eu"] == LINK
    both = program(*groups, links={("eu", "us"): LINK, ("us", "eu"): back}).both_ways
    assert both == {("eu", "us"): LINK, ("us", "eu"): back}


def test_handles_are_found_in_any_depth() -> None:
    deep = [A.handle, {"x": (B.handle, [A.handle])}, 3]
    assert handles_in(deep) == ("a", "b")


def test_a_handle_explains_that_it_cannot_be_called() -> None:
    with pytest.raises(
        AttributeError, match=r"handle of 'a' has no 'sums'.* inside a node that received it"
    ):
        A.handle.sums  # noqa: B018


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([], "has no nodes"),
        ([NodeGroup("eu", (A, A))], "node 'a': names must be unique"),
        ([NodeGroup("eu", (ProgramNode("a/b", object),))], "without '/'"),
        (
            [NodeGroup("eu", (A, ProgramNode("b", dict, A.handle)))],
            "'b' is not a tuple, but NodeHan",
        ),  # type: ignore[arg-type]
        ([NodeGroup("eu", (ProgramNode("b", dict, "text"),))], "'b' is not a tuple, but str"),  # type: ignore[arg-type]
        ([NodeGroup("eu", (B,))], "holds a handle of 'a', which does not exist"),
        ([NodeGroup("eu", (A,), replicas=0)], "of a in eu: replicas = 0"),
        ([NodeGroup("eu", (A,), cpus=-1)], "cpus and gpus: at least 0"),
        ([NodeGroup("eu", (A,), restarts=NodeRestarts(-1))], "restarts.most = -1"),
        ([NodeGroup("eu", (A,), restarts=NodeRestarts(1, 0.0))], "restarts.window_s = 0.0"),
        ([NodeGroup("eu", (A,), calls_at_once=0)], "calls_at_once = 0"),
        ([NodeGroup("eu", (A,), machine="m5.large")], "write cloud:type"),
        ([NodeGroup("eu", (ProgramNode("a", None), B))], "which another node starts"),
    ],
)
def test_contradictions(groups: list[NodeGroup], message: str) -> None:
    with pytest.raises(ProgramInvalidError, match=message):
        program(*groups)


def test_circles_are_refused_and_shown() -> None:
    nodes = [
        ProgramNode("a", object, (NodeHandle("b"),)),
        ProgramNode("b", object, ([NodeHandle("c")],)),
        ProgramNode("c", object, (NodeHandle("a"),)),
    ]
    with pytest.raises(ProgramInvalidError, match="form a cycle: ") as caught:
        program(NodeGroup("eu", tuple(nodes)))
    shown = caught.value.message.split(": ")[1].split(" -> ")
    assert shown[0] == shown[-1]
    edges = {("a", "b"), ("b", "c"), ("c", "a")}
    assert set(itertools.pairwise(shown)) == edges
    with pytest.raises(ProgramInvalidError, match="a -> a"):
        program(NodeGroup("eu", (ProgramNode("a", object, (NodeHandle("a"),)),)))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"links": {("eu", "su"): LINK}}, "there is no region 'su'; did you mean 'us'"),
        ({"places": {"eu": "aws:x", "ap": "aws:y"}}, "places: there is no region 'ap'"),
        ({"places": {"eu": "aws:x"}}, "a group in us: there is no region 'us'"),
    ],
)
def test_unknown_regions(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ProgramRegionError, match=message):
        program(NodeGroup("eu", (A,)), NodeGroup("us", (B,)), **more)


def test_links_and_places_make_sense() -> None:
    with pytest.raises(ProgramInvalidError, match="from eu to itself"):
        program(NodeGroup("eu", (A,)), links={("eu", "eu"): LINK})
    with pytest.raises(ProgramInvalidError, match="write cloud:region"):
        program(NodeGroup("eu", (A,)), places={"eu": "eu-west-1"})


def test_nodes_started_by_others_are_not_started() -> None:
    shown = ProgramNode("shown", None)
    assert program(NodeGroup("eu", (shown,))).instances == ()
    with pytest.raises(InvariantError, match="shown is started by another node"):
        NodeInstance("shown", shown, NodeGroup("eu", (shown,))).make  # noqa: B018
