"""A user's own files, whatever they are like: found, read in batches, or refused with advice."""

from __future__ import annotations

import bz2
import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from geo_ray.data.files.csv_file import BLOCK_BYTES
from geo_ray.data.files.find import find_files
from geo_ray.data.files.options import ReadOptions
from geo_ray.data.files.rows import Unreadable, read_rows
from geo_ray.errors import ConfigError, GeoRayError, ShardMissingError


def read(
    folder: Path, options: ReadOptions | None = None, wanted: list[str] | None = None
) -> dict[str, list[Any]]:
    """All rows; a column that a batch lacks is None there."""
    unreadable: list[Unreadable] = []
    batches = list(read_rows(find_files(str(folder), options), wanted, unreadable))
    if unreadable:
        raise unreadable[0]
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
        ([".csv.tmp"], "is empty", "Name the folder"),
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
    for batch in read_rows(find_files(str(tmp_path)), ["x"], []):
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
        (b"x,x\n1,2\n", "'x' twice", "name of its own"),
        (
            b"x,y\n1,2\n1,2,3\n4\n5,6\n",
            "values than the header's 2: 2 of them, the first is row 3",
            "quote",
        ),
        (b'x,y\n"1,2\n3,4\n', "1 of them, the first is row 2", "quote"),
        (b'x,y\n1,"2\n3,4\n', "a quote that is not closed", "quote"),
        (b'x,y\n1,"2\n3,4', "a quote that is not closed", "quote"),
        (b"x,y\n1,2\n3,\xe9\n", "not utf-8 text: row 3", "--encoding latin-1"),
        ("x,y\n1,2\n".encode("utf-16"), "mark of UTF-16", "--encoding utf-16"),
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
    unreadable: list[Unreadable] = []
    batches = list(read_rows(find_files(str(tmp_path)), None, unreadable))
    assert [batch.path for batch in batches] == ["b.csv", "c.csv"]
    assert [error.message.split()[0].rstrip(":") for error in unreadable] == ["a.csv", "c.csv"]


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
            "cannot be taken: 2 of them, the first is line 2: it is no JSON object",
            "per line",
        ),
        (b'{"a": {"b": 1}, "a.b": 2}\n', "line 1: it has the key 'a.b' twice", "name of its own"),
        (b'{"a": 1}\n{"a": 1, "a": 2}\n', "line 2: it has the key 'a' twice", "name of its own"),
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
