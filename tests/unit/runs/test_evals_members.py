"""Evaluations of all regions together while regions come and go."""

from __future__ import annotations

from typing import Any

import numpy as np

from geo_ray.runs.evaluation import EvalCollector


class Means:
    """A task that knows one metric."""

    def metrics(self, stats: Any) -> dict[str, float]:
        return {"mean": float(stats["sum"][0])}


def collector(**more: Any) -> EvalCollector:
    return EvalCollector(Means(), 2, **more)  # type: ignore[arg-type]


def told(of: EvalCollector, region: str, step: int, *, final: bool = False) -> list[int]:
    """Steps of the combined evaluations that follow."""
    found = of.add(region, step, {"sum": np.ones(1)}, 8, final=final)
    return [done.step for done in found if done.region is None]


def test_a_joining_region_counts_from_its_first_step_on() -> None:
    of = collector(intervals={"a": 10, "b": 10, "c": 10})
    assert told(of, "a", 10) == []
    of.admit("c", 12)
    assert told(of, "b", 10) == [10]
    assert told(of, "a", 20) == told(of, "b", 20) == []
    assert told(of, "c", 20) == [20]
    assert told(of, "a", 30, final=True) == told(of, "c", 30, final=True) == []
    assert told(of, "b", 30, final=True) == [30]


def test_who_comes_back_and_goes_again_leaves_no_gap() -> None:
    of = collector(intervals={"a": 10, "b": 10})
    assert of.forget("b") == []
    assert told(of, "a", 10) == [10]
    of.admit("b", 14)
    assert told(of, "a", 20) == []
    assert [done.step for done in of.forget("b")] == [20]
    assert told(of, "a", 30) == [30]


def test_a_loss_makes_no_evaluation_that_nobody_made() -> None:
    of = collector(newest=True)
    assert told(of, "a", 5) == []
    assert told(of, "b", 5) == [5]
    assert of.forget("b") == []
    assert told(of, "a", 9) == [9]


def test_an_evaluation_of_nobody_who_is_left_is_none() -> None:
    of = collector(intervals={"a": 10, "b": 10, "c": 10})
    assert told(of, "a", 10) == []
    of.admit("c", 12)  # it counts from the next one on
    assert of.forget("a") == of.forget("b") == []
    assert told(of, "c", 20) == [20]
