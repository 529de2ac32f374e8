"""A real run in a process of its own, watched by its events while something is done to it."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common.command import GEO_RAY

POLL_S = 0.02
END_S = 120.0


@dataclass(slots=True)
class WatchedRun:
    """See the module's docstring.

    Attributes:
        directory: of the run.
        config: file of its configuration.
        sets: values by key, as for ``--set``.
        environment: additions to the environment.
        events: what was read so far, in order.
        process: of the command that is shown the run.
        origin_unix_s: time of day at which the events' clock was 0, in this stretch of the run: the
            clock stands still between a stretch and the next. From the event that was read soonest
            after it happened, so late by what it takes to write one, some 0.2 s at most.
    """

    directory: Path
    config: Path
    sets: Mapping[str, object]
    environment: Mapping[str, str]
    events: list[dict[str, Any]] = field(default_factory=list)
    process: subprocess.Popen[bytes] | None = None
    origin_unix_s: float = float("inf")
    _read_bytes: int = 0

    def start(self, *flags: str) -> None:
        """Start ``geo-ray train``, or go on with ``--resume RUN``."""
        given = (
            flags
            if "--resume" in flags
            else (str(self.config), "--set", f"run.dir={self.directory.parent}", *flags)
        )
        words = [word for key, value in self.sets.items() for word in ("--set", f"{key}={value}")]
        self.directory.parent.mkdir(parents=True, exist_ok=True)
        with (self.directory.parent / "output.txt").open("ab") as output:
            self.process = subprocess.Popen(
                [*GEO_RAY, "train", *given, "--plain", *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, "OMP_NUM_THREADS": "1", **self.environment},
            )

    def look(self) -> Sequence[dict[str, Any]]:
        """Read what is new; steps are given ``unix_s``, the time of day at which they were done."""
        log = self.directory / "events.jsonl"
        if not log.is_file():
            return []
        with log.open("rb") as stream:
            stream.seek(self._read_bytes)
            new = stream.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        found = [json.loads(line) for line in whole.splitlines()]
        for event in found:
            if event["kind"] == "run_started":
                self.origin_unix_s = float("inf")
            if event["kind"] in {"step", "exchange", "run_actor_attached"}:
                self.origin_unix_s = min(self.origin_unix_s, time.time() - event["t_s"])
                event["unix_s"] = self.origin_unix_s + event["t_s"]
        self.events += found
        return found

    def follow(self, for_s: float) -> Iterator[dict[str, Any]]:
        """Give each new event for so many seconds, or until the command ends.

        Raises:
            RuntimeError: it ended with an error.
        """
        until_s = time.monotonic() + for_s
        while time.monotonic() < until_s:
            yield from self.look()
            code = None if self.process is None else self.process.poll()
            if code is not None:
                yield from self.look()
                if code:
                    raise RuntimeError(f"geo-ray train ended with {code}:\n{self.tail()}")
                return
            time.sleep(POLL_S)

    def tail(self) -> str:
        """The last lines that it printed."""
        output = (self.directory.parent / "output.txt").read_text(errors="replace")
        return "\n".join(output.splitlines()[-25:])

    def end(self) -> None:
        """Have it save and end; kill it if it does not."""
        if self.process is None or self.process.poll() is not None:
            return
        self.process.terminate()
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
