"""Takes in parts of checkpoints, at the driver, from processes that do not see the run's directory.

It opens when the first such process is found. A part comes in pieces, is a file only when the last
one is synced, and counts only with the manifest, for which it is read and hashed like any other. At
a resume parts are given out the other way.

    server or bridge ── CarriedFolder ──▶ PartDesk of the driver ──▶ the run's directory
"""

from __future__ import annotations

import os
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from pydantic import ValidationError

from geo_ray.checkpoint.local_folder import directory_of
from geo_ray.checkpoint.manifest import MANIFEST_FILE, PART_SUFFIX, PartInfo
from geo_ray.checkpoint.store_regions import Crossed
from geo_ray.errors import CheckpointCorruptError, CheckpointError, FrameError, RunDirectoryError
from geo_ray.transport.config import LanConfig
from geo_ray.transport.lan.server import LanConnection, LanServer
from geo_ray.transport.security.secret_sealer import seal_secret
from geo_ray.transport.wire import fields
from geo_ray.transport.wire.meta import Meta
from geo_ray.transport.wire.sockets import Address
from geo_ray.util.atomic_file import AtomicFile, unwritable

DESK_KEY: Final = "desk"
PIECE_BYTES: Final = 4 << 20
MODEL: Final = "model"
"""The folder of final models, which is the run's directory itself."""
DESK_LAN: Final = LanConfig(
    encrypt_payload=True, shared_memory=False, max_payload_bytes=PIECE_BYTES
)
_KEY_BYTES: Final = 32
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class DeskGrant:
    """What a process is given that does not see the run's directory.

    Attributes:
        address: where the desk listens.
        key: the desk's, sealed for this process.
    """

    address: Address
    key: bytes


@dataclass(slots=True)
class _Coming:
    """A file of which some has come.

    Attributes:
        upload: its sender's number for it.
        file: what has come.
        come: its bytes.
        lock: held by who uses or closes the file: two connections may bring it.
    """

    upload: str
    file: AtomicFile
    come: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def discard(self) -> None:
        """Remove what has come, unless it is committed."""
        with self.lock:
            self.file.discard()


class PartDesk:
    """See the module's docstring. It cannot be pickled.

    Args:
        checkpoints: the directory of the run's checkpoints.
        run_dir: the run's directory.
        region: where both are, for the bill.
        host: tells where to listen; asked when the desk opens.
    """

    def __init__(
        self, checkpoints: Path, run_dir: Path, region: str, host: Callable[[], str]
    ) -> None:
        self.region = region
        self._checkpoints, self._run_dir, self._host = checkpoints, run_dir, host
        self._key = secrets.token_bytes(_KEY_BYTES)
        self._lock = threading.Lock()
        self._server: LanServer | None = None
        self._coming: dict[Path, _Coming] = {}
        self._done: dict[Path, str] = {}  # the upload that a file is of
        self._crossed: Counter[tuple[str, str]] = Counter()
        self._told: Counter[tuple[str, str]] = Counter()

    # -------------------------------------------------------------- who is let in

    def admit(
        self,
        servers: Mapping[Key, Any],
        collect: Callable[[Mapping[Key, Any]], Mapping[Key, Any]],
    ) -> None:
        """Let those use the desk, of some actors, that do not see the run's directory.

        Args:
            servers: actors, by whatever key.
            collect: waits for their answers.
        """
        told = collect({key: actor.sight.remote() for key, actor in servers.items()})
        blind = {key: public for key, public in told.items() if public is not None}
        if blind:
            grants = {key: self.grant(public) for key, public in blind.items()}
            collect({key: servers[key].use_desk.remote(grants[key]) for key in blind})

    def grant(self, public: bytes) -> DeskGrant:
        """What a process is given that has told ``public``; opens the desk."""
        with self._lock:
            if self._server is None:
                self._server = LanServer(self._host(), self._key, self.handle, config=DESK_LAN)
            return DeskGrant(self._server.address, seal_secret(self._key, public, DESK_KEY))

    @property
    def is_open(self) -> bool:
        """Whether any process was let in."""
        with self._lock:
            return self._server is not None

    def close(self) -> None:
        """Nothing is taken or given any more; what has not come whole is removed."""
        with self._lock:
            server, self._server = self._server, None
        if server is not None:
            server.close()
        with self._lock:
            left, self._coming = self._coming, {}
        for coming in left.values():
            coming.discard()

    def __reduce__(self) -> str:
        raise TypeError("the desk of a run does not leave the driver")

    # -------------------------------------------------------------- what crosses regions

    def saved(self, parts: Iterable[PartInfo], home: str) -> Crossed:
        """What has moved between regions since this was asked last, whatever the parts were."""
        with self._lock:
            news, self._told = self._crossed - self._told, self._crossed.copy()
            return dict(news)

    resumed = saved

    def crossed(self) -> Crossed:
        """All that has moved between regions so far."""
        with self._lock:
            return dict(self._crossed)

    # -------------------------------------------------------------- requests

    def handle(
        self, connection: LanConnection, meta: Meta, payload: memoryview | None
    ) -> tuple[Meta, memoryview | None]:
        """Answer one request, on the thread of its connection."""
        path, operation = self._path(meta), fields.text(meta, "op")
        region = str(connection.hello.get("region"))
        if operation == "has":
            return {"there": path.exists()}, None
        if operation == "read":
            size = min(fields.count(meta, "bytes"), PIECE_BYTES)
            piece = connection.room(size)
            read = _read(path, fields.count(meta, "offset"), piece)
            self._count(self.region, region, read)
            return {}, piece[:read]
        if operation != "write" or payload is None:
            raise FrameError(f"the desk knows no '{operation}'")
        offset, whole = fields.count(meta, "offset"), fields.count(meta, "whole")
        self._take(path, fields.text(meta, "upload"), offset, payload, whole)
        self._count(region, self.region, payload.nbytes)
        return {}, None

    def _path(self, meta: Meta) -> Path:
        """A file of the run that a process may ask for: the manifest, a part, or the model."""
        folder, file = meta.get("folder"), fields.text(meta, "file")
        directory = self._run_dir
        if folder != MODEL:
            directory = directory_of(self._checkpoints, fields.count(meta, "folder"))
        if file == MANIFEST_FILE and meta.get("op") == "has":
            return directory / file
        try:
            name = file.removesuffix(PART_SUFFIX)
            PartInfo(name=name, file=file, bytes=0, sha256="0" * 64)
        except ValidationError as error:
            raise CheckpointError(f"{file!r} is no name of a part") from error
        if folder == MODEL and not name.startswith("model-"):
            raise CheckpointError(f"{file!r} is no model")
        return directory / file

    def _take(self, path: Path, upload: str, offset: int, piece: memoryview, whole: int) -> None:
        with self._lock:
            if self._done.get(path) == upload:  # the answer to the last piece got lost
                return
            coming = self._coming.get(path)
        try:
            if coming is None or coming.upload != upload:
                coming = self._begin(path, upload, offset, coming)
            with coming.lock:
                is_whole = _append(path, coming, offset, piece, whole)
        except OSError as error:
            self._end(path, None)
            raise unwritable(path, error) from error
        if is_whole:
            self._end(path, upload)

    def _begin(self, path: Path, upload: str, offset: int, before: _Coming | None) -> _Coming:
        if before is not None:
            before.discard()
        if offset:
            raise RunDirectoryError(f"{path}: its beginning is not here")
        _refuse_late(path)
        coming = _Coming(upload, AtomicFile(path))
        with self._lock:
            self._coming[path] = coming
        return coming

    def _end(self, path: Path, done: str | None) -> None:
        with self._lock:
            coming = self._coming.pop(path, None)
            if done is not None:
                self._done = {p: u for p, u in self._done.items() if p.parent == path.parent}
                self._done[path] = done
        if coming is not None:
            coming.discard()

    def _count(self, src: str, dst: str, num_bytes: int) -> None:
        if src != dst:
            with self._lock:
                self._crossed[src, dst] += num_bytes


def _append(path: Path, coming: _Coming, offset: int, piece: memoryview, whole: int) -> bool:
    """Take a piece of a file, unless it has come before; whether the file is there by now."""
    if offset + piece.nbytes == coming.come:  # its sender has not heard that it has come
        return False
    if offset != coming.come or offset + piece.nbytes > whole:
        raise FrameError(f"{path.name}: {offset} follows {coming.come} of {whole} bytes")
    coming.file.write(piece)
    coming.come += piece.nbytes
    if coming.come < whole:
        return False
    _refuse_late(path)
    coming.file.commit()
    return True


def _refuse_late(path: Path) -> None:
    if (path.parent / MANIFEST_FILE).exists():
        raise CheckpointError(f"{path.parent} is committed already; {path.name} comes too late")


def _read(path: Path, offset: int, room: memoryview) -> int:
    """Bytes of a part from ``offset`` on; how many there were."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            read = 0
            while read < room.nbytes and (
                size := os.preadv(descriptor, [room[read:]], offset + read)
            ):
                read += size
            return read
        finally:
            os.close(descriptor)
    except OSError as error:
        raise CheckpointCorruptError(f"{path}: cannot be read: {error.strerror}") from error
