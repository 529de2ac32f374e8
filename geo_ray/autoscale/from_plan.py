"""What should run, from a plan and what could be rented."""

from __future__ import annotations

from geo_ray.autoscale.config import AutoscaleConfig
from geo_ray.autoscale.target import ClusterTarget, HeadTarget, MachineKind, RegionTarget
from geo_ray.clouds.price import Market as ListedMarket
from geo_ray.clouds.price_book import PriceBook
from geo_ray.clouds.tiers import AgeTier
from geo_ray.errors import ConfigError, CurrencyError, PriceUnknownError
from geo_ray.planning.config import MachineConfig, PlanConfig, RegionOffer
from geo_ray.planning.plan import Plan, RegionPlan
from geo_ray.providers.base import Market, Pool

_MARKETS = {"on_demand": Market.ON_DEMAND, "spot": Market.SPOT}


def target_of(
    plan: Plan, section: PlanConfig, config: AutoscaleConfig, book: PriceBook, start_unix_s: float
) -> ClusterTarget:
    """Return what should run.

    Args:
        plan: how much of what.
        section: what could be rented, and the limits.
        config: of the autoscaler.
        book: prices, for age tiers and where a cloud quotes none.
        start_unix_s: when the job began; deadlines count from there.

    Raises:
        ConfigError: the section has not the plan's regions or machines, or none on demand where
            the floor needs one.
    """
    regions = []
    for region in plan.regions:
        offer = section.regions.get(region.region)
        if offer is None:
            raise ConfigError(
                f"the plan has region '{region.region}', and plan.regions has not",
                fix="Make the plan of this configuration: `geo-ray plan --out`.",
            )
        regions.append(_region(plan, region, offer, config, book))
    deadline_h = section.deadline_h
    return ClusterTarget(
        tuple(regions),
        None if deadline_h is None else start_unix_s + deadline_h * 3600.0,
        section.budget_usd,
        section.spot.preemptions_per_h,
        section.spot.lost_s,
        compute_share=_compute_share(plan),
    )


def _compute_share(plan: Plan) -> float:
    """Return the share of the planned time after the start in which machines compute rows."""
    running_s = plan.total_s - plan.seconds.get("start", 0.0)
    return plan.seconds.get("compute", 0.0) / running_s if running_s > 0 else 1.0


def head_target(offer: RegionOffer, pool: Pool, book: PriceBook) -> HeadTarget:
    """Return the head's machine as it is counted.

    Args:
        offer: of its region, for the cloud.
        pool: where it is from.
        book: prices, as for `target_of`.
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
            f"the plan has {', '.join(missing)} in '{region.region}', and plan.regions has not",
            fix="Make the plan of this configuration: `geo-ray plan --out`.",
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
            f"autoscale.floor is {config.floor}, and plan.regions.{region.region} has no machine "
            "on demand: nothing there could stay off the spot market",
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
        pass  # the cloud quotes it, or it is not rented
    markets = tuple(_MARKETS[market] for market in machine.markets if market in _MARKETS)
    return MachineKind(machine.type, speed, machine.cap, markets, tiers, usd)
