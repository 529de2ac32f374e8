"""The order of starts and restarts of instances, and the end of a program."""

from __future__ import annotations

from geo_ray.program.graph import NodeGroup, NodeHandle, NodeRestarts, Program, ProgramNode
from geo_ray.program.run import ProgramPolicy


def chain() -> ProgramPolicy:
    nodes = (
        ProgramNode("a", object),
        ProgramNode("b", object, (NodeHandle("a"),)),
        ProgramNode("c", object, (NodeHandle("b"), NodeHandle("a"))),
    )
    return ProgramPolicy(Program("p", (NodeGroup("eu", nodes, restarts=NodeRestarts(1)),)))


def test_callers_are_started_after_those_that_they_call() -> None:
    policy = chain()
    assert policy.due() == ["a"]
    assert policy.due() == []
    policy.stood("a", runs=False)
    assert policy.due() == ["b"]
    policy.stood("b", runs=True)
    assert not policy.is_over
    assert policy.due() == ["c"]
    policy.stood("c", runs=False)
    assert not policy.is_over
    policy.returned("b")
    assert policy.is_over


def test_a_caller_is_not_started_while_the_called_is_away() -> None:
    policy = chain()
    policy.due()
    policy.stood("a", runs=False)
    assert policy.failed("a", now_s=1.0)
    assert policy.due() == ["a"]
    assert policy.incarnations["a"] == 2
    assert not policy.failed("a", now_s=2.0)
    assert policy.limit("a") == "restarts.most = 1 in 60 s"


def test_one_that_has_returned_stands_for_its_callers() -> None:
    policy = chain()
    policy.due()
    policy.stood("a", runs=True)
    policy.returned("a")
    assert policy.due() == ["b"]
    policy.stood("b", runs=False)
    assert policy.failed("a", now_s=1.0)  # its process ended, and it is to answer calls
    assert not policy.is_over
    assert policy.due() == ["a"]
