"""Reads SenseTime's Helios trace: `cluster_log.csv`, a line per job.

Jobs without accelerators (CPU jobs) and those that never started are left out; a worker per node.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Final

from geo_ray.errors import TraceError
from geo_ray.scheduling.load.record import TraceJob, number_in, read_rows

COLUMNS: Final = (
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
    """Read a trace.

    Raises:
        TraceError: it is none.
    """
    found = []
    for line, row in read_rows(path, COLUMNS):
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
            f"trace {path}, line {line}: {column} is no time: {row[column]!r}"
        ) from None
    return (found - datetime(1970, 1, 1)).total_seconds()
