"""The commands that read a run show what is particular to runs whose regions join."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import geo_ray
from geo_ray.cli.checkpoints import checkpoints as checkpoints_command
from geo_ray.runs import directory
from geo_ray.runs.directory import RunDirectory
from geo_ray.storage.checkpoint import CheckpointStore
from geo_ray.storage.manifest import AVERAGER_PART, CheckpointManifest
from geo_ray.storage.parts import write_part
from geo_ray.telemetry.event_log import EVENTS_FILE, EventLog
from tests.support.observe_support import started

NAMES = ("eu", "us")


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    tree: dict[str, Any] = {
        "name": "served",
        "regions": [{"name": name, "join": True} for name in NAMES],
        "strategy": {"kind": "diloco"},
        "train": {"steps": 8},
        "run": {"dir": str(tmp_path / "runs")},
    }
    found = directory.create(geo_ray.load_config(tree), tmp_path)
    kind, t_s, fields = started(regions=list(NAMES))
    with EventLog(found.path / EVENTS_FILE) as log:
        log.write(kind, t_s, **fields)
    return found


def save(run: RunDirectory, id: int, regions: list[str]) -> None:
    """Save a checkpoint as a served run does: regions keep their own parts."""
    store = CheckpointStore(run.checkpoints)
    part = write_part(store.begin(id), f"{AVERAGER_PART}-00000", {"x": torch.ones(2)}, {})
    manifest = CheckpointManifest(
        id=id,
        step=4 * (id + 1),
        created="2026-11-29T10:00:00+00:00",
        config_digest="0" * 64,
        parts=(part,),
        extra={"attempt": 1, "regions": list(regions)},
    )
    store.commit(id, manifest)


def test_checkpoints_name_the_regions_that_have_saved(run: RunDirectory) -> None:
    save(run, 0, ["eu", "us"])
    save(run, 1, ["us"])
    rows = geo_ray.checkpoints(run.path).to_pylist()
    assert [(row["id"], row["regions"], row["state"]) for row in rows] == [
        (0, "eu, us", "healthy"),
        (1, "us", "healthy"),
    ]
    shown = CliRunner().invoke(checkpoints_command, [str(run.path)])
    assert "eu, us" in shown.output
