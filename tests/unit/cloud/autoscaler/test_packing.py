"""Pending demand is packed bundle by bundle, as Ray would place it."""

from __future__ import annotations

import pytest

from geo_ray.cloud.autoscaler.observation import (
    LabelWanted,
    PendingBundle,
    PendingGroup,
    PlacementStrategy,
)
from geo_ray.cloud.autoscaler.packing import (
    CapacityOffer,
    MachineCapacity,
    Packed,
    infeasible,
    pack,
)
from geo_ray.cloud.autoscaler.target import REGION_LABEL, TYPE_LABEL

HERE = LabelWanted(REGION_LABEL, ("us",))


def capacity(key: str, cpus: float, gpus: float = 0.0, region: str = "us") -> MachineCapacity:
    resources = {"CPU": cpus} | ({"GPU": gpus} if gpus else {})
    return MachineCapacity(key, region, {REGION_LABEL: region, TYPE_LABEL: key}, resources)


def offer(key: str, cpus: float, usd: float, most: int = 99, gpus: float = 0.0) -> CapacityOffer:
    return CapacityOffer(capacity(key, cpus, gpus), usd, most)


def bundles(
    *cpus: float, strategy: PlacementStrategy = "independent", labels: tuple[LabelWanted, ...] = ()
) -> PendingGroup:
    return PendingGroup(tuple(PendingBundle({"CPU": n}, (HERE, *labels)) for n in cpus), strategy)


SMALL, BIG = offer("small", 8.0, 1.0), offer("big", 16.0, 4.0)


@pytest.mark.parametrize(
    ("groups", "rented"),
    [
        ([], {}),
        ([bundles(*[1.0] * 8)], {"small": 1}),
        ([bundles(*[1.0] * 9)], {"small": 2}),
        # Two thirds of a machine each: their total is 4 machines, and they need 6.
        ([bundles(*[5.0] * 6)], {"small": 6}),
        # The small ones fill what the large ones leave.
        ([bundles(3.0, 3.0, 5.0, 5.0)], {"small": 2}),
        ([bundles(12.0)], {"big": 1}),
        ([bundles(12.0, 4.0, 8.0)], {"big": 1, "small": 1}),
        ([bundles(1.0, 1.0, 1.0, strategy="PACK")], {"small": 1}),
        ([bundles(1.0, 1.0, 1.0, strategy="SPREAD")], {"small": 1}),
        ([bundles(1.0, 1.0, 1.0, strategy="STRICT_SPREAD")], {"small": 3}),
        ([bundles(6.0, 6.0, strategy="PACK")], {"small": 2}),
        # 12 CPUs must be on one machine, and then it has to be a big one.
        ([bundles(6.0, 6.0, strategy="STRICT_PACK")], {"big": 1}),
        # Two groups whose bundles must be apart may share machines.
        ([bundles(1.0, 1.0, strategy="STRICT_SPREAD")] * 2, {"small": 2}),
    ],
)
def test_machines_are_counted_by_packing(
    groups: list[PendingGroup], rented: dict[str, int]
) -> None:
    found = pack(groups, (), (SMALL, BIG))
    assert (found.rented, found.missed) == (rented, set())


def test_the_larger_machine_is_rented_where_its_room_is_cheaper() -> None:
    cheap = offer("big", 16.0, 1.5)
    assert pack([bundles(*[2.0] * 8)], (), (SMALL, cheap)).rented == {"big": 1}
    assert pack([bundles(*[2.0] * 9)], (), (SMALL, cheap)).rented == {"big": 1, "small": 1}


def test_what_has_room_at_hand_rents_nothing() -> None:
    at_hand = (capacity("a", 8.0), capacity("b", 4.0))
    found = pack([bundles(8.0), bundles(3.0), bundles(2.0)], at_hand, (SMALL,))
    assert found.used == {0: {"a"}, 1: {"b"}}
    assert found.rented == {"small": 1}


def test_a_machine_at_hand_that_is_too_small_does_not_stand_for_one_that_is_not() -> None:
    found = pack([bundles(12.0)], (capacity("idle", 8.0),), (SMALL, BIG))
    assert (found.used, found.rented) == ({}, {"big": 1})


def test_of_what_is_placed_together_a_part_rents_nothing() -> None:
    few = offer("small", 8.0, 1.0, most=3)
    for strategy in ("PACK", "SPREAD", "STRICT_SPREAD"):
        found = pack([bundles(*[8.0] * 4, strategy=strategy)], (), (few,))  # type: ignore[arg-type]
        assert found == Packed(missed={0}), strategy
    assert pack([bundles(*[8.0] * 4)], (), (few,)).rented == {"small": 3}, "tasks come one by one"
    # The second group has to wait, and is no hindrance to the first.
    found = pack([bundles(8.0, 8.0, strategy="PACK")] * 2, (), (few,))
    assert (found.rented, found.missed) == ({"small": 2}, {1})


@pytest.mark.parametrize("strategy", ["independent", "PACK"])
def test_the_only_machine_for_one_is_not_taken_by_another_that_has_a_choice(
    strategy: PlacementStrategy,
) -> None:
    """The cheapest machine for one bundle would leave none for the other."""
    one_each = (offer("gpu", 4.0, 0.5, 1, gpus=1.0), offer("cpu", 4.0, 1.0, 1))
    wanted = ({"CPU": 4.0}, {"CPU": 1.0, "GPU": 1.0})
    group = PendingGroup(tuple(PendingBundle(each, (HERE,)) for each in wanted), strategy)
    found = pack([group], (), one_each)
    assert (found.rented, found.missed) == ({"gpu": 1, "cpu": 1}, set())


def test_labels_say_where_a_bundle_may_be() -> None:
    big = LabelWanted(TYPE_LABEL, ("big",))
    assert pack([bundles(1.0, labels=(big,))], (), (SMALL, BIG)).rented == {"big": 1}
    other = LabelWanted(TYPE_LABEL, ("small",), is_in=False)
    assert pack([bundles(1.0, labels=(other,))], (), (SMALL, BIG)).rented == {"big": 1}
    unknown = LabelWanted("disk", ("ssd",))
    assert pack([bundles(1.0, labels=(unknown,))], (), (SMALL, BIG)).rented == {"small": 1}
    elsewhere = PendingGroup((PendingBundle({"CPU": 1.0}, (LabelWanted(REGION_LABEL, ("eu",)),)),))
    assert pack([elsewhere], (), (SMALL, BIG)) == Packed(missed={0})


def test_the_first_machine_of_a_region_may_have_to_be_safe() -> None:
    spot = CapacityOffer(capacity("spot", 8.0), 0.3, 9, is_safe=False)
    found = pack([bundles(8.0, 8.0, 8.0)], (), (spot, SMALL), frozenset({"us"}))
    assert found.rented == {"small": 1, "spot": 2}
    assert pack([bundles(8.0)], (), (spot,), frozenset({"us"})).rented == {"spot": 1}


def test_a_hundred_thousand_tasks_are_counted_at_once() -> None:
    """By arithmetic instead of one by one, which would take minutes."""
    many = PendingGroup((PendingBundle({"CPU": 1.0}, (HERE,), 100_000),))
    found = pack([many], (), (offer("small", 8.0, 1.0, most=40),))
    assert (found.rented, found.missed) == ({"small": 40}, {0})


# ------------------------------------------------------------------ what could have no place


def test_infeasible_demand_is_reported_with_the_largest_machine() -> None:
    told = infeasible(bundles(64.0), (SMALL, BIG)) or ""
    assert "a bundle of 64 CPU waits in us" in told
    assert "the largest of which is big with 16 CPU" in told
    gpu = PendingGroup((PendingBundle({"CPU": 1.0, "GPU": 2.0, "memory": 8e9}, (HERE,)),))
    told = infeasible(gpu, (SMALL, BIG)) or ""
    assert "1 CPU, 2 GPU, 8 GB memory" in told


def test_strictly_packed_demand_is_reported_as_a_sum() -> None:
    assert infeasible(bundles(8.0, 8.0, strategy="STRICT_PACK"), (SMALL, BIG)) is None
    whole = PendingGroup(bundles(16.0, 16.0, strategy="STRICT_PACK").items())
    assert "a bundle of 32 CPU" in (infeasible(whole, (SMALL, BIG)) or "")


def test_a_type_that_the_region_lacks_is_reported() -> None:
    huge = LabelWanted(TYPE_LABEL, ("huge",))
    told = infeasible(bundles(1.0, labels=(huge,)), (SMALL, BIG)) or ""
    assert f"{TYPE_LABEL} in huge" in told


def test_demand_beyond_the_caps_is_reported() -> None:
    few = (offer("small", 8.0, 1.0, most=2), offer("big", 16.0, 2.5, most=1))
    assert infeasible(bundles(1.0, 1.0, 1.0, strategy="STRICT_SPREAD"), few) is None
    told = infeasible(bundles(*[1.0] * 4, strategy="STRICT_SPREAD"), few) or ""
    assert "4 bundles of up to 1 CPU, each on its own machine" in told
    assert "than the 3 that plan.regions.*.cap" in told
    assert infeasible(bundles(*[8.0] * 9), few) is None, "tasks do without each other"
