"""Waiting for what other threads do."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(is_so: Callable[[], bool], most_s: float = 20.0) -> None:
    """Wait for something that other threads do."""
    ends_s = time.monotonic() + most_s
    while not is_so():
        assert time.monotonic() < ends_s, "it did not come to pass"
        time.sleep(0.02)
