"""Threads of this process that call Ray. They all end before this process disconnects from Ray.

After ``ray.shutdown()`` a call of Ray's from another thread connects the process to a cluster
again, or aborts it in C++. So a thread that calls Ray is started by a `RayThreads`, and whoever
ends a run closes that first. Waits of such a thread end early then: `collect` and `place` look with
`check_not_closing`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, TypeVar

from geo_ray.errors import RegionLostError

T = TypeVar("T")
_CLOSE_S: Final = 30.0
_of_thread = threading.local()
_log = logging.getLogger(__name__)


class RayThreads:
    """See the module's docstring. Any thread may start others; the owner closes it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: set[threading.Thread] = set()
        self._is_closing = threading.Event()

    def submit(self, name: str, work: Callable[[], T]) -> Future[T]:
        """Do ``work`` on a thread of its own.

        Returns:
            Its result. Callbacks of it are called by that thread, or by the one that adds them. If
            this is closed, ``work`` is not done, and the result is a `RegionLostError`.
        """
        future: Future[T] = Future()
        thread = threading.Thread(
            target=self._run, args=(work, future), name=f"ray-{name}", daemon=True
        )
        with self._lock:
            if not self._is_closing.is_set():
                self._open.add(thread)
                thread.start()
                return future
        future.set_exception(_closing())
        return future

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """Start no more threads, and wait for those that run; may be called again.

        Args:
            timeout_s: longest wait. Threads that take longer are logged and left.
        """
        deadline_s = time.monotonic() + timeout_s
        with self._lock:
            self._is_closing.set()
            threads = self._open - {threading.current_thread()}
        for thread in threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
            if thread.is_alive():
                _log.warning("thread %s does not end: it waits for Ray", thread.name)

    def check(self) -> None:
        """Return unless this is being closed.

        Raises:
            RegionLostError: it is.
        """
        if self._is_closing.is_set():
            raise _closing()

    def _run(self, work: Callable[[], T], future: Future[T]) -> None:
        _of_thread.owner = self
        try:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = work()
            except BaseException as error:  # whatever it is: who asks for the result gets it
                future.set_exception(error)
            else:
                future.set_result(result)
        finally:
            with self._lock:
                self._open.discard(threading.current_thread())


def is_ray_thread() -> bool:
    """Whether the calling thread was started by a `RayThreads`."""
    return getattr(_of_thread, "owner", None) is not None


def check_not_closing() -> None:
    """Return unless the calling thread was started by a `RayThreads` that is being closed.

    Raises:
        RegionLostError: it was.
    """
    owner: RayThreads | None = getattr(_of_thread, "owner", None)
    if owner is not None:
        owner.check()


def _closing() -> RegionLostError:
    return RegionLostError("the run ends")
