"""An endpoint in a process of its own, inside a region of the lab; `test_transport_lab.py` asks it.

Reads one JSON object per line from its standard input and answers each with one.
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import asdict, dataclass, field
from typing import Any

from geo_ray.transport.config import TransportConfig
from geo_ray.transport.endpoint import Endpoint
from geo_ray.transport.wire.message import EndpointIdentity, Message


def payload_of(n: int, size_bytes: int) -> bytes:
    """What message ``n`` holds; both ends know."""
    return random.Random(n).randbytes(size_bytes)


@dataclass
class PhaseProgress:
    """What happened at an endpoint, in order."""

    messages: list[int] = field(default_factory=list)
    damaged: list[int] = field(default_factory=list)
    peers: list[tuple[int, bool]] = field(default_factory=list)


class Node:
    """One region's endpoint."""

    def __init__(self, hello: dict[str, Any]) -> None:
        self.heard = PhaseProgress()
        self.peer: str = hello["peer"]
        identity = EndpointIdentity("lab", hello["region"], hello["attempt"], b"k" * 32)
        config = TransportConfig.model_validate(hello["config"])
        self.endpoint = Endpoint(identity, self.on_message, config, on_peer=self.on_peer)

    def on_message(self, _: str, message: Message) -> None:
        """Remember what came and whether it is what was sent."""
        n = int(str(message.meta["n"]))
        if message.payload != payload_of(n, len(message.payload)):
            self.heard.damaged.append(n)
        self.heard.messages.append(n)

    def on_peer(self, _: str, attempt: int, up: bool) -> None:
        """Remember that the peer came or went."""
        self.heard.peers.append((attempt, up))

    def listen(self, host: str) -> dict[str, Any]:
        """Take connections."""
        return {"port": self.endpoint.listen(host)[1]}

    def connect(self, host: str, port: int) -> dict[str, Any]:
        """Connect to the other region, there from now on."""
        self.endpoint.connect(self.peer, (host, port))
        return {}

    def send(self, first: int, count: int, size_bytes: int) -> dict[str, Any]:
        """Queue messages."""
        for n in range(first, first + count):
            self.endpoint.send(
                self.peer, Message("test", {"n": n}, payload_of(n, size_bytes), "update")
            )
        return {}

    def look(self) -> dict[str, Any]:
        """Everything there is to know."""
        return {**asdict(self.heard), "stats": self.endpoint.stats().get(self.peer)}


def main() -> None:
    """Serve until the input ends."""
    node = Node(json.loads(sys.stdin.readline()))
    for line in sys.stdin:
        order = json.loads(line)
        print(json.dumps(getattr(node, order.pop("do"))(**order)), flush=True)
    node.endpoint.close(1.0)


if __name__ == "__main__":
    main()
