"""The event log of a run: append-only JSON lines, one write per event; and the end of a run.

`ending_of` derives the end of a run from its log. `note_failure` records the error that ended
it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import math
import os
import re
import secrets
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from geo_ray.base.clock import Clock, SystemClock
from geo_ray.base.errors import GeoRayError, InterruptedRunError, InvariantError, RunDirectoryError
from geo_ray.base.files import TEMPORARY_SUFFIX, is_full, sync_directory
from geo_ray.base.output import RateLimitedLog
from geo_ray.base.text import printable
from geo_ray.telemetry.events import EVENT_FIELDS, Event, conform
from geo_ray.telemetry.totals import RunTotals

EVENTS_FILE = "events.jsonl"
MOST_WAITING_BYTES: Final = 64 << 20
"""Maximum size of buffered events while the disk is full."""
_log = logging.getLogger(__name__)
_MOST_LINE_BYTES = 16 * 1024 * 1024
_MOST_PROBLEMS: Final = 5
_ESCAPED: Final = re.compile(rb"\\[bfr]|\\u00[0189]|\x7f|\xc2[\x80-\x9f]")
_DAMAGED: Final[tuple[type[Exception], ...]] = (
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    ArithmeticError,
    InvariantError,
)
_ROW = TypeAdapter(dict[str, Any])  # a quarter of `json`'s time, and there may be millions


class EventLog:
    """The writer of one `events.jsonl`; may be shared by threads, not by processes.

    Every event is one `write` to the operating system before `write` returns, so a crash of the
    process loses no written event (a crash of the machine may). An existing file is continued; an
    incomplete last line, left by a crash, is removed first. While the disk is full, events are
    buffered in memory, up to `MOST_WAITING_BYTES`, and the next successful write flushes them.
    While the log is open, it is locked, so that readers can distinguish an active run from one
    that was killed (`being_written`).

    Args:
        path: the file; its directory must exist.
        clock_origin_s: subtracted from every ``t_s`` and ``start_s``, so that writers may pass
            readings of a clock. For a resumed run: ``clock.now_s() - last_time_s(path)``.

    Raises:
        RunDirectoryError: the file cannot be opened for writing.
    """

    def __init__(self, path: Path, clock_origin_s: float = 0.0) -> None:
        self.path = path
        self._origin_s = clock_origin_s
        self._lock = threading.Lock()
        self._waiting: deque[bytes] = deque()  # for space on the disk
        self._waiting_bytes = 0
        self._limited_log = RateLimitedLog(_log)
        self._fd = -1
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            with suppress(OSError):  # some file systems have no locks; readers detect that
                fcntl.flock(self._fd, fcntl.LOCK_SH)
            sync_directory(path.parent)
            self._size = _whole_lines_bytes(self._fd)
            os.ftruncate(self._fd, self._size)
        except OSError as error:
            self.close()
            raise _cannot("open", path, error) from error

    def write(self, kind: str, t_s: float, **fields: Any) -> Event:
        """Append one event; non-finite floats become null.

        Args:
            kind: one of `schema.EVENT_FIELDS`.
            t_s: seconds on the clock of ``clock_origin_s``.
            **fields: every field of the kind.

        Returns:
            The event as written, for `Progress` and `MetricsState`.

        Raises:
            InvariantError: unknown kind, missing field, wrong type, or the log is closed.
            RunDirectoryError: the disk fails, or has been full for long; the file keeps its
                complete lines.
        """
        event = self._shifted(conform(kind, t_s, fields))
        row = {"t_s": event.t_s, "kind": kind, **event.fields}
        line = _ROW.dump_json(row) + b"\n"
        with self._lock:
            if self._fd < 0:
                raise InvariantError(f"event {kind!r} after {self.path} was closed")
            self._waiting.append(line)
            self._waiting_bytes += len(line)
            self._write_waiting()
        return event

    def _write_waiting(self) -> None:
        """Write buffered events, as far as the disk has space; under the lock."""
        while self._waiting:
            line = self._waiting[0]
            try:
                _write_all(self._fd, line)
            except OSError as error:
                os.ftruncate(self._fd, self._size)  # no incomplete line in the middle of the log
                if not is_full(error) or self._waiting_bytes > MOST_WAITING_BYTES:
                    raise _cannot("write", self.path, error) from error
                self._limited_log.warning(
                    "full",
                    f"the disk of {self.path} is full: {len(self._waiting)} events wait in memory "
                    "until there is space",
                )
                return
            self._waiting.popleft()
            self._waiting_bytes -= len(line)
            self._size += len(line)

    def close(self) -> None:
        """Close the file; idempotent."""
        with self._lock:
            if self._fd >= 0:
                with suppress(RunDirectoryError):
                    self._write_waiting()
                if self._waiting:
                    _log.warning(
                        "%s: the last %d events are missing", self.path, len(self._waiting)
                    )
                os.close(self._fd)
                self._fd = -1

    def __enter__(self) -> EventLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _shifted(self, event: Event) -> Event:
        fields = dict(event.fields)
        if fields.get("start_s") is not None:
            fields["start_s"] = round(fields["start_s"] - self._origin_s, 6)
        return Event(event.kind, round(event.t_s - self._origin_s, 6), fields)


def read_events(path: Path) -> Iterator[Event]:
    """Give the events of a log in the order of the file; an incomplete last line is skipped.

    A damaged line is skipped with a warning. Events of kinds that this release does not know are
    given unchanged; readers ignore them.

    Raises:
        RunDirectoryError: the file cannot be read.
    """
    if not path.is_file():
        raise _cannot("read", path, FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)))
    yield from EventTail(path).new()


def follow(
    path: Path,
    stop: Callable[[], bool] = lambda: False,
    *,
    clock: Clock | None = None,
    poll_s: float = 0.2,
) -> Iterator[Event]:
    """Give the events of an active log, and wait for more.

    Ends after a final `run_finished` or `run_failed`, or when ``stop()`` is true and all written
    events were given.

    Args:
        path: the log; it may be created later.
        stop: asked once per poll.
        clock: clock for sleeping; None: the machine's clock.
        poll_s: seconds between two polls of the file.

    Raises:
        RunDirectoryError: as for `read_events`.
    """
    clock = clock or SystemClock()
    tail = EventTail(path)
    while True:
        final_poll = stop()  # read first: events written before it turned true are still given
        ended = False
        for event in tail.new():
            yield event
            ended = event.kind in ("run_finished", "run_failed")
        if final_poll or ended:
            return
        clock.sleep_s(poll_s)


class EventTail:
    """Reads new events of an active log.

    Args:
        path: the log; it may be created later.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset_bytes = self._number = 0
        self._problems: list[str] = []

    @property
    def problems(self) -> tuple[str, ...]:
        """The first damaged lines, each with its number and defect."""
        return tuple(self._problems)

    @property
    def left_bytes(self) -> int:
        """Number of bytes that were not read yet, including an incomplete last line."""
        try:
            return max(0, self._path.stat().st_size - self._offset_bytes)
        except OSError:
            return 0

    @property
    def read_bytes(self) -> int:
        """Number of bytes that were read."""
        return self._offset_bytes

    @property
    def lines(self) -> int:
        """Number of lines that were read, including damaged ones."""
        return self._number

    def new(self, most_lines: int | None = None) -> Iterator[Event]:
        """Give the events since the last call whose lines are complete.

        A caller may stop early; the next call continues there. Damaged lines are skipped.

        Args:
            most_lines: maximum number of lines, including damaged ones; None: all.

        Raises:
            RunDirectoryError: as for `read_events`.
        """
        for line in islice(_new_lines(self._path, self._offset_bytes), most_lines):
            self._offset_bytes += len(line)
            self._number += 1
            try:
                event = _parsed(line)
            except _DAMAGED as error:
                self._note(error)
                continue
            yield event

    def _note(self, error: Exception) -> None:
        if len(self._problems) == _MOST_PROBLEMS:
            return
        why = error.message if isinstance(error, InvariantError) else repr(error)
        text = printable(f"line {self._number} of {self._path} is not an event: {why}")
        self._problems.append(text)
        _log.warning("%s; it is skipped", text)


def newest_segment(tail: EventTail) -> list[Event]:
    """Return the events since the run last began; advances the tail."""
    found: list[Event] = []
    for event in tail.new():
        if event.kind == "run_started":
            found = []
        found.append(event)
    return found


def being_written(path: Path) -> bool | None:
    """Return whether a process has the log open for writing; None if that is unknown.

    The system releases the lock of a killed process in any case.
    """
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False


def detach(path: Path) -> None:
    """Replace the file by a copy, so that another process with the log open cannot change it.

    Raises:
        RunDirectoryError: the file cannot be written.
    """
    copy = path.with_name(f".{path.name}.{secrets.token_hex(8)}{TEMPORARY_SUFFIX}")
    try:
        shutil.copyfile(path, copy)
        copy.replace(path)
    except OSError as error:
        copy.unlink(missing_ok=True)
        raise _cannot("write", path, error) from error


def last_time_s(path: Path) -> float:
    """Give the newest ``t_s`` of a log in seconds, or 0; a resumed run continues from there.

    Raises:
        RunDirectoryError: as for `read_events`.
    """
    return max((event.t_s for event in read_events(path)), default=0.0) if path.exists() else 0.0


def _new_lines(path: Path, offset_bytes: int) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            file.seek(offset_bytes)
            while line := file.readline(_MOST_LINE_BYTES):
                if line.endswith(b"\n"):
                    yield line
                elif len(line) == _MOST_LINE_BYTES:
                    raise RunDirectoryError(
                        f"{path} has a line of more than {_MOST_LINE_BYTES} bytes",
                        fix="Remove that line: no event is that long.",
                    )
    except FileNotFoundError:
        return
    except OSError as error:
        raise _cannot("read", path, error) from error


def _parsed(line: bytes) -> Event:
    try:
        row = _ROW.validate_json(line)  # also rejects deep nesting and lone surrogates
    except ValidationError as error:
        raise ValueError(error.errors()[0]["msg"]) from None
    if _ESCAPED.search(line) is not None:  # rare, and the rest is slow
        row = _printable(row)
    kind, t_s = row.pop("kind"), row.pop("t_s")
    if kind in EVENT_FIELDS:
        return conform(kind, t_s, row)
    return Event(str(kind), float(t_s), row)


def _printable(value: Any) -> Any:
    """Return a value of an event without terminal control characters."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, list):
        return [_printable(each) for each in value]
    if isinstance(value, dict):
        return {printable(name): _printable(each) for name, each in value.items()}
    return value


def _whole_lines_bytes(fd: int) -> int:
    """Give the length of the file up to and including its last newline."""
    end = os.fstat(fd).st_size
    while end > 0:
        start = max(0, end - 65536)
        found = os.pread(fd, end - start, start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0


def _write_all(fd: int, line: bytes) -> None:
    rest = memoryview(line)
    while rest:
        rest = rest[os.write(fd, rest) :]


def _cannot(verb: str, path: Path, error: OSError) -> RunDirectoryError:
    fix = "Check the permissions of the file." if verb == "read" else None
    return RunDirectoryError(f"cannot {verb} {path}: {error.strerror or error}", fix=fix)


LOGS_DIRECTORY = "logs"  # directory of the output of a failed run's actors
_TAIL_BYTES = 65_536


class Ending(Enum):
    """State of a run's end."""

    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped"
    """Stopped on request before its end."""
    GOING = "still going"
    CUT_OFF = "cut off"
    """Its process was killed, or its machine went down, without a recorded error."""
    UNKNOWN = "not finished"
    """Active or killed; this file system has no locks to tell."""
    NOT_BEGUN = "not begun"
    """Starting, or ended before training began without a recorded error."""


def ending_of(run_dir: Path, totals: RunTotals) -> Ending:
    """Return the state of the run in ``run_dir``.

    Args:
        run_dir: directory of the run.
        totals: totals over its events.
    """
    if totals.failed is not None:
        stopped = totals.failed["code"] == InterruptedRunError.code
        return Ending.STOPPED if stopped else Ending.FAILED
    if totals.finished is not None:
        return Ending.FINISHED
    if totals.started is None:
        return Ending.NOT_BEGUN
    going = being_written(run_dir / EVENTS_FILE)
    if going is None:
        return Ending.UNKNOWN
    return Ending.GOING if going else Ending.CUT_OFF


def has_begun(run_dir: Path) -> bool:
    """Return whether a run has written an event, or has logs of its actors."""
    events = run_dir / EVENTS_FILE
    return (events.exists() and events.stat().st_size > 0) or (run_dir / LOGS_DIRECTORY).is_dir()


@contextmanager
def failure_noted(run_dir: Path) -> Iterator[None]:
    """Call `note_failure` if an error leaves this block, at the time of the newest event."""
    try:
        yield
    except BaseException as error:
        note_failure(run_dir, error)
        raise


def note_failure(run_dir: Path, error: BaseException, began_unix_s: float = math.inf) -> None:
    """Write `run_failed` at the end of a run's events; never raises.

    Does nothing for a run without events and without logs, whose directory will be removed, or if
    the process is told to exit: that is not a failure of the run, which counts as cut off.

    Args:
        run_dir: directory of the run; no other process writes its events.
        error: the error that ended it.
        began_unix_s: time of day at which the user's command began. If events were written since
            then, the time since the last event is added to their time.
    """
    path = run_dir / EVENTS_FILE
    if not has_begun(run_dir) or isinstance(error, SystemExit):
        return
    with suppress(GeoRayError, OSError, ValueError, KeyError):
        t_s = 0.0
        if path.exists():
            newest_unix_s = path.stat().st_mtime
            wrote = newest_unix_s >= began_unix_s
            t_s = _newest_s(path) + (max(0.0, time.time() - newest_unix_s) if wrote else 0.0)
        with EventLog(path) as log:
            log.write("run_failed", t_s, **failure_fields(error))


def _newest_s(path: Path) -> float:
    """Return the newest time among the last events."""
    with path.open("rb") as file:
        start = max(0, path.stat().st_size - _TAIL_BYTES)
        file.seek(start)
        lines = [line for line in file if line.endswith(b"\n")]
    return max((json.loads(line)["t_s"] for line in lines[start > 0 :]), default=0.0)


def failure_fields(error: BaseException) -> dict[str, str]:
    """Give the fields of `run_failed` for an error."""
    if isinstance(error, GeoRayError):
        cause = error
    elif isinstance(error, KeyboardInterrupt):
        cause = InterruptedRunError("the run was interrupted and ended immediately")
    else:
        cause = InvariantError(f"{type(error).__name__}: {error}")
    return {"code": cause.code, "message": cause.message, "fix": cause.fix}
