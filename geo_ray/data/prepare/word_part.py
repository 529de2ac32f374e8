"""Categories: words become places of a vocabulary, or hash buckets."""

# PyArrow ships no complete types.
# mypy: disable-error-code="attr-defined, name-defined, no-untyped-call"
from __future__ import annotations

import hashlib
from collections import Counter

import numpy as np
import pyarrow as pa

from geo_ray.data.prepare.config import Fill, Source, Vocabulary
from geo_ray.data.prepare.part import Part, unusable
from geo_ray.data.prepare.words import to_words
from geo_ray.data.values import text_of

_UNKNOWN = -2


def bucket_of(word: str, buckets: int) -> int:
    """The hash bucket of a word; the same in every process, region and release."""
    digest = hashlib.blake2b(word.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % buckets


class WordPlaces:
    """Gives the words of a column their places.

    Args:
        source: of a resolved preparation, with a vocabulary of ``values`` or ``hash``.
        vocabulary: that vocabulary.
    """

    def __init__(self, source: Source, vocabulary: Vocabulary) -> None:
        self._source = source
        self._vocabulary = vocabulary
        self._place = {word: place for place, word in enumerate(vocabulary.words)}

    def part(self, array: pa.Array) -> Part:
        """Read and treat a column of categories (N,)."""
        rows, vocabulary = len(array), self._vocabulary
        found = to_words(array)
        if found is None:
            return unusable("unreadable", rows, self._source.width)
        place_W = np.array([self._find(word) for word in found.words] + [_UNKNOWN], np.int64)
        place_N = place_W[found.codes]  # -1, where there is no value, takes the last
        missing_N = found.codes == -1
        part = Part(place_N[:, None], np.zeros(rows, bool))
        if missing_N.any():
            match self._source.missing:
                case Fill(fill=value):
                    place_N[missing_N] = self._find(text_of(value))
                    part.filled = int(missing_N.sum())
                case "other":
                    place_N[missing_N] = vocabulary.places - 1
                    part.filled = int(missing_N.sum())
                case "drop_row":
                    part.dropped_N = missing_N
                case _:
                    part.refuse("missing", missing_N)
        if vocabulary.hash is None and vocabulary.other == "bucket":
            lost_W = np.flatnonzero(place_W[:-1] == vocabulary.places - 1)
            rows_W = np.bincount(found.codes[~missing_N], minlength=len(found.words))
            part.other = Counter({found.words[w]: int(rows_W[w]) for w in lost_W})
        part.refuse("unknown", (place_N == _UNKNOWN) & ~missing_N)
        place_N = np.where(place_N < 0, 0, place_N)
        if vocabulary.encode == "one_hot":
            part.values_NW = np.zeros((rows, vocabulary.places), np.uint8)
            part.values_NW[np.arange(rows), place_N] = 1
        else:
            part.values_NW = place_N[:, None]
        return part

    def _find(self, word: str) -> int:
        if self._vocabulary.hash is not None:
            return bucket_of(word, self._vocabulary.hash)
        other = self._vocabulary.places - 1 if self._vocabulary.other == "bucket" else _UNKNOWN
        return self._place.get(word, other)
