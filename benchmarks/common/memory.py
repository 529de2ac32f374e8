"""How much memory a command and all that it started hold together."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

_PROC = Path("/proc")
_LOOK_S = 0.1
_SHARED_EVERY_S = 4.0  # the kernel walks all pages for it


@dataclass(slots=True)
class MemoryPeak:
    """The most that a tree of processes held at a time.

    Private pages are the kernel's counters, read ten times a second. Pages that are shared (of
    files and of shared memory) count for each process by its part, and are looked at every 4 s.

    Attributes:
        bytes: together.
        by_process: of them, by process: (bytes, command).
    """

    bytes: int = 0
    by_process: dict[int, tuple[int, str]] = field(default_factory=dict)


@contextmanager
def memory_peak(root: int | None = None) -> Iterator[MemoryPeak]:
    """Follow all processes below ``root`` (this process by default, which does not count)."""
    peak, ended = MemoryPeak(), threading.Event()
    thread = threading.Thread(target=_follow, args=(root or os.getpid(), peak, ended), daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        ended.set()
        thread.join()


def _follow(root: int, peak: MemoryPeak, ended: threading.Event) -> None:
    shared: dict[int, int] = {}
    looked_s = 0.0
    while not ended.wait(_LOOK_S):
        below = _below(root)
        if time.monotonic() - looked_s > _SHARED_EVERY_S:
            shared = {pid: _shared_bytes(pid) for pid in below}
            looked_s = time.monotonic()
        held = {pid: _private_bytes(pid) + shared.get(pid, 0) for pid in below}
        if sum(held.values()) > peak.bytes:
            peak.bytes = sum(held.values())
            peak.by_process = {pid: (size, _command(pid)) for pid, size in held.items()}


def _below(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            fields = _text(entry / "stat").rpartition(")")[2].split()
            if fields:
                children.setdefault(int(fields[1]), []).append(int(entry.name))
    found = list(children.get(root, []))
    for pid in found:
        found += children.get(pid, [])
    return found


def _private_bytes(pid: int) -> int:
    return _kib(_text(_PROC / str(pid) / "status"), "RssAnon:")


def _shared_bytes(pid: int) -> int:
    text = _text(_PROC / str(pid) / "smaps_rollup")
    return _kib(text, "Pss_File:") + _kib(text, "Pss_Shmem:")


def _kib(text: str, name: str) -> int:
    found = [line.split()[1] for line in text.splitlines() if line.startswith(name)]
    return 1024 * int(found[0]) if found else 0


def _command(pid: int) -> str:
    return _text(_PROC / str(pid) / "cmdline").replace("\0", " ").strip()[:200]


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", errors="replace")
    except OSError:  # it has just ended
        return ""
