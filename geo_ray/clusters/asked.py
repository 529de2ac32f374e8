"""From a configuration to the cluster that it asks for."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from pydantic import TypeAdapter, ValidationError

from geo_ray.autoscale.config import AutoscaleConfig
from geo_ray.autoscale.from_plan import head_target, target_of
from geo_ray.autoscale.target import ClusterTarget, MachineKind
from geo_ray.clouds.price_book import PriceBook
from geo_ray.clusters.clouds import LOCAL, places_of
from geo_ray.clusters.head import head_ends_unix_s
from geo_ray.clusters.record import Clouds, ClusterRecord, HeadRecord, RunPlace
from geo_ray.clusters.stack import check_on_stack, head_on_stack, provider_on_stack
from geo_ray.clusters.state import ClusterState
from geo_ray.config.experiment import Experiment
from geo_ray.config.load import digest
from geo_ray.errors import ConfigError, CurrencyError, PriceUnknownError
from geo_ray.job.plans.machines import section_of
from geo_ray.planning.plan import Plan
from geo_ray.providers.base import Market, Pool
from geo_ray.providers.config import ProviderConfig
from geo_ray.providers.local.catalog import LocalCatalog, LocalOffer
from geo_ray.providers.terraform.outputs import TerraformStack
from geo_ray.stores.uri import is_s3
from geo_ray.version import __version__

_ID_BYTES: Final = 5
_FIRST_PORT: Final = 10_000
_LAST_PORT: Final = 30_000
_CLOUDS: Final = TypeAdapter(Clouds)


@dataclass(frozen=True, slots=True)
class AskedCluster:
    """A cluster that was asked for.

    Attributes:
        record: what is to be written down of it.
        state: where.
        catalog: what the local cloud sells; None: it is in real clouds.
    """

    record: ClusterRecord
    state: ClusterState
    catalog: LocalCatalog | None


def state_asked(
    experiment: Experiment, cloud: str | None, stack: TerraformStack | None
) -> ClusterState:
    """Return where the cluster is written down; what is wrong whatever the plan is, is found.

    Args:
        experiment: as for `asked_cluster`, as are the others.
        cloud: where all machines are.
        stack: what Terraform made.

    Raises:
        ConfigError: something is missing in it.
    """
    return _place(experiment, cloud, stack)[2]


def asked_cluster(
    experiment: Experiment,
    plan: Plan,
    book: PriceBook,
    cloud: str | None,
    now_unix_s: float,
    stack: TerraformStack | None = None,
) -> AskedCluster:
    """Return the cluster that a configuration asks for; nothing is done.

    Args:
        experiment: the configuration; has a section `plan`.
        plan: what should run where.
        book: prices.
        cloud: where all machines are: local, aws or tencent; None: as plan.regions says.
        now_unix_s: the present time; deadlines count from it.
        stack: what Terraform made, whose head it gets; None: it has a head of its own.

    Raises:
        ConfigError: something is missing in it.
    """
    section = section_of(experiment)
    provider, clouds, state = _place(experiment, cloud, stack)
    autoscale = experiment.autoscale or AutoscaleConfig()
    is_local = clouds == (LOCAL,)
    target = target_of(plan, section, autoscale, book, now_unix_s)
    if provider.rent == "demand":
        target = replace(target, regions=tuple(replace(r, rows_per_s=0.0) for r in target.regions))
    if is_local and not autoscale.machine_resources:
        found = {kind.type: {"CPU": float(_cpus(provider, kind.type))} for kind in _kinds(target)}
        autoscale = autoscale.model_copy(update={"machine_resources": found})
    if is_local:
        autoscale = _within_life(autoscale, provider)
    _check_kinds(experiment, target, autoscale, provider)
    if stack is None:
        head = _head(experiment, plan, target, provider, clouds, now_unix_s)
        offer = section.regions[provider.head.region or plan.averager]
        target = replace(target, head=head_target(offer, head.pool, book))
    else:
        head = head_on_stack(stack)
    record = ClusterRecord(
        name=state.name,
        id=secrets.token_hex(_ID_BYTES),
        phase="up",
        made=1,
        release=__version__,
        digest=digest(_without_budget(experiment)),
        began_unix_s=now_unix_s,
        clouds=clouds,
        head=head,
        run=RunPlace(name=experiment.name, dir=_run_dir(experiment)),
        provider=provider,
        autoscale=autoscale,
        target=target,
        plan=plan,
    )
    catalog = _catalog(experiment, record, book) if is_local else None
    return AskedCluster(record, state, catalog)


def _without_budget(experiment: Experiment) -> Experiment:
    """Return it without what may be changed while the cluster is up."""
    section = experiment.plan
    if section is None:
        return experiment
    return experiment.model_copy(update={"plan": section.model_copy(update={"budget_usd": None})})


def _within_life(autoscale: AutoscaleConfig, provider: ProviderConfig) -> AutoscaleConfig:
    """Return it with a life that the local cloud gives its machines."""
    most_h = provider.local.longest_life_s / 3600.0
    if autoscale.life_h <= most_h:
        return autoscale
    try:
        return AutoscaleConfig.model_validate({**dict(autoscale), "life_h": most_h})
    except ValidationError as error:
        raise ConfigError(
            f"provider.local.longest_life_s is {provider.local.longest_life_s:g}: "
            f"{error.errors()[0]['msg']}",
            fix="Set `provider.local.longest_life_s` higher, or autoscale's times lower.",
        ) from None


def _check_kinds(
    experiment: Experiment,
    target: ClusterTarget,
    autoscale: AutoscaleConfig,
    provider: ProviderConfig,
) -> None:
    """Refuse what would rent nothing, or what nothing can be placed on."""
    known = autoscale.machine_resources
    for region in target.regions if provider.rent == "demand" else ():
        types = [kind.type for kind in region.kinds]
        if not any(type_ in known for type_ in types):
            raise ConfigError(
                "provider.rent is demand, and it is not known how much fits on a machine of "
                f"region '{region.name}'",
                fix=f"Say what Ray finds there: `autoscale: {{machine_resources: {{{types[0]}: "
                "{CPU: 4, GPU: 1}}}`.",
            )
    named = [each.name for each in experiment.regions if each.nodes or each.server_node]
    if autoscale.substitutes and named:
        raise ConfigError(
            f"autoscale.substitutes: `nodes` or `server_node` of {', '.join(named)} name types, "
            "so nothing could be placed on machines of others",
            fix="Set `autoscale.substitutes` to false, or let `regions.*` name no types.",
        )


def _place(
    experiment: Experiment, cloud: str | None, stack: TerraformStack | None
) -> tuple[ProviderConfig, Clouds, ClusterState]:
    provider, name = experiment.provider or ProviderConfig(), experiment.name
    if stack is not None:
        check_on_stack(section_of(experiment), stack)
        provider, name = provider_on_stack(provider, stack), stack.cluster
    clouds = _clouds(experiment, provider, cloud)
    state = ClusterState.below(provider.state, name)
    if clouds != (LOCAL,) and not state.is_far:
        raise ConfigError(
            "provider.state: the head keeps the cluster's journal there, and a machine of a cloud "
            "does not see a directory of this computer",
            fix="Name a bucket that the machines' role may read and write: "
            "`provider: {state: 's3://bucket/clusters?region=us-east-1'}`.",
        )
    return provider, clouds, state


def _clouds(experiment: Experiment, provider: ProviderConfig, cloud: str | None) -> Clouds:
    """Return where machines are, each cloud once."""
    offers = section_of(experiment).regions
    if cloud == LOCAL:
        return (LOCAL,)
    named = tuple(dict.fromkeys(offer.cloud for offer in offers.values()))
    if cloud is not None and named != (cloud,):
        raise ConfigError(
            f"--provider {cloud}: plan.regions has machines of {', '.join(named)}",
            fix="Leave --provider out, or correct plan.regions.*.cloud.",
        )
    try:
        clouds: Clouds = _CLOUDS.validate_python(named)
    except ValidationError:
        raise ConfigError(
            f"plan.regions: machines of {', '.join(named)} cannot be rented",
            fix="Let `cloud` be aws, tencent or local, or rehearse it with `--provider local`.",
        ) from None
    for each in clouds:
        if each == LOCAL:
            continue
        places = places_of(provider, each)
        for region, offer in offers.items():
            if offer.cloud == each and offer.at not in places:
                raise ConfigError(
                    f"plan.regions.{region} is in {offer.at}, and provider.{each}.places has "
                    f"{', '.join(places)}",
                    fix=f"Add {offer.at} to provider.{each}.places, with its image and network.",
                )
    if LOCAL in named and named != (LOCAL,):
        raise ConfigError(
            "machines of this computer and of a cloud do not reach each other: no cluster has both",
            fix="Use `--provider local` for all, or name clouds in plan.regions.",
        )
    return clouds


def _head(
    experiment: Experiment,
    plan: Plan,
    target: ClusterTarget,
    provider: ProviderConfig,
    clouds: Sequence[str],
    now_unix_s: float,
) -> HeadRecord:
    name = provider.head.region or plan.averager
    offer = section_of(experiment).regions[name]
    region = next(each for each in target.regions if each.name == name)
    type_ = provider.head.type or (region.server or region.kinds[0]).type
    is_local = tuple(clouds) == (LOCAL,)
    port, dashboard = _free_ports() if is_local else (6379, 8265)
    return HeadRecord.model_validate(
        {
            "cloud": LOCAL if is_local else offer.cloud,
            "pool": Pool(offer.at, provider.head.zone, type_, Market.ON_DEMAND),
            "port": port,
            "dashboard_port": dashboard,
            "ends_unix_s": head_ends_unix_s(provider, clouds, now_unix_s),
        }
    )


def _catalog(experiment: Experiment, record: ClusterRecord, book: PriceBook) -> LocalCatalog:
    """What the local cloud sells: all that the cluster may ask for, at the prices of the book."""
    local = record.provider.local
    cloud_of = {offer.at: offer.cloud for offer in section_of(experiment).regions.values()}
    pools = {*record.target.pools(), record.head.pool}

    def usd_per_hour(pool: Pool) -> float:
        try:
            market: str = pool.market.value
            found = book.instance(cloud_of[pool.region], pool.region, pool.type, market)  # type: ignore[arg-type]
            return book.usd_of_hours(found, 1.0)
        except (PriceUnknownError, CurrencyError):
            return local.usd_per_hour

    ordered = sorted(pools, key=lambda p: (p.region, p.zone or "", p.type, p.market.value))
    return LocalCatalog(
        offers=tuple(
            LocalOffer(
                region=pool.region,
                zone=pool.zone,
                type=pool.type,
                market=pool.market,
                usd_per_hour=usd_per_hour(pool),
            )
            for pool in ordered
        ),
        cpus={pool.type: _cpus(record.provider, pool.type) for pool in ordered},
        start_delay_s=local.start_delay_s,
        longest_life_s=local.longest_life_s,
    )


def _kinds(target: ClusterTarget) -> list[MachineKind]:
    found: list[MachineKind] = []
    for region in target.regions:
        found += [*region.kinds, *((region.server,) if region.server else ())]
    return found


def _cpus(provider: ProviderConfig, type_: str) -> int:
    return provider.local.cpus.get(type_, provider.local.other_cpus)


def _run_dir(experiment: Experiment) -> str | None:
    """Where the run will be; a relative directory begins in the job's own, which is not known."""
    where = experiment.run.dir
    if is_s3(where):
        return None  # read through a copy on the machine that looks, which the autoscaler has not
    path = Path(where)
    return str(path / experiment.name) if path.is_absolute() else None


def _free_ports() -> tuple[int, int]:
    """Three ports in a row that nobody has: the head's, its clients', the dashboard's.

    None of those that the system gives to whoever asks for any. Local clouds only; Ray listens on
    every address.
    """
    while True:
        first = _FIRST_PORT + secrets.randbelow(_LAST_PORT - _FIRST_PORT)
        if all(_is_free(first + more) for more in range(3)):
            return first, first + 2


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
