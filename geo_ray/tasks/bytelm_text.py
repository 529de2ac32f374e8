"""Real text that every machine with Python has: the sources of its standard library."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from geo_ray.errors import TaskLoadError

_SKIPPED = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "encodings"}
)
# Tests are much and odd, encodings are tables: neither is the kind of text that the rest is.
_HELDOUT_ONE_IN = 10


def stdlib_texts(max_bytes: int) -> tuple[bytes, bytes]:
    """Return (training text, held-out text) from distinct files.

    Which part a file is in, and the order of the files, follow digests of their names: fixed for
    one release of Python, and a small `max_bytes` is still a mixture of the whole library.

    Args:
        max_bytes: cap of both texts together; a tenth of it is for the held-out text.

    Raises:
        TaskLoadError: the interpreter has no library sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    named = [(path.relative_to(root).as_posix(), path) for path in root.rglob("*.py")
             if not _SKIPPED & set(path.relative_to(root).parts[:-1])]  # fmt: skip
    named.sort(key=lambda item: (_digest(item[0]), item[0]))
    parts: tuple[list[Path], list[Path]] = ([], [])
    for name, path in named:
        parts[_digest(name) % _HELDOUT_ONE_IN == 0].append(path)
    heldout_bytes = max_bytes // _HELDOUT_ONE_IN
    train, heldout = (
        _read(parts[0], max_bytes - heldout_bytes),
        _read(parts[1], heldout_bytes),
    )
    if not train or not heldout:
        raise TaskLoadError(
            f"the standard library at {root} has no .py sources to train on",
            fix="Use a Python whose library is installed as files.",
        )
    return train, heldout


def cut(text: bytes, context: int) -> npt.NDArray[np.uint8]:
    """Cut text into rows uint8 (N, context + 1); neighbours share a byte, a short tail is dropped.

    The shared byte is input to one row and target of the other, so each byte is predicted once.
    """
    tokens = np.frombuffer(text, np.uint8)
    rows = max(0, (len(tokens) - 1) // context)
    starts_N = np.arange(rows)[:, None] * context
    rows_NT: npt.NDArray[np.uint8] = tokens[starts_N + np.arange(context + 1)]
    return rows_NT


def _read(paths: Sequence[Path], max_bytes: int) -> bytes:
    pieces: list[bytes] = []
    room = max_bytes
    for path in paths:
        if room <= 0:
            break
        pieces.append(path.read_bytes()[:room])
        room -= len(pieces[-1])
    return b"".join(pieces)


def _digest(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
