"""Read the samples of a WebDataset tar file.

Written from the format's documentation (README and FAQ of github.com/webdataset/webdataset):
adjacent files that have the same path up to the first dot of their name are one sample, and the
rest of the name is the column. Members are read one after the other and never unpacked to disk.
"""

# PyArrow ships no complete types.
# mypy: disable-error-code="attr-defined, no-untyped-call"
from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO, Final, NoReturn

import numpy as np
import pyarrow as pa

from geo_ray.base.errors import SchemaMismatchError, ShardCorruptError
from geo_ray.data.arrow_values import arrow_of
from geo_ray.data.files.find import FilePiece, InputFile, fraction_read, size_of
from geo_ray.data.files.json_file import flat_object
from geo_ray.data.files.options import ReadOptions

KEY: Final = "__key__"
"""The column with the path of a sample, up to the first dot of its name."""

_NAME = re.compile(r"((?:.*/|)[^./][^.]*)\.([^/]*)")
_NPY_HEADER = re.compile(
    rb"\{'descr': '([<>|][biuf][1248])', 'fortran_order': (True|False), "
    rb"'shape': \(([0-9, ]*)\), \}\s*"
)
_META = re.compile(r"__[^/]*__(?:$|/)")
_TEXT = {"txt", "text", "transcript"}
_INTEGER = {"cls", "cls2", "count", "id", "index", "inx"}
_JSON = {"json", "jsn"}
_PICKLES = {"pickle", "pkl", "pt", "pth", "pyd"}
_BATCH_ROWS = 16_384
_BATCH_BYTES = 16 << 20
_MEMBER_BYTES = 1 << 30


@dataclass
class _Batch:
    """Samples that were read, and the names of all columns in the order of their appearance."""

    samples: list[dict[str, Any]] = field(default_factory=list)
    bytes: int = 0
    names: dict[str, None] = field(default_factory=dict)


def tar_pieces(
    file: BinaryIO, found: InputFile, options: ReadOptions, wanted: Collection[str] | None
) -> Iterator[FilePiece]:
    """Read a tar file in pieces; see `geo_ray.data.files.csv_file.csv_pieces`.

    The columns are named by the endings of the members, in lower case, and `KEY`. ``.txt`` is text,
    ``.cls`` an integer, ``.npy`` a list of numbers; ``.json`` objects give columns such as
    ``json.caption``. All other members are bytes. Members without a value count as missing.

    Raises:
        SchemaMismatchError: a wanted column is a pickle, or a sample has a member twice.
        ShardCorruptError: it is not a tar file, or a member cannot be decoded.
    """
    size = size_of(file)
    batch = _Batch()
    skipped: dict[str, None] = {}
    try:
        with tarfile.open(fileobj=file, mode="r|*") as archive:
            for member in archive:
                archive.members = []  # which would otherwise list all members read
                match = _NAME.fullmatch(member.name.removeprefix("./"))
                if not member.isreg() or match is None or _META.match(member.name):
                    continue
                key, name = match[1], match[2].lower()
                if not batch.samples or batch.samples[-1][KEY] != key:
                    if len(batch.samples) >= _BATCH_ROWS or batch.bytes >= _BATCH_BYTES:
                        yield _piece(batch, wanted, fraction_read(file, size))
                        batch = _Batch(names=batch.names)
                    batch.samples.append({KEY: key})
                    batch.names[KEY] = None
                kind = name.rpartition(".")[2]
                if kind in _PICKLES:
                    if wanted is not None and name in wanted:
                        _refuse_pickle(found, member.name)
                    skipped[name] = None
                    continue
                if not _is_wanted(name, wanted, has_parts=kind in _JSON):
                    batch.names[name] = None
                    continue
                data = _content(archive, member, found)
                batch.bytes += len(data)
                _add(batch, _decoded(name, data, found, member.name), found)
    # A cut gzip header makes tarfile raise a TypeError.
    except (tarfile.TarError, EOFError, OSError, ValueError, TypeError) as error:
        raise ShardCorruptError(
            f"{found.path}: cannot be read as a tar file: {error}", fix="Write the file again."
        ) from error
    endings = ", ".join(f".{name}" for name in skipped)
    reason = f"its members {endings} are Python pickles, which are not read" if skipped else ""
    yield replace(_piece(batch, wanted, 1.0), skipped=reason)


def _is_wanted(name: str, wanted: Collection[str] | None, has_parts: bool) -> bool:
    if wanted is None or name in wanted:
        return True
    return has_parts and any(one.startswith(f"{name}.") for one in wanted)


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo, found: InputFile) -> bytes:
    if member.size > _MEMBER_BYTES:
        raise ShardCorruptError(
            f"{found.path}: member {member.name!r} has {member.size} bytes, over the limit of "
            f"{_MEMBER_BYTES}",
            fix="Divide it into several samples.",
        )
    stream = archive.extractfile(member)
    data = b"" if stream is None else stream.read()
    if len(data) != member.size:
        raise EOFError(f"member {member.name!r} is truncated")
    return data


def _decoded(name: str, data: bytes, found: InputFile, member: str) -> dict[str, Any]:
    """Return the columns of a member."""
    kind = name.rpartition(".")[2]
    try:
        if kind in _TEXT:
            return {name: data.decode()}
        if kind in _INTEGER:
            return {name: int(data)}
        if kind in _JSON:
            return flat_object({name: json.loads(data)})
        if kind == "npy":
            array = _npy(data)
            return {name: array.reshape(-1) if array.ndim else array.item()}
    except (ValueError, RecursionError) as error:
        raise ShardCorruptError(
            f"{found.path}: member {member!r} is not a valid .{kind} file: {error}",
            fix="Correct the member, or rename it to an ending that is read as bytes.",
        ) from None
    return {name: data}


def _npy(data: bytes) -> np.ndarray[Any, Any]:
    """Read an array of numbers as `numpy.save` writes it.

    NumPy's reader evaluates the header as Python literals and reserves the memory that it states.
    """
    begin = 10 if data[6:7] == b"\x01" else 12  # versions differ in the size of the length
    stop = begin + int.from_bytes(data[8:begin], "little")
    header = _NPY_HEADER.fullmatch(data[begin:stop])
    if not data.startswith(b"\x93NUMPY") or header is None:
        raise ValueError("it is not an array of numbers")
    shape = tuple(int(size) for size in re.findall(rb"[0-9]+", header[3]))
    array = np.frombuffer(data, np.dtype(header[1].decode()), offset=stop)
    array = array.reshape(shape, order="F" if header[2] == b"True" else "C")
    return array.astype(array.dtype.newbyteorder("="), order="C", copy=False)


def _add(batch: _Batch, values: dict[str, Any], found: InputFile) -> None:
    sample = batch.samples[-1]
    for name, value in values.items():
        batch.names[name] = None
        if name in sample:
            raise SchemaMismatchError(
                f"{found.path}: sample {sample[KEY]!r} has {name!r} twice",
                fix="Give each sample a name of its own, up to the first dot.",
            )
        sample[name] = value


def _piece(batch: _Batch, wanted: Collection[str] | None, fraction: float) -> FilePiece:
    columns = {}
    for name in batch.names:
        if wanted is None or name in wanted:
            values = [sample.get(name) for sample in batch.samples]
            is_bytes = any(isinstance(value, bytes) for value in values)
            columns[name] = pa.array(values, pa.large_binary()) if is_bytes else arrow_of(values)
    rows = len(batch.samples)
    return FilePiece(tuple(batch.names), columns, rows, fraction, sparse=True)


def _refuse_pickle(found: InputFile, member: str) -> NoReturn:
    raise SchemaMismatchError(
        f"{found.path}: member {member!r} is a Python pickle, which can execute code when it is "
        "read",
        fix="Write its values as .json, .npy, .txt or .cls members.",
    )
