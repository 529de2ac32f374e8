"""Reads Microsoft's Philly trace: `cluster_job_log`, a JSON list of jobs with their attempts.

A job's accelerators are those of its first attempt, a worker per machine of it; its duration is the
sum of its attempts. Jobs without attempts, or whose times are missing, are left out: they never
ran. Times are of the cluster's clock, without a zone.
"""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from geo_ray.errors import TraceError
from geo_ray.scheduling.load.record import TraceJob

_MOST_BYTES: Final = 2 * 1024**3
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
    """Read a trace.

    Raises:
        TraceError: it is none.
    """
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise TraceError(f"trace {path} is larger than {_MOST_BYTES} bytes")
        jobs = _JOBS.validate_python(json.loads(path.read_bytes()))
    except OSError as error:
        raise TraceError(
            f"trace {path} cannot be read: {error.strerror or error}", fix="Name a file that can."
        ) from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise TraceError(f"trace {path} is no Philly trace: {where}: {first['msg']}") from None
    except (ValueError, RecursionError) as error:
        raise TraceError(f"trace {path} is no JSON file: {error}") from None
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
        when = datetime.strptime(str(text)[:19], _TIME)  # the trace has no zone
    except ValueError:
        raise TraceError(f"trace {path}: job {job} has no time: {text!r}") from None
    return (when - datetime(1970, 1, 1)).total_seconds()
