"""How a process of a program finds the others, with real sockets."""

from __future__ import annotations

import threading
from typing import Final

import pytest

from geo_ray.program.apart import peers as peers_module
from geo_ray.program.apart.peers import NodePeers
from geo_ray.program.apart.table import NodeTable
from geo_ray.transport.lan.server import LanServer
from geo_ray.transport.wire.sockets import Address

HOST: Final = "127.0.0.1"
KEY: Final = b"k" * 32


def table(number: int, address: Address) -> NodeTable:
    return NodeTable(number, {"node": "eu"}, {"node": address})


def test_who_calls_a_dead_address_hears_of_the_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "RETURN_S", 5.0)
    with LanServer(HOST, KEY, lambda *_: ({}, b"before")) as gone:
        pass
    with LanServer(HOST, KEY, lambda *_: ({}, b"back")) as back:
        peers = NodePeers("caller", "eu", KEY)
        peers.use(table(1, gone.address))
        threading.Timer(0.2, peers.use, (table(2, back.address),)).start()
        assert bytes(peers.call("node", "same", b"")) == b"back"
        peers.close()
