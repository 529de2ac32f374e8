"""The machine of the head: asked for once, found again by whoever looks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from geo_ray.autoscale.target import ROLE_LABEL
from geo_ray.clusters.record import ClusterRecord
from geo_ray.errors import RegionsSilentError
from geo_ray.providers.base import LaunchRequest, Machine, MachineProvider, MachineState
from geo_ray.providers.user_data import HEAD_ROLE


def head_request(record: ClusterRecord) -> LaunchRequest:
    """Return the launch of the head; the same record always gives the same request."""
    head = record.head
    mark = hashlib.sha256(record.name.encode()).hexdigest()[:10]
    began = int(record.began_unix_s * 1000)
    return LaunchRequest(
        f"head-{mark}-{began}-{head.number}",
        record.name,
        head.pool,
        1,
        {ROLE_LABEL: HEAD_ROLE},
        head.ends_unix_s,
    )


def find_head(machines: Sequence[Machine], record: ClusterRecord) -> Machine | None:
    """Return the head's machine as listed; None: it is not (yet), or is not the cluster's."""
    if record.head.standing is not None:
        return None
    wanted = head_request(record).request_id
    mine = [machine for machine in machines if machine.request_id == wanted]
    return min(mine, key=lambda machine: machine.state is MachineState.ENDED, default=None)


def listed_for_head(provider: MachineProvider, record: ClusterRecord) -> Sequence[Machine]:
    """Return the machines of all regions that answer, the head's own being one of these.

    Raises:
        GeoRayError: the head's does not.
    """
    try:
        return provider.list_machines(record.name)
    except RegionsSilentError as error:
        if record.head.standing is None and record.head.pool.region in error.silent:
            raise
        return error.found


def job_server_of(address: str, record: ClusterRecord) -> str:
    """Return the address of its job server, as the head itself reaches it."""
    host = "127.0.0.1" if record.head.standing is not None else address.rpartition(":")[0]
    return f"http://{host}:{record.head.dashboard_port}"


def is_alive(machine: Machine | None) -> bool:
    """Return whether a machine is there, or on its way."""
    return machine is not None and machine.state in (MachineState.PENDING, MachineState.RUNNING)


def head_address(machine: Machine | None, record: ClusterRecord) -> str | None:
    """Return host:port of Ray's head; None: its machine has no address yet."""
    if record.head.standing is not None:
        return record.head.standing.address
    if machine is None or machine.state is not MachineState.RUNNING or machine.address is None:
        return None
    return f"{machine.address}:{record.head.port}"
