"""Meta: the small typed map of a frame; scalars and lists of scalars in msgpack, nothing else."""

from __future__ import annotations

from typing import Final, TypeAlias

import msgpack  # type: ignore[import-untyped]

from geo_ray.errors import FrameError

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
