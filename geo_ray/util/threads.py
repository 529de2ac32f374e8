"""Threads that are started by one owner and joined by it at the end."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Final, TypeVar

T = TypeVar("T")
_LOGGER = logging.getLogger(__name__)
_LAST: Final = 19  # the weakest claim to a processor that there is


def give_way() -> None:
    """Let the calling thread, for the rest of its life, compute when nothing else wants to.

    On Linux, where threads have priorities of their own; elsewhere it does nothing. Not for a
    thread that holds locks while it computes: who wants the lock would wait for all others, too.
    """
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LAST)


def given_way(work: Callable[[], T]) -> T:
    """What ``work`` returns or raises, done on a thread of its own that gives way."""
    with ThreadPoolExecutor(1, "gives-way", give_way) as thread:
        return thread.submit(work).result()


class Workers:
    """A set of daemon threads; they end by themselves or because their owner makes them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    def start(self, name: str, work: Callable[[], None]) -> None:
        """Run ``work`` in a new thread."""
        thread = threading.Thread(target=work, name=name, daemon=True)
        with self._lock:
            self._threads = [known for known in self._threads if known.is_alive()]
            # Started with the lock: a thread that did not start yet would count as dead.
            thread.start()
            self._threads.append(thread)

    def join(self, timeout_s: float) -> None:
        """Wait for all but the calling thread; those that take longer are logged and left."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            with self._lock:  # again and again: one may have started another
                mine = threading.current_thread()
                threads = [thread for thread in self._threads if thread is not mine]
                self._threads = []
            if not threads:
                return
            for thread in threads:
                thread.join(max(0.0, deadline_s - time.monotonic()))
                if thread.is_alive():
                    _LOGGER.warning("thread %s is still busy", thread.name)
