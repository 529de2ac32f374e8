"""Every command, YAML block and Python block of the README and of the documentation works.

`RULES` lists what is not run as written, with the test that runs it or the reason. Pages that have
a test of their own (`OWN_TESTS`) are run there, in full.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from click.testing import CliRunner
from pydantic import BaseModel, TypeAdapter, ValidationError

from geo_ray.cli.main import root
from geo_ray.data.prepare.config import Preparation
from geo_ray.experiment.experiment import Experiment
from geo_ray.lab.topology import Topology
from geo_ray.scheduler.queue.config import QueueConfig
from geo_ray.sweep.search_config import TuningConfig

ROOT = Path(__file__).resolve().parents[3]
OWN_TESTS: Final = {
    "README.md": "tests/unit/api/test_readme.py",
    "docs/tutorials/two-regions.md": "tests/integration/cli/test_two_regions_guide.py",
}
PAGES: Final = [
    str(path.relative_to(ROOT))
    for path in [ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if not {"archive", "generated"} & set(path.parts)
    and str(path.relative_to(ROOT)) not in OWN_TESTS
]
CLUSTER: Final = "starts a Ray cluster; "
CLOUD: Final = "needs an account of a cloud; "
RULES: Final[list[tuple[str, str | None, str]]] = [
    # (pattern, what is run instead or None, why)
    (r"(\w+=\S+ )?scripts/(quickstart|test)\b.*", None, "makes the environment of a bare clone"),
    (r"source .*|export .*|PORTS=.*|--.*", None, "sets up a shell"),
    (r"git clone .*|pip install .*|pre-commit .*", None, "downloads"),
    (r"mkdocs .*", None, "scripts/test builds the site"),
    (r"ray (start|job) .*", None, f"{CLUSTER}test_job_submit.py, tests/chaos/runtime"),
    (r"(geo-ray train (?!--resume|.*--plan).*)", r"\1 --dry-run", f"{CLUSTER}test_api_train.py"),
    (r"geo-ray train .*", None, f"{CLUSTER}tests/chaos/runtime, tests/integration/runtime"),
    (r"(geo-ray up .*--provider local.*?)( --yes)?", r"\1 --dry-run", "test_clusters_local.py"),
    (r"geo-ray (up|down|status clusters|inventory) ?.*", None, f"{CLOUD}tests/contract/cloud"),
    (r"geo-ray probe .*", None, "needs two hosts; tests/integration/transport"),
    (r"geo-ray profile .*", None, "measures for minutes; tests/integration/sweep"),
    (r"geo-ray prices refresh .*", None, f"{CLOUD}tests/contract/cloud"),
    (r"geo-ray .*s3://.*", None, f"{CLOUD}tests/integration/runs/test_store_troubles.py"),
    (r"(terraform|aws|tccli|wg|scp|ssh|cloud-init|docker|sudo|kubectl) .*", None, CLOUD),
    (r"(for|done|cd|cp|/opt/geo_ray).*", None, "prepares an image or a host"),
    (r"python(3)? -(m venv|c) .*|python3 -m .*", None, "prepares an image or a host"),
]


def blocks(page: str, *languages: str) -> list[str]:
    """The fenced blocks of a page in these languages."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = re.findall(r"^( *)```(\w*)[^\n]*\n(.*?)^ *```", text, flags=re.M | re.S)
    return [
        re.sub(rf"^{indent}", "", body, flags=re.M)
        for indent, language, body in found
        if language in languages
    ]


def commands(page: str) -> list[str]:
    """The commands of a page in their order; of a console block, what follows a prompt."""
    found = []
    for body in blocks(page, "bash", "sh"):
        found += body.replace("\\\n", " ").splitlines()
    for body in blocks(page, "console"):
        lines = body.replace("\\\n", " ").splitlines()
        found += [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    plain = (re.sub(r"\s+#.*", "", line).strip() for line in found)
    return [" ".join(line.split()) for line in plain if line and not line.startswith("#")]


def instead(command: str) -> str | None:
    """What is run for a command; None if nothing."""
    for pattern, other, _ in RULES:
        if match := re.fullmatch(pattern, command):
            return other if other is None else match.expand(other)
    return command


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with the configurations of the repository, a finished run and shards."""
    folder = tmp_path_factory.mktemp("project")
    shutil.copytree(ROOT / "configs", folder / "configs")
    before = Path.cwd()
    os.chdir(folder)
    try:
        for command in ("simulate configs/quickstart.yaml",):
            done = CliRunner().invoke(root, shlex.split(command))
            assert done.exit_code == 0, done.output
    finally:
        os.chdir(before)
    return folder


@pytest.fixture
def workspace(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(project, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    return tmp_path


def run(command: str) -> None:
    words = shlex.split(command)
    if words[0] == "geo-ray":
        done = CliRunner().invoke(root, words[1:])
        assert done.exit_code == 0, f"{command}\n{done.output}\n{done.exception}"
        return
    assert words[0] == "python", f"no rule for: {command}"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:."}
    finished = subprocess.run(
        [sys.executable, *words[1:]], env=environment, capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, f"{command}\n{finished.stderr}"


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)])
def test_the_commands_of_a_page_work(page: str, workspace: Path) -> None:
    wrong = []
    for command in commands(page):
        given = instead(command)
        try:
            if given is not None:
                run(given)
        except (AssertionError, ValueError) as error:
            wrong.append(str(error))
    assert not wrong, "\n\n".join(wrong)


# ------------------------------------------------------------------ YAML

MODELS: Final[tuple[type[BaseModel], ...]] = (
    Experiment,
    QueueConfig,
    TuningConfig,
    Preparation,
    Topology,
)


def wrong_in(model: type[BaseModel], document: dict[str, Any]) -> list[str]:
    """What is wrong with some keys of a configuration; each is checked by itself."""
    found = [f"unknown key {key}" for key in document if key not in model.model_fields]
    for key in document.keys() & model.model_fields.keys():
        try:
            kind = TypeAdapter(model.model_fields[key].annotation)
            kind.validate_json(json.dumps(document[key]))
        except ValidationError as error:
            found.append(f"{key}: {error}")
    return found


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "yaml")])
def test_the_yaml_of_a_page_is_valid(page: str, workspace: Path) -> None:
    for source in blocks(page, "python"):  # classes that a configuration names
        for name in re.findall(r"^# (\w+\.py)$", source, flags=re.M)[:1]:
            Path(name).write_text(source)
    for text in blocks(page, "yaml"):
        document = yaml.safe_load(text)
        assert isinstance(document, dict), text
        wrong = {model.__name__: wrong_in(model, document) for model in MODELS}
        assert not all(wrong.values()), f"{text}\n{wrong}"
