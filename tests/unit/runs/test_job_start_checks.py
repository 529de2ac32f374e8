"""What is refused or said before a run begins."""

from __future__ import annotations

import logging
from pathlib import Path
from textwrap import dedent

import pytest
import torch
from click.testing import CliRunner

from geo_ray.base.errors import ConfigError, TaskOutputError
from geo_ray.cli.main import root
from geo_ray.data.reader import RegionReader
from geo_ray.data.tasks.ctr import Ctr
from geo_ray.runs.build import check_device
from geo_ray.runs.data import open_readers, prepare_manifest
from geo_ray.runs.start_checks import check_metric_names, metrics_there, start_notes, warn_at_start
from tests.support.job_support import TEXT, digits, experiment

TARGET = "train.target={metric: accurracy, value: 0.5, direction: at_least}"
GPU = ("device=cuda:7", "regions.0.gpus_per_worker=1", "regions.1.gpus_per_worker=1")


@pytest.mark.skipif(torch.cuda.device_count() > 7, reason="this machine has GPU 7")
@pytest.mark.parametrize("verb", ["simulate", "train", "compare"])
def test_a_gpu_that_is_not_there_is_told_before_anything_is_made(verb, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(TEXT)
    changes = [word for one in GPU for word in ("--set", one)]
    more = ["--strategies", "sma"] if verb == "compare" else ["--plain"]
    error = CliRunner().invoke(root, [verb, "run.yaml", *changes, *more]).exception
    assert isinstance(error, ConfigError) and "device: cuda:7, but PyTorch finds" in error.message
    assert "device=cpu" in error.fix
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]


def test_the_cpu_is_always_there():
    check_device(experiment())


def test_a_simulation_with_such_a_target_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(TEXT)
    done = CliRunner().invoke(root, ["simulate", "run.yaml", "--plain", "--set", TARGET])
    assert "train.target.metric" in str(done.exception)
    assert not any((tmp_path / "runs").iterdir())


def test_a_batch_larger_than_a_regions_rows_is_warned_of(tmp_path: Path, caplog):
    segments = experiment("data.batch_size=100")
    manifest, _ = prepare_manifest(segments, digits(), tmp_path, tmp_path)
    with caplog.at_level(logging.WARNING):
        warn_at_start(segments, manifest, simulated=True)
    assert caplog.messages == []
    rows = manifest.rows("us", "train")
    with caplog.at_level(logging.WARNING):
        warn_at_start(experiment(f"data.batch_size={rows + 1}"), manifest, simulated=True)
    assert any(f"'us' has {rows} training rows" in text for text in caplog.messages)
    assert all("data.batch_size" in text for text in caplog.messages)
    caplog.clear()
    uneven = experiment(f"regions.0.batch_sizes=[1, {10 * rows}]")
    with caplog.at_level(logging.WARNING):
        warn_at_start(uneven, manifest, simulated=True)
    (text,) = caplog.messages
    assert "'eu'" in text and "batch_sizes of the region" in text


def notes_of(tmp_path: Path, *changes: str, cores: int | None = 2) -> list[str]:
    found = experiment(*changes)
    manifest, _ = prepare_manifest(found, digits(), tmp_path, tmp_path)
    return start_notes(found, manifest, cores)


def test_what_would_happen_once_only_is_told(tmp_path: Path) -> None:
    assert notes_of(tmp_path, "train.eval_every=10", "strategy.interval=10") == []
    (late,) = notes_of(tmp_path, "train.eval_every=11", "strategy.interval=10")
    assert late.startswith("train.eval_every: 11 is beyond train.steps = 10")
    (alone,) = notes_of(tmp_path, "train.eval_every=10", "strategy.interval=11")
    assert alone.startswith("strategy.interval: 11 is beyond train.steps = 10")
    one = (
        "regions=[{name: eu}]",
        "train.eval_every=5",
        "strategy.interval=99",
        "data.leave_out=[us]",
    )
    assert notes_of(tmp_path, *one) == []


def test_many_workers_on_few_cores_are_told(tmp_path: Path) -> None:
    many = ("train.eval_every=5", "regions.0.workers=500")
    (note,) = notes_of(tmp_path, *many)
    assert "501 worker processes" in note and "on 2 cores" in note
    assert notes_of(tmp_path, *many, cores=None) == []
    assert notes_of(tmp_path, *many, cores=200) == []
    assert notes_of(tmp_path, *many, "cluster={kind: existing}") == []


def test_an_evaluation_that_raises_is_told_before_anything_starts(tmp_path, monkeypatch):
    """The first evaluation may be hours away; `test_train_errors.py` has the same of training."""
    monkeypatch.chdir(tmp_path)
    source = """
    from geo_ray.data.tasks.digits import Digits

    class Broken(Digits):
        def metrics(self, stats):
            return {"accuracy": stats["nothing"].sum()}
    """
    (tmp_path / "broken.py").write_text(dedent(source))
    text = TEXT.replace("use: digits", "use: broken.py:Broken")
    (tmp_path / "run.yaml").write_text(text)
    error = CliRunner().invoke(root, ["simulate", "run.yaml", "--plain"]).exception
    assert isinstance(error, TaskOutputError) and "metrics raised KeyError" in error.message
    assert "broken.py:6" in error.message
    assert not any((tmp_path / "runs").iterdir())


def test_rows_of_a_manifest_are_tried_where_they_are_read(tmp_path: Path) -> None:
    """As a region's first worker does: by the reader of its region; names are put together."""
    made, wrong = experiment(), experiment(TARGET)
    manifest, _ = prepare_manifest(made, digits(), tmp_path, tmp_path)
    found = set()
    for region in ("eu", "us"):
        _, heldout = open_readers(made, manifest, region)
        found |= metrics_there(wrong, digits(), heldout)
    assert found >= {"loss", "accuracy", "base_rate"}
    check_metric_names(made, found)
    with pytest.raises(ConfigError, match=r"train\.target\.metric.*no 'accurracy'"):
        check_metric_names(wrong, found)


def test_patience_without_the_metric_that_it_watches_by_default() -> None:
    made = experiment("train.patience=2", "train.eval_every=1")
    check_metric_names(made, {"loss"})
    with pytest.raises(ConfigError, match=r"train\.patience: .* no 'loss'") as refused:
        check_metric_names(made, {"rmse"})
    assert "rmse" in str(refused.value.fix) and "train.target" in str(refused.value.fix)


def test_a_metric_that_only_other_regions_have_is_there(tmp_path: Path) -> None:
    """All rows of the averager's region have one label: no AUC there, but one over all."""
    target = "train.target={metric: auc, value: 1.0, direction: at_least}"
    options = "task={use: ctr, options: {rows: 2000, hidden: 4}}"
    config = experiment(options, target, "regions=[{name: eu}, {name: us}]")
    task = Ctr(Ctr.Options(rows=2000, hidden=4))
    manifest, _ = prepare_manifest(config, task, tmp_path, tmp_path)
    _, eu = open_readers(config, manifest, "eu")
    one_label = Only(eu, task.label_column)
    assert "auc" not in metrics_there(config, task, one_label)
    _, us = open_readers(config, manifest, "us")
    check_metric_names(
        config, metrics_there(config, task, one_label) | metrics_there(config, task, us)
    )


class Only:
    """The rows of a reader that have one label."""

    def __init__(self, reader: RegionReader, label: str) -> None:
        self._reader, self._label = reader, label

    def read(self, start: int, count: int):
        return next(self.scan(1))

    def scan(self, batch_rows: int):
        for columns in self._reader.scan(batch_rows):
            kept = columns[self._label] == 0
            if kept.any():
                yield {name: values[kept] for name, values in columns.items()}


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("averager={region: eu, standby: us}", "averager.standby is not simulated"),
        ("transfers={aggregate: true}", "transfers.aggregate is not simulated"),
    ],
)
def test_what_is_not_simulated_is_said(tmp_path: Path, key: str, said: str) -> None:
    config = experiment("strategy={kind: asgd}", key)
    manifest, _ = prepare_manifest(config, digits(), tmp_path, tmp_path / "data")
    assert any(said in note for note in start_notes(config, manifest, None))
    assert not any("simulated" in note for note in start_notes(config, manifest, 64))
