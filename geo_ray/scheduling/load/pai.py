"""Reads Alibaba's PAI trace of 2020: `pai_task_table.csv`, without a header, as it is published.

A job is all tasks of its name: its workers are those of its largest task that is no parameter
server, its duration from the first start to the last end. Tasks that never ran are left out, and
jobs without accelerators. The trace has users only in other files, so a job's name stands for its
tenant.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Final

from geo_ray.errors import TraceError
from geo_ray.scheduling.load.record import TraceJob, number_in, read_rows

COLUMNS: Final = (
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
    """Read a trace.

    Raises:
        TraceError: it is none.
    """
    tasks: dict[str, list[tuple[int, dict[str, str]]]] = defaultdict(list)
    for line, row in read_rows(path, COLUMNS, header=COLUMNS):
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
