"""The commands of quickstart and guides run in the order in which the pages show them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import boto3
import pytest
from click.testing import CliRunner

from geo_ray.cli.main import root
from tests.support.s3_support import s3_server, set_credentials

DOCS = Path(__file__).resolve().parents[3] / "docs"

TASK = """
import torch
import geo_ray
from geo_ray.data.tasks import classification


class MyTask:
    Options, label_column = geo_ray.Options, "label"
    columns = {"age": "float32", "label": "int64"}
    loss = staticmethod(classification.classification_loss)
    evaluate = staticmethod(classification.classification_stats)
    metrics = staticmethod(classification.classification_metrics)

    def __init__(self, options):
        pass

    def model(self, seed):
        return torch.nn.Linear(1, 2)

    def collate(self, columns, device):
        age, label = (torch.tensor(columns[name]) for name in self.columns)
        return classification.Labelled(age[:, None], label)
"""
COUNTRIES, WORDS = ("DE", "FR"), ("no", "yes")
ROWS = "".join(
    f"{20 + row % 50},2026-01-{10 + row % 9},{COUNTRIES[row % 2]},tv,{WORDS[row % 2]},{row % 2}\n"
    for row in range(80)
)
CSV = f"age,joined,country,device,bought,label\n{ROWS}"


def commands(page: Path) -> list[list[str]]:
    """Commands of the page's bash blocks, in order."""
    blocks = re.findall(r"^```bash\n(.*?)^```", page.read_text(), flags=re.M | re.S)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines]


def run(command: list[str]) -> str:
    assert command[0] == "geo-ray", command
    done = CliRunner().invoke(root, command[1:])
    assert done.exit_code == 0, f"{command}\n{done.output}\n{done.exception}"
    return done.stdout


def saved(page: Path, language: str, *names: str) -> None:
    """Save the page's first blocks of a language as files."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.M | re.S)
    for name, body in zip(names, blocks, strict=False):
        if name:
            Path(name).write_text(body)


def test_the_quickstart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that need a cluster are simulated; `scripts/quickstart` makes the environment."""
    monkeypatch.chdir(tmp_path)
    setup = 0
    for command in commands(DOCS / "start" / "quickstart.md"):
        if command[0] == "cd":
            monkeypatch.chdir(command[1])
        elif command[0] != "geo-ray":
            assert command[-1] in ("scripts/quickstart", ".venv/bin/activate")
            setup += 1
        else:
            run(["geo-ray", "simulate" if command[1] == "train" else command[1], *command[2:]])
    assert setup == 3 and Path("model.pt").exists()


def test_the_guide_to_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = DOCS / "guides" / "tasks.md"
    saved(page, "python", "waves.py")
    saved(page, "yaml", "", "waves.yaml")
    ran = [run(command) for command in commands(page) if command[1] != "train"]
    assert len(ran) == 2 and "7 of 7" in ran[0] and "rmse" in ran[1]


def test_the_guide_to_custom_strategies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`geo-ray check` of the page is among `tests/contract/strategies/test_own.py`."""
    monkeypatch.chdir(tmp_path)
    run(["geo-ray", "init", ".", "--from", "own"])
    (compare,) = commands(DOCS / "guides" / "custom-strategies.md")
    short = ["--set", "train.steps=8", "--set", "train.eval_every=8", "--seeds", "1"]
    assert "curves" in run([*compare, *short])


def test_the_guides_to_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets are those of an S3 server on this machine."""
    monkeypatch.chdir(tmp_path)
    set_credentials(monkeypatch)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    Path("my_task.py").write_text(TASK)
    for folder in ("my_files", "us_files", "eu_files"):
        Path(folder).mkdir()
        Path(folder, "rows.csv").write_text(CSV)
    with s3_server() as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
        client = boto3.client("s3", endpoint_url=endpoint)
        for bucket in ("us-raw", "eu-raw", "us-bucket", "eu-bucket"):
            client.create_bucket(Bucket=bucket)
        for bucket in ("us-raw", "eu-raw"):
            client.put_object(Bucket=bucket, Key="rows/rows.csv", Body=CSV.encode())
        for command in commands(DOCS / "guides" / "data.md"):
            run(command)
        assert Path("mine.json").exists()
    page = DOCS / "guides" / "preparation.md"
    saved(page, "yaml", "prepare.yaml")
    Path("countries.txt").write_text("DE\nFR\n")
    for command in commands(page):
        run(command)
    assert Path("stats.json").exists()
