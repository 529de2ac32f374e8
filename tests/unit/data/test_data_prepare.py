"""Treatments of columns: what a preparation makes of values, and what it refuses with advice."""

from __future__ import annotations

import ast
import datetime as dt
import hashlib
import json
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from geo_ray.base.errors import ConfigError, SchemaMismatchError
from geo_ray.data.prepare.config import (
    Preparation,
    Source,
    Vocabulary,
    load_preparation,
    parse_preparation,
)
from geo_ray.data.prepare.preparer import Prepared, Preparer
from geo_ray.data.prepare.resolve import resolve
from geo_ray.data.prepare.saved_preparation import preparation_bytes
from geo_ray.data.prepare.statistics import ColumnStatistics, Statistics

AGE = {
    "kind": "number",
    "nulls": 1,
    "count": 4,
    "mean": 30.0,
    "m2": 400.0,
    "min": 20.0,
    "max": 45.0,
}
WORDS = {"kind": "text", "nulls": 0, "words": {"a": 5, "c": 9, "b": 5, "rare": 1}}
CONSTANT = {
    "kind": "number",
    "nulls": 0,
    "count": 4,
    "mean": 7.0,
    "m2": 0.0,
    "min": 7.0,
    "max": 7.0,
}
TIME = ColumnStatistics(kind="time", nulls=0, count=2, mean=5.0, m2=2.0, min=4.0, max=6.0)
STATISTICS = Statistics.model_validate_json(
    json.dumps(
        {
            "regions": ["a", "b"],
            "rows": 5,
            "columns": {"age": AGE, "word": WORDS, "constant": CONSTANT},
            "left_out": {"zip": "it is number in a, text in b"},
        }
    )
)


def preparer(
    tree: dict[str, Any], types: dict[str, str], statistics: Statistics | None = STATISTICS
) -> Preparer:
    preparation = parse_preparation(json.dumps({"columns": tree}), "test")
    return Preparer(resolve(preparation, types, statistics).preparation)


def treat(source: dict[str, Any], kind: str, *values: Any) -> Any:
    """What one source makes of values, as lists."""
    rows = {source["column"]: list(values)}
    return preparer({"x": source}, {"x": kind}).apply(rows).columns["x"].tolist()


def refusal(source: dict[str, Any], kind: str, *values: Any) -> str:
    with pytest.raises(SchemaMismatchError) as caught:
        treat(source, kind, *values)
    return str(caught.value)


# ------------------------------------------------------------------ numbers


def test_numbers_are_read_from_whatever_holds_them() -> None:
    age = {"column": "age"}
    assert treat(age, "float64", 1, 2.5, None if 0 else 3) == [1, 2.5, 3]
    assert treat(age, "float64", " 1 ", "+2.5e1", ".5", "-3.", "true", "FALSE") == [
        1, 25, 0.5, -3, 1, 0,
    ]  # fmt: skip
    assert treat(age, "float64", Decimal("1.25"), Decimal(-2)) == [1.25, -2]
    assert treat(age, "bool", 1, "0", True, "true") == [True, False, True, True]
    assert treat(age, "int64", "3.0", 2**53 - 1) == [3, 2**53 - 1]
    assert treat(age, "int64", str(2**63 - 1), str(-(2**63))) == [2**63 - 1, -(2**63)]
    assert treat(age, "uint64", str(2**64 - 1), 0) == [2**64 - 1, 0]
    assert treat(age, "int64", np.datetime64("1970-01-01T00:00:09")) == [9]
    assert treat(age, "int64", dt.date(1970, 1, 2), dt.date(1969, 12, 31)) == [86400, -86400]
    assert treat(age, "float32", dt.timedelta(seconds=1.5), dt.timedelta(days=1)) == [1.5, 86400]
    assert treat(age, "int64", dt.time(0, 1, 2)) == [62]


def test_times_are_read_from_text() -> None:
    when = {"column": "when", "cast": "time"}
    found = treat(
        when,
        "float64",
        "1970-01-02",
        "1970-01-01 00:00:01.25",
        "1970-01-01T00:00:00Z",
        "1970-01-01T01:00:00+01:00",
    )
    assert found == [86400, 1.25, 0, 0]
    assert "'yesterday'" in refusal(when, "float64", "yesterday")
    assert "cast: time" in refusal({"column": "when"}, "float64", "1970-01-02")


@pytest.mark.parametrize(
    ("missing", "expected"),
    [
        ({"fill": 1.5}, [2.0, 1.5, 1.5]),
        ("mean", [2.0, 30.0, 30.0]),
        ("drop_row", [2.0]),
        ("keep", [2.0, None, None]),
    ],
)
@pytest.mark.parametrize("values", [[2, None, float("nan")], ["2", "", "NaN"], ["2", None, " nan"]])
def test_missing_numbers_and_nan_are_treated_alike(
    missing: Any, expected: list[float | None], values: list[Any]
) -> None:
    found = treat({"column": "age", "missing": missing}, "float32", *values)
    assert [None if value != value else value for value in found] == expected


def test_infinite_numbers_are_refused_taken_as_missing_or_kept() -> None:
    values = [1.0, float("inf"), "-inf" if 0 else float("-inf")]
    assert "infinite: missing" in refusal({"column": "age"}, "float32", *values)
    filled = {"column": "age", "infinite": "missing", "missing": {"fill": 0}}
    assert treat(filled, "float32", *values) == [1, 0, 0]
    assert treat({"column": "age", "infinite": "keep"}, "float32", *values) == values
    assert treat({"column": "age", "infinite": "keep"}, "float32", "1e999") == [float("inf")]


def test_scaling_is_by_the_statistics_of_all_numbers() -> None:
    assert treat({"column": "age", "scale": "standard"}, "float64", 20, 30, 45) == [-1, 0, 1.5]
    assert treat({"column": "age", "scale": "minmax"}, "float64", 20, 45, 70) == [0, 1, 2]
    own = {"column": "age", "scale": {"subtract": 1, "divide": 2}}
    assert treat(own, "float64", 5) == [2]
    filled = {"column": "age", "scale": "standard", "missing": "mean"}
    assert treat(filled, "float64", None, 40) == [0, 1]


@pytest.mark.parametrize("scale", ["standard", "minmax"])
def test_a_constant_column_becomes_zero_and_is_mentioned(scale: str) -> None:
    source = {"column": "constant", "scale": scale}
    assert treat(source, "float32", 7, 7) == [0, 0]
    preparation = parse_preparation(json.dumps({"columns": {"x": source}}), "test")
    (note,) = resolve(preparation, {"x": "float32"}, STATISTICS).notes
    assert "'constant' is constant" in note


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        ("int64", [0.5], "not whole"),
        ("int64", ["1", "2.5"], "not whole"),
        ("uint8", [256], "do not fit"),
        ("uint8", [-1], "do not fit"),
        ("int8", ["-129"], "do not fit"),
        ("int64", [2**63], "do not fit"),
        ("int64", [1e19], "do not fit"),
        ("uint64", [2.0**64], "do not fit"),
        ("float32", [1e39], "do not fit"),
        ("float16", [70000], "do not fit"),
        ("float64", [2**53 + 1], "beyond 2**53"),
        ("float32", ["9007199254740993"], "beyond 2**53"),
        ("float32", ["12345678901234567890123"], "beyond 2**53"),
        ("int64", ["12345678901234567890123"], "beyond 2**53"),
        ("bool", [2], "neither true nor false"),
        ("bool", [0.5], "neither true nor false"),
        ("float32", ["DE"], "text such as 'DE', where a number is required"),
        ("float32", ["0x10"], "text"),
        ("float32", ["1_000"], "text"),
        ("float32", ["1,5"], "text"),
        ("float32", [b"1"], "not numbers, text or times"),
        ("float32", [[1.0, 2.0]], "a list of numbers in each row"),
        ("float32[2]", [[1.0, 2.0], [3.0]], "lists of another length than 2, such as [3.0]"),
        ("float32[2]", [[1.0, None]], "no value"),
        ("float32[2]", [None, [1, 2]], "no value"),
        ("float32[2]", [[1.0, float("inf")]], "infinite"),
        ("float32", [None], "no value"),
    ],
)
def test_nothing_is_lost_silently(kind: str, values: list[Any], message: str) -> None:
    text = refusal({"column": "age"}, kind, *values)
    assert message in text
    assert "age" in text


def test_rounding_to_a_shorter_float_is_no_loss() -> None:
    assert treat({"column": "age"}, "float32", 0.1, "20000001") == [float(np.float32(0.1)), 2e7]


def test_scaling_that_overflows_is_refused() -> None:
    source = {"column": "age", "scale": {"subtract": 0, "divide": 1e-300}}
    assert "do not fit" in refusal(source, "float64", 1e300)


def test_a_single_number_where_a_list_is_wanted_is_said_in_plain_words() -> None:
    text = refusal({"column": "hits"}, "float64[4]", 1.5, 2.5)
    assert (
        "has a single value in each row, such as 1.5; the task requires a list of 4 float64" in text
    )
    assert "join 4 columns: [{column: hits}, {column: ANOTHER}, ...]" in text
    assert "float64[K]" not in text
    assert treat({"column": "hits"}, "float64[1]", 1.5, 2.5) == [[1.5], [2.5]]


def test_lists_of_numbers_are_taken_whole() -> None:
    source = {"column": "v", "missing": {"fill": 0}}
    assert treat(source, "int32[2]", [1, 2], [3, None], None) == [[1, 2], [3, 0], [0, 0]]
    dropping = {"column": "v", "missing": "drop_row"}
    assert treat(dropping, "int32[2]", [1, 2], [3, None], None) == [[1, 2]]
    assert treat({"column": "v"}, "float32[2]", np.arange(2), np.arange(2)) == [[0, 1], [0, 1]]


# ------------------------------------------------------------------ categories


def category(**vocabulary: Any) -> dict[str, Any]:
    return {"column": "word", "vocabulary": vocabulary}


def test_words_of_a_list_become_places_and_others_the_last() -> None:
    listed = category(values=["b", "a"])
    assert treat(listed, "int64", "a", " b ", "c", "B") == [1, 0, 2, 2]
    hot = category(values=["b", "a"], encode="one_hot")
    assert treat(hot, "float32[3]", "a", "b", "?") == [[0, 1, 0], [1, 0, 0], [0, 0, 1]]
    assert treat(category(values=["b"], other="refuse", encode="one_hot"), "uint8[1]", "b") == [[1]]
    text = refusal(category(values=["b"], other="refuse"), "int64", "b", "x", "y")
    assert "words such as 'x' that are not in its vocabulary" in text
    assert "add [x, y]" in text


def test_the_same_word_is_found_whatever_type_a_file_gives_it() -> None:
    listed = category(values=[1, 2.5, True, "2026-01-31"])
    for values in ([1, 2], [1.0, 2.0], ["1", "2"]):
        assert treat(listed, "int64", *values) == [0, 4]
    assert treat(listed, "int64", 2.5, 1.0) == [1, 0]
    assert treat(listed, "int64", True, False) == [2, 4]
    assert treat(listed, "int64", dt.date(2026, 1, 31)) == [3]
    assert treat(listed, "int64", "01") == [4]


def test_hash_buckets_are_those_of_blake2b() -> None:
    def bucket(word: str) -> int:
        digest = hashlib.blake2b(word.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") % 16

    words = ["DE", "Straße", "x" * 1000]
    assert treat(category(hash=16), "int64", *words) == [bucket(word) for word in words]
    hot = treat(category(hash=16, encode="one_hot"), "uint8[16]", *words)
    assert [row.index(1) for row in hot] == [bucket(word) for word in words]
    assert np.sum(hot) == 3


@pytest.mark.parametrize(
    ("missing", "expected"),
    [("other", [0, 2, 2, 2]), ({"fill": "b"}, [0, 1, 1, 1]), ("drop_row", [0])],
)
def test_missing_words_are_treated(missing: Any, expected: list[int]) -> None:
    source = {**category(values=["a", "b"]), "missing": missing}
    assert treat(source, "int64", "a", None, "", "  ") == expected
    assert "has no value" in refusal(category(values=["a"]), "int64", "a", None)


def test_words_and_the_most_frequent_one_come_from_statistics() -> None:
    assert treat(category(counted=5), "int64", "c", "a", "b", "rare") == [0, 1, 2, 3]
    source = {**category(counted=5), "missing": "most_frequent"}
    assert treat(source, "int64", None, "a") == [0, 1]


def test_values_that_are_no_words_are_refused() -> None:
    assert "not numbers, text" in refusal(category(hash=4), "int64", [1, 2])
    assert "not numbers, text" in refusal(category(hash=4), "int64", b"a")


# ------------------------------------------------------------------ several columns


def test_columns_are_joined_in_order_and_one_hot_by_default() -> None:
    made = preparer(
        {
            "x": [{"column": "age", "scale": "standard"}, category(values=["a"]), {"column": "n"}],
            "y": {"column": "bought", "vocabulary": {"values": ["no", "yes"], "other": "refuse"}},
        },
        {"x": "float32[4]", "y": "int64", "z": "uint8"},
    )
    assert made.inputs == ("age", "word", "n", "bought", "z")
    rows = {
        "age": [40, 20],
        "word": ["a", "b"],
        "n": ["1", "2"],
        "bought": ["yes", "no"],
        "z": [7, 8],
    }
    found = made.apply({**rows, "more": ["ignored"] * 2})
    assert found.columns["x"].tolist() == [[1, 1, 0, 1], [-1, 0, 1, 2]]
    assert found.columns["x"].dtype == np.float32
    assert found.columns["y"].tolist() == [1, 0]
    assert found.columns["z"].tolist() == [7, 8]
    assert found.columns["z"].dtype == np.uint8
    assert found.counts.other == {"word": 1, "age": 0, "n": 0, "bought": 0, "z": 0}


def test_dropped_rows_may_hold_anything_and_are_counted() -> None:
    made = preparer(
        {
            "x": {"column": "age", "missing": "drop_row"},
            "y": {"column": "n", "missing": "drop_row"},
            "z": category(values=["a"], other="refuse"),
        },
        {"x": "float32", "y": "int64", "z": "int64"},
    )
    found: Prepared = made.apply(
        {"age": [1, None, 3, None], "n": ["1", "0.5", "", ""], "word": ["a", "?", "a", None]}
    )
    assert found.columns["x"].tolist() == [1.0]
    assert found.is_valid.tolist() == [True, False, False, False]
    assert found.counts.rows == 4
    assert found.counts.dropped == 3
    assert found.counts.dropped_by == {"age": 2, "n": 2, "word": 0}


def test_everything_that_is_wrong_is_listed_at_once_with_lines_to_paste() -> None:
    made = preparer(
        {"x": [{"column": "age"}, {"column": "country"}]},
        {"x": "float32[2]", "label": "int64", "size": "uint8", "gone": "int64"},
    )
    rows = {
        "age": [None, float("inf"), 3],
        "country": ["DE", "FR", None],
        "label": ["no", "yes", "no"],
        "size": [1, 999, 2.5],
        "Gone": [1, 2, 3],
    }
    with pytest.raises(SchemaMismatchError) as caught:
        made.apply(rows)
    text = caught.value.message
    for line in (
        "column 'age' (for 'x'): has no value (1 row, first in row 1 of the rows)",
        "column 'age' (for 'x'): has infinite numbers (1 row, first in row 2 of the rows)",
        "x: [{column: age, infinite: missing, missing: drop_row}, ...]",
        "column 'country' (for 'x'): has text such as 'DE', where a number is required (2 rows",
        "x: [{column: country, vocabulary: {values: [DE, FR]}, missing: drop_row}, ...]",
        "label: {column: label, vocabulary: {values: [no, yes]}}",
        "column 'size': has numbers that are not whole, such as 2.5",
        "column 'size': has numbers such as 999.0 that do not fit; the task requires one uint8 "
        "number",
        "gone: {column: Gone}",
    ):
        assert line in text
    assert "preparation file" in caught.value.fix


def test_a_column_that_another_source_uses_is_not_suggested_for_a_missing_one() -> None:
    types = {"x": "float32[2]", "label": "int64"}
    made = preparer({"x": [{"column": "area"}, {"column": "areas"}]}, types)
    with pytest.raises(SchemaMismatchError) as caught:
        made.apply({"areas": [1.0], "label": [0]})
    assert "x: [{column: areas" not in caught.value.message
    assert "add the missing columns" in caught.value.fix


def test_advice_can_be_followed_to_the_letter(tmp_path: Path) -> None:
    rows = {"x": [1.0, None, float("inf")], "y": ["no", None, "yes"]}
    types = {"x": "float32", "y": "int64"}
    with pytest.raises(SchemaMismatchError) as caught:
        preparer({}, types).apply(rows)
    lines = [line.strip() for line in caught.value.message.splitlines()]
    pasted = [line for line in lines if line.startswith(("x: {", "y: {"))]
    file = tmp_path / "prepare.yaml"
    file.write_text("columns:\n" + "".join(f"  {line}\n" for line in pasted))
    made = Preparer(resolve(load_preparation(file), types).preparation)
    assert made.apply(rows).columns["x"].tolist() == [1.0]


def test_the_same_input_gives_the_same_arrays_and_leaves_it_alone() -> None:
    made = preparer(
        {"x": {"column": "age", "missing": "mean", "scale": "standard"}}, {"x": "float32"}
    )
    rows = {"age": np.array([1.0, np.nan, 3.0])}
    before = rows["age"].tobytes()
    first, second = (made.apply(rows).columns["x"].tobytes() for _ in range(2))
    assert first == second
    assert rows["age"].tobytes() == before


# ------------------------------------------------------------------ files of preparations


def load(tmp_path: Path, text: str) -> Preparation:
    file = tmp_path / "prepare.yaml"
    file.write_text(text)
    return load_preparation(file)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("columns: {x: {colum: age}}", "did you mean column?"),
        ("columns: {x: {column: age, missing: meen}}", "columns.x.0.missing (line 1)"),
        ("columns: {x: []}", "columns.x has no source"),
        ("columns: {x: {column: age, missing: other}}", "other requires a vocabulary"),
        ("columns: {x: {column: age, missing: {fill: none}}}", "is not a number"),
        ("columns: {x: {column: age, scale: {subtract: 1, divide: 0}}}", "must not be 0"),
        ("columns: {x: {column: age, length: 3, scale: standard}}", "lists have no statistics"),
        ("columns: {x: {column: age, vocabulary: {}}}", "needs exactly one of"),
        ("columns: {x: {column: age, vocabulary: {hash: 4, file: a}}}", "found file, hash"),
        ("columns: {x: {column: age, vocabulary: {values: []}}}", "empty"),
        ("columns: {x: {column: age, vocabulary: {values: [a, ' a']}}}", "'a' is listed twice"),
        (
            "columns: {x: {column: a, scale: minmax, vocabulary: {hash: 4}}}",
            "cannot be combined with",
        ),
        (
            "columns: {x: {column: a, missing: keep, vocabulary: {hash: 4}}}",
            "keep cannot be combined",
        ),
        (
            "columns: {x: {column: a, missing: other, vocabulary: {hash: 4}}}",
            "requires a vocabulary",
        ),
        ("columns: {x: {column: a, vocabulary: {file: none.txt}}}", "none.txt"),
        ("version: 2\ncolumns: {}", "version"),
        ("x: {column: age}", "columns"),
    ],
)
def test_preparation_files_that_make_no_sense_are_refused(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert message in caught.value.message
    assert "prepare.yaml" in caught.value.message


def test_vocabulary_files_lie_beside_the_preparation(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_bytes("\ufeffKöln\r\n no \n\nnull\n".encode())
    found = load(tmp_path, "columns: {x: {column: a, vocabulary: {file: words.txt}}}")
    assert found.columns["x"][0].vocabulary.words == ("Köln", "no", "null")
    for data, message in ((b"a\nb\na\n", "'a' twice"), (b"\n", "0 words"), (b"\xff\xfe", "read")):
        (tmp_path / "words.txt").write_bytes(data)
        with pytest.raises(ConfigError, match=message):
            load(tmp_path, "columns: {x: {column: a, vocabulary: {file: words.txt}}}")


@pytest.mark.parametrize(
    ("tree", "types", "message"),
    [
        ({"xs": {"column": "age"}}, {"x": "int64"}, "did you mean 'x'?"),
        ({"x": {"column": "zip", "scale": "standard"}}, {"x": "float32"}, "number in a, text in b"),
        ({"x": {"column": "agee", "scale": "standard"}}, {"x": "float32"}, "did you mean 'age'?"),
        ({"x": {"column": "age", "missing": "most_frequent"}}, {"x": "int8"}, "--values age"),
        ({"x": {"column": "word", "missing": "mean"}}, {"x": "float32"}, "its kind is text"),
        ({"x": {"column": "age", "scale": "standard"}}, {"x": "int64"}, "cannot hold"),
        ({"x": {"column": "age", "missing": "keep"}}, {"x": "int64"}, "cannot hold"),
        ({"x": {"column": "age", "missing": {"fill": 0.5}}}, {"x": "int64"}, "cannot hold"),
        (
            {"x": [{"column": "age"}, category(values=["a", "b"])]},
            {"x": "float32[9]"},
            "gives 4 numbers per row (age 1, word 3), the task requires a list of 9 float32 "
            "numbers; "
            'use "float32[4]" in the task',
        ),
        (
            {"x": category(values=["a"], other="refuse") | {"missing": {"fill": "b"}}},
            {"x": "int64"},
            "'b' is not in its vocabulary",
        ),
    ],
)
def test_preparations_that_do_not_fit_the_task_are_refused(
    tree: dict[str, Any], types: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        preparer(tree, types)
    assert message in caught.value.message


def test_all_that_does_not_fit_is_said_at_once_and_what_to_type() -> None:
    tree = {
        "x": [{"column": "age", "scale": "standard"}, {"column": "n", "missing": "mean"}],
        "w": {"column": "a"},
    }
    with pytest.raises(ConfigError) as caught:
        preparer(tree, {"x": "float32[2]"}, statistics=None)
    assert "the preparation needs statistics of age, n" in caught.value.message
    assert "w: the task has no such column" in caught.value.message
    assert "geo-ray data stats" in caught.value.fix
    assert "geo-ray data merge-stats" in caught.value.fix


def test_a_resolved_preparation_needs_nothing_else_and_survives_its_file() -> None:
    tree = {
        "x": [
            {"column": "age", "missing": "mean", "scale": "minmax"},
            {**category(counted=5), "missing": "most_frequent"},
        ],
        "y": {"column": "n"},
    }
    types = {"x": "float32[5]", "y": "int64[3]"}
    preparation = parse_preparation(json.dumps({"columns": tree}), "test")
    made = resolve(preparation, types, STATISTICS).preparation
    again = Preparation.model_validate_json(preparation_bytes(made))
    assert again == made
    assert resolve(again, types).preparation == made
    assert preparation_bytes(again) == preparation_bytes(made)
    rows = {"age": [None, 45], "word": [None, "?"], "n": [[1, 2, 3]] * 2}
    found = Preparer(again).apply(rows).columns["x"].tolist()
    assert found == [[pytest.approx(0.4), 1, 0, 0, 0], [1, 0, 0, 0, 1]]


def test_columns_must_have_equally_many_rows() -> None:
    made = resolve(None, {"x": "float32", "y": "int64"}).preparation
    with pytest.raises(SchemaMismatchError, match="number of rows: x has 2, y has 1"):
        Preparer(made).apply({"x": [1, 2], "y": [1]})
    assert Preparer(made).apply({"x": [], "y": []}).columns["x"].shape == (0,)


def test_at_inference_there_is_no_label() -> None:
    made = resolve(None, {"x": "float32", "y": "int64"}).preparation
    assert Preparer(made, only=["x"]).apply({"x": [1]}).columns["x"].tolist() == [1]
    with pytest.raises(SchemaMismatchError, match="'z'"):
        Preparer(made, only=["z"])
    with pytest.raises(SchemaMismatchError, match="is missing"):
        Preparer(made).apply({"x": [1]})


def test_the_documentation_has_every_key_and_its_example_is_valid() -> None:
    text = (Path(__file__).resolve().parents[3] / "docs" / "guides" / "preparation.md").read_text()
    section = text.split("\n## Preparation\n")[1].split("\n## ")[0]
    example, _site = re.findall(r"```yaml\n(.*?)```", text, re.S)
    example = example.replace("file: countries.txt", "values: [DE, FR]")
    made = parse_preparation(example, "docs/guides/preparation.md")
    assert list(made.columns) == ["x", "label"]
    for key in (*Source.model_fields, *Vocabulary.model_fields):
        assert re.search(rf"`{{?{key}[`:]", section), key
    (snippet,) = [c for c in re.findall(r"```python\n(.*?)```", text, re.S) if "apply" in c]
    types = {"x": "float32[37]", "label": "int64"}
    stats = STATISTICS.model_copy(update={"columns": {**STATISTICS.columns, "joined": TIME}})
    prepared = resolve(made, types, stats).preparation
    call = re.search(r"rows = (\{.*\})", snippet)
    assert call is not None
    rows = ast.literal_eval(call[1].replace('["2026-01-31"] * 2', '["2026-01-31", "2026-01-31"]'))
    assert Preparer(prepared, only=["x"]).apply(rows).columns["x"].shape == (2, 37)
