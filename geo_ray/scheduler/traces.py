"""Published traces as jobs of a shared cluster: Helios, PAI, Philly, Pollux and Sia.

Values that a trace lacks are derived by rule from a digest of the job's id (or tenant) and the
seed: work from its duration on one site, model family, region of its data, value and deadline, one
parameter server per four workers, 32 rows per worker. CPU jobs and jobs that never ran are skipped.
Durations of Pollux's traces are assumed by application (`HOURS`).
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from operator import attrgetter
from pathlib import Path
from typing import Final

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from geo_ray.base.errors import TraceError
from geo_ray.planner.profile import StepModel
from geo_ray.scheduler.cluster import SharedCluster
from geo_ray.scheduler.job import (
    MACHINE,
    BatchLimits,
    ClusterJob,
    JobDemands,
    JobSpeed,
    LinkUsed,
    SigmoidUtility,
)

_MOST_BYTES: Final = 2 * 1024**3


@dataclass(frozen=True, slots=True)
class TraceJob:
    """A job of a trace, independent of its format.

    Attributes:
        id: its name.
        submit_s: submission time, relative to the first job or to 1970.
        duration_s: duration.
        workers: number of workers.
        gpus: GPUs per worker.
        cpus: CPUs per worker; 0: unknown.
        tenant: user or virtual cluster, which determines its region.
        model: its model; empty: unknown.
    """

    id: str
    submit_s: float
    duration_s: float
    workers: int
    gpus: float
    cpus: float = 0.0
    tenant: str = ""
    model: str = ""


def read_rows(
    path: Path, columns: Sequence[str], header: Sequence[str] | None = None
) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the rows of a CSV file with their line numbers.

    Args:
        path: the file.
        columns: required columns.
        header: header of a file without one.

    Raises:
        TraceError: the file cannot be read, or lacks columns.
    """
    try:
        num_bytes = path.stat().st_size
        if num_bytes == 0:
            raise TraceError(f"trace {path} is empty")
        if num_bytes > _MOST_BYTES:
            raise TraceError(f"trace {path} is larger than {_MOST_BYTES} bytes")
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, fieldnames=header)
            missing = [name for name in columns if name not in (reader.fieldnames or ())]
            if missing:
                raise TraceError(f"trace {path} has no column {', '.join(missing)}")
            for number, row in enumerate(reader, 1 if header else 2):
                if None in row or None in row.values():
                    raise TraceError(f"trace {path}, line {number}: not one field per column")
                yield number, row
    except OSError as error:
        raise TraceError(
            f"trace {path} cannot be read: {error.strerror or error}", fix="Name a readable file."
        ) from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise TraceError(f"trace {path} is not a CSV file: {error}") from None


def number_in(path: Path, line: int, row: dict[str, str], column: str) -> float:
    """Return a non-negative number of a row.

    Raises:
        TraceError: the value is negative or not a number.
    """
    try:
        value = float(row[column])
    except ValueError:
        raise TraceError(
            f"trace {path}, line {line}: {column} is not a number: {row[column]!r}"
        ) from None
    if not math.isfinite(value) or value < 0:
        raise TraceError(f"trace {path}, line {line}: {column} is {row[column]}, which is negative")
    return value


HELIOS_COLUMNS: Final = (
    "job_id",
    "user",
    "vc",
    "gpu_num",
    "cpu_num",
    "node_num",
    "state",
    "submit_time",
    "start_time",
    "end_time",
    "duration",
    "queue",
)


_NO_TIME: Final = ("", "None", "NaN")


def read_helios(path: Path) -> list[TraceJob]:
    """Read a Helios trace.

    Raises:
        TraceError: the file is not such a trace.
    """
    found = []
    for line, row in read_rows(path, HELIOS_COLUMNS):
        gpus = number_in(path, line, row, "gpu_num")
        if not gpus or row["start_time"] in _NO_TIME:
            continue
        nodes = max(1, int(number_in(path, line, row, "node_num")))
        duration_s = number_in(path, line, row, "duration")
        submit_s = _time_in(path, line, row, "submit_time")
        starts_s = _time_in(path, line, row, "start_time")
        if row["end_time"] not in _NO_TIME and _time_in(path, line, row, "end_time") < starts_s:
            raise TraceError(f"trace {path}, line {line}: it ends before it starts")
        if duration_s:
            cpus = number_in(path, line, row, "cpu_num") / nodes
            name, each, tenant = row["job_id"], gpus / nodes, row["vc"]
            found.append(TraceJob(name, submit_s, duration_s, nodes, each, cpus, tenant))
    return found


def _time_in(path: Path, line: int, row: dict[str, str], column: str) -> float:
    try:
        found = datetime.fromisoformat(row[column]).replace(tzinfo=None)
    except ValueError:
        raise TraceError(
            f"trace {path}, line {line}: {column} is not a time: {row[column]!r}"
        ) from None
    return (found - datetime(1970, 1, 1)).total_seconds()


PAI_COLUMNS: Final = (
    "job_name",
    "task_name",
    "inst_num",
    "status",
    "start_time",
    "end_time",
    "plan_cpu",
    "plan_mem",
    "plan_gpu",
    "gpu_type",
)
_PERCENT: Final = 100.0  # the trace has 600 for 6 cores, 50 for half an accelerator


def read_pai(path: Path) -> list[TraceJob]:
    """Read a PAI trace.

    Raises:
        TraceError: the file is not such a trace.
    """
    tasks: dict[str, list[tuple[int, dict[str, str]]]] = defaultdict(list)
    for line, row in read_rows(path, PAI_COLUMNS, header=PAI_COLUMNS):
        if row["start_time"] and row["end_time"]:
            tasks[row["job_name"]].append((line, row))
    found = []
    for name, rows in tasks.items():
        starts = [number_in(path, line, row, "start_time") for line, row in rows]
        ends = [number_in(path, line, row, "end_time") for line, row in rows]
        if max(ends) < min(starts):
            raise TraceError(f"trace {path}: job {name} ends before it starts")
        computing = [(line, row) for line, row in rows if row["task_name"] != "ps"]
        counts = [int(number_in(path, line, row, "inst_num")) for line, row in computing]
        if not counts or max(counts) < 1:
            continue
        line, row = computing[counts.index(max(counts))]
        gpus = number_in(path, line, row, "plan_gpu") / _PERCENT if row["plan_gpu"] else 0.0
        if gpus and max(ends) > min(starts):
            cpus = number_in(path, line, row, "plan_cpu") / _PERCENT if row["plan_cpu"] else 0.0
            span_s = max(ends) - min(starts)
            found.append(TraceJob(name, min(starts), span_s, max(counts), gpus, cpus, name))
    return found


_TIME: Final = "%Y-%m-%d %H:%M:%S"


class _Detail(BaseModel):
    model_config = ConfigDict(extra="ignore")
    ip: str = ""
    gpus: list[str] = Field(default_factory=list)


class _Attempt(BaseModel):
    model_config = ConfigDict(extra="ignore")
    start_time: str | None = None
    end_time: str | None = None
    detail: list[_Detail] = Field(default_factory=list)


class _PhillyJob(BaseModel):
    model_config = ConfigDict(extra="ignore")
    jobid: str
    vc: str = ""
    submitted_time: str | None
    attempts: list[_Attempt]


_JOBS = TypeAdapter(list[_PhillyJob])


def read_philly(path: Path) -> list[TraceJob]:
    """Read a Philly trace.

    Raises:
        TraceError: the file is not such a trace.
    """
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise TraceError(f"trace {path} is larger than {_MOST_BYTES} bytes")
        jobs = _JOBS.validate_python(json.loads(path.read_bytes()))
    except OSError as error:
        raise TraceError(
            f"trace {path} cannot be read: {error.strerror or error}", fix="Name a readable file."
        ) from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise TraceError(f"trace {path} is not a Philly trace: {where}: {first['msg']}") from None
    except (ValueError, RecursionError) as error:
        raise TraceError(f"trace {path} is not a JSON file: {error}") from None
    found = []
    for job in jobs:
        spans = [_span_s(path, job.jobid, each) for each in job.attempts]
        duration_s = sum(span for span in spans if span is not None)
        submit_s = _time_s(path, job.jobid, job.submitted_time)
        if submit_s is None or not duration_s or not job.attempts[0].detail:
            continue
        machines = job.attempts[0].detail
        gpus = sum(len(each.gpus) for each in machines)
        if gpus:
            workers = len(machines)
            found.append(
                TraceJob(job.jobid, submit_s, duration_s, workers, gpus / workers, tenant=job.vc)
            )
    return found


def _span_s(path: Path, job: str, attempt: _Attempt) -> float | None:
    start_s = _time_s(path, job, attempt.start_time)
    end_s = _time_s(path, job, attempt.end_time)
    if start_s is None or end_s is None:
        return None
    if end_s < start_s:
        raise TraceError(f"trace {path}: an attempt of job {job} ends before it starts")
    return end_s - start_s


def _time_s(path: Path, job: str, text: str | None) -> float | None:
    if text in (None, "", "None"):
        return None
    try:
        when = datetime.strptime(str(text)[:19], _TIME)  # the trace has no time zone
    except ValueError:
        raise TraceError(f"trace {path}: job {job} has no time: {text!r}") from None
    return (when - datetime(1970, 1, 1)).total_seconds()


POLLUX_COLUMNS: Final = ("name", "time", "application", "num_replicas", "batch_size")
HOURS: Final = {
    "cifar10": 1.0,
    "ncf": 0.5,
    "bert": 6.0,
    "deepspeech2": 8.0,
    "yolov3": 20.0,
    "imagenet": 100.0,
}


def read_pollux(path: Path) -> list[TraceJob]:
    """Read a Pollux workload.

    Raises:
        TraceError: the file is not such a workload.
    """
    found = []
    for line, row in read_rows(path, POLLUX_COLUMNS):
        hours = HOURS.get(row["application"])
        if hours is None:
            raise TraceError(
                f"trace {path}, line {line}: application {row['application']!r} is unknown",
                fix=f"Known applications: {', '.join(HOURS)}.",
            )
        replicas = int(number_in(path, line, row, "num_replicas"))
        number_in(path, line, row, "batch_size")
        submit_s = number_in(path, line, row, "time")
        if replicas < 1:
            raise TraceError(f"trace {path}, line {line}: num_replicas is {replicas}")
        duration_s = hours * 3600.0 / replicas
        model = row["application"]
        found.append(TraceJob(row["name"], submit_s, duration_s, replicas, 1.0, model=model))
    return found


FORMATS: Final[Mapping[str, Callable[[Path], list[TraceJob]]]] = {
    "philly": read_philly,
    "helios": read_helios,
    "pai": read_pai,
    "pollux": read_pollux,
}
FAMILIES: Final = (("small", 6e6, 1e-3), ("resnet", 102e6, 3e-3), ("vgg", 553e6, 5e-3),
                   ("bert", 440e6, 2e-2))  # fmt: skip
"""Name, model bytes, seconds of a row on one worker: assumed orders of magnitude."""
_ROWS: Final = 32


def read_trace(path: Path, kind: str) -> list[TraceJob]:
    """Read a trace; jobs in the order of submission, the first at 0.

    Raises:
        TraceError: the file cannot be read, or has no job that ran.
    """
    if kind not in FORMATS:
        raise TraceError(f"unknown format '{kind}'", fix=f"Choose among {', '.join(FORMATS)}.")
    jobs = sorted(FORMATS[kind](path), key=attrgetter("submit_s", "id"))
    if not jobs:
        raise TraceError(f"trace {path} has no job with accelerators that ran")
    return jobs


def cluster_jobs(
    traced: Sequence[TraceJob], cluster: SharedCluster, seed: int = 0
) -> list[ClusterJob]:
    """Return jobs by the rules of the module; the first arrives in slot 0."""
    first_s = min(job.submit_s for job in traced)
    return [_job(job, first_s, cluster, seed) for job in traced]


def _job(traced: TraceJob, first_s: float, cluster: SharedCluster, seed: int) -> ClusterJob:
    rng = np.random.default_rng(_digest(seed, traced.id))
    regions = len(cluster.net.names)
    weights = 1 / np.arange(1, regions + 1)
    by_tenant = np.random.default_rng(_digest(seed, traced.tenant or traced.id))
    region = int(by_tenant.choice(regions, p=weights / weights.sum()))
    named = [family for family in FAMILIES if family[0] in traced.model]
    _, model_bytes, row_s = named[0] if named else FAMILIES[int(rng.integers(len(FAMILIES)))]
    rows = _ROWS * traced.workers
    cpus = traced.cpus or 4 * max(1.0, traced.gpus)
    # A worker gets at most one machine; larger requests are reduced to it.
    most_R = cluster.capacity_TSR[0].max(axis=0)
    worker_R = np.minimum([traced.gpus, cpus, 16 * max(1.0, traced.gpus), 0.0], most_R)
    server_R = np.minimum([0.0, 2.0, 8.0, 0.0], most_R)
    steps = StepModel("", 0.0, 0.0, {MACHINE: row_s}, {MACHINE: (1, rows)}, (1, rows), 0.0)
    speed = JobSpeed(steps, model_bytes, BatchLimits(rows, 4 * rows, 4.0 * rows))
    demands = JobDemands(worker_R, server_R, 4, min(rows, 4 * traced.workers), traced.workers)
    link = LinkUsed(float(cluster.inside_mbps_S.max()), is_inside=True)
    per_s = float(speed.rows_per_s(traced.workers, demands.servers(traced.workers), rows, link))
    slots = traced.duration_s / cluster.slot_s
    kind = int(rng.choice(3, p=[0.10, 0.55, 0.35]))
    urgency = (0.0, float(rng.uniform(0.01, 1)), float(rng.uniform(4, 6)))[kind]
    utility = SigmoidUtility(
        float(rng.uniform(1, 100)), urgency / max(1.0, slots), slots * float(rng.uniform(1.2, 5))
    )
    return ClusterJob(
        traced.id,
        math.floor((traced.submit_s - first_s) / cluster.slot_s),
        max(1.0, per_s * traced.duration_s),
        demands,
        speed,
        utility,
        {region: 1.0} if regions > 1 else {},
        traced.tenant,
    )


def _digest(seed: int, text: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{text}".encode()).digest()[:8], "big")
