"""A real queue of eight small jobs on a local cluster, against what its policy plans for them.

difference     of the utility of all jobs, actual to planned
planned        utility, as the policy is simulated over the same jobs, slots and regions, with the
               time of a start as three jobs had it that were run before
actual         utility of the live queue: a job's driver is killed, and a region is drained
ended          jobs that have finished, of 8
start_s        that the jobs before took to their first step
attempts       submissions, of which one more than jobs is for the job that was killed
seconds        from the first submission to the last end (--quick: 3 jobs, no trouble)
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import support
from geo_ray.api.queue import QueueUser, new_queue_token, start_queue, stop_queue, submit_job
from geo_ray.experiment.cluster import LocalClusterConfig
from geo_ray.ray_cluster import ray_internals
from geo_ray.ray_cluster.labels import REGION_LABEL
from geo_ray.ray_cluster.local_cluster import LocalCluster
from geo_ray.ray_cluster.settings import driver_environment
from geo_ray.runs.lease import LEASE_KEY, decode_record
from geo_ray.scheduler.policies.registry import policy_named
from geo_ray.scheduler.queue.config import QueueConfig
from geo_ray.scheduler.queue.job_spec import JobValue
from geo_ray.scheduler.queue.journal import ObservedJob
from geo_ray.scheduler.queue.model import adapted, cluster_job, cluster_of
from geo_ray.scheduler.queue.report import report_of
from geo_ray.scheduler.queue.state import QueueLocation, QueueState
from geo_ray.scheduler.replay import replay_jobs
from geo_ray.storage.conditional_store import LocalConditionalStore

REGIONS = ("us", "eu", "asia")
SLOT_S, START_S, STEP_S = 30.0, 20.0, 0.2
LONGEST_S = 1500.0
# Name, regions, seconds of training, worth, deadline in slots, urgency, submitted at once or later.
JOBS = (
    ("cheap", ("us",), 40.0, 5.0, 14.0, 0.5, 0),
    ("dear", ("us",), 30.0, 60.0, 8.0, 0.5, 0),
    ("eu", ("eu",), 50.0, 30.0, 8.0, 0.5, 0),
    ("wide", ("us", "asia"), 60.0, 40.0, 14.0, 0.4, 0),
    ("asia", ("asia",), 30.0, 20.0, 8.0, 0.4, 0),
    ("late", ("eu",), 30.0, 25.0, 10.0, 0.4, 1),
    ("calm", ("eu",), 30.0, 15.0, 18.0, 0.3, 1),
    ("small", ("us",), 20.0, 35.0, 14.0, 0.4, 1),
)
WARM = tuple((f"warm-{name}", (name,), 4.0, 1.0, 100.0, 0.0, 0) for name in REGIONS)
KILLED, DRAINED = "eu", "asia"


def main() -> None:
    options = support.parse(__doc__)
    machine = support.hardware()
    jobs = JOBS[2:5] if options.quick else JOBS
    token, key = new_queue_token()
    user = QueueUser("bench", token)
    with tempfile.TemporaryDirectory(prefix="gq", dir="/tmp") as work:
        config = queue_of(Path(work), key)
        cluster = LocalCluster(LocalClusterConfig(dashboard=True), REGIONS, cpus_per_region=4)
        with cluster as made, driver_environment(made.environment):
            location = start_queue(config, address=made.address)
            try:
                for each in WARM:  # how long starts take here, side by side
                    submit(location, each, user)
                start_s = follow(location, None).start_s
                began_s = time.monotonic()
                for wave in sorted({each[-1] for each in jobs}):
                    if wave:
                        time.sleep(SLOT_S)
                    for each in jobs:
                        if each[-1] == wave:
                            submit(location, each, user)
                trouble = Trouble(Path(work) / "runs" / config.name, made.address)
                state = follow(location, None if options.quick else trouble)
                took_s = time.monotonic() - began_s
            finally:
                stop_queue(config, address=made.address)
    planned, plans = plan_of(state, config, start_s or START_S)
    report = report_of(state)
    support.say(f"starts took {start_s or 0.0:.0f} s")
    for row in report.jobs:
        support.say(
            f"{row.name}: planned {plans.get(row.name, 0.0):.3g}, actual {row.utility or 0.0:.3g}, "
            f"{row.outcome}, {row.attempts} starts {row.message}"
        )
    rows = [row for row in report.jobs if not row.name.startswith("warm-")]
    actual = sum(row.utility or 0.0 for row in rows)
    figures = [
        support.Figure("difference", abs(actual / planned - 1), "ratio", "<= 0.1", planned),
        support.Figure("planned", planned, "utility"),
        support.Figure("actual", actual, "utility"),
        support.Figure(
            "ended", float(sum(r.outcome == "finished" for r in rows)), "jobs",
            f">= {len(jobs)}",
        ),
        support.Figure("attempts", float(sum(row.attempts for row in rows)), "submissions"),
        support.Figure("start_s", start_s, "s"),
        support.Figure("seconds", took_s, "s"),
    ]  # fmt: skip
    support.finish("queue", machine, figures, options.out)


def queue_of(work: Path, key: str) -> QueueConfig:
    """One job a region at a time, on two cores that do all of it."""
    return QueueConfig.model_validate(
        {
            "name": "bench",
            "policy": "pd_ors",
            "slot_s": SLOT_S,
            "start_s": START_S,
            "state": str(work / "queues"),
            "runs": str(work / "runs"),
            "regions": {name: {"cpus": 2.0, "usd_per_hour": 1.0} for name in REGIONS},
            "link": {"mbps": 1000.0, "rtt_s": 0.001},
            "tenants": {"bench": {"key": key}},
        }
    )


def submit(location: str, each: tuple[Any, ...], user: QueueUser) -> None:
    name, regions, seconds, value, slots, urgency, _ = each
    config = {
        "name": name,
        "task": {"use": "digits", "options": {"width": 2}},
        "data": {"generate": {"rows_per_shard": 128, "split": {"kind": "iid"}}, "batch_size": 8},
        "regions": [
            {"name": region, "cpus_per_worker": 1.0, "cpus_per_server": 0.5} for region in regions
        ],
        "strategy": {"kind": "sma", "interval": 4},
        "optimizer": {"kind": "momentum", "lr": 0.05},
        "train": {"steps": round(seconds / STEP_S), "eval_every": 0},
        "members": {"min": 1},
        "emulate": {"step_s": STEP_S},
        "checkpoint": {"every_s": 10.0},
    }
    worths = JobValue(value=value, deadline_s=slots * SLOT_S, urgency=urgency)
    submit_job(location, config, user=user, value=worths, wait_s=60.0)
    support.say(f"{name} is submitted")


class Trouble:
    """A driver that is killed, and a region that is drained."""

    def __init__(self, runs: Path, address: str) -> None:
        self._runs, self._address = runs, address
        self._has_killed = self._has_drained = False

    def look(self, state: QueueState) -> None:
        """Make trouble when it is due."""
        killed = state.jobs.get(KILLED)
        if not self._has_killed and killed is not None and 0.3 < killed.progress.done < 1.0:
            self._has_killed = True
            found = LocalConditionalStore(self._runs / killed.id).read(LEASE_KEY)
            if found is not None:
                owner = decode_record(found.data).owner
                support.say(f"killing {owner.text}, which drives {KILLED}")
                os.kill(owner.pid, signal.SIGKILL)
        asia, wide = state.jobs.get("asia"), state.jobs.get("wide")
        if asia is None or wide is None or asia.end is None or self._has_drained:
            return
        if 0.0 < wide.progress.done < 0.9:
            self._has_drained = True
            self._drain()

    def _drain(self) -> None:
        until_unix_s = time.time() + 60.0
        drained = ray_internals.drain_nodes_labelled(
            self._address, REGION_LABEL, DRAINED, until_unix_s, "the benchmark", 30.0
        )
        support.say(f"draining {DRAINED}: {len(drained)} nodes")


def follow(location: str, trouble: Trouble | None) -> QueueState:
    """Wait until all jobs have ended."""
    deadline_s = time.monotonic() + LONGEST_S
    message = ""
    while time.monotonic() < deadline_s:
        state = QueueLocation.at(location).read()
        if state.jobs and not state.living():
            return state
        if trouble is not None:
            trouble.look(state)
        text = ", ".join(
            f"{job.name} {job.state} {job.progress.done:.0%}" for job in state.living()
        )
        if text != message:
            message = text
            support.say(text)
        time.sleep(2.0)
    raise SystemExit(f"jobs have not ended in {LONGEST_S:g} s: {message}")


def plan_of(
    state: QueueState, config: QueueConfig, start_s: float
) -> tuple[float, dict[str, float]]:
    """Return the utility that the policy has in the simulator, over the same arrivals."""
    arrived: dict[str, int] = {}
    capacity = state.generation.slots[0].capacity
    for entry in state.generation.slots:
        for name in entry.arrived:
            if not name.startswith("warm-"):
                arrived.setdefault(name, entry.slot)
    cluster = cluster_of(config, capacity, max(arrived.values()) + 100)
    jobs = []
    for name, slot in arrived.items():
        request = state.jobs[name].request
        observed = ObservedJob(
            left=1.0,
            value=request.value,
            factor=1.0,
            regions=tuple(request.spec.regions),
            start_s=start_s,
        )
        jobs.append(cluster_job(name, request.spec, observed, slot, 0.0, cluster))
    done = replay_jobs(
        cluster, jobs, adapted(policy_named(config.policy), 0.0), seed=state.generation.number
    )
    return done.total_utility, {name: done.utility(name) for name in done.jobs}


if __name__ == "__main__":
    main()
