"""The valid word that somebody may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(word: str, valid: Iterable[str], least: float = 0.6) -> str | None:
    """Return the most similar of the valid words, whatever its case; None if none is similar.

    Args:
        word: what was written.
        valid: what could have been.
        least: similarity from 0 to 1 that is asked for.
    """
    by_lower = {each.lower(): each for each in valid}
    close = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=least)
    return by_lower[close[0]] if close else None
