"""The regions of `overlay.py` in one process, behind links that are emulated inside the transport.

Every message passes three links: the sender's uplink and the receiver's downlink, which others
share, and the pair's own. Needs no root; knows nothing of TCP.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from benchmarks.overlay.overlay_node import Node
from geo_ray.transport.emulation import LinkModel, LinkSpec


class SharedLink(LinkModel):
    """Bytes pass an uplink, a pair's own link and a downlink, one behind the other."""

    def __init__(self, lines: tuple[LinkModel, LinkModel, LinkModel], lock: threading.Lock) -> None:
        super().__init__(LinkSpec(delay_s=sum(line.spec.delay_s for line in lines)), 0)
        self.lines = lines
        self.lock = lock

    @property
    def free_at_s(self) -> float:
        """When the first of the lines has room again."""
        with self.lock:
            return max(line.free_at_s for line in self.lines)

    def transfer(self, now_s: float, size_bytes: int) -> float:
        """See `LinkModel.transfer`."""
        with self.lock:
            for line in self.lines:
                now_s = line.transfer(now_s, size_bytes)
            return now_s


class EmulatedNet:
    """All regions of a benchmark in this process."""

    def __init__(self, hellos: Mapping[str, dict[str, Any]], mbps: float, delay_s: float) -> None:
        lock = threading.Lock()
        names = list(hellos)
        up = {name: LinkModel(LinkSpec(rate_mbps=mbps), 0) for name in names}
        down = {name: LinkModel(LinkSpec(rate_mbps=mbps), 0) for name in names}
        pairs = [(a, b) for a in names for b in names if a != b]
        self.own = {pair: LinkModel(LinkSpec(delay_s=delay_s), 0) for pair in pairs}
        self.delay_s = delay_s
        self.nodes = {
            a: Node(
                hellos[a],
                {b: SharedLink((up[a], self.own[a, b], down[b]), lock) for b in names if b != a},
            )
            for a in names
        }

    def ask(self, region: str, do: str, **order: Any) -> dict[str, Any]:
        """Have a region's node do something; its answer."""
        return dict(getattr(self.nodes[region], do)(**order))

    def pair(self, src: str, dst: str, mbps: float) -> None:
        """Change the rate of an ordered pair."""
        self.own[src, dst].spec = LinkSpec(delay_s=self.delay_s, rate_mbps=mbps)

    def stats(self) -> None:
        """There is no lab that could be late."""

    def end(self) -> None:
        """Close all nodes."""
        for node in self.nodes.values():
            node.road.close()
        for node in self.nodes.values():
            node.endpoint.close(0.2)
