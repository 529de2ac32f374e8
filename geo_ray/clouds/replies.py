"""Reading what a cloud replied: amounts, nonsense, and text that is fit to be repeated."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from geo_ray.errors import CloudError

_LONGEST: Final = 300


def amount_of(value: object) -> float | None:
    """A price; None for one that is absent or 0, which clouds send for what they do not sell.

    Raises:
        ValueError: it is no number, negative or not finite.
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
    """Turn what goes wrong while a reply is taken apart into a CloudError.

    Args:
        place: whose reply, for the message.

    Raises:
        CloudError: the reply is not what it should be.
    """
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        told = quoted(f"{type(error).__name__}: {error}")
        raise CloudError(f"{place}: the answer makes no sense ({told})") from None


def quoted(text: str, secrets: Iterable[str | None] = ()) -> str:
    """What a cloud said on one line, bounded, without the secrets that it may repeat."""
    for secret in secrets:
        if secret:
            text = text.replace(secret, "***")
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else line[:_LONGEST] + "..."
