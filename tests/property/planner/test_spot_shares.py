"""All spot machines lose the same fraction of their time, whatever is configured."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geo_ray.base.errors import InvariantError
from geo_ray.base.load import load_tree
from geo_ray.experiment.experiment import Experiment
from geo_ray.planner.config import SpotConfig
from geo_ray.planner.fleet import Offer, RegionFleet
from geo_ray.planner.plan import Machines, RegionPlan
from geo_ray.planner.search import RentalPool
from geo_ray.prices.price_book import bundled_book
from geo_ray.runs.plan_inputs import ModelSize, section_of, site_of
from geo_ray.runs.replanning import with_running

EXPERIMENT = load_tree(Path(__file__).parents[3] / "configs" / "planned.yaml", [], Experiment)
BOOK = bundled_book()
MARKETS = st.sampled_from([("on_demand",), ("spot",), ("on_demand", "spot")])


@given(
    st.floats(0, 1e6),
    st.floats(0, 1e6),
    st.lists(MARKETS, min_size=3, max_size=3),
    st.integers(0, 5),
    st.booleans(),
)
def test_one_section_gives_one_share(
    preemptions_per_h: float, lost_s: float, markets: list, cap: int, synchronous: bool
) -> None:
    plan = section_of(EXPERIMENT)
    spot = SpotConfig(preemptions_per_h=preemptions_per_h, lost_s=lost_s)
    offers = {}
    for (name, offer), sold in zip(plan.regions.items(), markets, strict=True):
        machines = [m.model_copy(update={"markets": sold, "cap": cap}) for m in offer.machines]
        offers[name] = offer.model_copy(update={"machines": tuple(machines)})
    changed = plan.model_copy(update={"spot": spot, "regions": offers})
    experiment = EXPERIMENT.model_copy(update={"plan": changed})
    fleets = []
    for name in offers:
        site = site_of(name, experiment, BOOK, None, ModelSize(1000, None))
        kind = {"type": site.rentals[0].type, "market": site.rentals[0].market}
        runs = Machines(**kind, count=2, rows=1, rows_per_s=1.0, usd_per_h=1.0)
        site = with_running(site, RegionPlan(region=name, machines=(runs,), step_s=1.0), 5.0)
        made = [
            Offer(r.type, r.market, 1.0, 1.0, r.cap, 0.0, 9, r.lost_fraction) for r in site.rentals
        ]
        fleets.append(RegionFleet(name, made, 4))
    pool = RentalPool(fleets, synchronous)
    shares = {
        offer.lost_fraction for fleet in fleets for offer in fleet.offers if offer.lost_fraction
    }
    assert len(shares) <= 1 and (pool.most_spots == 0 or shares)


def test_unequal_fractions_are_reported() -> None:
    offers = [Offer("a", "spot", 1.0, 1.0, 3, 0.0, 9, share) for share in (0.1, 0.2)]
    with pytest.raises(InvariantError, match=r"unequal fractions: 0\.1, 0\.2"):
        RentalPool([RegionFleet("r", offers, 4)], True).stall(1)
