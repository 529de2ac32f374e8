"""Weights of old updates, and who waits for the slowest."""

from __future__ import annotations

import pytest
import torch

from geo_ray.strategies import global_model
from geo_ray.strategies.async_local_sgd import AsyncLocalSgd
from geo_ray.strategies.global_model import Staleness
from geo_ray.strategies.state import AveragerState, Update


@pytest.mark.parametrize(
    ("options", "lags", "expected"),
    [
        ({}, [0, 3, 99], [1, 1, 1]),
        ({"weight": "inverse"}, [0, 1, 3], [1, 1 / 2, 1 / 4]),
        ({"weight": "sqrt"}, [0, 3, 8], [1, 1 / 2, 1 / 3]),
        ({"weight": "poly", "a": 2.0}, [0, 1, 2], [1, 1 / 4, 1 / 9]),
        ({"weight": "hinge", "a": 10.0, "b": 4.0}, [0, 4, 5], [1, 1, 1 / 11]),
    ],
)
def test_weights(options, lags, expected):
    rule = Staleness(**options)
    assert [rule.factor(lag) for lag in lags] == pytest.approx(expected)


class Hub:
    """An averager that answers by the rule, and nothing else."""

    def __init__(self, bound: int | None) -> None:
        self.rule = AsyncLocalSgd(by_speed=False, staleness=Staleness(bound=bound))
        self.state = AveragerState(("a", "b", "c"))

    def say(self, region: str, *, final: bool = False) -> list[str]:
        update = Update(region, torch.ones(3), 4, final=final)
        global_model.publish(self.state, update.payload_P)
        return [r.to for r in self.rule.answers(self.state, update)]


def test_without_a_bound_everybody_is_answered_at_once():
    averager = Hub(None)
    assert [averager.say("a") for _ in range(5)] == [["a"]] * 5


def test_a_region_waits_for_the_slowest_and_is_answered_with_it():
    averager = Hub(2)
    assert [averager.say("a") for _ in range(3)] == [["a"], ["a"], []]
    assert [averager.say("b") for _ in range(3)] == [["b"], ["b"], []]
    assert averager.say("c") == ["a", "b", "c"]
    assert averager.say("a") == []


def test_release_answers_everybody_and_nobody_twice():
    averager = Hub(1)
    assert averager.say("a") == ["a"]
    assert averager.say("a") == []
    assert [r.to for r in averager.rule.on_release(averager.state)] == ["a"]
    assert averager.rule.on_release(averager.state) == []


def test_final_updates_are_answered_together_with_everything():
    averager = Hub(1)
    assert averager.say("a", final=True) == []
    assert averager.say("b", final=True) == []
    assert averager.say("c", final=True) == ["a", "b", "c"]


def test_an_answer_holds_what_the_region_has_not_heard():
    state = AveragerState(("a", "b"))
    ask = {r: Update(r, torch.zeros(2), 1) for r in "ab"}
    global_model.publish(state, torch.tensor([1.0, 2.0]))
    assert global_model.answer(state, ask["a"]).payload_P.tolist() == [1.0, 2.0]
    global_model.publish(state, torch.tensor([10.0, 0.0]))
    assert global_model.answer(state, ask["a"]).payload_P.tolist() == [10.0, 0.0]
    assert global_model.answer(state, ask["b"]).payload_P.tolist() == [11.0, 2.0]
    assert global_model.answer(state, ask["a"]).payload_P.tolist() == [0.0, 0.0]
