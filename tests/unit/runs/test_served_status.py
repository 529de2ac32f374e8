"""The commands that read a run show what is particular to runs whose regions join."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import geo_ray
from geo_ray.api.train import name_run
from geo_ray.base import errors
from geo_ray.cli.checkpoints import checkpoints as checkpoints_command
from geo_ray.cli.main import _main
from geo_ray.runs import directory
from geo_ray.runs.directory import RunDirectory
from geo_ray.runs.lease import driving, seeker_of
from geo_ray.runs.resume import check_resumable
from geo_ray.storage.checkpoint import CheckpointStore
from geo_ray.storage.manifest import AVERAGER_PART, CheckpointManifest
from geo_ray.storage.parts import write_part
from geo_ray.telemetry.event_log import EVENTS_FILE, EventLog
from geo_ray.telemetry.status import status_lines
from tests.support.observe_support import started

NAMES = ("eu", "us")


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., RunDirectory]:
    def made(**sections: Any) -> RunDirectory:
        tree: dict[str, Any] = {
            "name": "served",
            "regions": [{"name": name, "join": True} for name in NAMES],
            "strategy": {"kind": "diloco"},
            "train": {"steps": 8},
            "run": {"dir": str(tmp_path / "runs")},
            **sections,
        }
        found = directory.create(geo_ray.load_config(tree), tmp_path)
        kind, t_s, fields = started(regions=list(NAMES))
        with EventLog(found.path / EVENTS_FILE) as log:
            log.write(kind, t_s, **fields)
        return found

    return made


@pytest.fixture
def run(make_run: Callable[..., RunDirectory]) -> RunDirectory:
    return make_run()


@pytest.mark.parametrize("standby", [None, "auto"])
def test_status_shows_where_a_run_is_served(
    make_run: Callable[..., RunDirectory], standby: str | None
) -> None:
    run = make_run(averager={"standby": standby})
    none = "" if standby is None else ", no standby at present"

    def shown() -> tuple[str | None, str | None, list[str]]:
        found = geo_ray.status(run.path)
        lines = [line.strip() for line in status_lines(found) if "served at" in line]
        return found.address, found.standby, lines

    first, second = "geo-ray://10.0.0.1:7447", "geo-ray://10.0.0.2:7448"
    standby_at = "geo-ray://10.0.0.2:7448"
    with driving(seeker_of(run.path, print)), EventLog(run.path / EVENTS_FILE) as log:
        kind, t_s, fields = started(regions=list(NAMES), address=first)
        log.write(kind, t_s, **fields)
        assert shown() == (first, None, [f"served at  {first}{none}"])
        log.write("server_standby_ready", 1.0, address="geo-ray://10.0.0.2:7448", term=1)
        line = f"served at  {first}, standby at geo-ray://10.0.0.2:7448"
        assert shown() == (first, "geo-ray://10.0.0.2:7448", [line])
        log.write("server_standby_lost", 2.0, address="geo-ray://10.0.0.2:7448", cause="killed")
        assert shown() == (first, None, [f"served at  {first}{none}"])
        log.write("server_standby_ready", 3.0, address=standby_at, term=1, pid=12)
        line = f"served at  {first}, standby at {standby_at} (process 12)"
        assert shown() == (first, standby_at, [line])
        about = {"address": second, "term": 2, "took_s": 0.5, "cause": "killed", "pid": 12}
        log.write("server_replaced", 4.0, **about)
        assert shown() == (second, None, [f"served at  {second} (process 12){none}"])
    assert shown() == (second, None, [])  # it is not served any more


def test_status_shows_the_addresses_of_other_holders(run: RunDirectory) -> None:
    """Regions must reach them, too."""
    holders = ("geo-ray://10.0.0.1:7448", "geo-ray://10.0.0.3:7449")
    address = "geo-ray://10.0.0.1:7447"
    more = {"address": address, "holders": list(holders), "pid": 11}
    with driving(seeker_of(run.path, print)), EventLog(run.path / EVENTS_FILE) as log:
        kind, t_s, fields = started(regions=list(NAMES), **more)
        log.write(kind, t_s, **fields)
        found = geo_ray.status(run.path)
        assert found.holders == holders
        shown = [line.split() for line in status_lines(found)]
        assert ["holders", f"{holders[0]},", holders[1]] in shown
        assert ["served", "at", address, "(process", "11)"] in shown
    found = geo_ray.status(run.path)
    assert not [line for line in status_lines(found) if "holders" in line]


@pytest.mark.parametrize(
    ("regions", "command"),
    [
        ([{"name": "eu", "join": True}], "geo-ray serve CONFIG"),
        ([{"name": "eu", "join": True}, {"name": "us", "group": {}}], "geo-ray train CONFIG"),
        ([{"name": "eu"}], "geo-ray train CONFIG"),
    ],
)
def test_the_command_that_starts_a_run_again(
    regions: list[dict[str, Any]], command: str, tmp_path: Path
) -> None:
    tree: dict[str, Any] = {
        "name": "served",
        "regions": regions,
        "strategy": {"kind": "diloco"},
        "train": {"steps": 8},
        "task": {"use": "digits"},
        "data": {"generate": {}},
        "optimizer": {"kind": "adamw"},
        "run": {"dir": str(tmp_path / "runs")},
    }
    if not any(region.get("join") is None for region in regions):
        del tree["task"], tree["optimizer"]
    experiment = geo_ray.load_config(tree)
    run = directory.create(experiment, tmp_path)
    fix = name_run(errors.InterruptedRunError("it stopped"), run.path).fix
    assert f"Start again with `{command}`" in fix and "--resume" not in fix
    with pytest.raises(errors.CheckpointMissingError) as refused:
        check_resumable(run, experiment, experiment)
    assert f"`{command}`" in refused.value.fix


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


@pytest.mark.parametrize("is_saved", [True, False])
def test_a_run_that_is_stopped_at_once_names_its_checkpoint(
    run: RunDirectory,
    is_saved: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    if is_saved:
        save(run, 0, ["eu", "us"])
    monkeypatch.setattr("geo_ray.api.train.drive", interrupted)
    monkeypatch.setattr("geo_ray.api.train.check_resumable", lambda *_, **__: None)
    with pytest.raises(SystemExit) as ended:
        _main(["train", "--resume", str(run.path)])
    assert ended.value.code == 130
    said = capsys.readouterr().err
    assert said.endswith("stopped\n")
    kept = f"the newest checkpoint is kept: `geo-ray train --resume {run.path}` continues from it"
    assert (kept in said.replace("\n", "")) == is_saved, said


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
