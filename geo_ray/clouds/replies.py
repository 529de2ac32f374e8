"""Reads a cloud's replies: amounts, malformed replies, and text that is safe to print."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from geo_ray.errors import CloudError

_LONGEST: Final = 300


def amount_of(value: object) -> float | None:
    """Return a price; None if it is absent or 0, which clouds send for items they do not sell.

    Raises:
        ValueError: the value is no number, negative or not finite.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"{value!r} is no amount")
    amount = float(value)
    if amount < 0 or not math.isfinite(amount):
        raise ValueError(f"{value!r} is no amount")
    return amount or None


@contextmanager
def making_sense(place: str) -> Iterator[None]:
    """Turn errors in reading a reply into a CloudError.

    Args:
        place: origin of the reply, for the message.

    Raises:
        CloudError: the reply is malformed.
    """
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        told = quoted(f"{type(error).__name__}: {error}")
        raise CloudError(f"{place}: the answer is not valid ({told})") from None


def quoted(text: str, secrets: Iterable[str | None] = ()) -> str:
    """Return a cloud's text on one line, shortened, without secrets that it may repeat."""
    for secret in secrets:
        if secret:
            text = text.replace(secret, "***")
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else line[:_LONGEST] + "..."
