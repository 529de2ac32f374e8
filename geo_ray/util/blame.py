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


def import_advice(error: BaseException) -> str:
    """Say what to do about a module that raised while it was imported."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"Install {error.name} here and on every node, or correct the import."
    if isinstance(error, SyntaxError):
        return "Correct the named line: it is no Python."
    if isinstance(error, SystemExit):
        return 'Put what ends Python under `if __name__ == "__main__":`.'
    return "Mend the named line; importing the file in a Python shell shows the whole traceback."


def source_of(kind: type) -> Path | None:
    """Return the file that defines a class, or None if it has none."""
    try:
        name = inspect.getsourcefile(kind)
    except (TypeError, OSError):
        return None
    return Path(name) if name else None
