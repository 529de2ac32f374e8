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
from dataclasses import dataclass
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
    "docs/tutorials/port-a-training-script.md": "tests/integration/cli/test_two_regions_guide.py",
    "docs/start/quickstart.md": "tests/integration/cli/test_page_commands.py",
    "docs/guides/tasks.md": "tests/integration/cli/test_page_commands.py",
    "docs/guides/data.md": "tests/integration/cli/test_page_commands.py",
    "docs/guides/preparation.md": "tests/integration/cli/test_page_commands.py",
    "docs/guides/custom-strategies.md": "tests/integration/cli/test_page_commands.py",
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
    (r"(source|export|cd|cp|for|done|PORTS=|--).*", None, "sets up a shell or copies files"),
    (r"(git clone|pip install|pre-commit) .*", None, "downloads"),
    (r"(terraform|aws|tccli|wg|scp|ssh|cloud-init|/opt/geo_ray\S*) .*", None, CLOUD),
    (r"python3? -(m venv|c) .*", None, "makes an image or a secret"),
    (r"ray (start|job) .*", None, f"{CLUSTER}test_job_submit.py, tests/chaos/runtime"),
    (r"geo-ray .*s3://.*", None, f"{CLOUD}tests/integration/runs, tests/contract/cloud"),
    (r"(geo-ray train .*) --dry-run", r"\1 --dry-run", "as it stands"),
    (r"geo-ray train (--resume|.*--plan|runs/longer/) ?.*", None, f"{CLUSTER}tests/chaos/runtime"),
    (r"(geo-ray train .*)", r"\1 --dry-run", f"{CLUSTER}test_api_train.py"),
    (r"(geo-ray up .*--provider local.*)", r"\1 --dry-run", "test_clusters_local.py"),
    (r"geo-ray (up|down|status clusters|inventory) ?.*", None, f"{CLOUD}tests/contract/cloud"),
    (r"geo-ray queue (start|submit|list|show|move|cancel) .*", None, f"{CLUSTER}scheduler/queue"),
    (r"geo-ray members \S+ (add|drain|remove) .*", None, f"{CLUSTER}test_members_chaos.py"),
    (r"geo-ray (watch|lab) .*", None, "runs until Ctrl-C; telemetry/live and tests/*/lab"),
    (r"geo-ray (tune|compare) .*", None, "many runs; tests/integration/sweep"),
    (r"geo-ray profile .*", None, "measures for minutes; tests/integration/sweep"),
    (
        r"geo-ray plan .* --from runs/.*",
        None,
        "needs a run of a plan; tests/sim/planner",
    ),
    (r"geo-ray export .*--format (hf|adapter) .*", None, "slow; runs/test_export_formats.py"),
    (r"geo-ray prices refresh .*", None, f"{CLOUD}tests/contract/cloud"),
    (r"geo-ray schedule cluster_job_log .*", None, "needs a published trace; tests/unit/scheduler"),
    (r"(geo-ray .*) --(open|follow)", r"\1", "opens a browser, or follows a run"),
]


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page.

    Attributes:
        language: of the fence.
        saved_as: the file that the text before it, or its first line, names; "" if none.
        body: what is in it.
    """

    language: str
    saved_as: str
    body: str

    @property
    def commands(self) -> list[str]:
        """Its commands; of a console, what follows a prompt."""
        lines = self.body.replace("\\\n", " ").splitlines()
        if self.language == "console":
            lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        elif self.language not in ("bash", "sh"):
            lines = []
        plain = (re.sub(r"(^|\s+)#.*", "", line).strip() for line in lines)
        return [" ".join(line.split()) for line in plain if line]


def blocks(page: str) -> list[Block]:
    """The blocks of a page in their order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = []
    for match in re.finditer(r"^( *)```(\w*)[^\n]*\n(.*?)^ *```", text, flags=re.M | re.S):
        indent, language, body = match.groups()
        before = text[: match.start()].rstrip().rpartition("\n\n")[2]
        names = re.findall(r"\bas\s+`([\w./-]+\.\w+)`", before)
        names = names or re.findall(r"\A# ([\w/-]+\.\w+)$", body, flags=re.M)
        found.append(
            Block(language, names[-1] if names else "", re.sub(rf"^{indent}", "", body, flags=re.M))
        )
    return found


def commands(page: str) -> list[str]:
    """The commands of a page in their order."""
    return [command for block in blocks(page) for command in block.commands]


def sources(page: str, language: str) -> list[str]:
    """The bodies of the blocks in a language."""
    return [block.body for block in blocks(page) if block.language == language]


def save(page: str) -> None:
    """Write the files that a page has its reader save."""
    for block in blocks(page):
        if block.saved_as:
            Path(block.saved_as).parent.mkdir(parents=True, exist_ok=True)
            Path(block.saved_as).write_text(block.body)


def instead(command: str) -> str | None:
    """What is run for a command; None if nothing."""
    for pattern, other, _ in RULES:
        if match := re.fullmatch(pattern, command):
            return other if other is None else match.expand(other)
    return command


def test_each_rule_is_needed() -> None:
    """A rule without a command on a page could hide a later one."""
    every = [command for page in PAGES for command in commands(page)]
    found = [
        next((pattern for pattern, _, _ in RULES if re.fullmatch(pattern, command)), "")
        for command in every
    ]
    assert [pattern for pattern, _, _ in RULES if pattern not in found] == []


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with the configurations of the repository, a finished run and shards."""
    folder = tmp_path_factory.mktemp("project")
    for name in ("configs", "examples"):
        shutil.copytree(ROOT / name, folder / name)
    shutil.copy(folder / "configs" / "quickstart.yaml", folder / "configs" / "my_job.yaml")
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


def prepare(page: str) -> None:
    """Make what a page says its reader has."""
    if page == "docs/operations/terraform.md":
        shutil.copy("configs/planned.yaml", "configs/my_job.yaml")


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
    save(page)
    prepare(page)
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


YAML_TESTS: Final = {
    "docs/guides/prices.md": "tests/unit/prices/test_prices_book.py",
}


@pytest.mark.parametrize(
    "page", [page for page in PAGES if sources(page, "yaml") and page not in YAML_TESTS]
)
def test_the_yaml_of_a_page_is_valid(page: str, workspace: Path) -> None:
    save(page)
    prepare(page)
    for text in sources(page, "yaml"):
        document = yaml.safe_load(text)
        assert isinstance(document, dict), text
        wrong = {model.__name__: wrong_in(model, document) for model in MODELS}
        assert not all(wrong.values()), f"{text}\n{wrong}"


# ------------------------------------------------------------------ Python

PYTHON_TESTS: Final = {
    "docs/guides/python.md": "tests/unit/api/test_api_documents.py",
}


@pytest.mark.parametrize(
    "page", [page for page in PAGES if sources(page, "python") and page not in PYTHON_TESTS]
)
def test_the_python_of_a_page_runs(page: str, workspace: Path) -> None:
    save(page)
    prepare(page)
    names: dict[str, object] = {"__name__": "page"}
    for number, block in enumerate(each for each in blocks(page) if each.language == "python"):
        code = compile(block.body, f"{page}, block {number}", "exec")
        if not block.saved_as and "geo_ray.tune(" not in block.body:
            exec(code, names)  # a file is run by the commands of the page
