"""One region of `overlay.py`: an endpoint and its end of an overlay, without Ray and torch.

Reads one JSON object per line from its standard input and answers with one. The first line says
who it is; keys come that way and not as arguments, which others could read.
"""

from __future__ import annotations

import base64
import json
import resource
import sys
import time
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from geo_ray.runtime.exchange.overlay import Commit, OverlaySetting, OverlayVectors
from geo_ray.transport.config import TransportConfig
from geo_ray.transport.emulation import LinkModel
from geo_ray.transport.endpoint import Endpoint
from geo_ray.transport.overlay.config import AnyOverlay
from geo_ray.transport.wire.message import EndpointIdentity

WAIT_S = 600.0


def keep_mean(about: Any, mean_P: Any) -> Any:
    """What an averager would do whose answer is the mean."""
    return {region: {} for region in about}, mean_P


class Node:
    """An endpoint and a path that take part in rounds of random vectors.

    Args:
        hello: region, regions, hub, overlay, num_params, transport, key, port.
        shaping: link models by region, for rounds without a lab.
    """

    def __init__(self, hello: dict[str, Any], shaping: dict[str, LinkModel] | None = None) -> None:
        self.region: str = hello["region"]
        self.port: int = hello["port"]
        overlay: Any = TypeAdapter(AnyOverlay).validate_json(json.dumps(hello["overlay"]))
        setting = OverlaySetting(
            self.region, hello["regions"], hello["hub"], overlay, hello["num_params"]
        )
        commit: Commit | None = keep_mean if self.region == hello["hub"] else None
        self.endpoint = Endpoint(
            EndpointIdentity("bench", self.region, 1, base64.b64decode(hello["key"])),
            lambda peer, message: self.routes[message.kind](peer, message),
            TransportConfig.model_validate_json(json.dumps(hello["transport"])),
            shaping,
        )
        self.path = OverlayVectors(setting, commit, self.endpoint)
        self.routes = self.path.routes()
        seed = sorted(hello["regions"]).index(self.region)
        self.own_P = np.random.default_rng(seed).normal(size=hello["num_params"])
        self.own_P = self.own_P.astype(np.float32)
        self.peers = [name for name in hello["regions"] if name != self.region]

    def listen(self, host: str) -> dict[str, Any]:
        """Take connections."""
        bound = self.endpoint.listen(host, self.port)
        return {"address": list(bound)}

    def connect(self, addresses: dict[str, Any]) -> dict[str, Any]:
        """Connect to all regions that sort before this one, and wait for the others."""
        for peer in self.peers:
            if peer < self.region:
                self.endpoint.connect(peer, tuple(addresses[peer]))
        self.endpoint.wait_connected(self.peers, 60.0)
        return {}

    def round(self, at_s: float) -> dict[str, Any]:
        """Contribute at a time of the machine's monotonic clock; when the result was here."""
        before_s = cpu_s()
        time.sleep(max(0.0, at_s - time.monotonic()))
        done = self.path.exchange(self.own_P, 1.0, {}, WAIT_S)
        done_s = time.monotonic()
        return {
            "done_s": done_s,
            "sum": float(np.abs(done.result_P).sum(dtype=np.float64)),
            "cpu_s": cpu_s() - before_s,
        }

    def status(self) -> dict[str, Any]:
        """The path's counters, and the endpoint's."""
        return dict(self.path.status()) | {"links": self.endpoint.stats()}

    def stop(self) -> dict[str, Any]:
        """End."""
        self.path.close()
        self.endpoint.close(1.0)
        return {}


def cpu_s() -> float:
    """Seconds of CPU time that this process has used."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Serve orders until the input ends."""
    node = Node(json.loads(sys.stdin.readline()))
    for line in sys.stdin:
        order = json.loads(line)
        answer = getattr(node, order.pop("do"))(**order)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
