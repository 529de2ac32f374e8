"""Memory shared by two processes of one host, found by name and verified by a nonce.

`multiprocessing.shared_memory` is not used: its resource tracker unlinks segments that other
processes still use. The file is unlinked as soon as both sides have it mapped, so a killed process
leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import hmac
import mmap
import os
import re
import secrets
import stat
import struct
import tempfile
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from geo_ray.errors import TransportError

_PAGE_BYTES: Final = 4096
_HEADER: Final = struct.Struct("<8s16s16sQ")  # magic, creator's nonce, attacher's proof, size
_MAGIC: Final = b"geo_ray1"
_PROOF_AT: Final = 24
_NONCE_BYTES: Final = 16
_CAN_RESERVE: Final = hasattr(os, "posix_fallocate")  # macOS has not
_NAME: Final = re.compile(r"geo_ray-[0-9a-f]{32}")


class SharedBuffer:
    """A block of zeroed memory shared by two processes; build it with `create` or `attach`.

    The data begin at a page's boundary, hence 64-byte aligned. Nothing orders the two sides'
    accesses: exchange a message before reading what the other wrote.

    Args:
        path: the backing file.
        mapping: the mapped file, a header page and then the data.
        nonce: the creator's, 16 bytes.
        size_bytes: length of the data.
    """

    def __init__(self, path: Path, mapping: mmap.mmap, nonce: bytes, size_bytes: int) -> None:
        self.name = path.name
        self.nonce = nonce
        self.size_bytes = size_bytes
        self._path = path
        self._mapping = mapping
        self._view = memoryview(mapping)[_PAGE_BYTES : _PAGE_BYTES + size_bytes]

    @classmethod
    def create(cls, size_bytes: int) -> SharedBuffer:
        """Reserve memory: in /dev/shm where that exists and has room, else in the temp directory.

        Raises:
            TransportError: no place has room.
        """
        if size_bytes <= 0:
            raise TransportError(f"cannot share {size_bytes} bytes", fix="Share at least one.")
        nonce = secrets.token_bytes(_NONCE_BYTES)
        name = f"geo_ray-{secrets.token_hex(16)}"
        problems = []
        for directory in _directories():
            path = directory / name
            try:
                mapping = _make(path, _PAGE_BYTES + size_bytes)
            except OSError as error:
                problems.append(f"{directory}: {error.strerror}")
                continue
            _HEADER.pack_into(mapping, 0, _MAGIC, nonce, bytes(_NONCE_BYTES), size_bytes)
            return cls(path, mapping, nonce, size_bytes)
        raise TransportError(
            f"no room for {size_bytes} shared bytes ({'; '.join(problems)})",
            fix="Free space in the named directories.",
        )

    @classmethod
    def attach(cls, name: str, nonce: bytes) -> SharedBuffer:
        """Map the buffer that another process of this host created, and leave a proof in it.

        Raises:
            TransportError: there is no such buffer here (another host or container), or it is
                not the one that the nonce belongs to.
        """
        if not _NAME.fullmatch(name):
            raise TransportError("a shared buffer's name is malformed")
        for directory in _directories():
            try:
                mapping = _open(directory / name)
            except OSError:
                continue
            size_bytes = _check(mapping, nonce)
            if size_bytes is None:
                mapping.close()
                break
            mapping[_PROOF_AT : _PROOF_AT + _NONCE_BYTES] = _proof(nonce)
            return cls(directory / name, mapping, nonce, size_bytes)
        raise TransportError(f"shared buffer {name} is not on this host")

    @property
    def view(self) -> memoryview:
        """Return the data as writable bytes."""
        return self._view

    def array(self) -> npt.NDArray[np.float32]:
        """The data as float32, shape (size_bytes // 4,), writable and without a copy."""
        return np.frombuffer(self._view[: self.size_bytes // 4 * 4], dtype=np.float32)

    def proven(self) -> bool:
        """Return whether the attacher's proof is visible here, so that both see the same memory."""
        seen = self._mapping[_PROOF_AT : _PROOF_AT + _NONCE_BYTES]
        return hmac.compare_digest(seen, _proof(self.nonce))

    def unlink(self) -> None:
        """Remove the file; processes that have mapped it keep it. Call once all have attached."""
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """Release the mapping; while arrays are in use, the last of them releases it."""
        self._view.release()
        with contextlib.suppress(BufferError):
            self._mapping.close()


def _directories() -> list[Path]:
    memory = Path("/dev/shm")  # noqa: S108  (files there get random names and mode 0600)
    usual = Path(tempfile.gettempdir())
    return [memory, usual] if memory.is_dir() else [usual]


def _make(path: Path, size_bytes: int) -> mmap.mmap:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(path, flags, 0o600)
    try:
        # Reserves the pages now, so that a full /dev/shm is an error here and not a SIGBUS later.
        os.posix_fallocate(fd, 0, size_bytes) if _CAN_RESERVE else os.truncate(fd, size_bytes)
        return mmap.mmap(fd, size_bytes)
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(fd)


def _open(path: Path) -> mmap.mmap:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise PermissionError(f"{path} is no file of this user")
        if status.st_size < _PAGE_BYTES:
            raise OSError(f"{path} is too short")
        return mmap.mmap(fd, status.st_size)
    finally:
        os.close(fd)


def _check(mapping: mmap.mmap, nonce: bytes) -> int | None:
    magic, seen, _, size_bytes = _HEADER.unpack_from(mapping, 0)
    fits = len(mapping) == _PAGE_BYTES + size_bytes
    return (
        int(size_bytes) if magic == _MAGIC and hmac.compare_digest(seen, nonce) and fits else None
    )


def _proof(nonce: bytes) -> bytes:
    return bytes(byte ^ 0xFF for byte in nonce)
