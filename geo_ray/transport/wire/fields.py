"""Header fields: encoding of *meta*, the typed map of a frame, and validation of its values.

Meta is msgpack restricted to scalars and lists of scalars. A kind (`text`, `count`, `flag`, ...)
reads one value; the error for a missing or invalid field names it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import isfinite
from typing import Any, Final, Generic, TypeAlias, TypeVar

import msgpack  # type: ignore[import-untyped]

from geo_ray.base.errors import FrameError

Scalar: TypeAlias = bool | int | float | str | bytes | None
Meta: TypeAlias = dict[str, Scalar | list[Scalar]]

_SCALARS: Final = frozenset({type(None), bool, int, float, str, bytes})


def _is_scalar(value: object) -> bool:
    return type(value) in _SCALARS


def _check_meta(meta: object) -> str | None:
    if not isinstance(meta, dict):
        return "the meta is no map"
    for name, value in meta.items():
        if type(name) is not str:
            return f"the meta's key {name!r} is no string"
        if not (_is_scalar(value) or (type(value) is list and all(map(_is_scalar, value)))):
            return f"the meta's {name!r} is no scalar or list of scalars: {type(value).__name__}"
    return None


def encode_meta(meta: Meta) -> bytes:
    """Pack a meta.

    Raises:
        FrameError: it holds something else than scalars and lists of them.
    """
    if problem := _check_meta(meta):
        raise FrameError(f"cannot send a frame: {problem}", fix="Send plain Python scalars.")
    try:
        packed: bytes = msgpack.packb(meta)
    except (ValueError, TypeError, OverflowError) as error:
        raise FrameError(f"cannot send a frame: {error}", fix="Send 64-bit integers.") from error
    return packed


def decode_meta(packed: bytes) -> Meta:
    """Unpack a meta; executes nothing and allocates no more than a few times ``len(packed)``.

    Raises:
        FrameError: it is malformed or holds something else than scalars and lists of them.
    """
    try:
        meta = msgpack.unpackb(packed)
    except Exception as error:  # msgpack documents no closed list of what it raises
        raise FrameError(f"a frame's meta is no msgpack: {type(error).__name__}") from error
    if problem := _check_meta(meta):
        raise FrameError(f"a frame is malformed: {problem}")
    return dict(meta)


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Kind(Generic[T]):
    """A kind of value; called with a header and a name, it returns that field.

    Attributes:
        what: the kind in words.
        fits: returns whether a value is of this kind.
        make: converts the value.
    """

    what: str
    fits: Callable[[Any], bool]
    make: Callable[[Any], T]

    def __call__(self, meta: Meta, name: str) -> T:
        """The value of field ``name``.

        Raises:
            FrameError: the field is missing or of another kind.
        """
        if name not in meta:
            raise FrameError(f"a header has no field '{name}'")
        value = meta[name]
        if not self.fits(value):
            raise wrong(name, value, self.what)
        return self.make(value)


def wrong(name: str, value: object, what: str) -> FrameError:
    """The error about a field whose value is not ``what`` it must be."""
    return FrameError(f"field '{name}' of a header is {value!r:.100}, not {what}")


def below(limit: int) -> Kind[int]:
    """Counts below ``limit``."""
    return Kind(f"a count below {limit}", lambda value: count.fits(value) and value < limit, int)


def one_of(values: tuple[T, ...]) -> Kind[T]:
    """One of these values."""
    return Kind(f"one of {', '.join(map(str, values))}", values.__contains__, lambda value: value)


def optional(kind: Kind[T]) -> Kind[T | None]:
    """Values of a kind, or None."""
    return Kind(
        f"{kind.what} or None",
        lambda value: value is None or kind.fits(value),
        lambda value: None if value is None else kind.make(value),
    )


def every(kind: Kind[T]) -> Kind[list[T]]:
    """Lists of values of a kind."""
    return Kind(
        f"a list, each {kind.what}",
        lambda value: isinstance(value, list) and all(map(kind.fits, value)),
        lambda value: list(map(kind.make, value)),
    )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_amount(value: Any) -> bool:
    return _is_number(value) and isfinite(value) and value >= 0


def _is_column(value: object) -> bool:
    return isinstance(value, list) and None not in value


def _is_a(kind: type, value: object) -> bool:
    return isinstance(value, kind)


count: Final = Kind("a count", _is_count, int)
flag: Final = Kind("a flag", partial(_is_a, bool), bool)
text: Final = Kind("a text", partial(_is_a, str), str)
data: Final = Kind("bytes", partial(_is_a, bytes), bytes)
number: Final = Kind("a number", _is_number, float)
amount: Final = Kind("an amount", _is_amount, float)
column: Final = Kind("a list without gaps", _is_column, list)
counts, texts = every(count), every(text)
optional_count, optional_number = optional(count), optional(number)
optional_text = optional(text)
