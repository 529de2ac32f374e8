"""What `geo-ray init` writes runs as it is, and what `geo-ray export` writes is read by PyTorch."""

from __future__ import annotations

import fnmatch
import json
import tomllib
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.torch import load_file

import geo_ray
from geo_ray.api.config import STARTERS, init_project
from geo_ray.base import errors
from geo_ray.cli.main import root
from geo_ray.lab.topology import preset_names

ROOT = Path(__file__).parents[3]
FEW = {"train.steps": 4, "train.eval_every": 2}


def invoke(*arguments: str):
    return CliRunner().invoke(root, list(arguments), catch_exceptions=False)


@pytest.mark.parametrize(
    ("starter", "config"),
    [
        ("quickstart", "configs/own_task.yaml"),
        ("csv", "config.yaml"),
        ("language_model", "config.yaml"),
        ("own", "config.yaml"),
    ],
)
def test_a_starter_runs(
    starter: str, config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = invoke("init", "--from", starter)
    assert done.exit_code == 0, done.output
    assert (tmp_path / "README.md").exists() and not list(tmp_path.rglob("*.in"))
    run = geo_ray.simulate(config, FEW)
    assert run.summary.steps == 4 and run.path.is_relative_to(tmp_path)


def test_the_quickstart_has_the_configurations_of_the_commands(tmp_path: Path) -> None:
    files = init_project(tmp_path / "new")
    for file in files:
        same = ROOT / "configs" / file.name
        assert file.name in ("README.md", "own_task.py", "own_task.yaml") or (
            file.read_bytes() == same.read_bytes()
        )
    commands = (ROOT / "docs" / "reference" / "commands.md").read_text()
    for name in ("quickstart", "planned", "auto", "cluster"):
        assert f"configs/{name}.yaml" in commands
        assert tmp_path / "new" / "configs" / f"{name}.yaml" in files


def test_the_own_classes_are_those_of_the_examples(tmp_path: Path) -> None:
    for file in init_project(tmp_path, "own"):
        if file.suffix == ".py":
            assert file.read_bytes() == (ROOT / "examples" / file.name).read_bytes()


def test_files_that_are_there_are_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("mine")
    with pytest.raises(errors.ConfigError, match=r"README\.md exists already"):
        init_project(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]
    init_project(tmp_path, "csv", force=True)
    assert "CSV" in (tmp_path / "README.md").read_text()
    with pytest.raises(errors.ConfigError, match="no starter 'rust'"):
        init_project(tmp_path, "rust")


def test_the_wheel_carries_every_file_that_the_library_reads() -> None:
    """Starters, configurations, presets of the lab, prices: whatever is no Python."""
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = tools["package-data"]["geo_ray"]
    folder = ROOT / "geo_ray"
    files = [file for file in folder.rglob("*") if "__pycache__" not in file.parts]
    files += (folder / "cli" / "starters" / "configs").glob(
        "*"
    )  # a link, which rglob does not follow
    data = [file for file in files if file.is_file() and file.suffix != ".py"]
    names = {file.relative_to(folder).as_posix() for file in data}
    assert {
        "py.typed",
        "prices/snapshots/aws.json",
        "cli/starters/configs/quickstart.yaml",
    } <= names
    assert {f"lab/presets/{name}.yaml" for name in preset_names()} <= names
    for name in names:
        depth = name.count("/")
        fitting = [p for p in patterns if p.count("/") == depth and fnmatch.fnmatch(name, p)]
        assert fitting, f"{name} is not in package-data"
    for starter in STARTERS:
        assert any(name.startswith(f"cli/starters/{starter}/") for name in names)
    lost = {file.parent for file in files if file.suffix == ".py"}
    assert not [place for place in lost if not (place / "__init__.py").exists()]


def test_export_writes_what_plain_pytorch_reads(tmp_path: Path) -> None:
    keep = {"train.keep_best": {"metric": "loss", "mode": "max"}, "train.eval_every": 2}
    changes = FEW | {"run.dir": str(tmp_path), "task.options": {"width": 2}} | keep
    run = geo_ray.simulate(ROOT / "configs" / "quickstart.yaml", changes)
    told = invoke("export", str(run.path), "--out", str(tmp_path / "m.pt"))
    assert told.exit_code == 0 and "m.pt" in told.output
    invoke("export", str(run.path), "--out", str(tmp_path / "m.safetensors"))
    state = torch.load(tmp_path / "m.pt", weights_only=True)
    plain = load_file(tmp_path / "m.safetensors")
    trained = run.model().state_dict()
    assert list(state) == list(trained) and set(plain) == set(trained)
    assert all(torch.equal(state[name], trained[name]) for name in trained)
    best = run.summary.best
    invoke("export", str(run.path), "--best", "--out", str(tmp_path / "b.safetensors"))
    with safe_open(tmp_path / "b.safetensors", "pt") as file:
        assert file.metadata()["step"] == str(best.step)
        assert json.loads(file.metadata()["metrics"]) == best.metrics
    kept = load_file(tmp_path / "b.safetensors")
    assert any(not torch.equal(kept[name], trained[name]) for name in trained)
    assert best.text in run.report_path.read_text()
    missing = CliRunner().invoke(
        root, ["export", str(run.path), "--out", str(tmp_path / "c.pt"), "--from", "7"]
    )
    assert isinstance(missing.exception, errors.CheckpointMissingError)
