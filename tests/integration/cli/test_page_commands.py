"""The commands of quickstart and guides run in the order in which the pages show them."""

from __future__ import annotations

from pathlib import Path

import boto3
import pytest

from tests.support.pages import Reader, commands, sources
from tests.support.s3_support import s3_server, set_credentials

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


def saved(page: str, language: str, *names: str) -> None:
    """Save the page's first blocks of a language as files."""
    for name, body in zip(names, sources(page, language), strict=False):
        if name:
            Path(name).write_text(body)


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reader:
    monkeypatch.chdir(tmp_path)
    return Reader(monkeypatch)


def test_the_quickstart(reader: Reader) -> None:
    """Runs that need a cluster are simulated; `scripts/quickstart` makes the environment."""
    setup = 0
    for command in commands("docs/start/quickstart.md"):
        if command.startswith(("cd ", "geo-ray ")):
            reader.run(command.replace("geo-ray train ", "geo-ray simulate "))
        else:
            assert command.endswith(("scripts/quickstart", ".venv/bin/activate"))
            setup += 1
    assert setup == 3 and Path("model.pt").exists()


def test_the_guide_to_tasks(reader: Reader) -> None:
    page = "docs/guides/tasks.md"
    saved(page, "python", "waves.py")
    saved(page, "yaml", "", "waves.yaml")
    ran = [reader.run(each) for each in commands(page) if not each.startswith("geo-ray train ")]
    assert len(ran) == 2 and "7 of 7" in ran[0] and "rmse" in ran[1]


def test_the_guide_to_custom_strategies(reader: Reader) -> None:
    """`geo-ray check` of the page is among `tests/contract/strategies/test_own.py`."""
    reader.run("geo-ray init . --from own")
    page = commands("docs/guides/custom-strategies.md")
    (compare,) = (each for each in page if each.startswith("geo-ray compare "))
    short = "--set train.steps=8 --set train.eval_every=8 --seeds 1"
    assert "curves" in reader.run(f"{compare} {short}")


def test_the_guides_to_data(reader: Reader) -> None:
    """Buckets are those of an S3 server on this machine."""
    set_credentials(reader.monkeypatch)
    reader.monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    Path("my_task.py").write_text(TASK)
    for folder in ("my_files", "us_files", "eu_files"):
        Path(folder).mkdir()
        Path(folder, "rows.csv").write_text(CSV)
    with s3_server() as endpoint:
        reader.monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
        client = boto3.client("s3", endpoint_url=endpoint)
        for bucket in ("us-raw", "eu-raw", "us-bucket", "eu-bucket"):
            client.create_bucket(Bucket=bucket)
        for bucket in ("us-raw", "eu-raw"):
            client.put_object(Bucket=bucket, Key="rows/rows.csv", Body=CSV.encode())
        recipes = "Recipe: text for a language model", "Recipe: folders of images"
        apart = [each for name in recipes for each in commands("docs/guides/data.md", name)]
        for command in commands("docs/guides/data.md"):
            if command not in apart:  # test_data_recipes.py
                reader.run(command)
        assert Path("mine.json").exists()
    page = "docs/guides/preparation.md"
    saved(page, "yaml", "prepare.yaml")
    Path("countries.txt").write_text("DE\nFR\n")
    for command in commands(page):
        reader.run(command)
    assert Path("stats.json").exists()
