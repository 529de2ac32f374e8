"""From outcomes to a table; and what a variant's text means."""

from __future__ import annotations

import math
import threading
import time
from pathlib import Path
from string import ascii_lowercase, digits
from typing import Any

import pytest

import geo_ray
from geo_ray.base.errors import ConfigError, RunError
from geo_ray.base.load import load_text
from geo_ray.experiment.experiment import Experiment
from geo_ray.planner.actual_cost import Bill
from geo_ray.sweep import runner
from geo_ray.sweep.compare import (
    Case,
    CaseDirectory,
    Variant,
    best_rate,
    experiment_of,
    goal_of,
    ordered,
    parse_variant,
    priced,
    row_of,
    spread,
)
from geo_ray.sweep.runner import TrialsFile, run_trials
from geo_ray.sweep.trial import Outcome, TrialSpec, failed_outcome
from geo_ray.telemetry.summary import Target
from geo_ray.telemetry.totals import SentUntil
from tests.support.observe_support import events, started, wan

CONFIG = Path(__file__).parents[3] / "configs" / "quickstart.yaml"
TARGET = Target(metric="accuracy", value=0.9, direction="at_least")


def outcome(label="sma", rate=1.0, seed=0, to_target_s=None, accuracy=0.8, failed=None) -> Outcome:
    return Outcome(
        label=label,
        rate=rate,
        seed=seed,
        digest="",
        seconds=10.0,
        time_to_target_s=to_target_s,
        samples_to_target=None if to_target_s is None else int(100 * to_target_s),
        rounds=5,
        wan_bytes=1000,
        idle_fraction=0.25,
        usd=None,
        eval={} if failed else {"accuracy": accuracy, "loss": 1 - accuracy},
        points=(),
        failed=failed,
    )


def test_the_best_rate_reaches_the_target_first():
    runs = [outcome(rate=0.5, to_target_s=9), outcome(rate=1, to_target_s=4), outcome(rate=2)]
    assert best_rate(runs, TARGET) == 1


def test_without_reaching_it_the_better_end_decides_and_failures_come_last():
    runs = [outcome(rate=0.5, accuracy=0.7), outcome(rate=1, accuracy=0.6)]
    assert best_rate([*runs, outcome(rate=2, failed="nan")], TARGET) == 0.5
    assert best_rate([outcome(rate=2, failed="nan"), outcome(rate=0.5, accuracy=0.1)], None) == 0.5


def test_the_goal_is_the_targets_metric_or_the_loss():
    assert goal_of(TARGET, [outcome()]) == ("accuracy", True)
    assert goal_of(None, [outcome()]) == ("loss", False)


def test_a_row_has_medians_and_ranges_and_counts_what_failed():
    runs = [
        outcome(seed=0, to_target_s=3, accuracy=0.91),
        outcome(seed=1, to_target_s=5, accuracy=0.95),
        outcome(seed=2, failed="nan"),
    ]
    row = row_of(runs, TARGET)
    assert (row.runs, row.reached) == (3, 2)
    assert (row.to_target_s.low, row.to_target_s.median, row.to_target_s.high) == (3, 4, 5)
    assert row.final.median == pytest.approx(0.93)
    assert math.isnan(row.usd.median)


def test_rows_are_ordered_by_reaching_the_target_then_time_then_metric():
    rows = [
        row_of([outcome("never", accuracy=0.99)], TARGET),
        row_of([outcome("slow", to_target_s=9)], TARGET),
        row_of([outcome("fast", to_target_s=2)], TARGET),
        row_of([outcome("worse", accuracy=0.5)], TARGET),
    ]
    names = [row.label for row in ordered(rows, grows=True)]
    assert names == ["fast", "slow", "never", "worse"]


def test_a_spread_of_nothing_is_not_a_number():
    assert math.isnan(spread([None, math.inf]).median)
    assert spread([None, 2.0]).high == 2.0


def test_a_run_is_priced_until_its_target_or_else_to_its_end():
    bill = Bill(3600.0, 360.0, {"a": {"b": 5.0}})
    sent = {"a": {"b": 2e9}}
    whole = outcome().model_copy(update={"sent_bytes": sent})
    reached = outcome(to_target_s=4).model_copy(update={"sent_bytes": sent})
    assert priced(whole, bill).usd == pytest.approx(10 * 1.1 + 10)
    assert priced(reached, bill).usd == pytest.approx(4 * 1.1 + 10)
    assert priced(whole, None).usd is None
    assert priced(outcome(), bill).usd is None, "bytes by pair are not known"
    assert priced(whole.model_copy(update={"failed": "nan"}), bill).usd is None
    silent = whole.model_copy(update={"sent_bytes": {"b": {"a": 0.0}}})
    assert priced(silent, bill).usd == pytest.approx(11)
    across = whole.model_copy(update={"sent_bytes": {"b": {"c": 1.0}}})
    assert priced(across, bill).usd is None, "a pair without a price is not free"


@pytest.mark.parametrize(
    ("until_s", "count"), [(1.0, 50.0), (2.0, 100.0), (3.0, 150.0), (4.0, 200.0), (math.inf, 230.0)]
)
def test_bytes_until_a_time_are_exact_at_events_and_even_between(until_s, count):
    sent = SentUntil(until_s)
    for event in events(
        [
            started(),
            wan("a", "b", 2.0, update=90, control=10),
            wan("a", "a", 2.0, update=1),
            wan("a", "b", 4.0, update=190, control=10),
            started(),
            wan("a", "b", 5.0, update=30),
        ]
    ):
        sent.feed(event)
    assert sent.by_link() == {("a", "b"): count}


def test_a_variant_changes_strategy_codec_and_other_sections(tmp_path):
    variant = parse_variant("diloco:interval=16:outer.lr=0.5:codec=int4:train.steps=7")
    experiment = experiment_of(Case(variant, 1.0, 3), CONFIG, [], tmp_path)
    assert experiment.strategy.kind == "diloco" and experiment.strategy.interval == 16
    assert experiment.codec.up.kind == experiment.codec.down.kind == "int4"
    assert (experiment.train.steps, experiment.seed) == (7, 3)
    assert experiment.strategy.outer.kind == "nesterov" and experiment.strategy.outer.lr == 0.5
    sparse = Case(parse_variant("sparseloco:codec=chunked_topk"), 1, 0)
    assert experiment_of(sparse, CONFIG, [], tmp_path).codec.down is None


@pytest.mark.parametrize(("text", "key"), [("sma", "optimizer"), ("dc_asgd", "strategy")])
def test_a_rate_scales_the_learning_rate_that_the_strategy_trains_with(tmp_path, text, key):
    plain, half = (
        experiment_of(Case(parse_variant(text), rate, 0), CONFIG, [], tmp_path)
        for rate in (1.0, 0.5)
    )
    if key == "optimizer":
        assert half.optimizer.lr == pytest.approx(0.5 * plain.optimizer.lr)
        assert half.optimizer.momentum == plain.optimizer.momentum
    else:
        assert half.strategy.outer.lr == pytest.approx(0.5 * plain.strategy.outer.lr)
        assert half.optimizer == plain.optimizer


def test_what_is_no_variant_is_named():
    with pytest.raises(ConfigError, match="no strategy 'foo'"):
        parse_variant("foo:interval=3")
    with pytest.raises(ConfigError, match="key=value"):
        parse_variant("sma:interval")


def test_directories_are_readable_and_never_shared() -> None:
    def variant(label: str) -> Variant:
        return Variant(label, (f"strategy={label}",))

    usual = CaseDirectory((variant("sma:interval=4"), variant("bsp")), (0.5, 1.0))
    assert usual.of(Case(variant("sma:interval=4"), 0.5, 3)) == "sma-interval-4_x0.5_s3"
    variants = tuple(map(variant, ("a_b.py:X", "a-b.py:X", "A_b.py:X", "bsp")))
    rates = (1.0, 1.0000001, 1.0000002, 2.0)
    names = CaseDirectory(variants, rates)
    cases = [Case(each, rate, seed) for each in variants for rate in rates for seed in (0, 1)]
    found = [names.of(case).lower() for case in cases]
    assert len(set(found)) == len(cases)
    assert all(set(name) <= set(ascii_lowercase + digits + "-_.") for name in found)
    assert names.of(Case(variants[-1], 2.0, 0)) == "bsp_x2_s0"


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"strategies": "sma,bsp,sma"}, "strategies: sma is listed twice"),
        ({"strategies": ()}, "strategies: empty"),
        ({"strategies": "smma"}, "strategies: smma: no strategy 'smma'"),
        ({"rates": (0.5, math.nan)}, "rates: nan is not a factor"),
        ({"rates": (math.inf,)}, "rates: inf is not a factor"),
        ({"rates": (0.5, 0.0)}, "rates: 0.0 is not a factor"),
        ({"rates": (0.5, 1.0, 0.5)}, "rates: 0.5 is listed twice"),
        ({"rates": ()}, "rates: empty"),
        ({"seeds": 0}, "seeds: 0 runs"),
        ({"jobs": 0}, "jobs: 0 parallel runs"),
    ],
)
def test_wrong_arguments_are_refused_by_name(arguments, why, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        geo_ray.compare(CONFIG, **{"strategies": "sma", "out": tmp_path / "out"} | arguments)
    assert "--" not in str(caught.value) and not (tmp_path / "out").exists()


def test_a_run_that_failed_is_recorded_and_not_run_again(tmp_path, monkeypatch):
    text = (
        "name: run\ntask: {use: digits}\ndata: {generate: {}}\nregions: [{name: a}]\n"
        "strategy: {kind: bsp}\noptimizer: {kind: sgd}\ntrain: {steps: 1}\n"
    )
    experiment = load_text(text, [], Experiment, "run.yaml")
    failed = failed_outcome("bsp", 2.0, experiment, "loss is nan")
    trial, file = TrialSpec("bsp", 2.0, experiment, tmp_path), TrialsFile(tmp_path / "trials.jsonl")
    monkeypatch.setattr(TrialSpec, "measure", lambda *_: failed)
    assert list(run_trials([trial], file, None)) == [failed]
    monkeypatch.setattr(TrialSpec, "measure", lambda *_: pytest.fail("it was run again"))
    assert list(run_trials([trial], file, None)) == [failed]
    other = experiment.model_copy(update={"name": "other"})
    with pytest.raises(pytest.fail.Exception, match="run again"):
        list(run_trials([TrialSpec("bsp", 2.0, other, tmp_path)], file, None))


def test_a_trial_that_fails_loses_no_result_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The result is recorded first, whichever of the two is seen first."""
    for _ in range(20):
        ended = {name: threading.Event() for name in ("good", "bad")}

        def run(_: object, trial: Any, ended: dict[str, threading.Event] = ended) -> Any:
            if trial in ended:
                ended[trial].set()
            if trial == "bad":
                raise RunError("its process is gone", fix="Look.")
            return trial

        monkeypatch.setattr(runner._Processes, "run", run)
        trials: Any = ["first", "bad", "good"]
        found = []
        with pytest.raises(RunError):
            for each in runner.pooled(trials, 1):
                found.append(each)
                assert all(event.wait(60.0) for event in ended.values())
                time.sleep(0.01)  # until both futures are done
        assert sorted(found) == ["first", "good"]
