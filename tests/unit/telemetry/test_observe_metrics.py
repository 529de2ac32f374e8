"""Metrics: names, and values folded from events."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from geo_ray.telemetry.events import EVENT_FIELDS
from geo_ray.telemetry.metrics import METRICS, MetricsState, Reading
from geo_ray.telemetry.summary import Summary
from tests.support.observe_support import (
    evaluation,
    events,
    exchange,
    noise,
    small_run,
    started,
    step,
    wan,
)

SPECS = {spec.name: spec for spec in METRICS}


def fed(*rows: tuple[str, float, dict[str, object]]) -> tuple[MetricsState, list[Reading]]:
    state = MetricsState()
    return state, [reading for event in events(rows) for reading in state.feed(event)]


def test_names_and_tags_are_well_formed() -> None:
    assert len(SPECS) == len(METRICS)
    for spec in METRICS:
        assert re.fullmatch(r"geo_ray(_[a-z]+){2,}", spec.name)
        assert spec.description.endswith(".")
        assert spec.tag_keys[0] == "run"


def test_every_reading_belongs_to_a_spec() -> None:
    faults = [
        ("worker_lost", 5.0, {"region": "east", "worker": 0, "cause": "x"}),
        ("worker_replaced", 6.0, {"region": "east", "worker": 0, "attempt": 1}),
        ("step_refused", 7.0, {"region": "east", "step": 3, "cause": "nan"}),
        ("checkpoint", 8.0, {"id": "1", "step": 4, "bytes": 99}),
        noise(None, 16, 1.0, 2.0, 64),
    ]
    _, readings = fed(*small_run(), *faults)
    assert {reading.name for reading in readings} == set(SPECS)
    for reading in readings:
        assert len(reading.tags) == len(SPECS[reading.name].tag_keys)
        assert (reading.increase > 0) == (SPECS[reading.name].kind == "counter")


def test_increases_of_counters_add_up_to_their_values() -> None:
    state, readings = fed(*small_run(8))
    sums: dict[tuple[str, tuple[str, ...]], float] = {}
    for reading in readings:
        key = (reading.name, reading.tags)
        sums[key] = sums.get(key, 0.0) + reading.increase
    for key, value in state.values.items():
        if SPECS[key[0]].kind == "counter":
            assert sums[key] == pytest.approx(value)


def test_values_of_a_region() -> None:
    state, _ = fed(
        started(),
        step("east", 1, 1.0, samples=10),
        step("east", 2, 2.0, samples=30, loss=0.75),
        exchange("east", 4, 2.5, staleness=3),
        evaluation(2, 3.0, accuracy=0.5),
        evaluation(2, 3.0, "east", accuracy=0.25),
    )
    tags = ("trial", "east")
    assert state.values["geo_ray_step_index", tags] == 2
    assert state.values["geo_ray_loss_value", tags] == 0.75
    assert state.values["geo_ray_samples_count", tags] == 40
    assert state.values["geo_ray_samples_per_second", tags] == 20
    assert state.values["geo_ray_compute_seconds", tags] == 1.0
    assert state.values["geo_ray_wait_seconds", tags] == 0.5
    assert state.values["geo_ray_staleness_updates", tags] == 3
    assert state.values["geo_ray_round_index", tags] == 4
    assert state.values["geo_ray_eval_value", ("trial", "all", "accuracy")] == 0.5
    assert state.values["geo_ray_eval_value", ("trial", "east", "accuracy")] == 0.25


def test_wan_bytes_have_class_and_direction_and_survive_a_resumption() -> None:
    state, _ = fed(
        started(),
        wan("east", "west", 1.0, update=100),
        wan("east", "west", 2.0, update=150),
        wan("east", "west", 2.0, update=140),  # the other end, which has counted less so far
        started(),
        wan("east", "west", 3.0, update=30),
        wan("east", "east", 3.0, update=1_000),
    )
    name = "geo_ray_wan_bytes"
    assert state.values[name, ("trial", "east", "west", "update", "out")] == 180
    assert state.values[name, ("trial", "west", "east", "update", "in")] == 180
    assert len([key for key in state.values if key[0] == name]) == 2


def test_values_that_are_not_finite_are_left_out() -> None:
    state, readings = fed(started(), step("east", 1, 1.0, loss=float("nan")))
    assert ("geo_ray_loss_value", ("trial", "east")) not in state.values
    assert all(reading.value == reading.value for reading in readings)


def test_docs_list_every_metric_event_field_and_summary_key() -> None:
    docs = Path(__file__).parents[3] / "docs"
    outputs = (docs / "reference" / "generated" / "outputs.md").read_text()
    assert [spec.name for spec in METRICS if f"| `{spec.name}` |" not in outputs] == []
    assert [key for key in Summary.model_fields if f"| `{key}` |" not in outputs] == []
    events = (docs / "reference" / "generated" / "events.md").read_text()
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", events, re.M | re.S))
    for kind, fields in EVENT_FIELDS.items():
        assert [name for name in fields if f"| `{name}` |" not in sections[kind]] == []
