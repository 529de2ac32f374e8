"""Whole lines of senders on shared links: the promises of the scheduler, whatever comes."""

from __future__ import annotations

from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.network_models.bottleneck import Bottleneck, Site
from benchmarks.network_models.shared_links import Flows
from geo_ray.simulator.clock import Scheduler
from geo_ray.transport.uploads import TransfersConfig

MB = 1_000_000


@st.composite
def lines(draw: st.DrawFn) -> Bottleneck:
    size_bytes = draw(st.sampled_from([MB // 10, MB, 8 * MB]))
    alike = draw(st.booleans())
    sites = {}
    for number in range(draw(st.integers(1, 6))):
        sites[f"r{number}"] = Site(
            compute_s=draw(st.sampled_from([0.05, 0.5, 3.0])),
            size_bytes=size_bytes if alike else draw(st.sampled_from([20_000, MB, 4 * MB])),
            mbps=draw(st.sampled_from([10.0, 100.0, 1000.0])),
            dies_at_s=draw(st.sampled_from([None, None, None, 2.0, 7.5])),
        )
    bound = draw(st.sampled_from([None, 1, 3, 10]))
    config = TransfersConfig(
        order=draw(st.sampled_from(["fifo", "shortest_first"])),
        max_staleness=bound,
        averager_mbps=draw(st.sampled_from([None, 100.0])),
        aggregate=draw(st.booleans()),
        grant_s=draw(st.sampled_from([2.0, 30.0])),
    )
    delay_s = draw(st.sampled_from([0.0, 0.02, 0.2]))
    return Bottleneck(
        sites,
        100.0,
        config,
        delay_s,
        measured=draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
        horizon_s=15.0,
    )


@settings(max_examples=150, deadline=None)
@given(lines())
def test_no_update_is_lost_doubled_or_stale_and_dead_regions_block_none(line: Bottleneck) -> None:
    line.run()
    assert line.is_quiet
    taken = [(c.ask.region, c.ask.seq) for c in line.committed]
    dropped = [(a.region, a.seq) for a in line.dropped]
    assert len(set(taken + dropped)) == len(taken + dropped)
    for name, site in line.sites.items():
        seqs = sorted(seq for region, seq in taken + dropped if region == name)
        assert seqs == list(range(1, len(seqs) + 1))
        if site.dies_at_s is None:  # it went on to the end
            last_s = max([c.taken_s for c in line.committed if c.ask.region == name], default=0.0)
            assert last_s > 0 or dropped
            assert name not in {ask.region for ask in line.open}
    bound = line.config.max_staleness
    if bound is None:
        assert not dropped
    else:
        assert all(c.staleness <= bound for c in line.committed)


def all_at_once(config: TransfersConfig | None, number: int = 8) -> Bottleneck:
    sites = {f"r{i}": Site(1e-9, 4 * MB, 1000.0) for i in range(number)}
    line = Bottleneck(sites, 100.0, config, delay_s=0.0, measured=True, horizon_s=1e-6)
    line.run()
    assert len(line.committed) == number
    return line


def mean_s(line: Bottleneck) -> float:
    return mean(c.taken_s - c.ready_s for c in line.committed)


def test_taking_turns_halves_the_mean_time_of_equal_updates() -> None:
    number, alone_s = 8, 0.32
    together = all_at_once(None)
    in_turn = all_at_once(TransfersConfig(averager_mbps=100.0))
    assert mean_s(together) == pytest.approx(number * alone_s, rel=1e-3)
    assert mean_s(in_turn) == pytest.approx((number + 1) * alone_s / 2, rel=1e-3)
    ends = [max(c.taken_s for c in line.committed) for line in (together, in_turn)]
    assert ends[0] == pytest.approx(ends[1], rel=1e-3)  # the bottleneck was never idle


def test_sums_spare_the_bottleneck() -> None:
    in_turn = all_at_once(TransfersConfig(averager_mbps=100.0), 12)
    summed = all_at_once(TransfersConfig(averager_mbps=100.0, aggregate=True), 12)
    carried = [
        sum(mbit for (_, dst), mbit in line.flows.carried_mbit.items() if dst == "hub")
        for line in (in_turn, summed)
    ]
    assert carried[1] < 0.7 * carried[0]
    assert mean_s(summed) < 0.8 * mean_s(in_turn)
    assert sorted(c.ask.region for c in summed.committed) == sorted(summed.sites)


def test_the_averager_s_receive_rate_is_learned() -> None:
    for mbps, lowest, highest in ((1000.0, 90.0, 150.0), (15.0, 90.0, 1e9)):
        sites = {f"r{i}": Site(0.5, 4 * MB, mbps) for i in range(6)}
        line = Bottleneck(sites, 100.0, TransfersConfig(), horizon_s=60.0)
        line.run()
        learned = line.learned_mbps
        assert lowest <= (1e9 if learned is None else learned) <= highest


def test_slow_paths_are_used_side_by_side() -> None:
    sites = {f"r{i}": Site(0.5, 4 * MB, 15.0) for i in range(6)}
    commits = []
    for config in (None, TransfersConfig()):
        line = Bottleneck(sites, 100.0, config, horizon_s=120.0)
        line.run()
        commits.append(len(line.committed))
    assert commits[1] > 0.85 * commits[0]  # asking costs a round trip, and the start is slow


def test_flows_share_fairly_up_to_each_link_s_rate() -> None:
    scheduler = Scheduler()
    flows = Flows(scheduler, {"a": 10.0, "b": 100.0, "h": 1.0}, {"h": 50.0}, delay_s=0.5)
    ends: dict[str, float] = {}
    flows.send("a", "h", 5e6, lambda: ends.update(a=scheduler.now_s))  # 40 Mbit at 10
    flows.send("b", "h", 10e6, lambda: ends.update(b=scheduler.now_s))  # 80 Mbit at 40
    scheduler.run()
    assert ends == {"a": pytest.approx(4.5), "b": pytest.approx(2.5)}
