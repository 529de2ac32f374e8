"""A small process that is one local machine: it starts the programs there, and ends them.

It runs alone (``python -I -S local_machine.py FOLDER``), belongs to nobody, and is found by its
folder: whoever launched it gave it a lock on ``lock``, which it holds as long as it lives. It ends
the machine when its time is up, when a notice's deadline has come, when its program ends, when the
file ``terminate`` or ``kill`` appears, when the process that owns the cloud is gone, or the folder
is.
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


class LocalMachineKeeper:
    """See the module.

    Args:
        folder: of the machine; ``machine.json`` there says what to run and until when.
        supervisor: starts and ends processes, and removes their scratch directory.
    """

    def __init__(self, folder: Path, supervisor: Any) -> None:
        self._folder = folder
        self._supervisor = supervisor
        self._is: dict[str, Any] = json.loads((folder / "machine.json").read_text())
        self._started = False

    def run(self) -> None:
        """Be the machine until it ends."""
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
            return "its folder is gone"
        for name in ("terminate", "kill"):
            if (self._folder / name).exists():
                return f"it was {name.rstrip('e')}ed"
        if time.time() >= (self._is["ends_unix_s"] or float("inf")):
            return "its time was up"
        with contextlib.suppress(OSError, ValueError, KeyError):
            if time.time() >= json.loads((self._folder / "notice.json").read_text())["unix_s"]:
                return "it was taken back"
        if self._started and self._is["main"] not in self._supervisor.running:
            return "its program ended"
        owner = self._is["owner"]
        if owner is not None and born(owner["pid"]) != owner["born"]:
            return "its owner is gone"
        return None


def born(pid: int) -> int | None:
    """When a process began, in ticks since the machine did; None if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[19])


def main(folder: Path) -> None:
    """Be a machine; returns when it has ended."""
    if os.fork():  # nobody's child from here on: Ray ends the children of an actor with it
        os._exit(0)
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from geo_ray.ray_cluster.process_supervisor import ProcessSupervisor, begin_supervising

    os.chdir("/")
    begin_supervising()
    scratch = Path(json.loads((folder / "machine.json").read_text())["scratch"])
    scratch.mkdir(mode=0o700, exist_ok=True)
    if scratch.stat().st_uid != os.getuid():
        sys.exit(f"{scratch} is another user's")
    LocalMachineKeeper(folder, ProcessSupervisor(scratch)).run()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
