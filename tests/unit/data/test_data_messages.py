"""What ``geo-ray data`` says of mistakes: where they are, and what mends them."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from geo_ray.base.errors import (
    ConfigError,
    GeoRayError,
    ManifestError,
    SchemaMismatchError,
    TaskLoadError,
)
from geo_ray.cli.data import data
from geo_ray.data.prepare.config import load_preparation
from geo_ray.data.prepare.saved_preparation import label_words

TASK = '''
from geo_ray import Options

class Shop:
    """Columns only."""
    class Options(Options):
        layers: int = 2
        features: int = 1
    label_column = "level"
    def __init__(self, options):
        self.columns = {"x": f"float32[{options.features}]", "level": "int64"}
    def model(self, seed): ...
    def collate(self, columns, device): ...
    def loss(self, model, batch): ...
    def evaluate(self, model, batch): ...
    def metrics(self, stats): ...
'''

PREPARE = """\
columns:
  x:
    - {column: age, scale: standard}
    - column: visits
      scale: standard
      missing: mean
  level: {column: level, vocabulary: {values: [low, mid, high], other: refuse}}
"""

TWO = ("--task-option", "features=2")


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A region's files, a task, a preparation and statistics, in the current directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "files").mkdir()
    rows = [f"{n % 50},{n % 7},{n / 4},{('low', 'mid', 'high')[n % 3]}" for n in range(90)]
    write_rows(rows)
    (tmp_path / "shop.py").write_text(TASK)
    (tmp_path / "prepare.yaml").write_text(PREPARE)
    run("stats", "files", "--region", "eu", "--prepare", "prepare.yaml", "--out", "stats.json")
    return tmp_path


def write_rows(rows: list[str]) -> None:
    Path("files/a.csv").write_text("\n".join(["age,visits,city_size,level", *rows]) + "\n")


def run(*arguments: object, error: type[GeoRayError] | None = None) -> Result:
    result = CliRunner().invoke(data, [str(argument) for argument in arguments])
    if error is None:
        assert result.exit_code == 0, result.output
    else:
        assert type(result.exception) is error, result.output
    return result


def shard(*more: object, out: str = "out", error: type[GeoRayError] | None = None) -> Result:
    return run(
        "shard", "--task", "shop.py:Shop", "--input", "files", "--regions", "eu", "--out", out,
        *more, error=error,
    )  # fmt: skip


def refusal(*more: object, error: type[GeoRayError]) -> GeoRayError:
    found = shard(*more, error=error).exception
    assert isinstance(found, GeoRayError)
    return found


PREPARED = ("--prepare", "prepare.yaml", "--stats", "stats.json")


def test_a_column_that_the_files_lack_is_named_with_all_they_have(shop: Path) -> None:
    Path("bad.yaml").write_text(PREPARE.replace("column: visits", "column: visit"))
    result = run(
        "stats", "files", "--region", "eu", "--prepare", "bad.yaml", "--out", "s.json",
        error=ConfigError,
    )  # fmt: skip
    error = result.exception
    assert isinstance(error, ConfigError)
    assert error.message == (
        "the files have no column 'visit' (bad.yaml, line 4; did you mean 'visits'?); they have "
        "age, visits, city_size, level"
    )
    assert error.fix.startswith("Correct the preparation file;")
    assert "--site" in error.fix


def test_the_option_of_the_task_that_fits_is_named(shop: Path) -> None:
    error = refusal(*PREPARED, error=ConfigError)
    assert "gives 2 numbers per row (age 1, visits 1)" in error.message
    assert "use the task's option features=2" in error.message
    assert error.fix == "Add --task-option features=2, or correct the preparation file."
    shard(*PREPARED, "--task-option", "features=2")
    text = TASK.replace("{options.features}", "1")
    Path("shop.py").write_text(text)
    error = refusal(*PREPARED, "--force", error=ConfigError)
    assert 'use "float32[2]" in the task' in error.message
    assert "--task-option" not in error.fix


def test_a_draft_says_which_option_the_task_needs(shop: Path) -> None:
    draft = ("inspect", "files", "--task", "shop.py:Shop", "--draft", "draft.yaml")
    run(*draft)
    text = Path("draft.yaml").read_text()
    needs = "# 3 numbers per row; the task has float32[1]; set --task-option features=3\n"
    assert needs in text
    assert "# list the words of every region here; their order numbers the classes, from 0" in text
    run(*draft, "--force", "--task-option", "features=3")
    assert "  x:  # 3 numbers per row\n" in Path("draft.yaml").read_text()


def test_advice_keeps_the_words_and_names_the_line_of_the_preparation(shop: Path) -> None:
    write_rows(["31,2,1.5,low", ",3,2.5,mid", "40,,0.5,high"])
    error = refusal(*PREPARED, *TWO, error=SchemaMismatchError)
    assert "column 'age' (for 'x'; prepare.yaml, line 3): has no value" in error.message
    assert "x: [{column: age, scale: standard, missing: mean}, ...]" in error.message
    assert "or missing: drop_row, or missing: {fill: 0}" in error.message
    mended = PREPARE.replace("scale: standard}", "scale: standard, missing: mean}")
    Path("prepare.yaml").write_text(mended)
    assert load_preparation(Path("prepare.yaml")).columns["x"][0].missing == "mean"
    shard(*PREPARED, *TWO)


def test_a_wrong_word_of_a_label_is_no_further_class(shop: Path) -> None:
    write_rows(["31,2,1.5,low", "32,3,2.5,hgh"])
    error = refusal(*PREPARED, *TWO, error=SchemaMismatchError)
    assert "column 'level' (prepare.yaml, line 7): has words such as 'hgh'" in error.message
    assert "add [hgh] to the vocabulary" in error.message
    assert "bucket" not in error.message
    assert error.fix == "Correct the problems above in the preparation file or in the files."


def test_words_of_a_label_that_are_not_numbered_yet_are_listed_without_a_further_class(
    shop: Path,
) -> None:
    Path("prepare.yaml").write_text(PREPARE.rpartition("  level")[0])
    error = refusal(*PREPARED, *TWO, error=SchemaMismatchError)
    line = "level: {column: level, vocabulary: {values: [high, low, mid], other: refuse}}"
    assert line in error.message
    Path("prepare.yaml").write_text(PREPARE.rpartition("  level")[0] + f"  {line}\n")
    shard(*PREPARED, *TWO)


def test_a_label_without_a_value_gets_no_further_class(shop: Path) -> None:
    Path("prepare.yaml").write_text(PREPARE.replace(", other: refuse", ""))
    write_rows(["31,2,1.5,low", "32,3,2.5,"])
    error = refusal(*PREPARED, *TWO, error=SchemaMismatchError)
    assert "values: [low, mid, high]}, missing: drop_row}" in error.message


def test_a_misspelt_vocabulary_file_is_guessed(shop: Path) -> None:
    Path("words.txt").write_text("low\nmid\nhigh\n")
    Path("prepare.yaml").write_text(PREPARE.replace("values: [low, mid, high]", "file: wrods.txt"))
    error = refusal(*PREPARED, *TWO, error=ConfigError)
    assert "prepare.yaml: the vocabulary of column 'level': no file wrods.txt" in (error.message)
    assert "did you mean words.txt?" in error.message
    assert "Errno" not in str(error)
    Path("wrods.txt").write_bytes(b"\xff")
    assert "it is not UTF-8 text" in refusal(*PREPARED, *TWO, error=ConfigError).message


def test_a_misspelt_task_file_is_guessed(shop: Path) -> None:
    result = run(
        "shard", "--task", "shp.py:Shop", "--input", "files", "--regions", "eu", "--out", "out",
        error=TaskLoadError,
    )  # fmt: skip
    assert isinstance(result.exception, TaskLoadError)
    assert "shp.py does not exist; did you mean shop.py?" in result.exception.message
    assert "at the working directory" in result.exception.fix


def test_holding_nothing_out_is_warned_of(shop: Path) -> None:
    warning = "no rows are held out; a run needs some in every region"
    assert warning in shard(*PREPARED, *TWO, "--heldout", 0).stderr
    assert "held out" not in shard(*PREPARED, *TWO, out="more").stderr


def test_labels_are_shown_by_their_words(shop: Path) -> None:
    shown = shard(*PREPARED, *TWO).stdout
    assert "low:" in shown
    counts = {}
    for verb in (("check", "out"), ("merge", "out", "--out", "both.json")):
        table = run(*verb).stdout
        counts = dict(
            pair.split(":") for line in table.splitlines() if " train " in line
            for pair in line.split() if ":" in pair
        )  # fmt: skip
        assert list(counts) == ["low", "mid", "high"]
        assert sum(map(int, counts.values())) == 81
        assert "┃" not in table
        assert all(len(line) <= 80 for line in table.splitlines())
    assert label_words("both.json") == {"0": "low", "1": "mid", "2": "high"}
    Path("out/manifest.preparation.json").unlink()
    assert label_words("out") == {}
    assert "0:" in run("check", "out").stdout


def test_words_with_brackets_are_no_markup(shop: Path) -> None:
    write_rows([f"{n},{n},1,{('[red]', 'b')[n % 2]}" for n in range(30)])
    Path("prepare.yaml").write_text(PREPARE.replace("[low, mid, high]", '["[red]", b]'))
    assert "[red]:" in shard(*PREPARED, *TWO).stdout


def test_lists_in_messages_are_text(shop: Path) -> None:
    shard(*PREPARED, *TWO)
    result = run("check", "out", "--region", "us", error=ManifestError)
    assert "which has eu" in str(result.exception)
