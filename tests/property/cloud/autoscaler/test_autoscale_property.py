"""An autoscaler that dies at any point launches nothing twice and leaves nothing."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from benchmarks.autoscale.kills import (
    EVERY_S,
    TARGET,
    WANTED,
    Killed,
    MortalCluster,
    Reaper,
    random_kills,
)
from geo_ray.base.errors import LeaseLostError, RunDirectoryError
from geo_ray.cloud.autoscaler.node_group import CoverItem, cheapest_machines
from geo_ray.cloud.autoscaler.state import decode_memory, encode_memory
from geo_ray.cloud.backtest.markets import MarketTrace
from geo_ray.cloud.backtest.simulated_cloud import SimCloudBehavior

QUIET = SimCloudBehavior(30.0, 60.0)
LATE = SimCloudBehavior(30.0, 60.0, unlisted_s=90.0)


@pytest.mark.parametrize("behavior", [QUIET, LATE], ids=["at once", "late lists"])
@pytest.mark.parametrize("calls", range(14))
def test_it_may_die_at_every_call_of_its_first_look(calls: int, behavior: SimCloudBehavior) -> None:
    cluster = MortalCluster.made(behavior)
    cluster.reaper.calls_left = calls
    for _ in range(12):
        cluster.tick()
        alive = cluster.counts()
        assert all(alive[place] <= WANTED[place] for place in alive), "none is rented twice"
    assert cluster.reaper.kills == 1
    assert cluster.counts() == WANTED


@pytest.mark.parametrize("calls", range(24))
def test_it_may_die_at_every_call_when_the_job_is_over(calls: int) -> None:
    cluster = MortalCluster.made(QUIET)
    cluster.settle(12)
    cluster.finish()
    cluster.reaper.calls_left = calls
    for _ in range(12):
        cluster.tick()
    assert not cluster.cloud.alive()


US, EU = TARGET.regions
TARGETS = (
    TARGET,
    replace(TARGET, regions=(US,)),
    replace(TARGET, regions=(US, replace(EU, rows_per_s=0.0))),
    replace(TARGET, regions=(replace(US, rows_per_s=40.0), EU)),
)


def play(cluster: MortalCluster, what: str, number: int) -> None:
    """Apply an event and run iterations."""
    cloud, now_s = cluster.cloud, cluster.clock.now_s()
    alive = cloud.alive()
    if what == "kill":
        cluster.reaper.calls_left = number
    elif what == "gone" and alive:
        alive[number % len(alive)].ended_unix_s = now_s
    elif what == "notice" and alive:
        taken = alive[number % len(alive)]
        taken.machine = replace(taken.machine, ends_unix_s=now_s + 120.0)
    elif what == "wait":
        cluster.world.advance_to_s(now_s + number)
    elif what == "unreachable":
        cloud.unreachable ^= {("us-1", "eu-1")[number % 2]}
    elif what == "target":
        cluster.follow(TARGETS[number])
    elif what == "journal":
        cluster.trouble.journal = True
    elif what == "drains":
        cluster.trouble.drains = True
    for _ in range(number if what == "ticks" else 1):
        look(cluster)
    cluster.trouble.drains = False
    if what == "drains":
        look(cluster)


def look(cluster: MortalCluster) -> None:
    """Run an iteration; no action in unreachable regions, and no busy machine ends."""
    result = cluster.tick()
    if result is not None:
        hidden = {
            region.name for region in TARGET.regions if region.at in result.observed.unreachable
        }
        assert not hidden & {action.region for action in result.decided.actions}
    assert not cluster.rude, "whoever is ended was drained first"


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("kill"), st.integers(0, 16)),
            st.tuples(st.just("ticks"), st.integers(1, 8)),
            st.tuples(st.just("gone"), st.integers(0, 5)),
            st.tuples(st.just("notice"), st.integers(0, 5)),
            st.tuples(st.just("wait"), st.integers(1, 600)),
            st.tuples(st.just("unreachable"), st.integers(0, 1)),
            st.tuples(st.just("target"), st.integers(0, len(TARGETS) - 1)),
            st.tuples(st.sampled_from(["journal", "drains"]), st.just(1)),
        ),
        max_size=14,
    ),
    st.booleans(),
    st.integers(0, 1000),
)
@example([("kill", 9), ("wait", 240)], False, 0)  # killed before it sent, and away for long
@example([("ticks", 8), ("target", 1), ("kill", 5), ("wait", 240)], False, 0)  # before it drained
@example([("ticks", 8), ("notice", 1), ("drains", 1)], False, 0)
def test_random_histories_end_with_what_is_wanted_and_then_with_nothing(
    steps: list[tuple[str, int]], ends_early: bool, seed: int
) -> None:
    behavior = SimCloudBehavior(30.0, 60.0, unlisted_s=60.0, outage=0.1, refusal=0.1)
    cluster = MortalCluster.made(behavior, seed)
    for what, number in steps:
        play(cluster, what, number)
    if all(what != "target" for what, _ in steps):
        assert not cluster.wasted, "what was asked for is waited for"
    cluster.cloud.unreachable.clear()
    cluster.follow(TARGET)
    if not ends_early:
        cluster.settle(80)
        assert cluster.counts() == WANTED
    cluster.finish()
    cluster.settle(60)
    assert not cluster.cloud.alive()
    assert not cluster.rude


def test_two_hundred_kills_leave_nothing() -> None:
    doubles, orphans, most = random_kills(7, 200)
    assert (doubles, orphans) == (0, 0)
    assert most <= sum(WANTED.values())


@pytest.mark.parametrize("calls", range(5, 14))
def test_one_that_was_overtaken_and_wakes_rents_nothing_twice(calls: int) -> None:
    """The first stands still in the middle of its look, a second one acts, and the first goes on.

    What stands still is everything after a call: it is played by a second look with the old
    journal's tag, which the store refuses, and by the launch that was on its way.
    """
    cluster = MortalCluster.made(QUIET)
    asleep = Reaper(calls)
    first = cluster.next_autoscaler(asleep)
    with pytest.raises(Killed):
        first.tick(cluster.clock.now_s())
    cluster.settle(12)
    assert cluster.counts() == WANTED
    asleep.calls_left = None
    with pytest.raises(LeaseLostError):
        first.tick(cluster.clock.now_s())
    cluster.settle(30)
    assert cluster.counts() == WANTED


def test_unneeded_launches_of_a_dead_autoscaler_are_ended() -> None:
    cluster = MortalCluster.made(QUIET)
    cluster.settle(12)
    some = cluster.cloud.alive()[0]
    late = f"{(some.machine.request_id or '').rpartition('-')[0]}-999"
    ghost = replace(some.machine, id="ghost", request_id=late)
    cluster.cloud.machines["ghost"] = replace(some, machine=ghost)
    cluster.settle(2)
    assert cluster.cloud.machines["ghost"].ended_unix_s is not None
    assert cluster.counts() == WANTED


def test_the_journal_comes_back_as_it_was() -> None:
    cluster = MortalCluster.made(QUIET)
    cluster.settle(20)
    data = cluster.store.read("").data  # type: ignore[union-attr]
    memory = decode_memory(data)
    assert decode_memory(encode_memory(memory)) == memory
    for spoiled in (b"", data[:-4], b"no journal"):
        with pytest.raises(RunDirectoryError, match="journal"):
            decode_memory(spoiled)


# ------------------------------------------------------------------ the cheapest machines


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 8), st.integers(1, 40), st.integers(0, 3)),
        min_size=1,
        max_size=4,
    ),
    st.integers(1, 16),
)
@example([(1, 1, 1), (1, 1, 3), (1, 1, 3)], 6)  # a sixth six times is enough
def test_the_cover_is_the_cheapest_by_enumeration(
    drawn: list[tuple[int, int, int]], need: int
) -> None:
    items = [CoverItem(float(rows), usd / 10.0, most) for rows, usd, most in drawn]
    counts = cheapest_machines(items, float(need))

    def all_counts(rest: list[CoverItem]) -> list[list[int]]:
        if not rest:
            return [[]]
        return [[n, *more] for n in range(rest[0].most + 1) for more in all_counts(rest[1:])]

    def usd(chosen: list[int]) -> float:
        return sum(n * item.usd_per_hour for n, item in zip(chosen, items, strict=True))

    enough = [
        chosen
        for chosen in all_counts(items)
        if sum(n * item.rows_per_s for n, item in zip(chosen, items, strict=True)) >= need
    ]
    if enough:
        assert usd(counts) <= min(map(usd, enough)) + 1e-6
        rows = sum(n * item.rows_per_s for n, item in zip(counts, items, strict=True))
        assert rows >= need * (1 - 1e-2)
    else:
        assert counts == [item.most for item in items]


@pytest.mark.parametrize("count", [3, 6, 7, 13, 99, 700])
def test_as_many_machines_as_planned_are_enough(count: int) -> None:
    assert cheapest_machines([CoverItem(12.0, 0.3, 2 * count)], 12.0 * count) == [count]


# ------------------------------------------------------------------ the bill, by another program


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 7200), st.floats(0.01, 5.0, allow_nan=False)),
        min_size=1,
        max_size=6,
        unique_by=lambda point: point[0],
    ),
    st.integers(0, 7200),
    st.integers(0, 7200),
)
def test_a_bill_is_the_sum_over_its_seconds(
    prices: list[tuple[int, float]], start_s: int, lasts_s: int
) -> None:
    """Each second is charged at the price at its start, as documented."""
    ascending = sorted(prices)
    trace = MarketTrace(tuple((float(when), usd) for when, usd in ascending), ((0.0, 1),))
    total = 0.0
    for second in range(start_s, start_s + lasts_s):
        price = ascending[0][1]
        for when, usd in ascending:
            if when <= second:
                price = usd
        total += price / 3600
    found = trace.usd_between(float(start_s), float(start_s + lasts_s))
    assert math.isclose(found, total, rel_tol=1e-6, abs_tol=1e-9)


def test_the_ledger_agrees_with_the_clouds_bill() -> None:
    cluster = MortalCluster.made(QUIET)
    cluster.settle(240)
    memory = decode_memory(cluster.store.read("").data)  # type: ignore[union-attr]
    behind = 6 * EVERY_S / 3600
    assert memory.ledger.paid_usd <= cluster.cloud.bill_usd() + 1e-9
    assert memory.ledger.paid_usd >= cluster.cloud.bill_usd() - behind
