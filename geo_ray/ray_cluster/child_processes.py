"""Client of the process supervisor: starts nodes through it and detects when they end."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from geo_ray.base.errors import ClusterStartError
from geo_ray.ray_cluster import process_supervisor

_READY_S = 20.0
_DOWN_S = 30.0


class SupervisedProcesses:
    """Child processes that cannot outlive this one, and a private directory (mode 0700) for them.

    Args:
        base: parent of the private directory.

    Raises:
        ClusterStartError: the process supervisor does not start.
    """

    def __init__(self, base: Path) -> None:
        self._buffer = b""
        self.exit_codes: dict[str, int] = {}
        self.pids: dict[str, int] = {}
        # -I -S: the supervisor starts in 30 ms and is independent of the user's environment.
        self._supervisor = subprocess.Popen(
            [sys.executable, "-I", "-S", process_supervisor.__file__, str(base), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C in the terminal does not reach it
        )
        try:
            self.root = self._wait_ready(base)
        except BaseException:
            self.close()
            raise

    def start(self, name: str, argv: Sequence[str], env: Mapping[str, str]) -> Path:
        """Start a process; return its output file.

        Args:
            name: name of the process in `pids` and `exit_codes`.
            argv: the program and its arguments.
            env: its whole environment.
        """
        log = self.root / f"{name}.log"
        self._send(do="start", name=name, argv=list(argv), env=dict(env), log=str(log))
        return log

    def keep(self, name: str) -> None:
        """Restart a process from now on whenever it ends by itself."""
        self._send(do="keep", name=name)

    def kill(self, name: str) -> None:
        """Kill a process and its descendants permanently. For fault tests."""
        self._send(do="kill", name=name)

    def poll(self) -> None:
        """Update `pids` and `exit_codes`, without waiting.

        Raises:
            ClusterStartError: the process supervisor is gone.
        """
        self._read(0.0)

    def close(self) -> None:
        """End every process and remove the directory. May be called again, and interrupted."""
        if self._supervisor.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._supervisor.stdin.close()  # the supervisor then ends everything
        try:
            self._supervisor.wait(_DOWN_S)
        except subprocess.TimeoutExpired:
            self._supervisor.kill()  # its children die with it
            self._supervisor.wait(_DOWN_S)
        for stream in (self._supervisor.stdout, self._supervisor.stderr):
            if stream is not None:
                stream.close()

    def _wait_ready(self, base: Path) -> Path:
        deadline = time.monotonic() + _READY_S
        while time.monotonic() < deadline:
            for event in self._read(0.1):
                if event["event"] == "ready":
                    return Path(event["root"])
        raise ClusterStartError(f"the process supervisor did not start below {base}")

    def _send(self, **command: Any) -> None:
        stream = self._supervisor.stdin
        if stream is None or stream.closed:
            raise ClusterStartError("the local cluster is already down")
        try:
            stream.write((json.dumps(command) + "\n").encode())
            stream.flush()
        except BrokenPipeError:
            self._gone()

    def _read(self, longest_s: float) -> list[dict[str, Any]]:
        stream = self._supervisor.stdout
        if stream is None or stream.closed:
            return []
        events: list[dict[str, Any]] = []
        while select.select([stream], [], [], longest_s)[0]:
            read = os.read(stream.fileno(), 1 << 16)
            if not read:
                self._gone()
            *lines, self._buffer = (self._buffer + read).split(b"\n")
            events += [json.loads(line) for line in lines]
            longest_s = 0.0
        for event in events:
            if event["event"] == "started":
                self.pids[event["name"]] = event["pid"]
                self.exit_codes.pop(event["name"], None)
            elif event["event"] == "exited":
                self.exit_codes[event["name"]] = event["code"]
        return events

    def _gone(self) -> NoReturn:
        self._supervisor.wait(_DOWN_S)
        said = b"" if self._supervisor.stderr is None else self._supervisor.stderr.read()
        tail = said.decode(errors="replace").strip().splitlines()[-1:]
        raise ClusterStartError(
            f"the process supervisor ended: {''.join(tail) or self._supervisor.returncode}"
        )
