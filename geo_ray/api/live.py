"""Live views and exports of a run: `watch`, `follow_view` and `export_events`."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from types import TracebackType
from typing import Any

from geo_ray.api.config import FilePath
from geo_ray.api.queue import names_queue, queue_location
from geo_ray.api.status import directory_of, not_begun
from geo_ray.base.clock import SystemClock
from geo_ray.base.errors import GeoRayError
from geo_ray.base.load import load_text
from geo_ray.base.text import printable
from geo_ray.base.threads import LOOK_S
from geo_ray.cloud.autoscaler.journal import JournalMachines
from geo_ray.runs import directory as rundir
from geo_ray.runs.report import LiveReader
from geo_ray.scheduler.queue.page import QueueView, queue_sections
from geo_ray.scheduler.queue.page_reader import QueueLiveReader
from geo_ray.storage.conditional_store import StoreLocation
from geo_ray.telemetry.event_log import EVENTS_FILE, has_begun, last_time_s, read_events
from geo_ray.telemetry.export.base import ExportOrder, ObserveConfig
from geo_ray.telemetry.export.exporters import open_exporters
from geo_ray.telemetry.live.page import PagePoller, PageState, page_sections
from geo_ray.telemetry.live.server import PageServer
from geo_ray.telemetry.view import RunView


def export_events(run: FilePath, to: Sequence[Mapping[str, Any] | str]) -> int:
    """Export all events that a run has written so far to other programs.

    Times of day are relative to the last write of the log, also for a simulation.

    Args:
        run: directory of the run, or its address in a bucket.
        to: the programs, each as an entry of `observe.export`: a mapping, or YAML.

    Returns:
        Number of exported events.

    Raises:
        RunDirectoryError: there is no run, or its events cannot be read.
        ConfigError: an entry is invalid, or its package is not installed.
        ConnectionError: a program does not accept the events.
    """
    parts = [each if isinstance(each, str) else json.dumps(dict(each)) for each in to]
    text = "export: [" + ", ".join(parts) + "]"
    config = load_text(text, [], ObserveConfig, "observe")
    directory, _ = rundir.recorded_run(directory_of(run))
    log = directory.path / EVENTS_FILE
    if not has_begun(directory.path):
        raise not_begun(directory)
    newest_unix_s = min(time.time(), log.stat().st_mtime)
    origin_unix_s = newest_unix_s - last_time_s(log)
    settings = rundir.hyperparameters(directory.path)
    order = ExportOrder(directory.path, directory.base_dir, origin_unix_s, settings)
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


_SLICE_EVENTS = 100_000


class LivePage:
    """A live page, served until `close`, or until the end of the ``with`` block."""

    def __init__(self, run: FilePath, port: int, every_s: float, machines: FilePath | None) -> None:
        page_state = PageState()
        self._name = str(run)
        self._over = threading.Event()
        self._poller: PagePoller[QueueView] | PagePoller[RunView] | None = None
        self._server = PageServer(page_state, port, on_watcher=self._wake_poller)
        at = (page_state, lambda: self._server.watchers, self._server.changed, every_s)
        if names_queue(run):
            queue = QueueLiveReader(queue_location(run))
            self._poller = PagePoller(str(run), queue, *at, draw=queue_sections)
        else:
            reader = LiveReader(_finder(run), _machines_in(machines))
            self._poller = PagePoller(str(run), reader, *at, draw=page_sections)

    @property
    def url(self) -> str:
        """Address of the page; it grants access."""
        return self._server.url

    @property
    def watchers(self) -> int:
        """Number of connected clients."""
        return self._server.watchers

    def wait(self) -> None:
        """Wait until another thread closes the page, or for Ctrl-C."""
        while not self._over.wait(LOOK_S):
            pass

    def close(self) -> None:
        """Stop serving the page; idempotent."""
        self._over.set()
        if self._poller is not None:
            self._poller.close()
        self._server.close()

    def __repr__(self) -> str:
        # The address contains a token, and notebooks save their outputs.
        state = "closed" if self._over.is_set() else f"{self.watchers} watching"
        return f"<LivePage of {printable(self._name)}: {state}; its address is .url>"

    def _repr_html_(self) -> str:
        return f"<div><strong>{escape(repr(self)[1:-1])}</strong></div>"

    def __enter__(self) -> LivePage:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _wake_poller(self) -> None:
        if self._poller is not None:
            self._poller.wake()


def watch(
    run: FilePath,
    *,
    port: int = 0,
    every_s: float = 1.0,
    machines: FilePath | None = None,
) -> LivePage:
    """Serve a live page of a run: regions and links, members, curves, cost and machines.

    For a queue, the page shows past and planned jobs over time, and its regions.

    The page is served on this machine only; its address contains a token, which grants access.
    The run may start later, or have ended. The page only reads the run and does not slow it down.

    Args:
        run: directory of the run, or its address in a bucket; or the directory or configuration of
            a queue.
        port: port of the page; 0: any free port.
        every_s: seconds between two updates while a client is connected; five times as many for a
            run in a bucket, and ten times as many without clients.
        machines: directory or ``s3://`` address with the journal of the run's autoscaler; default:
            the location of the run's lease.

    Raises:
        PortInUseError: another process uses the port.
    """
    return LivePage(run, port, every_s, machines)


def follow_view(
    run: FilePath, *, every_s: float = 2.0, machines: FilePath | None = None
) -> Iterator[RunView | GeoRayError]:
    """Yield the contents of the live page as values, until the run is no longer active.

    Args:
        run: as for `watch`.
        every_s: seconds between two values.
        machines: as for `watch`.

    Yields:
        The view of the run, or the error while there is no run.
    """
    reader, clock = LiveReader(_finder(run), _machines_in(machines)), SystemClock()
    while True:
        try:
            while reader.read(_SLICE_EVENTS) < 1.0:
                pass
            view = reader.view()
        except GeoRayError as error:
            yield error
        else:
            yield view
            if view.status.is_going is False and view.status.waits_s is None:
                return
        clock.sleep_s(every_s)


def _finder(run: FilePath) -> Callable[[], Path]:
    return lambda: directory_of(run)


def _machines_in(where: FilePath | None) -> JournalMachines:
    return JournalMachines(None if where is None else StoreLocation(os.fspath(where)).store())
