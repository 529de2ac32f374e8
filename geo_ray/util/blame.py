"""Which line of the user's file is to blame for an exception."""

from __future__ import annotations

import inspect
import traceback
from pathlib import Path


def line_in(error: BaseException, path: Path) -> int | None:
    """Return the deepest line of `path` on the error's traceback, or None if it is not there."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return error.lineno
    frames = traceback.extract_tb(error.__traceback__)
    return next((frame.lineno for frame in reversed(frames) if frame.filename == str(path)), None)


def place(error: BaseException, path: Path) -> str:
    """Return "path:line", or the path alone when the line is unknown."""
    line = line_in(error, path)
    return str(path) if line is None else f"{path}:{line}"


def summary(error: BaseException) -> str:
    """Return "KeyError: 'image'": the type and the message on one line."""
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{type(error).__name__}: {text}".rstrip(": ")


def source_of(kind: type) -> Path | None:
    """Return the file that defines a class, or None if it has none."""
    try:
        name = inspect.getsourcefile(kind)
    except (TypeError, OSError):
        return None
    return Path(name) if name else None
