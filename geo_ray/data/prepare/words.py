"""An Arrow column read as categories: which distinct texts it has, and which row has which."""

# PyArrow ships no complete types.
# mypy: disable-error-code="attr-defined, name-defined, no-untyped-call"
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from geo_ray.data.prepare.numbers import decoded, is_list
from geo_ray.data.values import python_values, text_of

Ints = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class WordColumn:
    """What was read.

    Attributes:
        words: the distinct texts, without spaces around them.
        codes: (N,) index into ``words``, -1 where there is no value (also empty text and NaN).
    """

    words: tuple[str, ...]
    codes: Ints


def to_words(array: pa.Array) -> WordColumn | None:
    """Read a column of single values.

    Whole numbers are the same word whether a file has them as integers or floats. Text is taken
    as it is written, so ``01`` and ``1`` are two words.

    Args:
        array: (N,) text, numbers, booleans, times.

    Returns:
        The words; None if values of this type are no categories (lists, binary and so on).
    """
    array, types = decoded(array), pa.types
    kind = array.type
    if is_list(kind) or types.is_binary(kind) or types.is_large_binary(kind):
        return None
    if types.is_binary_view(kind):
        return None
    if types.is_nested(kind) or types.is_fixed_size_binary(kind):
        return None
    if types.is_null(kind):
        return WordColumn((), np.full(len(array), -1, np.int64))
    encoded = array.dictionary_encode()
    raw = [_word(value) for value in python_values(encoded.dictionary)]
    words = tuple(dict.fromkeys(word for word in raw if word is not None))
    index = {word: number for number, word in enumerate(words)}
    code_W = np.array([-1 if word is None else index[word] for word in raw] + [-1], np.int64)
    codes = encoded.indices.cast(pa.int64()).fill_null(len(raw)).to_numpy(zero_copy_only=False)
    return WordColumn(words, code_W[codes])


def _word(value: Any) -> str | None:
    if value is None or value != value:  # NaN differs from itself
        return None
    return text_of(value) or None
