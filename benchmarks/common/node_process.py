"""A region's process in a benchmark: takes orders, and answers, as one JSON object per line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from geo_ray.lab.lab import Lab


class NodeProcess:
    """Runs a program that reads who it is, and then one order after another.

    Args:
        program: a Python file.
        region: where it runs.
        hello: its first line; holds keys, which arguments would show to others.
        lab: has the region's namespace; None runs it beside this process.
        python: runs it; None for this process's interpreter.
        environment: its whole environment; None for that of this process.
    """

    def __init__(
        self,
        program: Path,
        region: str,
        hello: Mapping[str, Any],
        lab: Lab | None,
        python: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        argv = [str(python or sys.executable), str(program)]
        pipes: dict[str, Any] = {
            "stdin": subprocess.PIPE,
            "stdout": subprocess.PIPE,
            "text": True,
            "env": environment,
        }
        self.region = region
        self.process: subprocess.Popen[str] = (
            subprocess.Popen(argv, **pipes) if lab is None else lab.popen(region, argv, **pipes)
        )
        self._say(hello)

    def ask(self, do: str, **order: Any) -> dict[str, Any]:
        """Have it do something; its answer."""
        self._say({"do": do, **order})
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the node of {self.region} ended")
        return dict(json.loads(line))

    def end(self) -> None:
        """Leave no process behind."""
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait(10)

    def _say(self, line: Mapping[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(line) + "\n")
        self.process.stdin.flush()
