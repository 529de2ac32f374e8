"""Typed reading of a message's header: a missing or wrong field is an error that names it."""

from __future__ import annotations

from geo_ray.errors import FrameError
from geo_ray.transport.wire.meta import Meta


def count(meta: Meta, name: str) -> int:
    """A whole number from 0 to 2**63 - 1.

    Raises:
        FrameError: if it is something else.
    """
    value = _field(meta, name)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise FrameError(f"field '{name}' of a header is {value!r}, not a count")
    return value


def optional_count(meta: Meta, name: str) -> int | None:
    """A count, or None."""
    return None if _field(meta, name) is None else count(meta, name)


def flag(meta: Meta, name: str) -> bool:
    """True or false.

    Raises:
        FrameError: if it is something else.
    """
    value = _field(meta, name)
    if not isinstance(value, bool):
        raise FrameError(f"field '{name}' of a header is {value!r}, not a flag")
    return value


def text(meta: Meta, name: str) -> str:
    """A string.

    Raises:
        FrameError: if it is something else.
    """
    value = _field(meta, name)
    if not isinstance(value, str):
        raise FrameError(f"field '{name}' of a header is {value!r}, not a text")
    return value


def optional_text(meta: Meta, name: str) -> str | None:
    """A string, or None."""
    return None if _field(meta, name) is None else text(meta, name)


def data(meta: Meta, name: str) -> bytes:
    """Bytes.

    Raises:
        FrameError: if it is something else.
    """
    value = _field(meta, name)
    if not isinstance(value, bytes):
        raise FrameError(f"field '{name}' of a header is {value!r:.100}, not bytes")
    return value


def number(meta: Meta, name: str) -> float:
    """A float; an int counts.

    Raises:
        FrameError: if it is something else.
    """
    value = _field(meta, name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise FrameError(f"field '{name}' of a header is {value!r}, not a number")
    return float(value)


def optional_number(meta: Meta, name: str) -> float | None:
    """A float, or None."""
    return None if _field(meta, name) is None else number(meta, name)


def counts(meta: Meta, name: str) -> list[int]:
    """A list of counts.

    Raises:
        FrameError: if it is something else.
    """
    value = _field(meta, name)
    if not isinstance(value, list):
        raise FrameError(f"field '{name}' of a header is {value!r}, not a list")
    return [count({name: item}, name) for item in value]


def numbers(meta: Meta, name: str) -> list[float]:
    """A list of numbers.

    Raises:
        FrameError: if it is something else.
    """
    value = _field(meta, name)
    if not isinstance(value, list):
        raise FrameError(f"field '{name}' of a header is {value!r}, not a list")
    return [number({name: item}, name) for item in value]


def texts(meta: Meta, name: str) -> list[str]:
    """A list of strings.

    Raises:
        FrameError: if it is something else.
    """
    value = _field(meta, name)
    if not isinstance(value, list):
        raise FrameError(f"field '{name}' of a header is {value!r}, not a list")
    return [text({name: item}, name) for item in value]


def _field(meta: Meta, name: str) -> object:
    if name not in meta:
        raise FrameError(f"a header has no field '{name}'")
    return meta[name]
