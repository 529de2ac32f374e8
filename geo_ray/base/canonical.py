"""JSON values, and their canonical encoding for digests and manifests."""

from __future__ import annotations

import hashlib
import json
from typing import TypeAlias

JSONValue: TypeAlias = "bool | int | float | str | list[JSONValue] | dict[str, JSONValue] | None"
JSONObject: TypeAlias = dict[str, JSONValue]


def canonical_json(value: JSONValue) -> bytes:
    """Write ``value`` as UTF-8 JSON: keys sorted, no spaces, no line end.

    Raises:
        ValueError: for NaN, infinities and text that is not Unicode.
    """
    text = json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    return text.encode()


def sha256_hex(data: bytes) -> str:
    """Return the SHA-256 of ``data`` as 64 lower-case hex digits."""
    return hashlib.sha256(data).hexdigest()
