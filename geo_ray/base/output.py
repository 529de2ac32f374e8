"""Output that cannot flood a log, and that survives the loss of its terminal.

`RateLimitedLog` limits warnings that remote peers can cause. `ticking` reports every few
seconds that a long operation is still running. `outliving` and `terminal_outlived` keep a run
alive when its pipe or terminal is closed: otherwise a progress line would raise
`BrokenPipeError`, and SIGHUP would end the process.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any, Final, TextIO, cast

_MAX_TOPICS: Final = 256


class RateLimitedLog:
    """Logs each topic at most once per interval and counts suppressed messages.

    Args:
        logger: the logger.
        interval_s: quiet time per topic in seconds.
    """

    def __init__(self, logger: logging.Logger, interval_s: float = 30.0) -> None:
        self._logger = logger
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._topics: dict[
            str, tuple[float, int]
        ] = {}  # time of the last log, number suppressed since

    def warning(self, topic: str, message: str) -> None:
        """Log ``message`` unless ``topic`` was logged recently."""
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


REPORT_EVERY_S: Final = 4.0
_SHARE: Final = 0.2


@contextmanager
def ticking(what: str, say: Callable[[str], object]) -> Iterator[None]:
    """Report every few seconds for how long the block has run.

    A block that ends within the first few seconds reports nothing. The reports become less
    frequent: fewer than 40 lines in an hour.

    Args:
        what: description of the block, such as "starting the cluster".
        say: prints a line; called in another thread.
    """
    ended = threading.Event()

    def tick() -> None:
        began_s = time.monotonic()
        passed_s = 0.0
        while not ended.wait(max(REPORT_EVERY_S, passed_s * _SHARE)):
            passed_s = time.monotonic() - began_s
            say(f"{what} ({passed_s:.0f} s)")

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class OutlivingStream:
    """A text stream whose writes never fail; after the first failure it discards output.

    Other attributes are those of the stream.

    Args:
        stream: the wrapped stream.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write, if the stream is open; return the number of characters in any case."""
        try:
            return self._stream.write(text)
        except UnicodeEncodeError as error:  # the terminal has no such character
            shown = text.encode(error.encoding, "backslashreplace").decode(error.encoding)
            self.write(shown)
            return len(text)
        except (OSError, ValueError):  # the reader is gone; ValueError: the file is closed
            self._redirect_to_null()
            return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several."""
        self.write("".join(lines))

    def flush(self) -> None:
        """Flush the stream, if it is open."""
        try:
            self._stream.flush()
        except (OSError, ValueError):
            self._redirect_to_null()

    def _redirect_to_null(self) -> None:
        """Redirect the file descriptor to nowhere, also for C code and child processes."""
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            try:
                os.dup2(nowhere, self._stream.fileno())
            finally:
                os.close(nowhere)


def outliving(stream: IO[str]) -> TextIO:
    """Return the stream with writes that never fail."""
    return cast(TextIO, stream if isinstance(stream, OutlivingStream) else OutlivingStream(stream))


@contextmanager
def terminal_outlived() -> Iterator[None]:
    """Let this process continue if its terminal or the readers of its output disappear.

    Standard output and error are replaced. In the main thread, SIGHUP is ignored unless it is
    handled or ignored already.
    """
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = outliving(sys.stdout), outliving(sys.stderr)
    try:
        with _hangup_passed_over():
            yield
    finally:
        sys.stdout, sys.stderr = before


def _pass_over(_number: int, _frame: object) -> None:
    pass


@contextmanager
def _hangup_passed_over() -> Iterator[None]:
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGHUP) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGHUP, _pass_over)  # not SIG_IGN, which children would inherit
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
