"""One training of one system of `peers.py` in a WAN lab of its own, and what came of it."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import support
from benchmarks.common.node_process import NodeProcess
from benchmarks.peers.peers_work import Workload
from geo_ray.lab.lab import Lab, RayOptions, start_ray
from geo_ray.lab.stats import LabStats
from geo_ray.lab.topology import DefaultLink, LabRegionConfig, Topology

HERE = Path(__file__).resolve().parent
REGIONS = ("A", "B")
GIVE_UP_S = 600.0
SAMPLE_S = 1.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one training came to.

    Attributes:
        curve: steps, seconds since the first step began, and held-out loss, one after the other.
        wan_bytes: IP bytes in both directions from the first step until the last evaluation.
        rounds: synchronisations of the whole model.
        cpu_fraction: of all cores, in the same time, by whatever ran.
        late_fraction: of the packets of the link where it is largest.
    """

    curve: Sequence[tuple[int, float, float]]
    wan_bytes: float
    rounds: int
    cpu_fraction: float
    late_fraction: float

    @property
    def final_loss(self) -> float:
        """Held-out loss after the whole budget."""
        return self.curve[-1][2]

    @property
    def seconds(self) -> float:
        """How long the whole budget took."""
        return self.curve[-1][1]

    def best_by(self, share: float) -> float:
        """The lowest loss that was seen after this share of the budget."""
        return min(
            (loss for steps, _, loss in self.curve if steps <= share * self.curve[-1][0]),
            default=math.inf,
        )

    def reached_s(self, target: float) -> float:
        """When the loss was first at the target, on lines between the evaluations."""
        before_s, above = 0.0, math.inf
        for _, now_s, loss in self.curve:
            if loss <= target:
                share = 1.0 if math.isinf(above) else (above - target) / (above - loss)
                return before_s + share * (now_s - before_s)
            before_s, above = now_s, loss
        return math.inf


class Meter:
    """Notes the lab's bytes and the machine's busy time every second."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._samples: list[tuple[float, float, float, float]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Meter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def between(self, start_unix_s: float, end_unix_s: float) -> tuple[float, float]:
        """Bytes, and the share of the cores that was busy, between two times of day."""
        first, last = self._at(start_unix_s), self._at(end_unix_s)
        sent, busy, ticks = (b - a for a, b in zip(first[1:], last[1:], strict=True))
        return sent, busy / max(1.0, ticks)

    def _at(self, unix_s: float) -> tuple[float, float, float, float]:
        """The first sample that is not before, or the last one."""
        return next((s for s in self._samples if s[0] >= unix_s), self._samples[-1])

    def _watch(self) -> None:
        while True:
            links = self._lab.stats().links.values()
            line = Path("/proc/stat").read_text("utf-8").splitlines()[0]
            ticks = [int(number) for number in line.split()[1:9]]
            idle = ticks[3] + ticks[4]  # and waiting for disks
            sent = sum(link.out_bytes for link in links)
            self._samples.append((time.time(), sent, sum(ticks) - idle, sum(ticks)))
            if self._ended.wait(SAMPLE_S):
                return


@contextmanager
def _lab(link: DefaultLink) -> Iterator[Lab]:
    regions = tuple(LabRegionConfig(name=name) for name in REGIONS)
    with Lab(Topology(congestion_control="cubic", link=link, regions=regions)) as lab:
        yield lab


# ------------------------------------------------------------------ the peers


def train_peer(
    program: Path,
    python: Path,
    workload: Workload,
    options: Mapping[str, Any],
    seed: int,
    link: DefaultLink,
) -> tuple[Outcome, LabStats]:
    """Train with a peer: a process per region.

    Args:
        program: of a region.
        python: interpreter that has the peer.
        workload: what to train.
        options: of the peer's own.
        seed: of model and rows.
        link: both ways.
    """
    with _lab(link) as lab:
        nodes: list[NodeProcess] = []
        try:
            for index, region in enumerate(lab.regions):
                hello = {
                    "index": index,
                    "regions": len(lab.regions),
                    "host": lab.addresses[region],
                    "workload": workload.plain(),
                    "options": dict(options),
                    "seed": seed,
                }
                environment = _peers_environment(lab, region)
                nodes.append(NodeProcess(program, region, hello, lab, python, environment))
            opened = _all(nodes, "open")
            _all(nodes, "connect", address=opened[0]["address"])
            lab.reset()
            with Meter(lab) as meter:
                told = _all(nodes, "train")
            stats = lab.stats()
            _all(nodes, "close")
        finally:
            for node in nodes:
                node.end()
    began_s = min(each["began_unix_s"] for each in told)
    sent, busy = meter.between(began_s, max(each["ended_unix_s"] for each in told))
    curve = [
        (
            max(steps for _, steps, *_ in group),
            max(at_s for _, _, at_s, *_ in group) - began_s,
            sum(e[3] for e in group) / sum(e[4] for e in group),
        )
        for group in _by_round([each["evals"] for each in told])
    ]
    return Outcome(curve, sent, told[0]["rounds"], busy, stats.late_fraction), stats


def _all(nodes: Sequence[NodeProcess], do: str, **order: Any) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(len(nodes)) as pool:
        return list(pool.map(lambda node: node.ask(do, **order), nodes))


def _by_round(told: Sequence[list[list[Any]]]) -> list[list[list[Any]]]:
    """The regions' evaluations that belong together: of one round, and the last ones."""
    rounds = [{each[0]: each for each in evals[:-1]} for evals in told]
    common = sorted(set.intersection(*(set(each) for each in rounds)))
    return [*([each[n] for each in rounds] for n in common), [evals[-1] for evals in told]]


def _peers_environment(lab: Lab, region: str) -> dict[str, str]:
    """What a peer's process needs to import our tasks, and to talk through the lab's device."""
    argv = lab.argv_in(region, ["ip", "-o", "-4", "addr"])
    shown = subprocess.run(argv, check=True, capture_output=True, text=True).stdout
    (device,) = (line.split()[1] for line in shown.splitlines() if lab.addresses[region] in line)
    return {
        **os.environ,
        "PYTHONPATH": str(support.REPOSITORY),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": device,
        "TP_SOCKET_IFNAME": device,
    }


# ------------------------------------------------------------------ geo_ray


def train_ours(
    config: str, seed: int, link: DefaultLink, scratch: Path
) -> tuple[Outcome, LabStats]:
    """Train with `geo-ray train` on a Ray node per region.

    Args:
        config: the experiment as YAML; its task is `peers_task.py` beside it.
        seed: of model and rows.
        link: both ways.
        scratch: an empty directory.
    """
    (scratch / "peers.yaml").write_text(config, "utf-8")
    shutil.copy(HERE / "peers_task.py", scratch)
    argv = [sys.executable, "-m", "geo_ray.cli.main", "train", "peers.yaml", "--plain"]
    with _lab(link) as lab:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **start_ray(lab, RayOptions(cpus=6))}
        lab.reset()
        with Meter(lab) as meter:
            train = lab.popen(
                REGIONS[0],
                [*argv, "--set", f"seed={seed}"],
                cwd=scratch,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            said, _ = train.communicate(timeout=GIVE_UP_S)
        if train.returncode:
            raise RuntimeError(f"geo-ray train ended with {train.returncode}:\n{said[-3000:]}")
        stats = lab.stats()
    (file,) = (scratch / "runs").rglob("events.jsonl")
    events = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    began_s = min(e["start_s"] for e in events if e["kind"] == "step")
    combined = [e for e in events if e["kind"] == "eval" and e["region"] is None]
    curve = [(e["step"], e["t_s"] - began_s, e["metrics"]["loss"]) for e in combined]
    # The last event was written when it happened, which tells the time of day of all others.
    zero_unix_s = file.stat().st_mtime - events[-1]["t_s"]
    times = (zero_unix_s + t_s for t_s in (began_s, began_s + curve[-1][1]))
    sent, busy = meter.between(*times)
    (finished,) = (e for e in events if e["kind"] == "run_finished")
    return Outcome(curve, sent, finished["summary"]["rounds"], busy, stats.late_fraction), stats
