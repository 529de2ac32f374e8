"""The request to a planning policy: the job, what each region could rent, the links, the limits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from geo_ray.base.errors import PlanInfeasibleError
from geo_ray.base.text import enough_text
from geo_ray.codecs.base import FP32_BITS
from geo_ray.planner.config import Objective
from geo_ray.planner.exchange import Exchange, Limits, Option, exchange, mean_of
from geo_ray.planner.fleet import ANY_ROWS, Offer, RegionFleet
from geo_ray.planner.loss import AssumedLoss, LossTable, last_bits, owes
from geo_ray.planner.price_brackets import UNCHANGING, Bracket
from geo_ray.planner.timing import JobWork, Timing
from geo_ray.prices.price import Market
from geo_ray.transport.links import LinkTable

_IN_FULL: Final = (FP32_BITS, FP32_BITS)


class RentalPrice(Protocol):
    """Dollars for something that is kept for so many hours and is so old when they begin."""

    def __call__(self, hours: float, age_h: float = 0.0) -> float:
        """Return the dollars.

        Args:
            hours: that it is kept for from now on.
            age_h: that it has now.
        """
        ...


@dataclass(frozen=True, slots=True)
class Rental:
    """Machines that a region could rent.

    Attributes:
        type: the instance type.
        market: how it would be bought.
        usd: dollars for one, by its age tiers.
        rows_per_s: that one computes.
        cap: most of them.
        lost_fraction: of the time of all who wait for it that its preemptions are expected to take.
        lan_s: that one adds to a step: what its workers send and get inside the region.
        workers: that one has, each with an accelerator of its own.
        max_rows: most rows of a step that one has the memory for.
        left_out: why it cannot be rented; empty if it can, or is not sold.
        since_h: hours after the run's first machines that it is rented; see `rental_age`.
    """

    type: str
    market: Market
    usd: RentalPrice
    rows_per_s: float
    cap: int
    lost_fraction: float = 0.0
    lan_s: float = 0.0
    workers: int = 1
    max_rows: int = ANY_ROWS
    left_out: str = ""
    since_h: float = 0.0


@dataclass(frozen=True, slots=True)
class Site:
    """A region as the planner sees it.

    Attributes:
        name: the region.
        rentals: what it could rent.
        fixed_usd: dollars for what it needs anyway (server, disk); the age is the server's.
        fixed_s: of every step, whatever is rented.
        one_is_free: whether the parameter server is on one of the machines, whose workers need no
            network; that with the largest `lan_s`.
        counts_lan: whether `Rental.lan_s` is made of the network, because nobody has measured it.
        server: instance type for the parameter server; None: on one of the machines.
        edges_h: every number of hours at which one of these prices changes.
        server_since_h: as `Rental.since_h`, of the server.
    """

    name: str
    rentals: Sequence[Rental]
    fixed_usd: RentalPrice
    fixed_s: float = 0.0
    one_is_free: bool = False
    counts_lan: bool = False
    server: str | None = None
    edges_h: frozenset[float] = frozenset()
    server_since_h: float = 0.0

    def lan_s(self, counts: Sequence[int]) -> float:
        """Return what the network inside the region adds to a step with some of its rentals."""
        used = [rental.lan_s for rental, n in zip(self.rentals, counts, strict=True) if n]
        total_s = sum(n * rental.lan_s for rental, n in zip(self.rentals, counts, strict=True))
        return total_s - (max(used, default=0.0) if self.one_is_free else 0.0)

    def workers(self, counts: Sequence[int]) -> int:
        """Return the workers of some of its rentals."""
        return sum(n * rental.workers for rental, n in zip(self.rentals, counts, strict=True))


class _Coded(NamedTuple):
    """Exchanges with an averager by what of them is sent, and how it is coded.

    Attributes:
        one: as most are.
        last: after the last step, of the whole model.
        only: the same, if there is no other.
        first: the first one; None if it is as most are.
    """

    one: Exchange
    last: Exchange
    only: Exchange
    first: Exchange | None

    def exchanges(self, timing: Timing, steps: float) -> tuple[Exchange, Exchange | None]:
        """Return the mean one of those on the way, and the one after the last step if there is."""
        rounds, each = timing.rounds(steps), self.one
        if rounds and self.first is not None:
            each = mean_of(self.one, self.first, rounds)
        if not timing.has_last(steps):
            return each, None
        return each, self.last if rounds else self.only


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
        last_errors: relative, that the last exchange may have up and down; 0 for full precision.
        first_in_full: whether no codec is used for the first exchange, as there is nothing yet that
            what is sent could be a difference from.
        loss: what intervals and codecs cost in loss.
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
    last_errors: tuple[float, float] = (0.0, 0.0)
    first_in_full: bool = False
    loss: LossTable = field(default_factory=AssumedLoss)

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
                    each.rows_per_s,
                    each.cap,
                    each.lan_s,
                    each.max_rows,
                    each.lost_fraction,
                )
                for each in site.rentals
            ]
            rows = self.work.region_rows(site.name)
            fleet = RegionFleet(site.name, offers, rows, site.fixed_s, site.one_is_free, most_nodes)
            if fleet.is_empty:
                raise _nothing_to_rent(site, rows)
            found.append(fleet)
        return found

    def options(self, bracket: Bracket = UNCHANGING) -> list[Option]:
        """Return the ways to exchange that keep the loss budget, at the prices of a bracket.

        Raises:
            PlanInfeasibleError: no way keeps it.
            LinkUnknownError: a link was not measured.
        """
        names = [site.name for site in self.sites]
        stands = sum(bracket.usd_per_h(site.fixed_usd) for site in self.sites)
        pattern = self.work.pattern
        found, least = [], float("inf")
        for averager in self.averagers:
            for codec in self.codecs:
                coded = self._coded(averager, codec)
                for interval in self.intervals:
                    loss = self.loss_of(interval, codec)
                    least = min(least, loss)
                    if loss <= self.loss_budget or len(names) == 1:
                        timing = pattern.timing(interval, owes=owes(codec))
                        each, last = coded.exchanges(timing, self.work.steps)
                        found.append(Option(interval, timing, each, stands, last))
        if not found:
            raise self._all_lose(least)
        return found

    def _coded(self, averager: str, codec: str | None) -> _Coded:
        fragments = self.work.pattern.fragments
        last = self._exchange(averager, codec, 1, last_bits(codec, self.last_errors))
        one, full, whole = self._exchange(averager, codec, fragments), None, last
        if self.first_in_full and codec is not None:
            full = self._exchange(averager, codec, fragments, _IN_FULL)
            whole = self._exchange(averager, codec, 1, _IN_FULL)
        return _Coded(one, last, whole, full)

    def loss_of(self, interval: int, codec: str | None) -> float:
        """Return the relative loss that a way to exchange is expected to cost."""
        if len(self.sites) == 1:
            return 0.0
        return self.loss.loss(interval, codec, trains_on=self.work.pattern.trains_on)

    def _all_lose(self, least: float) -> PlanInfeasibleError:
        budget = f"loss_budget {self.loss_budget:.1%}"
        if math.isinf(least):
            return PlanInfeasibleError(
                f"{budget}: with every interval and codec that are allowed, training diverged when "
                "the loss was measured",
                fix="Allow shorter intervals and larger codecs, or lower the learning rate and "
                "measure anew.",
            )
        how = "as measured, noise included" if self.loss.is_measured else "by the rough table"
        more = ", or measure with more --seeds and --steps" if self.loss.is_measured else ""
        return PlanInfeasibleError(
            f"{budget}: the best interval and codec that are allowed are expected to lose "
            f"{least:.1%}, {how}",
            fix=f"Set plan.loss_budget to {enough_text(least)}, or allow shorter intervals and "
            f"larger codecs{more}.",
        )

    def _exchange(
        self,
        averager: str,
        codec: str | None,
        fragments: int,
        bits: tuple[float, float] | None = None,
    ) -> Exchange:
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
            bits,
        )


def _nothing_to_rent(site: Site, rows: int) -> PlanInfeasibleError:
    whys = dict.fromkeys(f"{r.type}: {r.left_out}" for r in site.rentals if r.left_out)
    if whys:
        return PlanInfeasibleError(
            f"region '{site.name}' has data and nothing that they fit on: {'; '.join(whys)}",
            fix=f"Offer larger machines in plan.regions.{site.name}, a server of its own for the "
            "parameter server, or an optimizer that keeps less.",
        )
    if any(rental.cap for rental in site.rentals):
        return PlanInfeasibleError(
            f"region '{site.name}' has {rows} rows of a step, and its machines have memory for "
            f"{sum(r.cap * r.max_rows for r in site.rentals)}",
            fix="Lower data.batch_size, raise a cap of its machines, or offer larger ones.",
        )
    return PlanInfeasibleError(
        f"region '{site.name}' has data and nothing to rent",
        fix="Raise a cap of its machines, or allow another market.",
    )
