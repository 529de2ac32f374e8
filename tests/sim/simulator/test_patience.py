"""`train.patience`: a run ends when its metric has not improved for some evaluations."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import geo_ray
from geo_ray.base.errors import ConfigError
from geo_ray.runs.evaluation import StoppingRule
from geo_ray.telemetry.events import Event
from geo_ray.training.config import TrainConfig
from tests.support.world_support import BASE, Run, experiment

FLAT = {"kind": "sgd", "lr": 1e-30}  # nothing ever improves


def evaluation(step: int, value: float | None, **more: Any) -> Event:
    about = {"step": step, "region": None, "metrics": {"loss": value, "accuracy": value}}
    return Event("eval", float(step), about | more)


def train(**keys: Any) -> TrainConfig:
    return TrainConfig.model_validate({"steps": 100, "eval_every": 1} | keys)


def ends_at(rule: StoppingRule, values: list[float | None], first: int = 1) -> int | None:
    for step, value in enumerate(values, first):
        if rule.after(evaluation(step, value)) is not None:
            return step
    return None


def slowly(values: list[float | None], patience: int, *, grows: bool) -> int | None:
    """The definition: the newest ``patience`` values are no better than the best before them."""
    for end in range(1, len(values) + 1):
        usable = [v for v in values[:end] if v is not None and math.isfinite(v)]
        window = values[max(0, end - patience) : end]
        before = [v for v in values[: end - patience] if v is not None and math.isfinite(v)]
        if end < patience or (end == patience and usable):
            continue
        fresh = [v for v in window if v is not None and math.isfinite(v)]
        best = max(before, default=-math.inf) if grows else min(before, default=math.inf)
        if not any(v > best if grows else v < best for v in fresh):
            return end
    return None


VALUES = st.lists(
    st.one_of(st.none(), st.just(math.nan), st.integers(0, 6).map(float)), max_size=20
)


@given(values=VALUES, patience=st.integers(1, 5), grows=st.booleans())
def test_it_ends_by_the_definition(values: list[float | None], patience: int, grows: bool) -> None:
    target = {"metric": "accuracy", "value": 1e9, "direction": "at_least"}
    keys: dict[str, Any] = {"target": target} if grows else {}
    rule = StoppingRule(train(patience=patience, **keys))
    assert ends_at(rule, values) == slowly(values, patience, grows=grows)


@given(values=VALUES, patience=st.integers(1, 5), saved=st.integers(0, 20), lost=st.integers(0, 20))
def test_a_resumed_run_continues_to_count(
    values: Any, patience: int, saved: int, lost: int
) -> None:
    """Evaluations after the checkpoint are in the log, and are made again."""
    config, saved = train(patience=patience), min(saved, len(values))
    log = [evaluation(step, value) for step, value in enumerate(values[: saved + lost], 1)]
    whole = slowly(values, patience, grows=False)
    found = ends_at(StoppingRule(config, log), values[saved:], saved + 1)
    assert found == whole if whole is None or whole > saved else True


def test_only_evaluations_of_all_regions_before_the_end_count() -> None:
    rule = StoppingRule(train(patience=1))
    assert rule.after(evaluation(1, 1.0)) is None
    assert rule.after(evaluation(2, 2.0, region="a")) is None
    assert rule.after(evaluation(2, 2.0, final=True)) is None
    stop = rule.after(evaluation(2, 2.0))
    assert stop is not None and stop.reason == "patience"
    assert stop.cause == "loss has not improved in 1 evaluation; the best was 1"


def test_a_target_is_a_reason_of_its_own() -> None:
    target = {"metric": "loss", "value": 0.5, "direction": "at_most"}
    rule = StoppingRule(train(patience=3, target=target))
    assert rule.after(evaluation(1, 1.0)) is None
    stop = rule.after(evaluation(2, 0.5))
    assert stop is not None and (stop.reason, stop.cause) == ("target", "loss reached 0.5")


def test_the_metric_is_that_of_the_best_model_first() -> None:
    target = {"metric": "loss", "value": 0.5, "direction": "at_most"}
    best = {"metric": "accuracy", "mode": "max"}
    assert train(patience=1).watched.metric == "loss"
    assert train(patience=1, target=target).watched.mode == "min"
    assert train(patience=1, target=target, keep_best=best).watched.metric == "accuracy"


def test_a_metric_that_is_not_there_is_named() -> None:
    best = {"metric": "recall", "mode": "max"}
    event = evaluation(1, 1.0)
    with pytest.raises(ConfigError, match=r"train\.keep_best\.metric"):
        StoppingRule(train(patience=1, keep_best=best)).after(event)
    assert StoppingRule(train(patience=1, keep_best=best), is_strict=False).after(event) is None


def test_a_loop_that_never_reports_the_metric_is_noted_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    target = {"metric": "recall", "value": 0.5, "direction": "at_least"}
    rule = StoppingRule(train(patience=1, target=target), is_strict=False)
    for step in (1, 2):
        assert rule.after(evaluation(step, 1.0)) is None
    (record,) = caplog.records
    assert (
        "has no effect: the regions' evaluations have no 'recall', but accuracy, loss"
        in record.message
    )


@pytest.mark.parametrize("regions", [["a"], ["a", "b"]])
def test_a_run_ends_and_says_why(data_dir, regions: list[str]) -> None:
    config = experiment(
        regions=[{"name": name} for name in regions],
        optimizer=FLAT,
        train={"steps": 40, "eval_every": 2, "patience": 3},
    )
    run = Run(config, data_dir).go()
    (stop,) = run.of("stop_requested")
    assert stop["reason"] == "patience"
    steps = [e["step"] for e in run.of("eval") if e["region"] is None]
    assert steps[3] == 8 and max(steps) < 40  # the first one counts as an improvement


def test_summary_and_report_name_the_reason(tmp_path) -> None:
    sections = {
        "optimizer": FLAT,
        "train": {"steps": 40, "eval_every": 2, "patience": 3},
        "run": {"dir": str(tmp_path)},
    }
    run = geo_ray.simulate(BASE | sections)
    assert run.summary.early_stop is not None
    assert run.summary.early_stop.reason == "patience"
    assert "has not improved in 3 evaluations" in run.summary.early_stop.cause
    page = (Path(run.path) / "report.html").read_text()
    assert "ended early" in page and run.summary.early_stop.cause in page
    whole = geo_ray.simulate(BASE | {"run": {"dir": str(tmp_path)}})
    assert whole.summary.early_stop is None


def test_a_run_that_improves_goes_to_its_end(data_dir) -> None:
    train_ = {"steps": 12, "eval_every": 2, "patience": 1}
    run = Run(experiment(train=train_, optimizer={"kind": "sgd", "lr": 0.02}), data_dir).go()
    assert not run.of("stop_requested")


def test_without_evaluations_there_is_nothing_to_wait_for() -> None:
    with pytest.raises(ConfigError, match=r"train\.patience"):
        experiment(train={"steps": 4, "eval_every": 0, "patience": 2})
