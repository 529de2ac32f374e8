"""A process's end of the desk: folders whose files lie on the driver's machine."""

from __future__ import annotations

import io
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from geo_ray.errors import DeadlineExceededError, LinkDownError
from geo_ray.runtime.actors.copy_transfer import CarriedParts
from geo_ray.runtime.actors.spec import RunSpec
from geo_ray.runtime.desk.part_desk import DESK_KEY, DESK_LAN, MODEL, PIECE_BYTES, DeskGrant
from geo_ray.runtime.desk.sight import sees
from geo_ray.transport.lan.client import LanClient
from geo_ray.transport.security.secret_sealer import SecretReceiver
from geo_ray.transport.wire.meta import Meta
from geo_ray.transport.wire.sockets import Address
from geo_ray.util.atomic_file import Failpoint, no_failpoint

log = logging.getLogger(__name__)
_SILENT_S: Final = 60.0
_ATTEMPTS: Final = 6
_WAIT_S: Final = 0.5  # before the second attempt; twice as long before each further one


class DeskEntry:
    """A process's way to the desk of its run, if it needs one.

    Args:
        spec: the run.
        region: the process's.
    """

    def __init__(self, spec: RunSpec, region: str) -> None:
        self._spec, self._region = spec, region
        self._receiver = SecretReceiver()

    def sight(self) -> bytes | None:
        """None if this process sees where parts go; else the public half of its key."""
        spec = self._spec
        if spec.places.far or sees(Path(spec.run_dir), spec.run_id):
            return None
        return self._receiver.public

    def spec(self, grant: DeskGrant) -> RunSpec:
        """The run as this process goes on with it, whose parts go to the desk."""
        key = self._receiver.open(grant.key, DESK_KEY)
        places = CarriedPlaces(DeskLine(grant.address, key, self._region), str(self._spec.places))
        resume = self._spec.resume
        if resume is not None:
            resume = replace(resume, places=places)
        return replace(self._spec, places=places, resume=resume)


@dataclass(frozen=True, slots=True)
class DeskLine:
    """Asks the desk, on a connection for each file; asks again where one is lost.

    Attributes:
        address: the desk's.
        key: the desk's.
        region: this process's.
    """

    address: Address
    key: bytes
    region: str

    def ask(self, client: LanClient | None, meta: Meta, payload: memoryview | None = None) -> _Told:
        """One answer, and the connection to go on with.

        Raises:
            LinkDownError, DeadlineExceededError: there was none, also not after some attempts.
            GeoRayError: what the desk raised.
        """
        for attempt in range(_ATTEMPTS):
            try:
                if client is None or client.is_closed:
                    hello: Meta = {"peer": f"{self.region}/part", "region": self.region}
                    client = LanClient(self.address, self.key, hello, config=DESK_LAN)
                _, answer = told = client.request(meta, payload, timeout_s=_SILENT_S)
                return _Told(client, told[0], answer)
            except (LinkDownError, DeadlineExceededError) as error:
                if client is not None:
                    client.close()
                if attempt + 1 == _ATTEMPTS:
                    raise
                log.warning("the driver's machine does not answer: %s", error.message)
                time.sleep(_WAIT_S * 2**attempt)
        raise AssertionError("not reached")


@dataclass(frozen=True, slots=True)
class _Told:
    client: LanClient
    meta: Meta
    payload: memoryview | None


@dataclass(frozen=True, slots=True)
class CarriedPlaces:
    """A `PartPlaces` on the driver's machine.

    Attributes:
        line: the way there.
        name: what they are called there.
    """

    line: DeskLine
    name: str

    @property
    def far(self) -> bool:
        """See `Root.far`."""
        return True

    def __str__(self) -> str:
        return f"{self.name} of the driver's machine"

    def folder(self, id: int) -> CarriedFolder:
        """See `PartPlaces.folder`."""
        return CarriedFolder(self.line, id, str(self))

    def model_folder(self, run_dir: str) -> CarriedFolder:
        """See `PartPlaces.model_folder`."""
        return CarriedFolder(self.line, MODEL, f"{run_dir} of the driver's machine")

    def prepare(self, region: str | None) -> None:
        """See `PartPlaces.prepare`; there is nothing to load."""


@dataclass(frozen=True, slots=True)
class CarriedFolder:
    """A `PartFolder` on the driver's machine.

    Attributes:
        line: the way there.
        folder: a checkpoint's id, or ``"model"``.
        name: of the folder, for messages.
    """

    line: DeskLine
    folder: int | str
    name: str

    def name_of(self, file: str) -> str:
        """See `PartTarget.name_of`."""
        return f"{file} in {self.name}"

    def has(self, file: str) -> bool:
        """See `PartTarget.has`."""
        told = self.line.ask(None, self._about("has", file))
        told.client.close()
        return told.meta.get("there") is True

    def write(
        self,
        file: str,
        chunks: Iterable[memoryview | bytes],
        num_bytes: int,
        failpoint: Failpoint = no_failpoint,
    ) -> None:
        """See `PartTarget.write`; a piece is sent when it is whole, and waited for."""
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
            told = self.line.ask(client, about)
            client = told.client
            return b"" if told.payload is None else bytes(told.payload)

        def close() -> None:
            if client is not None:
                client.close()

        return CarriedParts(self.name, _later(read), 1, close).open(file, num_bytes)

    def _about(self, operation: str, file: str) -> Meta:
        return {"op": operation, "folder": self.folder, "file": file}


def _later(
    read: Callable[[str, int, int], bytes],
) -> Callable[[str, int, int], Callable[[], bytes]]:
    return lambda file, offset, size: partial(read, file, offset, size)


def _in_pieces(chunks: Iterable[memoryview | bytes]) -> Iterator[memoryview]:
    """The same bytes in pieces of one size, but the last; each is valid until the next."""
    room, held = bytearray(PIECE_BYTES), 0
    view = memoryview(room)
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
