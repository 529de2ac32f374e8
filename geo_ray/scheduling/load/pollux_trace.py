"""Reads the workloads of Pollux and Sia, CSV files.

Their columns are name, time, application, num_replicas and batch_size. They say what is trained,
not for how long: their authors profiled each application. Durations here are assumed by application
(`HOURS`), of accelerator time at the size that was asked for: small ones under an hour, ImageNet
tens of hours, as the categories of those papers have it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from geo_ray.errors import TraceError
from geo_ray.scheduling.load.record import TraceJob, number_in, read_rows

COLUMNS: Final = ("name", "time", "application", "num_replicas", "batch_size")
HOURS: Final = {
    "cifar10": 1.0,
    "ncf": 0.5,
    "bert": 6.0,
    "deepspeech2": 8.0,
    "yolov3": 20.0,
    "imagenet": 100.0,
}


def read_pollux(path: Path) -> list[TraceJob]:
    """Read a workload.

    Raises:
        TraceError: it is none.
    """
    found = []
    for line, row in read_rows(path, COLUMNS):
        hours = HOURS.get(row["application"])
        if hours is None:
            raise TraceError(
                f"trace {path}, line {line}: application {row['application']!r} is not known",
                fix=f"Known are {', '.join(HOURS)}.",
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
