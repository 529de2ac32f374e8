"""Nodes for other processes: how they are shipped, and which are refused, with the reason."""

from __future__ import annotations

import functools
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest

from geo_ray.base.errors import FrameError, NodeUnshippableError
from geo_ray.base.user_code import import_file
from geo_ray.program.graph import NodeGroup, NodeHandle, Program, ProgramNode
from geo_ray.program.rpc import NodeTable
from geo_ray.program.serialization import SerializedNode, pack, serialize_nodes, unpack
from tests.support import program_support as toys


def serialized(make: Any, *args: object) -> SerializedNode:
    groups = (
        NodeGroup("eu", (ProgramNode("other", toys.Echo),), replicas=2),
        NodeGroup("us", (ProgramNode("node", make, args),), calls_at_once=3),
    )
    return serialize_nodes(Program("p", groups))["node"]


def test_it_is_names_and_plain_values() -> None:
    sent = serialized(toys.Returns, [NodeHandle("other"), (1, 2.5)])
    found = SerializedNode.of_plain(unpack(pack(sent.plain())))
    assert found == sent
    assert found.made_by() is toys.Returns
    assert found.given() == ([NodeHandle("other"), (1, 2.5)],)
    assert found.names == {"other": ("other/0", "other/1"), "node": ("node",)}
    assert (found.where, found.what) == ("tests.support.program_support", "Returns")


def test_a_node_of_a_file_is_found_by_the_file(tmp_path: Path) -> None:
    path = tmp_path / "nodes.py"
    path.write_text("class Outer:\n    class Node:\n        pass\n")
    module: Any = import_file(path)
    sent = serialized(module.Outer.Node)
    assert (sent.where, sent.what) == (str(path), "Outer.Node")
    assert sent.made_by() is module.Outer.Node


class CalledByInstance:
    def __call__(self) -> None: ...


def wrapped() -> None: ...


original, wrapped = wrapped, functools.wraps(wrapped)(lambda: None)


@pytest.mark.parametrize(
    ("make", "args", "why"),
    [
        (lambda: None, (), "a lambda cannot be imported by name"),
        (functools.partial(toys.Echo, "x"), (), "partial is not a named function or class"),
        (CalledByInstance(), (), "CalledByInstance is not a named function or class"),
        (original, (), "it was replaced or wrapped"),
        (toys.Returns, (threading.Lock(),), "an argument cannot be sent: .*_thread.lock is no"),
        (toys.Returns, ({1},), "builtins.set is not a plain value"),
    ],
)
def test_unserializable_nodes_are_reported_with_the_reason(
    make: Any, args: tuple[object, ...], why: str
) -> None:
    with pytest.raises(NodeUnshippableError, match=f"node 'node': .*{why}"):
        serialized(make, *args)


def test_local_and_missing_definitions() -> None:
    class Inner: ...

    with pytest.raises(NodeUnshippableError, match="Inner is defined inside a function"):
        serialized(Inner)
    typed = types.ModuleType("__main__")
    exec("def typed(): ...", vars(typed))
    before = sys.modules["__main__"]
    sys.modules["__main__"] = typed
    try:
        with pytest.raises(NodeUnshippableError, match="typed is not defined in a file"):
            serialized(typed.typed)
    finally:
        sys.modules["__main__"] = before


@pytest.mark.parametrize(
    ("where", "what", "why"),
    [
        ("tests.support.program_support", "Gone", "has no Gone in the node's process"),
        ("tests.support.program_support", "BATTERY", "BATTERY is not callable"),
        ("no_such_module", "x", "importing no_such_module failed: ModuleNotFoundError"),
        ("/nowhere/x.py", "x", "program file /nowhere/x.py does not exist"),
    ],
)
def test_a_missing_factory_is_reported_in_the_node_s_process(
    where: str, what: str, why: str
) -> None:
    sent = serialized(toys.Echo)
    there = SerializedNode.of_plain(sent.plain() | {"where": where, "what": what})
    with pytest.raises(NodeUnshippableError, match=f"node 'node': .*{why}"):
        there.made_by()


def test_tables_come_back_or_are_refused() -> None:
    table = NodeTable(3, {"a": "eu"}, {"a": ("h", 1)}, {"eu": ("h", 2)})
    assert NodeTable.of_plain(unpack(pack(table.plain()))) == table
    for plain in (None, [1, 2], [1, {}, {"a": 3}, {}], [1, {}, {"a": ("h", "x")}, {}]):
        with pytest.raises(FrameError, match="table of nodes"):
            NodeTable.of_plain(plain)
    with pytest.raises(FrameError, match="not a serialized node"):
        SerializedNode.of_plain({"name": "x"})
