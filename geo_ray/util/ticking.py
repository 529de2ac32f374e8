"""Reports every few seconds that something still runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

EVERY_S: Final = 4.0
_SHARE: Final = 0.2


@contextmanager
def ticking(what: str, say: Callable[[str], object]) -> Iterator[None]:
    """Report every few seconds for how long the block has run.

    A block that ends within the first few seconds reports nothing. The reports become rarer with
    time: an hour of them is fewer than 40 lines.

    Args:
        what: what the block does, such as "starting the cluster".
        say: prints a line; called in another thread.
    """
    ended = threading.Event()

    def tick() -> None:
        began_s = time.monotonic()
        passed_s = 0.0
        while not ended.wait(max(EVERY_S, passed_s * _SHARE)):
            passed_s = time.monotonic() - began_s
            say(f"{what} ({passed_s:.0f} s)")

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
