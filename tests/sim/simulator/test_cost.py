"""What simulating many workers takes is told before it begins."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from geo_ray.data.tasks.load import load_task
from geo_ray.runs.data import prepare_manifest
from geo_ray.runs.directory import create
from geo_ray.simulator.run import MANY_WORKERS, cost_note, simulate
from tests.support.train_support import EventSink
from tests.support.world_support import experiment


def note_of(tmp_path: Path, **sections: object) -> str | None:
    config = experiment(**sections)
    task = load_task(config.task, tmp_path)
    manifest, _ = prepare_manifest(config, task, tmp_path, tmp_path / "data")
    return cost_note(config, task, manifest)


def test_few_workers_cost_nothing_worth_a_word(tmp_path: Path) -> None:
    regions = [{"name": "a", "workers": MANY_WORKERS - 2}, {"name": "b"}]
    assert note_of(tmp_path, regions=regions) is None


@pytest.mark.parametrize(
    ("strategy", "rows"), [({"kind": "sma", "interval": 2}, 4), ({"kind": "fedavg"}, 4)]
)
def test_many_workers_are_told_with_rows_time_and_memory(
    tmp_path: Path, strategy: dict[str, object], rows: int
) -> None:
    regions = [{"name": "a", "workers": 300}, {"name": "b"}]
    note = note_of(tmp_path, regions=regions, strategy=strategy)
    assert note is not None and note.startswith("regions: 301 workers are simulated")
    found = re.search(r"([\d,]+) rows in all, take about [\d.e+]+ (s|min|h)", note)
    assert found is not None, note
    assert int(found[1].replace(",", "")) == experiment(regions=regions, strategy=strategy).rows
    assert re.search(rf"ms for {rows} rows\).+ at least [\d.]+ GB", note)


def test_it_is_told_before_the_first_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = experiment(
        regions=[{"name": "a", "workers": MANY_WORKERS}, {"name": "b"}],
        train={"steps": 1, "eval_every": 0},
    )
    seen: list[str] = []

    def sink(event: object) -> None:
        seen.append(f"{len([m for m in caplog.messages if 'are simulated' in m])}")

    run = create(config, tmp_path)
    with caplog.at_level(logging.WARNING):
        simulate(config, run, EventSink(sink))
    assert seen and set(seen) == {"1"}
