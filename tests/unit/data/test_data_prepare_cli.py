"""`geo-ray data` as somebody with folders of CSV files types it."""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from geo_ray.api import display
from geo_ray.base.errors import (
    ConfigError,
    GeoRayError,
    ManifestError,
    SchemaMismatchError,
    ShardCorruptError,
    ShardMissingError,
)
from geo_ray.cli.data import data
from geo_ray.data.manifest import load_manifest
from geo_ray.data.prepare.preparer import Preparer
from geo_ray.data.prepare.saved_preparation import load_prepared
from geo_ray.data.reader import RegionReader
from tests.support.data_support import columns_task

TASK = columns_task("Churn", "bought", 8)

PREPARE = """
columns:
  x:
    - {column: age, missing: mean, scale: standard}
    - {column: income, missing: drop_row, scale: minmax}
    - {column: country, vocabulary: {file: countries.txt}, missing: other}
    - {column: joined, cast: time, scale: standard}
  bought: {column: bought, vocabulary: {values: [no, yes], other: refuse}}
"""


def run(*arguments: object, code: int = 0, error: type[GeoRayError] | None = None) -> Result:
    result = CliRunner().invoke(data, [str(argument) for argument in arguments])
    if error is not None:
        assert type(result.exception) is error, result.output
    else:
        assert result.exit_code == code, result.output
    return result


def write_files(folder: Path, seed: int, countries: list[str], rows: int = 60) -> None:
    rng = random.Random(seed)
    folder.mkdir()
    for part in range(2):
        with (folder / f"part-{part}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["customer_id", "age", "income", "country", "joined", "bought"])
            for number in range(rows):
                writer.writerow(
                    [
                        f"{folder.name}-{part}-{number}",
                        "" if number % 10 == 3 else rng.randint(18, 80),
                        "NA" if number % 20 == 7 else round(rng.uniform(1e4, 9e4), 2),
                        rng.choice([*countries, ""]),
                        f"202{rng.randint(0, 5)}-01-1{rng.randint(0, 9)}",
                        rng.choice(["yes", "no"]),
                    ]
                )


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two regions' files, a task and a preparation, in the current directory."""
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path / "us", 1, ["US", "CA"])
    write_files(tmp_path / "eu", 2, ["DE", "FR", "LI"])
    (tmp_path / "churn.py").write_text(TASK)
    (tmp_path / "prepare.yaml").write_text(PREPARE)
    (tmp_path / "countries.txt").write_text("US\nCA\nDE\nFR\n")
    return tmp_path


def shard(region: str, *more: object, out: str = "", **expect: object) -> Result:
    return run(
        "shard", "--task", "churn.py:Churn", "--input", region, "--regions", region,
        "--out", out or f"out/{region}", *more, **expect,  # type: ignore[arg-type]
    )  # fmt: skip


def make_statistics() -> None:
    for region in ("us", "eu"):
        stats = ("--region", region, "--prepare", "prepare.yaml", "--out", f"{region}.json")
        run("stats", region, *stats)
    run("merge-stats", "us.json", "eu.json", "--out", "all.json")


PREPARED = ("--prepare", "prepare.yaml", "--stats", "all.json")


def test_two_regions_from_files_to_one_manifest(folders: Path) -> None:
    make_statistics()
    for region in ("us", "eu"):
        result = shard(region, *PREPARED)
        assert "120 rows read, 6 of them dropped" in result.stdout
        assert "6 dropped, missing income" in result.stdout
        assert "filled in age" in result.stdout
    assert "with other words in country" in result.stdout
    run("merge", "out/us", "out/eu/manifest.json", "--out", "out/both.json")
    run("check", "out/both.json")
    manifest = load_manifest("out/both.json")
    rows = [
        batch
        for region in ("us", "eu")
        for split in ("train", "heldout")
        for batch in RegionReader(manifest, region, split, 0).scan(500)  # type: ignore[arg-type]
    ]
    x = np.concatenate([batch["x"] for batch in rows])
    assert x.shape == (228, 8)
    assert x[:, 1].min() >= 0
    assert x[:, 1].max() <= 1
    assert np.all(x[:, 2:7].sum(axis=1) == 1)
    preparation = load_prepared("out/both.json")
    made = Preparer(preparation, only=["x"]).apply(
        {"age": [50], "income": ["20000.5"], "country": ["LI"], "joined": ["2023-01-01"]}
    )
    assert made.columns["x"][0, 2:7].tolist() == [0, 0, 0, 0, 1]


def test_the_same_input_gives_the_same_bytes(folders: Path) -> None:
    make_statistics()
    for out in ("one", "two"):
        shard("us", *PREPARED, out=out)
    one = {path.relative_to("one"): path.read_bytes() for path in Path("one").rglob("*.*")}
    assert one == {path.relative_to("two"): path.read_bytes() for path in Path("two").rglob("*.*")}
    assert {path.name for path in one} >= {"manifest.json", "manifest.preparation.json"}
    first = Path("all.json").read_bytes()
    run("merge-stats", "eu.json", "us.json", "--out", "again.json")
    assert Path("again.json").read_bytes() == first


def test_regions_that_were_prepared_differently_are_not_merged(folders: Path) -> None:
    make_statistics()
    shard("us", *PREPARED)
    shard("eu", "--prepare", "prepare.yaml", "--stats", "eu.json")
    error = run("merge", "out/us", "out/eu", "--out", "both.json", error=ManifestError).exception
    assert isinstance(error, ManifestError)
    assert "prepared differently" in error.message
    assert "merge-stats" in error.fix
    assert not Path("both.json").exists()


def test_a_preparation_that_was_changed_or_lost_is_noticed(folders: Path) -> None:
    make_statistics()
    shard("us", *PREPARED)
    beside = Path("out/us/manifest.preparation.json")
    whole = beside.read_text()
    beside.write_text(whole.replace("US", "UK"))
    with pytest.raises(ManifestError, match="not the one"):
        load_prepared("out/us")
    beside.unlink()
    with pytest.raises(ManifestError, match="is missing from"):
        load_prepared("out/us")
    run("merge", "out/us", "--out", "both.json", error=ManifestError)


def test_without_a_preparation_a_manifest_has_no_word_of_it(folders: Path) -> None:
    (folders / "plain").mkdir()
    (folders / "plain" / "a.csv").write_text("x,bought\n" + "1.5,0\n2.5,1\n" * 20)
    shard("plain", "--task-option", "features=1")
    tree = json.loads(Path("out/plain/manifest.json").read_text())
    assert "preparation" not in tree
    assert sorted(path.name for path in Path("out/plain").iterdir()) == ["manifest.json", "plain"]
    with pytest.raises(ManifestError, match="has no preparation"):
        load_prepared("out/plain")


def test_files_that_do_not_fit_are_refused_with_a_command_that_helps(folders: Path) -> None:
    error = shard("us", error=SchemaMismatchError).exception
    assert isinstance(error, SchemaMismatchError)
    assert "column 'x': is missing in all files of us" in error.message
    assert "join some of them: [{column: customer_id}, {column: age}, ...]" in error.message
    assert (
        "bought: {column: bought, vocabulary: {values: [no, yes], other: refuse}}" in error.message
    )
    command = "geo-ray data inspect us --task churn.py:Churn --draft prepare.yaml"
    assert command in error.fix
    assert not Path("out").exists()
    Path("prepare.yaml").unlink()
    run(*command.split()[2:])
    run("stats", "us", "--region", "us", "--prepare", "prepare.yaml", "--out", "all.json")
    width = 3 + 16
    shard("us", *PREPARED, "--task-option", f"features={width}")


def test_a_draft_is_not_written_over(folders: Path) -> None:
    draft = ("inspect", "us", "--task", "churn.py:Churn", "--draft", "prepare.yaml")
    run(*draft, error=ConfigError)
    assert Path("prepare.yaml").read_text() == PREPARE
    run(*draft, "--force")
    assert Path("prepare.yaml").read_text() != PREPARE
    run("inspect", "us", "--draft", "other.yaml", code=2)


def test_inspecting_shows_types_gaps_differences_and_treatments(folders: Path) -> None:
    Path("us/part-2.csv").write_text("age,income,notes\n30.5,oops,\n")
    Path("us/part-3.csv").write_text("")
    out = run("inspect", "us").stdout
    assert "121 rows in 4 files" in out
    for line in (
        "Skipped: part-3.csv: it has no rows",
        "4 columns are not in part-2.csv: customer_id, country, joined, bought",
        "notes is not in part-0.csv, part-1.csv",
        "age has several types: 108 int (first in part-0.csv), 1 float (first in part-2.csv)",
        "customer_id: leave it out  # it differs in every row",
        "{column: age, missing: mean, scale: standard}",
        "{column: country, missing: {fill: unknown}, vocabulary: {hash: 16}}",
        "{column: joined, cast: time, scale: standard}",
        "notes: leave it out  # it has no values",
        "1 values are text such as 'oops'",
    ):
        assert line in out
    Path("us/part-3.csv").write_bytes(b"age\n\xff\n")
    result = run("inspect", "us", code=3)
    assert "part-3.csv is not utf-8" in result.stderr
    assert "{column: age" in result.stdout


def test_statistics_tell_no_more_than_is_asked_for(folders: Path) -> None:
    make_statistics()
    tree = json.loads(Path("us.json").read_text())
    assert list(tree["columns"]) == ["age", "income", "joined"]
    assert not any("words" in column for column in tree["columns"].values())
    run("stats", "us", "--region", "us", "--columns", "age", "--no-extremes", "--out", "a.json")
    assert not {"min", "max", "words"} & set(
        json.loads(Path("a.json").read_text())["columns"]["age"]
    )
    counted = ("--values", "country", "--at-least", 15, "--out", "w.json")
    run("stats", "eu", "--region", "eu", *counted)
    tree = json.loads(Path("w.json").read_text())
    assert set(tree["columns"]) > {"country", "customer_id"}
    assert "words" not in tree["columns"]["customer_id"]
    assert tree["columns"]["customer_id"]["kind"] == "text"
    assert all(count >= 15 for count in tree["columns"]["country"]["words"].values())
    assert "eu-0-1" not in Path("w.json").read_text()


def test_words_leave_only_if_the_region_says_so(folders: Path) -> None:
    Path("prepare.yaml").write_text(PREPARE.replace("file: countries.txt", "counted: 10"))
    stats = ("stats", "us", "--region", "us", "--prepare", "prepare.yaml", "--out", "us.json")
    error = run(*stats, error=ConfigError).exception
    assert isinstance(error, ConfigError)
    assert "--values country" in error.fix
    run(*stats, "--values", "country")
    shard("us", "--prepare", "prepare.yaml", "--stats", "us.json", "--task-option", "features=6")


def test_statistics_that_cannot_be_merged_say_why_where_they_are_needed(folders: Path) -> None:
    Path("eu/part-0.csv").write_text("age,income\nold,5\n")
    Path("eu/part-1.csv").unlink()
    run("stats", "us", "--region", "us", "--out", "us.json")
    run("stats", "eu", "--region", "eu", "--out", "eu.json")
    result = run("merge-stats", "us.json", "eu.json", "--out", "all.json")
    assert "age: it is text in eu, number in us" in result.stderr
    error = shard("us", *PREPARED, error=ConfigError).exception
    assert "age" in str(error)
    assert "it is text in eu, number in us" in str(error)
    assert "'joined': has no statistics of eu, us: eu has none" in str(error)
    run("merge-stats", "us.json", "us.json", "--out", "no.json", error=ConfigError)
    run("merge-stats", "gone.json", "--out", "no.json", error=ConfigError)
    Path("bad.json").write_text("{}")
    run("merge-stats", "bad.json", "--out", "no.json", error=ConfigError)
    assert not Path("no.json").exists()


@pytest.mark.parametrize(
    ("verb", "error"),
    [
        (("stats", "us", "--region", "us", "--columns", "agee", "--out", "a.json"), ConfigError),
        (("stats", "uss", "--region", "us", "--out", "a.json"), ShardMissingError),
        (("inspect", "churn.py"), ShardMissingError),
        (("stats", "us", "--region", "us", "--encoding", "no", "--out", "a.json"), ConfigError),
    ],
)
def test_mistakes_are_typed_errors(
    folders: Path, verb: tuple[str, ...], error: type[GeoRayError]
) -> None:
    run(*verb, error=error)
    assert not Path("a.json").exists()


def test_statistics_of_broken_files_are_refused(folders: Path) -> None:
    Path("us/part-1.csv").write_bytes(b"age\n\xff\n")
    stats = ("stats", "us", "--region", "us", "--out", "a.json")
    run(*stats, error=ShardCorruptError)
    run(*stats, "--encoding", "latin-1")


@pytest.mark.parametrize(
    "more",
    [("--stats", "all.json"), ("--heldout", "1.5"), ("--decimal", ";"), ("--format", "orc")],
)
def test_options_that_do_not_go_together_end_with_code_2(
    folders: Path, more: tuple[str, ...]
) -> None:
    shard("us", *more, code=2)
    alone = ("shard", "--task", "digits", "--regions", "a", "--out", "o")
    run(*alone, "--prepare", "prepare.yaml", code=2)
    run(*alone, "--delimiter", ";", code=2)


def test_progress_is_shown_once_work_takes_longer(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(display, "_FIRST_LINE_S", 1e9)
    with display.progress_bar("Reading files", 4, unit="files") as advance:
        advance(1)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(display, "_FIRST_LINE_S", 0.0)
    with display.progress_bar("Reading files", 4, unit="files") as advance:
        advance(1.5)
        advance(0.5)
    assert capsys.readouterr().err == "Reading files: 38% of 4 files\n"
    with display.progress_bar("Reading files", 1, unit="files") as advance:
        advance(0.5)
    assert capsys.readouterr().err == "Reading files: 50%\n"


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("data", "found data/east/manifest.json, data/west/manifest.json"),
        ("data/manifest.json", "there is"),
        ("data/east/manifst.json", "did you mean data/east/manifest.json?"),
        ("dat/east", "did you mean data?"),
        ("data/north/manifest.json", "in data there is east, west"),
        ("alone/mine.json", "did you mean alone/other.json?"),
        ("nothing/manifest.json", "in nothing there is notes.txt"),
    ],
)
def test_a_wrong_path_to_a_manifest_is_put_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for path in ("data/east/manifest.json", "data/west/manifest.json", "alone/other.json"):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text("{}")
    Path("nothing").mkdir()
    Path("nothing/notes.txt").write_text("")
    error = run("check", asked, error=ManifestError).exception
    assert isinstance(error, ManifestError)
    assert message in error.message.replace(f"{tmp_path}/", "")
    assert "Correct the path" in error.fix
