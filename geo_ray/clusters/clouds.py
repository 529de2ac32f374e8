"""The clouds of a cluster, and the stores of its secrets, as its record names them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from geo_ray.clusters.own_machines import OwnMachines
from geo_ray.clusters.record import ClusterRecord
from geo_ray.clusters.state import ClusterState
from geo_ray.errors import ConfigError
from geo_ray.providers.aws.config import AwsProviderConfig
from geo_ray.providers.aws.provider import AwsProvider
from geo_ray.providers.base import MachineProvider
from geo_ray.providers.by_region import RegionProviders
from geo_ray.providers.config import ProviderConfig
from geo_ray.providers.secrets.base import SecretStore
from geo_ray.providers.secrets.local import FileSecrets
from geo_ray.providers.secrets.open import open_secrets
from geo_ray.providers.tencent.config import TencentProviderConfig
from geo_ray.providers.tencent.provider import TencentProvider
from geo_ray.providers.user_data import HeadBoot, NodeJoin

LOCAL: Final = "local"
_SECRETS: Final = "secrets"


def open_clouds(
    record: ClusterRecord,
    state: ClusterState,
    address: str | None = None,
    longest_s: float | None = None,
) -> MachineProvider:
    """Return the clouds of a cluster as one provider, which knows only this cluster's machines.

    Args:
        record: what it is.
        state: where it is written down.
        address: host:port of its head; None: only the head can be launched.
        longest_s: longest wait for each region; None: until its cloud gives up.

    Raises:
        CloudError: there are no credentials.
    """
    return OwnMachines(open_accounts(record, state, address, longest_s), record.id)


def open_accounts(
    record: ClusterRecord,
    state: ClusterState,
    address: str | None = None,
    longest_s: float | None = None,
) -> MachineProvider:
    """Return the same clouds with all that bears the cluster's name, whoever made it.

    Arguments and errors are those of `open_clouds`.
    """
    if record.clouds == (LOCAL,):
        return _local(record, state)
    found: dict[str, MachineProvider] = {}
    for cloud in record.clouds:
        places = places_of(record.provider, cloud)
        account = _cloud(record, state, cloud, address)
        found |= {region: account.of_region(region) for region in places}
    return RegionProviders(found, longest_s)


def places_of(provider: ProviderConfig, cloud: str) -> Sequence[str]:
    """Return the regions of a cloud that a configuration describes.

    Raises:
        ConfigError: it does not.
    """
    section: AwsProviderConfig | TencentProviderConfig | None
    section = {"aws": provider.aws, "tencent": provider.tencent}.get(cloud)
    if section is None:
        raise ConfigError(
            f"plan.regions has machines of {cloud}, and nothing is said of an account there",
            fix=f"Add `provider.{cloud}` with its `places` (docs/providers.md), or rehearse it on "
            "this computer with `--provider local`.",
        )
    return list(section.places)


def secrets_of(record: ClusterRecord, state: ClusterState) -> list[SecretStore]:
    """Return the stores that keep the cluster's own token, one for each cloud.

    None where the head was there before: so was its token.
    """
    found: list[SecretStore] = []
    if record.head.standing is not None:
        return found
    for cloud in record.clouds:
        provider = record.provider
        if cloud == LOCAL:
            found.append(FileSecrets(state.path / _SECRETS))
            continue
        region = _secrets_region(record, cloud)
        if cloud == "tencent":
            endpoint = provider.tencent.endpoint if provider.tencent else None
            found.append(open_secrets("tencent-ssm", region, endpoint))
            continue
        kind = provider.aws.secret_store if provider.aws else "aws-secretsmanager"
        service = kind.removeprefix("aws-")
        endpoint = provider.aws.endpoints.get(service) if provider.aws else None
        found.append(open_secrets(kind, region, endpoint))
    return found


def key_of_own_role(record: ClusterRecord) -> str | None:
    """Return the key that would give the head a role of its own; None: it has one, or needs none.

    A head may rent machines, and write what is written down of the cluster: nodes need neither.
    """
    region, aws, tencent = record.head.pool.region, record.provider.aws, record.provider.tencent
    pairs: dict[str, tuple[str | None, str | None]] = {}
    if record.head.standing is not None:
        return None
    if record.head.cloud == "aws" and aws is not None:
        key = f"provider.aws.places.{region}.head_profile"
        pairs = {at: (one.instance_profile, one.head_profile) for at, one in aws.places.items()}
    elif record.head.cloud == "tencent" and tencent is not None:
        key = f"provider.tencent.places.{region}.head_role"
        pairs = {at: (one.role, one.head_role) for at, one in tencent.places.items()}
    if region not in pairs:
        return None
    nodes, own = pairs[region]
    heads = own or nodes
    shares = heads is not None and any(heads == each for each, _ in pairs.values())
    return key if shares else None


def token_path(record: ClusterRecord, state: ClusterState) -> Path:
    """Return the file of a local cluster's token."""
    return state.path / _SECRETS / record.token_secret


def secret_command(record: ClusterRecord) -> str:
    """Return what prints the token of a cluster in a cloud."""
    cloud = record.head.cloud
    kind = "tencent-ssm"
    if cloud == "aws":
        kind = record.provider.aws.secret_store if record.provider.aws else "aws-secretsmanager"
    return (
        f"python -m geo_ray.providers.secrets --store {kind} "
        f"--region {_secrets_region(record, cloud)} {record.token_secret}"
    )


def _local(record: ClusterRecord, state: ClusterState) -> MachineProvider:
    from geo_ray.clusters.local_program import LocalClusterProgram
    from geo_ray.providers.local.provider import LocalProvider

    cloud = state.path / "cloud"
    token = token_path(record, state)
    return LocalProvider(cloud, LocalClusterProgram(cloud, state.path, record, token))


def _cloud(
    record: ClusterRecord, state: ClusterState, cloud: str, address: str | None
) -> AwsProvider | TencentProvider:
    provider, head = record.provider, record.head
    if head.standing is not None:
        return _as_configured(provider, cloud)
    boot = HeadBoot(
        port=head.port,
        dashboard_port=head.dashboard_port,
        state=state.uri,
        keys_secret=provider.state_keys_secret,
    )
    tls = provider.tls
    join = NodeJoin(
        address=address,
        head=boot,
        token_secret=record.token_secret,
        tls_certificate_secret=tls.certificate if tls else None,
        tls_key_secret=tls.key if tls else None,
        tls_ca_secret=tls.ca if tls else None,
        secrets_region=_secrets_region(record, cloud),
        python=provider.python,
    )
    joining = {"join": join}
    changes: dict[str, object] = {}
    if provider.aws is not None:
        changes["aws"] = provider.aws.model_copy(update=joining)
    if provider.tencent is not None:
        changes["tencent"] = provider.tencent.model_copy(update=joining)
    return _as_configured(provider.model_copy(update=changes), cloud)


def _as_configured(provider: ProviderConfig, cloud: str) -> AwsProvider | TencentProvider:
    if cloud == "aws" and provider.aws is not None:
        return AwsProvider(provider.aws)
    if cloud == "tencent" and provider.tencent is not None:
        return TencentProvider(provider.tencent)
    raise ConfigError(
        f"there is no cloud '{cloud}'", fix="Name aws, tencent or local in plan.regions."
    )


def _secrets_region(record: ClusterRecord, cloud: str) -> str:
    """The head's region where it is of that cloud, else the first one of the cloud."""
    section = {"aws": record.provider.aws, "tencent": record.provider.tencent}.get(cloud)
    if record.head.standing is not None and section is not None and section.join is not None:
        return section.join.secrets_region or record.head.pool.region
    places = places_of(record.provider, cloud)
    region = record.head.pool.region
    return region if cloud == record.head.cloud and region in places else places[0]
