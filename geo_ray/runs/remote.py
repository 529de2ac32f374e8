"""Runs whose directory is in a bucket (`run.dir: s3://...`).

Defines the objects and log segments in the bucket, and the local copies for run actors and
readers. Every object is written once.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from geo_ray.base.errors import RunDirectoryError, StoreError
from geo_ray.base.files import save_chunks, save_text, unwritable
from geo_ray.storage.bucket import (
    PIECE_BYTES,
    Bucket,
    RequestLimits,
    broken_downloads,
    endpoint_of,
    upload_once,
)
from geo_ray.storage.conditional_store import LEASE_LIMITS, S3ConditionalStore
from geo_ray.storage.uri import checked_path, parse_s3, problem_of_path
from geo_ray.telemetry.event_log import EVENTS_FILE

_NAME = re.compile(r"(\d{6})-(\d{18})-(\d{18})-([0-9a-f]{16})\.jsonl")


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment of the log.

    Attributes:
        token: fencing token of its writer.
        start: its first byte.
        end: the byte after its last.
        digest: prefix of the SHA-256 of the segment.
    """

    token: int
    start: int
    end: int
    digest: str

    @property
    def name(self) -> str:
        """Name of its object."""
        return f"{self.token:06d}-{self.start:018d}-{self.end:018d}-{self.digest}.jsonl"


def segment_named(name: str) -> Segment | None:
    """Return the segment of an object name; None if it is not a segment."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    token, start, end, digest = found.groups()
    return Segment(int(token), int(start), int(end), digest)


def first_bytes(segments: Iterable[Segment]) -> dict[int, int]:
    """Return the first byte of each holder, by its fencing token."""
    firsts: dict[int, int] = {}
    for each in segments:
        firsts[each.token] = min(each.start, firsts.get(each.token, each.start))
    return firsts


def chain(segments: Iterable[Segment]) -> list[tuple[Segment, int]]:
    """Return the segments of the log in order, each with the byte at which its validity ends."""
    by_token: dict[int, dict[int, Segment]] = {}
    for each in segments:
        longest = by_token.setdefault(each.token, {})
        if each.start not in longest or longest[each.start].end < each.end:
            longest[each.start] = each
    found: list[tuple[Segment, int]] = []
    for token in sorted(by_token):
        own: Mapping[int, Segment] = by_token[token]
        at = min(own)
        if at > length_of(found):
            break  # an earlier segment is missing
        found = [(each, min(stop, at)) for each, stop in found if each.start < at]
        while at in own:
            found.append((own[at], own[at].end))
            at = own[at].end
    return found


def length_of(pieces: list[tuple[Segment, int]]) -> int:
    """Return the length of the log in bytes."""
    return pieces[-1][1] if pieces else 0


_BLOCK_BYTES: Final = 1 << 20
_DIGEST: Final = 16
_OBJECT_TRIES: Final = 3
_MOST_REQUEST_BYTES: Final = 4096
T = TypeVar("T")
_FILE = re.compile(rf"(\d{{6}})-(\d{{8}})-([0-9a-f]{{{_DIGEST}}})/(.+)")


@dataclass(frozen=True, slots=True)
class FileVersion:
    """One version of a file.

    Attributes:
        token: fencing token of its writer.
        version: counter of its writer.
        digest: prefix of its SHA-256.
        name: path relative to the run's directory.
    """

    token: int
    version: int
    digest: str
    name: str

    @property
    def key(self) -> str:
        """Name of its object, below ``files/``."""
        return f"{self.token:06d}-{self.version:08d}-{self.digest}/{self.name}"


class RunObjects:
    """A run's directory in a bucket, object by object. Every object is written once.

        PREFIX/NAME/begun                                         creator of the run
        PREFIX/NAME/lease.json/...                                the run's lease
        PREFIX/NAME/events/EPOCH-START-END-SHA.jsonl              its log in segments
        PREFIX/NAME/files/EPOCH-VERSION-SHA/summary.json          all other files
        PREFIX/NAME/requests/...                                  requests of users
        PREFIX/NAME/checkpoints/ckpt-...                          as in any store

    Of the versions of a file, the newest of the highest fencing token is valid. Late writes of a
    run actor, after another has taken over the run, are therefore ignored. Every method raises
    `StoreError` if the bucket fails.

    Args:
        uri: ``s3://bucket/prefix/name?...`` of the run.
        limits: of every request.
    """

    def __init__(self, uri: str, limits: RequestLimits | None = None) -> None:
        address = parse_s3(uri)
        self.uri = uri
        self.name = f"s3://{address.bucket}/{address.prefix}"
        self._bucket = Bucket(address, limits or RequestLimits())
        self._prefix = f"{address.prefix}/"

    def lease(self) -> S3ConditionalStore:
        """Store of the run's lease."""
        return S3ConditionalStore(Bucket(self._bucket.address, LEASE_LIMITS), self._prefix)

    def begin(self) -> bool:
        """Reserve the name for a new run; False if it exists.

        Raises:
            StoreError: also if the server would let two runs reserve the same name.
        """
        key, data = f"{self._prefix}begun", b"geo_ray\n"
        try:
            upload_once(self._bucket, key, [data], len(data))
        except FileExistsError:
            return False
        self._bucket.check_conditions(key, data)
        return True

    def is_there(self) -> bool:
        """Return whether the run exists."""
        return f"{self._prefix}begun" in self._bucket.sizes(f"{self._prefix}begun")

    def discard(self) -> None:
        """Remove all objects of a run that did not begin; its name last."""
        keys = [*self._bucket.sizes(self._prefix)]
        self._bucket.delete(sorted(keys, key=lambda key: key == f"{self._prefix}begun"))

    # -------------------------------------------------------------- its log

    def segments(self) -> list[Segment]:
        """Return the segments of its log."""
        folder = f"{self._prefix}events/"
        names = (key.removeprefix(folder) for key in self._bucket.sizes(folder))
        return [each for name in names if (each := segment_named(name)) is not None]

    def put_segment(self, token: int, start: int, data: bytes) -> Segment:
        """Write a segment of the log; an existing one was sent before, and the answer was lost."""
        segment = Segment(token, start, start + len(data), _digest_of([data]))
        with suppress(FileExistsError):  # its name contains its writer and its SHA-256
            upload_once(self._bucket, f"{self._prefix}events/{segment.name}", [data], len(data))
        return segment

    def read_segment(self, segment: Segment) -> bytes:
        """Read a segment; FileNotFoundError if it was merged since."""
        return self._read(f"events/{segment.name}", segment.digest)

    def is_beginning(self, pieces: list[tuple[Segment, int]], log: Path) -> bool:
        """Return whether a local log begins with the segments of `chain`."""
        if not pieces:
            return True
        if not log.exists():
            return False
        with log.open("rb") as file:
            for segment, stop in pieces:
                own, size = file.read(stop - segment.start), stop - segment.start
                if stop < segment.end:
                    is_same = own == self.read_segment(segment)[:size]
                else:
                    is_same = _digest_of([own]) == segment.digest
                if not is_same:
                    return False
        return True

    def drop_segments(self, segments: list[Segment]) -> None:
        """Remove segments that were merged."""
        self._bucket.delete(f"{self._prefix}events/{each.name}" for each in segments)

    # -------------------------------------------------------------- its files

    def files(self) -> dict[str, FileVersion]:
        """Return the valid version of every file, by name."""
        found: dict[str, FileVersion] = {}
        for each in self._versions():
            known = found.get(each.name)
            if known is None or (each.token, each.version) > (known.token, known.version):
                found[each.name] = each
        return found

    def put_file(self, token: int, version: int, name: str, path: Path) -> FileVersion:
        """Write a version of a file."""
        num_bytes = path.stat().st_size
        small = num_bytes <= PIECE_BYTES  # it may be replaced during the upload
        chunks = list(_blocks(path)) if small else None
        digest = _digest_of(chunks or _blocks(path))
        written = FileVersion(token, version, digest, checked_path(name, self.name))
        self._once(f"files/{written.key}", chunks or _blocks(path), num_bytes)
        return written

    def drop_file(self, version: FileVersion) -> None:
        """Remove an outdated version."""
        self._bucket.delete([f"{self._prefix}files/{version.key}"])

    def get_file(self, version: FileVersion, path: Path) -> None:
        """Download a file; FileNotFoundError if there is a newer version.

        Raises:
            RunDirectoryError: the local file cannot be written.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        key = f"files/{version.key}"

        def read() -> Path:
            body = self._open(key)  # outside `save_chunks`: a missing object is not a full disk
            return save_chunks(path, _checked(body, version.digest))

        self._again(key, read)

    # -------------------------------------------------------------- requests of users

    def ask(self, name: str, data: bytes) -> None:
        """Store a request; the same name is the same request."""
        with suppress(FileExistsError):
            upload_once(self._bucket, f"{self._prefix}requests/{name}", [data], len(data))

    def take_requests(self) -> dict[str, bytes]:
        """Return the requests by name, and remove them."""
        folder, found = f"{self._prefix}requests/", dict[str, bytes]()
        for key, size in sorted(self._bucket.sizes(folder).items()):
            name = key.removeprefix(folder)
            if not name or name.endswith("/"):
                continue  # a folder created by a cloud console
            if size <= _MOST_REQUEST_BYTES and "/" not in name and problem_of_path(name) is None:
                with suppress(FileNotFoundError):  # another process was faster
                    found[name] = self._read(f"requests/{name}")
            self._bucket.delete([key])
        return found

    # -------------------------------------------------------------- inside

    def _versions(self) -> Iterator[FileVersion]:
        folder = f"{self._prefix}files/"
        for key in self._bucket.sizes(folder):
            found = _FILE.fullmatch(key.removeprefix(folder))
            if found is not None and problem_of_path(found[4]) is None:
                token, version, digest, name = found.groups()
                yield FileVersion(int(token), int(version), digest, name)

    def _once(self, key: str, chunks: Iterable[bytes], num_bytes: int) -> None:
        try:
            upload_once(self._bucket, self._prefix + key, chunks, num_bytes)
        except FileExistsError:
            raise StoreError(
                f"{self.name}/{key} exists already, written by another process"
            ) from None

    def _read(self, key: str, digest: str | None = None) -> bytes:
        return self._again(key, lambda: b"".join(_checked(self._open(key), digest)))

    def _again(self, key: str, read: Callable[[], T]) -> T:
        broken: tuple[type[Exception], ...] = (_DamagedError, *broken_downloads())
        for attempt in count(1):
            try:
                return read()
            except broken as error:
                if attempt == _OBJECT_TRIES:
                    raise StoreError(
                        f"{self.name}/{key} cannot be read completely: {type(error).__name__}",
                        fix="Restore an earlier version of the object, if the bucket keeps them.",
                    ) from error
        raise AssertionError

    def _open(self, key: str) -> Any:
        """Return the body of an object."""
        return self._bucket.get(self._prefix + key)["Body"]


class _DamagedError(Exception):
    """The content of an object differs from what was written."""


def _checked(body: Any, digest: str | None) -> Iterator[bytes]:
    """Yield the bytes of an object; raises at the end if their digest is wrong."""
    hasher = hashlib.sha256()
    with closing(body):  # not the `with` of the body; see `S3Store.read`
        for block in body.iter_chunks(_BLOCK_BYTES):
            hasher.update(block)
            yield bytes(block)
    if digest not in (None, hasher.hexdigest()[:_DIGEST]):
        raise _DamagedError


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            yield block


def digest_of_file(path: Path) -> str:
    """Return the SHA-256 prefix of a file, as in object names."""
    return _digest_of(_blocks(path))


def _digest_of(blocks: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for block in blocks:
        digest.update(block)
    return digest.hexdigest()[:_DIGEST]


Use = Literal["driven", "seen"]
REQUESTS: Final = "requests"
_INDEX: Final = ".copied.json"
_LOCK: Final = ".copying.lock"
_MODELS: Final = ".safetensors"
_COPY_TRIES: Final = 5


def copy_path(uri: str, use: Use) -> Path:
    """Return the path of a run's local copy; its last part is the run's name."""
    address = parse_s3(uri)
    where = f"{endpoint_of(address)}/{address.bucket}/{address.prefix}"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    digest = hashlib.sha256(where.encode()).hexdigest()[:12]
    return cache / "geo_ray" / "runs" / use / digest / address.prefix.rpartition("/")[2]


@dataclass(slots=True)
class Copy:
    """A local copy of a run.

    Attributes:
        objects: objects of the run.
        path: directory of the copy.
    """

    objects: RunObjects
    path: Path
    _tokens: list[int] = field(default_factory=list)
    _files: dict[str, str] = field(default_factory=dict)

    def pull(self, *, models: bool) -> bool:
        """Fetch new objects.

        Args:
            models: whether to fetch models.

        Returns:
            Whether the log has lost lines, because another run actor continued from before them.

        Raises:
            StoreError: the bucket does not answer, refuses, or has damaged objects.
            RunDirectoryError: the run does not exist, or the copy cannot be written.
        """
        with self._locked():
            self._load()
            try:
                is_cut = self._pull_events()
                self._pull_files(models=models)
            finally:
                self._save()
        if not self.objects.is_there():  # it may have been removed during the pull
            shutil.rmtree(self.path, ignore_errors=True)
            raise RunDirectoryError(
                f"no run {self.objects.name}",
                fix="Give the address of a run of `geo-ray train`: `run.dir` followed by its name.",
            )
        return is_cut

    def _pull_events(self) -> bool:
        is_cut = False
        log = self.path / EVENTS_FILE
        _touch(log)
        for _ in range(_COPY_TRIES):
            segments = self.objects.segments()
            pieces, firsts = chain(segments), first_bytes(segments)
            has = log.stat().st_size
            keep = min([has, *(first for e, first in firsts.items() if e not in self._tokens)])
            if not pieces:
                return is_cut
            is_cut = is_cut or keep < has
            try:
                with log.open("ab") as file:
                    file.truncate(keep)
                    for segment, stop in pieces:
                        if stop > keep:
                            file.write(self._part_of(segment, keep, stop))
                            file.flush()
                            keep = stop
            except FileNotFoundError:
                continue  # merged in the meantime
            except OSError as error:
                raise unwritable(log, error) from error
            self._tokens = sorted(firsts)
            return is_cut
        raise RunDirectoryError(
            f"the log of {self.objects.name} changes faster than it can be read"
        )

    def _part_of(self, segment: Segment, keep: int, stop: int) -> bytes:
        data = self.objects.read_segment(segment)
        return data[max(0, keep - segment.start) : stop - segment.start]

    def _pull_files(self, *, models: bool) -> None:
        for _ in range(_COPY_TRIES):
            try:
                for name, version in self.objects.files().items():
                    if models or not name.endswith(_MODELS):
                        self._pull_file(version)
                return
            except FileNotFoundError:
                continue  # there is a newer version

    def _pull_file(self, version: FileVersion) -> None:
        path = self.path / version.name
        if self._files.get(version.name) != version.key or not path.exists():
            self.objects.get_file(version, path)
            self._files[version.name] = version.key

    def note_origin(self) -> None:
        """Record the address of the run in the copy."""
        self._load()
        self._save()

    def _save(self) -> None:
        index = {"uri": self.objects.uri, "tokens": self._tokens, "files": self._files}
        save_text(self.path / _INDEX, json.dumps(index))

    def _load(self) -> None:
        try:
            index = json.loads((self.path / _INDEX).read_text())
            self._tokens = [int(token) for token in index["tokens"]]
            self._files = {str(name): str(key) for name, key in index["files"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            self._tokens, self._files = [], {}

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            file = (self.path / _LOCK).open("w")
        except OSError as error:
            raise unwritable(self.path, error) from error
        with file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _touch(log: Path) -> None:
    try:
        log.touch()
    except OSError as error:
        raise unwritable(log, error) from error


def view_copy(uri: str, *, models: bool = False) -> Path:
    """Return a current copy of a run for reading.

    A run exists once its name is reserved, before it has written anything. Its copy always has an
    events file, which is empty until the first event has reached the bucket.

    Raises:
        StoreError, RunDirectoryError: as for `Copy.pull`.
    """
    copy = Copy(RunObjects(uri), copy_path(uri, "seen"))
    copy.pull(models=models)
    return copy.path


def copied_from(path: Path) -> str | None:
    """Return the last used address of the run of a copy; None if a directory is not a copy.

    The run does not store its address, because a bucket can be copied to another one.
    """
    try:
        return str(json.loads((path / _INDEX).read_text())["uri"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def fetch_models(uri: str | None, path: Path) -> None:
    """Fetch the models of a copy for reading; other directories have their models.

    Raises:
        StoreError, RunDirectoryError: as for `Copy.pull`.
    """
    if uri is not None and path == copy_path(uri, "seen"):
        Copy(RunObjects(uri), path).pull(models=True)


def pass_on(uri: str | None, path: Path) -> None:
    """Forward requests in a copy to the bucket, for the run actor.

    Raises:
        StoreError: the bucket does not answer or refuses.
    """
    for request in [] if uri is None else sorted((path / REQUESTS).iterdir()):
        if not request.name.startswith("."):
            RunObjects(str(uri)).ask(request.name, request.read_bytes())
            request.unlink(missing_ok=True)


def empty_copy(uri: str) -> Path:
    """Create the copy of a new run.

    Raises:
        RunDirectoryError: the copy cannot be created.
    """
    path = copy_path(uri, "driven")
    try:
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
    except OSError as error:
        raise unwritable(path, error) from error
    Copy(RunObjects(uri), path).note_origin()
    return path


def driven_copy(uri: str) -> Path:
    """Return the copy of a run to resume: created again, unless this machine has as much or more.

    A run actor on this machine may have lost its connection to the bucket before the end; then only
    the copy has the end of the log, or the model.

    Raises:
        StoreError, RunDirectoryError: as for `Copy.pull`.
    """
    objects, path = RunObjects(uri), copy_path(uri, "driven")
    if is_ahead(objects, path):
        for name, version in objects.files().items():  # a pull may have failed after the log
            if not (path / name).exists():
                objects.get_file(version, path / name)
        Copy(objects, path).note_origin()
        return path
    shutil.rmtree(path, ignore_errors=True)
    Copy(objects, path).pull(models=True)
    return path


def is_ahead(objects: RunObjects, path: Path) -> bool:
    """Return whether the log of a copy contains that of the bucket."""
    log = path / EVENTS_FILE
    has = log.stat().st_size if log.exists() else 0
    if not has:
        return False
    pieces = chain(objects.segments())
    return has >= length_of(pieces) and objects.is_beginning(pieces, log)
