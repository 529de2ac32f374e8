from __future__ import annotations

from geo_ray.training.config import TrainConfig, answer_s, exchange_s, operation_s, wait_limit_s

YEAR_S = 365 * 86400.0


def test_without_a_limit_others_may_train_as_long_as_they_like() -> None:
    assert wait_limit_s(TrainConfig(steps=1)) == YEAR_S


def test_configured_values_apply_to_every_size() -> None:
    train = TrainConfig(steps=1, step_timeout_s=7.0)
    assert wait_limit_s(train) == 7.0
    assert [operation_s(train, n) for n in (0, 10**10)] == [7.0, 7.0]


def test_an_operation_has_the_time_that_the_model_needs_at_four_megabits() -> None:
    train, bits = TrainConfig(steps=1), 2 * 32 * 10**9
    assert operation_s(train, 10**9) - operation_s(train, 0) == bits / 4e6


def test_the_better_informed_end_gives_up_first() -> None:
    for limit_s in (0.5, 300.0, YEAR_S):
        assert limit_s < exchange_s(limit_s)
        assert limit_s + exchange_s(limit_s) < answer_s(limit_s)
