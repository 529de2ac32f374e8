"""A process of a program, which holds one node or a region's bridge and serves its launcher.

``python -m geo_ray.program.node_process ORDER`` is such a process on this machine. ORDER is a file
that only its owner can read; it is removed once it is read. All later requests come over the
process's own socket. On Ray an actor holds the same part (`on_ray`).
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from geo_ray.base.errors import FrameError
from geo_ray.program.rpc import NodeServer, NodeTable
from geo_ray.program.serialization import SerializedNode, pack, unpack
from geo_ray.transport.emulation import LinkSpec, build_links
from geo_ray.transport.lan import LanConnection, LanServer
from geo_ray.transport.security.tls import TlsSource
from geo_ray.transport.wire import fields
from geo_ray.transport.wire.fields import Meta
from geo_ray.transport.wire.frames import Buffer
from geo_ray.transport.wire.message import EndpointIdentity
from geo_ray.transport.wire.sockets import Address

if TYPE_CHECKING:
    from geo_ray.program.bridge import NodeBridge

HOST: Final = "127.0.0.1"
_REQUESTS: Final = ("use", "stand", "run", "attend", "counts", "connect", "expect")


class HeldPart:
    """The node or bridge that a process holds.

    Args:
        order: of its launcher: a node, or the region and links of a bridge.
        on: processes or ray.
        host: address of this machine to listen on.
        key: of its region.
        wan_key: of all bridges of the program.
        certificate: of a bridge, for TLS between regions; None if all are on loopback.
    """

    def __init__(
        self,
        order: dict[str, Any],
        on: str,
        host: str,
        key: bytes,
        wan_key: bytes = b"",
        certificate: TlsSource | None = None,
    ) -> None:
        self._held: NodeServer | NodeBridge
        self.addresses: tuple[Address, ...]
        if "node" in order:
            server = NodeServer(SerializedNode.of_plain(order["node"]), on, host, key)
            self._held, self.addresses = server, (server.address,)
            return
        from geo_ray.program.bridge import NodeBridge  # nodes do not need its imports

        region = order["region"]
        specs = {(a, b): LinkSpec.model_validate(spec) for a, b, spec in order["links"]}
        models = build_links(specs, order["seed"])
        shaping = {dst: model for (src, dst), model in models.items() if src == region}
        identity = EndpointIdentity(order["run_id"], region, order["attempt"], wan_key)
        bridge = NodeBridge(identity, host, key, shaping, certificate)
        self._held, self.addresses = bridge, bridge.addresses

    def ask(self, what: str, given: list[Any]) -> Any:
        """Call a method of the node's server or of the bridge.

        Raises:
            FrameError: it has no such method.
            GeoRayError: the error that the method raised.
        """
        if what not in _REQUESTS or not hasattr(self._held, what):
            raise FrameError(f"a process of a program has no operation {what!r:.40}")
        if what == "use":
            return self._held.use(NodeTable.of_plain(*given))
        return getattr(self._held, what)(*given)


def _serve(path: Path) -> None:
    """Execute an order until the process is ended."""
    order = unpack(path.read_bytes())
    path.unlink()
    held = HeldPart(order, "processes", HOST, order["key"], order.get("wan_key", b""))

    def answer(_: LanConnection, meta: Meta, payload: memoryview | None) -> tuple[Meta, Buffer]:
        given = [] if payload is None else unpack(payload)
        return {}, pack(held.ask(fields.text(meta, "do"), given))

    control = LanServer(HOST, order["control_key"], answer)
    part = path.with_suffix(f".{secrets.token_hex(4)}")
    part.write_bytes(pack([control.address, *held.addresses]))
    part.rename(path.with_suffix(".ready"))
    while True:
        time.sleep(3600.0)  # the launcher ends this process


def _exit_at_once(_number: int, _frame: object) -> None:
    os._exit(0)


def main() -> None:
    """Serve; SIGTERM ends the process without Python's own exit, which waits for nodes."""
    signal.signal(signal.SIGTERM, _exit_at_once)
    _serve(Path(sys.argv[1]))


if __name__ == "__main__":
    main()
