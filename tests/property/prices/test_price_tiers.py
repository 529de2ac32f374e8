"""Tiered costs never decrease, are continuous, and are additive."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geo_ray.prices.price import (
    AgeTier,
    VolumeTier,
    billed_hours,
    check_age_tiers,
    check_volume_tiers,
    volume_cost,
)

EDGES = st.lists(st.floats(0.5, 1e6), max_size=6, unique=True).map(sorted)
AMOUNTS = st.floats(1e-4, 1e3)
SIZES = st.floats(0, 2e6)
TOLERANCE = 1e-9


@st.composite
def volumes(draw: st.DrawFn) -> tuple[float, tuple[VolumeTier, ...]]:
    """A base amount and tiers; later tiers may be more expensive, or free."""
    tiers = tuple(
        VolumeTier(above=edge, amount=draw(st.one_of(st.just(0.0), AMOUNTS)))
        for edge in draw(EDGES)
    )
    return draw(AMOUNTS), tiers


@st.composite
def ages(draw: st.DrawFn) -> tuple[AgeTier, ...]:
    return tuple(AgeTier(after_h=edge, factor=draw(st.floats(0.01, 2.0))) for edge in draw(EDGES))


def near(a: float, b: float) -> bool:
    return a == pytest.approx(b, rel=1e-9, abs=1e-3)


# ------------------------------------------------------------------ volumes


@given(volumes(), SIZES, SIZES)
def test_more_never_costs_less(price: tuple[float, tuple[VolumeTier, ...]], a: float, b: float):
    low, high = sorted((a, b))
    assert volume_cost(low, *price) <= volume_cost(high, *price) * (1 + TOLERANCE)


@given(volumes(), SIZES, SIZES, SIZES)
def test_two_parts_cost_as_much_as_the_whole(
    price: tuple[float, tuple[VolumeTier, ...]], a: float, b: float, used: float
) -> None:
    parts = volume_cost(a, *price, used=used) + volume_cost(b, *price, used=used + a)
    assert near(parts, volume_cost(a + b, *price, used=used))


@given(volumes(), st.floats(1e-6, 1e-3))
def test_the_cost_does_not_jump_at_a_tier(
    price: tuple[float, tuple[VolumeTier, ...]], step: float
) -> None:
    amount, tiers = price
    dearest = max([amount, *(tier.amount for tier in tiers)])
    for tier in tiers:
        below, above = (volume_cost(tier.above + d, *price) for d in (-step, step))
        assert above - below <= dearest * 2 * step * (1 + 1e-6) + 1e-6 * dearest


@given(volumes(), SIZES, SIZES)
def test_a_cost_is_between_the_cheapest_and_the_dearest_tier(
    price: tuple[float, tuple[VolumeTier, ...]], units: float, used: float
) -> None:
    amounts = [price[0], *(tier.amount for tier in price[1])]
    cost = volume_cost(units, *price, used=used)
    slack = 1e-9 * max(amounts) * (units + used) + 1e-9
    assert min(amounts) * units - slack <= cost <= max(amounts) * units + slack


def test_nothing_costs_nothing_and_sixty_terabytes_cost_what_the_tiers_say() -> None:
    tiers = (
        VolumeTier(above=10_000, amount=0.085),
        VolumeTier(above=50_000, amount=0.07),
        VolumeTier(above=150_000, amount=0.05),
    )
    assert volume_cost(0, 0.09, tiers) == 0
    assert volume_cost(60_000, 0.09, tiers) == pytest.approx(900 + 3400 + 700)
    assert volume_cost(1, 0.09, tiers, used=1e6) == pytest.approx(0.05)


# ------------------------------------------------------------------ ages


@given(ages(), SIZES, SIZES, SIZES)
def test_longer_is_never_billed_for_fewer_hours(
    tiers: tuple[AgeTier, ...], a: float, b: float, age_h: float
) -> None:
    low, high = sorted((a, b))
    assert billed_hours(low, tiers, age_h) <= billed_hours(high, tiers, age_h) + 1e-3


@given(ages(), SIZES, SIZES, SIZES)
def test_a_stop_for_planning_changes_no_bill(
    tiers: tuple[AgeTier, ...], a: float, b: float, age_h: float
) -> None:
    parts = billed_hours(a, tiers, age_h) + billed_hours(b, tiers, age_h + a)
    assert near(parts, billed_hours(a + b, tiers, age_h))


@given(ages(), st.floats(1e-6, 1e-3))
def test_hours_do_not_jump_at_an_age(tiers: tuple[AgeTier, ...], step: float) -> None:
    for tier in tiers:
        below, above = (billed_hours(tier.after_h + d, tiers) for d in (-step, step))
        assert above - below <= 2.0 * 2 * step * (1 + 1e-6) + 1e-6


@given(ages(), SIZES, SIZES)
def test_hours_are_between_the_least_and_the_largest_factor(
    tiers: tuple[AgeTier, ...], hours: float, age_h: float
) -> None:
    factors = [1.0, *(tier.factor for tier in tiers)]
    billed = billed_hours(hours, tiers, age_h)
    slack = 1e-9 * max(factors) * (hours + age_h) + 1e-9
    assert min(factors) * hours - slack <= billed <= max(factors) * hours + slack


def test_the_published_age_tiers() -> None:
    tiers = (AgeTier(after_h=96, factor=0.5), AgeTier(after_h=360, factor=0.34))
    assert billed_hours(96, tiers) == pytest.approx(96)
    assert billed_hours(360, tiers) == pytest.approx(96 + 132)
    assert billed_hours(460, tiers) == pytest.approx(96 + 132 + 34)
    assert billed_hours(10, tiers, age_h=400) == pytest.approx(3.4)  # a new machine costs 10


# ------------------------------------------------------------------ what is refused


@given(EDGES.filter(lambda edges: len(edges) > 1), st.data())
def test_bounds_that_do_not_rise_are_refused(edges: list[float], data: st.DataObject) -> None:
    mixed = data.draw(st.permutations(edges))
    rise = all(low < high for low, high in pairwise(mixed))
    checks = (
        (check_age_tiers, [AgeTier(after_h=edge, factor=0.5) for edge in mixed]),
        (check_volume_tiers, [VolumeTier(above=edge, amount=1.0) for edge in mixed]),
    )
    for check, tiers in checks:
        if rise:
            check(tiers)  # type: ignore[operator]
        else:
            with pytest.raises(ValueError, match="bounds must rise"):
                check(tiers)  # type: ignore[operator]
