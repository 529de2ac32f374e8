"""Which process this is, and whether another one is still there."""

from __future__ import annotations

import os
import secrets
import socket
from datetime import UTC, datetime
from pathlib import Path

from geo_ray.lease.record import Owner


def this_process() -> Owner:
    """This process as the holder of a lease; another one at every call."""
    return Owner(
        host=socket.gethostname(),
        pid=os.getpid(),
        machine=_machine(),
        started=_started(os.getpid()) or "",
        token=secrets.token_hex(8),
        since=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def has_ended(owner: Owner) -> bool | None:
    """Whether a process is gone; None if that cannot be known from this machine.

    Process ids mean the same only within one namespace of one start of one machine. A process that
    has ended and is not yet taken note of by its parent is gone: it writes nothing any more.
    """
    if not owner.machine or not owner.started or owner.machine != _machine():
        return None
    return _started(owner.pid) != owner.started


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return ""


def _started(pid: int) -> str | None:
    """When a process began, in its system's ticks; None if it is not there."""
    try:
        # The name, in parentheses, may have blanks and parentheses of its own.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    state, started = fields[0], fields[19]
    return None if state in ("Z", "X") else started
