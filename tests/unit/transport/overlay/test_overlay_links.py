"""What is known of links: goodput, age, inference from flows that shared a line."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geo_ray.transport.overlay.links import UNKNOWN_MBPS, LinkFlow, Links


def flow(src: int, dst: int, mbps: float, mbit: float = 10.0, *, starved: bool = False) -> LinkFlow:
    return LinkFlow(src, dst, mbit, mbit / mbps, starved)


def test_goodput_is_bits_over_seconds_and_adds_up() -> None:
    both = LinkFlow(0, 1, 30.0, 2.0) + LinkFlow(0, 1, 10.0, 2.0)
    assert both.mbps == 10.0


def test_nothing_is_known_at_first_and_all_links_are_alike() -> None:
    links = Links(3)
    assert not links.is_known(0, 1)
    assert (links.matrix() == UNKNOWN_MBPS).all()


def test_a_single_flow_is_smoothed_with_earlier_measurements() -> None:
    links = Links(3, smoothing=0.25)
    links.note([flow(0, 1, 40.0)])
    assert links.mbps(0, 1) == pytest.approx(40.0)
    links.note([flow(0, 1, 80.0)])
    assert links.mbps(0, 1) == pytest.approx(50.0)
    assert not links.is_known(1, 0)


def test_unknown_rates_count_as_the_median() -> None:
    links = Links(4)
    links.seed({(0, 1): 10.0, (1, 2): 30.0, (2, 3): 90.0})
    assert links.mbps(3, 0) == 30.0


def test_measurements_are_forgotten_after_so_many_rounds() -> None:
    links = Links(3, forget_rounds=5)
    links.note([flow(0, 1, 40.0)])
    for rnd in range(1, 6):
        links.advance(rnd)
        assert links.is_known(0, 1), rnd
    links.advance(6)
    assert not links.is_known(0, 1)


def test_a_new_measurement_makes_a_link_young_again() -> None:
    links = Links(3, forget_rounds=5)
    links.note([flow(0, 1, 40.0)])
    links.advance(5)
    assert links.age(0, 1) == 5
    links.note([flow(0, 1, 40.0)])
    links.advance(10)
    assert links.is_known(0, 1)


def test_flows_that_share_a_line_are_taken_for_as_fast_as_all_together() -> None:
    links = Links(4)
    links.note([flow(0, 1, 10.0), flow(0, 2, 10.0), flow(0, 3, 10.0)])
    assert links.mbps(0, 2) == pytest.approx(30.0)
    assert links.up_mbps()[0] == pytest.approx(30.0)


def test_a_flow_slower_than_its_neighbours_shows_its_own_link() -> None:
    links = Links(4)
    links.note([flow(0, 1, 12.0), flow(0, 2, 12.0), flow(0, 3, 2.0)])
    assert links.mbps(0, 3) == pytest.approx(2.0)
    assert links.mbps(0, 1) == pytest.approx(26.0)


def test_flows_into_one_region_share_its_line() -> None:
    links = Links(4)
    links.note([flow(1, 0, 5.0), flow(2, 0, 5.0)])
    assert links.mbps(1, 0) == pytest.approx(10.0)
    assert links.down_mbps()[0] == pytest.approx(10.0)


def test_flows_one_after_the_other_share_nothing() -> None:
    links = Links(4)
    links.note([LinkFlow(1, 0, 10.0, 1.0, ended_s=1.0), LinkFlow(2, 0, 10.0, 1.0, ended_s=2.0)])
    assert links.mbps(1, 0) == links.mbps(2, 0) == 10.0


def test_a_shared_flow_does_not_make_a_fast_link_slow() -> None:
    links = Links(4)
    links.note([flow(0, 1, 28.0)])
    links.note([flow(0, 1, 10.0), flow(0, 2, 10.0), flow(0, 3, 10.0)])
    assert links.mbps(0, 1) == pytest.approx(28.0)


def test_a_trickle_beside_a_flow_leaves_it_as_good_as_alone() -> None:
    links = Links(4, smoothing=1.0)
    links.note([flow(0, 1, 20.0, 100.0), flow(0, 2, 5.0, 1.0)])
    assert links.mbps(0, 1) == pytest.approx(20.0)


def test_a_starved_flow_is_a_lower_bound_of_the_link() -> None:
    links = Links(4)
    links.seed({(0, 1): 40.0, (1, 2): 40.0})
    links.note([flow(0, 1, 10.0, starved=True)])
    assert links.mbps(0, 1) == pytest.approx(40.0)
    links.note([flow(0, 1, 50.0, starved=True)])
    assert links.mbps(0, 1) == pytest.approx(50.0)
    links.note([flow(2, 3, 10.0, starved=True)])
    assert not links.is_known(2, 3)


def test_a_broken_link_is_avoided_both_ways_for_some_rounds() -> None:
    links = Links(3, forget_rounds=2)
    links.note([flow(0, 1, 40.0), flow(1, 2, 10.0)])
    links.break_link(0, 1)
    assert links.is_broken(1, 0)
    assert links.matrix()[0, 1] < links.matrix()[1, 2]
    links.advance(3)
    assert not links.is_broken(0, 1)


def test_lines_are_at_least_as_fast_as_their_fastest_link() -> None:
    links = Links(3)
    links.seed({(0, 1): 25.0, (2, 1): 60.0})
    np.testing.assert_allclose(links.up_mbps(), [25.0, 60.0, 60.0])
    assert links.down_mbps()[1] == 60.0


def test_avoided_links_are_tried_again_without_an_alternative() -> None:
    links = Links(3)
    links.break_link(0, 1)
    links.break_link(1, 2)
    assert not links.is_broken(0, 1), "or region 1 could not be reached"
    assert links.is_broken(2, 1)
    links.break_link(0, 2)
    assert not links.is_broken(1, 2)
    assert links.is_broken(2, 0)


def test_no_route_to_a_region_that_is_down_is_sought() -> None:
    links = Links(3)
    links.down.add(1)
    links.break_link(0, 1)
    links.break_link(1, 2)
    assert links.is_broken(0, 1)
    assert links.is_broken(1, 2)


def test_the_only_link_of_two_regions_is_avoided_all_the_same() -> None:
    links = Links(2)
    links.break_link(0, 1)
    assert links.is_broken(1, 0)


@settings(deadline=None)
@given(st.integers(2, 7), st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=40))
def test_there_is_always_a_way_round_the_newest_of_three_or_more(
    num: int, pairs: list[tuple[int, int]]
) -> None:
    links = Links(num)
    for a, b in pairs:
        if a == b or max(a, b) >= num:
            continue
        links.break_link(a, b)
        assert links.is_broken(a, b)
        assert num == 2 or reached_from_0(links) == set(range(num))


def reached_from_0(links: Links) -> set[int]:
    """Return the regions that region 0 reaches, by an independent search."""
    reached = {0}
    for _ in range(links.num_regions):
        reached |= {
            b
            for a in reached
            for b in range(links.num_regions)
            if a != b and not links.is_broken(a, b)
        }
    return reached
