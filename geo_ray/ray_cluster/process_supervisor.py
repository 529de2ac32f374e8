"""A small process that owns the processes of a local cluster, and ends with its parent.

It runs alone (``python -I -S supervisor.py BASE``), imports only the standard library, and is the
parent of every node. It creates a private directory below BASE, starts processes on command, and
ends everything (SIGTERM, then SIGKILL, then the directory) when its standard input ends. That
happens when its parent closes it, and also when the parent dies for any reason. It is a
*subreaper*: processes whose parents died become its children, so none can escape.

Commands, one JSON object per line on standard input::

    {"do": "start", "name": NAME, "argv": [...], "env": {...}, "log": PATH}
    {"do": "keep", "name": NAME}   restart it from now on when it ends by itself
    {"do": "kill", "name": NAME}   end it without a restart

Events, one per line on standard output::

    {"event": "ready", "root": PATH}
    {"event": "started", "name": NAME, "pid": PID}
    {"event": "exited", "name": NAME, "code": EXIT_CODE}
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLITE_S = 3.0
_FORCE_S = 20.0
_TICK_S = 0.1
_AGAIN_S = 1.0  # before a restart; doubles each time
_LONGEST_AGAIN_S = 60.0


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def begin_supervising() -> None:
    """Ignore the terminal's signals, end on SIGTERM, and adopt processes whose parents die."""
    for ignored in (signal.SIGINT, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _exit)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _exit(_number: int, _frame: object) -> None:
    sys.exit(0)


def _die_with_supervisor() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _parents() -> dict[int, int]:
    """Return the parent of every visible process, by process id."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                stat = (entry / "stat").read_text()
                # the name in brackets may contain blanks and brackets
                found[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
    return found


def descendants(pid: int) -> set[int]:
    """Return every running process below ``pid``."""
    children: dict[int, list[int]] = {}
    for child, parent in _parents().items():
        children.setdefault(parent, []).append(child)
    found: set[int] = set()
    queue = [pid]
    while queue:
        below = children.get(queue.pop(), [])
        queue += [p for p in below if p not in found]
        found.update(below)
    return found


class ProcessSupervisor:
    """Starts and ends the processes; see the module."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._pids: dict[str, int] = {}
        self._orders: dict[str, dict[str, Any]] = {}  # start commands
        self._ends: dict[str, int] = {}  # number of ends of restarted processes
        self._due_s: dict[str, float] = {}  # when to restart them

    @property
    def running(self) -> frozenset[str]:
        """Names of started processes that have not ended."""
        return frozenset(self._pids)

    def obey(self, command: dict[str, Any]) -> None:
        """Execute one command."""
        name = command["name"]
        if command["do"] == "keep":
            self._ends[name] = 0
            if name not in self._pids:
                self._due_s[name] = time.monotonic()
            return
        if command["do"] == "kill":
            self._ends.pop(name, None)
            self._due_s.pop(name, None)
            if name in self._pids:
                os.kill(self._pids[name], signal.SIGKILL)
            return
        self._orders[name] = command
        with Path(command["log"]).open("ab") as log:
            process = subprocess.Popen(
                command["argv"],
                env=command["env"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=_die_with_supervisor,  # safe: this process has one thread
            )
        process.returncode = 0  # reaped below, together with adopted processes
        self._pids[name] = process.pid
        emit({"event": "started", "name": name, "pid": process.pid})

    def reap(self) -> None:
        """Reap ended processes, and report those that were started by command."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for name in [n for n, p in self._pids.items() if p == pid]:
                del self._pids[name]
                code = os.waitstatus_to_exitcode(status)
                emit({"event": "exited", "name": name, "code": code})
                if name in self._ends:
                    wait_s = min(_LONGEST_AGAIN_S, _AGAIN_S * 2 ** self._ends[name])
                    self._ends[name] += 1
                    self._due_s[name] = time.monotonic() + wait_s

    def start_again(self) -> None:
        """Restart processes whose restart is due."""
        now_s = time.monotonic()
        for name in [name for name, due_s in self._due_s.items() if now_s >= due_s]:
            del self._due_s[name]
            self.obey(self._orders[name])

    def kill_all(self) -> None:
        """Kill every process below this one, as a power cut would."""
        for pid in descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)

    def take_down(self) -> None:
        """End every process below this one, then remove the directory."""
        for pid in self._pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        self._wait(_POLITE_S, signal.SIGTERM)
        self._wait(_FORCE_S, signal.SIGKILL)
        shutil.rmtree(self._root, ignore_errors=True)

    def _wait(self, longest_s: float, how: signal.Signals) -> None:
        """Wait for the supervised processes after SIGTERM, for all descendants after SIGKILL."""
        deadline = time.monotonic() + longest_s
        while time.monotonic() < deadline:
            self.reap()
            if not (descendants(os.getpid()) if how == signal.SIGKILL else self._pids):
                return
            if how == signal.SIGKILL:
                self.kill_all()
            time.sleep(0.02)


def emit(event: dict[str, Any]) -> None:
    """Write one event, unless the parent has closed the pipe."""
    with contextlib.suppress(BrokenPipeError):
        os.write(1, (json.dumps(event) + "\n").encode())


def serve(supervisor: ProcessSupervisor, parent: int) -> None:
    """Execute commands until standard input ends or the parent is gone."""
    pending = b""
    while os.getppid() == parent:
        if select.select([0], [], [], _TICK_S)[0]:
            read = os.read(0, 1 << 16)
            if not read:
                return
            *lines, pending = (pending + read).split(b"\n")
            for line in lines:
                supervisor.obey(json.loads(line))
        supervisor.reap()
        supervisor.start_again()


def main(base: str, parent: int) -> None:
    """Run until ended.

    Args:
        base: parent of the private directory.
        parent: process id of the parent.
    """
    begin_supervising()
    root = Path(tempfile.mkdtemp(prefix="geo-ray-", dir=base))
    supervisor = ProcessSupervisor(root)
    try:
        emit({"event": "ready", "root": str(root)})
        serve(supervisor, parent)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        supervisor.take_down()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
