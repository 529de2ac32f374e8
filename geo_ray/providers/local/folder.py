"""One machine of the local cloud as its folder tells: who is there to hold the lock, it lives."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from geo_ray.providers.base import Machine, MachineState, Market, Pool
from geo_ray.providers.local import keeper


@dataclass(frozen=True, slots=True)
class LocalMachineFolder:
    """A machine's files; any process may read them, and ask for the machine's end.

    Attributes:
        path: the folder; its name is the machine's.
    """

    path: Path

    @property
    def notice_path(self) -> Path:
        """Where a notice lies once the machine is to be taken back."""
        return self.path / "notice.json"

    def start(self, record: Mapping[str, Any]) -> subprocess.Popen[bytes]:
        """Start the machine's keeper; it lives on when this process ends."""
        put(self.path / "machine.json", record)
        lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the keeper has it from its first moment
            with (self.path / "keeper.log").open("ab") as log:
                return subprocess.Popen(
                    [sys.executable, "-I", "-S", keeper.__file__, str(self.path)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=log,
                    pass_fds=(lock,),
                    start_new_session=True,
                )
        finally:
            os.close(lock)

    def record(self) -> Mapping[str, Any] | None:
        """Return what was launched; None: nothing yet."""
        try:
            found = json.loads((self.path / "machine.json").read_text())
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def was_ever_kept(self) -> bool:
        """Return whether a keeper is there, or has been."""
        return self._is_kept() or (self.path / "kept").exists()

    def machine(self) -> Machine | None:
        """Return the machine as it is now; of one that has ended, nothing runs any more."""
        record = self.record()
        if record is None:
            return None
        state = self._state()
        if state is MachineState.ENDED:
            # of a keeper that was killed; its processes died with it
            shutil.rmtree(record["scratch"], ignore_errors=True)
        ends = [record["ends_unix_s"], self._notice_unix_s()]
        return Machine(
            id=self.path.name,
            request_id=record["request_id"],
            pool=Pool(**{**record["pool"], "market": Market(record["pool"]["market"])}),
            state=state,
            launched_unix_s=record["launched_unix_s"],
            address=record["address"] if state is not MachineState.PENDING else None,
            labels=record["labels"],
            ends_unix_s=min((at for at in ends if at is not None), default=None),
            cluster_id=record.get("cluster_id", ""),  # machines of an earlier release have none
        )

    def ask(self, what: str) -> None:
        """Ask the keeper to ``terminate`` or to ``kill``."""
        with contextlib.suppress(FileNotFoundError):
            (self.path / what).touch()

    def give_notice(self, unix_s: float) -> None:
        """Say that the machine is taken back at a time."""
        put(self.notice_path, {"unix_s": unix_s})

    def _notice_unix_s(self) -> float | None:
        try:
            return float(json.loads(self.notice_path.read_text())["unix_s"])
        except (OSError, ValueError, KeyError):
            return None

    def _state(self) -> MachineState:
        if not self._is_kept():
            return MachineState.ENDED
        if any((self.path / name).exists() for name in ("terminate", "kill", "ending")):
            return MachineState.ENDING
        started = (self.path / "started").exists()
        return MachineState.RUNNING if started else MachineState.PENDING

    def _is_kept(self) -> bool:
        try:
            lock = os.open(self.path / "lock", os.O_RDWR)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(lock)
        return False


def put(path: Path, content: Mapping[str, Any]) -> None:
    """Write a file as a whole or not at all."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(json.dumps(content))
    beside.replace(path)
