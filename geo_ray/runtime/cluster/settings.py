"""Every environment variable of Ray that geo_ray relies on, set explicitly in one place."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from geo_ray.runtime.cluster import ray_private

AUTH_MODE = "RAY_AUTH_MODE"
AUTH_TOKEN = "RAY_AUTH_TOKEN"  # noqa: S105 - names of variables, not secrets
AUTH_TOKEN_PATH = "RAY_AUTH_TOKEN_PATH"  # noqa: S105
_JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"

_LOCAL_NODE = {
    # By default a raylet whose agent is not up after 30 s ends: a busy machine starts no cluster.
    # `cluster.start_timeout_s` limits the start; a dead agent ends its raylet at once.
    "RAY_agent_register_timeout_ms": "600000",
    "RAY_USAGE_STATS_ENABLED": "0",
    # A raylet that does not answer is dead after 5 checks, one a second, each at most 10 s long.
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "10000",
    "RAY_health_check_failure_threshold": "5",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "60",
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # nobody waits for a cluster that goes away
    "DASHBOARD_METRIC_PORT": "0",  # otherwise 44227, which two clusters would fight over
}

_WORKER = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # Large tensors in large pages, where the system leaves it to programs: fresh ones cost a third.
    "THP_MEM_ALLOC_ENABLE": "1",
    # Do not hide the GPUs from processes that reserve none; Ray warns unless this is said.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}

_QUIET_DRIVER = {
    "RAY_DEDUP_LOGS": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # A failed call that nobody waits for is printed with its traceback otherwise; that its actor is
    # lost is heard when that is polled.
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",
}


def local_node_environment(token_path: Path) -> dict[str, str]:
    """The whole environment of a node of the local cluster.

    Variables of Ray that the user has set for other clusters are left out.

    Args:
        token_path: file that holds the cluster's token.
    """
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    # What actors need they inherit. With an environment of their own they could not use the idle
    # workers that Ray starts for every driver, and would wait for new ones beside those.
    return inherited | _LOCAL_NODE | _WORKER | token_environment(token_path)


def token_environment(token_path: Path) -> dict[str, str]:
    """What a process needs to talk to a cluster with the token in ``token_path``."""
    return {AUTH_MODE: "token", AUTH_TOKEN_PATH: str(token_path)}


def existing_driver_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The authentication that a driver on an existing cluster uses, made explicit.

    Left alone, Ray may write a token file into the home directory and switch its mode.

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
    """The variables of every actor of a run.

    Args:
        extra: variables to add; they win over the defaults.
        environ: the driver's environment; default: the process's. Variables that the submitted
            job already sets are left out, because Ray refuses two values for one name.
    """
    job = json.loads((os.environ if environ is None else environ).get(_JOB_CONFIG) or "{}")
    taken = (job.get("runtime_env") or {}).get("env_vars") or {}
    return {k: v for k, v in (_WORKER | dict(extra or {})).items() if k not in taken}


@contextmanager
def driver_environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Set the driver's variables, and put back what was there afterwards.

    Args:
        changes: variables beside those that keep Ray quiet.
    """
    wanted = _QUIET_DRIVER | dict(changes)
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    ray_private.reread_authentication()
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        ray_private.reread_authentication()
