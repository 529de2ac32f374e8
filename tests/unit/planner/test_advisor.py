"""Choices of the advisor for given steps and links."""

from __future__ import annotations

from dataclasses import replace

import pytest

from geo_ray.base.errors import ConfigError, LinkUnknownError
from geo_ray.base.load import load_text
from geo_ray.experiment.experiment import Experiment
from geo_ray.planner.advisor import (
    Situation,
    advise,
    candidates,
    explain,
    sections,
    transfer_time_s,
)
from geo_ray.planner.loss import LOSS_BY_INTERVAL, loss_of_interval, outer_of
from geo_ray.strategies.registry import STRATEGIES
from geo_ray.transport.links import LinkRecord, LinkTable


def links(mbps: float, rtt_s: float, regions=("a", "b", "c")) -> LinkTable:
    return LinkTable(
        links=tuple(
            LinkRecord(
                src=s, dst=d, goodput_mbps=mbps, rtt_s=rtt_s, samples=1, measured_at_unix_s=0
            )
            for s in regions
            for d in regions
            if s != d
        )
    )


def situation(mbps=100.0, rtt_s=0.06, num_params=1_000_000, budget=0.05, **step_s) -> Situation:
    steps = step_s or {"a": 0.1, "b": 0.1, "c": 0.1}
    return Situation(num_params, steps, links(mbps, rtt_s), "a", budget)


def test_a_transfer_is_bytes_both_ways_and_a_round_trip():
    assert transfer_time_s(situation(), None) == pytest.approx(2 * 32 / 100 + 0.06)
    assert transfer_time_s(situation(), "int4") == pytest.approx(2 * 4.5 / 100 + 0.06)


def test_a_link_that_costs_nothing_needs_no_strategy():
    choice = advise(situation(mbps=1e6, rtt_s=1e-5))
    assert (choice.family, choice.interval, choice.codec) == ("bsp", 1, None)
    assert choice.loss == 0.0


@pytest.mark.parametrize(
    ("is_served", "expected"),
    [(False, {"kind": "bsp"}), (True, {"kind": "sma", "interval": 1})],
)
def test_groups_average_models_after_each_step_where_others_exchange_gradients(
    is_served: bool, expected: dict[str, object]
) -> None:
    free = replace(situation(mbps=1e6, rtt_s=1e-5), is_served=is_served)
    choice = advise(free)
    assert sections(choice, free)["strategy"] == expected
    assert f"{expected['kind']} with 1 steps per exchange" in explain(choice, free)


def test_a_slower_link_makes_rounds_longer_or_payloads_smaller():
    losses = []
    for mbps in (1000.0, 100.0, 10.0, 1.0):
        choice = advise(situation(mbps=mbps))
        losses.append(choice.loss)
        assert choice.loss <= 0.05
        assert choice.compute_fraction > 0.9
    assert losses == sorted(losses) and losses[0] < losses[-1], "it is paid for in loss"


def test_unequal_regions_do_not_wait_for_each_other():
    choice = advise(situation(a=0.05, b=0.1, c=0.5))
    assert choice.family == "async_local_sgd"
    assert "times as long" in explain(choice, situation(a=0.05, b=0.1, c=0.5))


def test_equal_regions_work_in_rounds():
    assert advise(situation()).family in {"diloco", "one_step_delay"}


def test_a_smaller_loss_budget_is_kept_and_costs_time():
    wide, narrow = advise(situation(mbps=5, budget=0.05)), advise(situation(mbps=5, budget=0.004))
    assert narrow.loss <= 0.004 < wide.loss
    assert narrow.compute_fraction < wide.compute_fraction


def test_a_budget_that_nothing_fits_gets_the_least_loss():
    assert advise(situation(budget=1e-9, mbps=1)).loss == 0.0


def test_the_choice_is_the_best_of_all_candidates_within_budget():
    where = situation(mbps=20)
    choice = advise(where)
    rest = [c for c in candidates(where) if c.loss <= where.loss_budget]
    assert choice in rest
    assert choice.compute_fraction >= 0.97 * max(c.compute_fraction for c in rest)
    assert not [
        c for c in rest if c.compute_fraction >= choice.compute_fraction and c.loss < choice.loss
    ]


def test_what_was_not_measured_is_named():
    holes = Situation(10, {"a": 0.1, "z": 0.1}, links(100, 0.1), "a", 0.05)
    with pytest.raises(LinkUnknownError, match="'z' to region 'a'"):
        advise(holes)
    with pytest.raises(ConfigError, match="a single region"):
        advise(Situation(10, {"a": 0.1}, links(100, 0.1), "a", 0.05))


@pytest.mark.parametrize("mbps", [1e6, 300, 30, 3, 0.3])
@pytest.mark.parametrize("spread", [1, 8])
def test_every_choice_is_a_configuration(mbps, spread):
    where = situation(mbps=mbps, budget=0.2, a=0.1, b=0.1 * spread)
    base = """
name: t
task: {use: digits}
data: {generate: {}}
regions: [{name: a}, {name: b}]
strategy: {kind: bsp}
optimizer: {kind: sgd}
train: {steps: 10}
"""
    import json

    for choice in candidates(where):
        chosen = [
            f"{key}={json.dumps(value)}" for key, value in sections(choice, where).items() if value
        ]
        experiment = load_text(base, chosen, Experiment, "test")
        assert experiment.strategy.kind in (choice.family, "diloco")
        assert f"{choice.interval} steps" in explain(choice, where)


def test_loss_of_an_interval_goes_through_the_points_and_grows():
    for steps, loss in LOSS_BY_INTERVAL:
        assert loss_of_interval(steps) == pytest.approx(loss)
    values = [loss_of_interval(2**n) for n in range(13)]
    assert values == sorted(values) and values[-1] > 0.05


def test_outer_momentum_is_left_out_where_it_would_overshoot() -> None:
    """For any strategy with outer momentum; none is named."""
    nesterov = {
        kind: strategy()
        for kind, strategy in STRATEGIES.items()
        if getattr(getattr(strategy(), "outer", None), "momentum", 0) > 0
    }
    assert {"diloco", "one_step_delay", "async_local_sgd", "diloco_streaming"} <= nesterov.keys()
    for kind, strategy in nesterov.items():
        for interval, inner, left_out in (
            (15, False, True), (16, False, False), (32, True, True), (128, True, False),
        ):  # fmt: skip
            outer = outer_of(strategy.traits, interval, inner_momentum=inner)
            assert (outer is not None) == left_out, kind
        assert outer_of(strategy.traits, 4) == strategy.traits.averager.plain_outer
        plain = STRATEGIES[kind].model_validate({"outer": dict(outer_of(strategy.traits, 4) or {})})
        assert plain.traits.averager.plain_outer is None, kind
    assert outer_of(STRATEGIES["sma"]().traits, 4) is None


def test_what_is_vetoed_is_no_candidate() -> None:
    where, vetoed = situation(), []
    for _ in range(5):
        choice = advise(where, vetoed)
        assert (choice.family, choice.interval) not in vetoed
        vetoed.append((choice.family, choice.interval))
