"""Recovery of a served run from kill -9 of its processes, at times drawn by a seed.

`geo-ray train` on a local cluster with two regions that are process groups: eu with one rank, us
with two. Steps of a small model take 0.05 s, a round has 8. Every rank writes when its process was
created, when its model was ready, when it joined, and when each step ended. Processes are killed
each time when the run has trained for some rounds. Cases with equal settings share a run.

  standby   the averager's process, with `averager.standby: auto`
  rank      one of us's two ranks, in the same run
  group     both ranks of us, in the same run
  rounds1   the averager's process, with `checkpoint.every_rounds: 1` and no standby
  rounds2   the same with `checkpoint.every_rounds: 2`
  holder    a holder, with `serve.holders: 2` and `checkpoint.every_rounds: 1`

The others are eu in the cases rank and group, and both regions in the rest. The figures of a case
have one value per kill:

  lost_rounds        steps that the others made before the kill and make again, in rounds; the value
                     is the largest
  wasted_rounds      steps that the others made after the kill and lose, in rounds
  pause_s            longest time between two steps of a rank of the others
  recovery_s         from the kill to the first step of every rank that starts again; in case
                     standby to the end of the first exchange
  start_s            from the creation of the same processes to the last model, at the run's start
  restart_s          the same after the kill
  own_s              recovery_s - start_s
  own_restart_s      recovery_s - restart_s
  noticed_s          from the kill to the creation of the first new process
  joined_s           from the last model to the first step of all
  at_risk            steps since the newest durable checkpoint while nothing is killed, in rounds,
                     every 30 ms: mean, median, 95 %, largest, part of the time above one round
  checkpoint_late_s  from the end of a round to its durable checkpoint
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import groupby, pairwise
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
from geo_ray.experiment.cluster import LocalClusterConfig
from geo_ray.ray_cluster.local_cluster import LocalCluster

STEP_S, INTERVAL = 0.05, 8
KILLS, SEED = 5, 0
_WAIT_S = 300.0
_LOOK_S = 0.05
_SAMPLE_S = 0.03
_REST_ROUNDS = 8  # rounds that the run trains between a recovery and the next kill
_CPUS = 4.0  # logical, of each region
_NAME = "recovery"
_AVERAGER, _HOLDER = "AveragerActor", "HolderActor"


@dataclass(frozen=True, slots=True)
class Case:
    """What is killed, and in which run.

    Attributes:
        victim: "rank", "group", or the name of an actor.
        others: regions whose lost steps count.
        restarted: regions whose ranks start again.
        changes: changes of the configuration.
    """

    victim: str
    others: tuple[str, ...]
    restarted: tuple[str, ...]
    changes: Mapping[str, Any]


BOTH = ("eu", "us")
_STANDBY = {"averager": {"standby": "auto"}}
CASES = {
    "standby": Case(_AVERAGER, BOTH, (), _STANDBY),
    "rank": Case("rank", ("eu",), ("us",), _STANDBY),
    "group": Case("group", ("eu",), ("us",), _STANDBY),
    "rounds1": Case(_AVERAGER, BOTH, BOTH, {"checkpoint": {"every_rounds": 1}}),
    "rounds2": Case(_AVERAGER, BOTH, BOTH, {"checkpoint": {"every_rounds": 2}}),
    "holder": Case(
        _HOLDER,
        BOTH,
        BOTH,
        {"checkpoint": {"every_rounds": 1}, "serve": {"port": 0, "holders": 2}},
    ),
}
RANKS = {"eu": ("eu-0",), "us": ("us-0", "us-1")}


def config(case: Case, address: str) -> dict[str, Any]:
    """The run of a case on a cluster."""
    group = {"cpus_per_rank": 0.25, "loop": f"{Path(__file__).resolve()}:train"}
    content: dict[str, Any] = {
        "name": _NAME,
        "regions": [
            {"name": name, "group": group | {"ranks_per_node": len(RANKS[name])}} for name in BOTH
        ],
        "strategy": {"kind": "diloco", "interval": INTERVAL},
        "train": {"steps": 1_000_000, "max_worker_restarts": 100},
        "checkpoint": {"every_s": 2.0},
        "serve": {"port": 0},
        "cluster": {"kind": "existing", "address": address},
    }
    content |= case.changes
    content["checkpoint"] = content["checkpoint"] | {"restarts": 100}
    return content


# ------------------------------------------------------------------ a rank


def train(rank: geo_ray.GroupRank) -> None:
    """Train in the run until it ends or this process is killed."""
    folder = Path(rank.checkpoints).parent
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8))
    trained = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    pid = os.getpid()
    path = folder / f"{rank.region}-{dist.get_rank()}.marks"
    with path.open("a", encoding="ascii", buffering=1) as log:

        def mark(kind: str, at_s: float, steps: int = -1) -> None:
            log.write(json.dumps([kind, pid, at_s, steps]) + "\n")

        mark("created", psutil.Process().create_time())
        mark("ready", time.time())
        with (
            rank.join() as site,
            site.training(
                trained, state={"optimizer": optimizer}, checkpoints=rank.checkpoints
            ) as sync,
        ):
            mark("joined", time.time(), sync.steps)
            while not sync.done:
                x = torch.randn(8, 32)
                loss = nn.functional.cross_entropy(trained(x), (x.sum(1) > 0).long())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                time.sleep(STEP_S)
                sync.step(rows=8, loss=loss)
                mark("step", time.time(), sync.steps)


# ------------------------------------------------------------------ arithmetic


@dataclass(frozen=True, slots=True)
class Mark:
    """What a rank has written.

    Attributes:
        kind: "created", "ready", "joined" or "step".
        pid: its process.
        at_s: time of day.
        steps: the run's count of steps; -1 before the rank has joined.
    """

    kind: str
    pid: int
    at_s: float
    steps: int


def last_before(marks: Sequence[Mark], killed_s: float) -> Mark:
    """Return the last step that a rank ended before a kill."""
    return [mark for mark in marks if mark.kind == "step" and mark.at_s <= killed_s][-1]


def repeated_steps(marks: Sequence[Mark], killed_s: float) -> int:
    """Return how many steps a rank made before a kill and makes again after it."""
    later = [mark.steps for mark in marks if mark.at_s > killed_s and mark.steps >= 0]
    return max(0, last_before(marks, killed_s).steps - min(later))


def wasted_steps(marks: Sequence[Mark], killed_s: float) -> int:
    """Return how many steps a rank's process made after a kill before another one replaced it."""
    before = last_before(marks, killed_s)
    if not _of_new_process(marks, killed_s):
        return 0
    return max(mark.steps for mark in marks if mark.pid == before.pid) - before.steps


def first_step_s(marks: Sequence[Mark], killed_s: float, *, starts: bool) -> float | None:
    """Return when a rank made its first step after a kill; None: it has not.

    Args:
        marks: the rank.
        killed_s: time of the kill.
        starts: whether its process is replaced; otherwise the first exchange after the kill counts.
    """
    if starts:
        found = [mark for mark in _of_new_process(marks, killed_s) if mark.kind == "step"]
    else:
        bound = (last_before(marks, killed_s).steps // INTERVAL + 1) * INTERVAL
        found = [mark for mark in marks if mark.at_s > killed_s and mark.steps >= bound]
    return found[0].at_s if found else None


def longest_pause_s(marks: Sequence[Mark], killed_s: float, until_s: float) -> float:
    """Return the longest time between two steps of a rank from the last one before a kill on."""
    begin_s = last_before(marks, killed_s).at_s
    times_s = [m.at_s for m in marks if m.kind == "step" and begin_s <= m.at_s <= until_s]
    times_s.append(until_s)
    return max((b - a for a, b in pairwise(times_s)), default=0.0)


def start_times(
    ranks: Sequence[Sequence[Mark]], since_s: float, first_s: float | None = None
) -> tuple[float, float]:
    """Return when the first process of a start was created and when the last model was ready.

    Args:
        ranks: the marks of the ranks that start.
        since_s: the start follows this time. A process that Ray created before, and uses now,
            counts from here.
        first_s: when a process was created that starts before the ranks; None: there is none.
    """
    created_s, ready_s = [] if first_s is None else [first_s], []
    for marks in ranks:
        ready = next(mark for mark in marks if mark.kind == "ready" and mark.at_s > since_s)
        created_s += [m.at_s for m in marks if m.kind == "created" and m.pid == ready.pid]
        ready_s.append(ready.at_s)
    return max(since_s, min(created_s)), max(ready_s)


def risk_samples(
    marks: Sequence[Mark],
    durable: Mapping[int, float],
    spans: Sequence[tuple[float, float]],
    every_s: float = _SAMPLE_S,
) -> list[float]:
    """Return the steps of a rank since the newest durable checkpoint, in rounds, at even times.

    Args:
        marks: the rank.
        durable: time at which the checkpoint of each step was durable.
        spans: from when until when.
        every_s: time between two samples.
    """
    found = []
    for first_s, last_s in spans:
        for number in range(int((last_s - first_s) / every_s) + 1):
            now_s = first_s + number * every_s
            made = [m.steps for m in marks if m.kind == "step" and m.at_s <= now_s]
            saved = [step for step, at_s in durable.items() if at_s <= now_s]
            if made and saved:
                found.append((made[-1] - max(saved)) / INTERVAL)
    return found


def late_s(
    marks: Sequence[Mark], durable: Mapping[int, float], spans: Sequence[tuple[float, float]]
) -> list[float]:
    """Return the times from the end of a round to its durable checkpoint, within spans."""
    ended_s = {m.steps: m.at_s for m in marks if m.kind == "step"}
    return [
        at_s - ended_s[step]
        for step, at_s in durable.items()
        if step in ended_s and any(a <= ended_s[step] and at_s <= b for a, b in spans)
    ]


def _of_new_process(marks: Sequence[Mark], killed_s: float) -> list[Mark]:
    """Return the marks after a kill of processes that had made no step before it."""
    old = {mark.pid for mark in marks if mark.kind == "step" and mark.at_s <= killed_s}
    return [mark for mark in marks if mark.at_s > killed_s and mark.pid not in old]


# ------------------------------------------------------------------ a run


@dataclass
class Watched:
    """A run, its files, and the time at which each of its checkpoints was durable."""

    folder: Path
    case: Case
    cluster: LocalCluster
    durable: dict[int, float] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        """The run's directory."""
        return self.folder / "runs" / _NAME

    @contextmanager
    def started(self) -> Iterator[Watched]:
        """Start the run and wait until it trains; end all its processes afterwards."""
        (self.folder / "job.yaml").write_text(
            yaml.safe_dump(config(self.case, self.cluster.address)), "utf-8"
        )
        self.began_s = time.time()
        with (self.folder / "output.txt").open("w", encoding="utf-8") as output:
            self.process = subprocess.Popen(
                [*GEO_RAY, "train", "job.yaml", "--plain"],
                cwd=self.folder,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.cluster.environment, "OMP_NUM_THREADS": "1"},
            )
        ended = threading.Event()
        watching = threading.Thread(target=self._watch_checkpoints, args=(ended,))
        watching.start()
        try:
            self.wait_for(lambda: all(map(self.has_stepped, (*RANKS["eu"], *RANKS["us"]))), "steps")
            yield self
        finally:
            ended.set()
            watching.join()
            self._end()

    def marks(self, rank: str) -> list[Mark]:
        """What a rank has written."""
        path = self.path / f"{rank}.marks"
        lines = path.read_text("ascii").splitlines(keepends=True) if path.exists() else []
        return [Mark(*json.loads(line)) for line in lines if line.endswith("\n")]

    def has_stepped(self, rank: str) -> bool:
        """Whether a rank has made a step."""
        return any(mark.kind == "step" for mark in self.marks(rank))

    def events(self, kind: str) -> int:
        """How many events of a kind the run has recorded."""
        log = self.path / "events.jsonl"
        return log.read_text("utf-8").count(f'"{kind}"') if log.exists() else 0

    def wait_for(self, holds: Any, what: str) -> None:
        """Wait until something holds.

        Raises:
            RuntimeError: it does not in time, or the run has ended.
        """
        end_s = time.monotonic() + _WAIT_S
        while not holds():
            if time.monotonic() > end_s or self.process.poll() is not None:
                tail = (self.folder / "output.txt").read_text("utf-8")[-4000:]
                raise RuntimeError(f"waited for {what}\n{tail}")
            time.sleep(_LOOK_S)

    def actors(self, name: str) -> list[psutil.Process]:
        """The processes of an actor, oldest first."""
        nodes = (None, *self.cluster.regions)
        found = [
            psutil.Process(pid) for node in nodes for pid in self.cluster.actor_pids(node, name)
        ]
        return sorted(found, key=lambda each: each.create_time())

    def train_quietly(self, since_s: float) -> None:
        """Wait until every region has trained for some rounds, and the run could recover.

        Args:
            since_s: of steps and checkpoints after this time.
        """
        standbys = self.events("server_replaced") + 1 if "averager" in self.case.changes else 0

        def trained() -> bool:
            for names in RANKS.values():
                steps = [m for m in self.marks(names[0]) if m.kind == "step" and m.at_s > since_s]
                if len(steps) < _REST_ROUNDS * INTERVAL:
                    return False
            saved = [at_s for at_s in self.durable.values() if at_s > since_s]
            return bool(saved) and self.events("server_standby_ready") >= standbys

        self.wait_for(trained, "some rounds")

    def victims(self, victim: str, chosen: random.Random) -> list[int]:
        """The processes to kill; see `Case`. The server is older than its standby."""
        if victim == "rank":
            return [self.marks(chosen.choice(RANKS["us"]))[-1].pid]
        if victim == "group":
            return [self.marks(rank)[-1].pid for rank in RANKS["us"]]
        return [self.actors(victim)[0].pid]

    def _watch_checkpoints(self, ended: threading.Event) -> None:
        while not ended.wait(_LOOK_S):
            for manifest in (self.path / "checkpoints").glob("*/manifest.json"):
                with suppress(OSError, ValueError):
                    at_s = manifest.stat().st_mtime
                    step = json.loads(manifest.read_text("utf-8"))["manifest"]["step"]
                    self.durable.setdefault(step, at_s)

    def _end(self) -> None:
        for _ in range(2):
            if self.lives:
                self.process.send_signal(signal.SIGINT)
                with suppress(subprocess.TimeoutExpired):
                    self.process.wait(30)
        if self.lives:
            self.process.kill()
        self.process.wait()

    @property
    def lives(self) -> bool:
        """Whether the command has not ended."""
        return self.process.poll() is None


def kill_once(run: Watched, case: Case, chosen: random.Random) -> dict[str, float]:
    """Kill, wait for the recovery, and return the values of this kill."""
    time.sleep(chosen.uniform(0.0, 2 * INTERVAL * STEP_S))
    victims, load = run.victims(case.victim, chosen), os.getloadavg()[0]
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    killed_s = time.time()
    affected = case.restarted or BOTH
    ranks = [rank for region in affected for rank in RANKS[region]]

    def first_steps() -> list[float | None]:
        starts = bool(case.restarted)
        return [first_step_s(run.marks(rank), killed_s, starts=starts) for rank in ranks]

    run.wait_for(lambda: None not in first_steps(), "the recovery")
    recovered_s = max(each for each in first_steps() if each is not None)
    run.wait_for(
        lambda: all(
            first_step_s(run.marks(n), killed_s, starts=r in case.restarted) is not None
            for r in BOTH
            for n in RANKS[r]
        ),
        "all regions",
    )
    others = [run.marks(rank) for region in case.others for rank in RANKS[region]]
    found = {
        "killed_s": killed_s,
        "recovered_s": recovered_s,
        "load": load,
        "lost_rounds": max(repeated_steps(marks, killed_s) for marks in others) / INTERVAL,
        "wasted_rounds": max(wasted_steps(marks, killed_s) for marks in others) / INTERVAL,
        "pause_s": max(longest_pause_s(marks, killed_s, recovered_s) for marks in others),
        "recovery_s": recovered_s - killed_s,
    }
    if case.restarted:
        first_s = None
        if case.victim in (_AVERAGER, _HOLDER):
            first_s = run.actors(_AVERAGER)[0].create_time()
        created_s, ready_s = start_times([run.marks(rank) for rank in ranks], killed_s, first_s)
        found |= {
            "restart_s": ready_s - created_s,
            "noticed_s": created_s - killed_s,
            "joined_s": recovered_s - ready_s,
        }
    return found


def measure(
    names: Sequence[str], kills: int, seed: int, case_s: float, cluster: LocalCluster
) -> list[support.Figure]:
    """Return the figures of cases that share a run.

    Args:
        names: the cases.
        kills: kills of each case.
        seed: of the times of kills.
        case_s: after so many seconds of a case, no further process is killed.
        cluster: where the run trains.
    """
    figures = list[support.Figure]()
    with (
        tempfile.TemporaryDirectory(prefix="recovery-", ignore_cleanup_errors=True) as folder,
        Watched(Path(folder), CASES[names[0]], cluster).started() as run,
    ):
        since_s, averager_s = time.time(), run.actors(_AVERAGER)[0].create_time()
        begun = {rank: run.marks(rank) for region in BOTH for rank in RANKS[region]}
        for name in names:
            case, chosen = CASES[name], random.Random(f"{name}-{seed}")
            found, spans = list[dict[str, float]](), list[tuple[float, float]]()
            until_s = time.monotonic() + case_s
            for number in range(1, kills + 1):
                if found and time.monotonic() > until_s:
                    break
                run.train_quietly(since_s)
                found.append(kill_once(run, case, chosen))
                spans.append((since_s, found[-1]["killed_s"]))
                since_s = found[-1]["recovered_s"]
                shown = " ".join(f"{key} {value:.2f}" for key, value in found[-1].items())
                support.say(f"{name} {number}: {shown}")
            start_s = 0.0
            if case.restarted:
                ranks = [begun[rank] for region in case.restarted for rank in RANKS[region]]
                first_s = averager_s if case.restarted == BOTH else None
                created_s, ready_s = start_times(ranks, run.began_s, first_s)
                start_s = ready_s - created_s
            marks = run.marks(next(iter(RANKS[case.others[0]])))
            risks = risk_samples(marks, run.durable, spans)
            late = late_s(marks, run.durable, spans)
            figures += figures_of(name, start_s, found, risks, late)
    return figures


def figures_of(
    name: str,
    start_s: float,
    found: Sequence[Mapping[str, float]],
    risks: Sequence[float],
    late: Sequence[float],
) -> list[support.Figure]:
    """Return the figures of a case from the values of its kills.

    Args:
        name: the case.
        start_s: seconds of the same processes' first start.
        found: values of each kill.
        risks: rounds since the newest durable checkpoint, while nothing was killed.
        late: seconds from the end of rounds to their durable checkpoints.
    """

    def runs(key: str) -> list[float]:
        return [values[key] for values in found if key in values]

    def largest(key: str, values: Sequence[float], unit: str, target: str | None = None) -> Any:
        return support.Figure(f"{name}: {key}", max(values), unit, target, None, values)

    recovery = runs("recovery_s")
    figures = [
        largest("lost_rounds", runs("lost_rounds"), "rounds", "<= 1"),
        largest("wasted_rounds", runs("wasted_rounds"), "rounds"),
        support.median(f"{name}: pause_s", runs("pause_s"), "s"),
        support.median(f"{name}: recovery_s", recovery, "s"),
        support.Figure(f"{name}: start_s", start_s, "s"),
        largest("own_s", [each - start_s for each in recovery], "s", "<= 20"),
        support.median(f"{name}: load", runs("load"), "processes"),
    ]
    if restarts := runs("restart_s"):
        own = [all_s - again_s for all_s, again_s in zip(recovery, restarts, strict=True)]
        figures += [
            support.median(f"{name}: restart_s", restarts, "s"),
            largest("own_restart_s", own, "s", "<= 20"),
            support.median(f"{name}: noticed_s", runs("noticed_s"), "s"),
            support.median(f"{name}: joined_s", runs("joined_s"), "s"),
        ]
    if len(risks) > 1 and name in ("rounds1", "rounds2", "holder"):
        above = sum(each > 1 for each in risks) / len(risks)
        values = {
            "mean": statistics.mean(risks),
            "median": statistics.median(risks),
            "95": statistics.quantiles(risks, n=20)[-1],
            "largest": max(risks),
        }
        figures += [
            support.Figure(f"{name}: at_risk {key}", value, "rounds")
            for key, value in values.items()
        ]
        figures.append(support.Figure(f"{name}: at_risk above_one", above, "ratio"))
        figures.append(support.median(f"{name}: checkpoint_late_s", late, "s"))
    return figures


def main() -> None:
    """Measure all cases."""
    parser = support.parser(__doc__)
    parser.add_argument("--cases", nargs="*", default=[*CASES], choices=[*CASES])
    parser.add_argument("--kills", type=int, default=KILLS, help="of each case")
    parser.add_argument("--seed", type=int, default=SEED, help="of the times of kills")
    parser.add_argument(
        "--case-s", type=float, default=3600.0, help="longest time of a case until its last kill"
    )
    options = parser.parse_args()
    machine, figures = support.hardware(), list[support.Figure]()
    cases = ["rank"] if options.quick else options.cases
    kills = 1 if options.quick else options.kills
    os.environ["PYTHONPATH"] = str(support.REPOSITORY)  # for the loop, which is in this module
    settings = LocalClusterConfig(start_timeout_s=300.0)
    with LocalCluster(settings, [*BOTH], _CPUS) as cluster:
        for _, names in groupby(cases, key=lambda name: CASES[name].changes):
            figures += measure([*names], kills, options.seed, options.case_s, cluster)
            support.finish("joining.recovery", machine, figures, options.out)  # so far


if __name__ == "__main__":
    main()
