from __future__ import annotations

from collections.abc import Callable

import pytest

from geo_ray.base.errors import ConfigError
from geo_ray.strategies.coded_shuffle import (
    Multicast,
    ShuffleTraffic,
    decode,
    encode,
    keep,
    plan,
    traffic,
)

PAIR = Multicast(((0, 1), (1, 0)))


def test_two_workers_that_have_each_others_block_share_a_message() -> None:
    assert plan([{0}, {1}], [{1}, {0}]) == [PAIR]
    message = encode(PAIR, {0: b"\x0f\x0f", 1: b"\xff\x00"})
    assert message == b"\xf0\x0f"
    assert decode(PAIR, 0, message, {0: b"\x0f\x0f"}, 2) == b"\xff\x00"
    assert decode(PAIR, 1, message, {1: b"\xff\x00"}, 2) == b"\x0f\x0f"


def test_everybody_who_has_the_others_blocks_is_in_one_group() -> None:
    caches = [{1, 2, 3}, {0, 2, 3}, {0, 1, 3}, {0, 1, 2}]
    (group,) = plan(caches, [{0}, {1}, {2}, {3}])
    assert (group.workers, group.blocks) == ((0, 1, 2, 3), (0, 1, 2, 3))


def test_without_caches_nothing_is_coded() -> None:
    groups = plan([set(), set()], [{0, 1}, {2}])
    assert sorted(group.wants for group in groups) == [((0, 0),), ((0, 1),), ((1, 2),)]


def test_one_side_alone_is_not_enough() -> None:
    """Worker 1 has what worker 0 needs, but not the other way round."""
    assert len(plan([set(), {1}], [{1}, {0}])) == 2


def test_a_block_that_several_need_is_sent_once() -> None:
    (group,) = plan([set(), set(), set()], [{7}, {7}, {7}])
    assert (group.workers, group.blocks) == ((0, 1, 2), (7,))
    message = encode(group, {7: b"abc"})
    assert [decode(group, worker, message, {}, 3) for worker in range(3)] == [b"abc"] * 3


def test_a_block_for_two_shares_a_message_with_another() -> None:
    (group,) = plan([{5}, {5}, {4}], [{4}, {4}, {5}])
    assert group.wants == ((0, 4), (1, 4), (2, 5))
    blocks = {4: b"four", 5: b"five"}
    message = encode(group, blocks)
    assert decode(group, 0, message, {5: b"five"}, 4) == b"four"
    assert decode(group, 2, message, {4: b"four"}, 4) == b"five"


def test_all_of_a_group_have_each_others_blocks() -> None:
    """On a circle of four, each has what its neighbours need, but nobody what is opposite."""
    groups = plan([{1, 3}, {0, 2}, {1, 3}, {0, 2}], [{0}, {1}, {2}, {3}])
    assert sorted(len(group.workers) for group in groups) == [2, 2]
    assert all(sum(group.workers) % 2 for group in groups)  # an even one with an odd one


def test_where_many_want_the_same_it_is_sent_plainly() -> None:
    """Coding by twos and threes would take four messages for three blocks."""
    wanted = {0, 1, 2}
    groups = plan([{0}, {1}, set(), {2}], [wanted, wanted, {1, 2}, wanted])
    assert [group.blocks for group in groups] == [(0,), (1,), (2,)]
    assert [group.workers for group in groups] == [(1, 3), (0, 2, 3), (0, 1, 2)]


def test_what_is_cached_is_not_sent() -> None:
    assert plan([{0, 1}, {2}], [{0, 1}, {2}]) == []


def test_the_order_of_sets_changes_nothing() -> None:
    caches, needs = [[3, 1, 2], [9, 4]], [[9, 4, 8], [2, 3]]
    turned = [held[::-1] for held in caches], [needed[::-1] for needed in needs]
    assert plan(caches, needs) == plan(*turned)
    assert len(plan(caches, needs)) == 3


def test_lengths_may_differ() -> None:
    blocks = {0: b"long block", 1: b"x"}
    message = encode(PAIR, blocks)
    assert len(message) == 10
    assert decode(PAIR, 0, message, {0: blocks[0]}, 1) == b"x"
    assert decode(PAIR, 1, message, {1: blocks[1]}, 10) == b"long block"
    assert traffic([PAIR], {0: 10, 1: 1}) == ShuffleTraffic(11, 11, 10, 20)


def test_empty_blocks_are_blocks() -> None:
    assert encode(PAIR, {0: b"", 1: b""}) == b""
    assert decode(PAIR, 0, b"", {0: b""}, 0) == b""


def test_bytes_are_counted_with_and_without_coding() -> None:
    groups = [PAIR, Multicast(((0, 7), (2, 7))), Multicast(((1, 9),))]
    counts = traffic(groups, {0: 10, 1: 10, 7: 10, 9: 10})
    assert counts == ShuffleTraffic(
        unicast_bytes=50, multicast_bytes=40, coded_bytes=30, coded_unicast_bytes=50
    )
    assert traffic([], {}) == ShuffleTraffic(0, 0, 0, 0)


def test_the_epochs_blocks_are_kept_and_older_ones_drawn() -> None:
    kept = keep(range(20), [50, 51], capacity=8, seed=0)
    assert {50, 51} < kept
    assert len(kept) == 8
    assert kept - {50, 51} <= set(range(20))
    assert keep(range(20), [50, 51], capacity=8, seed=0) == kept
    assert any(keep(range(20), [50, 51], capacity=8, seed=seed) != kept for seed in range(1, 5))
    assert keep({1}, {2}, capacity=9, seed=0) == {1, 2}
    assert keep({1, 2}, {2}, capacity=1, seed=0) == {2}


@pytest.mark.parametrize(
    "call",
    [
        lambda: plan([{0}], [{1}, {2}]),
        lambda: plan([{-1}], [{1}]),
        lambda: plan([{1}], [{-1}]),
        lambda: encode(PAIR, {0: b"a"}),
        lambda: decode(PAIR, 2, b"a", {0: b"a"}, 1),
        lambda: decode(PAIR, 0, b"a", {}, 1),
        lambda: decode(PAIR, 0, b"ab", {0: b"a"}, 1),
        lambda: decode(PAIR, 0, b"a", {0: b"a"}, 2),
        lambda: decode(PAIR, 0, b"a", {0: b"a"}, -1),
        lambda: traffic([PAIR], {0: 1}),
        lambda: keep([], [1, 2], capacity=1, seed=0),
        lambda: keep([], [1], capacity=1, seed=-1),
    ],
)
def test_what_does_not_fit_is_refused(call: Callable[[], object]) -> None:
    with pytest.raises(ConfigError):
        call()
