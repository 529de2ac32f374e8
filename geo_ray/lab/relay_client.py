"""Start a relay's process, wait for its end, and send requests to its control socket."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Final

from geo_ray.base.errors import ConfigError, LabDownError, LabError
from geo_ray.base.threads import LOOK_S
from geo_ray.lab.relay import READY

_ANSWER_BYTES: Final = 1 << 18
_TIMEOUT_S: Final = 10.0
_number = itertools.count()


class RelayClient:
    """A client of one relay; several threads may use it.

    Args:
        control_path: its control socket.
    """

    def __init__(self, control_path: Path) -> None:
        self._path = control_path

    def ask(self, do: str, **values: Any) -> dict[str, Any]:
        """Send a request and return the answer.

        Args:
            do: name of the request; see `geo_ray.lab.relay.Control`.
            values: JSON values.

        Raises:
            LabDownError: the relay does not answer.
            ConfigError: the relay refuses the request; the message says why.
        """
        own = self._path.with_name(
            f"client-{os.getpid()}-{threading.get_ident()}-{next(_number)}.sock"
        )
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as asking:
            asking.settimeout(_TIMEOUT_S)
            asking.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _ANSWER_BYTES)
            try:
                asking.bind(str(own))
                asking.sendto(json.dumps({"do": do, **values}).encode(), str(self._path))
                answer: dict[str, Any] = json.loads(asking.recv(_ANSWER_BYTES))
            except OSError as error:
                raise LabDownError(f"the lab's relay does not answer: {error}") from error
            finally:
                own.unlink(missing_ok=True)
        if "error" in answer:
            raise ConfigError(
                f"the lab's relay refuses '{do}': {answer['error']}",
                fix="Correct the named value; `geo-ray lab status` lists regions and links.",
            )
        return answer


LOG_FILE: Final = "relay.log"
_READY_S: Final = 30.0
_DOWN_S: Final = 40.0
_LOG_LINES: Final = 3
_PACKAGE_PARENT: Final = str(Path(__file__).resolve().parents[2])


class RelayProcess:
    """A relay's process, which cannot outlive this one unless it is detached.

    Args:
        directory: the lab's directory, with its plan.
        detached: let the relay continue when this process ends.
    """

    def __init__(self, directory: Path, *, detached: bool) -> None:
        self._log = directory / LOG_FILE
        argv = [sys.executable, "-S", "-m", "geo_ray.lab.relay", str(directory)]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*argv, "--detached"] if detached else argv,
                stdin=subprocess.DEVNULL if detached else subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd="/",
                env={"PYTHONPATH": _PACKAGE_PARENT, "PATH": os.environ.get("PATH", os.defpath)},
                start_new_session=True,  # Ctrl-C in the terminal does not reach it
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
        while True:
            try:
                self._process.wait(LOOK_S if longest_s is None else longest_s)
                return True
            except subprocess.TimeoutExpired:
                if longest_s is not None:
                    return False

    def release(self) -> None:
        """Close the owner's end, so that the relay takes its lab down, and wait for its end."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
            self.wait(_DOWN_S)
