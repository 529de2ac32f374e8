"""Takes a lab down according to its directory's record; may run twice, in any process.

A lab's processes are found by their network namespace, which belongs to the lab alone, so that
daemons that have left their parents are found as well.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

from geo_ray.lab.namespace import path_of

RECORD_FILE: Final = "record.json"
_GRACE_S: Final = 3.0
_GIVE_UP_S: Final = 15.0  # a process blocked in the kernel cannot be ended


def read_record(directory: Path) -> dict[str, Any]:
    """Return the record in a lab's directory; empty if it cannot be read."""
    try:
        record: dict[str, Any] = json.loads((directory / RECORD_FILE).read_text())
    except (OSError, ValueError):
        return {}
    return record


def write_record(directory: Path, record: dict[str, Any]) -> None:
    """Replace the record atomically."""
    draft = directory / (RECORD_FILE + ".new")
    draft.write_text(json.dumps(record))
    draft.replace(directory / RECORD_FILE)


def started_at(pid: int) -> int | None:
    """Return when a running process was started, in clock ticks since boot; None if it has ended.

    Together with the pid this identifies a process, since pids are reused.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def named(pid: int) -> list[int] | None:
    """Return pid and start of a running process for a record; None if it has ended."""
    start = started_at(pid)
    return None if start is None else [pid, start]


def is_alive(process: list[int] | None) -> bool:
    """Return whether the process (pid, start) of a record is running."""
    return process is not None and started_at(process[0]) == process[1]


def take_down(directory: Path) -> None:
    """End a lab's processes, and its relay unless that is the caller; remove its resources."""
    record = read_record(directory)
    namespaces = [str(name) for name in record.get("namespaces", [])]
    _end(partial(_pids_inside, namespaces))
    relay: list[int] = record.get("relay") or [os.getpid(), 0]
    if relay[0] != os.getpid():
        _end(partial(_running, relay))
    for name in namespaces:
        if path_of(name).exists():
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
    for path in record.get("directories", []):
        shutil.rmtree(path, ignore_errors=True)
    shutil.rmtree(directory, ignore_errors=True)
    with contextlib.suppress(OSError):
        directory.parent.rmdir()  # succeeds only after the last lab


def _end(find: Callable[[], list[int]]) -> None:
    """Send SIGTERM to all processes that ``find`` returns, and SIGKILL to those that stay."""
    began_s = time.monotonic()
    reported: set[int] = set()
    while (pids := find()) and time.monotonic() < began_s + _GIVE_UP_S:
        late = time.monotonic() > began_s + _GRACE_S
        for pid in pids:
            if late or pid not in reported:
                reported.add(pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
        time.sleep(0.02)


def _running(process: list[int]) -> list[int]:
    return [process[0]] if is_alive(process) else []


def _pids_inside(namespaces: list[str]) -> list[int]:
    wanted = set()
    for name in namespaces:
        with contextlib.suppress(OSError):
            wanted.add(_identity(path_of(name)))
    found = []
    for entry in Path("/proc").iterdir() if wanted else ():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if _identity(entry / "ns" / "net") in wanted:
                    found.append(int(entry.name))
    return found


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino
