"""The planning request: the job, available machines by region, links and limits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal, NamedTuple, Protocol

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
_EPS: Final = 1e-9
_PARAMETER_COPIES: Final = 2  # there and back, in `Rental.lan_s`


class RentalPrice(Protocol):
    """Cost of an item for a number of hours from a given age on."""

    def __call__(self, hours: float, age_h: float = 0.0) -> float:
        """Return the cost in dollars.

        Args:
            hours: hours from now on.
            age_h: current age.
        """
        ...


@dataclass(frozen=True, slots=True)
class Rental:
    """Machines that a region can launch.

    Attributes:
        type: instance type.
        market: market.
        usd: cost of one, with its age tiers.
        rows_per_s: speed of one.
        cap: maximum count.
        lost_fraction: expected fraction of the time of all waiting regions that preemptions cost.
        lan_s: seconds that one adds to a step for traffic inside the region.
        alone_lan_s: see `Offer.alone_lan_s`.
        workers: workers of one, each with its own accelerator.
        max_rows: maximum rows of a step that fit into the memory of one.
        left_out: why it cannot be used; empty if it can, or is not offered.
        since_h: hours from the launch of the first machines to its launch; see `rental_age`.
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
    alone_lan_s: float | None = None


OwnSteps = Literal["never", "alone", "always"]
"""Whether the workers of a region make the optimizer's steps: always, or if there is only one."""


@dataclass(frozen=True, slots=True)
class Site:
    """A region in the planner.

    Attributes:
        name: name of the region.
        rentals: available machines.
        fixed_usd: cost of server and disk; the age is that of the server.
        fixed_s: constant seconds of every step.
        one_is_free: whether the parameter server runs on one of the machines, whose workers need no
            network; the one with the largest `lan_s` is chosen.
        counts_lan: whether `Rental.lan_s` is computed from the network because it was not measured.
        own_steps: where the network is used at exchanges only. `Rental.lan_s` is then not that of a
            step: see `Request.at`.
        optimizer_copies: values per parameter in the optimizer's state.
        server: instance type of the parameter server; None: on one of the machines.
        edges_h: all hours at which one of these prices changes.
        server_since_h: `Rental.since_h` of the server.
        gang: machines of one rental that the region takes together, all or none; 0: machines are
            taken one by one. The speed of a rental is still that of one machine.
    """

    name: str
    rentals: Sequence[Rental]
    fixed_usd: RentalPrice
    fixed_s: float = 0.0
    one_is_free: bool = False
    counts_lan: bool = False
    own_steps: OwnSteps = "never"
    optimizer_copies: int = 0
    server: str | None = None
    edges_h: frozenset[float] = frozenset()
    server_since_h: float = 0.0
    gang: int = 0

    def lan_s(self, counts: Sequence[int]) -> float:
        """Return the LAN time that a selection of rentals adds to a step."""
        if sum(counts) == 1:
            rental = self.rentals[list(counts).index(1)]
            alone_s = rental.lan_s if rental.alone_lan_s is None else rental.alone_lan_s
            return 0.0 if self.one_is_free else alone_s
        used = [rental.lan_s for rental, n in zip(self.rentals, counts, strict=True) if n]
        total_s = sum(n * rental.lan_s for rental, n in zip(self.rentals, counts, strict=True))
        return total_s - (max(used, default=0.0) if self.one_is_free else 0.0)

    def workers(self, counts: Sequence[int]) -> int:
        """Return the number of workers of a selection of rentals."""
        workers = sum(n * rental.workers for rental, n in zip(self.rentals, counts, strict=True))
        return workers * (self.gang or 1)


class _Coded(NamedTuple):
    """Exchanges with an averager by content and codec.

    Attributes:
        one: a typical exchange.
        last: exchange of the whole model after the last step.
        only: the last exchange, if it is the only one.
        first: the first exchange; None if it is typical.
    """

    one: Exchange
    last: Exchange
    only: Exchange
    first: Exchange | None

    def exchanges(self, timing: Timing, steps: float) -> tuple[Exchange, Exchange | None]:
        """Return the mean exchange, and the one after the last step, if any."""
        rounds, each = timing.rounds(steps), self.one
        if rounds and self.first is not None:
            each = mean_of(self.one, self.first, rounds)
        if not timing.has_last(steps):
            return each, None
        return each, self.last if rounds else self.only


@dataclass(frozen=True, slots=True)
class Request:
    """A planning request.

    Attributes:
        work: the job.
        sites: all regions, in the order of the configuration.
        links: links between all pairs that may exchange.
        usd_per_gb: egress by (source, destination).
        averagers: regions that may host the averager; never empty.
        intervals: candidate intervals.
        codecs: candidate codecs.
        loss_budget: acceptable loss relative to plain training.
        objective: minimum dollars, or minimum time.
        limits: the limits.
        overhead_s: measured seconds of an exchange in addition to transfer and round trip, by
            codec.
        last_errors: allowed relative errors of the last exchange, up and down; 0: full precision.
        first_in_full: whether the first exchange uses no codec, because there is no base for a
            difference yet.
        loss: loss of intervals and codecs.
        state_every: steps after which a region's only worker sends its state to the server.
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
    state_every: int = 1

    @property
    def lan_depends(self) -> bool:
        """Whether the LAN time of a step depends on the interval."""
        return any(site.own_steps != "never" for site in self.sites)

    def by_interval(self) -> list[Request]:
        """Return a request for each interval within the loss budget; one with all if none is."""
        is_one = len(self.sites) == 1
        intervals = [
            interval
            for interval in (self.intervals[:1] if is_one else self.intervals)
            if is_one or any(self.loss_of(interval, c) <= self.loss_budget for c in self.codecs)
        ]
        if not (self.lan_depends and intervals):
            return [replace(self.at(self.intervals[0]), intervals=self.intervals)]
        return [self.at(interval) for interval in intervals]

    def at(self, interval: int) -> Request:
        """Return the request for one interval, with the LAN time that it gives a step.

        Workers that make the optimizer's steps send their parameters `Pattern.sends` times per
        exchange; the only worker of a region also every `state_every` steps, each time with its
        optimizer's state.

        Args:
            interval: one of `intervals`.
        """
        if not self.lan_depends:
            return self
        pattern = self.work.pattern
        every = max(1.0, pattern.timing(interval).every)
        in_between = math.ceil(every / self.state_every - _EPS) - 1
        alone, several = (pattern.sends + in_between) / every, pattern.sends / every
        if len(self.sites) == 1:
            alone = 1 / self.state_every
        sites = [_at(site, min(1.0, alone), min(1.0, several)) for site in self.sites]
        return replace(self, sites=sites, intervals=(interval,))

    def fleets(self, bracket: Bracket = UNCHANGING, most_nodes: int = 20_000) -> list[RegionFleet]:
        """Return the fleets of the regions, at the prices of a bracket.

        Args:
            bracket: hours of the machines.
            most_nodes: maximum nodes of a region's search tree.

        Raises:
            PlanInfeasibleError: a region has data but no available machines.
        """
        found = []
        for site in self.sites:
            together = site.gang or 1
            offers = [
                Offer(
                    each.type,
                    each.market,
                    bracket.usd_per_h(each.usd) * together,
                    each.rows_per_s * together,
                    each.cap // together,
                    each.lan_s,
                    each.max_rows * together,
                    each.lost_fraction,
                    each.alone_lan_s,
                )
                for each in site.rentals
            ]
            rows = self.work.region_rows(site.name)
            fleet = RegionFleet(
                site.name,
                offers,
                rows,
                site.fixed_s,
                site.one_is_free,
                most_nodes,
                gang=site.gang,
            )
            if fleet.is_empty:
                raise _nothing_to_rent(site, rows)
            found.append(fleet)
        return found

    def options(self, bracket: Bracket = UNCHANGING) -> list[Option]:
        """Return the exchange options within the loss budget, at the prices of a bracket.

        Raises:
            PlanInfeasibleError: no option is within the loss budget.
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
        """Return the expected relative loss of an exchange option."""
        if len(self.sites) == 1:
            return 0.0
        return self.loss.loss(interval, codec, trains_on=self.work.pattern.trains_on)

    def _all_lose(self, least: float) -> PlanInfeasibleError:
        budget = f"loss_budget {self.loss_budget:.1%}"
        if math.isinf(least):
            return PlanInfeasibleError(
                f"{budget}: with every allowed interval and codec, training diverged when "
                "the loss was measured",
                fix="Allow shorter intervals and larger codecs, or lower the learning rate and "
                "measure again.",
            )
        how = "as measured, noise included" if self.loss.is_measured else "by the assumed table"
        more = ", or measure with more --seeds and --steps" if self.loss.is_measured else ""
        return PlanInfeasibleError(
            f"{budget}: the best allowed interval and codec are expected to lose "
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
        # an unmeasured exchange is assumed to be as slow as the slowest measured one
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


def _at(site: Site, alone: float, several: float) -> Site:
    """Return a site with the LAN time of a step, if its workers make the optimizer's steps.

    Args:
        site: the site.
        alone: how often the only worker sends parameters and optimizer, per step.
        several: how often several workers send parameters, per step.
    """
    rentals = []
    for rental in site.rentals:
        sent_s, alone_s = rental.lan_s, None
        if site.own_steps == "always":
            sent_s *= several
        if site.own_steps != "never" and rental.workers == 1:
            copies = _PARAMETER_COPIES + site.optimizer_copies
            alone_s = rental.lan_s * alone * copies / _PARAMETER_COPIES
        rentals.append(replace(rental, lan_s=sent_s, alone_lan_s=alone_s))
    return replace(site, rentals=rentals, own_steps="never")


def _nothing_to_rent(site: Site, rows: int) -> PlanInfeasibleError:
    whys = dict.fromkeys(f"{r.type}: {r.left_out}" for r in site.rentals if r.left_out)
    if whys and site.gang:
        return PlanInfeasibleError(
            f"region '{site.name}': no machines for its group: {'; '.join(whys)}",
            fix=f"Add machines with enough accelerators and memory to plan.regions.{site.name}, or "
            "raise a cap.",
        )
    if whys:
        return PlanInfeasibleError(
            f"region '{site.name}' has data, but no machine with enough memory: {'; '.join(whys)}",
            fix=f"Add larger machines to plan.regions.{site.name}, a separate machine for the "
            "parameter server, or use an optimizer with less state.",
        )
    if any(rental.cap for rental in site.rentals):
        return PlanInfeasibleError(
            f"region '{site.name}' has {rows} rows of a step, but its machines have memory for "
            f"{sum(r.cap * r.max_rows for r in site.rentals)}",
            fix="Lower data.batch_size, raise a cap of its machines, or add larger ones.",
        )
    return PlanInfeasibleError(
        f"region '{site.name}' has data but no available machines",
        fix="Raise a cap of its machines, or allow another market.",
    )
