"""Connects to the Ray cluster of a run, existing or local, and watches its head.

``ray.init`` tries a dead address for minutes, so the address is checked first. Ray ends all
processes of a node that cannot reach the head for some time: `HeadWatch` decides to save before
that; a head that returns in time has no effect. `keep_logs` copies the actors' output of a failed
run.
"""

from __future__ import annotations

import logging
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Final

import ray
from ray.exceptions import AuthenticationError

from geo_ray.base.errors import ClusterError, ClusterStartError, HeadLostError, RayUnreachableError
from geo_ray.experiment.cluster import ClusterConfig, LocalClusterConfig
from geo_ray.ray_cluster import ray_internals
from geo_ray.ray_cluster.labels import REGION_LABEL
from geo_ray.ray_cluster.local_cluster import LocalCluster
from geo_ray.ray_cluster.settings import (
    driver_environment,
    existing_driver_environment,
    worker_environment,
)

# The first message of an HTTP/2 client, and so of gRPC: the preface and empty settings.
_HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
_SETTINGS_FRAME = 4
_FRAME_HEADER_BYTES = 9


def find_address(configured: str) -> str:
    """Return host:port of the head.

    Args:
        configured: ``auto`` or host:port. ``auto`` is the job's own cluster, else RAY_ADDRESS, else
            the cluster that ``ray start`` has started on this machine.

    Raises:
        RayUnreachableError: ``auto`` finds none, or the address has another form.
    """
    address = configured
    if configured == "auto":
        address = os.environ.get("RAY_ADDRESS", "auto")
        address = _started_here() if address in ("", "auto", "local") else address
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "/" in host:
        raise RayUnreachableError(
            f"'{address}' is not the address of a Ray head",
            fix="Give the address as host:port of the head (default port 6379); "
            "ray:// and http:// addresses are for other clients.",
        )
    return address


def wait_for_ray(address: str, longest_s: float) -> None:
    """Wait until a gRPC server, such as a Ray head, answers at ``address``.

    Args:
        address: host:port.
        longest_s: time limit, excluding name resolution.

    Raises:
        RayUnreachableError: none answers.
    """
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + longest_s
    while True:
        cause = _probe(host.strip("[]"), int(port), min(5.0, longest_s))
        if cause is None:
            return
        if time.monotonic() + 0.5 > deadline:
            raise RayUnreachableError(f"no Ray head answers at {address}: {cause}")
        time.sleep(0.5)


def _started_here() -> str:
    root = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir())
    for path in (root / "ray" / "ray_current_cluster", Path("/tmp/ray/ray_current_cluster")):  # noqa: S108
        if path.is_file():
            return path.read_text().strip()
    raise RayUnreachableError(
        "the address is 'auto', but there is no Ray cluster: RAY_ADDRESS is not set and none "
        "was started on this machine",
        fix="Start one, or give the address of one as host:port: `cluster.address` of a "
        "configuration, `--address` of a command. A run can do without: `cluster.kind: local`.",
    )


def _probe(host: str, port: int, timeout_s: float) -> str | None:
    """Return why no gRPC server answers, or None if one does."""
    try:
        with socket.create_connection((host, port), timeout=timeout_s) as connection:
            if os.environ.get("RAY_USE_TLS", "0") in ("1", "true", "True"):
                return None  # an encrypted port sends nothing before the handshake
            connection.sendall(_HTTP2_HELLO)
            header = b""
            while len(header) < _FRAME_HEADER_BYTES:
                read = connection.recv(_FRAME_HEADER_BYTES - len(header))
                if not read:
                    return "the port is open but the server closes the connection"
                header += read
    except TimeoutError:
        return "no answer in time"
    except OSError as error:
        return error.strerror or str(error)
    return None if header[3] == _SETTINGS_FRAME else "the port is open but it is not Ray's"


RAY_MESSAGES = "ray-messages.out"
"""File of the local cluster with Ray's messages about its nodes."""

_MAX_FILES = 40
_MAX_BYTES = 1_000_000


def keep_logs(cluster_root: Path, target: Path) -> list[Path]:
    """Copy the ends of all actors' nonempty output below ``cluster_root``, and Ray's messages.

    Args:
        cluster_root: directory of the local cluster.
        target: directory to create and fill.

    Returns:
        The copies; empty if there is no output or it cannot be copied.
    """
    messages = cluster_root / RAY_MESSAGES
    found = [messages] if messages.exists() else []
    found += [
        path
        for pattern in ("worker-*.out", "worker-*.err")
        for path in sorted(cluster_root.glob(f"*/session_2*/logs/{pattern}"))
        if _has_output(path)
    ]
    copies: list[Path] = []
    for path in found[:_MAX_FILES]:
        try:
            target.mkdir(exist_ok=True)
            copy = target / path.name
            copy.write_bytes(path.read_bytes()[-_MAX_BYTES:])
        except OSError:  # the run's own error is more important than its logs
            break
        copies.append(copy)
    return copies


def _has_output(path: Path) -> bool:
    """Return whether a file has more than the lines that Ray begins every file with."""
    with path.open(errors="replace") as file:
        return any(line.strip() and not line.startswith(":") for line in file)


_VARIABLE: Final = "RAY_gcs_rpc_server_reconnect_timeout_s"
_RAYS_OWN_S: Final = 60.0
_TOLD_AFTER_S: Final = 4.0
_STOPS_AT: Final = 0.5
_POLL_EVERY_S: Final = 2.0
_ANSWERS_WITHIN_S: Final = 2.0
_log = logging.getLogger(__name__)


class HeadState(Enum):
    """Observed state of the head."""

    THERE = "there"
    UNRESPONSIVE = "unresponsive"
    """It may come back."""
    GONE = "gone"
    """The run must be saved now."""


@dataclass(slots=True)
class HeadWatch:
    """Evaluates periodic checks of the head. Pure.

    Attributes:
        patience_s: time after which Ray ends its processes.
    """

    patience_s: float
    _answered_s: float | None = None

    @property
    def stops_after_s(self) -> float:
        """Seconds without an answer after which the run is saved and ended."""
        return _STOPS_AT * self.patience_s

    def see(self, now_s: float, *, answers: bool) -> HeadState:
        """Evaluate a check.

        Args:
            now_s: monotonic time.
            answers: whether the head answers now.
        """
        if answers or self._answered_s is None:
            self._answered_s = now_s
            return HeadState.THERE
        unresponsive_s = now_s - self._answered_s
        if unresponsive_s >= self.stops_after_s:
            return HeadState.GONE
        return HeadState.UNRESPONSIVE if unresponsive_s >= _TOLD_AFTER_S else HeadState.THERE


def patience_s(environ: Mapping[str, str] | None = None) -> float:
    """Return how long Ray waits for a head, as configured on this node."""
    text = (os.environ if environ is None else environ).get(_VARIABLE, "")
    try:
        return max(1.0, float(text))
    except ValueError:
        return _RAYS_OWN_S


@contextmanager
def watched_head(address: str, lost: Callable[[HeadLostError], None]) -> Iterator[None]:
    """Look at the head of a run's cluster in a thread, as long as the run lasts.

    Args:
        address: host:port of the head.
        lost: told once, by that thread, that the run has to be saved and ended now.
    """
    over = threading.Event()

    def keep_watch() -> None:
        watch, before = HeadWatch(patience_s()), HeadState.THERE
        while before is not HeadState.GONE and not over.wait(_POLL_EVERY_S):
            state = watch.see(time.monotonic(), answers=answers(address))
            if state is before or over.is_set():
                continue
            before = state
            if state is HeadState.THERE:
                _log.warning("the Ray head at %s answers again", address)
            elif state is HeadState.UNRESPONSIVE:
                _log.warning(
                    "the Ray head at %s does not answer; training continues, and is saved and "
                    "ended if it is not back within %.0f s",
                    address,
                    watch.stops_after_s,
                )
            else:
                unresponsive_s = f"{watch.stops_after_s:.0f} s"
                lost(
                    HeadLostError(
                        f"the Ray head at {address} has not answered for {unresponsive_s}"
                    )
                )

    thread = threading.Thread(target=keep_watch, name="head", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def answers(address: str) -> bool:
    """Whether a Ray head answers there just now; takes 2 s at most."""
    try:
        wait_for_ray(address, _ANSWERS_WITHIN_S)
    except RayUnreachableError:
        return False
    return True


def head_answers() -> bool:
    """Return whether the head of the cluster that this process is connected to answers.

    After a failure it is not asked again for `_UNANSWERED_S`: shutting down a run asks several
    times, and Ray soon kills this process.
    """
    global _unanswered_until_s
    if time.monotonic() < _unanswered_until_s:
        return False
    if answers(ray.get_runtime_context().gcs_address):
        return True
    _unanswered_until_s = time.monotonic() + _UNANSWERED_S
    return False


_UNANSWERED_S: Final = 10.0
_unanswered_until_s = 0.0


_REGISTER_S = 30.0


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

    A process that is already connected, such as a notebook or a Ray task, stays connected: an
    ``existing`` cluster is then that one.

    Args:
        config: the ``cluster`` section.
        regions: names of the run's regions.
        namespace: Ray namespace, the run's name.
        cpus_per_region: resources of the run's largest region; the size of a local region.
        env_vars: additional environment variables for the run's actors.

    Raises:
        ClusterStartError: the local cluster does not start.
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
        copies = None if local is None else local.root / RAY_MESSAGES
        stack.enter_context(ray_internals.messages_to(partial(_note_message, copies)))
        stack.callback(ray.shutdown)
        ours = dict(env_vars or {}) if local is not None else worker_environment(env_vars)
        _init(address, namespace, ours)
        if local is not None:
            _wait_for_regions(regions)
        yield ConnectedCluster(
            address, namespace, tuple(regions), ray_internals.dashboard_address(), local
        )


def _connected_already(config: ClusterConfig, regions: Sequence[str]) -> ConnectedCluster:
    """Return the cluster that this process is connected to, if it is the configured one."""
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
    dashboard = ray_internals.dashboard_address()
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


def _note_message(copies: Path | None, text: str) -> None:
    """Write a message of Ray to a file instead of the terminal, which shows the run.

    Args:
        copies: a file of the local cluster, whose nodes are supervised; None: log the first line.
        text: often many lines: the end of a log.
    """
    if copies is None:
        _log.warning("Ray says: %s", text.strip().partition("\n")[0])
        return
    with suppress(OSError), copies.open("a", encoding="utf-8") as file:
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
        seen = {node["Labels"].get(REGION_LABEL) for node in ray_internals.nodes() if node["Alive"]}
        missing = [region for region in regions if region not in seen]
        if not missing:
            return
        if time.monotonic() > deadline:
            raise ClusterStartError(
                f"no node of region {', '.join(missing)} registered with the local head",
                fix="Start again when the machine is less busy, or use fewer regions.",
            )
        time.sleep(0.05)
