"""A small file that is there whole or not at all, with the mode it needs from its first byte on."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path
from typing import Final

PRIVATE: Final = 0o600
PUBLIC: Final = 0o644


def write_atomic(path: Path, data: bytes, mode: int = PUBLIC) -> None:
    """Write beside ``path``, sync, and rename over it.

    Args:
        path: the file; its directory exists.
        data: the content.
        mode: permissions, never wider than that even for a moment.

    Raises:
        OSError: as the system says; the temporary file is gone by then.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)  # else a loss of power may undo the rename
    finally:
        os.close(directory)
