"""Every command, YAML block and Python block of the README and of the documentation works.

`RULES` lists what is not run as written, with the test that runs it or the reason. Pages that have
a test of their own (`OWN_TESTS`) are run there, in full.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any, Final
from urllib.request import HTTPCookieProcessor, ProxyHandler, build_opener

import pytest
import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError

from geo_ray.data.prepare.config import Preparation
from geo_ray.experiment.experiment import Experiment
from geo_ray.lab.topology import Topology
from geo_ray.scheduler.queue.config import QueueConfig
from geo_ray.sweep.search_config import TuningConfig
from tests.support.pages import PAGE_ADDRESS, ROOT, Reader, blocks, commands, save, sources
from tests.support.queue_support import sim_queue

CLI: Final = "tests/integration/cli"
OWN_TESTS: Final = {
    # page, or page#section: the test that runs all of its commands
    "README.md": "tests/unit/api/test_readme.py",
    "docs/tutorials/two-regions.md": f"{CLI}/test_two_regions_guide.py",
    "docs/tutorials/port-a-training-script.md": f"{CLI}/test_two_regions_guide.py",
    "docs/start/quickstart.md": f"{CLI}/test_page_commands.py",
    "docs/guides/tasks.md": f"{CLI}/test_page_commands.py",
    "docs/guides/data.md": f"{CLI}/test_page_commands.py",
    "docs/guides/data.md#Recipe: text for a language model": f"{CLI}/test_data_recipes.py",
    "docs/guides/data.md#Recipe: folders of images": f"{CLI}/test_data_recipes.py",
    "docs/guides/preparation.md": f"{CLI}/test_page_commands.py",
    "docs/guides/custom-strategies.md": f"{CLI}/test_page_commands.py",
    "docs/guides/your-own-loop.md": "tests/integration/joining/test_own_loop_page.py",
    "docs/guides/lora.md": "tests/integration/joining/test_own_loop_page.py",
    "docs/guides/prices.md": f"{CLI}/test_cloud_pages.py",
    "docs/guides/checkpoints.md": f"{CLI}/test_cluster_pages.py",
    "docs/guides/membership.md": f"{CLI}/test_cluster_pages.py",
    "docs/guides/tuning.md": f"{CLI}/test_cluster_pages.py",
    "docs/guides/planning.md": f"{CLI}/test_cluster_pages.py",
    "docs/guides/wan-lab.md#Start a lab": "tests/integration/lab/test_lab_commands.py",
    "docs/operations/clusters.md#Try it on this computer": f"{CLI}/test_cluster_pages.py",
    "docs/operations/queue.md#Try it on this computer": f"{CLI}/test_cluster_pages.py",
    "docs/operations/runs.md#Submit a run": f"{CLI}/test_cluster_pages.py",
    "docs/operations/runs.md#Store a run in a bucket": f"{CLI}/test_cluster_pages.py",
    "docs/operations/clusters.md#Create a cluster in a cloud": f"{CLI}/test_cloud_pages.py",
    "docs/operations/queue.md#Submit and change jobs": f"{CLI}/test_cloud_pages.py",
    "docs/operations/terraform.md#Create a stack": f"{CLI}/test_cloud_pages.py",
    "docs/operations/terraform.md#The autoscaler controls the machines":
        f"{CLI}/test_cloud_pages.py",
}  # fmt: skip
PAGES: Final = [
    str(path.relative_to(ROOT))
    for path in [ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if not {"archive", "generated"} & set(path.parts)
    and str(path.relative_to(ROOT)) not in OWN_TESTS
]
RULES: Final[list[tuple[str, str | None, str]]] = [
    # (pattern, what is run instead or None, why)
    (r"(\w+=\S+ )?scripts/(quickstart|test)\b.*", None, "downloads; runs all tests, these too"),
    (r"(/opt/geo_ray/bin/)?pip install .*", None, "downloads"),
    (r"(python3 -m venv|cloud-init) .*", None, "needs the root of a machine image"),
    (r"/opt/geo_ray/bin/(python -c .*)", r"\1", "the environment of the machine image"),
    (r"terraform apply.*", None, "takes minutes; cloud/test_terraform_aws.py"),
    (r"(aws|tccli) .*", None, "the clouds' own command line is not installed"),
    (r"for end in .*", None, "WireGuard is not installed"),
    (
        r"ray start .*",
        None,
        "needs a machine of its own, with fixed ports; ray_cluster/test_cluster.py",
    ),
    (
        r"(geo-ray train .*)",
        r"\1 --dry-run",
        "three regions on their own cluster; test_api_train.py",
    ),
    (r"geo-ray export .*--format (hf|adapter) .*", None, "slow; runs/test_export_formats.py"),
]


ALSO: Final = {
    # command: further ones of a reader who has more regions than the page shows
    "geo-ray certs rotate --finish --dir DIR": (
        "geo-ray certs issue eu-west --dir DIR",
        "geo-ray certs issue ap-south --dir DIR",
    )
}


def left(page: str) -> list[str]:
    """The commands of a page in sections without a test of their own."""
    return [
        command
        for block in blocks(page)
        if f"{page}#{block.section}" not in OWN_TESTS
        for command in block.commands
    ]


def instead(command: str) -> str | None:
    """What is run for a command; None if nothing."""
    for pattern, other, _ in RULES:
        if match := re.fullmatch(pattern, command, flags=re.S):
            return other if other is None else match.expand(other)
    return command


def test_each_rule_is_needed() -> None:
    """A rule without a command on a page could hide a later one."""
    every = [command for page in PAGES for command in left(page)]
    found = [
        next((pattern for pattern, _, _ in RULES if re.fullmatch(pattern, command, re.S)), "")
        for command in every
    ]
    assert [pattern for pattern, _, _ in RULES if pattern not in found] == []


@pytest.mark.parametrize("where", OWN_TESTS)
def test_a_page_with_a_test_of_its_own_is_run_there(where: str) -> None:
    page, _, section = where.partition("#")
    assert commands(page, section or None), "there is no such section"
    test = (ROOT / OWN_TESTS[where]).read_text()
    assert Path(page).stem in test.replace("README", "readme") or Path(page).name in test
    assert section in test


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with the configurations of the repository, a finished run and a queue."""
    folder = tmp_path_factory.mktemp("project")
    for name in ("configs", "examples"):
        shutil.copytree(ROOT / name, folder / name)
    shutil.copy(folder / "configs" / "quickstart.yaml", folder / "configs" / "my_job.yaml")
    queue = folder / "queues" / "shared"
    queue.mkdir(parents=True)
    sim_queue(queue).run(5.0)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(folder)
        Reader(monkeypatch).run("geo-ray simulate configs/quickstart.yaml")
    return folder


@pytest.fixture
def workspace(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(project, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr("webbrowser.open", lambda _: True)
    script(tmp_path / "programs" / "browser", 'echo "$1" >> opened.txt')
    script(tmp_path / "programs" / "scp", 'mkdir -p "$(dirname "$2")" && cp "$1" "$2"')
    monkeypatch.setenv("BROWSER", f"{tmp_path / 'programs' / 'browser'} %s")
    monkeypatch.setenv("PATH", str(tmp_path / "programs"), prepend=":")
    return tmp_path


def script(path: Path, line: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)


def job_of_a_trace(number: int) -> dict[str, Any]:
    attempt = {
        "start_time": "2017-10-09 07:10:00",
        "end_time": "2017-10-09 08:10:00",
        "detail": [{"ip": "m1", "gpus": ["gpu0", "gpu1"]}],
    }
    return {
        "jobid": f"application_{number}",
        "submitted_time": "2017-10-09 07:00:00",
        "status": "Pass",
        "vc": "a",
        "user": "b",
        "attempts": [attempt],
    }


def prepare(page: str) -> None:
    """Make what a page says its reader has."""
    if page == "docs/operations/terraform.md":
        shutil.copy("configs/planned.yaml", "configs/my_job.yaml")
    if page == "docs/operations/monitoring.md":
        Path("DIR").mkdir()
    if page == "docs/reference/scheduling-policies.md":
        Path("cluster_job_log").write_text(json.dumps([job_of_a_trace(n) for n in range(4)]))
    if page == "docs/reference/strategies.md":  # a shorter run of the same
        change("configs/quickstart.yaml", train={"steps": 8, "eval_every": 8})


def change(config: str, **sections: Any) -> None:
    """Change sections of a configuration of the reader."""
    tree = yaml.safe_load(Path(config).read_text())
    Path(config).write_text(yaml.safe_dump(tree | sections))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", [page for page in PAGES if left(page)])
def test_the_commands_of_a_page_work(
    page: str, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(page)
    prepare(page)
    reader = Reader(monkeypatch)
    browser = build_opener(ProxyHandler({}), HTTPCookieProcessor())
    wrong = []
    for command in left(page):
        given = instead(command)
        try:
            if given is not None and given.startswith("geo-ray watch "):
                with reader.until_ctrl_c(given, PAGE_ADDRESS) as shown:
                    assert b"<html" in browser.open(shown[0]).read()
            elif given is not None:
                reader.run(given)
            for each in ALSO.get(command, ()):
                reader.run(each)
        except (AssertionError, ValueError) as error:
            wrong.append(str(error))
    assert not wrong, "\n\n".join(wrong)
    if any("--open" in (instead(command) or "") for command in left(page)):
        assert "token=" in Path("opened.txt").read_text()


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
