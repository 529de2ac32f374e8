"""``geo-ray data inspect``: what it detects, and settings that ``stats`` and ``shard`` accept."""

from __future__ import annotations

import json
import random
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from geo_ray.cli.data import data
from geo_ray.data.files.find import find_files
from geo_ray.data.files.options import ReadOptions
from geo_ray.data.prepare.config import source_text
from geo_ray.data.prepare.suggest import likely_label, suggest, suggest_options
from geo_ray.data.prepare.survey import MOST_DISTINCT, Survey, survey_files
from tests.support.data_support import columns_task


def run(*arguments: object) -> Result:
    result = CliRunner().invoke(data, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result


def survey_of(
    folder: Path, header: str, row: Callable[[int], str], rows: int = 60, decimal: str = "."
) -> Survey:
    folder.mkdir(exist_ok=True)
    (folder / "a.csv").write_text("\n".join([header, *(row(n) for n in range(rows))]) + "\n")
    return survey_files(find_files(str(folder), ReadOptions(delimiter=";", decimal=decimal)))


def treatment(survey: Survey, name: str) -> str:
    source = suggest(name, survey.columns[name]).source
    return "leave it out" if source is None else source_text(source)


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        (lambda n: f"{n % 28 + 1:02}.02.2024", '{time: "%d.%m.%Y"}'),
        (lambda n: f"02/{n % 28 + 1:02}/2024 10:00", '{time: "%m/%d/%Y %H:%M"}'),
        (lambda n: f"202402{n % 28 + 1:02}", '{time: "%Y%m%d"}'),
        (lambda n: f"{n % 28 + 1}-Feb-2024", '{time: "%d-%b-%Y"}'),
        (lambda n: f"2024-02-{n % 28 + 1:02} 00:00:00 UTC", "cast: time"),
    ],
)
def test_times_are_detected(tmp_path: Path, word: Callable[[int], str], expected: str) -> None:
    survey = survey_of(tmp_path, "t;x", lambda n: f"{word(n)};1")
    assert expected in treatment(survey, "t")


def test_a_day_that_may_be_a_month_is_doubted(tmp_path: Path) -> None:
    survey = survey_of(tmp_path, "t;x", lambda n: f"0{n % 9 + 1}/05/2024;1")
    found = suggest("t", survey.columns["t"])
    assert "or %m/%d/%Y: no value distinguishes day and month" in found.remark


@pytest.mark.parametrize(
    ("word", "options"),
    [
        (lambda n: f"{n + 1},{n:03}.50", ("--thousands ,",)),
        (lambda n: f"{n + 1},{n:03}", ("--thousands ,",)),
        (lambda n: f"{n},5", ("--decimal ,",)),
        (lambda n: f"{n + 1}.{n:03},5", ("--thousands . --decimal ,",)),
        (lambda n: f"{n + 1}'{n:03}", ('--thousands "\'"',)),
        (lambda n: f"{n + 1} {n:03}", ("--thousands space",)),
        (lambda n: "no data" if n == 7 else f"{n}.5", ("--null 'no data'",)),
        (lambda n: "?" if n == 7 else f"{n},5", ("--decimal ,", "--null '?'")),
        (lambda n: f"A{n % 7}", ()),
        (lambda n: f"{n}.5 kg", ()),
    ],
)
def test_options_that_read_numbers_are_detected(
    tmp_path: Path, word: Callable[[int], str], options: tuple[str, ...]
) -> None:
    survey = survey_of(tmp_path, "v;x", lambda n: f"{word(n)};1")
    assert suggest_options(survey) == options
    assert ("scale: standard" in treatment(survey, "v")) == bool(options)


def test_points_between_thousands_are_detected_where_other_columns_have_decimal_commas(
    tmp_path: Path,
) -> None:
    rows = [f"2.{n:03};{n},5" for n in range(60)]
    survey = survey_of(tmp_path, "v;x", rows.__getitem__)
    assert suggest_options(survey) == ("--thousands . --decimal ,",)
    assert "separates thousands, add --thousands ." in suggest("v", survey.columns["v"]).remark
    measured = survey_of(tmp_path, "v;x", lambda n: f"2.{n};{n},5")
    assert suggest_options(measured) == ("--decimal ,",)
    assert suggest("v", measured.columns["v"]).remark == ""
    read = survey_of(tmp_path, "v;x", rows.__getitem__, decimal=",")
    assert suggest_options(read) == ("--thousands . --decimal ,",)
    assert "such as '2.000' need" in suggest("v", read.columns["v"]).remark
    assert treatment(read, "v") == "{column: v, scale: standard}"


def test_options_fit_all_columns(tmp_path: Path) -> None:
    survey = survey_of(tmp_path, "v;w", lambda n: f"1,{n:03};{n},5")
    assert suggest_options(survey) == ("--decimal ,",)


def test_identifiers_are_detected_whatever_their_number(tmp_path: Path) -> None:
    rows = MOST_DISTINCT + 100
    survey = survey_of(
        tmp_path, "nr;code;amount;note", lambda n: f"{10_000 + n};K{n};{n % 900};n{n // 2}", rows
    )
    left_out = {name: treatment(survey, name) == "leave it out" for name in survey.columns}
    assert left_out == {"nr": True, "code": True, "amount": False, "note": False}


@pytest.mark.parametrize(
    ("header", "label"),
    [("id;age;sex;bought", "bought"), ("id;age;target;sex", "target"), ("id;age;sex;y", "y")],
)
def test_the_label_is_detected(tmp_path: Path, header: str, label: str) -> None:
    survey = survey_of(tmp_path, header, lambda n: f"{n};{n / 7};{n % 2};{n % 2 + 1}")
    assert likely_label(survey) == label
    assert likely_label(survey_of(tmp_path, "a;b", lambda n: f"{n};{n / 7}")) is None


def test_most_frequent_values_are_shown(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("c;n\n" + "b;1\n" * 3 + "a;2\n" * 5 + "[x];3\n")
    shown = run("inspect", tmp_path, "--delimiter", ";").stdout
    assert "  c: a 5, b 3, [x] 1\n" in shown


def test_what_inspect_proposes_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written by hand between `inspect` and the shards."""
    monkeypatch.chdir(tmp_path)
    rng = random.Random(3)
    lines = ["case;born;income;ward;score;visits;note;Outcome"]
    for n in range(200):
        lines.append(
            f"c{n};{rng.randint(1, 28):02}.0{rng.randint(1, 9)}.19{rng.randint(20, 99)};"
            f"{rng.choice(['unknown', '3.412,50', '998,10', '12.000,00'])};"
            f"{rng.choice(['icu', 'er', 'surgery', ''])};{rng.choice(['', '0,5', '1,25'])};"
            f"{rng.randint(0, 9)};{rng.choice(['12 kg', '7'])};{rng.choice(['dead', 'alive'])}"
        )
    Path("in").mkdir()
    Path("in/a.csv").write_text("\n".join(lines) + "\n")
    Path("ward.py").write_text(columns_task("Ward", "label", 1))
    inspect = ("inspect", "in", "--task", "ward.py:Ward", "--delimiter", ";")
    shown = run(*inspect, "--draft", "prepare.yaml").stdout
    assert "The label may be Outcome." in shown
    (line,) = [line for line in shown.splitlines() if line.startswith("Options for")]
    options = ["--delimiter", ";", *shlex.split(line.partition(": ")[2])]
    draft = Path("prepare.yaml").read_text()
    assert "note is not used" in draft or "{column: note, vocabulary" in draft
    width = draft.partition("--task-option features=")[2].split()[0]
    assert f"Read the files with these options: {line.partition(': ')[2]}" in draft
    read = ("--prepare", "prepare.yaml", *options)
    run("stats", "in", "--region", "eu", "--out", "eu.json", *read)
    shard = ("shard", "--task", "ward.py:Ward", "--input", "in", "--regions", "eu", "--out", "o")
    done = run(*shard, "--task-option", f"features={width}", "--stats", "eu.json", *read)
    assert "200 rows read, 0 of them dropped" in done.stdout
    tree = json.loads(Path("o/manifest.json").read_text())
    assert set(tree["shards"][0]["labels"]) == {"0", "1"}
