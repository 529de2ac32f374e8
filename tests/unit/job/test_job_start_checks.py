"""What is refused or said before a run begins."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from job_support import TEXT, digits, experiment

from geo_ray.cli.main import root
from geo_ray.errors import ConfigError
from geo_ray.job.build import check_device
from geo_ray.job.data import prepare_manifest, warn_of_few_rows

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
    few = experiment("data.batch_size=100")
    manifest, _ = prepare_manifest(few, digits(), tmp_path, tmp_path)
    with caplog.at_level(logging.WARNING):
        warn_of_few_rows(few, manifest)
    assert caplog.messages == []
    rows = manifest.rows("us", "train")
    with caplog.at_level(logging.WARNING):
        warn_of_few_rows(experiment(f"data.batch_size={rows + 1}"), manifest)
    assert any(f"'us' has {rows} training rows" in text for text in caplog.messages)
    assert all("data.batch_size" in text for text in caplog.messages)
    caplog.clear()
    uneven = experiment(f"regions.0.batch_sizes=[1, {10 * rows}]")
    with caplog.at_level(logging.WARNING):
        warn_of_few_rows(uneven, manifest)
    (text,) = caplog.messages
    assert "'eu'" in text and "batch_sizes of the region" in text
