"""The first-boot script of a machine, passed as user data.

The script contains no secret: it only names secrets, which the role of the machine may read. The
machine image contains geo_ray (recipe in docs/operations/cloud-accounts.md), so the boot takes
seconds. The same request always produces the same bytes, as idempotent launches require.
"""

from __future__ import annotations

import shlex
from typing import Final, Literal

from geo_ray.base.errors import ProviderRefusedError
from geo_ray.cloud.notices import TENCENT_METADATA
from geo_ray.cloud.provider import HEAD_ROLE, ROLE_LABEL, LaunchRequest
from geo_ray.experiment.provider import NodeJoin
from geo_ray.prices.tencent import METADATA_VARIABLE

_MACHINE_LABEL: Final = "geo-ray/machine"  # same value in ray_cluster/labels.py, a higher layer
HEAD_ENVIRONMENT: Final = {
    "RAY_gcs_storage": "rocksdb",
    # `ray job stop` and the end of the cluster leave a run the time to save
    "RAY_JOB_STOP_WAIT_TIME_S": "120",
}
_GCS_STATE: Final = "/var/lib/geo_ray/gcs"
_USER: Final = "geo-ray"  # Ray and all jobs run as this user
_TLS_FILES: Final = {
    "RAY_TLS_SERVER_CERT": "tls_certificate_secret",
    "RAY_TLS_SERVER_KEY": "tls_key_secret",
    "RAY_TLS_CA_CERT": "tls_ca_secret",
}


def needed_join(join: NodeJoin | None) -> NodeJoin:
    """Return how a node joins the cluster.

    Raises:
        ProviderRefusedError: it is not configured.
    """
    if join is None:
        raise ProviderRefusedError(
            "it is not configured how a node joins the cluster",
            fix="Set `join`, or create the cluster with `geo-ray up`.",
        )
    return join


def is_head(request: LaunchRequest) -> bool:
    """Return whether a request is for the machine of the Ray head."""
    return request.labels.get(ROLE_LABEL) == HEAD_ROLE


def boot_script(
    request: LaunchRequest, join: NodeJoin, cloud: Literal["aws", "tencent"], store: str
) -> str:
    """Return the script. The same request always gives the same script, for idempotent launches.

    Args:
        request: the launch; its labels and end time are used.
        join: how the node joins.
        cloud: cloud whose metadata service returns the machine's id.
        store: kind of the secret store.
    """
    labels = ",".join(f"{key}={value}" for key, value in sorted(request.labels.items()))
    secrets = {"RAY_AUTH_TOKEN_PATH": join.token_secret}
    secrets |= {
        name: held for name, key in _TLS_FILES.items() if (held := getattr(join, key)) is not None
    }
    if is_head(request) and join.head is not None and join.head.keys_secret is not None:
        secrets["AWS_SHARED_CREDENTIALS_FILE"] = join.head.keys_secret
    region = join.secrets_region or request.pool.region
    where = f"--store {shlex.quote(store)} --region {shlex.quote(region)}"
    lines = [
        "#!/bin/bash",
        "set -eu",
        "umask 077",
        *_end(request.ends_unix_s),
        f"python={shlex.quote(join.python)}",
        f'machine=$("$python" -m geo_ray.cloud.notices --cloud {cloud} --machine-id)',
        f"id -u {_USER} > /dev/null 2>&1 "
        f"|| useradd --system --create-home --shell /bin/bash {_USER}",
        "mkdir -p /run/geo_ray",
        ": > /run/geo_ray/environment",
    ]
    if cloud == "tencent":
        lines.append(f"export {METADATA_VARIABLE}={TENCENT_METADATA}")
    for name, secret in secrets.items():
        path = f"/run/geo_ray/{name.lower()}"
        lines += [
            f'"$python" -m geo_ray.cloud.secrets {where} {shlex.quote(secret)} > {path}',
            f"echo {name}={path} >> /run/geo_ray/environment",
        ]
    lines += [
        "echo RAY_AUTH_MODE=token >> /run/geo_ray/environment",
        f"echo RAY_USE_TLS={int(join.tls_key_secret is not None)} >> /run/geo_ray/environment",
        # Without these two settings, a WAN outage of a minute would remove the whole region.
        "echo RAY_health_check_timeout_ms=60000 >> /run/geo_ray/environment",
        "echo RAY_gcs_rpc_server_reconnect_timeout_s=600 >> /run/geo_ray/environment",
        "echo RAY_USAGE_STATS_ENABLED=0 >> /run/geo_ray/environment",
        f"chown -R {_USER}: /run/geo_ray",
    ]
    node = (
        f" --labels={shlex.quote(labels + ',') if labels else ''}"
        f'{_MACHINE_LABEL}="$machine" --disable-usage-stats'
    )
    if is_head(request):
        lines += _head(join, node)
    else:
        lines += _worker(join, node, cloud)
    return "\n".join(lines) + "\n"


def _head(join: NodeJoin, node: str) -> list[str]:
    """Services of the head: Ray with persistent state, and the supervisor of the autoscaler."""
    head = join.head
    if head is None:
        raise ProviderRefusedError(
            "the services of the head are not configured",
            fix="Create the cluster with `geo-ray up`.",
        )
    lines = [
        f"echo {name}={value} >> /run/geo_ray/environment"
        for name, value in {**HEAD_ENVIRONMENT, "RAY_gcs_storage_path": _GCS_STATE}.items()
    ]
    return [
        f"mkdir -p {_GCS_STATE}",
        f"chown -R {_USER}: /var/lib/geo_ray",
        *lines,
        'echo PATH="$(dirname "$python"):$PATH" >> /run/geo_ray/environment',
        _unit(
            "node",
            f'"$python" -m ray.scripts.scripts start --block --head --port={head.port}'
            f" --num-cpus=0 --num-gpus=0 --no-monitor --dashboard-host=127.0.0.1"
            f" --dashboard-port={head.dashboard_port}{node}",
        ),
        _unit("cluster", f'"$python" -m geo_ray.cloud.cluster.serve {shlex.quote(head.state)}'),
    ]


def _worker(join: NodeJoin, node: str, cloud: str) -> list[str]:
    if join.address is None:
        raise ProviderRefusedError(
            "the head that nodes join is not configured",
            fix="Set `join.address`, or create the cluster with `geo-ray up`.",
        )
    address = shlex.quote(join.address)
    return [
        _unit("node", f'"$python" -m ray.scripts.scripts start --block --address={address}{node}'),
        _unit(
            "agent",
            f'"$python" -m geo_ray.cloud.agent --cloud {cloud} --machine "$machine"'
            f" --address {address}",
        ),
    ]


def _end(ends_unix_s: float | None) -> list[str]:
    """A timer that ends the machine without any other machine."""
    if ends_unix_s is None:
        return []
    return [
        f"minutes=$(( ({int(ends_unix_s)} - $(date +%s)) / 60 ))",
        'shutdown -P "+$(( minutes > 0 ? minutes : 0 ))"',
    ]


def _unit(name: str, command: str) -> str:
    return (
        f"systemd-run --unit=geo-ray-{name} --uid={_USER} --property=Restart=always"
        f" --property=RestartSec=5 --property=NoNewPrivileges=yes"
        f" --property=EnvironmentFile=/run/geo_ray/environment {command}"
    )
