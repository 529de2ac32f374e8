"""Machine providers and secret stores of a cluster, opened from its record.

`RegionProviders` combines several clouds and calls them in parallel. A cloud that fails or hangs
does not delay the others; the error names it and contains the results of the others.
`ClusterMachines` filters for machines with the cluster's name and id: names may collide, ids do
not. `RemoteProvider` and `RemoteStore` are sent to the autoscaler actor and open there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from geo_ray.base.errors import (
    ClusterNameTakenError,
    ClusterStateError,
    ConfigError,
    GeoRayError,
    ProviderRefusedError,
    ProviderUnreachableError,
    RegionsUnreachableError,
)
from geo_ray.base.plugins import Plugins
from geo_ray.base.threads import BoundedCalls
from geo_ray.cloud.cluster.head import find_head, head_address, listed_for_head
from geo_ray.cloud.cluster.state import ClusterRecord, ClusterState
from geo_ray.cloud.provider import (
    Availability,
    LaunchFailure,
    LaunchRequest,
    Machine,
    MachineProvider,
    MachineState,
    Pool,
)
from geo_ray.cloud.secrets import FileSecrets, SecretStore, open_secrets
from geo_ray.experiment.provider import (
    AwsProviderConfig,
    HeadBoot,
    NodeJoin,
    ProviderConfig,
    TencentProviderConfig,
)
from geo_ray.storage.conditional_store import ConditionalStore, StoredValue

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Part:
    provider: MachineProvider
    regions: tuple[str, ...]
    calls: BoundedCalls
    quotes: BoundedCalls  # prices come from a separate service, which may hang alone


class RegionProviders:
    """Combines the providers of several regions; see `MachineProvider`.

    Machines are terminated in the cloud that has listed them; unknown ids are sent to all clouds.
    If some regions fail, ``RegionsUnreachableError`` is raised with the answers of the others.

    Args:
        providers: providers by cloud region; several regions may share one.
        longest_s: timeout of a call; None: the timeout of the cloud's client.
    """

    def __init__(
        self, providers: Mapping[str, MachineProvider], longest_s: float | None = None
    ) -> None:
        self._parts: list[_Part] = []
        for provider in {id(each): each for each in providers.values()}.values():
            regions = tuple(name for name, each in providers.items() if each is provider)
            where = ", ".join(regions)
            late = ProviderUnreachableError
            calls, quotes = (BoundedCalls(where, longest_s, late) for _ in range(2))
            self._parts.append(_Part(provider, regions, calls, quotes))
        self._by_region = {name: part for part in self._parts for name in part.regions}
        self._owner: dict[str, _Part] = {}

    @property
    def name(self) -> str:
        """See `MachineProvider.name`."""
        return "+".join(sorted({part.provider.name for part in self._parts}))

    def list_machines(self, cluster: str) -> Sequence[Machine]:
        """See `MachineProvider.list_machines`."""
        waits = [
            (part, part.calls.begin(partial(part.provider.list_machines, cluster)))
            for part in self._parts
        ]
        answers, failed = _gathered(waits)
        found: list[Machine] = []
        for part, machines in answers:
            self._owner |= {machine.id: part for machine in machines}
            found += machines
        return self._answered(found, failed)

    def launch(self, request: LaunchRequest) -> Sequence[LaunchFailure]:
        """See `MachineProvider.launch`."""
        part = self._by_region.get(request.pool.region)
        if part is None:
            raise _no_cloud(request.pool.region)
        return part.calls.begin(partial(part.provider.launch, request))()

    def terminate(self, machine_ids: Sequence[str]) -> None:
        """See `MachineProvider.terminate`; a failing cloud does not affect the others."""
        waits = []
        for part in self._parts:
            mine = [one for one in machine_ids if self._owner.get(one, part) is part]
            if mine:
                waits.append((part, part.calls.begin(partial(part.provider.terminate, mine))))
        _, failed = _gathered(waits)
        errors = [error for _, error in failed]
        if errors:
            refused = (error for error in errors if isinstance(error, ProviderRefusedError))
            raise next(refused, errors[0])

    def poll_failures(self, cluster: str) -> Sequence[LaunchFailure]:
        """See `MachineProvider.poll_failures`."""
        waits = [
            (part, part.calls.begin(partial(part.provider.poll_failures, cluster)))
            for part in self._parts
        ]
        answers, failed = _gathered(waits)
        return self._answered([each for _, answer in answers for each in answer], failed)

    def availability(self, pools: Sequence[Pool]) -> Sequence[Availability]:
        """See `MachineProvider.availability`."""
        waits = []
        for part in self._parts:
            mine = [pool for pool in pools if pool.region in part.regions]
            if mine:
                waits.append((part, part.quotes.begin(partial(part.provider.availability, mine))))
        answers, failed = _gathered(waits)
        availabilities = {
            availability.pool: availability for _, found in answers for availability in found
        }
        unknown = {pool.region for pool in pools} - self._by_region.keys()
        strange = [((region,), _no_cloud(region)) for region in sorted(unknown)]
        return self._answered(
            [availabilities[pool] for pool in pools if pool in availabilities], [*failed, *strange]
        )

    # ------------------------------------------------------------------ parts

    def _answered(
        self, found: list[T], failed: Sequence[tuple[tuple[str, ...], Exception]]
    ) -> list[T]:
        if not failed:
            return found
        if len(self._by_region) == 1:
            raise failed[0][1]
        unreachable = {name: _words(error) for names, error in failed for name in names}
        first = failed[0][1]
        fix = first.fix if isinstance(first, GeoRayError) else None
        text = "; ".join(f"{name}: {why}" for name, why in unreachable.items())
        error = RegionsUnreachableError(text, fix=fix)
        error.found, error.unreachable = tuple(found), unreachable
        raise error from first


def _gathered(
    waits: Sequence[tuple[_Part, Callable[[], T]]],
) -> tuple[list[tuple[_Part, T]], list[tuple[tuple[str, ...], Exception]]]:
    """Wait for all calls; return the answers, and the errors by region."""
    answers: list[tuple[_Part, T]] = []
    failed: list[tuple[tuple[str, ...], Exception]] = []
    for part, wait in waits:
        try:
            answers.append((part, wait()))
        except Exception as error:  # the error concerns these regions only
            failed.append((part.regions, error))
    return answers, failed


def _words(error: Exception) -> str:
    return error.message if isinstance(error, GeoRayError) else f"{type(error).__name__}: {error}"


def _no_cloud(region: str) -> ProviderRefusedError:
    return ProviderRefusedError(
        f"no cloud is configured for region '{region}'",
        fix="Set the cloud of every region in plan.regions.",
    )


_SHOWN = 5


@dataclass(slots=True)
class ClusterMachines:
    """Filters a provider for the machines of one cluster.

    Attributes:
        inner: the clouds.
        id: id of the cluster; empty: machines without an id match.
    """

    inner: MachineProvider
    id: str

    @property
    def name(self) -> str:
        """See `MachineProvider.name`."""
        return self.inner.name

    def list_machines(self, cluster: str) -> Sequence[Machine]:
        """See `MachineProvider.list_machines`; without machines of other clusters of the name."""
        try:
            return self._own(self.inner.list_machines(cluster))
        except RegionsUnreachableError as error:
            error.found = tuple(self._own(error.found))
            raise

    def launch(self, request: LaunchRequest) -> Sequence[LaunchFailure]:
        """See `MachineProvider.launch`."""
        return self.inner.launch(replace(request, cluster_id=self.id))

    def terminate(self, machine_ids: Sequence[str]) -> None:
        """See `MachineProvider.terminate`."""
        self.inner.terminate(machine_ids)

    def poll_failures(self, cluster: str) -> Sequence[LaunchFailure]:
        """See `MachineProvider.poll_failures`.

        May include other clusters, whose request ids differ.
        """
        return self.inner.poll_failures(cluster)

    def availability(self, pools: Sequence[Pool]) -> Sequence[Availability]:
        """See `MachineProvider.availability`."""
        return self.inner.availability(pools)

    def logs(self, machine_id: str) -> Mapping[str, str]:
        """Return the output of a machine's processes by process; local clouds only."""
        answer = getattr(self.inner, "logs", None)
        return {} if answer is None else dict(answer(machine_id))

    def _own(self, machines: Sequence[Machine]) -> list[Machine]:
        return [each for each in machines if each.cluster_id == self.id]


def check_name_is_free(clouds: MachineProvider, name: str, id: str, state: str) -> None:
    """Check that no other cluster of the name runs in the same accounts.

    An unreachable region may have one and does not prevent the start: ids distinguish the machines.

    Args:
        clouds: all machines with the name.
        name: of the cluster.
        id: id of the cluster.
        state: folder of the cluster, as shown to users.

    Raises:
        ClusterNameTakenError: another one runs.
    """
    try:
        listed = clouds.list_machines(name)
    except RegionsUnreachableError as error:
        listed = error.found
    others = [
        each for each in listed if each.cluster_id != id and each.state is not MachineState.ENDED
    ]
    if not others:
        return
    ids = ", ".join(sorted({each.cluster_id or "without an id" for each in others}))
    shown = ", ".join(f"{each.id} in {each.pool.region}" for each in others[:_SHOWN])
    more = f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
    raise ClusterNameTakenError(
        f"another cluster named {name} has running machines ({ids}): {shown}{more}. This one is "
        f"{id}, with its state in {state}; the state of the other one is unknown"
    )


LOCAL: Final = "local"
_SECRETS: Final = "secrets"


def open_clouds(
    record: ClusterRecord,
    state: ClusterState,
    address: str | None = None,
    longest_s: float | None = None,
) -> MachineProvider:
    """Return the clouds of a cluster as one provider, limited to the machines of this cluster.

    Args:
        record: record of the cluster.
        state: its folder.
        address: address of its head, host:port; None: only the head can be launched.
        longest_s: timeout for each region; None: the timeout of the cloud's client.

    Raises:
        CloudError: there are no credentials.
    """
    return ClusterMachines(open_accounts(record, state, address, longest_s), record.id)


def open_accounts(
    record: ClusterRecord,
    state: ClusterState,
    address: str | None = None,
    longest_s: float | None = None,
) -> MachineProvider:
    """Return the same clouds, including machines of other clusters of the name.

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
    """Return the configured regions of a cloud.

    Raises:
        ConfigError: the cloud is not configured.
    """
    section: AwsProviderConfig | TencentProviderConfig | None
    section = {"aws": provider.aws, "tencent": provider.tencent}.get(cloud)
    if section is None:
        raise ConfigError(
            f"plan.regions has machines of {cloud}, but no account is configured there",
            fix=f"Add `provider.{cloud}` with its `places` (docs/operations/cloud-accounts.md), or "
            "try it on this computer with `--provider local`.",
        )
    return list(section.places)


def secrets_of(record: ClusterRecord, state: ClusterState) -> list[SecretStore]:
    """Return the secret stores for the cluster's token, one per cloud.

    None with an existing head, which has its own token.
    """
    found: list[SecretStore] = []
    if record.head.existing is not None:
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
    """Return the configuration key for a separate role of the head.

    None: the role is not needed, or is already configured.

    The head may launch machines and write the cluster's state; nodes need neither permission.
    """
    region, aws, tencent = record.head.pool.region, record.provider.aws, record.provider.tencent
    pairs: dict[str, tuple[str | None, str | None]] = {}
    if record.head.existing is not None:
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
    shares_state = heads is not None and any(heads == each for each, _ in pairs.values())
    return key if shares_state else None


class _CloudProvider(MachineProvider, Protocol):
    """A cloud with several regions."""

    def of_region(self, region: str) -> MachineProvider:
        """Return a provider for one region of the same account."""


CLOUDS: Final = Plugins[Callable[[Any], _CloudProvider]](
    {
        "aws": "geo_ray.cloud.aws:AwsProvider",
        "tencent": "geo_ray.cloud.tencent:TencentProvider",
    }
)
"""Provider class by cloud, created from its section of the configuration."""


def token_path(record: ClusterRecord, state: ClusterState) -> Path:
    """Return the token file of a local cluster."""
    return state.path / _SECRETS / record.token_secret


def secret_command(record: ClusterRecord) -> str:
    """Return the command that prints the token of a cluster in a cloud."""
    cloud = record.head.cloud
    kind = "tencent-ssm"
    if cloud == "aws":
        kind = record.provider.aws.secret_store if record.provider.aws else "aws-secretsmanager"
    return (
        f"python -m geo_ray.cloud.secrets --store {kind} "
        f"--region {_secrets_region(record, cloud)} {record.token_secret}"
    )


def _local(record: ClusterRecord, state: ClusterState) -> MachineProvider:
    from geo_ray.cloud.cluster.local_program import LocalClusterProgram
    from geo_ray.cloud.local import LocalProvider

    cloud = state.path / "cloud"
    token = token_path(record, state)
    return LocalProvider(cloud, LocalClusterProgram(cloud, state.path, record, token))


def _cloud(
    record: ClusterRecord, state: ClusterState, cloud: str, address: str | None
) -> _CloudProvider:
    provider, head = record.provider, record.head
    if head.existing is not None:
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


def _as_configured(provider: ProviderConfig, cloud: str) -> _CloudProvider:
    section = {"aws": provider.aws, "tencent": provider.tencent}.get(cloud)
    if section is None:
        raise ConfigError(
            f"unknown cloud '{cloud}'", fix="Name aws, tencent or local in plan.regions."
        )
    return CLOUDS[cloud](section)


def _secrets_region(record: ClusterRecord, cloud: str) -> str:
    """Region of the head if it is in that cloud, else the first region of the cloud."""
    section = {"aws": record.provider.aws, "tencent": record.provider.tencent}.get(cloud)
    if record.head.existing is not None and section is not None and section.join is not None:
        return section.join.secrets_region or record.head.pool.region
    places = places_of(record.provider, cloud)
    region = record.head.pool.region
    return region if cloud == record.head.cloud and region in places else places[0]


@dataclass(slots=True)
class RemoteProvider:
    """A provider that can be sent to another process.

    Only the address of the cluster's folder is sent; connections and credentials are not.

    Attributes:
        state: folder of the cluster.
        made: how many clusters of this name were created.
    """

    state: ClusterState
    made: int
    _opened: MachineProvider | None = None
    _knows_head: bool = False

    @property
    def name(self) -> str:
        """See `MachineProvider.name`."""
        return self._listing().name

    def list_machines(self, cluster: str) -> Sequence[Machine]:
        """See `MachineProvider.list_machines`."""
        return self._listing().list_machines(cluster)

    def launch(self, request: LaunchRequest) -> Sequence[LaunchFailure]:
        """See `MachineProvider.launch`; refused for a cluster that is being ended.

        An autoscaler may outlive its cluster on an existing head: it must not launch for the next
        one.
        """
        record = self.state.known()
        if record.phase != "up" or record.made != self.made:
            raise ClusterStateError(
                f"{self.state.name} is being taken down: no machines are launched"
            )
        return self._launching().launch(request)

    def terminate(self, machine_ids: Sequence[str]) -> None:
        """See `MachineProvider.terminate`; works without a head."""
        self._listing().terminate(machine_ids)

    def poll_failures(self, cluster: str) -> Sequence[LaunchFailure]:
        """See `MachineProvider.poll_failures`."""
        return self._listing().poll_failures(cluster)

    def availability(self, pools: Sequence[Pool]) -> Sequence[Availability]:
        """See `MachineProvider.availability`."""
        return self._listing().availability(pools)

    def _listing(self) -> MachineProvider:
        found = self._opened
        if found is None:
            record = self.state.known()
            longest_s = record.autoscale.answer_s
            self._opened = found = open_clouds(record, self.state, longest_s=longest_s)
        return found

    def _launching(self) -> MachineProvider:
        """The clouds with the address of the head for new machines; cached once known."""
        found = self._listing()
        if not self._knows_head:
            record = self.state.known()
            head = find_head(listed_for_head(found, record), record)
            address = head_address(head, record)
            if address is not None:
                found = open_clouds(record, self.state, address, record.autoscale.answer_s)
                self._opened, self._knows_head = found, True
        return found


@dataclass(slots=True)
class RemoteStore:
    """A store that can be sent to another process.

    Attributes:
        state: folder of the cluster.
    """

    state: ClusterState
    _opened: ConditionalStore | None = None

    def read(self, key: str) -> StoredValue | None:
        """See `ConditionalStore.read`."""
        return self._store().read(key)

    def write(self, key: str, data: bytes, expected: str | None) -> str | None:
        """See `ConditionalStore.write`."""
        return self._store().write(key, data, expected)

    def remove(self, key: str) -> None:
        """See `ConditionalStore.remove`."""
        self._store().remove(key)

    def unchanged(self, key: str, tag: str) -> AbstractContextManager[bool]:
        """See `ConditionalStore.unchanged`."""
        return self._store().unchanged(key, tag)

    def _store(self) -> ConditionalStore:
        if self._opened is None:
            self._opened = self.state.store()
        return self._opened
