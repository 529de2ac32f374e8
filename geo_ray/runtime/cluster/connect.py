"""Connects the driver to the cluster of a run, made for it or already there."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import ray
from ray.exceptions import AuthenticationError

from geo_ray.config.cluster import ClusterConfig, LocalClusterConfig
from geo_ray.errors import ClusterError, ClusterStartError, RayUnreachableError
from geo_ray.runtime.cluster import ray_private
from geo_ray.runtime.cluster.address import find_address, wait_for_ray
from geo_ray.runtime.cluster.labels import REGION_LABEL
from geo_ray.runtime.cluster.local import LocalCluster
from geo_ray.runtime.cluster.logs import RAY_MESSAGES
from geo_ray.runtime.cluster.settings import (
    driver_environment,
    existing_driver_environment,
    worker_environment,
)

_REGISTER_S = 30.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ConnectedCluster:
    """A cluster that this process is connected to.

    Attributes:
        address: host:port of the head.
        namespace: Ray namespace of the run's actors.
        regions: the regions the run wants; `preflight` tells whether they exist.
        dashboard: host:port of the dashboard, or None.
        local: the cluster's processes if it was made for this run, else None.
    """

    address: str
    namespace: str
    regions: tuple[str, ...]
    dashboard: str | None
    local: LocalCluster | None


@contextmanager
def connect(
    config: ClusterConfig,
    regions: Sequence[str],
    *,
    namespace: str,
    cpus_per_region: float = 1.0,
    env_vars: Mapping[str, str] | None = None,
) -> Iterator[ConnectedCluster]:
    """Start the cluster if it is a local one, connect to it, and undo both at the end.

    A process that is connected already, such as a notebook or a task of Ray's, stays so: an
    ``existing`` cluster is then the one it is connected to.

    Args:
        config: the ``cluster`` section.
        regions: names of the run's regions.
        namespace: Ray namespace, the run's name.
        cpus_per_region: what the run asks for in its largest region; the size of a local region.
        env_vars: more environment variables for the run's actors.

    Raises:
        ClusterStartError: the local cluster does not come up.
        PortInUseError: the local cluster's port is taken.
        RayUnreachableError: no Ray answers at the address within ``connect_timeout_s``, or it
            refuses this process.
        ClusterError: this process is already connected to another cluster.
    """
    if ray.is_initialized():
        yield _connected_already(config, regions)
        return
    with ExitStack() as stack:
        local: LocalCluster | None = None
        if isinstance(config, LocalClusterConfig):
            local = stack.enter_context(LocalCluster(config, regions, cpus_per_region))
            address, changes = local.address, local.environment
        else:
            address = find_address(config.address)
            wait_for_ray(address, config.connect_timeout_s)
            changes = existing_driver_environment(os.environ)
        stack.enter_context(driver_environment(changes))
        kept = None if local is None else local.root / RAY_MESSAGES
        stack.enter_context(ray_private.messages_to(lambda text: _note_message(text, kept)))
        stack.callback(ray.shutdown)
        ours = dict(env_vars or {}) if local is not None else worker_environment(env_vars)
        _init(address, namespace, ours)
        if local is not None:
            _wait_for_regions(regions)
        yield ConnectedCluster(
            address, namespace, tuple(regions), ray_private.dashboard_address(), local
        )


def _connected_already(config: ClusterConfig, regions: Sequence[str]) -> ConnectedCluster:
    """The cluster that this process is connected to, if that is the one that is wanted."""
    context = ray.get_runtime_context()
    address = context.gcs_address
    if isinstance(config, LocalClusterConfig):
        raise ClusterError(
            f"this process is already connected to the Ray cluster at {address}, and "
            "`cluster.kind: local` starts another one",
            fix="Set cluster={'kind': 'existing'} to run on that cluster, or call ray.shutdown() "
            "first.",
        )
    if config.address != "auto" and config.address != address:
        raise ClusterError(
            f"this process is already connected to the Ray cluster at {address}, not to "
            f"{config.address}",
            fix="Set cluster.address to auto to run on that cluster, or call ray.shutdown() first.",
        )
    dashboard = ray_private.dashboard_address()
    return ConnectedCluster(address, context.namespace, tuple(regions), dashboard, None)


def _init(address: str, namespace: str, env_vars: Mapping[str, str]) -> None:
    try:
        ray.init(
            address=address,
            namespace=namespace,
            runtime_env={"env_vars": dict(env_vars)} if env_vars else None,
            log_to_driver=False,
            logging_level=logging.WARNING,
        )
    except (AuthenticationError, ConnectionError, RuntimeError, ValueError) as error:
        why = "the token is missing or wrong" if _is_about_token(error) else str(error)
        raise RayUnreachableError(
            f"Ray at {address} refuses this process: {why}",
            fix="Run on a machine of the cluster or through `ray job submit`, with the cluster's "
            "Ray and Python versions and its token (RAY_AUTH_MODE, RAY_AUTH_TOKEN_PATH).",
        ) from error


def _note_message(text: str, kept: Path | None) -> None:
    """Keep a message of Ray's from the terminal, which shows the run.

    Args:
        text: often many lines: the end of a log.
        kept: a file of the local cluster, which knows of its nodes by itself; None: the log has
            the first line.
    """
    if kept is None:
        _log.warning("Ray says: %s", text.strip().partition("\n")[0])
        return
    with suppress(OSError), kept.open("a", encoding="utf-8") as file:
        file.write(text.rstrip() + "\n")


def _is_about_token(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, AuthenticationError) or "AuthenticationError" in str(error):
            return True
        error = error.__cause__
    return False


def _wait_for_regions(regions: Sequence[str]) -> None:
    deadline = time.monotonic() + _REGISTER_S
    while True:
        seen = {node["Labels"].get(REGION_LABEL) for node in ray_private.nodes() if node["Alive"]}
        missing = [region for region in regions if region not in seen]
        if not missing:
            return
        if time.monotonic() > deadline:
            raise ClusterStartError(
                f"no node of region {', '.join(missing)} registered with the local head",
                fix="Start again when the machine is less busy, or with fewer regions.",
            )
        time.sleep(0.05)
