"""The best model of simulated runs: exactly what was evaluated, by whom the rule says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from geo_ray.experiment.experiment import Experiment
from geo_ray.runs.evaluation import EvalNotes, Evaluation, regions_agree
from geo_ray.strategies.registry import STRATEGIES
from geo_ray.telemetry.summary import Best
from tests.support.best_support import earliest_best, metrics_of
from tests.support.train_support import experiment_of, simulate
from tests.support.world_support import of_kind

KEEP = {"metric": "accuracy", "mode": "max"}
UNEVEN = {"link": {"rate_mbps": 20, "delay_s": 0.02}, "step_s": 0.1}
UNEVEN |= {"step_s_by_region": {"eu-west": 0.23}}
SHARDS = [{"name": "us-east", "ps_shards": 2}, {"name": "eu-west", "ps_shards": 2}]


def config_of(path: Path, kind: str, train: dict[str, Any], **more: Any) -> Experiment:
    sections = {"regions": SHARDS, "emulate": UNEVEN} | more
    train = {"steps": 18, "eval_every": 4, "keep_best": KEEP} | train
    return experiment_of(path, **of_kind(kind, train=train, **sections))


@pytest.mark.parametrize("kind", ["bsp", "diloco", "sma", "asgd_ga", "fedasync", "fedavg"])
def test_the_file_holds_the_model_that_was_evaluated_best(tmp_path: Path, kind: str) -> None:
    large = {"kind": "momentum", "lr": 0.4}  # it gets worse again
    config = config_of(tmp_path, kind, {"eval_every": 3}, optimizer=large)
    done = simulate(config, tmp_path)
    best = done.summary.best
    assert best is not None
    region = None if kind in {"bsp", "diloco"} else "us-east"
    assert best.region == region
    assert (best.value, best.step) == earliest_best(done.events, region)
    assert metrics_of(done.run.path, region) == pytest.approx(best.metrics)
    assert Best.of(done.of("best_kept")[-1].fields) == best
    names = {path.name for path in done.run.path.iterdir()}
    assert "model-best.safetensors" in names and "candidates" not in names
    assert not [name for name in names if name.endswith(".tmp")]


@pytest.mark.parametrize("kind", STRATEGIES)
def test_regions_that_are_said_to_agree_do(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Evaluation] = []
    real = EvalNotes.take

    def spy(notes: EvalNotes, finished: list[Evaluation], t_s: float, leader: str) -> str | None:
        told.extend(finished)
        return real(notes, finished, t_s, leader)

    monkeypatch.setattr(EvalNotes, "take", spy)
    regions = [{"name": "us-east", "workers": 2}, {"name": "eu-west"}]
    config = config_of(tmp_path, kind, {"steps": 11, "eval_every": 2}, regions=regions)
    simulate(config, tmp_path)
    agree = regions_agree(config)
    together = [d.one_model for d in told if d.region is None]
    assert together and all(together) if agree else not any(together)
    at_once = {"bsp", "fedssgd", "demo", "hfa", "diloco", "muloco", "sparseloco"}
    assert agree == (kind in at_once)


def test_the_target_ends_the_run_with_its_last_evaluation_as_the_best(tmp_path: Path) -> None:
    target = {"metric": "accuracy", "value": 0.2, "direction": "at_least"}
    train = {"steps": 200, "eval_every": 2, "target": target}
    done = simulate(config_of(tmp_path, "bsp", train), tmp_path)
    best = done.summary.best
    assert done.summary.steps < 200 and best.value >= 0.2
    evals = [e for e in done.of("eval") if e["region"] is None]
    assert evals[-1]["final"]
    assert (best.value, best.step) == earliest_best(evals, None)


def test_one_region(tmp_path: Path) -> None:
    config = config_of(
        tmp_path, "bsp", {}, regions=[{"name": "us-east", "workers": 2}], emulate={"step_s": 0.1}
    )
    done = simulate(config, tmp_path)
    assert done.summary.best.region is None
    assert metrics_of(done.run.path, None) == pytest.approx(done.summary.best.metrics)


def test_keeping_the_best_changes_nothing_else(tmp_path: Path) -> None:
    with_best = simulate(config_of(tmp_path / "a", "sma", {}), tmp_path)
    without = simulate(config_of(tmp_path / "b", "sma", {"keep_best": None}), tmp_path)
    assert with_best.summary.digest == without.summary.digest
    assert without.summary.best is None and not without.run.best_model.exists()
