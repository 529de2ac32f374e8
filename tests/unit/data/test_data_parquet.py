from __future__ import annotations

import contextlib
import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from geo_ray.base.errors import SchemaMismatchError, ShardCorruptError
from geo_ray.data.columns import SCALARS, ColumnType, check_columns, parse_types
from geo_ray.data.parquet import decode, encode, refuse_extensions


def parquet(table: pa.Table, **options: object) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, **options)
    return sink.getvalue()


@pytest.mark.parametrize("scalar", SCALARS)
@pytest.mark.parametrize("length", [None, 1, 5])
def test_every_allowed_type_survives_bit_for_bit(scalar: str, length: int | None) -> None:
    kind = ColumnType(scalar, length)
    assert ColumnType.parse(str(kind), "x") == kind
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 2, kind.shape(7)) if scalar == "bool" else rng.normal(size=kind.shape(7))
    array = (raw * 50).astype(kind.dtype)
    back = decode(encode({"x": array}, {"x": kind}), {"x": kind}, "shard x")["x"]
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    assert back.tobytes() == array.tobytes()
    assert back.flags.writeable
    assert back.flags.owndata


def test_non_contiguous_arrays_and_no_rows_are_encoded() -> None:
    types = parse_types({"x": "float32[3]"})
    array = np.arange(24, dtype=np.float32).reshape(3, 8).T[::2]
    assert np.array_equal(decode(encode({"x": array}, types), types, "s")["x"], array)
    empty = np.empty((0, 3), np.float32)
    assert decode(encode({"x": empty}, types), types, "s")["x"].shape == (0, 3)


@pytest.mark.parametrize(
    "text", ["", "object", "str", "float", "float32[", "float32[0]", "float32[-1]", "float32[2,3]"]
)
def test_types_outside_the_list_are_refused(text: str) -> None:
    with pytest.raises(SchemaMismatchError, match="'x'"):
        parse_types({"x": text})


@pytest.mark.parametrize(
    "columns",
    [
        {"x": np.zeros(3)},
        {"x": np.zeros((3, 2), np.float32)},
        {"x": np.float32(1)},
        {"y": np.zeros(3, np.float32)},
        {"x": np.zeros(3, np.float32), "y": np.zeros(3, np.float32)},
    ],
)
def test_arrays_that_are_not_as_declared_are_refused(columns: dict[str, np.ndarray]) -> None:
    with pytest.raises(SchemaMismatchError, match="my data"):
        check_columns(columns, parse_types({"x": "float32"}), "my data")


def test_columns_of_different_lengths_are_refused() -> None:
    with pytest.raises(SchemaMismatchError, match="number of rows"):
        check_columns(
            {"x": np.zeros(3, np.float32), "y": np.zeros(4, np.float32)},
            parse_types({"x": "float32", "y": "float32"}),
            "my data",
        )


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (pa.table({"y": pa.array([1.0])}), "columns"),
        (pa.table({"x": pa.array([1, 2])}), "'x' is int64"),
        (pa.table({"x": pa.array(["a"])}), "'x' is string"),
        (pa.table({"x": pa.array([b"a"])}), "'x' is binary"),
        (pa.table({"x": pa.array([[1.0]])}), "'x' is list"),
        (pa.table({"x": pa.array([{"a": 1}])}), "'x' is struct"),
        (pa.table({"x": pa.array([1.0, None])}), "missing values"),
        (pa.table({"x": pa.array([1.0]), "z": pa.array([1.0])}), "columns"),
    ],
)
def test_files_of_another_schema_are_refused(table: pa.Table, message: str) -> None:
    with pytest.raises(SchemaMismatchError) as caught:
        decode(parquet(table), parse_types({"x": "float64"}), "shard s7")
    assert "shard s7" in caught.value.message
    assert message in caught.value.message


def test_missing_values_inside_lists_are_refused() -> None:
    table = pa.table({"x": pa.array([[1.0, None]], pa.list_(pa.float64(), 2))})
    with pytest.raises(SchemaMismatchError, match="missing values"):
        decode(parquet(table), parse_types({"x": "float64[2]"}), "s")


class CanaryType(pa.ExtensionType):
    """Stands for types whose metadata some library unpickles: rebuilding it leaves a trace."""

    canary: Path | None = None

    def __init__(self) -> None:
        super().__init__(pa.int64(), "geo_ray.test.canary")

    def __arrow_ext_serialize__(self) -> bytes:
        return b"pickled bytes would be here"

    @classmethod
    def __arrow_ext_deserialize__(cls, storage_type: pa.DataType, serialized: bytes) -> CanaryType:
        if cls.canary is not None:
            cls.canary.write_text("was run")
        return cls()


def test_extension_types_are_refused_before_arrow_rebuilds_them(tmp_path: Path) -> None:
    array = pa.ExtensionArray.from_storage(CanaryType(), pa.array([1, 2]))
    data = parquet(pa.table({"x": array, "y": pa.array([1, 2])}))
    pa.register_extension_type(CanaryType())
    try:
        CanaryType.canary = tmp_path / "control"
        pq.read_schema(pa.BufferReader(data))
        assert CanaryType.canary.exists(), "the danger that the guard is for"
        CanaryType.canary = tmp_path / "canary"
        with pytest.raises(SchemaMismatchError, match=r"shard s7.*extension"):
            decode(data, parse_types({"y": "int64"}), "shard s7")
        assert not CanaryType.canary.exists()
    finally:
        CanaryType.canary = None
        pa.unregister_extension_type("geo_ray.test.canary")


def test_arrows_own_extension_types_are_refused() -> None:
    storage = pa.array([[1.0, 2.0]], pa.list_(pa.float64(), 2))
    tensor = pa.fixed_shape_tensor(pa.float64(), [2])
    data = parquet(pa.table({"x": pa.ExtensionArray.from_storage(tensor, storage)}))
    with pytest.raises(SchemaMismatchError, match="extension"):
        decode(data, parse_types({"x": "float64[2]"}), "s")


def test_a_malformed_embedded_schema_is_refused() -> None:
    data = parquet(pa.table({"x": pa.array([1.0])}))
    refuse_extensions(data, "s")
    at = data.index(b"ARROW:schema") + len(b"ARROW:schema")
    for position, byte in ((at, 0x15), (at + 1, 0xFF), (at + 2, 0xFF), (at + 40, 0x00)):
        broken = bytearray(data)
        broken[position] = byte
        with pytest.raises(SchemaMismatchError, match="malformed"):
            refuse_extensions(bytes(broken), "s")


def test_files_without_an_embedded_schema_are_read() -> None:
    data = parquet(pa.table({"x": pa.array([1.5])}), store_schema=False)
    assert decode(data, parse_types({"x": "float64"}), "s")["x"].tolist() == [1.5]


@pytest.mark.parametrize("data", [b"", b"PAR1", b"PAR1PAR1", b"x" * 100, b"PAR1" + b"\xff" * 8])
def test_what_is_no_parquet_is_corrupt(data: bytes) -> None:
    with pytest.raises(ShardCorruptError, match="shard s7"):
        decode(data, parse_types({"x": "int64"}), "shard s7")


def test_no_flipped_byte_escapes_as_another_error() -> None:
    types = parse_types({"x": "float32[4]", "label": "int64"})
    columns = {"x": np.ones((50, 4), np.float32), "label": np.arange(50)}
    data = encode(columns, types)
    for position in range(0, len(data), 3):
        broken = bytearray(data)
        broken[position] ^= 0x41
        with contextlib.suppress(ShardCorruptError, SchemaMismatchError):
            decode(bytes(broken), types, "s")
