"""``python -m geo_ray.program.node_process ORDER``: one node or bridge of a program.

The order is a file that only its owner can read, and that is removed as soon as it is read. Whoever
gave it asks for all else over the process's own sockets.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from geo_ray.base.errors import FrameError
from geo_ray.program.peers import NodeServer, NodeTable
from geo_ray.program.serialization import ShippedNode, pack, unpack
from geo_ray.transport.emulation import LinkSpec, build_links
from geo_ray.transport.lan import LanConnection, LanServer
from geo_ray.transport.wire import fields
from geo_ray.transport.wire.fields import Meta
from geo_ray.transport.wire.frames import Buffer
from geo_ray.transport.wire.message import EndpointIdentity

HOST: Final = "127.0.0.1"
Ask = Callable[[Any], Any]


def node_desk(order: dict[str, Any]) -> tuple[dict[str, Ask], dict[str, Any]]:
    """What a node's process can be asked for, and what it tells first."""
    shipped = ShippedNode.of_plain(order["node"])
    server = NodeServer(shipped, "processes", HOST, order["key"])
    asks: dict[str, Ask] = {
        "use": lambda plain: server.use(NodeTable.of_plain(plain)),
        "stand": lambda _: server.stand(),
        "run": lambda _: server.run(),
        "attend": lambda _: server.attend(),
        "counts": lambda _: server.counts(),
    }
    return asks, {"address": server.address}


def bridge_desk(order: dict[str, Any]) -> tuple[dict[str, Ask], dict[str, Any]]:
    """What a bridge's process can be asked for, and what it tells first."""
    from geo_ray.program.bridge import NodeBridge  # nodes are spared what it imports

    region = order["region"]
    specs = {(a, b): LinkSpec.model_validate(spec) for a, b, spec in order["links"]}
    models = build_links(specs, order["seed"])
    shaping = {dst: model for (src, dst), model in models.items() if src == region}
    identity = EndpointIdentity(order["run_id"], region, order["epoch"], order["wan_key"])
    bridge = NodeBridge(identity, HOST, order["key"], shaping)
    asks: dict[str, Ask] = {
        "use": lambda plain: bridge.use(NodeTable.of_plain(plain)),
        "connect": lambda given: bridge.connect(given[0], (given[1], given[2])),
        "expect": bridge.expect,
        "attend": lambda _: threading.Event().wait(),
    }
    return asks, {"addresses": bridge.addresses}


def serve(path: Path) -> None:
    """Do what an order says until the process is ended."""
    order = unpack(path.read_bytes())
    path.unlink()
    asks, told = (node_desk if "node" in order else bridge_desk)(order)

    def answer(_: LanConnection, meta: Meta, payload: memoryview | None) -> tuple[Meta, Buffer]:
        what = fields.text(meta, "do")
        if what not in asks:
            raise FrameError(f"a process of a program cannot {what!r:.40}")
        return {}, pack(asks[what](None if payload is None else unpack(payload)))

    desk = LanServer(HOST, order["desk_key"], answer)
    part = path.with_suffix(f".{secrets.token_hex(4)}")
    part.write_bytes(pack({**told, "desk": desk.address}))
    part.rename(path.with_suffix(".told"))
    while True:
        time.sleep(3600.0)  # whoever has started this ends it


def main() -> None:
    """Start, without Python's own ways of ending, which wait for nodes."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    serve(Path(sys.argv[1]))


if __name__ == "__main__":
    main()
