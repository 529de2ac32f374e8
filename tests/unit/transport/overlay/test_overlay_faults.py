"""Regions that die and links that are cut in the middle of a round, on a modelled network."""

from __future__ import annotations

from itertools import pairwise, permutations

import pytest

from benchmarks.network_models.overlay_model import Lines, OverlayModel, Pair
from geo_ray.base.errors import InvariantError
from geo_ray.transport.overlay.config import AnyOverlay, TsengineOverlay
from geo_ray.transport.overlay.messages import Stuck
from tests.support.overlay_support import KINDS, check_round, model_of, vectors_of

STALL_S = 2.0
SEGMENTS = 24
CHAIN = TsengineOverlay(epsilon=0.0, probes=0, settle_s=0.0)
FORWARDING = {name: KINDS[name] for name in ("binary", "rack", "tsengine", "ring", "netstorm")}


def pairs_of(region: int, num: int) -> set[Pair]:
    return {pair for n in range(num) if n != region for pair in ((n, region), (region, n))}


def cut(model: OverlayModel, pairs: set[Pair]) -> None:
    model.change(lambda lines: lines.cut.update(pairs))


def mend(model: OverlayModel, pairs: set[Pair]) -> None:
    model.change(lambda lines: lines.cut.difference_update(pairs))


def started(overlay: AnyOverlay, num: int, seed: int = 0) -> OverlayModel:
    model = model_of(overlay, num, SEGMENTS, stall_s=STALL_S, seed=seed)
    vectors = vectors_of(model)
    check_round(model.run_round(1, vectors), vectors)
    return model


def begin(model: OverlayModel, rnd: int) -> list:  # type: ignore[type-arg]
    vectors = vectors_of(model, rnd)
    model.results[rnd] = {}
    model.coordinator.open(rnd)
    for node, vector in zip(model.nodes, vectors, strict=True):
        node.contribute(rnd, vector, 1.0, {}, model.now_s)
    return vectors


def middle_of_results(model: OverlayModel, rnd: int) -> None:
    """Until some region has some of the result, and none has all of it but the hub."""
    model.run_until(lambda: len(model.committed) == rnd)
    half = SEGMENTS // 2
    model.run_until(
        lambda: any(
            n.me != 0 and sum(b - a for a, b in n._rounds[rnd].vector.missing()) <= half
            for n in model.nodes
            if rnd in n._rounds
        )
    )


@pytest.mark.parametrize("name", ["star", "binary", "rack", "tsengine"])
def test_a_receiver_that_dies_in_mid_transfer_does_not_stop_the_others(name: str) -> None:
    num = 6
    model = started(KINDS[name], num)
    vectors = begin(model, 2)
    middle_of_results(model, 2)
    lost = next(  # whoever feeds others, if anybody does
        (
            n.me
            for n in model.nodes
            if n.me != 0
            and 2 in n._rounds
            and any(o.last is None for g in n._active.values() for o in g)
        ),
        num - 1,
    )
    cut(model, pairs_of(lost, num))
    model.run_until(lambda: len(model.results[2].keys() | {lost}) == num)
    results = {me: result for me, result in model.results[2].items() if me != lost}
    check_round(results, vectors, num - 1)
    mend(model, pairs_of(lost, num))
    model.run_until(lambda: lost in model.results[2])
    check_round(model.results[2], vectors)


def test_the_promise_to_a_dead_receiver_is_withdrawn_and_its_orphans_ask_others() -> None:
    num = 5
    model = started(CHAIN, num)
    begin(model, 2)
    middle_of_results(model, 2)
    entry = model.coordinator._rounds[2]
    feeds = {src for sources in entry.sources.values() for src in sources}
    lost = next(n for n in sorted(feeds) if n != 0)
    orphan = next(n for n, sources in entry.sources.items() if sources == {lost})
    cut(model, pairs_of(lost, num))
    model.run_until(lambda: orphan in model.results[2])
    assert lost not in entry.sources[orphan]
    assert model.coordinator.restarts == 0


@pytest.mark.parametrize("name", FORWARDING)
def test_sums_go_round_a_link_that_is_cut_in_mid_transfer(name: str) -> None:
    """Both ends are reachable from the others: no need to wait until the link is back."""
    num = 5
    model = started(FORWARDING[name], num)
    vectors = begin(model, 2)
    model.run_until(lambda: any(pair[0] != 0 and pair[1] != 0 for pair in model._moving))
    pair = next(pair for pair in model._moving if 0 not in pair)
    cut(model, {pair, pair[::-1]})
    model.run_until(lambda: len(model.results[2]) == num)
    check_round(model.results[2], vectors)
    assert model.coordinator.restarts >= 1
    assert model.coordinator.links.is_broken(*pair)
    vectors = vectors_of(model, 3)
    before = model.coordinator.restarts
    check_round(model.run_round(3, vectors), vectors)
    assert model.coordinator.restarts == before, "the next round avoids the link"


@pytest.mark.parametrize("name", KINDS)
def test_a_round_waits_for_a_region_that_is_cut_off_and_ends_when_it_is_back(name: str) -> None:
    num, lost = 5, 3
    model = started(KINDS[name], num)
    vectors = begin(model, 2)
    cut(model, pairs_of(lost, num))
    back_s = model.now_s + 12 * STALL_S
    model.at(back_s, lambda: mend(model, pairs_of(lost, num)))
    model.run_until(lambda: len(model.results[2]) == num)
    assert model.now_s > back_s
    check_round(model.results[2], vectors)
    vectors = vectors_of(model, 3)
    check_round(model.run_round(3, vectors), vectors)


def test_a_region_that_never_comes_back_holds_the_round_and_no_memory() -> None:
    num, lost = 4, 2
    model = started(CHAIN, num)
    begin(model, 2)
    cut(model, pairs_of(lost, num))
    with pytest.raises(InvariantError, match="nothing more happens"):
        model.run_until(lambda: len(model.results[2]) == num)
    assert all(len(node._rounds) <= 2 for node in model.nodes)
    assert all(sum(map(len, node._active.values())) <= 2 * num for node in model.nodes)
    assert len(model.coordinator._rounds) <= 3


def test_late_data_of_an_abandoned_transfer_is_not_added() -> None:
    num = 4
    model = started(CHAIN, num)
    vectors = begin(model, 2)
    model.run_until(lambda: any(0 not in pair for pair in model._moving))
    pair = next(pair for pair in model._moving if 0 not in pair)
    cut(model, {pair, pair[::-1]})
    model.run_until(lambda: model.coordinator.restarts == 1)
    mend(model, {pair, pair[::-1]})
    model.run_until(lambda: len(model.results[2]) == num)
    check_round(model.results[2], vectors)


@pytest.mark.parametrize("seed", range(3))
def test_it_adapts_to_new_rates_within_five_rounds(seed: int) -> None:
    """Fast links make one chain through all regions; then they make another one."""
    num = 6
    overlay = TsengineOverlay(probes=4)
    model = model_of(overlay, num, SEGMENTS, lines=Lines.capped(num, 20.0), seed=seed)

    def fast(chain: list[int]) -> None:
        def edit(lines: Lines) -> None:
            lines.pair_NN[...] = 1.5
            for a, b in pairwise(chain):
                lines.pair_NN[a, b] = lines.pair_NN[b, a] = 18.0

        model.change(edit)

    def rounds(count: int) -> list[float]:
        for rnd in range(len(model.times_s) + 1, len(model.times_s) + 1 + count):
            vectors = vectors_of(model, rnd)
            check_round(model.run_round(rnd, vectors, compute_s=20.0), vectors)
        return model.times_s[-count:]

    fast([0, 3, 1, 5, 2, 4])
    learned_s = min(rounds(12)[6:])
    fast([0, 2, 3, 4, 1, 5])
    after_s = rounds(6)
    assert after_s[0] > 2 * learned_s
    assert min(after_s[1:]) < 1.5 * learned_s


@pytest.mark.parametrize("name", FORWARDING)
def test_a_round_ends_though_every_link_was_misjudged_first(name: str) -> None:
    num, pair = 5, (1, 2)
    model = started(FORWARDING[name], num)
    cut(model, {pair, pair[::-1]})
    vectors = begin(model, 2)
    for _ in range(3):
        for src, dst in permutations(range(num), 2):
            model.coordinator.on_message(src, Stuck(2, dst), model.now_s)
    model.run_until(lambda: len(model.results[2]) == num)
    check_round(model.results[2], vectors)


def test_whole_messages_avoid_a_broken_link_too() -> None:
    """One segment cannot be passed on early, so regions merge in pairs."""
    num, pair = 5, (1, 2)
    model = model_of(CHAIN, num, 1, hub=num - 1, stall_s=STALL_S)
    vectors = vectors_of(model)
    check_round(model.run_round(1, vectors), vectors)
    cut(model, {pair, pair[::-1]})
    for rnd in (2, 3):
        vectors = vectors_of(model, rnd)
        check_round(model.run_round(rnd, vectors), vectors)
    assert model.coordinator.restarts <= 1
