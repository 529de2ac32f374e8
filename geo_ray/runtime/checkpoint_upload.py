"""Uploads checkpoint parts from processes that do not share the run's directory to the run actor.

The server opens when the first such process is found (by a marker file in the directory). A part
arrives in pieces, becomes a file when the last one is synced, and is valid only with the manifest,
for which it is read and hashed. On resume parts are served in the other direction.

    server or bridge -- UploadFolder --> CheckpointUploadServer --> the run's directory
"""

from __future__ import annotations

import io
import logging
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import ray
from pydantic import ValidationError

from geo_ray.base.errors import (
    CheckpointCorruptError,
    CheckpointError,
    DeadlineExceededError,
    FrameError,
    LinkDownError,
    RunDirectoryError,
)
from geo_ray.base.files import AtomicFile, Failpoint, no_failpoint, save_text, unwritable
from geo_ray.experiment.experiment import Experiment
from geo_ray.ray_cluster import ray_internals
from geo_ray.ray_cluster.labels import REGION_LABEL
from geo_ray.runs.checkpoints import places_of
from geo_ray.runs.directory import RunDirectory
from geo_ray.runtime.spec import RunSpec
from geo_ray.runtime.state_transfer import StreamedParts
from geo_ray.storage.folders import directory_of
from geo_ray.storage.manifest import MANIFEST_FILE, PART_SUFFIX, PartInfo
from geo_ray.storage.places import Crossed
from geo_ray.transport.config import LanConfig
from geo_ray.transport.lan import LanClient, LanConnection, LanServer
from geo_ray.transport.security.process_keys import SecretReceiver, seal_secret
from geo_ray.transport.wire import fields
from geo_ray.transport.wire.fields import Meta
from geo_ray.transport.wire.sockets import Address

SIGHT_FILE: Final = "run_id"


def write_run_marker(run_dir: Path, run_id: str) -> None:
    """Write a marker that identifies the directory as this run's.

    Raises:
        RunDirectoryError: it cannot be written.
    """
    save_text(run_dir / SIGHT_FILE, run_id)


def shares_run_directory(run_dir: Path, run_id: str) -> bool:
    """Return whether this process can access the directory that the run actor uses."""
    try:
        return (run_dir / SIGHT_FILE).read_text() == run_id
    except (OSError, UnicodeDecodeError):
        return False


def address_here() -> str:
    """Return the address at which other nodes reach this one."""
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def region_here() -> str | None:
    """Return the region of this process's node; None if the node has no region."""
    own = ray.get_runtime_context().get_node_id()
    labels = [node["Labels"] for node in ray_internals.nodes() if node["NodeID"] == own]
    return labels[0].get(REGION_LABEL) if labels else None


UPLOAD_KEY: Final = "upload_server"
PIECE_BYTES: Final = 4 << 20
MODEL: Final = "model"
"""The folder of final models, which is the run's directory itself."""
UPLOAD_LAN: Final = LanConfig(
    encrypt_payload=True, shared_memory=False, max_payload_bytes=PIECE_BYTES
)
_KEY_BYTES: Final = 32
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class UploadGrant:
    """Access to the upload server for one process.

    Attributes:
        address: where the upload server listens.
        key: the upload server's key, sealed for this process.
    """

    address: Address
    key: bytes


@dataclass(slots=True)
class _Coming:
    """A partially received file.

    Attributes:
        upload: id of the upload, chosen by the sender.
        file: the received part.
        come: number of received bytes.
        lock: held while the file is used or closed: two connections may write it.
    """

    upload: str
    file: AtomicFile
    come: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def discard(self) -> None:
        """Remove the partial file, unless it is committed."""
        with self.lock:
            self.file.discard()


class CheckpointUploadServer:
    """Receives parts of checkpoints from processes without access to the run's directory.

    It opens when the first such process registers. It cannot be pickled. See the module.

    Args:
        checkpoints: the directory of the run's checkpoints.
        run_dir: the run's directory.
        region: region of both, for the bill.
        host: returns where to listen; called when the upload server opens.
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
        self._done: dict[Path, str] = {}  # id of the upload that wrote a file
        self._crossed: Counter[tuple[str, str]] = Counter()
        self._reported: Counter[tuple[str, str]] = Counter()

    # -------------------------------------------------------------- access

    def admit(
        self,
        servers: Mapping[Key, Any],
        collect: Callable[[Mapping[Key, Any]], Mapping[Key, Any]],
    ) -> None:
        """Give access to those actors that cannot access the run's directory.

        Args:
            servers: actors, by any key.
            collect: waits for their answers.
        """
        replies = collect({key: actor.upload_key.remote() for key, actor in servers.items()})
        without_directory = {key: public for key, public in replies.items() if public is not None}
        if without_directory:
            grants = {key: self.grant(public) for key, public in without_directory.items()}
            collect(
                {
                    key: servers[key].use_upload_server.remote(grants[key])
                    for key in without_directory
                }
            )

    def grant(self, public: bytes) -> UploadGrant:
        """Grant access to the process with the public key ``public``; opens the upload server."""
        with self._lock:
            if self._server is None:
                self._server = LanServer(self._host(), self._key, self.handle, config=UPLOAD_LAN)
            return UploadGrant(self._server.address, seal_secret(self._key, public, UPLOAD_KEY))

    @property
    def is_open(self) -> bool:
        """Whether any process was given access."""
        with self._lock:
            return self._server is not None

    def close(self) -> None:
        """Stop serving, and remove partial files."""
        with self._lock:
            server, self._server = self._server, None
        if server is not None:
            server.close()
        with self._lock:
            left, self._coming = self._coming, {}
        for coming in left.values():
            coming.discard()

    def __reduce__(self) -> str:
        raise TypeError("the upload server of a run cannot be pickled")

    # -------------------------------------------------------------- what crosses regions

    def saved(self, parts: Iterable[PartInfo], leader: str) -> Crossed:
        """Return the bytes moved between regions since the last call."""
        with self._lock:
            news, self._reported = self._crossed - self._reported, self._crossed.copy()
            return dict(news)

    resumed = saved

    def crossed(self) -> Crossed:
        """Return all bytes moved between regions so far."""
        with self._lock:
            return dict(self._crossed)

    # -------------------------------------------------------------- requests

    def handle(
        self, connection: LanConnection, meta: Meta, payload: memoryview | None
    ) -> tuple[Meta, memoryview | None]:
        """Handle one request, on the thread of its connection."""
        path, operation = self._path(meta), fields.text(meta, "op")
        region = str(connection.hello.get("region"))
        if operation == "has":
            return {"there": path.exists()}, None
        if operation == "read":
            size = min(fields.count(meta, "bytes"), PIECE_BYTES)
            piece = connection.buffer(size)
            read = _read(path, fields.count(meta, "offset"), piece)
            self._count(self.region, region, read)
            return {}, piece[:read]
        if operation != "write" or payload is None:
            raise FrameError(f"unknown operation '{operation}' for the upload server")
        offset, whole = fields.count(meta, "offset"), fields.count(meta, "whole")
        self._take(path, fields.text(meta, "upload"), offset, payload, whole)
        self._count(region, self.region, payload.nbytes)
        return {}, None

    def _path(self, meta: Meta) -> Path:
        """Return the path of a file that clients may access: the manifest, a part, or the model."""
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
            raise CheckpointError(f"{file!r} is not the name of a part") from error
        if folder == MODEL and not name.startswith("model-"):
            raise CheckpointError(f"{file!r} is not a model")
        return directory / file

    def _take(self, path: Path, upload: str, offset: int, piece: memoryview, whole: int) -> None:
        with self._lock:
            if self._done.get(path) == upload:  # the answer to the last piece was lost
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
            raise RunDirectoryError(f"{path}: its beginning is missing")
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
    """Append a piece, unless it was received before; return whether the file is complete."""
    if offset + piece.nbytes == coming.come:  # a repeated piece, whose answer was lost
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
        raise CheckpointError(f"{path.parent} is committed already; {path.name} is too late")


def _read(path: Path, offset: int, buffer: memoryview) -> int:
    """Read bytes of a part from ``offset``; return their number."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            read = 0
            while read < buffer.nbytes and (
                size := os.preadv(descriptor, [buffer[read:]], offset + read)
            ):
                read += size
            return read
        finally:
            os.close(descriptor)
    except OSError as error:
        raise CheckpointCorruptError(f"{path}: cannot be read: {error.strerror}") from error


log = logging.getLogger(__name__)
_UNANSWERED_S: Final = 60.0
_ATTEMPTS: Final = 6
_WAIT_S: Final = 0.5  # before the second attempt; doubles with each further one


class UploadRegistration:
    """Registration of a process at the upload server of its run, if it needs one.

    Args:
        spec: the run.
        region: the process's region.
    """

    def __init__(self, spec: RunSpec, region: str) -> None:
        self._spec, self._region = spec, region
        self._receiver = SecretReceiver()

    def upload_key(self) -> bytes | None:
        """Return None if this process can access the run's directory; else its public key."""
        spec = self._spec
        if spec.places.is_remote or shares_run_directory(Path(spec.run_dir), spec.run_id):
            return None
        return self._receiver.public

    def spec(self, grant: UploadGrant) -> RunSpec:
        """Return the run's specification with uploads instead of the run's directory."""
        key = self._receiver.open(grant.key, UPLOAD_KEY)
        places = UploadPlaces(
            UploadClient(grant.address, key, self._region), str(self._spec.places)
        )
        resume = self._spec.resume
        if resume is not None:
            resume = replace(resume, places=places)
        return replace(self._spec, places=places, resume=resume)


@dataclass(frozen=True, slots=True)
class UploadClient:
    """Client of the upload server, with a connection for each file; retries lost requests.

    Attributes:
        address: address of the upload server.
        key: key of the upload server.
        region: this process's region.
    """

    address: Address
    key: bytes
    region: str

    def ask(
        self, client: LanClient | None, meta: Meta, payload: memoryview | None = None
    ) -> _Response:
        """Send a request; return the answer and the connection to continue with.

        Raises:
            LinkDownError, DeadlineExceededError: no answer after several attempts.
            GeoRayError: the error that the upload server raised.
        """
        for attempt in range(_ATTEMPTS):
            try:
                if client is None or client.is_closed:
                    hello: Meta = {"peer": f"{self.region}/part", "region": self.region}
                    client = LanClient(self.address, self.key, hello, config=UPLOAD_LAN)
                reply, answer = client.request(meta, payload, timeout_s=_UNANSWERED_S)
                return _Response(client, reply, answer)
            except (LinkDownError, DeadlineExceededError) as error:
                if client is not None:
                    client.close()
                if attempt + 1 == _ATTEMPTS:
                    raise
                log.warning("the run actor's machine does not answer: %s", error.message)
                time.sleep(_WAIT_S * 2**attempt)
        raise AssertionError("not reached")


@dataclass(frozen=True, slots=True)
class _Response:
    client: LanClient
    meta: Meta
    payload: memoryview | None


@dataclass(frozen=True, slots=True)
class UploadPlaces:
    """A `PartPlaces` on the run actor's machine.

    Attributes:
        line: client of the upload server.
        name: name of the directory, for messages.
    """

    line: UploadClient
    name: str

    @property
    def is_remote(self) -> bool:
        """See `Root.is_remote`."""
        return True

    def __str__(self) -> str:
        return f"{self.name} of the run actor's machine"

    def folder(self, id: int) -> UploadFolder:
        """See `PartPlaces.folder`."""
        return UploadFolder(self.line, id, str(self))

    def model_folder(self, run_dir: str) -> UploadFolder:
        """See `PartPlaces.model_folder`."""
        return UploadFolder(self.line, MODEL, f"{run_dir} of the run actor's machine")

    def prepare(self, region: str | None) -> None:
        """See `PartPlaces.prepare`; there is nothing to load."""


@dataclass(frozen=True, slots=True)
class UploadFolder:
    """A `PartFolder` on the run actor's machine.

    Attributes:
        line: client of the upload server.
        folder: a checkpoint's id, or ``"model"``.
        name: name of the folder, for messages.
    """

    line: UploadClient
    folder: int | str
    name: str

    def name_of(self, file: str) -> str:
        """See `PartTarget.name_of`."""
        return f"{file} in {self.name}"

    def has(self, file: str) -> bool:
        """See `PartTarget.has`."""
        response = self.line.ask(None, self._about("has", file))
        response.client.close()
        return response.meta.get("there") is True

    def write(
        self,
        file: str,
        chunks: Iterable[memoryview | bytes],
        num_bytes: int,
        failpoint: Failpoint = no_failpoint,
    ) -> None:
        """See `PartTarget.write`; each piece is sent when complete, and acknowledged."""
        client: LanClient | None = None
        about = self._about("write", file)
        about |= {"upload": secrets.token_hex(8), "whole": num_bytes}
        offset = 0
        try:
            for piece in _in_pieces(chunks):
                client = self.line.ask(client, about | {"offset": offset}, piece).client
                offset += piece.nbytes
                failpoint("piece_sent")
        finally:
            if client is not None:
                client.close()

    def open(self, file: str, num_bytes: int | None = None) -> io.RawIOBase:
        """See `PartSource.open`."""
        client: LanClient | None = None

        def read(file: str, offset: int, size: int) -> bytes:
            nonlocal client
            about = self._about("read", file) | {"offset": offset, "bytes": size}
            response = self.line.ask(client, about)
            client = response.client
            return b"" if response.payload is None else bytes(response.payload)

        def close() -> None:
            if client is not None:
                client.close()

        return StreamedParts(self.name, _later(read), 1, close).open(file, num_bytes)

    def _about(self, operation: str, file: str) -> Meta:
        return {"op": operation, "folder": self.folder, "file": file}


def _later(
    read: Callable[[str, int, int], bytes],
) -> Callable[[str, int, int], Callable[[], bytes]]:
    return lambda file, offset, size: partial(read, file, offset, size)


def _in_pieces(chunks: Iterable[memoryview | bytes]) -> Iterator[memoryview]:
    """Split the bytes into pieces of equal size, except the last; each is valid until the next."""
    buffer, held = bytearray(PIECE_BYTES), 0
    view = memoryview(buffer)
    for chunk in chunks:
        rest = memoryview(chunk).cast("B")
        while rest:
            size = min(len(rest), PIECE_BYTES - held)
            view[held : held + size] = rest[:size]
            held, rest = held + size, rest[size:]
            if held == PIECE_BYTES:
                yield view
                held = 0
    if held:
        yield view[:held]


def upload_server_of(run: RunDirectory, experiment: Experiment) -> CheckpointUploadServer | None:
    """Return the upload server for machines without access to the run's directory.

    Args:
        run: its directory.
        experiment: the run.

    Returns:
        The upload server; None if checkpoints are written to stores.
    """
    if places_of(run, experiment.checkpoint).is_remote:
        return None
    here = region_here()
    near = here if here in experiment.region_names else experiment.averager_region
    region = experiment.checkpoint.store_region or near
    return CheckpointUploadServer(run.checkpoints, run.path, region, address_here)
