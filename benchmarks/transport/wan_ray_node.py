"""A Ray driver in the WAN lab: `wan_ray.py` starts it inside a region's namespace.

    python wan_ray_node.py REGION SIZE_BYTES COUNT

An actor in the other region makes objects; this process gets them. Prints a JSON list: how long
each took, from being in the other region's object store until it was here.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray

from geo_ray.experiment.cluster import ExistingClusterConfig
from geo_ray.ray_cluster.connect import connect
from geo_ray.ray_cluster.labels import in_region

GIVE_UP_S = 300.0


class Maker:
    """Makes what is to be fetched."""

    def make(self, size_bytes: int) -> NDArray[np.uint8]:
        """Bytes that cannot be compressed, by whatever lies on the way."""
        return np.random.default_rng().integers(0, 256, size_bytes, np.uint8)


def fetch_s(maker: Any, size_bytes: int) -> float:
    """How long it takes to fetch one new object."""
    ref = maker.make.remote(size_bytes)
    ray.wait([ref], timeout=GIVE_UP_S, fetch_local=False)
    began_s = time.monotonic()
    found = ray.get(ref, timeout=GIVE_UP_S)
    took_s = time.monotonic() - began_s
    assert found.nbytes == size_bytes
    return took_s


def main() -> None:
    region, size_bytes, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    config = ExistingClusterConfig(connect_timeout_s=120.0)
    with connect(config, [region], namespace="bench"):
        maker = ray.remote(Maker).options(label_selector=in_region(region)).remote()
        fetch_s(maker, 1 << 20)  # the connection between the object managers is there
        print(json.dumps([fetch_s(maker, size_bytes) for _ in range(count)]), flush=True)


if __name__ == "__main__":
    main()
