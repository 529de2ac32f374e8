"""Find the user's input files and report the ones left out, with the reason.

A reader of any format yields `FilePiece` records: some rows of a file as Arrow columns.
"""

# PyArrow ships no complete types.
# mypy: disable-error-code="attr-defined, name-defined"

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path, PurePosixPath
from typing import BinaryIO

import pyarrow as pa

from geo_ray.base.errors import ConfigError, ShardMissingError, StoreError
from geo_ray.base.text import escaped, listed, missing_path
from geo_ray.data.files.options import Format, ReadOptions
from geo_ray.data.files.site import SiteFile, load_site
from geo_ray.storage.store import Store, open_store
from geo_ray.storage.uri import is_s3, local_path, split

SUFFIXES: Mapping[str, Format] = {
    ".csv": "csv",
    ".tsv": "csv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
}
COMPRESSIONS: Mapping[str, str] = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}

_READABLE = ".csv, .tsv, .jsonl, .ndjson, .json, .parquet, .pq, .arrow, .feather and .ipc"
_MOST_NAMED = 6
_SHEETS = {".xlsx", ".xls", ".xlsm", ".ods", ".numbers"}
_ARCHIVES = {".zip", ".tar", ".tgz", ".7z", ".rar", ".xz", ".z"}
_PACKED = _ARCHIVES | set(COMPRESSIONS)


@dataclass(frozen=True)
class InputFile:
    """One file.

    Attributes:
        path: in its store.
        format: how to read it.
        compression: Arrow's name of the codec around it, or None.
    """

    path: str
    format: Format
    compression: str | None = None


@dataclass(frozen=True)
class LeftOut:
    """Something at the address that is not read.

    Attributes:
        path: of a file, or of a folder with all that it has; a folder's ends with a slash. What is
            not printable is escaped.
        reason: why it is left out.
        is_marker: whether it is hidden and has no data by its name, such as ``_SUCCESS``.
    """

    path: str
    reason: str
    is_marker: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", escaped(self.path))


@dataclass(frozen=True)
class InputFiles:
    """The files to read, in the order of their paths, and how.

    Attributes:
        store: has the files.
        files: to be read.
        options: how they are read, with what the site file says.
        name: the address that was named.
        left_out: what else is there.
        site: how the site's columns become shared ones, if they differ.
    """

    store: Store
    files: tuple[InputFile, ...]
    options: ReadOptions
    name: str
    left_out: tuple[LeftOut, ...] = ()
    site: SiteFile | None = None


def find_files(uri: str, options: ReadOptions | None = None) -> InputFiles:
    """List the readable files at an address, and what is left out there.

    Files and folders whose names begin with a dot or an underscore are left out, and so are links
    to folders, which may lead into another region.

    Args:
        uri: a folder (all below it), a single file, or an ``s3://`` address of either.
        options: how to read; its ``format`` chooses among several.

    Raises:
        ShardMissingError: if there is nothing to read; says what is there instead.
        ConfigError: if there are files of several formats and none is chosen, or the site file
            cannot be used or contradicts the options.
        StoreError: if the store does not answer.
    """
    options = options or ReadOptions()
    site = None
    if options.site is not None:
        site = load_site(Path(options.site))
        options = site.read.added_to(options, str(options.site))
    store, paths, left_out = _paths(uri, options)
    known = {path: found for path in paths if (found := _recognise(path)) is not None}
    if options.format is not None:
        chosen = [file for file in known.values() if file.format == options.format]
        if not chosen:  # the names do not say it, the user does
            chosen = [
                InputFile(p, options.format, _compression(p)) for p in paths if p not in known
            ]
    else:
        chosen = _of_one_format(list(known.values()), uri)
    if not chosen:
        raise _nothing_to_read(uri, paths, left_out, options)
    taken = {file.path for file in chosen}
    others = [_unread(path, chosen[0].format) for path in paths if path not in taken]
    left_out = sorted([*left_out, *others], key=attrgetter("path"))
    return InputFiles(store, tuple(chosen), options, uri, tuple(left_out), site)


def _paths(uri: str, options: ReadOptions) -> tuple[Store, list[str], list[LeftOut]]:
    if is_s3(uri):
        folder, name = split(uri)
        if name and _recognise(name) and open_store(folder).exists(name):
            return open_store(folder), [name], []
    else:
        path = local_path(uri)
        if path.is_file():
            if options.format is None and _recognise(path.name) is None:
                raise _nothing_to_read(uri, [path.name], [], options)
            return open_store(str(path.parent)), [path.name], []
        if not path.exists():
            raise ShardMissingError(
                f"there is no folder or file {path}{missing_path(path)}",
                fix=f"Name the folder with your files; a relative path starts at {Path.cwd()}.",
            )
    store = open_store(uri)
    paths, left_out = (store.list(), []) if is_s3(uri) else _walk(local_path(uri))
    hidden: dict[str, bool] = {}
    for name in paths:
        if cut := _hidden_part(name):
            hidden[cut] = hidden.get(cut, True) and _recognise(name) is None
    left_out += [
        LeftOut(name, "its name begins with a dot or an underscore", is_marker)
        for name, is_marker in hidden.items()
    ]
    return store, [name for name in paths if not _hidden_part(name)], left_out


def _walk(root: Path) -> tuple[list[str], list[LeftOut]]:
    """All files below a local folder, and what cannot be a file to read."""
    paths: list[str] = []
    left_out: list[LeftOut] = []

    def note(error: OSError) -> None:
        folder = Path(error.filename)
        if folder == root:
            raise StoreError(
                f"the folder {root} cannot be read: {error.strerror}",
                fix="Check its permissions.",
            ) from None
        name = folder.relative_to(root).as_posix()
        left_out.append(LeftOut(f"{name}/", f"the folder cannot be read: {error.strerror}"))

    for folder, inner, names in os.walk(root, onerror=note):
        for name in inner:
            link = Path(folder, name)
            if link.is_symlink():
                reason = "it is a link to a folder; name that folder, or copy it here"
                left_out.append(LeftOut(f"{link.relative_to(root).as_posix()}/", reason))
        for name in names:
            file = Path(folder, name)
            if file.is_file():
                paths.append(file.relative_to(root).as_posix())
            else:
                what = "a link to nothing" if file.is_symlink() else "no regular file"
                left_out.append(LeftOut(file.relative_to(root).as_posix(), f"it is {what}"))
    return sorted(paths), left_out


def _hidden_part(path: str) -> str:
    """The path down to its first part with a hidden name; empty if there is none."""
    parts = PurePosixPath(path).parts
    for number, part in enumerate(parts, start=1):
        if part.startswith((".", "_")):
            return "/".join(parts[:number]) + ("/" if number < len(parts) else "")
    return ""


def _unread(path: str, chosen: Format) -> LeftOut:
    known = _recognise(path)
    if known is not None:
        return LeftOut(path, f"it is no {chosen} file; --format {known.format} reads it")
    suffix = PurePosixPath(path).suffix.lower()
    if suffix in _PACKED:
        return LeftOut(path, f"files that end in {suffix} are not unpacked here; unpack it")
    return LeftOut(path, "files with this ending are not read; rename it if it has rows")


def _compression(path: str) -> str | None:
    return COMPRESSIONS.get(PurePosixPath(path).suffix.lower())


def _recognise(path: str) -> InputFile | None:
    compression = _compression(path)
    name = PurePosixPath(path)
    suffix = (PurePosixPath(name.stem) if compression else name).suffix.lower()
    kind = SUFFIXES.get(suffix)
    if kind is None or (compression and kind not in ("csv", "jsonl")):
        return None
    return InputFile(path, kind, compression)


def _of_one_format(files: Sequence[InputFile], uri: str) -> list[InputFile]:
    kinds = Counter(file.format for file in files)
    if len(kinds) > 1:  # tables often have descriptions beside them, such as schema.json
        files = [file for file in files if not file.path.lower().endswith(".json")]
        kinds = Counter(file.format for file in files)
    if len(kinds) > 1:
        examples = {file.format: file.path for file in reversed(files)}
        found = ", ".join(f"{n} of {kind} ({examples[kind]})" for kind, n in sorted(kinds.items()))
        raise ConfigError(
            f"{uri} has files of several formats: {found}",
            fix=f"Say which to read, such as --format {kinds.most_common(1)[0][0]}, or name a "
            "folder with files of one format.",
        )
    return list(files)


def _nothing_to_read(
    uri: str, paths: Sequence[str], left_out: Sequence[LeftOut], options: ReadOptions
) -> ShardMissingError:
    if not paths and not left_out:
        return ShardMissingError(f"{uri} is empty", fix="Name the folder with your files.")
    if not paths:
        found = "; ".join(f"{one.path}: {one.reason}" for one in left_out[:_MOST_NAMED])
        return ShardMissingError(
            f"{uri} has nothing to read: {found}", fix="Name the folder with your files."
        )
    suffixes = {PurePosixPath(path).suffix.lower() for path in paths}
    what = f"{uri} has {listed(paths)}"
    if options.format is not None:
        return ShardMissingError(
            f"{what}, but nothing of --format {options.format}", fix="Leave --format out."
        )
    if suffixes & _SHEETS:
        fix = "Save the sheets as CSV (UTF-8) files."
    elif suffixes & _PACKED:
        fix = "Unpack the files; only CSV and JSON lines may be compressed (.csv.gz, .jsonl.gz)."
    else:
        fix = (
            "If they hold CSV or JSON lines under another name, add --format csv or --format "
            "jsonl; otherwise export them as CSV or Parquet."
        )
    return ShardMissingError(f"{what}, but no file that ends in {_READABLE}", fix=fix)


@dataclass(frozen=True)
class FilePiece:
    """Consecutive rows of one file.

    Attributes:
        names: all columns that the file has, also those that were not asked for.
        columns: name -> Arrow array of ``rows`` values.
        rows: how many rows, also if there is no column.
        fraction: how much of the file is read, about; for progress.
        sparse: a column that is not in ``names`` is one without values here (JSON lines).
        skipped: why a line before these rows that could be a row is none; empty otherwise.
    """

    names: tuple[str, ...]
    columns: dict[str, pa.Array]
    rows: int
    fraction: float
    sparse: bool = False
    skipped: str = ""


class Borrowed:
    """A file that whoever reads it cannot close: Arrow's streams close theirs when they end.

    Args:
        file: the owner's.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.closed = False

    def read(self, size: int = -1) -> bytes:
        """Read as the file does."""
        return self._file.read(size)

    def seek(self, offset: int, whence: int = 0) -> int:
        """Seek as the file does."""
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        """Where the file is."""
        return self._file.tell()

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def close(self) -> None:
        """Leave the file to its owner."""


def size_of(file: BinaryIO) -> int:
    """The size of a file that is at its start."""
    size = file.seek(0, 2)
    file.seek(0)
    return size


def fraction_read(file: BinaryIO, size: int) -> float:
    """How far a file of ``size`` bytes that is read from front to back is read, from 0 to 1."""
    return min(1.0, file.tell() / size) if size else 1.0


def flat_columns(batch: pa.RecordBatch) -> dict[str, pa.Array]:
    """The columns of a batch; those inside a struct get names such as ``address.city``.

    Raises:
        ValueError: two columns have one name; the message is that name.
    """
    flat: dict[str, pa.Array] = {}
    waiting = list(zip(batch.schema.names, batch.columns, strict=True))[::-1]
    while waiting:
        name, array = waiting.pop()
        if pa.types.is_struct(array.type):
            parts = zip((field.name for field in array.type), array.flatten(), strict=True)
            waiting += [(f"{name}.{part}", inner) for part, inner in parts][::-1]
        elif name in flat:
            raise ValueError(name)
        else:
            flat[name] = array
    return flat
