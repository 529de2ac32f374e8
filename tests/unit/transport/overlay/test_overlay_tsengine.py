"""Which regions merge with each other, and which serve which."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest

from geo_ray.transport.overlay.config import TransferOptions, TsengineOverlay
from geo_ray.transport.overlay.links import Links
from geo_ray.transport.overlay.plan import RESULT, SUM, Grid, SendOrder, full_mask
from geo_ray.transport.overlay.tsengine import Tsengine
from tests.support.overlay_support import check_round, model_of, vectors_of

SEGMENTS = 64
WHOLE = 1


def engine(
    num: int, segments: int = SEGMENTS, *, links: Links | None = None, **options: float
) -> Tsengine:
    config = TsengineOverlay.model_validate({"epsilon": 0.0} | options)
    built = Tsengine(links or Links(num), 0, Grid(segments, 1), config, seed=1)
    built.open(1)
    return built


def pairs(sends: list[SendOrder]) -> list[tuple[int, int]]:
    return [(send.src, send.dst) for send in sends]


# ------------------------------------------------------------------ sums


def test_the_two_that_are_ready_first_merge_first() -> None:
    policy = engine(5)
    assert policy.ready(1, [3], 0.0) == []
    (send,) = policy.ready(1, [3, 1], 0.0)
    assert {send.src, send.dst} == {1, 3} and send.phase == SUM
    assert send.need == 1 << send.src


def test_the_faster_direction_is_taken() -> None:
    links = Links(4)
    links.seed({(1, 2): 10.0, (2, 1): 90.0})
    (send,) = engine(4, links=links).ready(1, [1, 2], 0.0)
    assert (send.src, send.dst) == (2, 1)


def test_a_chain_grows_in_the_order_of_readiness_and_ends_at_the_root() -> None:
    policy = engine(5)
    sends = []
    ready: list[int] = []
    for node in (4, 2, 0, 3, 1):
        ready.append(node)
        sends += policy.ready(1, ready, 0.0)
    assert len(sends) == 4
    assert len({send.src for send in sends}) == 4, "everybody but the root sends once"
    for before, after in itertools.pairwise(sends):
        assert before.dst == after.src
        assert after.need == before.need | 1 << after.src
    assert sends[-1].dst == 0
    assert sends[-1].need | 1 == full_mask(5)


def test_the_last_sum_does_not_wait_for_the_root_to_be_ready() -> None:
    assert engine(3).ready(1, [2, 1], 0.0)[-1].dst == 0


def test_of_many_that_are_ready_the_best_chain_is_taken() -> None:
    links = Links(4)
    slow = {(a, b): 1.0 for a in range(4) for b in range(4) if a != b}
    links.seed(slow | {(2, 1): 50.0, (1, 3): 50.0, (3, 0): 50.0})
    assert pairs(engine(4, links=links).ready(1, [1, 2, 3], 0.0)) == [(2, 1), (1, 3), (3, 0)]


def test_whole_messages_are_summed_in_a_tree_of_pairs() -> None:
    policy = engine(8, WHOLE)
    sends = policy.ready(1, list(range(8)), 0.0)
    levels = 1
    done = list(sends)
    while sends:
        following = [more for send in sends for more in policy.sent(1, send, 0.0)]
        levels += bool(following)
        done += following
        sends = following
    assert levels == math.ceil(math.log2(8))
    assert len({send.src for send in done}) == len(done) == 7
    assert sum(send.dst == 0 for send in done) == 3


def test_rounds_and_buckets_have_queues_of_their_own() -> None:
    policy = engine(4, buckets=2)
    policy.open(2)
    assert policy.ready(1, [1], 0.0) == []
    assert policy.ready(2, [2], 0.0) == [], "a region of another round is no partner"
    sends = policy.ready(1, [1, 3], 0.0)
    assert [(send.first, send.stop) for send in sends] == [(0, 32), (32, 64)]
    assert all({send.src, send.dst} == {1, 3} for send in sends)
    policy.close(1)
    assert len(policy.ready(2, [2, 1, 3], 0.0)) == 6


def test_a_restarted_round_avoids_the_broken_link() -> None:
    links = Links(3)
    links.seed({(1, 2): 50.0, (2, 0): 50.0, (2, 1): 10.0, (1, 0): 10.0})
    policy = engine(3, links=links)
    assert pairs(policy.ready(1, [1, 2], 0.0)) == [(1, 2), (2, 0)]
    links.break_link(2, 0)
    assert pairs(policy.restart(1, [1, 2], 0.0)) == [(2, 1), (1, 0)]


# ------------------------------------------------------------------ results


def test_every_region_is_served_exactly_once() -> None:
    policy = engine(9)
    sends = policy.summed(1, 0.0)
    assert Counter(send.dst for send in sends) == Counter(range(1, 9))
    assert all(send.phase == RESULT for send in sends)


def test_with_segments_the_result_goes_along_the_fastest_chain() -> None:
    links = Links(4)
    slow = {(a, b): 1.0 for a in range(4) for b in range(4) if a != b}
    links.seed(slow | {(0, 3): 40.0, (3, 1): 40.0, (1, 2): 40.0})
    assert pairs(engine(4, links=links).summed(1, 0.0)) == [(0, 3), (3, 1), (1, 2)]


def test_a_region_with_bad_links_is_left_for_one_that_is_free_later() -> None:
    links = Links(4)
    links.seed({(a, b): 40.0 for a in range(4) for b in range(4) if a != b})
    links.seed({(1, 3): 0.1, (2, 3): 0.1})
    policy = engine(4, links=links)
    first = policy.summed(1, 0.0)
    assert 3 in {send.dst for send in first} or policy.sent(1, first[0], 0.0)
    served = {send.dst: send.src for send in [*first, *policy.sent(1, first[0], 0.0)]}
    assert served[3] == 0


@pytest.mark.parametrize("workers", [1, 2, 3, 7, 8])
def test_whole_messages_spread_in_as_few_steps_as_there_are_doublings(workers: int) -> None:
    """N / ceil(log2(N + 1)) times as fast as a star between equal regions."""
    config = TsengineOverlay(
        epsilon=0.0, probes=0, settle_s=0.0, transfer=TransferOptions(segment_bytes=12)
    )
    model = model_of(config, workers + 1, WHOLE)
    vectors = vectors_of(model)
    summed_s = 0.0

    def begin() -> bool:
        nonlocal summed_s
        summed_s = model.now_s
        return bool(model.committed)

    model.coordinator.open(1)
    for node, vector in zip(model.nodes, vectors, strict=True):
        node.contribute(1, vector, 1.0, {}, 0.0)
    model.run_until(begin)
    model.run_until(lambda: len(model.results.get(1, {})) == workers + 1)
    assert model.now_s - summed_s == pytest.approx(math.ceil(math.log2(workers + 1)), rel=1e-6)
    check_round(model.results[1], vectors)


# ------------------------------------------------------------------ exploration


@pytest.mark.parametrize("epsilon", [0.0, 1.0])
def test_without_exploration_nothing_is_random_and_with_all_of_it_everything(
    epsilon: float,
) -> None:
    policy = engine(8, epsilon=epsilon)
    for rnd in range(1, 20):
        policy.open(rnd)
        policy.ready(rnd, list(range(8)), 0.0)
        policy.summed(rnd, 0.0)
    assert policy.decisions > 100
    assert policy.explored == epsilon * policy.decisions


def test_the_share_of_random_decisions_is_epsilon() -> None:
    policy = engine(9, epsilon=0.1)
    for rnd in range(1, 400):
        policy.open(rnd)
        policy.ready(rnd, list(range(9)), 0.0)
        policy.summed(rnd, 0.0)
        policy.close(rnd)
    spread = math.sqrt(0.1 * 0.9 / policy.decisions)
    assert policy.explored / policy.decisions == pytest.approx(0.1, abs=4 * spread)


def test_the_same_seed_decides_alike() -> None:
    def run() -> list[tuple[int, int]]:
        policy = engine(8, epsilon=0.5)
        return pairs(policy.ready(1, list(range(8)), 0.0) + policy.summed(1, 0.0))

    assert run() == run()


def test_a_choice_of_one_is_no_decision() -> None:
    policy = engine(2, epsilon=1.0)
    policy.ready(1, [0, 1], 0.0)
    policy.summed(1, 0.0)
    assert policy.decisions == 0
