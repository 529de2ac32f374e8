"""What the kill of a rank, of a group and of the serving processes costs a served run.

`geo-ray serve` on a local cluster (cases averager, rounds, standby and server), or the same server
in this process (rank and group); region eu has one process, region us two under ``torchrun``.
Steps of a small model take 0.05 s, a round has 8 of them, checkpoints are written every 2 s. Every
process writes when it began, when it joined, and when each step ended. Processes are killed with
SIGKILL after some rounds, and launchers that have ended are started again at once, as a job
scheduler does. Seconds are counted from the kill; steps are compared by the run's count.

  CASE: eu_longest_pause_s  longest time between two steps of region eu
  CASE: eu_repeats          steps of region eu that were made before the kill and are made again
  CASE: eu_lost_rounds      the same in whole rounds
  CASE: us_repeats          the same of region us, of those that it made since its last exchange too
  CASE: all_train_s         until both regions have made a step in a common run again
  CASE: start_s             until the last of the new processes has loaded Python and its imports
  CASE: recovery_s          all_train_s - start_s

Case standby kills the averager of a run with ``averager.standby``: no process starts again, and
recovery_s is the longest pause of a region. Case rounds is averager with
``checkpoint.every_rounds: 1``.
"""

from __future__ import annotations

import json
import os
import secrets
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

import psutil
import torch
import torch.distributed as dist
import yaml
from torch import nn

import geo_ray
from benchmarks.common import support
from benchmarks.common.command import GEO_RAY
from geo_ray.joining.credentials import JoinCredentials
from geo_ray.joining.protocol import SERVER, JoinTerms
from geo_ray.joining.server import JoinServer
from geo_ray.transport.security.certs import Authority

STEP_S, INTERVAL = 0.05, 8
CONFIG: dict[str, Any] = {
    "name": "killed",
    "regions": [{"name": "eu", "join": True}, {"name": "us", "join": True}],
    "strategy": {"kind": "diloco", "interval": INTERVAL},
    "train": {"steps": 100_000},
    "checkpoint": {"every_s": 2.0},
    "serve": {"host": "127.0.0.1", "port": 0},
}
_WAIT_S = 150.0


def main() -> None:
    """Kill each kind of process once per run of the benchmark; with ``--loop``, be a rank."""
    parser = support.parser(__doc__)
    parser.add_argument("--loop", nargs=4, metavar=("ADDRESS", "REGION", "PEM", "LOG"))
    parser.add_argument("--cases", nargs="*", default=[*CASES])
    options = parser.parse_args()
    if options.loop:
        loop(*options.loop)
        return
    machine, figures = support.hardware(), []
    for case in options.cases:
        is_here = case in ("rank", "group")
        with (
            tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
            Served(Path(folder), CHANGES.get(case, {})).started(is_here=is_here) as served,
        ):
            found = pauses(served) if case == "standby" else costs(served, CASES[case])
        for name, value in found.items():
            support.say(f"{case}: {name} {value:.2f}")
            unit = "s" if name.endswith("_s") else "count"
            target = "<= 1" if name == "eu_lost_rounds" else None
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
            site.training(
                trained, state={"optimizer": optimizer}, checkpoints=f"{path}-saved"
            ) as sync,
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
    changes: dict[str, Any]
    began: dict[str, float] = field(default_factory=dict)
    processes: dict[str, subprocess.Popen[str]] = field(default_factory=dict)

    @contextmanager
    def started(self, *, is_here: bool) -> Iterator[Served]:
        """Start everything; end it afterwards.

        Args:
            is_here: whether this process serves the run.
        """
        try:
            if is_here:
                self.serve_here()
            else:
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
        (self.folder / "job.yaml").write_text(yaml.safe_dump(CONFIG | self.changes), "utf-8")
        path = self.folder / "runs" / "killed" / "join" / "address"
        before_ns = path.stat().st_mtime_ns if path.exists() else 0
        self._start("serve", [*GEO_RAY, *words, "--plain"])
        end_s = time.monotonic() + _WAIT_S
        while not (
            path.exists()
            and path.stat().st_mtime_ns != before_ns
            and path.read_text("ascii").endswith("\n")
        ):
            if time.monotonic() > end_s or self.processes["serve"].poll() is not None:
                raise RuntimeError((self.folder / "serve.txt").read_text("utf-8"))
            time.sleep(0.05)
        self.address = path.read_text("ascii").strip()

    def serve_here(self) -> None:
        """Serve the run in this process, without Ray and checkpoints."""
        values = {key: CONFIG[key] for key in ("name", "strategy")}
        values |= {"regions": ["eu", "us"], "steps": CONFIG["train"]["steps"]}
        folder = self.folder / "runs" / "killed" / "join"
        authority, key = Authority.create("killed"), secrets.token_bytes(32)
        for name in ("eu", "us", SERVER):
            own = JoinCredentials(name, "killed", key, authority.issue(name))
            own.write(folder / f"{name}.pem")
        terms = JoinTerms.model_validate_json(json.dumps(values))
        server = JoinServer(terms, JoinCredentials.read(folder / f"{SERVER}.pem"))
        self.address = "geo-ray://{}:{}".format(*server.address)

    def begin(self, region: str) -> None:
        """Start the loop of a region."""
        pem = self.folder / "runs" / "killed" / "join" / f"{region}.pem"
        words = ["-m", "benchmarks.joining.kills", "--out", os.devnull]
        words += ["--loop", self.address, region, str(pem), str(self.folder / region)]
        runner = [sys.executable]
        if region == "us":
            runner += ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
            runner += ["--monitor-interval", "0.2"]
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
            for region in ("eu", "us"):
                if self.processes[region].poll() is not None:
                    self.begin(region)
            if time.monotonic() > end_s:
                told = [p.read_text("utf-8")[-3000:] for p in self.folder.glob("*.txt")]
                raise RuntimeError(f"{name}: {rows[-3:]}\n" + "\n".join(told))
            time.sleep(0.05)
        return rows


def rank(served: Served) -> None:
    """Kill one of two ranks."""
    os.kill(served.rows("us.1")[-1][1], signal.SIGKILL)


def group(served: Served) -> None:
    """Kill the launcher and both ranks."""
    pids = [served.processes["us"].pid, *(served.rows(f"us.{n}")[-1][1] for n in (0, 1))]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def averager(served: Served) -> None:
    """Kill the process that has the averager."""
    address = (served.folder / "runs" / "killed" / "join" / "address").read_text("ascii").strip()
    os.kill(averager_of(served.processes["serve"].pid, address), signal.SIGKILL)


def server(served: Served) -> None:
    """Kill `geo-ray serve` and its cluster, and resume the run at once."""
    root = served.processes["serve"]
    for pid in [*below(root.pid), root.pid]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    root.wait()
    served.serve("train", "--resume", "runs/killed")


CASES: dict[str, Callable[[Served], None]] = {
    "rank": rank,
    "group": group,
    "averager": averager,
    "rounds": averager,
    "standby": averager,
    "server": server,
}
CHANGES: dict[str, dict[str, Any]] = {
    "rounds": {"checkpoint": {"every_rounds": 1}},
    "standby": {"averager": {"standby": "auto"}},
}


def pauses(served: Served) -> dict[str, float]:
    """Kill the averager of a run whose standby is ready, and see how long the loops pause."""
    log = served.folder / "runs" / "killed" / "events.jsonl"
    served.wait("eu.0", lambda _: "server_standby_ready" in log.read_text("utf-8"))
    address = (served.folder / "runs" / "killed" / "join" / "address").read_text("ascii").strip()
    killed_s = time.time()
    os.kill(averager_of(served.processes["serve"].pid, address), signal.SIGKILL)
    found = {}
    for name in ("eu.0", "us.1"):
        rows = served.wait(name, lambda rows: len(after(rows, killed_s)) > 4 * INTERVAL)
        steps = [row for row in rows if row[0] == "step"]
        times_s = [row[2] for row in steps if row[2] > killed_s - 1]
        region = name.partition(".")[0]
        found[f"{region}_longest_pause_s"] = max(b - a for a, b in pairwise(times_s))
        found[f"{region}_repeats"] = float(len(steps) - len({row[3] for row in steps}))
        found[f"{region}_starts"] = float(len(after(rows, killed_s, "start")))
    found["eu_lost_rounds"] = found["eu_repeats"] / INTERVAL
    found["recovery_s"] = max(found["eu_longest_pause_s"], found["us_longest_pause_s"])
    return found


def costs(served: Served, kill: Callable[[Served], None]) -> dict[str, float]:
    """Kill, and wait until both regions train together again."""
    killed_s = time.time()
    kill(served)

    def enough(rows: list[list[Any]]) -> bool:
        """Whether an incarnation that began after the kill has made two rounds."""
        joined = after(rows, killed_s, "joined")
        return bool(joined) and len(after(rows, joined[-1][2])) > 2 * INTERVAL

    us = served.wait("us.1", enough)
    first_s = after(us, after(us, killed_s, "joined")[-1][2])[0][2]
    eu = served.wait("eu.0", lambda rows: len(after(rows, first_s)) > 2 * INTERVAL)
    first_s = max(first_s, after(eu, first_s)[0][2])
    starts_s = [row[2] for rows in (us, eu) for row in after(rows, killed_s, "start")]
    starts_s = [each for each in starts_s if each < first_s]
    times_s = [row[2] for row in eu if row[0] == "step" and row[2] > killed_s - 1]
    repeats = {
        name: max(
            0, before(rows, killed_s) - min(row[3] for row in after(rows, killed_s, "joined")[-1:])
        )
        if after(rows, killed_s, "joined")
        else 0
        for name, rows in (("eu", eu), ("us", us))
    }
    return {
        "eu_longest_pause_s": max(b - a for a, b in pairwise(times_s)),
        "eu_repeats": float(repeats["eu"]),
        "eu_lost_rounds": repeats["eu"] / INTERVAL,
        "us_repeats": float(repeats["us"]),
        "all_train_s": first_s - killed_s,
        "start_s": max(starts_s) - killed_s,
        "recovery_s": first_s - max(starts_s),
        "starts": float(len(starts_s)),
    }


def after(rows: list[list[Any]], time_s: float, kind: str = "step") -> list[list[Any]]:
    """Return what was written after a time."""
    return [row for row in rows if row[0] == kind and row[2] > time_s]


def before(rows: list[list[Any]], time_s: float) -> int:
    """Return the run's count of steps at a time."""
    counts: list[int] = [row[3] for row in rows if row[0] == "step" and row[2] <= time_s]
    return counts[-1]


def averager_of(root: int, address: str) -> int:
    """Return the process below another one that serves a run at an address."""
    port = int(address.rpartition(":")[2])
    for pid in below(root):
        if b"AveragerActor" in Path(f"/proc/{pid}/cmdline").read_bytes():
            own = psutil.Process(pid).net_connections()
            if port in [each.laddr.port for each in own if each.status == psutil.CONN_LISTEN]:
                return pid
    raise RuntimeError("there is no process of the averager")


def below(root: int) -> list[int]:
    """Return all processes that descend from one."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                parent = (entry / "stat").read_text("ascii").rpartition(")")[2].split()[1]
                children.setdefault(int(parent), []).append(int(entry.name))
    found = list(children.get(root, []))
    for pid in found:
        found += children.get(pid, [])
    return found


if __name__ == "__main__":
    main()
