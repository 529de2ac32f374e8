"""Regions that are process groups, on a real local cluster."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import geo_ray
from geo_ray.base.errors import LoopFailedError, RankLostError, RankOutOfMemoryError
from geo_ray.telemetry.event_log import EVENTS_FILE, read_events
from tests.support.pages import ROOT, commands, save

PAGE = "docs/guides/groups.md"
ERRORS = (RankLostError, RankOutOfMemoryError, LoopFailedError)


@pytest.mark.slow
def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save(PAGE)
    named = set(re.findall(r"^\| `([A-Z_]+)`", (ROOT / PAGE).read_text(), flags=re.M))
    assert named == {each.code for each in ERRORS}
    assert commands(PAGE) == ["geo-ray train groups.yaml"]
    run = geo_ray.train("groups.yaml")
    assert run.summary.steps == 12
    assert run.summary.samples == 2 * 2 * 12 * 8
    assert run.summary.rounds == 3
    found = load_file(run.model_path)
    assert {name: tuple(each.shape) for name, each in found.items()} == {
        "0.weight": (16, 8),
        "0.bias": (16,),
        "2.weight": (2, 16),
        "2.bias": (2,),
    }
    assert all(torch.isfinite(each).all() for each in found.values())
    kinds = [event.kind for event in read_events(run.path / EVENTS_FILE)]
    assert kinds.count("step") == 6
    assert "region_lost" not in kinds and "worker_lost" not in kinds
    assert run.report_path.exists()
