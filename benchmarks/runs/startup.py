"""Seconds from the command to the first training step, for the local cluster of the quickstart.

A user's view: the process is started, Python and its libraries are loaded, data are written, a Ray
head and three nodes come up, eleven actors are placed and load their libraries, connect, and the
first region applies its first step (`first_step_s`). The breakdown is read from what the command
prints and from its events.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.common import support
from benchmarks.common.command import Run, geo_ray

CONFIG = support.REPOSITORY / "configs" / "quickstart.yaml"
PHASES = {
    "cluster": "starting the cluster",
    "placement": "checking the cluster",
    "actors": "starting workers",
}
"""What the command says when a phase begins, in order."""


def main() -> None:
    options = support.parse(__doc__)
    machine = support.hardware()
    figures: dict[str, list[float]] = {}
    for number in range(1 if options.quick else 3):
        support.say(f"run {number + 1}")
        with tempfile.TemporaryDirectory() as directory:
            sets = {"train.steps": 8, "train.eval_every": 0}
            run = geo_ray("train", CONFIG, sets, Path(directory) / "runs")
            for name, seconds in breakdown(run, interpreter_s()).items():
                figures.setdefault(name, []).append(seconds)
    support.finish(
        "startup",
        machine,
        [support.median(name, runs, "s") for name, runs in figures.items()],
        options.out,
    )


def breakdown(run: Run, interpreter: float) -> dict[str, float]:
    """Seconds by phase, and their sum until the first step."""
    (started,) = run.events("run_started")
    to_run_s = interpreter + run.summary["startup_s"]
    first = min(run.events("step"), key=lambda event: float(event["t_s"]))
    edges = [run.line_s(text) for text in PHASES.values()]
    spans = [end - start for start, end in zip(edges, [*edges[1:], to_run_s], strict=True)]
    return {
        "first_step_s": to_run_s + first["t_s"] - started["t_s"],
        "imports_and_data_s": edges[0],
        **{f"{name}_s": span for name, span in zip(PHASES, spans, strict=True)},
        "step_1_s": first["t_s"] - started["t_s"],
        "command_s": run.wall_s,
    }


def interpreter_s() -> float:
    """From starting a process to the first line of `geo-ray`, where its own clock begins."""
    code = "from geo_ray.cli.main import BEGAN_UNIX_S; print(BEGAN_UNIX_S)"
    began_unix_s = time.time()
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    return float(found.stdout) - began_unix_s


if __name__ == "__main__":
    main()
