"""Warnings that strangers can cause must not fill the log."""

from __future__ import annotations

import logging
import threading
import time
from typing import Final

_MAX_TOPICS: Final = 256


class RateLimitedLog:
    """Logs each topic at most once per interval and counts what it left out.

    Args:
        logger: where to log.
        interval_s: quiet time per topic in seconds.
    """

    def __init__(self, logger: logging.Logger, interval_s: float = 30.0) -> None:
        self._logger = logger
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._topics: dict[str, tuple[float, int]] = {}  # when last logged, left out since

    def warning(self, topic: str, message: str) -> None:
        """Log ``message`` unless ``topic`` was logged a moment ago."""
        now_s = time.monotonic()
        with self._lock:
            last_s, left_out = self._topics.get(topic, (None, 0))
            if last_s is not None and now_s - last_s < self._interval_s:
                self._topics[topic] = (last_s, left_out + 1)
                return
            if len(self._topics) >= _MAX_TOPICS:
                self._topics.clear()
            self._topics[topic] = (now_s, 0)
        more = f" ({left_out} more like this)" if left_out else ""
        self._logger.warning("%s%s", message, more)
