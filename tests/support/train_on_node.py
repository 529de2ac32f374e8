"""Trains as a program on one node's machine would: `train_on_node.py ADDRESS NODE_IP CONFIG`.

On one machine with many nodes Ray connects a process to the head's; this one names another.
"""

from __future__ import annotations

import sys
from pathlib import Path

import ray

import geo_ray
from geo_ray.base.errors import GeoRayError


def main(address: str, node_ip: str, config: str) -> int:
    """Connect to the node and train what the file says."""
    ray.init(
        address=address, _node_ip_address=node_ip, namespace="geo_ray-tiny", log_to_driver=False
    )
    try:
        geo_ray.train(Path(config), progress="plain")
    except GeoRayError as error:
        print(f"error {error}")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
