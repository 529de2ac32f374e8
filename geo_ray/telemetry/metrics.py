"""Metrics of a run, folded from its events; exporters bind them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from geo_ray.telemetry.events import Event
from geo_ray.telemetry.totals import LinkTotals, Rate

Tags = tuple[str, ...]  # values in the order of the spec's tag_keys


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """Name and meaning of a metric.

    Attributes:
        name: ``geo_ray_<noun>_<unit>``.
        kind: counter or gauge.
        description: one line for the scraper.
        tag_keys: the labels, `run` first.
    """

    name: str
    kind: Literal["counter", "gauge"]
    description: str
    tag_keys: tuple[str, ...] = ("run", "region")


_WAN_TAGS = ("run", "region", "peer", "traffic_class", "direction")

METRICS: tuple[MetricSpec, ...] = (
    MetricSpec("geo_ray_step_index", "gauge", "Newest step that the region applied."),
    MetricSpec("geo_ray_loss_value", "gauge", "Training loss of the newest step."),
    MetricSpec("geo_ray_samples_count", "counter", "Training samples, including repeated ones."),
    MetricSpec("geo_ray_samples_per_second", "gauge", "Training samples per second, last 10 s."),
    MetricSpec("geo_ray_staleness_updates", "gauge", "Staleness of the newest exchange."),
    MetricSpec("geo_ray_compute_seconds", "counter", "Time spent computing."),
    MetricSpec("geo_ray_wait_seconds", "counter", "Time spent waiting."),
    MetricSpec(
        "geo_ray_wan_bytes",
        "counter",
        "Bytes between regions. Every byte counts twice, with direction `out` in the sending and "
        "`in` in the receiving region: add up one direction only.",
        _WAN_TAGS,
    ),
    MetricSpec("geo_ray_exchanges_count", "counter", "Answered updates."),
    MetricSpec("geo_ray_round_index", "gauge", "Newest round that was merged."),
    MetricSpec("geo_ray_workers_lost_count", "counter", "Workers that died."),
    MetricSpec("geo_ray_workers_replaced_count", "counter", "Workers that were replaced."),
    MetricSpec("geo_ray_steps_refused_count", "counter", "Steps refused as not finite."),
    MetricSpec(
        "geo_ray_eval_value",
        "gauge",
        "Evaluation metric; region `all` is the combination of all regions.",
        ("run", "region", "metric"),
    ),
    MetricSpec(
        "geo_ray_checkpoint_step_index", "gauge", "Step of the newest checkpoint.", ("run",)
    ),
    MetricSpec("geo_ray_checkpoint_bytes", "gauge", "Size of the newest checkpoint.", ("run",)),
)

_FAULT_METRICS = {
    "worker_lost": "geo_ray_workers_lost_count",
    "worker_replaced": "geo_ray_workers_replaced_count",
    "step_refused": "geo_ray_steps_refused_count",
}


@dataclass(frozen=True, slots=True)
class Reading:
    """A metric changed by an event.

    Attributes:
        name: of the `MetricSpec`.
        tags: values in the order of its tag_keys.
        value: new value; used for gauges.
        increase: increment of the value; used for counters (0 for a gauge).
    """

    name: str
    tags: Tags
    value: float
    increase: float


class MetricsState:
    """Folds events into metric values; no clock, no server, no network."""

    def __init__(self) -> None:
        self._run = ""
        self._values: dict[tuple[str, Tags], float] = {}
        self._changed: list[Reading] = []
        self._wan = LinkTotals()
        self._rates: dict[str, Rate] = {}

    @property
    def values(self) -> Mapping[tuple[str, Tags], float]:
        """Values of all metrics by (name, tags)."""
        return self._values

    def feed(self, event: Event) -> tuple[Reading, ...]:
        """Process the next event; give the metrics that it changed, without non-finite ones."""
        self._changed = []
        match event.kind:
            case "run_started":
                self._run = event["run"]
                self._wan.restart()
                for region in event["regions"]:
                    self._rates[region] = Rate()
                    self._rates[region].start(event.t_s)
            case "step":
                self._step(event)
            case "exchange":
                region = event["region"]
                self._count("geo_ray_exchanges_count", 1, region)
                self._set("geo_ray_staleness_updates", event["staleness"], region)
                self._set("geo_ray_round_index", event["round"], region)
            case "eval":
                for metric, value in event["metrics"].items():
                    self._set("geo_ray_eval_value", value, event["region"] or "all", metric)
            case "wan":
                self._wan_bytes(event)
            case "checkpoint":
                self._set("geo_ray_checkpoint_step_index", event["step"])
                self._set("geo_ray_checkpoint_bytes", event["bytes"])
            case kind if kind in _FAULT_METRICS:
                self._count(_FAULT_METRICS[kind], 1, event["region"])
        return tuple(self._changed)

    def _step(self, event: Event) -> None:
        region = event["region"]
        rate = self._rates.setdefault(region, Rate())
        rate.add(event.t_s, event["samples"])
        self._set("geo_ray_step_index", event["step"], region)
        self._set("geo_ray_loss_value", event["loss"], region)
        self._count("geo_ray_samples_count", event["samples"], region)
        self._set("geo_ray_samples_per_second", rate.per_s(event.t_s), region)
        self._count("geo_ray_compute_seconds", event["compute_s"], region)
        self._count("geo_ray_wait_seconds", event["wait_s"], region)

    def _wan_bytes(self, event: Event) -> None:
        src, dst = event["src"], event["dst"]
        for name, count in self._wan.feed(src, dst, event["bytes_by_class"]).items():
            self._count("geo_ray_wan_bytes", count, src, dst, name, "out")
            self._count("geo_ray_wan_bytes", count, dst, src, name, "in")

    def _set(self, name: str, value: float | None, *tags: str) -> None:
        if value is not None:
            self._record(name, tags, float(value), 0.0)

    def _count(self, name: str, increase: float | None, *tags: str) -> None:
        if increase:
            value = self._values.get((name, (self._run, *tags)), 0.0) + increase
            self._record(name, tags, value, float(increase))

    def _record(self, name: str, tags: Tags, value: float, increase: float) -> None:
        tags = (self._run, *tags)
        self._values[name, tags] = value
        self._changed.append(Reading(name, tags, value, increase))
