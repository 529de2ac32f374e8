"""How long parties wait for each other."""

from __future__ import annotations

from geo_ray.runtime.actors.deadlines import answer_s, exchange_s, step_timeout_s
from geo_ray.training.config import TrainConfig


def test_who_knows_more_gives_up_first() -> None:
    assert 60.0 < exchange_s(60.0) < answer_s(60.0)


def test_a_large_model_is_given_the_time_that_a_slow_link_takes() -> None:
    train = TrainConfig(steps=1)
    assert 300.0 < step_timeout_s(train, 10_000) < 301.0
    over_10_mbps_s = 2 * 51_200_000 * 32 / 10e6
    assert step_timeout_s(train, 51_200_000) > 2 * over_10_mbps_s


def test_what_is_configured_counts() -> None:
    assert step_timeout_s(TrainConfig(steps=1, step_timeout_s=7.0), 10**9) == 7.0
