"""Starts a relay's process and waits for its end."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Final

from geo_ray.errors import LabError
from geo_ray.lab.relay.main import READY

LOG_FILE: Final = "relay.log"
_READY_S: Final = 30.0
_DOWN_S: Final = 40.0
_LOG_LINES: Final = 3
_PACKAGE_PARENT: Final = str(Path(__file__).resolve().parents[3])


class RelayProcess:
    """A relay's process, which cannot outlive this one unless it is detached.

    Args:
        directory: the lab's directory, with its plan.
        detached: let the relay live on when this process ends.
    """

    def __init__(self, directory: Path, *, detached: bool) -> None:
        self._log = directory / LOG_FILE
        argv = [sys.executable, "-S", "-m", "geo_ray.lab.relay.main", str(directory)]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*argv, "--detached"] if detached else argv,
                stdin=subprocess.DEVNULL if detached else subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd="/",
                env={"PYTHONPATH": _PACKAGE_PARENT, "PATH": os.environ.get("PATH", os.defpath)},
                start_new_session=True,  # Ctrl-C in the terminal must not reach it
            )

    @property
    def pid(self) -> int:
        """The relay's process id."""
        return self._process.pid

    def wait_ready(self) -> None:
        """Return once the relay has opened its devices.

        Raises:
            LabError: the relay ended, or was not ready in time.
        """
        stream = self._process.stdout
        said = b""
        if stream is not None:
            with stream:
                if select.select([stream], [], [], _READY_S)[0]:
                    said = os.read(stream.fileno(), len(READY))
        if said != READY:
            self._process.kill()
            self._process.wait()
            lines = self._log.read_text(errors="replace").splitlines() if self._log.exists() else []
            reason = " | ".join(lines[-_LOG_LINES:]) or "no answer"
            raise LabError(f"the relay did not start: {reason}")

    def wait(self, longest_s: float | None = None) -> bool:
        """Wait until the relay has ended; return False if it has not by then."""
        try:
            self._process.wait(longest_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def let_go(self) -> None:
        """Close the owner's end, so that the relay takes its lab down, and wait for its end."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
            self.wait(_DOWN_S)
