"""Evaluations are combined by adding sums: the same as evaluating all rows at once."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from geo_ray.runs.build import build_evals
from geo_ray.runs.evaluation import EvalCollector, EvalNotes
from geo_ray.telemetry.events import Event
from tests.support.job_support import digits, experiment

TASK = digits()


def stats(correct: float, rows: float) -> dict:
    """Sums as `Digits.evaluate` gives them, made by it."""
    module = TASK.model(0)
    data = TASK.dataset(0).heldout
    columns = {k: v[: int(rows)] for k, v in data.items()}
    found = TASK.evaluate(module, TASK.collate(columns, torch.device("cpu")))
    assert found["rows"] == rows
    return found | {"correct": np.array([float(correct)])}


def test_combined_metrics_are_those_of_all_rows_together():
    module, data = TASK.model(0), TASK.dataset(0).heldout
    parts = [{k: v[i:j] for k, v in data.items()} for i, j in ((0, 100), (100, 110), (110, 364))]
    collector = EvalCollector(TASK, 3)
    done = []
    for name, part in zip("bca", parts, strict=True):
        batch = TASK.collate(part, torch.device("cpu"))
        done += collector.add(name, 50, TASK.evaluate(module, batch), len(part["label"]))
    assert [(d.region, d.samples) for d in done] == [("b", 100), ("c", 10), ("a", 254), (None, 364)]
    whole = TASK.metrics(TASK.evaluate(module, TASK.collate(data, torch.device("cpu"))))
    assert done[-1].metrics == pytest.approx(whole)


def test_the_order_of_arrival_does_not_matter():
    results = []
    for order in (("a", "b"), ("b", "a")):
        collector, done = EvalCollector(TASK, 2), []
        for name in order:
            done += collector.add(name, 1, stats(3 if name == "a" else 5, 10), 10)
        results.append(done[-1])
    assert results[0] == results[1] and results[0].metrics["accuracy"] == pytest.approx(0.4)


def test_steps_are_kept_apart():
    collector = EvalCollector(TASK, 2)
    assert [d.region for d in collector.add("a", 50, stats(1, 10), 10)] == ["a"]
    assert [d.region for d in collector.add("a", 100, stats(2, 10), 10)] == ["a"]
    late = collector.add("b", 50, stats(3, 10), 10)
    assert [(d.region, d.step) for d in late] == [("b", 50), (None, 50)]
    assert late[-1].metrics["accuracy"] == pytest.approx(0.2)
    assert collector.add("b", 100, stats(4, 10), 10)[-1].metrics["accuracy"] == pytest.approx(0.3)


def test_last_evaluations_belong_together_whatever_their_step():
    collector = EvalCollector(TASK, 2)
    collector.add("a", 70, stats(1, 10), 10, final=True)
    assert collector.add("b", 70, stats(9, 10), 10)[-1].region == "b"  # not a last one
    done = collector.add("b", 31, stats(3, 10), 10, final=True)
    assert [(d.region, d.final) for d in done] == [("b", True), (None, True)]


def test_a_second_report_of_a_region_takes_the_place_of_the_first():
    collector = EvalCollector(TASK, 2)
    collector.add("a", 50, stats(1, 10), 10)
    assert len(collector.add("a", 50, stats(2, 10), 10)) == 1
    assert collector.add("b", 50, stats(2, 10), 10)[-1].metrics["accuracy"] == pytest.approx(0.2)


def test_one_region_is_its_own_whole():
    done = EvalCollector(TASK, 1).add("a", 50, stats(2, 10), 10)
    assert [d.region for d in done] == ["a", None] and done[0].metrics == done[1].metrics


def test_asynchronous_regions_are_matched_by_interval():
    config = experiment(
        "train.mode=async", "strategy={kind: asgd_ga}", "train.eval_every=10"
    )  # eu has 2 workers, so 20 pushes are its 10 steps
    collector = build_evals(config, TASK)
    collector.add("eu", 21, stats(2, 10), 10)
    collector.add("eu", 40, stats(4, 10), 10)
    (_, whole) = collector.add("us", 11, stats(2, 10), 10)
    assert whole.metrics["accuracy"] == pytest.approx(0.2)
    (_, whole) = collector.add("us", 20, stats(8, 10), 10)
    assert whole.metrics["accuracy"] == pytest.approx(0.6)


def test_without_evaluations_on_the_way_the_last_one_is_combined():
    collector = build_evals(experiment("train.eval_every=0"), TASK)
    collector.add("eu", 10, stats(2, 10), 10, final=True)
    assert len(collector.add("us", 10, stats(2, 10), 10, final=True)) == 2


def test_a_region_that_is_lost_is_not_waited_for():
    collector = EvalCollector(TASK, 3)
    for name in "ab":
        collector.add(name, 50, stats(10, 20), 20, final=True)
    collector.add("c", 40, stats(1, 20), 20)
    (combined,) = collector.forget("c")
    assert (combined.region, combined.samples, combined.final) == (None, 40, True)
    collector.add("a", 40, stats(1, 20), 20)
    both = collector.add("b", 40, stats(1, 20), 20)
    assert [done.region for done in both] == ["b", None]


def test_an_evaluation_that_another_driver_has_noted_is_put_together_and_not_noted_again():
    told: list[tuple[int, str | None]] = []

    def emit(kind: str, t_s: float, **fields):
        told.append((fields["step"], fields["region"]))
        return Event(kind, t_s, fields)

    collector = EvalCollector(TASK, 2)
    known = frozenset({(50, "a", False), (100, "a", False), (100, None, False), (100, "b", False)})
    notes = EvalNotes(collector, emit, reports=known)
    for step in (50, 100):
        for name in ("a", "b"):
            notes.take(collector.add(name, step, stats(3, 10), 10), 1.0, "a")
    notes.take(collector.add("a", 100, stats(3, 10), 10, final=True), 1.0, "a")
    assert told == [(50, "b"), (50, None), (100, "a")]
