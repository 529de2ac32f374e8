"""A run's directory in a bucket, object by object. Every object is written once.

    PREFIX/NAME/begun                                         who made the run
    PREFIX/NAME/lease.json/...                                who drives it
    PREFIX/NAME/events/EPOCH-START-END-SHA.jsonl              its log in pieces
    PREFIX/NAME/files/EPOCH-VERSION-SHA/summary.json          all other files
    PREFIX/NAME/requests/...                                  what users ask of it
    PREFIX/NAME/checkpoints/ckpt-...                          as in any store

Of the versions of a file that of the highest epoch counts, and of these the newest. So what a
driver writes late, after another has taken the run over, counts for nothing.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Final, TypeVar

from geo_ray.errors import StoreError
from geo_ray.job.far.segments import Segment, segment_named
from geo_ray.lease.s3_store import LEASE_LIMITS, S3ConditionalStore
from geo_ray.stores.bucket import Bucket, RequestLimits, broken_downloads
from geo_ray.stores.paths import checked_path, problem_of_path
from geo_ray.stores.upload import PIECE_BYTES, upload_once
from geo_ray.stores.uri import parse_s3
from geo_ray.util.atomic_file import save_chunks

_BLOCK_BYTES: Final = 1 << 20
_DIGEST: Final = 16
_TRIES: Final = 3
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
    """See the module's docstring. Every method raises `StoreError` where the bucket does.

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
                if attempt == _TRIES:
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
    seen = hashlib.sha256()
    with closing(body):  # not the body's own `with`; see `S3Store.read`
        for block in body.iter_chunks(_BLOCK_BYTES):
            seen.update(block)
            yield bytes(block)
    if digest not in (None, seen.hexdigest()[:_DIGEST]):
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
