"""Values at the edges of types: none loses a bit or a row silently, none ends in a traceback."""

# PyArrow ships no complete types.
# mypy: disable-error-code="attr-defined, name-defined, no-untyped-call"
from __future__ import annotations

import datetime as dt
import json
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from geo_ray.base.errors import ConfigError, SchemaMismatchError
from geo_ray.data.files.find import find_files
from geo_ray.data.files.options import ReadOptions
from geo_ray.data.prepare.config import load_preparation, parse_preparation
from geo_ray.data.prepare.inputs import gather_rows
from geo_ray.data.prepare.preparer import Preparer
from geo_ray.data.prepare.resolve import resolve
from geo_ray.data.prepare.statistics import load_statistics
from geo_ray.data.prepare.survey import share, survey_files

BIG = 2**53 + 1
"""The first integer that a float64 has not."""


def preparer(source: Mapping[str, Any], kind: str) -> Preparer:
    preparation = parse_preparation(json.dumps({"columns": {"x": source}}), "test")
    return Preparer(resolve(preparation, {"x": kind}).preparation)


def treat(source: Mapping[str, Any], kind: str, *values: Any) -> Any:
    """What a column becomes, as a list."""
    return preparer({"column": "x", **source}, kind).apply({"x": values}).columns["x"].tolist()


def csv_rows(folder: Path, text: str, source: Mapping[str, Any], kind: str, **read: Any) -> Any:
    """What the column of a CSV file becomes."""
    (folder / "a.csv").write_text(text)
    preparation = parse_preparation(json.dumps({"columns": {"x": {"column": "x", **source}}}), "t")
    resolved = resolve(preparation, {"x": kind}).preparation
    return gather_rows(find_files(str(folder), ReadOptions(**read)), resolved).columns["x"].tolist()


# ------------------------------------------------------------------ integers beyond 2**53


@pytest.mark.parametrize("fill", [0, 0.0, -1, 7.0, True, -(2**53)])
@pytest.mark.parametrize("as_text", [False, True])
def test_a_gap_does_not_change_its_neighbours(fill: float, as_text: bool) -> None:
    values = [BIG, -BIG, 2**63 - 1]
    given = [*(str(v) for v in values), ""] if as_text else [*values, None]
    found = treat({"missing": {"fill": fill}}, "int64", *given)
    assert found == [*values, int(fill)]


def test_a_value_for_missing_ones_may_need_the_other_integer_type() -> None:
    assert treat({"missing": {"fill": 2**64 - 1}}, "uint64", 5, None) == [5, 2**64 - 1]
    wide = pa.array([2**40, None], pa.uint64())
    made = preparer({"column": "x", "missing": {"fill": -1}}, "int64")
    assert made.apply({"x": wide}).columns["x"].tolist() == [2**40, -1]


@pytest.mark.parametrize(
    "source",
    [
        {"missing": "keep"},
        {"missing": {"fill": 0.5}},
        {"missing": {"fill": 0}},
        {"missing": {"fill": 0}, "scale": {"subtract": 2.0**53, "divide": 1}},
        {"missing": "drop_row", "scale": {"subtract": 0, "divide": 2}},
    ],
)
@pytest.mark.parametrize("values", [[BIG], [BIG, None], [None, -BIG, 3], [str(BIG), ""]])
def test_what_a_float_cannot_hold_is_refused_whatever_is_beside_it(
    source: dict[str, Any], values: list[Any]
) -> None:
    with pytest.raises(SchemaMismatchError, match=r"beyond 2\*\*53.*\(1 row, first in row"):
        treat(source, "float64", *values)


def test_the_last_exact_integer_is_taken_from_numbers_and_from_text() -> None:
    for values in ([2**53, 0.5], [str(2**53), "0.5"], ["+9007199254740992", "0.5"]):
        assert treat({}, "float64", *values) == [2.0**53, 0.5]
    with pytest.raises(SchemaMismatchError, match="beyond"):
        treat({}, "float64", str(BIG), "0.5")


def test_rows_are_the_same_however_they_are_cut(tmp_path: Path) -> None:
    """The second batch of the file has a gap, the first has none."""
    rows = 70_000
    values = [BIG + n for n in range(rows)] + [None]
    pq.write_table(pa.table({"x": values}), tmp_path / "a.parquet")
    tree = {"columns": {"x": {"column": "x", "missing": {"fill": 1.0}}}}
    resolved = resolve(parse_preparation(json.dumps(tree), "t"), {"x": "int64"}).preparation
    found = gather_rows(find_files(str(tmp_path)), resolved).columns["x"]
    assert found.tolist() == [*values[:-1], 1]


@pytest.mark.parametrize(
    ("fill", "kind", "message"),
    [
        (2**70, "float32", "fill: must be from"),
        (-(2**63) - 1, "int64", "fill: must be from"),
        (1e30, "float32", "fill: must be from"),
        (-1, "uint8", "-1 does not fit uint8"),
        (256.0, "uint8", "256.0 does not fit uint8"),
        (2, "bool", "2 is neither true nor false"),
        (BIG, "float64", "beyond 2\\*\\*53"),
    ],
)
def test_values_for_missing_ones_fit_their_column(fill: float, kind: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        preparer({"column": "x", "missing": {"fill": fill}}, kind)


def test_a_large_number_may_be_a_word() -> None:
    source = {"vocabulary": {"values": ["a", 2**70]}, "missing": {"fill": 2**70}}
    assert treat(source, "int64", "a", None) == [0, 1]


# ------------------------------------------------------------------ times beyond Python's


FAR = {
    "date32": pa.array([2**30, 1, None], pa.date32()),
    "date64": pa.array([2**35 * 86_400_000, 86_400_000, None], pa.date64()),
    "s": pa.array([253402300800, 86_400, None], pa.timestamp("s")),
    "us, zone": pa.array([253402300800 * 10**6, 86_400 * 10**6, None], pa.timestamp("us", "UTC")),
    "ms": pa.array([2**60, 86_400_000, None], pa.timestamp("ms")),
    "duration": pa.array([2**60, 86_400, None], pa.duration("s")),
}
SECONDS = {
    "date32": 2**30 * 86_400.0,
    "date64": 2**35 * 86_400.0,
    "s": 253402300800.0,
    "us, zone": 253402300800.0,
    "ms": 2**60 / 1000,
    "duration": 2.0**60,
}


@pytest.mark.parametrize("kind", FAR)
def test_times_after_the_year_9999_are_numbers_words_and_statistics(
    tmp_path: Path, kind: str
) -> None:
    pyarrow.feather.write_feather(pa.table({"x": FAR[kind]}), tmp_path / "a.arrow")
    found = find_files(str(tmp_path))
    survey = survey_files(found, count_words=("x",))
    shared = share(survey, "eu", None, at_least=1, extremes=True).columns["x"]
    assert shared.max == pytest.approx(SECONDS[kind], rel=1e-15)
    assert shared.min == 86_400
    assert shared.words is not None
    assert sorted(shared.words.values()) == [1, 1]
    tree = {
        "columns": {"x": {"column": "x", "missing": {"fill": "none"}, "vocabulary": {"hash": 9}}}
    }
    resolved = resolve(parse_preparation(json.dumps(tree), "t"), {"x": "int64"}).preparation
    assert gather_rows(found, resolved).counts.filled == {"x": 1}
    plain = resolve(parse_preparation("columns: {}", "t"), {"x": "float64"}).preparation
    with pytest.raises(SchemaMismatchError, match="has no value"):
        gather_rows(found, plain)


def test_a_date_that_is_no_whole_day_is_a_number_all_the_same() -> None:
    odd = pa.array([2**62, 1500], pa.date64())
    made = preparer({"column": "x"}, "float64")
    assert made.apply({"x": odd}).columns["x"].tolist() == [2**62 / 1000, 1.5]


def test_far_times_are_shown_where_they_do_not_fit() -> None:
    far = pa.array([253402300800], pa.timestamp("s"))
    with pytest.raises(SchemaMismatchError, match="'10000-01-01 00:00:00'"):
        preparer({"column": "x"}, "int8").apply({"x": far})


def test_the_word_of_a_time_does_not_depend_on_its_neighbours() -> None:
    near = pa.array([86_400], pa.timestamp("s"))
    both = pa.array([86_400, 253402300800], pa.timestamp("s"))
    made = preparer(
        {"column": "x", "vocabulary": {"values": ["1970-01-02 00:00:00", "10000-01-01 00:00:00"]}},
        "int64",
    )
    assert made.apply({"x": near}).columns["x"].tolist() == [0]
    assert made.apply({"x": both}).columns["x"].tolist() == [0, 1]
    assert made.apply({"x": [dt.datetime(1970, 1, 2)]}).columns["x"].tolist() == [0]


def test_views_of_bytes_are_no_words() -> None:
    made = preparer({"column": "x", "vocabulary": {"hash": 4}}, "int64")
    with pytest.raises(SchemaMismatchError, match="not numbers, text"):
        made.apply({"x": pa.array([b"a"], pa.binary_view())})


# ------------------------------------------------------------------ words of CSV files


@pytest.mark.parametrize("flags", [["True", "False"], ["TRUE", "FALSE"], ["true", "false"]])
def test_flags_of_a_list_are_found_as_pandas_writes_them(flags: list[str]) -> None:
    source = {"vocabulary": {"values": [False, True], "other": "refuse"}}
    assert treat(source, "int64", *flags) == [1, 0]
    assert treat(source, "int64", True, False) == [1, 0]


@pytest.mark.parametrize(
    "same",
    [
        ["1", "1.0", "1.000", 1, 1.0, Decimal("1.00")],
        ["-0.0", "0", 0.0],
        ["True", "TRUE", "true", True],
        [str(2**70), f"{2**70}.0", float(2**70)],
    ],
)
def test_one_value_has_one_place_in_every_region_whatever_wrote_it(same: list[Any]) -> None:
    buckets = {"vocabulary": {"hash": 1000}}
    assert len({treat(buckets, "int64", value)[0] for value in same}) == 1
    listed = {"vocabulary": {"values": [same[-1] if len(same) < 6 else 1], "other": "refuse"}}
    assert [treat(listed, "int64", value)[0] for value in same] == [0] * len(same)


def test_other_text_is_taken_as_written() -> None:
    words = ["01", "1", "1.5", "v1.0", "1e0", "truE", "t"]
    assert treat({"vocabulary": {"values": words}}, "int64", *words) == list(range(len(words)))


def test_whole_numbers_of_a_file_with_decimal_commas_are_the_same_words(tmp_path: Path) -> None:
    words = {"vocabulary": {"values": ["1", "2"], "other": "refuse"}}
    comma: dict[str, Any] = {"decimal": ",", "delimiter": ";"}
    assert csv_rows(tmp_path, "x;y\n1,0;a\n2;b\n", words, "int64", **comma) == [0, 1]


def test_decimal_commas_are_those_of_numbers_not_of_words(tmp_path: Path) -> None:
    text = "x;y\n1,5;a\n-2,25e1;b\n"
    comma: dict[str, Any] = {"decimal": ",", "delimiter": ";"}
    assert csv_rows(tmp_path, text, {}, "float64", **comma) == [1.5, -22.5]
    words = {"vocabulary": {"values": ["1,5", "-2,25e1"]}}
    assert csv_rows(tmp_path, text, words, "int64", **comma) == [0, 1]
    survey = survey_files(find_files(str(tmp_path), ReadOptions(**comma)))
    assert survey.columns["x"].kind == "float"
    assert survey.columns["x"].distinct == {"1,5", "-2,25e1"}
    made = preparer({"column": "x"}, "float64")
    again = Preparer(resolve(None, {"x": "float64"}).preparation, decimal=",")
    assert again.apply({"x": ["1,5"]}).columns["x"].tolist() == [1.5]
    with pytest.raises(SchemaMismatchError, match="text such as '1,5'"):
        made.apply({"x": ["1,5"]})


def test_the_most_frequent_number_may_have_a_decimal_comma(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x\n1,5\n1,5\n2,5\n")
    found = find_files(str(tmp_path), ReadOptions(decimal=",", delimiter=";"))
    statistics = share(survey_files(found, count_words=("x",)), "eu", None, 1, extremes=True)
    tree = json.dumps({"columns": {"x": {"column": "x", "missing": "most_frequent"}}})
    made = resolve(parse_preparation(tree, "t"), {"x": "float32"}, statistics).preparation
    assert Preparer(made).apply({"x": [None]}).columns["x"].tolist() == [1.5]


def test_vocabulary_files_are_cut_at_the_ends_of_lines_only(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_bytes("\ufeffa\u2028b\r\nc\x0bd\n\x85\ne\n".encode())
    file = tmp_path / "p.yaml"
    file.write_text("columns: {x: {column: x, vocabulary: {file: words.txt}}}")
    vocabulary = load_preparation(file).columns["x"][0].vocabulary
    assert vocabulary is not None
    assert vocabulary.values == ("a\u2028b", "c\x0bd", "e")


# ------------------------------------------------------------------ what callers and files may hold


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (3, "column 'x' is 3; it must have one value per row"),
        ("123", "column 'x' is '123'; it must have one value per row"),
        (b"12", "one value per row"),
        (np.float32(3), "one value per row"),
        (np.array(3.0), "one value per row"),
        ({"a": 1}, "one value per row"),
        (None, "one value per row"),
        (["\ud800"], "column 'x' has half a surrogate pair in its text"),
    ],
)
def test_rows_that_are_no_column_are_refused(values: Any, message: str) -> None:
    made = preparer({"column": "x"}, "float32")
    with pytest.raises(SchemaMismatchError, match=message):
        made.apply({"x": values})


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ({"count": 0, "mean": 1.0, "m2": 0.0}, "count is 0"),
        ({"mean": 1.0, "m2": 0.0}, "count is 0"),
        ({"count": 3, "mean": 1.0}, "given together"),
        ({"count": 3, "m2": 1.0}, "given together"),
    ],
)
def test_statistics_of_nothing_are_refused(
    tmp_path: Path, column: dict[str, Any], message: str
) -> None:
    tree = {
        "regions": ["eu"],
        "rows": 3,
        "columns": {"x": {"kind": "number", "nulls": 0, **column}},
    }
    path = tmp_path / "s.json"
    path.write_text(json.dumps(tree))
    with pytest.raises(ConfigError, match=message):
        load_statistics(path)
