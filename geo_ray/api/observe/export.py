"""`geo_ray.export_events`: the events that a run has written, to other programs."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from geo_ray.api.status import directory_of, not_begun
from geo_ray.config.load import load_text
from geo_ray.job import rundir
from geo_ray.observe.events.log import EVENTS_FILE, last_time_s, read_events
from geo_ray.observe.export.config import ObserveConfig
from geo_ray.observe.export.exporter import ExportOrder
from geo_ray.observe.export.open import open_exporters
from geo_ray.observe.report.ending import has_begun

if TYPE_CHECKING:
    from geo_ray.api.inputs import FilePath


def export_events(run: FilePath, to: Sequence[Mapping[str, Any] | str]) -> int:
    """Hand on all events that a run has written so far, one program after the other.

    Times of day are counted back from when the log was last written, also those of a simulation.

    Args:
        run: its directory, or its address in a bucket.
        to: the programs, each as an entry of `observe.export`: a mapping, or YAML.

    Returns:
        How many events.

    Raises:
        RunDirectoryError: there is no run, or its events cannot be read.
        ConfigError: an entry is wrong, or its package is not installed.
        ConnectionError: a program does not take them.
    """
    parts = [each if isinstance(each, str) else json.dumps(dict(each)) for each in to]
    text = "export: [" + ", ".join(parts) + "]"
    config = load_text(text, [], ObserveConfig, "observe")
    directory, _ = rundir.look(directory_of(run))
    log = directory.path / EVENTS_FILE
    if not has_begun(directory.path):
        raise not_begun(directory)
    newest_unix_s = min(time.time(), log.stat().st_mtime)
    origin_unix_s = newest_unix_s - last_time_s(log)
    order = ExportOrder(directory.path, directory.base_dir, origin_unix_s)
    exporters = open_exporters(config.export, order)
    count = 0
    try:
        for event in read_events(log):
            count += 1
            for exporter in exporters.values():
                exporter.feed(event)
    finally:
        for exporter in exporters.values():
            exporter.close()
    return count
