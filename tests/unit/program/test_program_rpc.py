"""How a process of a program finds the others, with real sockets."""

from __future__ import annotations

import threading
from typing import Final

import pytest

from geo_ray.base.errors import NodeLostError
from geo_ray.program import rpc
from geo_ray.program.graph import ProgramNode
from geo_ray.program.rpc import NodeServer, NodeStubs, NodeTable
from geo_ray.program.serialization import pack, serialize_nodes, unpack
from geo_ray.transport.lan import LanServer
from geo_ray.transport.wire.sockets import Address
from tests.support import program_support as toys

HOST: Final = "127.0.0.1"
KEY: Final = b"k" * 32


def table(number: int, address: Address) -> NodeTable:
    return NodeTable(number, {"node": "eu"}, {"node": address})


def test_a_call_to_a_dead_address_uses_the_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "RETURN_S", 5.0)
    with LanServer(HOST, KEY, lambda *_: ({}, b"before")) as gone:
        pass
    with LanServer(HOST, KEY, lambda *_: ({}, b"back")) as back:
        stubs = NodeStubs("caller", "eu", KEY)
        stubs.use(table(1, gone.address))
        threading.Timer(0.2, stubs.use, (table(2, back.address),)).start()
        assert bytes(stubs.call("node", "same", b"")) == b"back"
        stubs.close()


def test_a_reused_address_does_not_answer_for_its_former_node() -> None:
    (other,) = serialize_nodes(toys.alone(ProgramNode("other", toys.Echo))).values()
    server = NodeServer(other, "processes", HOST, KEY)
    stubs = NodeStubs("caller", "eu", KEY)
    try:
        server.stand()
        regions, nodes = dict.fromkeys(("node", "other"), "eu"), {"other": server.address}
        stubs.use(NodeTable(1, regions, {**nodes, "node": server.address}))
        assert unpack(stubs.call("other", "same", pack([[1], {}]))) == 1
        with pytest.raises(NodeLostError, match="node is gone; other has its address"):
            stubs.call("node", "same", pack([[1], {}]))
    finally:
        stubs.close()
        server.close()
