"""Actual cost of a run at the prices of a plan, compared with the plan.

Limits on money and time are in `planner/policies.py`; `planner/search.py` searches within them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Final

from geo_ray.planner.plan import Plan
from geo_ray.telemetry.summary import TOTAL, Cost, CostRow
from geo_ray.telemetry.totals import Link, RunTotals

MACHINES: Final = "machines"
FIXED: Final = "servers and disks"
EGRESS: Final = "egress"
_HOUR_S: Final = 3600.0


@dataclass(frozen=True, slots=True)
class Bill:
    """Prices of a plan.

    Attributes:
        machines_usd_per_h: of all machines.
        fixed_usd_per_h: of servers and disks.
        usd_per_gb: egress by source and destination.
    """

    machines_usd_per_h: float
    fixed_usd_per_h: float
    usd_per_gb: Mapping[str, Mapping[str, float]]

    @classmethod
    def of(cls, plan: Plan) -> Bill:
        """Return the prices of a plan."""
        return cls(plan.usd_per_h, plan.fixed_usd_per_h, plan.usd_per_gb)

    def unpriced(self, sent_bytes: Mapping[tuple[str, str], float]) -> list[tuple[str, str]]:
        """Return the pairs with traffic but without a price, in order."""
        return sorted(
            (src, dst)
            for (src, dst), count in sent_bytes.items()
            if count and dst not in self.usd_per_gb.get(src, {})
        )

    def usd(self, seconds: float, sent_bytes: Mapping[tuple[str, str], float]) -> dict[str, float]:
        """Return dollars by term.

        Args:
            seconds: seconds from the launch of the machines to their end.
            sent_bytes: bytes by (source, destination); traffic without a price is free only inside
                a region, so the plan must know all other pairs.

        Raises:
            KeyError: the plan has no price for a pair with traffic.
        """
        hours = seconds / _HOUR_S
        egress = sum(
            count * 1e-9 * self.usd_per_gb[src][dst]
            for (src, dst), count in sent_bytes.items()
            if count
        )
        return {
            MACHINES: hours * self.machines_usd_per_h,
            FIXED: hours * self.fixed_usd_per_h,
            EGRESS: egress,
        }


START: Final = "start"
COMPUTE: Final = "compute"
BETWEEN: Final = "between regions"
REST: Final = "the rest"

_TIME_TERM: Final = {
    "start": START,
    "compute": COMPUTE,
    "between regions": BETWEEN,
    "last exchange": BETWEEN,
}
_TIME: Final = (START, COMPUTE, BETWEEN, REST)
_MONEY: Final = (MACHINES, FIXED, EGRESS)


@dataclass(frozen=True, slots=True)
class Spent:
    """The time and traffic of a run.

    Attributes:
        start_s: seconds until the first step; None: no start, as in a simulation.
        run_s: seconds from then to the end.
        compute_s: seconds of these in which the slowest region computed.
        blocked_s: seconds of these in which exchanges blocked the same region.
        sent_bytes: bytes on the wire, by (source, destination).
        stop_cause: why it ended early; None: it did not.
    """

    start_s: float | None
    run_s: float
    compute_s: float
    blocked_s: float
    sent_bytes: Mapping[Link, float]
    stop_cause: str | None = None

    @classmethod
    def of(cls, totals: RunTotals) -> Spent:
        """Return the totals of a run's events."""
        slowest = max(totals.regions.values(), key=attrgetter("compute_s"), default=None)
        joined_s = 0.0 if totals.startup_s is None else totals.joined_s
        return cls(
            None if totals.startup_s is None else totals.startup_s + joined_s,
            totals.elapsed_s - joined_s,
            0.0 if slowest is None else slowest.compute_s,
            0.0 if slowest is None else slowest.blocked_s,
            totals.wan.by_link(),
            totals.stop_cause,
        )


def compare_cost(plan: Plan, spent: Spent) -> Cost:
    """Return estimated and actual terms; money at the plan's prices.

    Traffic without a price makes the egress, and hence the total, unknown.
    """
    notes = []
    wanted_s = _gathered(plan.seconds, {**dict.fromkeys(plan.seconds, REST), **_TIME_TERM}, _TIME)
    start_s = spent.start_s
    if start_s is None:
        start_s = wanted_s[START]
        notes.append("there was no start: the estimate is used")
    if plan.from_step:
        notes.append(
            f"the run was replanned at step {plan.from_step}: its figures cover the rest, those "
            "of the run cover the whole, at the plan's prices"
        )
    if spent.stop_cause is not None:
        notes.append(f"the run was stopped, but the plan covers the whole job: {spent.stop_cause}")
    # Asynchronous workers compute in parallel, so the sum may exceed the run's seconds.
    compute_s = min(spent.compute_s, spent.run_s)
    found_s = {
        START: start_s,
        COMPUTE: compute_s,
        BETWEEN: spent.blocked_s,
        REST: max(0.0, spent.run_s - compute_s - spent.blocked_s),
    }
    total_s = start_s + spent.run_s
    rows = [
        CostRow(term=term, unit="s", estimated=wanted_s[term], actual=found_s[term])
        for term in _TIME
    ]
    rows.append(CostRow(term=TOTAL, unit="s", estimated=plan.total_s, actual=total_s))
    paid, unpriced = _paid(Bill.of(plan), total_s, spent.sent_bytes)
    if unpriced:
        pairs = ", ".join(f"{src} to {dst}" for src, dst in unpriced)
        notes.append(f"the plan has no price for traffic from {pairs}: egress is unknown")
    wanted_usd = _gathered(plan.usd, {name: _money_term(name) for name in plan.usd}, _MONEY)
    rows += [
        CostRow(term=term, unit="USD", estimated=wanted_usd[term], actual=paid[term])
        for term in _MONEY
    ]
    known = [value for value in paid.values() if value is not None]
    total_usd = sum(known) if len(known) == len(paid) else None
    rows.append(CostRow(term=TOTAL, unit="USD", estimated=plan.total_usd, actual=total_usd))
    return Cost(rows=tuple(rows), notes=tuple(notes))


def _gathered(
    values: Mapping[str, float], term_of: Mapping[str, str], terms: tuple[str, ...]
) -> dict[str, float]:
    found = dict.fromkeys(terms, 0.0)
    for name, value in values.items():
        found[term_of[name]] += value
    return found


def _money_term(name: str) -> str:
    # All other costs are those of machines, including work lost to preemptions.
    return name if name in (FIXED, EGRESS) else MACHINES


def _paid(
    bill: Bill, seconds: float, sent_bytes: Mapping[Link, float]
) -> tuple[dict[str, float | None], list[Link]]:
    """Return dollars by term (None: unknown) and the pairs without a price."""
    unpriced = bill.unpriced(sent_bytes)
    paid: dict[str, float | None] = {**bill.usd(seconds, {} if unpriced else sent_bytes)}
    if unpriced:
        paid[EGRESS] = None
    return paid, unpriced
