"""Creates the configured exporters and passes events to them.

Exporters run on a separate thread, so that none of them blocks the run.
"""

from __future__ import annotations

import importlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Final

from geo_ray.base.errors import ConfigError
from geo_ray.telemetry.event_log import failure_fields
from geo_ray.telemetry.events import Event
from geo_ray.telemetry.export.base import AnyExport, Exporter, ExportOrder

_MOST_EVENTS: Final = 20_000
_FLUSH_S: Final = 2.0
_CLOSE_S: Final = 10.0
_log = logging.getLogger(__name__)


class ExportQueue:
    """Bounded queue of events for the exporters; events that do not fit are lost.

    An exception of an exporter is reported once, and the exporter receives later events
    nevertheless, because the cause may be temporary.

    Args:
        exporters: exporters by name.
        most: maximum number of queued events.
        close_s: timeout of `close` for exporting the rest.
        notify: called with a description of a problem.
    """

    def __init__(
        self,
        exporters: Mapping[str, Exporter],
        most: int = _MOST_EVENTS,
        close_s: float = _CLOSE_S,
        notify: Callable[[str], None] = _log.warning,
    ) -> None:
        self._exporters = dict(exporters)
        self._events: queue.Queue[Event | None] = queue.Queue(most)
        self._close_s = close_s
        self._notify = notify
        self._failed: set[str] = set()
        self._ends = False
        self.lost = 0
        self._thread: threading.Thread | None = None
        if self._exporters:
            self._thread = threading.Thread(target=self._go, name="export", daemon=True)
            self._thread.start()

    def feed(self, event: Event) -> None:
        """Queue the next event; never blocks, never raises."""
        if self._thread is None:
            return
        try:
            self._events.put_nowait(event)
        except queue.Full:
            self.lost += 1

    def close(self) -> None:
        """Export the rest within ``close_s``; idempotent."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        ends_s = time.monotonic() + self._close_s
        self._ends = True
        with suppress(queue.Full):  # reported below
            self._events.put(None, timeout=self._close_s)
        thread.join(max(0.0, ends_s - time.monotonic()))
        if thread.is_alive():
            names = ", ".join(self._exporters)
            self._notify(f"observe.export: {names} did not accept all events of the run in time")
        if self.lost:
            self._notify(
                f"observe.export: {self.lost:,} events were lost, because they came too fast"
            )

    def _go(self) -> None:
        flushed_s = time.monotonic()
        while True:
            try:
                event = self._events.get(timeout=_FLUSH_S)
            except queue.Empty:
                event = None
                if self._ends:
                    break
            else:
                if event is None:
                    break
                for name, exporter in self._exporters.items():
                    self._try(name, partial(exporter.feed, event))
            if time.monotonic() - flushed_s >= _FLUSH_S:
                for name, exporter in self._exporters.items():
                    self._try(name, exporter.flush)
                flushed_s = time.monotonic()
        for name, exporter in self._exporters.items():
            self._try(name, exporter.close)

    def _try(self, name: str, what: Callable[[], None]) -> None:
        try:
            what()
        except Exception as error:  # foreign code: no exception of it ends the run
            if name not in self._failed:
                self._failed.add(name)
                why = " ".join(f"{type(error).__name__}: {error}".split())[:500]
                self._notify(f"observe.export: {name} fails, the run continues without it: {why}")


_WHERE: Final = {
    "otlp": ("OtlpExporter", "opentelemetry-exporter-otlp-proto-http"),
    "tensorboard": ("TensorboardExporter", "tensorboardX"),
    "mlflow": ("MlflowExporter", "mlflow-skinny"),
    "wandb": ("WandbExporter", "wandb"),
}


def check_exports(configs: Sequence[AnyExport]) -> None:
    """Reject exporters whose package is missing, before anything is started.

    Raises:
        ConfigError: names the package.
    """
    for config in configs:
        _class_of(config.kind)


def open_exporters(configs: Sequence[AnyExport], order: ExportOrder) -> dict[str, Exporter]:
    """Create the exporters, by a readable name.

    Raises:
        ConfigError: a package is missing, or an exporter cannot be created.
    """
    found: dict[str, Exporter] = {}
    for number, config in enumerate(configs):
        name = config.kind if config.kind not in found else f"{config.kind} {number}"
        kind = _class_of(config.kind)
        try:
            found[name] = kind(config, order)
        except Exception as error:  # of foreign code
            for made in found.values():
                made.close()
            raise ConfigError(
                f"observe.export: {config.kind} cannot be started: {error}",
                fix="Correct the cause, or remove it from `observe.export`.",
            ) from error
    return found


@contextmanager
def exporting(configs: Sequence[AnyExport], order: ExportOrder) -> Iterator[ExportQueue]:
    """Export events during a block; an error that ends it is exported as `run_failed`.

    Raises:
        ConfigError: as for `open_exporters`.
    """
    exports = ExportQueue(open_exporters(configs, order))
    try:
        yield exports
    except BaseException as error:
        t_s = time.time() - order.origin_unix_s
        exports.feed(Event("run_failed", t_s, failure_fields(error)))
        raise
    finally:
        exports.close()


def _class_of(kind: str) -> type:
    name, package = _WHERE[kind]
    try:
        module = importlib.import_module(f"geo_ray.telemetry.export.{kind}")
    except ImportError as error:
        raise ConfigError(
            f"observe.export: {kind} needs a package that is not installed: {error}",
            fix=f"Install {package}, or geo_ray with its extra `export`.",
        ) from error
    found: type = getattr(module, name)
    return found
