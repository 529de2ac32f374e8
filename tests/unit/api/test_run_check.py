"""`geo-ray train --dry-run`: what would keep a run from starting, without anything that starts."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

import pytest
import ray
from click.testing import CliRunner, Result

import geo_ray
from geo_ray.api.check import check_run
from geo_ray.base import errors
from geo_ray.cli.main import root
from tests.support.job_support import TEXT


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trial.yaml").write_text(TEXT)
    return tmp_path


def test_a_dry_run_of_a_served_run_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    head = "name: a\nstrategy: {kind: diloco}\ntrain: {steps: 4}\n"
    (tmp_path / "own.py").write_text("raise RuntimeError\n")
    (tmp_path / "joined.yaml").write_text(f"{head}regions: [{{name: eu, join: true}}]\n")
    groups = "[{name: eu, group: {loop: own.py:train}}]"
    (tmp_path / "groups.yaml").write_text(f"{head}regions: {groups}\n")
    files = {path.name for path in tmp_path.iterdir()}
    served, trained = (
        CliRunner().invoke(root, [verb, "joined.yaml", "--dry-run"]) for verb in ("serve", "train")
    )
    assert served.exit_code == 0, served.output
    assert "nothing was started" in served.stdout and served.stdout == trained.stdout
    line = "joined by eu, which connect to these ports: averager at 7447\n"
    assert line in served.stdout and "optimizer" not in served.stdout
    more = ["--set", "serve={port: 9000, holders: 2}", "--set", "averager.standby=auto"]
    served = CliRunner().invoke(root, ["serve", "joined.yaml", "--dry-run", *more])
    assert "averager at 9000, holder 2 at 9001, standby at 9002\n" in served.stdout
    wrong = CliRunner().invoke(
        root, ["serve", "joined.yaml", "--dry-run", "--set", "strategy={kind: bsp}"]
    )
    assert isinstance(wrong.exception, errors.ConfigError)
    refused = CliRunner().invoke(root, ["serve", "groups.yaml", "--dry-run"])
    assert "geo_ray starts the groups eu" in str(refused.exception)  # its loop is not executed
    assert {path.name for path in tmp_path.iterdir()} == files and not ray.is_initialized()


def dry(*words: str) -> Result:
    return CliRunner().invoke(root, ["train", "trial.yaml", "--dry-run", *words])


def test_a_dry_run_says_what_the_run_needs_and_leaves_nothing(here: Path) -> None:
    result = dry("--set", "regions.1.gpus_per_worker=2", "--set", "cluster={kind: existing}")
    assert result.exit_code == 0, result.output
    eu, us = (
        next(line.split() for line in result.output.splitlines() if line.split()[:1] == [name])
        for name in ("eu", "us")
    )
    assert eu[2] == "4"  # a server, a bridge, two workers
    assert (us[2], us[4]) == ("4", "2")  # two shards of the server
    assert int(eu[1]) + int(us[1]) > 1000 and "the cluster was not queried" in result.output
    assert [path.name for path in here.iterdir()] == ["trial.yaml"]
    assert not ray.is_initialized()


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ([], "optimizer: on the workers in us; on the parameter server in eu"),  # of two workers
        (["train.optimizer_on=worker"], "optimizer: on the workers in eu, us"),
        (["strategy={kind: hfa}"], "optimizer: on the workers in eu, us"),
        (["regions.0.workers=1"], "optimizer: on the workers in eu, us"),
        (
            ["strategy={kind: diloco}", "train.optimizer_on=server"],
            "optimizer: on the parameter server in eu, us",
        ),
    ],
)
def test_a_dry_run_says_who_has_the_optimizer(here: Path, changes: list[str], line: str) -> None:
    result = dry(*(part for change in changes for part in ("--set", change)))
    assert result.exit_code == 0, result.output
    assert f"{line}\n" in result.output


def test_regions_that_join_later_are_named_with_what_they_will_need(here: Path) -> None:
    change = "members={absent: [us]}"
    result = dry("--set", change)
    assert result.exit_code == 0, result.output
    (line,) = [line for line in result.output.splitlines() if "us (absent at first)" in line]
    assert line.split()[-3] == "4"
    found = check_run("trial.yaml", {"members.absent": ["us"]})
    rows = [
        {name: row[name] for name in ("region", "processes", "absent")} for row in found.table()
    ]
    assert [tuple(row.values()) for row in rows] == [("eu", 4, False), ("us", 4, True)]
    assert [each.region for each in found.demands] == ["eu"]


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ("train.stepz=3", errors.ConfigError),
        ("task.options.widht=3", errors.TaskLoadError),
        ("data={manifest: none.json}", errors.ManifestError),
        ("transport.certs=none", errors.CertificateError),
        ("train.keep_best={metric: nothing, mode: max}", errors.ConfigError),
        ("regions.0.workers=0", errors.ConfigError),
        ("run.dir=/proc/nowhere", errors.RunDirectoryError),
        ("train.target={metric: nothing, value: 1, direction: at_least}", errors.ConfigError),
        ("regions.0.gpus_per_worker=4096", errors.ConfigError),
    ],
)
def test_what_would_end_the_start_ends_the_dry_run(
    change: str, kind: type[errors.GeoRayError], here: Path
) -> None:
    found = dry("--set", change).exception
    assert isinstance(found, kind), found
    assert [path.name for path in here.iterdir()] == ["trial.yaml"]


def test_from_python_it_is_a_value_and_warns(here: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = check_run("trial.yaml", {"train.eval_every": 50})
    assert found.table()["processes"] == [4, 4]
    assert "trial" in repr(found) and f"{found.num_params:,} parameters" in repr(found)
    assert any("beyond train.steps" in message for message in caplog.messages)


def test_a_run_that_goes_on_is_not_checked_dry(here: Path) -> None:
    (here / "runs").mkdir()
    result = CliRunner().invoke(root, ["train", "--resume", "runs", "--dry-run"])
    assert result.exit_code == 2 and "omit --resume" in result.output


@pytest.mark.parametrize("verb", ["train", "simulate"])
def test_a_key_that_is_taken_for_an_option_is_named(verb: str, here: Path) -> None:
    result = CliRunner().invoke(root, [verb, "trial.yaml", "--steps", "5"])
    assert result.exit_code == 2 and "did you mean --set train.steps=5?" in result.output
    assert "--steps" not in CliRunner().invoke(root, [verb, "--help"]).output


def test_metrics_and_regions_are_held_against_data_that_are_here(here: Path) -> None:
    made = geo_ray.shard_data({"use": "digits", "options": {"width": 2}}, ["eu", "us"], "data")
    data = {"data": {"manifest": str(made.path)}}
    check_run("trial.yaml", data)
    target = {"metric": "acuracy", "value": 0.9, "direction": "at_least"}
    with pytest.raises(errors.ConfigError, match="acuracy"):
        check_run("trial.yaml", data | {"train.target": target})
    with pytest.raises(errors.ShardEmptyError, match=r"did you mean us"):
        check_run("trial.yaml", data | {"regions.1.name": "uss"})


def test_a_disk_without_room_for_the_model_ends_the_dry_run(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = check_run("trial.yaml").num_params * 4

    def disk_of(free: int) -> None:
        usage = shutil.disk_usage(here)._replace(free=free)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)

    disk_of(needed - 1)
    with pytest.raises(errors.RunDirectoryError, match=r"run.dir: .* free, but the model and"):
        check_run("trial.yaml", {"checkpoint.every_s": None})
    disk_of(needed)
    check_run("trial.yaml", {"checkpoint.every_s": None})


def test_a_run_whose_regions_join_is_checked_without_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = {
        "name": "joined",
        "regions": [{"name": "eu", "join": True}, {"name": "us", "join": True}],
        "strategy": {"kind": "diloco", "interval": 4},
        "train": {"steps": 4},
    }
    found = check_run(config)
    assert found.num_params is None and found.rows == {}
    assert "a model that only its loops know" in repr(found)
    assert [row["rows"] for row in found.table().to_pylist()] == [None]
    group = {"ranks_per_node": 2, "cpus_per_rank": 0.5, "loop": "own.py:train"}
    (tmp_path / "own.py").write_text("def train(rank): ...\n")
    started = check_run(config | {"regions": [{"name": "eu", "group": group}]})
    assert [
        (row["region"], row["processes"], row["cpus"]) for row in started.table().to_pylist()
    ] == [
        ("geo-ray-server", 1, 0.5),
        ("eu", 2, 1.0),
    ]
    wrong = {"overlay": {"kind": "ring"}, "regions": [{"name": "geo-ray-a", "join": True}]}
    with pytest.raises(errors.ConfigError, match="'bsp' needs every gradient") as caught:
        check_run(config | {"strategy": {"kind": "bsp"}} | wrong)
    assert "overlay" in caught.value.message and "'geo-ray-a'" in caught.value.message


LOOPS: Final = {
    "missing.py:train": "missing.py does not exist",
    "own.py:trian": "did you mean 'train'?",
    "broken.py:train": "broken.py:1 failed while it was imported: ModuleNotFoundError",
}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(
    "change", ["", "train.stepz=4", "overlay={kind: ring}", "strategy={kind: bsp}"]
)
def test_a_wrong_loop_is_reported_with_other_problems(
    loop: str, change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text("def train(rank): raise RuntimeError\n")
    (tmp_path / "broken.py").write_text("import no_such_module\n")
    eu = f"{{name: eu, group: {{loop: '{loop}'}}}}"
    groups = f"[{eu}, {{name: us, group: {{loop: own.py:train}}}}]"
    text = f"name: a\nregions: {groups}\nstrategy: {{kind: diloco}}\ntrain: {{steps: 4}}\n"
    (tmp_path / "trial.yaml").write_text(text)
    found = dry(*(("--set", change) if change else ())).exception
    assert isinstance(found, errors.ConfigError)
    count = "2 problems" if change else "1 problem"
    assert f"trial.yaml: {count}:" in found.message
    assert "regions.0.group.loop (line 2): " in found.message and LOOPS[loop] in found.message


def test_a_plan_of_loops_is_refused() -> None:
    machine = {"type": "p4d.24xlarge", "cap": 1}
    config = {
        "name": "loops",
        "regions": [{"name": "eu", "group": {"loop": "own.py:train"}}],
        "strategy": {"kind": "diloco"},
        "train": {"steps": 4},
        "plan": {"regions": {"eu": {"cloud": "aws", "at": "eu-west-1", "machines": [machine]}}},
    }
    with pytest.raises(
        errors.ConfigError, match=r"plan \(line \d+\): eu has a training loop of its own"
    ):
        geo_ray.load_config(config)
