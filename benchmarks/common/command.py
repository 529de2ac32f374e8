"""Runs `geo-ray` as a user does, in its own process, and reads what it leaves behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Timer
from typing import Any

from benchmarks.common import support
from geo_ray.experiment.cluster import LocalClusterConfig
from geo_ray.ray_cluster.local_cluster import LocalCluster

_SHOW_EVERY_S = 10.0
_END_S = 15.0
GEO_RAY = (sys.executable, "-m", "geo_ray.cli.main")


@dataclass(frozen=True, slots=True)
class Run:
    """A run that ended well.

    Attributes:
        directory: its run directory.
        began_unix_s: when its process was started.
        wall_s: how long the process took.
        lines: what it printed on stderr, each with the seconds since it was started.
    """

    directory: Path
    began_unix_s: float
    wall_s: float
    lines: Sequence[tuple[float, str]]

    @property
    def summary(self) -> dict[str, Any]:
        """The content of `summary.json`."""
        return dict(json.loads((self.directory / "summary.json").read_text("utf-8")))

    def events(self, kind: str) -> Iterator[dict[str, Any]]:
        """All events of one kind, in order."""
        for line in (self.directory / "events.jsonl").read_text("utf-8").splitlines():
            event = json.loads(line)
            if event["kind"] == kind:
                yield event

    @property
    def origin_unix_s(self) -> float:
        """The time of day at which its events' clock was 0, to within a second."""
        return self.began_unix_s + float(self.summary["startup_s"])

    def line_s(self, start: str) -> float:
        """Seconds from the start to the first line that begins with ``start``."""
        return next(at_s for at_s, line in self.lines if line.startswith(start))


def geo_ray(
    verb: str,
    config: Path,
    sets: Mapping[str, object],
    runs: Path,
    *,
    cores: set[int] | None = None,
    flags: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 900.0,
    popen: Callable[..., subprocess.Popen[str]] = subprocess.Popen,
) -> Run:
    """Run ``geo-ray VERB CONFIG --plain --set ...`` to its end.

    Args:
        verb: ``train`` or ``simulate``.
        config: a configuration file.
        sets: values by key, as for ``--set``.
        runs: where the run directory is made; new for every run.
        cores: cores that the command and all that it starts may use; None for all.
        flags: further words.
        environment: additions to the environment.
        timeout_s: kill it then.
        popen: starts the process, say in a region of the WAN lab.
    """
    arguments = [f"{key}={value}" for key, value in {**sets, "run.dir": runs}.items()]
    words = [*flags, *(part for argument in arguments for part in ("--set", argument))]
    before = os.sched_getaffinity(0)
    began_unix_s, began_s = time.time(), time.perf_counter()
    if cores is not None:
        os.sched_setaffinity(0, cores)
    try:
        process = popen(
            [*GEO_RAY, verb, str(config), "--plain", *words],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
        )
    finally:
        os.sched_setaffinity(0, before)
    timer = Timer(timeout_s, _end, [process])
    timer.start()
    assert process.stderr is not None
    try:
        lines = list(_heard(process.stderr, began_s))
        code = process.wait()
    finally:  # whoever is interrupted removes the run's directory next: nobody may write there
        timer.cancel()
        _end(process)
    wall_s = time.perf_counter() - began_s
    if code:
        tail = "\n".join(line for _, line in lines[-20:])
        raise RuntimeError(f"geo-ray {verb} {config.name} ended with {code}:\n{tail}")
    (directory,) = runs.iterdir()
    return Run(directory, began_unix_s, wall_s, lines)


def _heard(stream: Iterable[str], began_s: float) -> Iterator[tuple[float, str]]:
    """Each line with the seconds since the start; now and then one is shown, as progress."""
    shown_s = 0.0
    for line in stream:
        at_s = time.perf_counter() - began_s
        if at_s - shown_s >= _SHOW_EVERY_S:
            shown_s = at_s
            support.say(f"  {at_s:.0f} s: {line.rstrip()}")
        yield at_s, line.rstrip()


def _end(process: subprocess.Popen[str]) -> None:
    """End a command that has not ended: the second signal means at once, the third no way back."""
    for ask in (process.terminate, process.terminate, process.kill):
        if process.poll() is not None:
            return
        ask()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)


def command(*words: str, cwd: Path | None = None) -> str:
    """Run ``geo-ray WORDS`` to its end.

    Returns:
        What it printed on stdout.

    Raises:
        RuntimeError: it failed; with the end of what it printed on stderr.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*GEO_RAY, *words], capture_output=True, text=True, cwd=cwd, env=environment, check=False
    )
    if done.returncode:
        raise RuntimeError(
            f"geo-ray {words[0]} ended with {done.returncode}:\n{done.stderr[-2000:]}"
        )
    return done.stdout


@contextmanager
def kept_cluster(
    regions: Sequence[str], cpus_per_region: float
) -> Iterator[tuple[dict[str, object], dict[str, str]]]:
    """A local cluster for several runs, as ``kind: local`` makes it for one.

    Yields:
        What to add to a run's ``sets``, and to its environment.
    """
    with LocalCluster(LocalClusterConfig(), regions, cpus_per_region) as cluster:
        sets = {"cluster": f"{{kind: existing, address: '{cluster.address}'}}"}
        yield dict(sets), dict(cluster.environment)
