"""Serves the run's metrics to Prometheus through Ray, on every node's metrics port."""

from __future__ import annotations

from ray.util.metrics import Counter, Gauge

from geo_ray.observe.events.schema import Event
from geo_ray.observe.metrics.metrics import METRICS, MetricsState


class RayMetrics:
    """Folds events into metric values and hands each change to Ray."""

    def __init__(self) -> None:
        self._state = MetricsState()
        self._specs = {spec.name: spec for spec in METRICS}
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}

    def feed(self, event: Event) -> None:
        """Take the next event of the run."""
        for reading in self._state.feed(event):
            spec = self._specs[reading.name]
            tags = dict(zip(spec.tag_keys, reading.tags, strict=True))
            arguments = (spec.name, spec.description, spec.tag_keys)
            if spec.kind == "counter":
                counter = self._counters.get(spec.name) or Counter(*arguments)
                self._counters[spec.name] = counter
                counter.inc(reading.increase, tags)
            else:
                gauge = self._gauges.get(spec.name) or Gauge(*arguments)
                self._gauges[spec.name] = gauge
                gauge.set(reading.value, tags)
