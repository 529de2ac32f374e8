"""Updates that take turns, simulated with real gradients."""

from __future__ import annotations

import pytest
import torch

SECTIONS = {
    "regions": [{"name": name} for name in "abcd"],
    "strategy": {"kind": "asgd_ga", "interval": 1, "wait": "always", "combine": "sum"},
    "train": {"steps": 12, "eval_every": 0},
    "emulate": {"link": {"rate_mbps": 0.5, "delay_s": 0.01}, "step_s": 0.02},
}
TURNS = {"small_bytes": 0, "averager_mbps": 0.5}


def check_all_agree(run) -> None:
    params = run.result.params_P
    for params_P in params.values():
        torch.testing.assert_close(params_P, params["a"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["asgd", "asgd_ga", "ama"])
@pytest.mark.parametrize("order", ["fifo", "shortest_first"])
def test_all_regions_end_equal(simulated, kind, order):
    sections = SECTIONS | {"strategy": {"kind": kind}, "transfers": TURNS | {"order": order}}
    run = simulated(**sections)
    check_all_agree(run)
    assert {e["region"] for e in run.of("exchange")} == set("abcd")


def test_no_update_exceeds_the_staleness_bound_and_dropped_ones_are_not_lost(simulated):
    plain = simulated(**SECTIONS)
    stale = [e["staleness"] for e in plain.of("exchange")]
    assert max(stale) > 2
    bound = simulated(**SECTIONS | {"transfers": TURNS | {"max_staleness": 2}})
    check_all_agree(bound)
    last = {r: max(e["seq"] for e in bound.of("exchange", r)) for r in "abcd"}
    taken = [e["staleness"] for e in bound.of("exchange") if e["seq"] < last[e["region"]]]
    assert taken and max(taken) <= 2
    assert bound.of("update_dropped")


def test_without_a_bottleneck_in_sight_turns_cost_next_to_nothing(simulated):
    """Every pair has a link of its own here, and the scheduler finds that out."""
    seconds = [
        simulated(**SECTIONS | more).result.seconds
        for more in ({}, {"transfers": {"small_bytes": 1 << 20}})
    ]
    assert seconds[1] == pytest.approx(seconds[0], rel=0.05)


def test_the_same_run_twice_is_the_same(simulated):
    sections = SECTIONS | {"transfers": TURNS | {"max_staleness": 3}}
    runs = [simulated(**sections), simulated(**sections)]
    assert runs[0].digests() == runs[1].digests()
    assert runs[0].events == runs[1].events
