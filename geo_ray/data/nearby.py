"""What a user may have meant by a name or a path that does not exist."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

_MOST_SHOWN = 6


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that is most like ``word``, whatever its case; None if none is."""
    by_lower = {name.lower(): name for name in sorted(known, reverse=True)}
    close = difflib.get_close_matches(word.lower(), list(by_lower), n=1)
    return by_lower[close[0]] if close else None


def printable(text: str) -> str:
    """Text of a file or its name for a terminal: what is not printable is escaped."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text
    )


def listed(names: Iterable[str]) -> str:
    """Some names for a message: all, or the first ones and how many more there are."""
    names = list(names)
    more = len(names) - _MOST_SHOWN
    shown = ", ".join(names[:_MOST_SHOWN])
    return f"{shown} and {more} more" if more > 0 else shown


def missing_path(path: Path, endings: Sequence[str] = ()) -> str:
    """Why nothing is at ``path``: which of its folders is missing, and what is like it there.

    Args:
        path: where nothing is.
        endings: of files that may have been meant; none: all.

    Returns:
        Text to follow "there is no ...": empty, or a hint that starts with ";".
    """
    path = Path(os.path.normpath(path))
    while not path.parent.is_dir() and path.parent != path:
        path, endings = path.parent, ()  # a folder is missing
    try:
        names = [entry.name for entry in path.parent.iterdir()]
    except OSError:
        return ""
    if endings:
        names = [name for name in names if name.endswith(tuple(endings))]
    close = nearest(path.name, names)
    if close is not None:
        return f"; did you mean {path.parent / close}?"
    visible = sorted(name for name in names if not name.startswith("."))
    if endings and not visible:
        return f"; in {path.parent} there is no {' or '.join(f'*{each}' for each in endings)}"
    return f"; in {path.parent} there is {listed(visible) if visible else 'nothing'}"
