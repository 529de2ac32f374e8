"""The README: its commands and Python run as they stand, and it stays short."""

from __future__ import annotations

import random
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import geo_ray
from geo_ray.cli.main import _COMMANDS, main

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text()
STEPS = README.split("## Your data, your model")[1].split("\n## ")[0]


def blocks(language: str) -> Iterator[str]:
    for indent, text in re.findall(rf"^( *)```{language}\n(.*?)^ *```", STEPS, flags=re.M | re.S):
        yield re.sub(rf"^{indent}", "", text, flags=re.M)


def commands() -> list[str]:
    """The commands of the five steps in their order, in code spans and blocks."""
    return re.findall(r"geo-ray [^\n`]+", STEPS)


def write_files(folder: Path, seed: int) -> None:
    rng = random.Random(seed)
    folder.mkdir(parents=True)
    rows = ["age,income,churned"]
    for _ in range(200):
        age, income = rng.randint(18, 80), rng.randint(20_000, 90_000)
        rows.append(f"{age},{income},{int(age < 45)}")
    (folder / "customers.csv").write_text("\n".join(rows) + "\n")


def test_the_five_steps_lead_to_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but `geo-ray train`, which needs a cluster; the simulated run stands in for it."""
    monkeypatch.chdir(tmp_path)
    (source,) = blocks("python")
    (config,) = blocks("yaml")
    Path("churn.py").write_text(source)
    Path("churn.yaml").write_text(config)
    for seed, region in enumerate(("us-east", "eu-west")):
        write_files(Path(region, "files"), seed)
    assert len(commands()) == 7
    for command in commands():
        if command.startswith("geo-ray train"):
            continue
        command = command.replace(" --set name=trial", "")
        try:
            assert main(shlex.split(command)[1:]) in (None, 0)
        except SystemExit as left:
            assert left.code in (None, 0), command
    assert Path("model.pt").exists()
    accuracy = geo_ray.open_run("runs/churn").summary.eval["accuracy"]
    assert accuracy > 0.8


def test_the_task_has_twelve_lines() -> None:
    (source,) = blocks("python")
    body = source[source.index("class ") :].splitlines()
    assert len(body) == 12


def test_the_readme_has_less_than_700_words() -> None:
    assert len(README.split()) < 700


def test_figures_of_the_quickstart_are_said_to_depend_on_the_processor() -> None:
    page = (ROOT / "docs" / "start" / "quickstart.md").read_text()
    for text in (README, page):
        before, loss, _ = text.partition("loss 0.07637, accuracy 0.9808, ")
        assert loss and "processor" in before.rpartition("```text")[0].splitlines()[-2]


def test_the_page_of_commands_has_every_command() -> None:
    page = (ROOT / "docs" / "reference" / "commands.md").read_text()
    assert [name for name in _COMMANDS if f"geo-ray {name}" not in page] == []


def test_the_licence_and_the_release_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == geo_ray.__version__
    assert project["license"] == "Apache-2.0" and project["license-files"] == ["LICENSE"]
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    assert f"version: {geo_ray.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"## {geo_ray.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_files_for_github_are_well_formed() -> None:
    files = [*(ROOT / ".github").rglob("*.yml"), ROOT / ".pre-commit-config.yaml"]
    read = {file.name: yaml.safe_load(file.read_text()) for file in files}
    assert len(read) >= 5
    (job,) = read["test.yml"]["jobs"].values()
    assert {"run": "scripts/test"} in job["steps"]
    hooks = {
        hook["id"] for repo in read[".pre-commit-config.yaml"]["repos"] for hook in repo["hooks"]
    }
    assert hooks == {"ruff-check", "ruff-format", "mypy"}
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())["references"]
    assert all(each["title"] and each["authors"] and each["year"] for each in cited)
