"""The request to a planning policy: the job, what each region could rent, the links, the limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from geo_ray.clouds.price import Market
from geo_ray.errors import PlanInfeasibleError
from geo_ray.observe.text import enough_text
from geo_ray.planning.model.exchange import Exchange, exchange
from geo_ray.planning.model.work import JobWork
from geo_ray.planning.search.bracket import UNCHANGING, Bracket, Usd
from geo_ray.planning.search.fleet import Offer, RegionFleet
from geo_ray.planning.search.ways import Limits, Objective, Option
from geo_ray.planning.tradeoffs import LOSS_BY_CODEC, LOSS_OF_DELAY, loss_of_interval
from geo_ray.transport.links.table import LinkTable


@dataclass(frozen=True, slots=True)
class Rental:
    """Machines that a region could rent.

    Attributes:
        type: the instance type.
        market: how it would be bought.
        usd: dollars for one that is kept for so many hours, by its age tiers.
        rows_per_s: that one computes.
        cap: most of them.
        lost_share: of its work that preemptions are expected to take.
    """

    type: str
    market: Market
    usd: Usd
    rows_per_s: float
    cap: int
    lost_share: float = 0.0


@dataclass(frozen=True, slots=True)
class Site:
    """A region as the planner sees it.

    Attributes:
        name: the region.
        rentals: what it could rent.
        stands_usd: dollars for what it needs anyway (server, disk), for so many hours.
        fixed_s: of every step, whatever is rented.
        lan_s: that every further machine adds to a step.
        edges_h: every number of hours at which one of these prices changes.
    """

    name: str
    rentals: Sequence[Rental]
    stands_usd: Usd
    fixed_s: float = 0.0
    lan_s: float = 0.0
    edges_h: frozenset[float] = frozenset()


@dataclass(frozen=True, slots=True)
class Request:
    """The question.

    Attributes:
        work: the job.
        sites: of all regions, in the order of the configuration.
        links: of every pair that may exchange.
        usd_per_gb: egress by (source, destination).
        averagers: regions that may host the averager; never empty.
        intervals: to choose from.
        codecs: to choose from.
        loss_budget: relative loss against the plainest training that is acceptable.
        objective: fewest dollars, or least time.
        limits: to keep.
        overhead_s: by codec, what an exchange takes beside bytes and round trip, as measured.
    """

    work: JobWork
    sites: Sequence[Site]
    links: LinkTable
    usd_per_gb: Mapping[tuple[str, str], float]
    averagers: Sequence[str]
    intervals: Sequence[int]
    codecs: Sequence[str | None]
    loss_budget: float = 0.05
    objective: Objective = "cost"
    limits: Limits = field(default_factory=Limits)
    overhead_s: Mapping[str | None, float] = field(default_factory=dict)

    def fleets(self, bracket: Bracket = UNCHANGING, most_nodes: int = 20_000) -> list[RegionFleet]:
        """Return what the regions could rent, at the prices of a bracket.

        Args:
            bracket: of the hours that machines are kept.
            most_nodes: of a region's search for its cheapest machines.

        Raises:
            PlanInfeasibleError: a region has data and nothing to rent.
        """
        found = []
        for site in self.sites:
            offers = [
                Offer(
                    each.type,
                    each.market,
                    bracket.usd_per_h(each.usd),
                    each.rows_per_s * (1 - each.lost_share),
                    each.cap,
                )
                for each in site.rentals
            ]
            share = self.work.share(site.name)
            fleet = RegionFleet(site.name, offers, share, site.fixed_s, site.lan_s, most_nodes)
            if fleet.is_empty:
                raise PlanInfeasibleError(
                    f"region '{site.name}' has data and nothing to rent",
                    fix="Raise a cap of its machines, or allow another market.",
                )
            found.append(fleet)
        return found

    def options(self, bracket: Bracket = UNCHANGING) -> list[Option]:
        """Return the ways to exchange that keep the loss budget, at the prices of a bracket.

        Raises:
            PlanInfeasibleError: no way keeps it.
            LinkUnknownError: a link was not measured.
        """
        names = [site.name for site in self.sites]
        stands = sum(bracket.usd_per_h(site.stands_usd) for site in self.sites)
        pattern = self.work.pattern
        late = LOSS_OF_DELAY if pattern.trains_on else 0.0
        found, least = [], float("inf")
        for averager in self.averagers:
            full = self._exchange(averager, None, 1)
            for codec in self.codecs:
                one = self._exchange(averager, codec, pattern.fragments)
                for interval in self.intervals:
                    loss = loss_of_interval(interval) + LOSS_BY_CODEC[codec] + late
                    least = min(least, loss)
                    if loss <= self.loss_budget or len(names) == 1:
                        timing = pattern.timing(interval)
                        last = full if timing.has_last(self.work.steps) else None
                        found.append(Option(interval, timing, one, stands, last))
        if not found:
            raise PlanInfeasibleError(
                f"loss_budget {self.loss_budget:.1%}: the best interval and codec that are allowed "
                f"are expected to lose {least:.1%}",
                fix=f"Set plan.loss_budget to {enough_text(least)}, or allow shorter intervals and "
                "larger codecs.",
            )
        return found

    def _exchange(self, averager: str, codec: str | None, fragments: int) -> Exchange:
        names = [site.name for site in self.sites]
        # An exchange that was not measured is taken to be as slow as the slowest measured one.
        overhead_s = self.overhead_s.get(codec, max(self.overhead_s.values(), default=0.0))
        return exchange(
            self.work.num_params / fragments,
            names,
            averager,
            codec,
            self.links,
            self.usd_per_gb,
            overhead_s,
        )
