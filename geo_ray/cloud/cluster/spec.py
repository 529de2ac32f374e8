"""Builds the specification of a cluster from a configuration and its plan.

The target of the autoscaler follows the plan and the available machine types. On a Terraform stack,
Terraform owns the head, networks, secrets and permissions, and the autoscaler owns the number of
machines.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from pydantic import TypeAdapter, ValidationError

from geo_ray.base.errors import ConfigError, CurrencyError, PriceUnknownError
from geo_ray.base.load import digest
from geo_ray.base.version import __version__
from geo_ray.cloud.autoscaler.target import ClusterTarget, HeadTarget, MachineKind, RegionTarget
from geo_ray.cloud.cluster.head import head_ends_unix_s
from geo_ray.cloud.cluster.providers import LOCAL, places_of
from geo_ray.cloud.cluster.state import (
    Clouds,
    ClusterRecord,
    ClusterState,
    ExistingHead,
    HeadRecord,
    RunLocation,
)
from geo_ray.cloud.local import LocalCatalog, LocalOffer
from geo_ray.cloud.provider import Market, Pool
from geo_ray.cloud.terraform import TerraformStack, aws_config, tencent_config
from geo_ray.experiment.autoscale import AutoscaleConfig
from geo_ray.experiment.experiment import Experiment
from geo_ray.experiment.provider import ProviderConfig
from geo_ray.planner.config import MachineConfig, PlanConfig, RegionOffer
from geo_ray.planner.plan import Plan, RegionPlan
from geo_ray.prices.price import AgeTier
from geo_ray.prices.price import Market as ListedMarket
from geo_ray.prices.price_book import PriceBook
from geo_ray.runs.plan_inputs import section_of
from geo_ray.storage.uri import is_s3

_MARKETS = {"on_demand": Market.ON_DEMAND, "spot": Market.SPOT}


def target_of(
    plan: Plan, section: PlanConfig, config: AutoscaleConfig, book: PriceBook, start_unix_s: float
) -> ClusterTarget:
    """Return the target of the autoscaler.

    Args:
        plan: the plan.
        section: available machines, and the limits.
        config: configuration of the autoscaler.
        book: price book, for age tiers and where a cloud quotes no price.
        start_unix_s: start of the job, from which deadlines count.

    Raises:
        ConfigError: the section lacks regions or machines of the plan, or on-demand machines that
            the floor needs.
    """
    regions = []
    for region in plan.regions:
        offer = section.regions.get(region.region)
        if offer is None:
            raise ConfigError(
                f"the plan has region '{region.region}', but plan.regions does not",
                fix="Create the plan from this configuration: `geo-ray plan --out`.",
            )
        regions.append(_region(plan, region, offer, config, book))
    deadline_h = section.deadline_h
    return ClusterTarget(
        tuple(regions),
        None if deadline_h is None else start_unix_s + deadline_h * 3600.0,
        section.budget_usd,
        section.spot.preemptions_per_h,
        section.spot.lost_s,
        compute_fraction=_compute_fraction(plan),
    )


def _compute_fraction(plan: Plan) -> float:
    """Return the fraction of the planned time after the start in which machines compute rows."""
    running_s = plan.total_s - plan.seconds.get("start", 0.0)
    return plan.seconds.get("compute", 0.0) / running_s if running_s > 0 else 1.0


def head_target(offer: RegionOffer, pool: Pool, book: PriceBook) -> HeadTarget:
    """Return the machine of the head, for its cost.

    Args:
        offer: offer of its region, for the cloud.
        pool: its pool.
        book: price book, as for `target_of`.
    """
    return HeadTarget(pool, _kind(offer, MachineConfig(type=pool.type, cap=1), 1.0, book))


def _region(
    plan: Plan, region: RegionPlan, offer: RegionOffer, config: AutoscaleConfig, book: PriceBook
) -> RegionTarget:
    planned = {each.type: each.rows_per_s for each in region.machines}
    kinds = []
    for machine in offer.machines:
        speed = planned.get(machine.type)
        if speed is None and config.substitutes:
            speed = machine.rows_per_s
        if speed is not None:
            kinds.append(_kind(offer, machine, speed, book))
    missing = sorted(set(planned) - {kind.type for kind in kinds})
    if missing:
        raise ConfigError(
            f"the plan has {', '.join(missing)} in '{region.region}', but plan.regions does not",
            fix="Create the plan from this configuration: `geo-ray plan --out`.",
        )
    server = None
    if region.server is not None:
        both: tuple[ListedMarket, ...] = ("on_demand", "spot")
        markets = both[:1] if config.floor == "servers" else both
        machine = MachineConfig(type=region.server, cap=2, markets=markets)
        server = _kind(offer, machine, 1.0, book)
    has_floor = config.floor == "servers" or (
        config.floor == "averager" and region.region == plan.averager
    )
    if has_floor and server is None and not any(Market.ON_DEMAND in k.markets for k in kinds):
        raise ConfigError(
            f"autoscale.floor is {config.floor}, and plan.regions.{region.region} has no on-demand "
            "machine",
            fix=f"Add on_demand to plan.regions.{region.region}.machines.*.markets, or set "
            "`autoscale.floor` to averager or none.",
        )
    return RegionTarget(
        region.region,
        offer.at,
        sum(each.count * each.rows_per_s for each in region.machines),
        tuple(kinds),
        server,
        config.zones.get(region.region) or (None,),
        1 if has_floor else 0,
    )


def _kind(offer: RegionOffer, machine: MachineConfig, speed: float, book: PriceBook) -> MachineKind:
    tiers: tuple[AgeTier, ...] = ()
    usd: float | None = None
    try:
        record = book.instance(offer.cloud, offer.at, machine.type)
        tiers, usd = record.age_tiers, book.usd_of_hours(record, 1.0)
    except (PriceUnknownError, CurrencyError):
        pass  # the cloud quotes it, or it is not used
    markets = tuple(_MARKETS[market] for market in machine.markets if market in _MARKETS)
    return MachineKind(machine.type, speed, machine.cap, markets, tiers, usd)


_DASHBOARD_PORT: Final = 8265


def check_on_stack(section: PlanConfig, stack: TerraformStack) -> None:
    """Check a configuration against the stack that it uses.

    Raises:
        ConfigError: the head of the stack runs no autoscaler, or a region has no launchable
            machines.
    """
    if stack.clusters is None:
        raise ConfigError(
            f"the head of the stack {stack.stack} runs no autoscaler",
            fix="Apply it again with `rents=true`, which lets the head launch machines; or let "
            "Terraform own the counts: `geo-ray plan --out-tfvars`.",
        )
    cloud = stack.places[stack.head.region].cloud
    for name, offer in section.regions.items():
        place = stack.places.get(name)
        if place is None:
            raise ConfigError(
                f"plan.regions.{name} is not a region of the stack {stack.stack}, which has "
                f"{', '.join(stack.places)}",
                fix="Use the regions of `geo-ray inventory --from-terraform`.",
            )
        if (offer.cloud, offer.at) != (place.cloud, place.at):
            raise ConfigError(
                f"plan.regions.{name} is in {offer.at} of {offer.cloud}, and the stack "
                f"{stack.stack} has it in {place.at} of {place.cloud}",
                fix="Correct `cloud` and `at`, as `geo-ray inventory --from-terraform` has them.",
            )
        if place.cloud != cloud:
            raise ConfigError(
                f"plan.regions.{name} is in {place.cloud}, where the head, whose role is in "
                f"{cloud}, cannot launch machines",
                fix="Let Terraform own the counts of this stack: `geo-ray plan --out-tfvars`.",
            )
        owned = sum(pool.count for pool in place.pools.values())
        if owned:
            raise ConfigError(
                f"Terraform owns {owned} machines of {name}, and the autoscaler would ignore them",
                fix="Apply the stack without `workers`, or use the counts of Terraform.",
            )


def provider_on_stack(provider: ProviderConfig, stack: TerraformStack) -> ProviderConfig:
    """Return the section `provider`, completed by the stack.

    Connection settings (endpoints, retries, rates) stay as configured.
    """
    changes: dict[str, object] = {}
    aws, tencent = aws_config(stack), tencent_config(stack)
    if aws is not None:
        own = {"places": aws.places, "join": aws.join, "secret_store": aws.secret_store}
        changes["aws"] = aws if provider.aws is None else provider.aws.model_copy(update=own)
    if tencent is not None:
        held = provider.tencent
        there = {"places": tencent.places, "join": tencent.join}
        changes["tencent"] = tencent if held is None else held.model_copy(update=there)
    if stack.clusters is not None:
        changes["state"] = stack.clusters
    changes["state_keys_secret"] = stack.state_keys
    return provider.model_copy(update=changes)


def head_on_stack(stack: TerraformStack) -> HeadRecord:
    """Return the head of the stack as part of a cluster's record."""
    place, head = stack.places[stack.head.region], stack.head
    return HeadRecord(
        cloud=place.cloud,
        pool=Pool(place.at, None, head.type or "", Market.ON_DEMAND),
        port=int(head.address.rpartition(":")[2]),
        dashboard_port=_DASHBOARD_PORT,
        is_known=True,
        existing=ExistingHead(stack=stack.stack, machine=head.machine, address=head.address),
    )


_ID_BYTES: Final = 5
_FIRST_PORT: Final = 10_000
_LAST_PORT: Final = 30_000
_CLOUDS: Final = TypeAdapter(Clouds)


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """Specification of a requested cluster.

    Attributes:
        record: record to write.
        state: folder of the cluster.
        catalog: offers of the local cloud; None: the cluster uses real clouds.
    """

    record: ClusterRecord
    state: ClusterState
    catalog: LocalCatalog | None


def state_asked(
    experiment: Experiment, cloud: str | None, stack: TerraformStack | None
) -> ClusterState:
    """Return the folder of the cluster, after checks that do not depend on a plan.

    Args:
        experiment: the configuration; see `cluster_spec`.
        cloud: cloud of all machines.
        stack: the Terraform stack.

    Raises:
        ConfigError: the configuration is incomplete.
    """
    return _place(experiment, cloud, stack)[2]


def cluster_spec(
    experiment: Experiment,
    plan: Plan,
    book: PriceBook,
    cloud: str | None,
    now_unix_s: float,
    stack: TerraformStack | None = None,
) -> ClusterSpec:
    """Return the specification of a cluster; nothing is created.

    Args:
        experiment: the configuration, with a section `plan`.
        plan: the plan.
        book: price book.
        cloud: cloud of all machines: local, aws or tencent; None: as in plan.regions.
        now_unix_s: current time, from which deadlines count.
        stack: the Terraform stack whose head is used; None: the cluster has its own head.

    Raises:
        ConfigError: the configuration is incomplete.
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
        run=RunLocation(name=experiment.name, dir=_run_dir(experiment)),
        provider=provider,
        autoscale=autoscale,
        target=target,
        plan=plan,
    )
    catalog = _catalog(experiment, record, book) if is_local else None
    return ClusterSpec(record, state, catalog)


def _without_budget(experiment: Experiment) -> Experiment:
    """Return the configuration without the settings that may change while the cluster is up."""
    section = experiment.plan
    if section is None:
        return experiment
    return experiment.model_copy(update={"plan": section.model_copy(update={"budget_usd": None})})


def _within_life(autoscale: AutoscaleConfig, provider: ProviderConfig) -> AutoscaleConfig:
    """Return the configuration with lifetimes that the local cloud supports."""
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
    """Reject machine types that cannot be launched or used."""
    known = autoscale.machine_resources
    for region in target.regions if provider.rent == "demand" else ():
        types = [kind.type for kind in region.kinds]
        if not any(type_ in known for type_ in types):
            raise ConfigError(
                "provider.rent is demand, but the resources are unknown of machines in "
                f"region '{region.name}'",
                fix=f"Set its resources: `autoscale: {{machine_resources: {{{types[0]}: "
                "{CPU: 4, GPU: 1}}}`.",
            )
    named = [each.name for each in experiment.regions if each.nodes or each.server_node]
    if autoscale.substitutes and named:
        raise ConfigError(
            f"autoscale.substitutes: `nodes` or `server_node` of {', '.join(named)} name types, "
            "so machines of other types could not be used",
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
    if clouds != (LOCAL,) and not state.is_remote:
        raise ConfigError(
            "provider.state: the head keeps the cluster's journal there, and cloud machines "
            "cannot access a directory of this computer",
            fix="Name a bucket that the machines' role may read and write: "
            "`provider: {state: 's3://bucket/clusters?region=us-east-1'}`.",
        )
    return provider, clouds, state


def _clouds(experiment: Experiment, provider: ProviderConfig, cloud: str | None) -> Clouds:
    """Return the clouds of the machines, without duplicates."""
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
            f"plan.regions: machines of {', '.join(named)} cannot be launched",
            fix="Set `cloud` to aws, tencent or local, or try it with `--provider local`.",
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
            "a cluster cannot mix local and cloud machines, which have no network in common",
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


def _pool_order(pool: Pool) -> tuple[str, str, str, str]:
    return pool.region, pool.zone or "", pool.type, pool.market.value


def _catalog(experiment: Experiment, record: ClusterRecord, book: PriceBook) -> LocalCatalog:
    """Offers of the local cloud: everything that the cluster may request, at price book prices."""
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

    ordered = sorted(pools, key=_pool_order)
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
    """Directory of the run.

    None for one that is relative to the job's directory, which is unknown.
    """
    where = experiment.run.dir
    if is_s3(where):
        return (
            None  # remote runs are read through a local cache, which the autoscaler does not have
        )
    path = Path(where)
    return str(path / experiment.name) if path.is_absolute() else None


def _free_ports() -> tuple[int, int]:
    """Three consecutive free ports: of the head, of its client server, of the dashboard.

    Ephemeral ports are excluded. For local clouds only; Ray listens on all addresses.
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
