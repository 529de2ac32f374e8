"""Keeper process of one local machine: starts its programs and ends them.

The process runs without packages (``python -I -S local_machine.py FOLDER``) and has no parent. It
holds a lock on ``lock`` in its folder, inherited from the process that launched it, for as long as
it lives. It ends the machine at the end of its lifetime, at the deadline of a notice, when its
program ends, when the file ``terminate`` or ``kill`` appears, or when the owner process of the
cloud or the folder disappears.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

_TICK_S = 0.05


class LocalMachineEmulator:
    """Keeper of a local machine; see the module.

    Args:
        folder: folder of the machine; ``machine.json`` has its programs and lifetime.
        supervisor: starts and ends processes, and removes their scratch directory.
    """

    def __init__(self, folder: Path, supervisor: Any) -> None:
        self._folder = folder
        self._supervisor = supervisor
        self._is: dict[str, Any] = json.loads((folder / "machine.json").read_text())
        self._started = False

    def run(self) -> None:
        """Run the machine until it ends."""
        reason = "it was terminated"
        (self._folder / "kept").touch()
        try:
            while not (ended := self._reason_to_end()):
                due = time.time() >= self._is["launched_unix_s"] + self._is["start_delay_s"]
                if due and not self._started:
                    self._start()
                self._supervisor.reap()
                time.sleep(_TICK_S)
            reason = ended
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            with contextlib.suppress(OSError):
                (self._folder / "ending").write_text(reason)
            if reason == "it was killed":
                self._supervisor.kill_all()
            self._supervisor.take_down()

    def _start(self) -> None:
        for name, program in self._is["programs"].items():
            log = str(self._folder / f"{name}.log")
            self._supervisor.obey({"do": "start", "name": name, "log": log, **program})
        self._started = True
        (self._folder / "started").touch()

    def _reason_to_end(self) -> str | None:
        if not (self._folder / "machine.json").exists():
            return "its folder was removed"
        for name in ("terminate", "kill"):
            if (self._folder / name).exists():
                return f"it was {name.rstrip('e')}ed"
        if time.time() >= (self._is["ends_unix_s"] or float("inf")):
            return "its lifetime was over"
        with contextlib.suppress(OSError, ValueError, KeyError):
            if time.time() >= json.loads((self._folder / "notice.json").read_text())["unix_s"]:
                return "it was preempted"
        if self._started and self._is["main"] not in self._supervisor.running:
            return "its program ended"
        owner = self._is["owner"]
        if owner is not None and born(owner["pid"]) != owner["born"]:
            return "its owner process ended"
        return None


def born(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot; None if it does not exist."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[19])


def main(folder: Path) -> None:
    """Run a machine; returns when it has ended."""
    if os.fork():  # detach: Ray kills the children of an actor with it
        os._exit(0)
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from geo_ray.ray_cluster.process_supervisor import ProcessSupervisor, begin_supervising

    os.chdir("/")
    begin_supervising()
    scratch = Path(json.loads((folder / "machine.json").read_text())["scratch"])
    scratch.mkdir(mode=0o700, exist_ok=True)
    if scratch.stat().st_uid != os.getuid():
        sys.exit(f"{scratch} belongs to another user")
    LocalMachineEmulator(folder, ProcessSupervisor(scratch)).run()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
