"""Runs whose directory is in a bucket (`run.dir: s3://...`).

The objects and log segments there, and the local copies that run actors and readers use. Every
object is written once.
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
    """A piece of the log.

    Attributes:
        epoch: of the lease of who wrote it.
        start: its first byte.
        end: the byte behind its last.
        digest: how the SHA-256 of the whole piece begins.
    """

    epoch: int
    start: int
    end: int
    digest: str

    @property
    def name(self) -> str:
        """Of its object."""
        return f"{self.epoch:06d}-{self.start:018d}-{self.end:018d}-{self.digest}.jsonl"


def segment_named(name: str) -> Segment | None:
    """The piece that an object is; None if it is none."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    epoch, start, end, digest = found.groups()
    return Segment(int(epoch), int(start), int(end), digest)


def first_bytes(segments: Iterable[Segment]) -> dict[int, int]:
    """Where each holder went on, by its epoch."""
    firsts: dict[int, int] = {}
    for each in segments:
        firsts[each.epoch] = min(each.start, firsts.get(each.epoch, each.start))
    return firsts


def chain(segments: Iterable[Segment]) -> list[tuple[Segment, int]]:
    """The pieces that make up the log, in order, each with the byte at which it stops to count."""
    by_epoch: dict[int, dict[int, Segment]] = {}
    for each in segments:
        longest = by_epoch.setdefault(each.epoch, {})
        if each.start not in longest or longest[each.start].end < each.end:
            longest[each.start] = each
    found: list[tuple[Segment, int]] = []
    for epoch in sorted(by_epoch):
        own: Mapping[int, Segment] = by_epoch[epoch]
        at = min(own)
        if at > length_of(found):
            break  # something before it is missing
        found = [(each, min(stop, at)) for each, stop in found if each.start < at]
        while at in own:
            found.append((own[at], own[at].end))
            at = own[at].end
    return found


def length_of(pieces: list[tuple[Segment, int]]) -> int:
    """Bytes of the log."""
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
        epoch: of the lease of who wrote it.
        version: counted by who wrote it.
        digest: how its SHA-256 begins.
        name: from the run's directory.
    """

    epoch: int
    version: int
    digest: str
    name: str

    @property
    def key(self) -> str:
        """Of its object, below ``files/``."""
        return f"{self.epoch:06d}-{self.version:08d}-{self.digest}/{self.name}"


class RunObjects:
    """A run's directory in a bucket, object by object. Every object is written once.

        PREFIX/NAME/begun                                         who made the run
        PREFIX/NAME/lease.json/...                                who drives it
        PREFIX/NAME/events/EPOCH-START-END-SHA.jsonl              its log in pieces
        PREFIX/NAME/files/EPOCH-VERSION-SHA/summary.json          all other files
        PREFIX/NAME/requests/...                                  what users ask of it
        PREFIX/NAME/checkpoints/ckpt-...                          as in any store

    Of the versions of a file that of the highest epoch counts, and of these the newest. So what a
    run actor writes late, after another has taken the run over, counts for nothing. Every method
    raises `StoreError` where the bucket does.

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
        """Where the run's lease lies."""
        return S3ConditionalStore(Bucket(self._bucket.address, LEASE_LIMITS), self._prefix)

    def begin(self) -> bool:
        """Take the name for a new run; False if there is one.

        Raises:
            StoreError: also if the server would let two runs take the same name.
        """
        key, data = f"{self._prefix}begun", b"geo_ray\n"
        try:
            upload_once(self._bucket, key, [data], len(data))
        except FileExistsError:
            return False
        self._bucket.check_conditions(key, data)
        return True

    def is_there(self) -> bool:
        """Whether there is such a run."""
        return f"{self._prefix}begun" in self._bucket.sizes(f"{self._prefix}begun")

    def discard(self) -> None:
        """Remove all of a run that did not begin; its name last."""
        keys = [*self._bucket.sizes(self._prefix)]
        self._bucket.delete(sorted(keys, key=lambda key: key == f"{self._prefix}begun"))

    # -------------------------------------------------------------- its log

    def segments(self) -> list[Segment]:
        """The pieces of its log."""
        folder = f"{self._prefix}events/"
        names = (key.removeprefix(folder) for key in self._bucket.sizes(folder))
        return [each for name in names if (each := segment_named(name)) is not None]

    def put_segment(self, epoch: int, start: int, data: bytes) -> Segment:
        """Write a piece of the log; one that is there was sent before, and its answer got lost."""
        segment = Segment(epoch, start, start + len(data), _digest_of([data]))
        with suppress(FileExistsError):  # its name says whose it is, and has its SHA-256
            upload_once(self._bucket, f"{self._prefix}events/{segment.name}", [data], len(data))
        return segment

    def read_segment(self, segment: Segment) -> bytes:
        """Read a piece; FileNotFoundError if it was put together with others since."""
        return self._read(f"events/{segment.name}", segment.digest)

    def is_beginning(self, pieces: list[tuple[Segment, int]], log: Path) -> bool:
        """Whether a log of this machine begins with pieces, as `chain` gives them."""
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
        """Remove pieces that are in a longer one."""
        self._bucket.delete(f"{self._prefix}events/{each.name}" for each in segments)

    # -------------------------------------------------------------- its files

    def files(self) -> dict[str, FileVersion]:
        """The version of every file that counts, by name."""
        found: dict[str, FileVersion] = {}
        for each in self._versions():
            known = found.get(each.name)
            if known is None or (each.epoch, each.version) > (known.epoch, known.version):
                found[each.name] = each
        return found

    def put_file(self, epoch: int, version: int, name: str, path: Path) -> FileVersion:
        """Write a version of a file."""
        num_bytes = path.stat().st_size
        small = num_bytes <= PIECE_BYTES  # it may be replaced meanwhile
        chunks = list(_blocks(path)) if small else None
        digest = _digest_of(chunks or _blocks(path))
        written = FileVersion(epoch, version, digest, checked_path(name, self.name))
        self._once(f"files/{written.key}", chunks or _blocks(path), num_bytes)
        return written

    def drop_file(self, version: FileVersion) -> None:
        """Remove a version that counts no more."""
        self._bucket.delete([f"{self._prefix}files/{version.key}"])

    def get_file(self, version: FileVersion, path: Path) -> None:
        """Write a file of this machine; FileNotFoundError if there is a newer version since.

        Raises:
            RunDirectoryError: it cannot be written.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        key = f"files/{version.key}"

        def read() -> Path:
            body = self._open(key)  # outside `save_chunks`: a missing object is no full disk
            return save_chunks(path, _checked(body, version.digest))

        self._again(key, read)

    # -------------------------------------------------------------- what users ask

    def ask(self, name: str, data: bytes) -> None:
        """Leave a request; one of the same name is the same."""
        with suppress(FileExistsError):
            upload_once(self._bucket, f"{self._prefix}requests/{name}", [data], len(data))

    def take_requests(self) -> dict[str, bytes]:
        """The requests by name, which are removed."""
        folder, found = f"{self._prefix}requests/", dict[str, bytes]()
        for key, size in sorted(self._bucket.sizes(folder).items()):
            name = key.removeprefix(folder)
            if not name or name.endswith("/"):
                continue  # a folder, as consoles of clouds make it
            if size <= _MOST_REQUEST_BYTES and "/" not in name and problem_of_path(name) is None:
                with suppress(FileNotFoundError):  # somebody else was quicker
                    found[name] = self._read(f"requests/{name}")
            self._bucket.delete([key])
        return found

    # -------------------------------------------------------------- inside

    def _versions(self) -> Iterator[FileVersion]:
        folder = f"{self._prefix}files/"
        for key in self._bucket.sizes(folder):
            found = _FILE.fullmatch(key.removeprefix(folder))
            if found is not None and problem_of_path(found[4]) is None:
                epoch, version, digest, name = found.groups()
                yield FileVersion(int(epoch), int(version), digest, name)

    def _once(self, key: str, chunks: Iterable[bytes], num_bytes: int) -> None:
        try:
            upload_once(self._bucket, self._prefix + key, chunks, num_bytes)
        except FileExistsError:
            raise StoreError(
                f"{self.name}/{key} is there already: somebody else wrote it"
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
                        f"{self.name}/{key} cannot be read whole: {type(error).__name__}",
                        fix="Restore an earlier version of the object, if the bucket keeps them.",
                    ) from error
        raise AssertionError

    def _open(self, key: str) -> Any:
        """The body of an object."""
        return self._bucket.get(self._prefix + key)["Body"]


class _DamagedError(Exception):
    """The bytes of an object are not those that were written."""


def _checked(body: Any, digest: str | None) -> Iterator[bytes]:
    """The bytes of an object; an error behind them if they are not those that were written."""
    hasher = hashlib.sha256()
    with closing(body):  # not the body's own `with`; see `S3Store.read`
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
    """How the SHA-256 of a file begins, as names of objects have it."""
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
    """Where the copy of a run is, or will be; its last part is the run's name."""
    address = parse_s3(uri)
    where = f"{endpoint_of(address)}/{address.bucket}/{address.prefix}"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    digest = hashlib.sha256(where.encode()).hexdigest()[:12]
    return cache / "geo_ray" / "runs" / use / digest / address.prefix.rpartition("/")[2]


@dataclass(slots=True)
class Copy:
    """A copy, and what is in it.

    Attributes:
        objects: what it is of.
        path: where it is.
    """

    objects: RunObjects
    path: Path
    _epochs: list[int] = field(default_factory=list)
    _files: dict[str, str] = field(default_factory=dict)

    def pull(self, *, models: bool) -> bool:
        """Fetch what is new.

        Args:
            models: fetch models, too.

        Returns:
            Whether lines that the log had are gone: another run actor continued from before them.

        Raises:
            StoreError: the bucket does not answer, refuses, or has damaged objects.
            RunDirectoryError: there is no such run, or the copy cannot be written.
        """
        with self._locked():
            self._load()
            try:
                is_cut = self._pull_events()
                self._pull_files(models=models)
            finally:
                self._save()
        if not self.objects.is_there():  # or not any more
            shutil.rmtree(self.path, ignore_errors=True)
            raise RunDirectoryError(
                f"there is no run {self.objects.name}",
                fix="Name one that `geo-ray train` has made: `run.dir` with its name behind it.",
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
            keep = min([has, *(first for e, first in firsts.items() if e not in self._epochs)])
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
                continue  # it was put together with others meanwhile
            except OSError as error:
                raise unwritable(log, error) from error
            self._epochs = sorted(firsts)
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
        """Note in the copy of which run it is."""
        self._load()
        self._save()

    def _save(self) -> None:
        index = {"uri": self.objects.uri, "epochs": self._epochs, "files": self._files}
        save_text(self.path / _INDEX, json.dumps(index))

    def _load(self) -> None:
        try:
            index = json.loads((self.path / _INDEX).read_text())
            self._epochs = [int(epoch) for epoch in index["epochs"]]
            self._files = {str(name): str(key) for name, key in index["files"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            self._epochs, self._files = [], {}

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
    """The copy of a run to look at, as it is now.

    A run exists from the moment its name is taken, before it has written anything. Its copy always
    has an events file, which is empty until the first event has reached the bucket.

    Raises:
        StoreError, RunDirectoryError: as for `Copy.pull`.
    """
    copy = Copy(RunObjects(uri), copy_path(uri, "seen"))
    copy.pull(models=models)
    return copy.path


def copied_from(path: Path) -> str | None:
    """The address of the run that a directory is a copy of, as it was named last; None: it is none.

    The run itself does not know its address: a bucket can be copied to another one.
    """
    try:
        return str(json.loads((path / _INDEX).read_text())["uri"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def fetch_models(uri: str | None, path: Path) -> None:
    """Complete a copy that is looked at; any other directory has its models.

    Raises:
        StoreError, RunDirectoryError: as for `Copy.pull`.
    """
    if uri is not None and path == copy_path(uri, "seen"):
        Copy(RunObjects(uri), path).pull(models=True)


def pass_on(uri: str | None, path: Path) -> None:
    """Say what was left in a copy for the run actor in the bucket, where that looks.

    Raises:
        StoreError: the bucket does not answer or refuses.
    """
    for request in [] if uri is None else sorted((path / REQUESTS).iterdir()):
        if not request.name.startswith("."):
            RunObjects(str(uri)).ask(request.name, request.read_bytes())
            request.unlink(missing_ok=True)


def empty_copy(uri: str) -> Path:
    """The copy of a new run.

    Raises:
        RunDirectoryError: it cannot be made.
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
    """The copy of a run to go on with: made anew, unless this machine knows as much or more.

    It does if what drove the run here could not reach the bucket in the end: the copy then has the
    only end of the log, or the only model.

    Raises:
        StoreError, RunDirectoryError: as for `Copy.pull`.
    """
    objects, path = RunObjects(uri), copy_path(uri, "driven")
    if is_ahead(objects, path):
        for name, version in objects.files().items():  # an earlier copy may have ended early
            if not (path / name).exists():
                objects.get_file(version, path / name)
        Copy(objects, path).note_origin()
        return path
    shutil.rmtree(path, ignore_errors=True)
    Copy(objects, path).pull(models=True)
    return path


def is_ahead(objects: RunObjects, path: Path) -> bool:
    """Whether the log of a copy has all that the bucket has, or more."""
    log = path / EVENTS_FILE
    has = log.stat().st_size if log.exists() else 0
    if not has:
        return False
    pieces = chain(objects.segments())
    return has >= length_of(pieces) and objects.is_beginning(pieces, log)
