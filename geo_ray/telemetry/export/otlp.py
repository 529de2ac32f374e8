"""Export of traces of rounds to an OpenTelemetry collector."""

from __future__ import annotations

import logging
from typing import Final

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, TraceFlags

from geo_ray.base.version import __version__
from geo_ray.telemetry.events import Event
from geo_ray.telemetry.export.base import ExportOrder, OtlpConfig
from geo_ray.telemetry.export.spans import SpanFold, SpanRecord

_BATCH: Final = 512
_SCOPE: Final = InstrumentationScope("geo_ray", __version__)


class OtlpExporter:
    """See `Exporter`. Spans of a rejected batch are lost.

    Args:
        config: address of the collector.
        order: the run.
    """

    def __init__(self, config: OtlpConfig, order: ExportOrder) -> None:
        for name in ("opentelemetry.exporter.otlp", "opentelemetry.exporter.http"):
            logging.getLogger(name).setLevel(
                logging.CRITICAL
            )  # failures are reported once, by the export queue
        self._exporter = OTLPSpanExporter(config.endpoint, timeout=config.timeout_s)
        self._endpoint = config.endpoint
        self._origin_unix_s = order.origin_unix_s
        self._resource = Resource.create(
            {"service.name": "geo_ray", "geo_ray.run": order.run_dir.name}
        )
        self._fold = SpanFold()
        self._spans: list[ReadableSpan] = []

    def feed(self, event: Event) -> None:
        """See `Exporter.feed`."""
        self._spans += [self._readable(span) for span in self._fold.feed(event)]
        if len(self._spans) >= _BATCH:
            self.flush()

    def flush(self) -> None:
        """See `Exporter.flush`."""
        spans, self._spans = self._spans, []
        if spans and self._exporter.export(spans) is not SpanExportResult.SUCCESS:
            raise ConnectionError(f"{self._endpoint} did not accept {len(spans)} spans")

    def close(self) -> None:
        """See `Exporter.close`."""
        self._spans += [self._readable(span) for span in self._fold.rest()]
        try:
            self.flush()
        finally:
            self._exporter.shutdown()

    def _readable(self, span: SpanRecord) -> ReadableSpan:
        flags = TraceFlags(TraceFlags.SAMPLED)
        context = SpanContext(span.trace_id, span.span_id, False, flags)
        parent = None
        if span.parent_id is not None:
            parent = SpanContext(span.trace_id, span.parent_id, False, flags)
        return ReadableSpan(
            span.path[-1],
            context,
            parent,
            self._resource,
            span.attributes,
            start_time=self._unix_ns(span.start_s),
            end_time=self._unix_ns(span.end_s),
            instrumentation_scope=_SCOPE,
        )

    def _unix_ns(self, t_s: float) -> int:
        return round((self._origin_unix_s + t_s) * 1e9)
