"""The command line of a Ray node on this machine that shares it with others of its kind."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

_ANY_PORT = (
    "min-worker",
    "max-worker",
    "node-manager",
    "object-manager",
    "runtime-env-agent",
    "metrics-export",
)


def node_command(
    flags: Sequence[str], *, ip: str, home: Path, object_store_bytes: int
) -> list[str]:
    """Return ``ray start`` in the foreground, with ports that the system chooses.

    Args:
        flags: of this node: the head's, or the address to join, labels and resources.
        ip: loopback address of its own.
        home: directory of its own, so that two nodes may start at the same time.
        object_store_bytes: shared memory of its object store.
    """
    return [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *flags),
        *(f"--{what}-port=0" for what in _ANY_PORT),
        f"--node-ip-address={ip}",
        f"--temp-dir={home}",
        f"--object-store-memory={object_store_bytes}",
        "--dashboard-agent-listen-port=0",
        "--dashboard-agent-grpc-port=0",
        "--include-log-monitor=false",
        "--disable-usage-stats",
        "--log-style=record",
        "--log-color=false",
    ]
