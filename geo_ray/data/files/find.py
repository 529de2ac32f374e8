"""Which of a user's files are to be read; if none is, what to do depends on what is there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from geo_ray.data.files.options import Format, ReadOptions
from geo_ray.data.nearby import listed, missing_path
from geo_ray.errors import ConfigError, ShardMissingError
from geo_ray.stores.base import Store, open_store
from geo_ray.stores.uri import is_s3, local_path, split

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
_SHEETS = {".xlsx", ".xls", ".xlsm", ".ods", ".numbers"}
_ARCHIVES = {".zip", ".tar", ".tgz", ".7z", ".rar"}


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
class InputFiles:
    """The files to read, in the order of their paths, and how."""

    store: Store
    files: tuple[InputFile, ...]
    options: ReadOptions
    name: str


def find_files(uri: str, options: ReadOptions | None = None) -> InputFiles:
    """List the readable files at an address.

    Files and folders whose names begin with a dot or an underscore are left out.

    Args:
        uri: a folder (all below it), a single file, or an ``s3://`` address of either.
        options: how to read; its ``format`` chooses among several.

    Raises:
        ShardMissingError: if there is nothing to read; says what is there instead.
        ConfigError: if there are files of several formats and none is chosen.
        StoreError: if the store does not answer.
    """
    options = options or ReadOptions()
    store, paths = _paths(uri, options)
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
        raise _nothing_to_read(uri, paths, options)
    return InputFiles(store, tuple(chosen), options, uri)


def _paths(uri: str, options: ReadOptions) -> tuple[Store, list[str]]:
    if is_s3(uri):
        folder, name = split(uri)
        if name and _recognise(name) and open_store(folder).exists(name):
            return open_store(folder), [name]
    else:
        path = local_path(uri)
        if path.is_file():
            if options.format is None and _recognise(path.name) is None:
                raise _nothing_to_read(uri, [path.name], options)
            return open_store(str(path.parent)), [path.name]
        if not path.exists():
            raise ShardMissingError(
                f"there is no folder or file {path}{missing_path(path)}",
                fix=f"Name the folder with your files; a relative path starts at {Path.cwd()}.",
            )
    store = open_store(uri)
    return store, [path for path in store.list() if not _hidden(path)]


def _hidden(path: str) -> bool:
    return any(part.startswith((".", "_")) for part in PurePosixPath(path).parts)


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


def _nothing_to_read(uri: str, paths: Sequence[str], options: ReadOptions) -> ShardMissingError:
    if not paths:
        return ShardMissingError(
            f"{uri} is empty, apart from what begins with a dot or an underscore",
            fix="Name the folder with your files.",
        )
    suffixes = {PurePosixPath(path).suffix.lower() for path in paths}
    what = f"{uri} has {listed(paths)}"
    if options.format is not None:
        return ShardMissingError(
            f"{what}, but nothing of --format {options.format}", fix="Leave --format out."
        )
    if suffixes & _SHEETS:
        fix = "Save the sheets as CSV (UTF-8) files."
    elif suffixes & (_ARCHIVES | set(COMPRESSIONS)):
        fix = "Unpack the files; only CSV and JSON lines may be compressed (.csv.gz, .jsonl.gz)."
    else:
        fix = (
            "If they hold CSV or JSON lines under another name, add --format csv or --format "
            "jsonl; otherwise export them as CSV or Parquet."
        )
    return ShardMissingError(f"{what}, but no file that ends in {_READABLE}", fix=fix)
