"""A user's own files, whatever they are like: found, read in batches, or refused with advice."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import os
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from geo_ray.base.errors import (
    ConfigError,
    DataLeftOutError,
    GeoRayError,
    SchemaMismatchError,
    ShardCorruptError,
    ShardMissingError,
    StoreError,
)
from geo_ray.data.arrow_values import parse_time, to_numbers, whole_words, with_points
from geo_ray.data.files import csv_file
from geo_ray.data.files.csv_file import BLOCK_BYTES, csv_pieces
from geo_ray.data.files.find import InputFile, LeftOut, find_files
from geo_ray.data.files.options import ReadOptions
from geo_ray.data.files.rows import ReadReport, read_rows


def read(
    folder: Path, options: ReadOptions | None = None, wanted: list[str] | None = None
) -> dict[str, list[Any]]:
    """All rows; a column that a batch lacks is None there."""
    report = ReadReport()
    batches = list(read_rows(find_files(str(folder), options), wanted, report))
    if report.unreadable:
        raise report.unreadable[0]
    names = dict.fromkeys(name for batch in batches for name in batch.piece.columns)
    out: dict[str, list[Any]] = {name: [] for name in names}
    for batch in batches:
        for name in names:
            array = batch.piece.columns.get(name)
            out[name] += [None] * batch.piece.rows if array is None else array.to_pylist()
    return out


def error_of(folder: Path, options: ReadOptions | None = None) -> GeoRayError:
    with pytest.raises(GeoRayError) as caught:
        read(folder, options)
    return caught.value


# ------------------------------------------------------------------ finding


def test_all_files_below_a_folder_are_found_in_the_order_of_their_paths(tmp_path: Path) -> None:
    for name in ("b.csv", "a/z.csv", "a.tsv", "c.csv.gz", ".hidden.csv", "_temporary/d.csv"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
    (tmp_path / "README.md").write_text("not data")
    found = find_files(str(tmp_path))
    assert [file.path for file in found.files] == ["a.tsv", "a/z.csv", "b.csv", "c.csv.gz"]
    assert [file.compression for file in found.files] == [None, None, None, "gzip"]


def test_a_single_file_may_be_named(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x\n1\n")
    (tmp_path / "b.csv").write_text("x\n2\n")
    assert read(tmp_path / "b.csv") == {"x": ["2"]}


@pytest.mark.parametrize(
    ("files", "message", "fix"),
    [
        ([], "is empty", "Name the folder with your files"),
        ([".csv.tmp"], ".csv.tmp: its name begins with a dot", "Name the folder"),
        (["a.xlsx"], "has a.xlsx", "Save the sheets as CSV"),
        (["a.zip", "b.csv.7z"], "has a.zip", "Unpack"),
        (["a.parquet.gz"], "has a.parquet.gz", "Unpack"),
        (["part-0", "part-1"], "has part-0, part-1", "--format csv"),
    ],
)
def test_advice_about_a_folder_without_readable_files_fits_what_is_there(
    tmp_path: Path, files: list[str], message: str, fix: str
) -> None:
    for name in files:
        (tmp_path / name).write_text("x")
    with pytest.raises(ShardMissingError) as caught:
        find_files(str(tmp_path))
    assert message in caught.value.message
    assert fix in caught.value.fix


def test_a_misspelt_folder_is_guessed(tmp_path: Path) -> None:
    (tmp_path / "my_files").mkdir()
    with pytest.raises(ShardMissingError) as caught:
        find_files(str(tmp_path / "my_file"))
    assert f"did you mean {tmp_path / 'my_files'}?" in caught.value.message
    with pytest.raises(ShardMissingError, match="there is my_files"):
        find_files(str(tmp_path / "elsewhere" / "x"))


def test_the_user_says_what_names_do_not(tmp_path: Path) -> None:
    (tmp_path / "part-0").write_text("x,y\n1,2\n")
    assert read(tmp_path, ReadOptions(format="csv")) == {"x": ["1"], "y": ["2"]}
    (tmp_path / "a.parquet").write_bytes(b"")
    (tmp_path / "b.csv").write_text("x\n3\n")
    with pytest.raises(ConfigError) as caught:
        find_files(str(tmp_path))
    assert "1 of csv (b.csv), 1 of parquet (a.parquet)" in caught.value.message
    assert "--format parquet" in caught.value.fix
    assert read(tmp_path, ReadOptions(format="csv")) == {"x": ["3"]}


def test_descriptions_beside_tables_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x\n1\n")
    (tmp_path / "schema.json").write_text('{"x": "int"}')
    assert read(tmp_path) == {"x": ["1"]}


@pytest.mark.parametrize(
    "options",
    [
        {"delimiter": ";;"},
        {"delimiter": '"'},
        {"delimiter": ",", "decimal": ","},
        {"encoding": "klingon"},
        {"header": ("a", "a")},
        {"header": ("a", "")},
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="--"):
        ReadOptions(**options)


# ------------------------------------------------------------------ CSV


def test_quotes_line_ends_and_words_for_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(
        b'\xef\xbb\xbfid, name ,city\r\n1,"a, ""b""\r\nc",NA\r\n2,"NA",\r\n3, n/a ,"" \r\n'
    )
    assert read(tmp_path) == {
        "id": ["1", "2", "3"],
        "name": ['a, "b"\r\nc', "NA", None],
        "city": [None, None, " "],
    }
    own = ReadOptions(nulls=("2",))
    assert read(tmp_path, own)["id"] == ["1", None, "3"]
    assert read(tmp_path, own)["city"][0] == "NA"


def test_delimiters_decimal_commas_and_encodings(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(
        "größe;ort\n1,5;Köln\n-2,25e3;a,b\n,5;1,2,3\n".encode("cp1252")
    )
    options = ReadOptions(delimiter=";", decimal=",", encoding="cp1252")
    assert read(tmp_path, options) == {
        "größe": ["1,5", "-2,25e3", ",5"],
        "ort": ["Köln", "a,b", "1,2,3"],
    }
    (tmp_path / "a.csv").rename(tmp_path / "old")
    (tmp_path / "a.tsv").write_text("x\ty\n1\t2,3\n")
    assert read(tmp_path) == {"x": ["1"], "y": ["2,3"]}
    (tmp_path / "a.tsv").write_bytes("x\ty\n1\té\n".encode("utf-16"))
    assert read(tmp_path, ReadOptions(encoding="utf-16")) == {"x": ["1"], "y": ["é"]}


def test_files_without_header_are_given_one(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("1,2.5\n3,4\n")
    error = error_of(tmp_path)
    assert "no header line" in error.message
    assert "--header" in error.fix
    assert read(tmp_path, ReadOptions(header=("x", "y"))) == {"x": ["1", "3"], "y": ["2.5", "4"]}


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress])
def test_compressed_files_are_read_in_blocks(tmp_path: Path, compress: Any) -> None:
    rows = 300_000
    text = "x,y\n" + "".join(f"{n},{'w' * 30}\n" for n in range(rows))
    assert len(text) > BLOCK_BYTES
    suffix = ".gz" if compress is gzip.compress else ".bz2"
    (tmp_path / f"a.csv{suffix}").write_bytes(compress(text.encode()))
    sizes, last, done = [], None, 0.0
    for batch in read_rows(find_files(str(tmp_path)), ["x"], ReadReport()):
        assert batch.first_row == sum(sizes) + 1
        assert list(batch.piece.columns) == ["x"]
        assert batch.files_done >= done
        sizes.append(batch.piece.rows)
        last, done = batch.piece.columns["x"][-1].as_py(), batch.files_done
    assert sum(sizes) == rows
    assert len(sizes) > 1
    assert last == str(rows - 1)
    assert done == 1.0


def test_rows_of_empty_values_are_rows(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("x\ty\n\t\n\t\n")
    assert read(tmp_path) == {"x": [None, None], "y": [None, None]}
    headless = ReadOptions(header=("p", "q"))
    (tmp_path / "a.tsv").write_text("\t\n\t\n")
    assert read(tmp_path, headless) == {"p": [None, None], "q": [None, None]}


def test_blank_lines_are_values_only_where_there_is_a_single_column(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x\n1\n\n3\n")
    assert read(tmp_path) == {"x": ["1", None, "3"]}
    (tmp_path / "a.csv").write_bytes(b"x\r\n\r\n")
    assert read(tmp_path) == {"x": [None]}
    (tmp_path / "a.csv").write_text("\n7\n")
    assert read(tmp_path, ReadOptions(header=("x",))) == {"x": [None, "7"]}
    (tmp_path / "a.csv").write_text("x,y\n1,2\n\n3,4\n")
    assert read(tmp_path) == {"x": ["1", "3"], "y": ["2", "4"]}


@pytest.mark.parametrize("data", ["", "\n\n", " \t\n", "x,y\n", "x,y", "\ufeff"])
def test_files_without_rows_are_no_error(tmp_path: Path, data: str) -> None:
    (tmp_path / "a.csv").write_text(data)
    (tmp_path / "b.csv").write_text("x,y\n1,2\n")
    assert read(tmp_path) == {"x": ["1"], "y": ["2"]}


@pytest.mark.parametrize(
    ("data", "message", "fix"),
    [
        (b"x;y\n1;2\n", "single column 'x;y'", "--delimiter ';'"),
        (b"x\ty\n1\t2\n", "single column", "--delimiter tab"),
        (b"x,x\n1,2\n", "'x' twice", "a unique name"),
        (
            b"x,y\n1,2\n1,2,3\n4\n5,6\n",
            "values than the header's 2: 2 of them, the first is row 3",
            "quote",
        ),
        (b'x,y\n"1,2\n3,4\n', "1 of them, the first is row 2", "quote"),
        (b'x,y\n1,"2\n3,4\n', "an unclosed quote", "quote"),
        (b'x,y\n1,"2\n3,4', "an unclosed quote", "quote"),
        (b"x,y\n1,2\n3,\xe9\n", "not utf-8 text: line 3 has the byte 0xe9", "--encoding latin-1"),
        ("x,y\n1,2\n".encode("utf-16"), "UTF-16 byte order mark", "--encoding utf-16"),
        (gzip.compress(b"x\n1\n"), "gzip-compressed", ".csv.gz"),
        (b"PK\x03\x04....", "Excel", "Unpack"),
        (b"PAR1....", "Parquet", ".parquet"),
        (b"x\n" + b"1" * (3 * BLOCK_BYTES) + b"\n", "more than 8 MiB", "quote"),
    ],
)
def test_what_is_wrong_with_a_csv_file_is_said_with_what_to_do(
    tmp_path: Path, data: bytes, message: str, fix: str
) -> None:
    (tmp_path / "a.csv").write_bytes(data)
    error = error_of(tmp_path)
    assert "a.csv" in error.message
    assert message in error.message
    assert fix in error.fix


def test_broken_compression_is_said_so(tmp_path: Path) -> None:
    whole = gzip.compress(b"x,y\n" + b"1,2\n" * 9)
    for data in (b"x,y\n1,2\n", whole[:-12]):
        (tmp_path / "a.csv.gz").write_bytes(data)
        assert "a.csv.gz" in error_of(tmp_path).message


def test_a_bad_file_does_not_hide_the_others(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"x\n\xe9\n")
    (tmp_path / "b.csv").write_text("x\n1\n")
    (tmp_path / "c.csv").write_bytes(b"x,y\n1\n2,3\n")
    report = ReadReport()
    batches = list(read_rows(find_files(str(tmp_path)), None, report))
    assert [batch.path for batch in batches] == ["b.csv", "c.csv"]
    assert [error.message.split()[0].rstrip(":") for error in report.unreadable] == [
        "a.csv",
        "c.csv",
    ]


# ------------------------------------------------------------------ JSON lines


def test_json_lines_nested_mixed_and_sparse(tmp_path: Path) -> None:
    rows: list[Any] = [
        {"id": 1, "at": {"city": "A", "geo": {"lat": 1.5}}, "v": [1, 2], "mixed": 3},
        {"id": 2**60 + 1, "at": {"city": None}, "mixed": "x"},
        {"id": 2**64 - 1, "at": {}, "v": None, "mixed": True},
    ]
    text = "\n\n".join(json.dumps(row) for row in rows)
    (tmp_path / "a.jsonl").write_text("\ufeff" + text)
    (tmp_path / "b.ndjson.gz").write_bytes(gzip.compress(b'{"id": 4, "new": NaN}'))
    found = read(tmp_path)
    assert found["id"] == [1, 2**60 + 1, 2**64 - 1, 4]
    assert found["at.city"] == ["A", None, None, None]
    assert found["at.geo.lat"] == [1.5, None, None, None]
    assert found["v"] == [[1, 2], None, None, None]
    assert found["mixed"] == ["3", "x", "true", None]
    assert found["new"][-1] != found["new"][-1]
    assert list(read(tmp_path, wanted=["at.city"])) == ["at.city"]


@pytest.mark.parametrize(
    ("data", "message", "fix"),
    [
        (b'[{"x": 1}]', "one JSON array", "jq"),
        (
            b'{"x": 1}\n{"x": \n3\n',
            "cannot be read: 2 of them, the first is line 2: it is not a JSON object",
            "per line",
        ),
        (b'{"a": {"b": 1}, "a.b": 2}\n', "line 1: it has the key 'a.b' twice", "a unique name"),
        (b'{"a": 1}\n{"a": 1, "a": 2}\n', "line 2: it has the key 'a' twice", "a unique name"),
        (b'{"\\ud800": 1}\n', "line 1: it has half a surrogate pair", "both halves"),
        (b'{"x": "\\uDE00"}\n', "line 1: it has half a surrogate pair", "both halves"),
        (b'{"x": "\xe9"}\n', "not utf-8", "--encoding"),
    ],
)
def test_what_is_wrong_with_json_lines_is_said_with_what_to_do(
    tmp_path: Path, data: bytes, message: str, fix: str
) -> None:
    (tmp_path / "a.jsonl").write_bytes(data)
    error = error_of(tmp_path)
    assert message in error.message
    assert fix in error.fix


# ------------------------------------------------------------------ Parquet and Arrow


def some_table() -> pa.Table:
    return pa.table(
        {
            "n": [1, None, 3],
            "where": [{"city": "A", "at": {"lat": 1.0}}, None, {"city": None, "at": {"lat": 2.0}}],
            "word": pa.array(["a", "b", "a"]).dictionary_encode(),
            "v": [[1.0], [], None],
        }
    )


def write_arrow(table: pa.Table, path: Path) -> None:
    with pa.OSFile(str(path), "wb") as sink:
        if path.suffix == ".ipc":
            with pa.ipc.new_stream(sink, table.schema) as writer:
                writer.write_table(table)
        elif path.suffix == ".arrow":
            with pa.ipc.new_file(sink, table.schema) as writer:
                writer.write_table(table)
    if path.suffix == ".feather":
        pyarrow.feather.write_feather(table, str(path))
    if path.suffix == ".parquet":
        pq.write_table(table, path)


@pytest.mark.parametrize("suffix", [".parquet", ".arrow", ".feather", ".ipc"])
def test_tables_are_read_with_their_structs_opened(tmp_path: Path, suffix: str) -> None:
    write_arrow(some_table(), tmp_path / f"a{suffix}")
    assert read(tmp_path) == {
        "n": [1, None, 3],
        "where.city": ["A", None, None],
        "where.at.lat": [1.0, None, 2.0],
        "word": ["a", "b", "a"],
        "v": [[1.0], [], None],
    }
    assert read(tmp_path, wanted=["where.at.lat", "n", "none"]) == {
        "n": [1, None, 3],
        "where.at.lat": [1.0, None, 2.0],
    }


@pytest.mark.parametrize("suffix", [".parquet", ".arrow", ".ipc"])
def test_broken_tables_are_refused(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    write_arrow(some_table(), path)
    whole = path.read_bytes()
    for data in (b"", b"nonsense", whole[: len(whole) // 2], whole[:40] + whole[48:]):
        path.write_bytes(data)
        assert path.name in error_of(tmp_path).message


@pytest.mark.parametrize("suffix", [".parquet", ".arrow", ".feather", ".ipc"])
def test_text_that_is_no_text_is_refused(tmp_path: Path, suffix: str) -> None:
    bad = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xff")]
    )
    write_arrow(pa.table({"x": bad}), tmp_path / f"a{suffix}")
    assert "UTF8" in error_of(tmp_path).message


class MarkType(pa.ExtensionType):
    """Leaves a trace when Arrow rebuilds it from a file's metadata."""

    mark: Path | None = None

    def __init__(self) -> None:
        super().__init__(pa.int64(), "geo_ray.test.mark")

    def __arrow_ext_serialize__(self) -> bytes:
        return b"pickled bytes would be here"

    @classmethod
    def __arrow_ext_deserialize__(cls, storage_type: pa.DataType, serialized: bytes) -> MarkType:
        if cls.mark is not None:
            cls.mark.write_text("was run")
        return cls()


@pytest.mark.parametrize("suffix", [".parquet", ".arrow", ".feather", ".ipc"])
def test_extension_types_are_refused_before_they_are_rebuilt(tmp_path: Path, suffix: str) -> None:
    array = pa.ExtensionArray.from_storage(MarkType(), pa.array([1, 2]))
    (tmp_path / "files").mkdir()
    write_arrow(pa.table({"x": array}), tmp_path / "files" / f"a{suffix}")
    pa.register_extension_type(MarkType())
    try:
        MarkType.mark = tmp_path / "mark"
        assert "extension type" in error_of(tmp_path / "files").message
        assert not MarkType.mark.exists()
    finally:
        MarkType.mark = None
        pa.unregister_extension_type("geo_ray.test.mark")


# ------------------------------------------------------------------ what spreadsheets write


@pytest.mark.parametrize("head", ["sep=;\n", "\ufeffSEP=;\r\n", '"sep=;"\r'])
def test_the_line_with_which_excel_names_the_delimiter_is_known(tmp_path: Path, head: str) -> None:
    (tmp_path / "a.csv").write_bytes(f"{head}a;b\n1;2\n3;4;5\n".encode())
    error = error_of(tmp_path)
    assert "the first is row 4 of the file" in error.message
    (tmp_path / "a.csv").write_bytes(f"{head}a;b\n1;2\n".encode())
    assert read(tmp_path) == {"a": ["1"], "b": ["2"]}
    assert read(tmp_path, ReadOptions(delimiter=";")) == {"a": ["1"], "b": ["2"]}
    (tmp_path / "a.csv").write_bytes(f"{head}1;2\n".encode())
    assert read(tmp_path, ReadOptions(header=("x", "y"))) == {"x": ["1"], "y": ["2"]}


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "latin-1"])
@pytest.mark.parametrize("pack", [None, gzip.compress])
def test_line_ends_within_quotes_are_whole_wherever_they_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str, pack: Any
) -> None:
    block = 4096
    monkeypatch.setattr(csv_file, "BLOCK_BYTES", block)
    row = '"{}a\r\nb",1\r\n'
    size = len(row.format(""))
    for shift in range(size):  # each byte of a row is once the last of a block
        fill = "w" * (block - len("t,x\r\n") - size - shift)
        data = ("t,x\r\n" + row.format(fill) + row.format("") * 3).encode(encoding)
        (tmp_path / ("a.csv.gz" if pack else "a.csv")).write_bytes(pack(data) if pack else data)
        found = read(tmp_path, ReadOptions(encoding=encoding))["t"]
        assert [word[-4:] for word in found] == ["a\r\nb"] * 4


def test_a_line_that_numbers_the_columns_is_no_row(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("0,1,2\n0.5,7,1\n")
    error = error_of(tmp_path)
    assert "numbers the columns" in error.message
    names = ReadOptions(header=("a", "b", "label"))
    report = ReadReport()
    batches = list(read_rows(find_files(str(tmp_path), names), None, report))
    assert [batch.piece.rows for batch in batches] == [1]
    assert report.left_out == [
        LeftOut("a.csv", "its first line '0,1,2' numbers the columns, which --header names")
    ]
    with pytest.raises(DataLeftOutError, match="numbers the columns"):
        read(tmp_path, replace(names, strict=True))


@pytest.mark.parametrize("first", ["2019,2020", "A , b"])
def test_a_header_that_is_named_again_is_no_row(tmp_path: Path, first: str) -> None:
    (tmp_path / "a.csv").write_text(f"{first}\n5,6\n")
    names = tuple(name.strip().lower() for name in first.split(","))
    assert read(tmp_path, ReadOptions(header=names)) == {names[0]: ["5"], names[1]: ["6"]}
    if first[0].isdigit():
        assert "--header 2019,2020" in error_of(tmp_path).fix


def test_a_header_in_another_encoding_is_said_so(tmp_path: Path) -> None:
    for data, better in (("größe,x\n1,2\n", "latin-1"), ("preis €,x\n1,2\n", "cp1252")):
        (tmp_path / "a.csv").write_bytes(data.encode("cp1252"))
        error = error_of(tmp_path)
        assert "is not utf-8 text: line 1 has the byte 0x" in error.message
        assert f"--encoding {better}" in error.fix


def test_a_row_of_another_length_with_a_byte_of_another_encoding_is_said_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.csv").write_bytes(b"a,b\n1,2\n\x80,4,5\n6,7\n")
    error = error_of(tmp_path)
    assert error.message == "a.csv is not utf-8 text: line 3 has the byte 0x80"
    assert capfd.readouterr().err == ""
    pieces = csv_pieces(
        io.BytesIO(b"a,b\n1,2\n3,4,5\n"), InputFile("a.csv", "csv"), ReadOptions(), None
    )
    with pytest.raises(SchemaMismatchError, match="first is row 3"):
        list(pieces)


def test_a_header_beyond_what_is_looked_at_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(",".join(f"c{n:09}" for n in range(100_000)) + "\n1\n")
    assert "more than 1 MiB" in error_of(tmp_path).message


@pytest.mark.parametrize(
    ("text", "options", "numbers"),
    [
        (["1,001", "12,345,678.5", "7"], {"thousands": ","}, [1001, 12_345_678.5, 7]),
        (["1.001", "-12.345,5"], {"thousands": ".", "decimal": ","}, [1001, -12_345.5]),
        (["1 001", "2\u202f000,5"], {"thousands": " ", "decimal": ","}, [1001, 2000.5]),
        (["1'001", "2\u2019000.5"], {"thousands": "'"}, [1001, 2000.5]),
        (["1,001", "1,00"], {}, [None, None]),
        (["1,00", "1,0001", "1234,567"], {"thousands": ","}, [None, None, None]),
        (["1.001", "1,5", "1.5"], {"decimal": ","}, [None, 1.5, None]),
    ],
)
def test_marks_in_numbers_are_those_that_are_named(
    text: list[str], options: dict[str, Any], numbers: list[float | None]
) -> None:
    marks = {"decimal": ".", "thousands": None, **options}
    found = to_numbers(with_points(pa.array(text), **marks))
    assert found is not None
    values = [None if bad else value for value, bad in zip(found.values, found.bad, strict=True)]
    assert values == numbers
    words = whole_words(pa.array(["1.000", "1.000,0", "2.5", "a"]), ",", ".")
    assert words.to_pylist() == ["1000", "1000", "2.5", "a"]
    for wrong in ({"thousands": "_"}, {"thousands": ".", "decimal": "."}):
        with pytest.raises(ConfigError, match="--thousands"):
            ReadOptions(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("word", "seconds"),
    [
        ("2024-01-01 00:00:01 UTC", 1704067201.0),
        ("2024-01-01 00:00:00.5 UTC", 1704067200.5),
        ("2024-01-01T01:00:00+01:00", 1704067200.0),
        ("2024-01-01T01:00:00+01:00 UTC", None),
        ("2024-13-01 00:00:00 UTC", None),
    ],
)
def test_the_times_of_bigquery_are_times(word: str, seconds: float | None) -> None:
    assert parse_time(word) == seconds


# ------------------------------------------------------------------ folders and what is left out


def test_the_folders_of_spark_are_columns(tmp_path: Path) -> None:
    for country in ("DE", "C%C3%B4te", "__HIVE_DEFAULT_PARTITION__"):
        folder = tmp_path / f"country={country}" / "=x"
        folder.mkdir(parents=True)
        pq.write_table(pa.table({"a": [1, 2]}), folder / "part-0.parquet")
    assert read(tmp_path)["country"] == ["Côte", "Côte", "DE", "DE", None, None]
    assert read(tmp_path, wanted=["country"]) == {"country": read(tmp_path)["country"]}
    pq.write_table(pa.table({"country": ["own"]}), tmp_path / "country=DE" / "b.parquet")
    assert read(tmp_path)["country"][4] == "own"


def test_parquet_times_of_any_year_are_what_they_were(tmp_path: Path) -> None:
    times = [datetime(9999, 12, 31), datetime(1, 1, 1), datetime(2024, 1, 1, microsecond=7), None]
    table = pa.table({"t": pa.array(times, pa.timestamp("us"))})
    pq.write_table(table, tmp_path / "a.parquet", use_deprecated_int96_timestamps=True)
    assert read(tmp_path)["t"] == times


def test_parquet_names_that_are_no_text_are_a_typed_error(tmp_path: Path) -> None:
    pq.write_table(pa.table({"name": [1]}), tmp_path / "a.parquet", store_schema=False)
    data = (tmp_path / "a.parquet").read_bytes().replace(b"name", b"n\xff\xfee")
    (tmp_path / "a.parquet").write_bytes(data)
    error = error_of(tmp_path)
    assert isinstance(error, ShardCorruptError)
    assert "a.parquet" in error.message


def test_everything_that_is_left_out_is_named_with_its_reason(tmp_path: Path) -> None:
    root = tmp_path / "in"
    (root / "2023").mkdir(parents=True)
    for name in ("0.csv", "1.csv.xz", "2.txt", "3.csv.1", "4.parquet", "5.parquet.gz", ".6.csv"):
        (root / "2023" / name).write_text("a\n1\n")
    for name in ("_SUCCESS", "_old/a.csv", "_old/b/c.csv", ".git/x"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("a\n1\n")
    (root / "empty.csv").write_text("a\n")
    (tmp_path / "elsewhere").mkdir()
    (root / "2024").symlink_to(tmp_path / "elsewhere")
    (root / "lost.csv").symlink_to(tmp_path / "nothing.csv")
    os.mkfifo(root / "pipe.csv")
    report = ReadReport()
    chosen = ReadOptions(format="csv")
    batches = list(read_rows(find_files(str(root), chosen), None, report))
    assert [batch.path for batch in batches] == ["2023/0.csv"]
    reasons = {one.path: one.reason for one in report.left_out}
    assert list(reasons) == [
        ".git/", "2023/.6.csv", "2023/1.csv.xz", "2023/2.txt", "2023/3.csv.1", "2023/4.parquet",
        "2023/5.parquet.gz", "2024/", "_SUCCESS", "_old/", "lost.csv", "pipe.csv", "empty.csv",
    ]  # fmt: skip
    for path, reason in {
        "2023/1.csv.xz": "unpack it",
        "2023/3.csv.1": "files with this ending are not read",
        "2023/4.parquet": "--format parquet reads it",
        "2024/": "link to a folder",
        "lost.csv": "a broken link",
        "pipe.csv": "not a regular file",
        "empty.csv": "no rows",
    }.items():
        assert reason in reasons[path]
    assert [one.path for one in report.left_out if one.is_marker] == [".git/", "_SUCCESS"]


def test_a_folder_that_cannot_be_read_is_no_empty_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a/x.csv", "b/x.csv"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("x\n1\n")
    whole = os.scandir

    def closed(path: Any) -> Any:  # root, who runs tests in containers, may read every folder
        if os.fspath(path) == str(shut):
            raise PermissionError(13, "Permission denied", str(path))
        return whole(path)

    monkeypatch.setattr(os, "scandir", closed)
    shut = tmp_path / "b"
    found = find_files(str(tmp_path))
    assert [file.path for file in found.files] == ["a/x.csv"]
    assert found.left_out == (LeftOut("b/", "the folder cannot be read: Permission denied"),)
    shut = tmp_path
    with pytest.raises(StoreError, match="cannot be read: Permission denied"):
        find_files(str(tmp_path))


def test_strict_reading_refuses_what_would_be_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x\n1\n")
    (tmp_path / "_SUCCESS").write_text("")
    strict = ReadOptions(strict=True)
    assert read(tmp_path, strict) == {"x": ["1"]}
    (tmp_path / "b.csv").write_text("x\n")
    with pytest.raises(DataLeftOutError, match=r"b\.csv: it has no rows"):
        read(tmp_path, strict)
    (tmp_path / "c.txt").write_text("x\n2\n")
    with pytest.raises(DataLeftOutError, match=r"c\.txt: files with this ending"):
        next(read_rows(find_files(str(tmp_path), strict), None, ReadReport()))


def test_words_of_the_user_mean_no_value_also_in_quotes_and_in_all_formats(tmp_path: Path) -> None:
    options = ReadOptions(nulls=("unknown", "NA"))
    (tmp_path / "a.csv").write_text('x,y\n"unknown",1\n" unknown ","NA"\nNA,2\n')
    assert read(tmp_path, options) == {"x": [None, None, None], "y": ["1", "NA", "2"]}
    (tmp_path / "a.csv").unlink()
    (tmp_path / "a.jsonl").write_text('{"x": "unknown"}\n{"x": "a"}\n')
    assert read(tmp_path, options) == {"x": [None, "a"]}


def test_names_that_no_terminal_should_print_are_escaped(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x\n1\n")
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/b\xff\x1b[2J.txt")).write_text("")
    assert [one.path for one in find_files(str(tmp_path)).left_out] == ["b\\udcff\\x1b[2J.txt"]
