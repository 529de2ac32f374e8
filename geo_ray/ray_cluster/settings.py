"""Environment variables, command line and TLS of Ray nodes, set explicitly in one place."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from geo_ray.ray_cluster import ray_internals
from geo_ray.transport.security.certs import Authority

AUTH_MODE = "RAY_AUTH_MODE"
AUTH_TOKEN = "RAY_AUTH_TOKEN"  # noqa: S105 - names of variables, not secrets
AUTH_TOKEN_PATH = "RAY_AUTH_TOKEN_PATH"  # noqa: S105
_JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"

# No usage reports to the libraries' authors. Ray Tune imports MLflow where it is installed.
_NOTHING_REPORTED = {"RAY_USAGE_STATS_ENABLED": "0", "MLFLOW_DISABLE_TELEMETRY": "true"}

_LOCAL_NODE = {
    # By default a raylet ends if its agent is not up after 30 s: a cluster could not start on a
    # busy machine. `cluster.start_timeout_s` limits the start; a dead agent ends its raylet at
    # once.
    "RAY_agent_register_timeout_ms": "600000",
    **_NOTHING_REPORTED,
    # An unresponsive raylet is dead after 5 checks, one a second, each at most 10 s long.
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "10000",
    "RAY_health_check_failure_threshold": "5",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "60",
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # an ending cluster is not waited for
    "DASHBOARD_METRIC_PORT": "0",  # the default, 44227, would conflict between clusters
}

_WORKER = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # Large tensors in huge pages, where the system allows it: allocating them costs a third.
    "THP_MEM_ALLOC_ENABLE": "1",
    # Do not hide the GPUs from processes that reserve none; avoids a warning of Ray.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}

_QUIET_DRIVER = {
    "RAY_DEDUP_LOGS": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    **_NOTHING_REPORTED,
    # Otherwise a failed call whose result is not awaited is printed with its traceback; lost actors
    # are detected by polling.
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",
}


def local_node_environment(token_path: Path) -> dict[str, str]:
    """Return the whole environment of a node of the local cluster.

    Ray's variables that the user has set for other clusters are omitted.

    Args:
        token_path: file with the cluster's token.
    """
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    # Actors inherit their environment. With a separate one they could not use the idle workers that
    # Ray starts for every driver, and would wait for new ones.
    return inherited | _LOCAL_NODE | _WORKER | token_environment(token_path)


def token_environment(token_path: Path) -> dict[str, str]:
    """Return the environment for connecting to a cluster with the token in ``token_path``."""
    return {AUTH_MODE: "token", AUTH_TOKEN_PATH: str(token_path)}


def existing_driver_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the explicit authentication settings of a driver on an existing cluster.

    By default, Ray may write a token file into the home directory and switch its mode.

    Args:
        environ: the process's environment.
    """
    if environ.get(AUTH_MODE):
        return {}
    has_token = (
        environ.get(AUTH_TOKEN)
        or environ.get(AUTH_TOKEN_PATH)
        or (Path.home() / ".ray" / "auth_token").is_file()
    )
    return {AUTH_MODE: "token" if has_token else "disabled"}


def worker_environment(
    extra: Mapping[str, str] | None = None, environ: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the environment variables of every actor of a run.

    Args:
        extra: variables to add; they override the defaults.
        environ: the driver's environment; default: the process's. Variables that the submitted job
            sets are omitted, because Ray refuses two values for one name.
    """
    job = json.loads((os.environ if environ is None else environ).get(_JOB_CONFIG) or "{}")
    taken = (job.get("runtime_env") or {}).get("env_vars") or {}
    return {k: v for k, v in (_WORKER | dict(extra or {})).items() if k not in taken}


@contextmanager
def driver_environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Set the driver's variables in the block, and restore the previous ones.

    Args:
        changes: variables besides those that keep Ray quiet.
    """
    wanted = _QUIET_DRIVER | dict(changes)
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    ray_internals.reread_authentication()
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        ray_internals.reread_authentication()


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
        flags: flags of this node: the head's, or the address to join, labels and resources.
        ip: its loopback address.
        home: its directory, so that two nodes may start at the same time.
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


_DAYS: Final = 30.0


def tls_environment(
    folder: Path, addresses: Sequence[str], authority: Authority | None = None
) -> dict[str, str]:
    """Create a certificate, and return the variables that Ray's processes need to use it.

    Args:
        folder: directory for the certificate and its key, readable by the owner only.
        addresses: addresses of the nodes that use it; those of this machine are added.
        authority: issuing CA; None: a temporary one.
    """
    authority = authority or Authority.create("geo_ray cluster", _DAYS)
    hosts = tuple(dict.fromkeys((*addresses, "127.0.0.1", "localhost")))
    made = authority.issue("node", _DAYS / 2, hosts)
    found = {"RAY_USE_TLS": "1"}
    for name, content in (
        ("RAY_TLS_CA_CERT", made.ca_pem),
        ("RAY_TLS_SERVER_CERT", made.cert_pem),
        ("RAY_TLS_SERVER_KEY", made.key_pem),
    ):
        path = folder / f"{name.lower()}.pem"
        with os.fdopen(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "wb") as file:
            file.write(content)
        found[name] = str(path)
    return found
