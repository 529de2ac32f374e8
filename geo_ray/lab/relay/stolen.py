"""What the kernel counts about the relay's place on the machine: stolen time, the run queue."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Final

_STAT: Final = Path("/proc/stat")
_SCHEDSTAT: Final = Path("/proc/thread-self/schedstat")
_STEAL_COLUMN: Final = 8  # name, user, nice, system, idle, iowait, irq, softirq, steal


def stolen_s() -> float:
    """Seconds since the boot in which the host ran others on the cores of this process."""
    with _STAT.open() as lines:
        text = lines.read()
    return stolen_ticks(text, os.sched_getaffinity(0)) / os.sysconf("SC_CLK_TCK")


def waited_s() -> float | None:
    """Seconds that this thread has been ready without a core; None if the kernel counts none."""
    try:
        return run_queue_ns(_SCHEDSTAT.read_text()) * 1e-9
    except (OSError, ValueError):
        return None


def stolen_ticks(stat: str, cores: Collection[int]) -> int:
    """The column ``steal`` of these cores in the text of ``/proc/stat``; 0 where it is missing."""
    found = 0
    wanted = {f"cpu{core}" for core in cores}
    for line in stat.splitlines():
        columns = line.split()
        if columns and columns[0] in wanted and len(columns) > _STEAL_COLUMN:
            found += int(columns[_STEAL_COLUMN])
    return found


def run_queue_ns(schedstat: str) -> int:
    """The wait in the text of ``/proc/PID/schedstat``: time run, time waited, turns.

    Raises:
        ValueError: it has no such text.
    """
    _, waited, _ = schedstat.split()
    return int(waited)
