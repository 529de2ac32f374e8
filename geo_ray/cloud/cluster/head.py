"""The machine of the head: its launch request, address and job server."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Final

from geo_ray.base.errors import RegionsUnreachableError
from geo_ray.cloud.autoscaler.target import ROLE_LABEL
from geo_ray.cloud.cluster.state import ClusterRecord
from geo_ray.cloud.provider import HEAD_ROLE, LaunchRequest, Machine, MachineProvider, MachineState
from geo_ray.experiment.provider import ProviderConfig

_HOUR_S: Final = 3600.0


def head_request(record: ClusterRecord) -> LaunchRequest:
    """Return the launch request of the head; the same record always gives the same request."""
    head = record.head
    own = f"{record.id}-{record.made}"
    if not record.id:  # of an earlier release, whose head may still run
        mark = hashlib.sha256(record.name.encode()).hexdigest()[:10]
        own = f"{mark}-{int(record.began_unix_s * 1000)}"
    return LaunchRequest(
        f"head-{own}-{head.number}",
        record.name,
        head.pool,
        1,
        {ROLE_LABEL: HEAD_ROLE},
        head.ends_unix_s,
        record.id,
    )


def head_ends_unix_s(provider: ProviderConfig, clouds: Sequence[str], now_unix_s: float) -> float:
    """Return when a head that is launched now ends by itself.

    Args:
        provider: provider configuration, with the lifetime.
        clouds: clouds of the cluster.
        now_unix_s: current time.
    """
    life_s = provider.head.life_h * _HOUR_S
    if tuple(clouds) == ("local",):
        life_s = min(life_s, provider.local.longest_life_s)
    return math.ceil(now_unix_s + life_s) * 1.0


def find_head(machines: Sequence[Machine], record: ClusterRecord) -> Machine | None:
    """Return the listed machine of the head.

    None: it is not listed, or belongs to another cluster.
    """
    if record.head.existing is not None:
        return None
    wanted = head_request(record).request_id
    mine = [machine for machine in machines if machine.request_id == wanted]
    return min(mine, key=lambda machine: machine.state is MachineState.ENDED, default=None)


def listed_for_head(provider: MachineProvider, record: ClusterRecord) -> Sequence[Machine]:
    """Return the listed machines of all reachable regions; the head's region must answer.

    Raises:
        GeoRayError: the region of the head does not answer.
    """
    try:
        return provider.list_machines(record.name)
    except RegionsUnreachableError as error:
        if record.head.existing is None and record.head.pool.region in error.unreachable:
            raise
        return error.found


def job_server_of(address: str, record: ClusterRecord) -> str:
    """Return the address of the job server from the head's point of view.

    In a cloud it listens on the loopback interface only; see `tunnel_command`.
    """
    host = address.rpartition(":")[0] if record.head.cloud == "local" else "127.0.0.1"
    return f"http://{host}:{record.head.dashboard_port}"


def tunnel_command(address: str, record: ClusterRecord, machine: Machine | None) -> str | None:
    """Return the command that forwards the head's job server to this computer; None: not needed.

    Args:
        address: address of the Ray head, host:port.
        record: the cluster.
        machine: machine of the head, as listed.
    """
    head, port = record.head, record.head.dashboard_port
    if head.cloud == "local":
        return None
    name = None if machine is None else machine.id
    name = name if head.existing is None else head.existing.machine
    if head.cloud == "aws" and name is not None:
        return (
            f"aws ssm start-session --region {head.pool.region} --target {name} "
            "--document-name AWS-StartPortForwardingSession "
            f"--parameters portNumber={port},localPortNumber={port}"
        )
    return f"ssh -N -L {port}:127.0.0.1:{port} {address.rpartition(':')[0]}"


def is_alive(machine: Machine | None) -> bool:
    """Return whether a machine runs or starts."""
    return machine is not None and machine.state in (MachineState.PENDING, MachineState.RUNNING)


def head_address(machine: Machine | None, record: ClusterRecord) -> str | None:
    """Return the address of the Ray head, host:port; None: its machine has no address yet."""
    if record.head.existing is not None:
        return record.head.existing.address
    if machine is None or machine.state is not MachineState.RUNNING or machine.address is None:
        return None
    return f"{machine.address}:{record.head.port}"
