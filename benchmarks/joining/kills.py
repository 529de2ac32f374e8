"""What the kill of a rank, of a group and of the serving process costs a served run.

`geo-ray serve` on a local cluster; region eu has one process, region us two under
``torchrun --max-restarts``. Steps of a small model take 0.05 s, and a round has 8 of them. Every
process writes when it began, when it joined, and when each step ended. Processes are killed with
SIGKILL after some rounds. Seconds are counted from the kill:

  eu_continues_s   until region eu has made a further step after it noticed nothing, or waited
  us_continues_s   until region us has made a step again
  start_s          of these, Python, imports and the model of the new processes
  lost_steps       steps of region us that are repeated
  lost_rounds      rounds of region eu that are repeated
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from torch import nn

import geo_ray
from benchmarks.common import support
from benchmarks.common.command import GEO_RAY

STEP_S, INTERVAL = 0.05, 8
CONFIG: dict[str, Any] = {
    "name": "killed",
    "regions": [{"name": "eu", "join": True}, {"name": "us", "join": True}],
    "strategy": {"kind": "diloco", "interval": INTERVAL},
    "train": {"steps": 100_000},
    "serve": {"host": "127.0.0.1", "port": 0},
}
_WAIT_S = 120.0


def main() -> None:
    """Kill each kind of process once per run of the benchmark; with ``--loop``, be a rank."""
    parser = support.parser(__doc__)
    parser.add_argument("--loop", nargs=4, metavar=("ADDRESS", "REGION", "PEM", "LOG"))
    parser.add_argument("--cases", nargs="*", default=["rank", "group", "server"])
    options = parser.parse_args()
    if options.loop:
        loop(*options.loop)
        return
    machine, figures = support.hardware(), []
    for case in options.cases:
        with tempfile.TemporaryDirectory() as folder, Served(Path(folder)).started() as served:
            found = {"rank": kill_rank, "group": kill_group, "server": kill_server}[case](served)
        for name, value in found.items():
            support.say(f"{case}: {name} {value:.2f}")
            unit = "s" if name.endswith("_s") else "count"
            target = "<= 1" if name == "lost_rounds" else None
            target = "<= 20" if name == "recovery_s" else target
            figures.append(support.Figure(f"{case}: {name}", value, unit, target))
    support.finish("joining.kills", machine, figures, options.out)


def loop(address: str, region: str, credentials: str, path: str) -> None:
    """Train in the run until it ends or this process is killed."""
    group = None
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        group = dist.group.WORLD
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8))
    trained = model if group is None else nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rank = 0 if group is None else dist.get_rank()
    with Path(f"{path}.{rank}").open("a", encoding="ascii", buffering=1) as log:
        log.write(json.dumps(["start", os.getpid(), time.time(), -1]) + "\n")
        with (
            geo_ray.join(address, region=region, credentials=credentials, group=group) as site,
            site.training(trained) as sync,
        ):
            log.write(json.dumps(["joined", os.getpid(), time.time(), sync.steps]) + "\n")
            while not sync.done:
                x = torch.randn(8, 32)
                loss = nn.functional.cross_entropy(trained(x), (x.sum(1) > 0).long())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                time.sleep(STEP_S)
                sync.step(rows=8, loss=loss)
                log.write(json.dumps(["step", os.getpid(), time.time(), sync.steps]) + "\n")


@dataclass
class Served:
    """A served run and its loops."""

    folder: Path
    began: dict[str, float] = field(default_factory=dict)
    processes: dict[str, subprocess.Popen[str]] = field(default_factory=dict)

    @contextmanager
    def started(self) -> Iterator[Served]:
        """Start everything; end it afterwards."""
        try:
            self.serve("serve", "job.yaml")
            self.begin("eu")
            self.begin("us")
            for name in ("eu.0", "us.1"):
                self.wait(name, lambda rows: len(rows) > 3 * INTERVAL)
            yield self
        finally:
            for name in ("eu", "us", "serve"):
                self.end(name)

    def serve(self, *words: str) -> None:
        """Start `geo-ray` and wait for its address."""
        (self.folder / "job.yaml").write_text(yaml.safe_dump(CONFIG), "utf-8")
        path = self.folder / "runs" / "killed" / "join" / "address"
        path.unlink(missing_ok=True)
        self._start("serve", [*GEO_RAY, *words, "--plain"])
        end_s = time.monotonic() + _WAIT_S
        while not (path.exists() and path.read_text("ascii").endswith("\n")):
            if time.monotonic() > end_s or self.processes["serve"].poll() is not None:
                raise RuntimeError((self.folder / "serve.txt").read_text("utf-8"))
            time.sleep(0.05)
        self.address = path.read_text("ascii").strip()

    def begin(self, region: str) -> None:
        """Start the loop of a region."""
        pem = self.folder / "runs" / "killed" / "join" / f"{region}.pem"
        words = ["-m", "benchmarks.joining.kills", "--out", os.devnull]
        words += ["--loop", self.address, region, str(pem), str(self.folder / region)]
        runner = [sys.executable]
        if region == "us":
            runner += ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
            runner += ["--max-restarts", "3", "--monitor-interval", "0.2"]
            runner += ["--rdzv-endpoint", "127.0.0.1:0", "--rdzv-backend", "c10d"]
        self._start(region, [*runner, *words])

    def _start(self, name: str, command: list[str]) -> None:
        self.began[name] = time.time()
        with (self.folder / f"{name}.txt").open("a", encoding="utf-8") as output:
            self.processes[name] = subprocess.Popen(
                command,
                cwd=self.folder,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(support.REPOSITORY)},
            )

    def end(self, name: str) -> None:
        """End a process, and what it has started."""
        process = self.processes.get(name)
        if process is None or process.poll() is not None:
            return
        process.send_signal(signal.SIGINT if name == "serve" else signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
        process.kill()

    def rows(self, name: str) -> list[list[Any]]:
        """What a rank has written."""
        path = self.folder / name
        lines = path.read_text("ascii").splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def wait(
        self, name: str, enough: Callable[[list[list[Any]]], object], longest_s: float = _WAIT_S
    ) -> list[list[Any]]:
        """Wait until a rank has written enough."""
        end_s = time.monotonic() + longest_s
        while not enough(rows := self.rows(name)):
            if time.monotonic() > end_s:
                told = [p.read_text("utf-8")[-3000:] for p in self.folder.glob("*.txt")]
                raise RuntimeError(f"{name}: {rows[-3:]}\n" + "\n".join(told))
            time.sleep(0.05)
        return rows

    def output(self, name: str) -> str:
        """Return the last line that a process has printed."""
        lines = (self.folder / f"{name}.txt").read_text("utf-8").strip().splitlines()
        return lines[-1] if lines else ""


def steps_after(rows: list[list[Any]], time_s: float, kind: str = "step") -> list[list[Any]]:
    """Return what was written after a time."""
    return [row for row in rows if row[0] == kind and row[2] > time_s]


def kill_rank(served: Served) -> dict[str, float]:
    """Kill one of two ranks; its launcher restarts the group."""
    pid = served.rows("us.1")[-1][1]
    os.kill(pid, signal.SIGKILL)
    return costs(served, time.time())


def kill_group(served: Served) -> dict[str, float]:
    """Kill the launcher and both ranks, and start the group again at once."""
    pids = [served.processes["us"].pid, *(served.rows(f"us.{n}")[-1][1] for n in (0, 1))]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    killed_s = time.time()
    served.begin("us")
    return costs(served, killed_s)


def costs(served: Served, killed_s: float) -> dict[str, float]:
    """Wait until both regions train together again."""
    us = served.wait("us.1", lambda rows: len(steps_after(rows, killed_s)) > 2 * INTERVAL)
    eu = served.wait("eu.0", lambda rows: len(steps_after(rows, us[-1][2])) > INTERVAL)
    before = [row for row in us if row[0] == "step" and row[2] <= killed_s][-1]
    (started,) = steps_after(us, killed_s, "start")
    (joined,) = steps_after(us, killed_s, "joined")
    times_s = [row[2] for row in eu if row[0] == "step"]
    gaps = [(b - a, b - killed_s) for a, b in pairwise(times_s)]
    longest = max(gap for gap in gaps if gap[1] > 0)
    counts = [row[3] for row in eu if row[0] == "step"]
    repeated = sum(1 for a, b in pairwise(counts) if b <= a)
    first_s = steps_after(us, killed_s)[0][2]
    start_s = started[2] - killed_s
    return {
        "eu_waits_s": longest[0],
        "eu_continues_s": longest[1],
        "us_continues_s": first_s - killed_s,
        "start_s": start_s,
        "recovery_s": max(first_s, killed_s + longest[1]) - killed_s - start_s,
        "lost_steps": float(before[3] - before[3] // INTERVAL * INTERVAL),
        "lost_rounds": float(repeated // INTERVAL),
        "joined_at_step": float(joined[3]),
    }


def kill_server(served: Served) -> dict[str, float]:
    """Kill the process that has the averager, and resume the run."""
    pid = averager_of(served.processes["serve"].pid)
    eu_before = served.rows("eu.0")[-1][3]
    os.kill(pid, signal.SIGKILL)
    killed_s = time.time()
    found: dict[str, float] = {}
    with suppress(subprocess.TimeoutExpired):
        served.processes["serve"].wait(60)
        found["serve_ends_s"] = time.time() - killed_s
    support.say(f"serve: {served.output('serve')}")
    time.sleep(5)
    found["eu_steps_after_kill"] = float(served.rows("eu.0")[-1][3] - eu_before)
    for name in ("eu", "us"):
        code = served.processes[name].poll()
        support.say(f"{name} ({code}): {served.output(name)}")
        found[f"{name}_ended"] = float(code is not None)
    return found


def averager_of(root: int) -> int:
    """Return the process of the averager below a process, or of this machine's only one."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                if b"AveragerActor" in (entry / "cmdline").read_bytes() and is_below(
                    int(entry.name), root
                ):
                    return int(entry.name)
    raise RuntimeError("there is no process of the averager")


def is_below(pid: int, root: int) -> bool:
    """Return whether a process descends from another one."""
    while pid > 1:
        if pid == root:
            return True
        pid = int(Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split()[1])
    return False


if __name__ == "__main__":
    main()
