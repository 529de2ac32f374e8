"""Find the user's input files and report the skipped ones with the reasons.

A reader of any format yields `FilePiece` records: some rows of a file as Arrow columns.
"""

# PyArrow ships no complete types.
# mypy: disable-error-code="attr-defined, name-defined"

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import pyarrow as pa

from geo_ray.base.errors import ConfigError, ShardMissingError, StoreError
from geo_ray.base.text import escaped, listed, missing_path
from geo_ray.data.files.options import Format, ReadOptions
from geo_ray.data.files.site import SiteFile, load_site
from geo_ray.storage.store import Store, open_store
from geo_ray.storage.uri import is_s3, join, local_path, split

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
    ".tar": "webdataset",
    ".tgz": "webdataset",
    ".mds": "mds",
    ".jpg": "images",
    ".jpeg": "images",
    ".png": "images",
}
COMPRESSIONS: Mapping[str, str] = {
    **{".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".zstd": "zstd", ".lz4": "lz4"},
    ".br": "brotli",
}

_MAY_BE_COMPRESSED: Mapping[Format, Collection[str | None]] = {
    "csv": ("gzip", "bz2", "zstd", "lz4"),
    "jsonl": ("gzip", "bz2", "zstd", "lz4"),
    "webdataset": ("gzip", "bz2"),
    "mds": ("gzip", "bz2", "zstd", "brotli"),
}
_COMPANIONS: tuple[Format, ...] = ("images", "webdataset", "mds")  # next to tables: not the rows

_READABLE = (
    ".csv, .tsv, .jsonl, .ndjson, .json, .parquet, .pq, .arrow, .feather, .ipc, .tar, .mds, .jpg, "
    ".jpeg and .png"
)
_MOST_NAMED = 6
_SHEETS = {".xlsx", ".xls", ".xlsm", ".ods", ".numbers"}
_ARCHIVES = {".zip", ".tar", ".tgz", ".7z", ".rar", ".xz", ".z"}
_PACKED = _ARCHIVES | set(COMPRESSIONS)


@dataclass(frozen=True)
class InputFile:
    """An input file.

    Attributes:
        path: path in the store.
        format: how to read it.
        compression: Arrow's name of the compression codec, or None.
        members: paths of the files with one row each, if this is a folder of them.
    """

    path: str
    format: Format
    compression: str | None = None
    members: tuple[str, ...] = ()


@dataclass(frozen=True)
class LeftOut:
    """A file or folder at the address that is not read.

    Attributes:
        path: of a file, or of a whole folder, which ends with a slash. Unprintable characters are
            escaped.
        reason: why it is not read.
        is_marker: whether it has no data, such as ``_SUCCESS`` or a description of a data set.
    """

    path: str
    reason: str
    is_marker: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", escaped(self.path))


@dataclass(frozen=True)
class InputFiles:
    """The files to read, in the order of their paths, and the reading options.

    Attributes:
        store: the store of the files.
        files: the files to read.
        options: reading options, including those of the site file.
        name: the address as given.
        left_out: files and folders at the address that are not read.
        site: translation of the site's columns to the shared ones, if they differ.
    """

    store: Store
    files: tuple[InputFile, ...]
    options: ReadOptions
    name: str
    left_out: tuple[LeftOut, ...] = ()
    site: SiteFile | None = None


def find_files(uri: str, options: ReadOptions | None = None) -> InputFiles:
    """List the readable files at an address, and the skipped files and folders.

    Files and folders whose names begin with a dot or an underscore are skipped, as are links to
    folders, which may lead into another region.

    Args:
        uri: a folder (all below it), a single file, or an ``s3://`` address of either.
        options: how to read; its ``format`` chooses among several.

    Raises:
        ShardMissingError: if there is nothing to read; the message lists what was found.
        ConfigError: if files have several formats and no format is chosen, or the site file
            cannot be used or contradicts the options.
        StoreError: if the store does not answer.
    """
    options = options or ReadOptions()
    site = None
    if options.site is not None:
        site = load_site(Path(options.site))
        options = site.read.added_to(options, str(options.site))
    store, paths, left_out = _paths(uri, options)
    paths, metadata = _without_metadata(store, paths, uri)
    left_out += metadata
    known = {path: found for path in paths if (found := _recognise(path)) is not None}
    if options.format is not None:
        chosen = [file for file in known.values() if file.format == options.format]
        if not chosen:  # the names do not show the format, so the user sets it
            chosen = [
                InputFile(p, options.format, _compression(p)) for p in paths if p not in known
            ]
    else:
        chosen = _of_one_format(list(known.values()), uri)
    if not chosen:
        raise _nothing_to_read(uri, paths, left_out, options)
    _refuse_splits(chosen, uri)
    taken = {file.path for file in chosen}
    chosen = _folders(chosen)
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
    """List the files below a local folder, and the entries that cannot be read."""
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
                reason = "it is a link to a folder; use that folder's path, or copy it here"
                left_out.append(LeftOut(f"{link.relative_to(root).as_posix()}/", reason))
        for name in names:
            file = Path(folder, name)
            if file.is_file():
                paths.append(file.relative_to(root).as_posix())
            else:
                what = "a broken link" if file.is_symlink() else "not a regular file"
                left_out.append(LeftOut(file.relative_to(root).as_posix(), f"it is {what}"))
    return sorted(paths), left_out


def _without_metadata(
    store: Store, paths: Sequence[str], uri: str
) -> tuple[list[str], list[LeftOut]]:
    """Remove the descriptions of data sets, and the files that they do not list.

    A data set that Hugging Face's library `datasets` saved lists its files in ``state.json``; other
    files next to them are caches of that library.

    Raises:
        ConfigError: a data set has several splits, or an order of its rows that was not applied.
    """
    out: list[str] = []
    dropped: dict[str, str] = {}
    listed_files: dict[str, list[str]] = {}
    suffixes = {suffix for path in paths for suffix in PurePosixPath(path).suffixes}
    for path in paths:
        folder, name = PurePosixPath(path).parent, PurePosixPath(path).name
        key, suffix = _DESCRIPTIONS.get(name, ("", ""))
        tree = _description(store, path) if suffix in suffixes else {}
        if name == "dataset_dict.json" and len(splits := tree.get("splits") or []) > 1:
            names = [str(split) for split in splits]
            raise _several_splits(uri, names, folder / names[0])
        if name == "state.json" and isinstance(data := tree.get("_data_files"), list):
            if tree.get("_indices_files") or tree.get("_indices_data_files"):
                raise ConfigError(
                    f"{uri}: {path} refers to an order of rows that is not applied",
                    fix="Save the data set again after `dataset.flatten_indices()`.",
                )
            names = [str(one.get("filename")) for one in data if isinstance(one, dict)]
            listed_files[str(folder)] = [(folder / one).as_posix() for one in names]
        if key in tree:
            dropped[path] = "it describes the data set"
    for path in paths:
        known = listed_files.get(str(PurePosixPath(path).parent))
        if known is not None and path.endswith(".arrow") and path not in known:
            dropped[path] = "state.json next to it does not list it"
        elif path not in dropped:
            out.append(path)
    if lost := [one for names in listed_files.values() for one in names if one not in set(out)]:
        raise ShardMissingError(
            f"{uri} lacks {listed(lost)}, which its state.json lists",
            fix="Copy the whole folder of the data set.",
        )
    return out, [LeftOut(path, reason, True) for path, reason in dropped.items()]


_SPLITS = {"train", "training", "val", "valid", "validation", "eval", "dev", "test", "testing"}


def _refuse_splits(files: Sequence[InputFile], uri: str) -> None:
    """Refuse folders such as train and val, whose rows must not be mixed.

    Raises:
        ConfigError: naming them.
    """
    of_sets = [file.path for file in files if file.format in _COMPANIONS]
    folders = dict.fromkeys(PurePosixPath(path).parts[0] for path in of_sets)
    if len(folders) > 1 and {folder.lower() for folder in folders} <= _SPLITS:
        raise _several_splits(uri, tuple(folders), PurePosixPath(next(iter(folders))))


def _several_splits(uri: str, splits: Sequence[str], first: PurePosixPath) -> ConfigError:
    return ConfigError(
        f"{uri} has the splits {', '.join(splits)}",
        fix=f"Name one of them, such as {_below(uri, first)}; --heldout takes another one.",
    )


def _below(uri: str, path: PurePosixPath) -> str:
    return join(uri, str(path)) if is_s3(uri) else f"{uri.rstrip('/')}/{path}"


_DESCRIPTIONS: Mapping[str, tuple[str, str]] = {
    "dataset_dict.json": ("splits", ".arrow"),
    "dataset_info.json": ("features", ".arrow"),
    "state.json": ("_data_files", ".arrow"),
    "index.json": ("shards", ".mds"),
}
"""Files that describe a data set -> a key that they have, and the ending of its other files."""

_MOST_DESCRIBED = 64 << 20  # bytes


def _description(store: Store, path: str) -> dict[str, Any]:
    with store.open(path) as file:
        text = file.read(_MOST_DESCRIBED)
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return tree if isinstance(tree, dict) else {}


def _folders(files: Sequence[InputFile]) -> list[InputFile]:
    """Group files with one row each by their first folder, which is their class."""
    out = [file for file in files if file.format != "images"]
    members: dict[str, list[str]] = {}
    for file in files:
        if file.format == "images":
            members.setdefault(PurePosixPath(file.path).parts[0], []).append(file.path)
    alone = [path for folder, paths in members.items() for path in paths if path == folder]
    if alone:
        out.append(InputFile(".", "images", members=tuple(alone)))
    for folder, paths in members.items():
        if folder not in alone:
            out.append(InputFile(folder, "images", members=tuple(paths)))
    return out


def _hidden_part(path: str) -> str:
    """Return the path up to its first hidden part; empty if no part is hidden."""
    parts = PurePosixPath(path).parts
    for number, part in enumerate(parts, start=1):
        if part.startswith((".", "_")):
            return "/".join(parts[:number]) + ("/" if number < len(parts) else "")
    return ""


def _unread(path: str, chosen: Format) -> LeftOut:
    known = _recognise(path)
    if known is not None:
        return LeftOut(path, f"it is not a {chosen} file; --format {known.format} reads it")
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
    if kind is None or (compression and compression not in _MAY_BE_COMPRESSED.get(kind, ())):
        return None
    return InputFile(path, kind, compression)


def _of_one_format(files: Sequence[InputFile], uri: str) -> list[InputFile]:
    kinds = Counter(file.format for file in files)
    if len(kinds) > 1:  # tables often come with descriptions, such as schema.json
        files = [file for file in files if not file.path.lower().endswith(".json")]
        kinds = Counter(file.format for file in files)
    if len(kinds) > 1 and not set(kinds) <= set(_COMPANIONS):
        files = [file for file in files if file.format not in _COMPANIONS]
        kinds = Counter(file.format for file in files)
    if len(kinds) > 1:
        examples = {file.format: file.path for file in reversed(files)}
        found = ", ".join(f"{n} of {kind} ({examples[kind]})" for kind, n in sorted(kinds.items()))
        raise ConfigError(
            f"{uri} has files of several formats: {found}",
            fix=f"Choose the format to read, such as --format {kinds.most_common(1)[0][0]}, or "
            "name a "
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
        fix = "Unpack the files; of tables, only CSV and JSON lines may be compressed."
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
        names: all columns of the file, including those that were not requested.
        columns: name -> Arrow array of ``rows`` values.
        rows: number of rows, also if there are no columns.
        fraction: approximate part of the file that was read, for progress.
        sparse: whether a column missing from ``names`` counts as one without values (JSON lines).
        skipped: why a line before these rows was skipped; empty otherwise.
    """

    names: tuple[str, ...]
    columns: dict[str, pa.Array]
    rows: int
    fraction: float
    sparse: bool = False
    skipped: str = ""


class Borrowed:
    """A file that its reader cannot close; Arrow's streams close their file at the end.

    Args:
        file: the file, which the caller closes.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.closed = False

    def read(self, size: int = -1) -> bytes:
        """Read from the file."""
        return self._file.read(size)

    def seek(self, offset: int, whence: int = 0) -> int:
        """Seek in the file."""
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        """Return the position in the file."""
        return self._file.tell()

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def close(self) -> None:
        """Do nothing: the caller closes the file."""


def size_of(file: BinaryIO) -> int:
    """Return the size of a file positioned at its start."""
    size = file.seek(0, 2)
    file.seek(0)
    return size


def fraction_read(file: BinaryIO, size: int) -> float:
    """Return the part of a file of ``size`` bytes that was read, from 0 to 1."""
    return min(1.0, file.tell() / size) if size else 1.0


def flat_columns(batch: pa.RecordBatch) -> dict[str, pa.Array]:
    """Return the columns of a batch; fields of a struct get names such as ``address.city``.

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
