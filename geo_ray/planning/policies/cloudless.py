"""`cloudless`: gives every region just the power that keeps up with the slowest region.

The *load power* of a region is what its machines compute per second over its share of the data. The
region that others wait for with all that could be rented is the straggler, by load power and by
what its exchanges take, and gets all of that; every other one gets the cheapest machines that keep
up with it. Exchanges are as configured: the first averager, interval and codec of the request.

When: to see what right-sizing alone saves, or where prices of traffic are not known.

Source: Cloudless-Training's elastic scheduling, reconstructed from its abstract; exact knapsacks
in place of its search, and exchanges counted.
"""

from __future__ import annotations

from geo_ray.planning.model.predict import plan_of
from geo_ray.planning.model.work import HOUR_S
from geo_ray.planning.plan import Plan
from geo_ray.planning.request import Request
from geo_ray.planning.search.bracket import Bracket
from geo_ray.planning.search.search import Search


def cloudless(request: Request) -> Plan:
    """Right-sized to the straggler.

    Raises:
        PlanInfeasibleError: a region has data and nothing to rent.
    """
    search = _at_length(request)
    whole = [fleet.everything() for fleet in search.fleets]
    option = search.options[0]
    most = search.complete(whole, option)
    rooms_s = search.ways([option]).rooms_s(most.pace_s)
    picks = [
        whole[i] if i == most.straggler else fleet.cheapest(rooms_s[i]) or whole[i]
        for i, fleet in enumerate(search.fleets)
    ]
    found = search.complete(picks, option)
    name = search.fleets[most.straggler].name
    reason = f"{name} is the straggler and gets all it has; the others just keep up with it"
    return plan_of(request, found, "cloudless", 0.0, reason)


def everything(request: Request) -> Plan:
    """Return the plan with all that could be rented, which `cloudless` is compared with.

    Raises:
        PlanInfeasibleError: a region has data and nothing to rent.
    """
    search = _at_length(request)
    picks = [fleet.everything() for fleet in search.fleets]
    found = search.complete(picks, search.options[0])
    return plan_of(request, found, "everything", 0.0, "every region gets all it has")


def _at_length(request: Request) -> Search:
    """Return the search at the prices for about the job's length."""
    hours = 1.0
    for _ in range(2):
        length = Bracket.at(hours)
        search = Search(request.work, request.fleets(length), request.options(length), length)
        picks = [fleet.everything() for fleet in search.fleets]
        hours = search.complete(picks, search.options[0]).seconds / HOUR_S
    return search
