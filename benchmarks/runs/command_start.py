"""Seconds until a command of `geo-ray` says something and until the prompt is back; CPU seconds.

A user's view: the process is started, and its output is read as it comes. Commands that only read
a run are measured on one that was simulated before.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.common import support

CONFIG = support.REPOSITORY / "configs" / "quickstart.yaml"
_SMALL = ("--set", "train.steps=8", "--set", "train.eval_every=0")


def main() -> None:
    options = support.parse(__doc__)
    machine = support.hardware()
    figures: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as directory:
        place = ("--set", f"run.dir={directory}")
        run = str(Path(directory) / "quickstart")
        commands: Mapping[str, Sequence[str]] = {
            "simulate": ("simulate", str(CONFIG), *_SMALL, *place),
            "help": ("--help",),
            "status": ("status", run),
            "members": ("members", run),
            "checkpoints": ("checkpoints", run),
            "stop": ("stop", run),
            "report": ("report", run),
            "config_show": ("config", "show", str(CONFIG)),
            "dry_run": ("train", str(CONFIG), "--dry-run"),
        }
        for number in range(1 if options.quick else 5):
            support.say(f"run {number + 1}")
            for name, words in commands.items():
                first_s, last_s, whole_s, cpu_s = timed(words)
                figures.setdefault(f"{name}_first_s", []).append(first_s)
                figures.setdefault(f"{name}_s", []).append(whole_s)
                figures.setdefault(f"{name}_exit_s", []).append(whole_s - last_s)
                figures.setdefault(f"{name}_cpu_s", []).append(cpu_s)
    support.finish(
        "command_start",
        machine,
        [support.median(name, runs, "s") for name, runs in figures.items()],
        options.out,
    )


def timed(words: Sequence[str]) -> tuple[float, float, float, float]:
    """Seconds until a command's first output, its last output and its end; its CPU seconds."""
    before_s = _children_cpu_s()
    began_s = time.perf_counter()
    process = subprocess.Popen(
        [str(Path(sys.executable).with_name("geo-ray")), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        bufsize=0,
    )
    assert process.stdout is not None
    first_s = last_s = None
    while process.stdout.read(1 << 16):
        last_s = time.perf_counter() - began_s
        first_s = last_s if first_s is None else first_s
    if process.wait() or first_s is None or last_s is None:
        raise RuntimeError(f"{' '.join(words)} ended with {process.returncode}")
    return first_s, last_s, time.perf_counter() - began_s, _children_cpu_s() - before_s


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
