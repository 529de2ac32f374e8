"""Packing places all counted bundles, compared with exhaustive search."""

from __future__ import annotations

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from geo_ray.cloud.autoscaler.observation import (
    LabelWanted,
    PendingBundle,
    PendingGroup,
    PlacementStrategy,
)
from geo_ray.cloud.autoscaler.packing import CapacityOffer, MachineCapacity, pack
from geo_ray.cloud.autoscaler.target import REGION_LABEL

HERE = {REGION_LABEL: "us"}
ALTERNATIVES = st.sampled_from(["independent", "PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"])
AMOUNTS = st.tuples(st.integers(1, 9), st.integers(0, 2))
GROUPS = st.lists(st.tuples(ALTERNATIVES, st.lists(AMOUNTS, min_size=1, max_size=3)), max_size=3)
MACHINES = st.lists(st.tuples(st.integers(1, 8), st.integers(0, 2)), max_size=2)
OFFERS = st.lists(
    st.tuples(st.integers(1, 8), st.integers(0, 2), st.integers(1, 9), st.integers(0, 3)),
    max_size=3,
)

Amounts = tuple[int, int]


def group(strategy: PlacementStrategy, bundles: list[Amounts]) -> PendingGroup:
    labels = (LabelWanted(REGION_LABEL, ("us",)),)
    made = [PendingBundle({"CPU": float(c), "GPU": float(g)}, labels) for c, g in bundles]
    return PendingGroup(tuple(made), strategy)


def has_places(
    groups: list[tuple[PlacementStrategy, list[Amounts]]], machines: list[Amounts]
) -> bool:
    """Whether all bundles can be placed, by exhaustive search."""
    wanted = [(n, strategy, each) for n, (strategy, all_) in enumerate(groups) for each in all_]
    for places in product(range(len(machines)), repeat=len(wanted)):
        used = [[0, 0] for _ in machines]
        lies: dict[int, list[int]] = {}
        for (number, _, (cpus, gpus)), place in zip(wanted, places, strict=True):
            used[place][0] += cpus
            used[place][1] += gpus
            lies.setdefault(number, []).append(place)
        fits = all(u[0] <= m[0] and u[1] <= m[1] for u, m in zip(used, machines, strict=True))
        together = all(
            len(set(lies[number])) == 1
            for number, strategy, _ in wanted
            if strategy == "STRICT_PACK"
        )
        apart = all(
            len(set(lies[number])) == len(lies[number])
            for number, strategy, _ in wanted
            if strategy == "STRICT_SPREAD"
        )
        if fits and together and apart:
            return True
    return not wanted


@settings(max_examples=300, deadline=None)
@given(GROUPS, MACHINES, OFFERS)
def test_what_is_not_missed_has_places_on_what_is_there_and_rented(
    drawn: list[tuple[PlacementStrategy, list[Amounts]]],
    at_hand: list[Amounts],
    for_sale: list[tuple[int, int, int, int]],
) -> None:
    capacities = [
        MachineCapacity(f"hand {n}", "us", HERE, {"CPU": float(c), "GPU": float(g)})
        for n, (c, g) in enumerate(at_hand)
    ]
    offers = [
        CapacityOffer(
            MachineCapacity(f"{n}", "us", HERE, {"CPU": float(c), "GPU": float(g)}),
            float(usd),
            most,
        )
        for n, (c, g, usd, most) in enumerate(for_sale)
    ]
    groups = [group(strategy, bundles) for strategy, bundles in drawn]
    found = pack(groups, capacities, offers)
    rented = [
        (cpus, gpus)
        for number, (cpus, gpus, _, _) in enumerate(for_sale)
        for _ in range(found.rented.get(f"{number}", 0))
    ]
    for number, (_, _, _, most) in enumerate(for_sale):
        assert found.rented.get(f"{number}", 0) <= most
    placed = [each for number, each in enumerate(drawn) if number not in found.missed]
    assert has_places(placed, at_hand + rented)
    # Bundles for themselves may be placed in part; else no more machines than bundles are rented.
    alone = sum(len(bundles) for strategy, bundles in drawn if strategy == "independent")
    together = sum(len(bundles) for strategy, bundles in placed if strategy != "independent")
    assert len(rented) <= alone + together
    if not drawn:
        assert not rented


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 8), min_size=1, max_size=6))
def test_first_fit_decreasing_is_near_the_least_by_enumeration(cpus: list[int]) -> None:
    """The known bound of first fit decreasing: 11/9 of the optimum plus 6/9."""
    offer = CapacityOffer(MachineCapacity("small", "us", HERE, {"CPU": 8.0}), 1.0, 99)
    found = pack([group("PACK", [(each, 0) for each in cpus])], (), [offer]).rented["small"]
    drawn: list[tuple[PlacementStrategy, list[Amounts]]] = [("PACK", [(each, 0) for each in cpus])]
    least = next(n for n in range(1, 7) if has_places(drawn, [(8, 0)] * n))
    assert least <= found <= 11 / 9 * least + 6 / 9
