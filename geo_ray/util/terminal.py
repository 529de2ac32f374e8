"""Output that outlives its reader: a closed pipe, or a terminal that is gone, ends no run.

Without this a progress line written to a closed pipe raises `BrokenPipeError` in the middle of a
run, and SIGHUP, which a closing terminal sends, ends the process.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any, TextIO, cast


class OutlivingStream:
    """A text stream whose writes never fail; after the first failure it shows nothing more.

    Everything else is that stream's own.

    Args:
        stream: where to write.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write, if anybody reads; give the number of characters in any case."""
        try:
            return self._stream.write(text)
        except UnicodeEncodeError as error:  # the terminal has no such character
            shown = text.encode(error.encoding, "backslashreplace").decode(error.encoding)
            self.write(shown)
            return len(text)
        except (OSError, ValueError):  # nobody reads any more; ValueError: the file is closed
            self._silence()
            return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several."""
        self.write("".join(lines))

    def flush(self) -> None:
        """Hand on what is written, if anybody reads."""
        try:
            self._stream.flush()
        except (OSError, ValueError):
            self._silence()

    def _silence(self) -> None:
        """Let everybody who writes to the same file, such as C code and children, write nowhere."""
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            try:
                os.dup2(nowhere, self._stream.fileno())
            finally:
                os.close(nowhere)


def outliving(stream: IO[str]) -> TextIO:
    """The stream, with writes that never fail."""
    return cast(TextIO, stream if isinstance(stream, OutlivingStream) else OutlivingStream(stream))


@contextmanager
def terminal_outlived() -> Iterator[None]:
    """Let this process go on if its terminal or the readers of its output go away meanwhile.

    Standard output and error are replaced. In the main thread, SIGHUP is passed over unless
    somebody else handles or ignores it.
    """
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = outliving(sys.stdout), outliving(sys.stderr)
    try:
        with _hangup_passed_over():
            yield
    finally:
        sys.stdout, sys.stderr = before


@contextmanager
def _hangup_passed_over() -> Iterator[None]:
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGHUP) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGHUP, lambda *_: None)  # not SIG_IGN, which children would inherit
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
