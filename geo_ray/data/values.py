"""Python values to one Arrow array, whatever mixture they are."""

# PyArrow ships no complete types.
# mypy: disable-error-code="attr-defined, name-defined, no-untyped-call"
from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

_NO_PYTHON_TYPE = (pa.ArrowException, ArithmeticError, ValueError, LookupError)
_WHOLE = re.compile(r"(-?(?:0|[1-9][0-9]*))\.0+")
_TRUTH = {"True": "true", "TRUE": "true", "False": "false", "FALSE": "false"}
_FAR = "<value out of range: "  # Arrow, of times beyond the year 32767


def arrow_of(values: Sequence[Any] | np.ndarray[Any, Any]) -> pa.Array:
    """One array of the type that the values have in common; without such a type, of text.

    Args:
        values: one per row (N): None, numbers, text, times, lists; or an array (N,) or (N, length).

    Returns:
        An Arrow array (N,).
    """
    if isinstance(values, np.ndarray) and values.ndim > 1:
        values = list(values)
    try:
        return pa.array(values)
    except (pa.ArrowException, OverflowError, TypeError, ValueError):
        return _in_common(list(values))


def python_values(array: pa.Array) -> list[Any]:
    """The values of an array.

    Those that Python has no type for, such as dates after the year 9999, are text.
    """
    try:
        return array.to_pylist()  # type: ignore[no-any-return]
    except _NO_PYTHON_TYPE:
        return [_python_value(scalar) for scalar in array]


def _python_value(scalar: pa.Scalar) -> Any:
    try:
        return scalar.as_py()
    except _NO_PYTHON_TYPE:
        pass
    try:
        text: str = scalar.cast(pa.string()).as_py()
    except pa.ArrowException:  # a time zone that nobody knows
        return str(scalar.value)
    return text.removeprefix(_FAR).removesuffix(">")


def text_of(value: Any) -> str:
    """A value as the text that categories are compared by.

    One value has one text, whatever wrote it: ``1``, ``1.0`` and the number are ``1``, and ``True``
    and ``TRUE`` are ``true``, also where they are text. All other text is taken as written.
    """
    if isinstance(value, str):
        word = value.strip()
        whole = _WHOLE.fullmatch(word)
        if whole is not None:
            return "0" if whole[1] == "-0" else whole[1]
        return _TRUTH.get(word, word)
    if isinstance(value, bool | np.bool_):
        return "true" if value else "false"
    if isinstance(value, float | np.floating) and float(value).is_integer():
        return str(int(value))
    if isinstance(value, list | dict):
        return json.dumps(value, default=str)
    return text_of(str(value))


def _in_common(values: list[Any]) -> pa.Array:
    if all(isinstance(v, int) and not isinstance(v, bool) for v in values if v is not None):
        try:
            return pa.array(values, pa.uint64())
        except (pa.ArrowException, OverflowError):
            pass
    return pa.array([None if v is None else text_of(v) for v in values], pa.string())
