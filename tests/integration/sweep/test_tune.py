"""Searches on real Ray Tune with tiny trials: results, resumption after a kill, plain Tune code."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml

import geo_ray
from geo_ray.api.config import init_project
from geo_ray.base.errors import InterruptedRunError, TrialsFailedError, TuningDirectoryError
from geo_ray.base.load import load_tree
from geo_ray.experiment.experiment import Experiment
from geo_ray.ray_cluster.connect import ConnectedCluster
from geo_ray.ray_cluster.local_cluster import LocalCluster
from geo_ray.sweep.score import FAILED

QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart.yaml"
SMALL = [
    "train={steps: 8, eval_every: 2, target: {metric: accuracy, value: 0.25, direction: at_least}}",
    "emulate.step_s=0.02",
    "checkpoint.every_s=null",
]


def search_of(space: dict[str, Any], num_trials: int, **more: Any) -> dict[str, Any]:
    return {
        "base": str(QUICKSTART),
        "set": SMALL,
        "space": space,
        "search": {"trials": num_trials, **more.pop("search", {})},
        "trials": {"jobs": 2, "cluster": {"kind": "existing"}, **more.pop("trials", {})},
        **more,
    }


def test_a_search_ranks_its_trials_scores_failures_and_leaves_a_runnable_best(
    connected: ConnectedCluster, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    space = {
        "strategy.kind": {"choice": ["sma", "nbsync"]},
        "strategy.interval": {"randint": [1, 4], "when": {"strategy.kind": "sma"}},
        "optimizer.lr": {"choice": [0.05, 0.1, 1e6]},  # the last one diverges
    }
    prices = {"worker_usd_per_h": dict.fromkeys(connected.regions, 1.0)}
    search = search_of(
        space, 6, objectives=["time_to_target", "usd"], prices=prices, search={"seed": 3}
    )
    result = geo_ray.tune(search, out=tmp_path / "out", progress=True)
    told = capfd.readouterr().err
    assert "6/6" in told and "reached" not in result.tuning.goal.metric

    rows = result.tuning.rows
    assert len(rows) == len(result.grid) == 6
    base = result.tuning.base
    assert base is not None and base.values["strategy.interval"] == 4
    failed = [row for row in rows if row.values["optimizer.lr"] == 1e6]
    assert failed and all(row.scores[0] >= 1e9 for row in failed), "scored, not fatal"
    assert result.best.status == "reached" and rows[0] == result.best
    for row in rows:
        if row.status == "reached":
            alone = geo_ray.simulate(
                load_tree(
                    QUICKSTART, [*SMALL, f"run.dir={tmp_path / row.id}", "seed=1000"], Experiment
                ),
                [
                    f"strategy={json.dumps(section(row.values))}",
                    f"optimizer.lr={row.values['optimizer.lr']}",
                ],
            )
            assert alone.summary.time_to_target_s == pytest.approx(row.scores[0]), "on its own"
            break

    assert result.best_path is not None
    best = load_tree(result.best_path, (), Experiment)
    assert best.optimizer.lr == result.best.values["optimizer.lr"]
    saved = json.loads((tmp_path / "out" / "tune.json").read_text())
    assert saved["best"] == result.best.id and len(saved["trials"]) == 6
    assert "<script" not in result.page_path.read_text()
    assert result.table().num_rows == 6
    assert all(row.status != "running" for row in rows)

    with pytest.raises(TuningDirectoryError, match="exists"):
        geo_ray.tune(search, out=tmp_path / "out")
    other = {**search, "search": {"trials": 7, "seed": 3}}
    with pytest.raises(TuningDirectoryError, match="another search"):
        geo_ray.tune(other, out=tmp_path / "out", resume=True)
    proof = tmp_path / "proof"
    for name in ("tuner.pkl", "trainable.pkl", "searcher-state-x.pkl"):
        (tmp_path / "out" / "tune" / name).write_bytes(pickle.dumps(Planted(proof)))
    again = geo_ray.tune(search, out=tmp_path / "out", resume=True)
    assert not proof.exists(), "code from the search's folder was run"
    assert [row.id for row in again.tuning.rows] == [row.id for row in rows]
    assert [row.scores for row in again.tuning.rows] == [row.scores for row in rows]


class Planted:
    """What somebody else put into the folder of a search."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.proof),)


def section(values: dict[str, Any]) -> dict[str, Any]:
    kept = {"kind": values["strategy.kind"]}
    if "strategy.interval" in values:
        kept["interval"] = values["strategy.interval"]
    return kept


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["optuna", "hyperopt"])
def test_searches_that_learn_and_schedulers_that_end_early_go_together(
    connected: ConnectedCluster, tmp_path: Path, kind: str
) -> None:
    search = search_of(
        {"optimizer.lr": {"loguniform": [0.001, 0.2]}, "codec": {"choice": [None, "int8"]}},
        5,
        search={"kind": kind},
        schedule={"kind": "asha", "grace": 0.05, "factor": 2.0},
    )
    result = geo_ray.tune(search, out=tmp_path / "out")
    assert len(result.tuning.rows) == 5
    early = [row for row in result.tuning.rows if row.status == "stopped"]
    assert len(early) < 5 and all(row.points for row in early)
    assert result.best.counts


@pytest.mark.slow
def test_a_grid_is_run_in_full(connected: ConnectedCluster, tmp_path: Path) -> None:
    grids = {"strategy.interval": {"grid": [1, 2]}, "optimizer.lr": {"grid": [0.05, 0.1]}}
    search = search_of(grids, 1, search={"base_first": False})
    result = geo_ray.tune(search, out=tmp_path / "out")
    pairs = sorted((row.values["strategy.interval"], row.values["optimizer.lr"])
                   for row in result.tuning.rows)  # fmt: skip
    assert pairs == [(1, 0.05), (1, 0.1), (2, 0.05), (2, 0.1)]


@pytest.mark.slow
def test_a_search_of_which_every_trial_fails_is_an_error_that_says_why(
    connected: ConnectedCluster, tmp_path: Path
) -> None:
    best = {"train.keep_best": {"choice": [{"metric": "beauty", "mode": "max"}]}}
    search = search_of(best, 2, search={"base_first": False})
    with pytest.raises(TrialsFailedError, match="none of 2 trials") as caught:
        geo_ray.tune(search, out=tmp_path / "out")
    assert "beauty" in caught.value.message
    assert "beauty" in (tmp_path / "out" / "tune.html").read_text()
    assert not (tmp_path / "out" / "best.yaml").exists()


@pytest.mark.slow
def test_the_example_of_the_page_runs_on_a_cluster_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (Path(__file__).parents[3] / "docs" / "guides" / "python.md").read_text()
    (block,) = re.findall(r"^```python\n([^`]*geo_ray\.tune\(.*?)^```", text, flags=re.M | re.S)
    monkeypatch.chdir(tmp_path)
    init_project(".")
    names: dict[str, Any] = {"geo_ray": geo_ray}
    exec(compile(block, "docs/guides/python.md", "exec"), names)
    assert names["result"].best.counts and names["run"].summary.steps == 8
    assert not ray.is_initialized()


def test_plain_tune_code_takes_the_trainable(connected: ConnectedCluster, tmp_path: Path) -> None:
    from ray import tune

    from geo_ray.sweep.ray_tune import trainable

    trial = trainable(QUICKSTART, SMALL)
    tuner = tune.Tuner(
        trial,
        param_space={
            "strategy.kind": "sma",
            "strategy.interval": tune.grid_search([1, 0]),  # there is no interval of 0
            "regions.us-east.workers": 1,
        },
        run_config=tune.RunConfig(name="plain", storage_path=str(tmp_path), verbose=0),
    )
    results = tuner.fit()
    good = results.get_best_result("score_time_to_target", "min")
    assert good.config["strategy.interval"] == 1 and good.metrics["status"] == "reached"
    scores = sorted(results[place].metrics["score_time_to_target"] for place in range(2))
    assert scores[1] == FAILED, "a candidate that cannot be is scored"
    (wrong,) = [r for r in (results[0], results[1]) if r.metrics["status"] == "failed"]
    assert "strategy.interval" in wrong.metrics["why"]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "sign",
    [
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow),
        signal.SIGKILL,
    ],
)
def test_a_search_that_was_cut_off_goes_on_and_repeats_no_trial(
    ray_cluster: LocalCluster, tmp_path: Path, sign: signal.Signals
) -> None:
    search = search_of({"optimizer.lr": {"uniform": [0.03, 0.2]}}, 4)
    search["base"], search["trials"]["jobs"] = str(QUICKSTART), 1
    search["trials"]["cluster"] = {"kind": "existing", "address": ray_cluster.address}
    file, out = tmp_path / "search.yaml", tmp_path / "out"
    file.write_text(yaml.safe_dump(search))
    command = [sys.executable, "-m", "geo_ray.cli.main", "tune", str(file), "--out", str(out)]
    environment = {**os.environ, **ray_cluster.environment}
    first = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    assert first.stderr is not None
    for line in first.stderr:
        if line.startswith("1/4"):
            break
    first.send_signal(sign)
    _, rest = first.communicate(timeout=400)
    if sign != signal.SIGKILL:
        assert first.returncode == InterruptedRunError.exit_code, rest
        assert "stopped: the search was interrupted" in rest and "--resume" in rest
        assert (out / "tune.html").exists()  # of the base alone, which nothing beats: no best.yaml
    ended = [json.loads(line) for line in (out / "trials.jsonl").read_text().splitlines()]
    second = subprocess.run(
        [*command, "--resume"], capture_output=True, text=True, env=environment, timeout=400
    )
    assert second.returncode == 0, second.stderr
    after = reports(out)
    written = {each["values"]["optimizer.lr"]: values_of(each["reports"]) for each in ended}
    assert written, "a trial that was told of was not written down"
    told = second.stderr.count("/4")
    assert told == 4 - len(written), "a trial was repeated"
    repeated = {told[0]["config"]["optimizer.lr"]: values_of(told) for told in after.values()}
    assert {lr: repeated[lr] for lr in written} == written  # Ray Tune's own log may lack the last
    assert len(json.loads((out / "tune.json").read_text())["trials"]) == 4
    assert all("status" in told[-1] for told in after.values())


def values_of(told: list[dict[str, Any]]) -> list[tuple[float, float]]:
    return [(each["time_s"], each["accuracy"]) for each in told]


def reports(out: Path) -> dict[str, list[dict[str, Any]]]:
    """What every trial has told Ray Tune, by its number."""
    found = {}
    for path in (out / "tune").glob("*/result.json"):
        lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        if lines:
            found[path.parent.name] = lines
    return found
