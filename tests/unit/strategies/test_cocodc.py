"""What `cocodc` adds to `diloco_streaming`: which fragment is next, and the correction of steps."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from geo_ray.strategies.cocodc import CoCoDC, corrected
from geo_ray.strategies.diloco_streaming import DiLoCoStreaming
from geo_ray.strategies.outer import OuterSgd
from geo_ray.strategies.state import AveragerState, Update
from geo_ray.testing.strategies import Fleet, gradients

FRAGMENTS = 3


def sent(strategy: CoCoDC, norms: list[list[float]]) -> list[int]:
    """The fragments that regions are asked for, if their changes are as long as these."""
    averager, fragment, found = AveragerState(("a", "b")), 0, []
    for lengths in norms:
        found.append(fragment)
        payload_P = torch.tensor([lengths[fragment], 0.0])
        for region in "ab":
            update = Update(region, payload_P, 4, fragment=fragment)
            replies = strategy.on_update(averager, update)
        assert {reply.next_fragment for reply in replies} == {replies[0].next_fragment}
        fragment = replies[0].next_fragment
    return found


def strategy_of(exchanges: int) -> CoCoDC:
    interval = 8 * exchanges
    made = CoCoDC(
        interval=interval,
        fragments=FRAGMENTS,
        tau=1,
        utilization=exchanges / interval,
        outer=OuterSgd(),
    )
    assert made.exchanges == exchanges
    return made


@given(
    st.integers(FRAGMENTS, 9),
    st.lists(st.lists(st.floats(0, 10), min_size=3, max_size=3), min_size=1, max_size=40),
)
def test_no_fragment_waits_much_longer_than_an_interval(
    exchanges: int, norms: list[list[float]]
) -> None:
    order = sent(strategy_of(exchanges), norms)
    assert order[:FRAGMENTS] == list(range(FRAGMENTS))[: len(order)]
    for fragment in range(FRAGMENTS):
        places = [place for place, one in enumerate(order) if one == fragment]
        gaps = [later - place for place, later in pairwise(places)]
        assert all(gap < exchanges + FRAGMENTS for gap in gaps)


def test_the_fragment_that_changes_fastest_is_sent_most_often() -> None:
    order = sent(strategy_of(9), [[1.0, 5.0, 0.1]] * 90)
    counts = [order.count(fragment) for fragment in range(FRAGMENTS)]
    assert counts[1] > 60 and counts[0] >= counts[2] >= 9


def test_without_additional_exchanges_fragments_go_in_turn() -> None:
    order = sent(strategy_of(FRAGMENTS), [[1.0, 9.0, 0.0]] * 12)
    assert order == [0, 1, 2] * 4
    assert strategy_of(FRAGMENTS).traits.exchange.in_turn
    assert not strategy_of(FRAGMENTS + 1).traits.exchange.in_turn


def test_uncorrected_and_in_turn_it_is_diloco_streaming() -> None:
    plain = DiLoCoStreaming(interval=6, fragments=2, tau=1, merge="correct")
    same = CoCoDC(interval=6, fragments=2, tau=1, utilization=0.0, compensation=0.0)
    ends = []
    for strategy in (plain, same):
        fleet = Fleet(strategy).run(gradients(20), range(20))
        ends.append([region.params_P.clone() for region in fleet.regions.values()])
        fleet.finish()
        ends[-1].append(fleet.regions["a"].params_P)
    for one_P, other_P in zip(*ends, strict=True):
        assert torch.equal(one_P, other_P)


def test_the_number_of_exchanges_fills_the_link() -> None:
    assert CoCoDC().exchanges == math.floor(0.4 * 32 / 2) == 6
    assert CoCoDC(tau=5, interval=100).exchanges == 8
    assert CoCoDC(tau=5, interval=32).exchanges == 4  # each fragment once
    with pytest.raises(ValidationError, match="below interval / 4 exchanges"):
        CoCoDC(interval=8, tau=2)


def test_the_correction_does_not_depend_on_the_size_of_steps() -> None:
    generator = torch.Generator().manual_seed(1)
    steps_S = torch.randn(500, generator=generator)
    moved_S = torch.ones(500)
    first_S = corrected(steps_S.clone(), moved_S, 0.05)
    assert torch.allclose(corrected(1e-4 * steps_S, moved_S, 0.05), first_S, rtol=1e-4)
    assert float(first_S.mean()) == pytest.approx(0.05, rel=1e-4)
    wanted_S = 0.05 * steps_S.double() ** 2 / (steps_S.double() ** 2).mean()
    assert torch.allclose(first_S.double(), wanted_S, rtol=1e-5)
    assert float(corrected(steps_S.clone(), moved_S, 1e9).max()) == 1.0  # never beyond
    assert not corrected(torch.zeros(3), torch.ones(3), 0.5).any()
