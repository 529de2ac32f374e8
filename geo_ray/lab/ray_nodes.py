"""A Ray cluster in a lab: one node per region, in its namespace, with the region's label.

The first region's node is the head. Nodes share the machine, so each has a directory of its own, as
in `geo_ray.ray_cluster.local_cluster`; unlike there, all their traffic crosses the lab's links.
"""

from __future__ import annotations

import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from geo_ray.base.errors import ClusterStartError
from geo_ray.lab import teardown
from geo_ray.lab.lab import Lab
from geo_ray.ray_cluster.labels import label_flag
from geo_ray.ray_cluster.settings import local_node_environment, tls_environment, token_environment

_PORT: Final = 6379  # every region has all ports of its namespace
_TAIL_LINES: Final = 15

WAN_SETTINGS: Final[Mapping[str, str]] = {
    # An object that needs longer than the default of 10 s to arrive would be sent twice.
    "RAY_object_manager_pull_timeout_ms": "300000",
    # Ray's own defaults: a node that is cut off for less than a minute is not given up.
    "RAY_health_check_period_ms": "3000",
    "RAY_health_check_timeout_ms": "10000",
    "RAY_health_check_failure_threshold": "5",
}


@dataclass(frozen=True)
class RayOptions:
    """The size of the nodes.

    Attributes:
        cpus: logical CPUs of each region; only a count.
        object_store_bytes: shared memory of each region's object store.
        start_timeout_s: longest wait for all nodes; starting crosses the WAN several times.
        tls: whether Ray itself encrypts what it says, with a certificate of the lab's own.
    """

    cpus: int = 4
    object_store_bytes: int = 100_000_000
    start_timeout_s: float = 180.0
    tls: bool = False


def start_ray(lab: Lab, options: RayOptions | None = None) -> dict[str, str]:
    """Start a node in every region; they are ended with the lab.

    Args:
        lab: must be up, without a Ray cluster so far.
        options: sizes.

    Returns:
        What a driver inside a region needs in its environment, RAY_ADDRESS included.

    Raises:
        ClusterStartError: a node does not start; nodes that have started stay until the lab ends.
    """
    options = options or RayOptions()
    record = teardown.read_record(lab.directory)
    if "ray" in record:
        raise ClusterStartError(
            "this lab has a Ray cluster already", fix="Take the lab down and bring it up again."
        )
    root = Path(tempfile.mkdtemp(prefix="geo-ray-lab-"))
    token = root / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    head_ip = lab.addresses[lab.regions[0]]
    environment = {"RAY_ADDRESS": f"{head_ip}:{_PORT}", **token_environment(token)}
    tls = tls_environment(root, tuple(lab.addresses.values())) if options.tls else {}
    environment |= tls
    record["directories"] = [*record.get("directories", []), str(root)]
    teardown.write_record(lab.directory, record)

    node_environment = {**local_node_environment(token), **WAN_SETTINGS, **tls}
    deadline_s = time.monotonic() + options.start_timeout_s
    nodes: dict[str, subprocess.Popen[bytes]] = {}
    for index, region in enumerate(lab.regions):
        home = root / str(index)
        home.mkdir()
        with (root / f"{index}.log").open("wb") as log:
            nodes[region] = lab.popen(
                region,
                _argv(region, index, lab.addresses[region], home, head_ip, options),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=node_environment,
                start_new_session=True,
            )
        if index == 0:  # no other node can start without the head
            _wait(nodes, root, deadline_s)
    _wait(nodes, root, deadline_s)
    record["ray"] = environment
    teardown.write_record(lab.directory, record)
    return environment


def environment_of(lab: Lab) -> dict[str, str]:
    """Return the variables by which a driver finds the lab's Ray cluster; empty if it has none."""
    found: dict[str, str] = teardown.read_record(lab.directory).get("ray", {})
    return found


def _argv(
    region: str, index: int, address: str, home: Path, head_ip: str, options: RayOptions
) -> list[str]:
    if index == 0:
        role = ["--head", f"--port={_PORT}", "--include-dashboard=false", "--no-monitor"]
    else:
        role = [f"--address={head_ip}:{_PORT}"]
    return [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *role),
        f"--node-ip-address={address}",
        f"--labels={label_flag(region)}",
        f"--num-cpus={options.cpus}",
        "--num-gpus=0",
        f"--temp-dir={home}",
        f"--object-store-memory={options.object_store_bytes}",
        "--include-log-monitor=false",
        "--disable-usage-stats",
        "--log-style=record",
        "--log-color=false",
    ]


def _wait(nodes: Mapping[str, subprocess.Popen[bytes]], root: Path, deadline_s: float) -> None:
    for index, (region, process) in enumerate(nodes.items()):
        while not (root / str(index) / "ray_current_cluster").is_file():
            if process.poll() is not None or time.monotonic() > deadline_s:
                lines = (root / f"{index}.log").read_text(errors="replace").splitlines()
                why = (
                    "ended while it started" if process.poll() is not None else "was not up in time"
                )
                raise ClusterStartError(
                    f"the Ray node of region '{region}' {why}:\n  "
                    + "\n  ".join(lines[-_TAIL_LINES:])
                )
            time.sleep(0.05)
