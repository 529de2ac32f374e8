"""Text for people: numbers, sizes, durations and names, and the closest valid word to a typo."""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

_MOST_METRICS = 5  # in one line
_CONTROL: Final = re.compile("[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\ud800-\\udfff]")


def printable(text: str) -> str:
    """Replace characters that control a terminal, such as ESC, by their codes; keep line ends.

    Lone surrogates are replaced as well; Python uses them for bytes of file names that are not
    UTF-8.
    """
    return _CONTROL.sub(_code, text)


def _code(found: re.Match[str]) -> str:
    number = ord(found[0])
    return f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}"


def number_text(value: float | None) -> str:
    """Give about four significant digits: ``0.1234``, ``12.3``, ``1,234``, ``1.2e-05``."""
    if value is None or not math.isfinite(value):
        return "-"
    size = abs(value)
    if size >= 1e7 or 0 < size < 1e-4:
        return f"{value:.2e}"
    if size >= 1000 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.4g}"


def enough_text(value: float, digits: int = 3) -> str:
    """Give a positive number rounded up, so that the printed value is enough."""
    step = 10.0 ** (math.floor(math.log10(value)) - digits + 1)
    return f"{math.ceil(value / step) * step:.{digits + 1}g}"


def count_text(count: float) -> str:
    """Give a large whole number in short form: ``250``, ``1,500``, ``25 k``, ``1.5 M``."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(count) >= 10 * size or (unit != "k" and abs(count) >= size):
            return f"{count / size:,.4g} {unit}"
    return number_text(count)


def counted(count: int, what: str) -> str:
    """Give a number with its noun: ``1 worker``, ``2,000 workers``."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def bytes_text(count: float) -> str:
    """Give bytes in decimal units: ``812 B``, ``4.1 MB``, ``1.3 GB``."""
    units = ["TB", "GB", "MB", "kB"]
    if abs(count) < 999.5:
        return f"{count:.0f} B"
    count, unit = count / 1000, units.pop()
    while abs(count) >= 999.5 and units:
        count, unit = count / 1000, units.pop()
    return f"{count:.3g} {unit}" if abs(count) < 999.5 else f"{count:,.0f} {unit}"


def duration_text(seconds: float | None) -> str:
    """Give seconds as ``85 ms``, ``4.2 s``, ``3:07`` or ``2:03:09``."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    if seconds < 0:
        return "-" + duration_text(-seconds)
    if seconds == 0:
        return "0 s"
    if seconds < 0.9995:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def age_text(age_s: float) -> str:
    """Give an age in its largest unit; in days only above two days."""
    if age_s < 0:
        return "in the future"
    if age_s > 2 * 86400.0:
        return f"{age_s / 86400.0:.0f} d"
    for unit, seconds in (("h", 3600.0), ("min", 60.0)):
        if age_s >= seconds:
            return f"{age_s / seconds:.0f} {unit}"
    return f"{age_s:.0f} s"


def metrics_text(metrics: Mapping[str, float | None]) -> str:
    """Give ``loss 0.21, accuracy 0.93``; with a limited number of metrics."""
    shown = [f"{name} {number_text(value)}" for name, value in metrics.items()]
    if len(shown) > _MOST_METRICS:
        shown[_MOST_METRICS:] = [f"{len(shown) - _MOST_METRICS} more"]
    return ", ".join(shown)


def coarse_text(seconds: float) -> str:
    """Give seconds for a display that ticks: ``0 s``, ``42 s``, ``3:07``."""
    return f"{seconds:.0f} s" if seconds < 59.5 else duration_text(round(seconds))


def codec_text(codec: Mapping[str, str]) -> str:
    """Name the codecs of a run: ``topk up, int8 down``."""
    return ", ".join(f"{kind} {direction}" for direction, kind in codec.items())


def saving_text(payload_bytes: Mapping[str, int]) -> str:
    """Describe the compression of payloads: ``payloads of 8.0 MB encoded to 1.0 MB``."""
    before, after = bytes_text(payload_bytes["before"]), bytes_text(payload_bytes["after"])
    return f"payloads of {before} encoded to {after}"


def nearest_word(word: str, valid: Iterable[str], least: float = 0.6) -> str | None:
    """Return the most similar of the valid words, whatever its case; None if none is similar.

    Args:
        word: the given word.
        valid: the valid words.
        least: minimum similarity from 0 to 1.
    """
    by_lower = {each.lower(): each for each in sorted(valid, reverse=True)}
    close = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=least)
    return by_lower[close[0]] if close else None


_MOST_SHOWN = 6


def escaped(text: str) -> str:
    """Return a text for a terminal; unprintable characters are escaped."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text
    )


def listed(names: Iterable[str]) -> str:
    """Return names for a message: all, or the first ones and the number of others."""
    names = list(names)
    more = len(names) - _MOST_SHOWN
    shown = ", ".join(names[:_MOST_SHOWN])
    return f"{shown} and {more} more" if more > 0 else shown


def missing_path(path: Path, endings: Sequence[str] = ()) -> str:
    """Return a hint about a missing path: a missing folder, or similar names.

    Args:
        path: the missing path.
        endings: suffixes of valid files; empty: all.

    Returns:
        Text to follow "no ...": empty, or a hint that starts with ";".
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
    close = nearest_word(path.name, names)
    if close is not None:
        return f"; did you mean {path.parent / close}?"
    visible = sorted(name for name in names if not name.startswith("."))
    if endings and not visible:
        return f"; in {path.parent} there is no {' or '.join(f'*{each}' for each in endings)}"
    return f"; in {path.parent} there is {listed(visible) if visible else 'nothing'}"
