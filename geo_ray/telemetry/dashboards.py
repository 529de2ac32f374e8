"""Grafana dashboards and Prometheus alerts for the metrics of a run, written into a directory."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import yaml

from geo_ray.base.files import save_text, unwritable
from geo_ray.telemetry.metrics import METRICS

RUN: Final = 'run=~"$run"'
"""Selects what is chosen on a dashboard."""

REGION: Final = f'{RUN},region=~"$region"'
_KINDS: Final = {spec.name: spec.kind for spec in METRICS}


def scraped(name: str) -> str:
    """Give the name that Ray gives a metric; KeyError if there is none of that name."""
    return f"ray_{name}_total" if _KINDS[name] == "counter" else f"ray_{name}"


def gauge(name: str, select: str = REGION, by: str = "run, region") -> str:
    """Query a gauge: several processes may have served it one after the other."""
    return f"max by ({by}) ({scraped(name)}{{{select}}})"


def per_second(name: str, select: str = REGION, by: str = "run, region", over: str = "1m") -> str:
    """Query by how much a counter grows in a second."""
    return f"sum by ({by}) (rate({scraped(name)}{{{select}}}[{over}]))"


def grown(name: str, over: str, select: str = "", by: str = "run, region") -> str:
    """Query by how much a counter has grown."""
    return f"sum by ({by}) (increase({scraped(name)}{{{select}}}[{over}]))"


def wait_fraction(select: str = REGION, over: str = "2m") -> str:
    """Build the query of a region's fraction of time spent waiting."""
    wait = per_second("geo_ray_wait_seconds", select, over=over)
    compute = per_second("geo_ray_compute_seconds", select, over=over)
    return f"{wait} / ({wait} + {compute})"


_STEP: Final = scraped("geo_ray_step_index")
_SAVED: Final = scraped("geo_ray_checkpoint_step_index")
_LOSS: Final = scraped("geo_ray_loss_value")
_STALE: Final = scraped("geo_ray_staleness_updates")


@dataclass(frozen=True, slots=True)
class AlertSpec:
    """One rule.

    Attributes:
        name: of the alert.
        query: true while it fires.
        lasts: duration of the condition, in Prometheus syntax.
        severity: ``critical`` requires immediate action.
        description: description of the problem, with labels of the alert.
        advice: remedy.
    """

    name: str
    query: str
    lasts: str
    severity: Literal["critical", "warning"]
    description: str
    advice: str


def _busy() -> str:
    wait = per_second("geo_ray_wait_seconds", "", over="10m")
    compute = per_second("geo_ray_compute_seconds", "", over="10m")
    return f"{wait} / ({wait} + {compute}) > 0.8"


ALERTS: Final = (
    AlertSpec(
        "GeoRayNoProgress",
        f"max by (run) (changes({_STEP}[10m])) == 0",
        "5m",
        "critical",
        "Run {{ $labels.run }} has taken no step for 15 minutes.",
        "`geo-ray status RUN` shows whether its run actor runs and which regions it waits for.",
    ),
    AlertSpec(
        "GeoRayRegionStalled",
        f"(max by (run, region) (changes({_STEP}[10m])) == 0) "
        f"and on (run) (max by (run) (changes({_STEP}[10m])) > 0)",
        "5m",
        "warning",
        "Region {{ $labels.region }} of {{ $labels.run }} makes no progress while others train.",
        "`geo-ray watch RUN` shows whether it is lost, waits for its link or has left.",
    ),
    AlertSpec(
        "GeoRayWorkersLost",
        f"{grown('geo_ray_workers_lost_count', '30m')} > 2",
        "0m",
        "warning",
        "Region {{ $labels.region }} of {{ $labels.run }} has lost {{ $value }} workers.",
        "The causes are in the run's events; exhausted memory is the usual one.",
    ),
    AlertSpec(
        "GeoRayWorkersMissing",
        f"{grown('geo_ray_workers_lost_count', '1h')} "
        f"- {grown('geo_ray_workers_replaced_count', '1h')} > 0",
        "15m",
        "critical",
        "Region {{ $labels.region }} of {{ $labels.run }} lacks workers that are not being "
        "replaced.",
        "It needs machines: check its nodes, or the autoscaler.",
    ),
    AlertSpec(
        "GeoRayStepsRefused",
        f"{grown('geo_ray_steps_refused_count', '10m')} > 0",
        "0m",
        "warning",
        "Steps of region {{ $labels.region }} of {{ $labels.run }} were not finite.",
        "Lower the learning rate, or look for invalid rows in its data.",
    ),
    AlertSpec(
        "GeoRayLossRises",
        f"avg by (run, region) (avg_over_time({_LOSS}[10m])) "
        f"> 1.5 * avg by (run, region) (avg_over_time({_LOSS}[10m] offset 1h))",
        "10m",
        "warning",
        "The loss of region {{ $labels.region }} of {{ $labels.run }} is far above an hour ago.",
        "`geo-ray train --resume RUN` resumes from the newest healthy checkpoint.",
    ),
    AlertSpec(
        "GeoRayMostlyWaiting",
        _busy(),
        "15m",
        "warning",
        "Region {{ $labels.region }} of {{ $labels.run }} spends most of its time waiting.",
        "Use a longer interval, a codec or a strategy that does not wait: `geo-ray plan`, "
        "`compare`.",
    ),
    AlertSpec(
        "GeoRayStale",
        f"min by (run, region) (min_over_time({_STALE}[10m])) > 20",
        "5m",
        "warning",
        "Updates of region {{ $labels.region }} of {{ $labels.run }} are more than 20 behind.",
        "Its link or its machines are slower than others: see docs/reference/strategies.md.",
    ),
    AlertSpec(
        "GeoRayNotSaved",
        f"(max by (run) (changes({_SAVED}[1h])) == 0) "
        f"and on (run) (max by (run) (changes({_STEP}[1h])) > 0)",
        "10m",
        "critical",
        "Run {{ $labels.run }} trains, but has saved no checkpoint for an hour.",
        "`geo-ray status RUN` lists failed checkpoints.",
    ),
)


def alert_rules() -> dict[str, Any]:
    """Give the value of the file of rules."""
    return {
        "groups": [
            {
                "name": "geo_ray",
                "rules": [
                    {
                        "alert": each.name,
                        "expr": each.query,
                        "for": each.lasts,
                        "labels": {"severity": each.severity},
                        "annotations": {"summary": each.description, "description": each.advice},
                    }
                    for each in ALERTS
                ],
            }
        ]
    }


_SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
_WIDE, _HIGH = 12, 8  # of a panel, in Grafana's grid of 24 columns
_PAIR: Final = "run, region, peer"
_OUT: Final = f'{REGION},direction="out"'


@dataclass(frozen=True, slots=True)
class PanelSpec:
    """A panel of curves.

    Attributes:
        title: title of the panel.
        queries: queries of the curves, each with its legend.
        unit: unit in Grafana's notation.
        description: meaning of the panel.
    """

    title: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    description: str = ""


_EACH: Final = "{{region}}"
_LINK: Final = "{{region}} to {{peer}}"

TRAINING: Final = (
    PanelSpec("Training loss", ((gauge("geo_ray_loss_value"), _EACH),)),
    PanelSpec(
        "Evaluation",
        ((gauge("geo_ray_eval_value", RUN, "run, region, metric"), "{{metric}} of {{region}}"),),
        description="`all` is the combination of all regions.",
    ),
    PanelSpec("Step", ((gauge("geo_ray_step_index"), _EACH),)),
    PanelSpec("Samples per second", ((gauge("geo_ray_samples_per_second"), _EACH),)),
    PanelSpec(
        "Samples per second, by counter",
        ((per_second("geo_ray_samples_count"), _EACH),),
        description="Samples repeated after a resume count again.",
    ),
    PanelSpec("Fraction of time spent waiting", ((wait_fraction(), _EACH),), "percentunit"),
    PanelSpec(
        "Faults in 15 minutes",
        (
            (grown("geo_ray_workers_lost_count", "15m", REGION), "{{region}}: workers lost"),
            (grown("geo_ray_workers_replaced_count", "15m", REGION), "{{region}}: replaced"),
            (grown("geo_ray_steps_refused_count", "15m", REGION), "{{region}}: steps refused"),
        ),
    ),
    PanelSpec(
        "Newest checkpoint",
        ((gauge("geo_ray_checkpoint_step_index", RUN, "run"), "step"),),
        description="A flat line means that no checkpoint was saved.",
    ),
)
EXCHANGES: Final = (
    PanelSpec("Between regions, by link", ((per_second("geo_ray_wan_bytes", _OUT, _PAIR), _LINK),),
              "Bps"),
    PanelSpec(
        "Between regions, by class",
        ((per_second("geo_ray_wan_bytes", _OUT, "run, traffic_class"), "{{traffic_class}}"),),
        "Bps",
    ),
    PanelSpec(
        "Between regions, in an hour",
        ((grown("geo_ray_wan_bytes", "1h", _OUT, _PAIR), _LINK),),
        "bytes",
    ),
    PanelSpec("Exchanges per second", ((per_second("geo_ray_exchanges_count"), _EACH),)),
    PanelSpec("Round", ((gauge("geo_ray_round_index"), _EACH),)),
    PanelSpec(
        "Staleness", ((gauge("geo_ray_staleness_updates"), _EACH),), description="In updates."
    ),
    PanelSpec("Size of the newest checkpoint",
              ((gauge("geo_ray_checkpoint_bytes", RUN, "run"), "size"),), "bytes"),
)  # fmt: skip


def dashboards() -> dict[str, dict[str, Any]]:
    """Give the dashboards by the names of their files."""
    return {
        "geo_ray_training.json": _dashboard("geo-ray-training", "geo_ray: training", TRAINING),
        "geo_ray_exchanges.json": _dashboard("geo-ray-exchanges", "geo_ray: exchanges", EXCHANGES),
    }


def _dashboard(uid: str, title: str, panels: tuple[PanelSpec, ...]) -> dict[str, Any]:
    return {
        "uid": uid,
        "title": title,
        "tags": ["geo_ray"],
        "timezone": "browser",
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": _variables()},
        "panels": [_panel(number, panel) for number, panel in enumerate(panels)],
    }


def _variables() -> list[dict[str, Any]]:
    steps = scraped("geo_ray_step_index")
    asked = {
        "run": f"label_values({steps}, run)",
        "region": f'label_values({steps}{{run=~"$run"}}, region)',
    }
    found: list[dict[str, Any]] = [
        {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "source"}
    ]
    for name, query in asked.items():
        found.append(
            {
                "name": name,
                "type": "query",
                "label": name,
                "datasource": _SOURCE,
                "query": {"query": query, "refId": name},
                "definition": query,
                "refresh": 2,
                "multi": True,
                "includeAll": True,
                "current": {"text": "All", "value": "$__all"},
                "sort": 1,
            }
        )
    return found


def _panel(number: int, panel: PanelSpec) -> dict[str, Any]:
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": _SOURCE,
        "gridPos": {
            "x": _WIDE * (number % 2),
            "y": _HIGH * (number // 2),
            "w": _WIDE,
            "h": _HIGH,
        },
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}},
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": _SOURCE,
                "expr": query,
                "legendFormat": legend,
            }
            for index, (query, legend) in enumerate(panel.queries)
        ],
    }


ALERTS_FILE: Final = "geo_ray_alerts.yaml"


def write_dashboards(folder: Path) -> list[Path]:
    """Write the files atomically; return their paths.

    Raises:
        RunDirectoryError: a file cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(folder, error) from error
    texts = {name: json.dumps(value, indent=2) + "\n" for name, value in dashboards().items()}
    texts[ALERTS_FILE] = yaml.safe_dump(alert_rules(), sort_keys=False, width=100)
    return [save_text(folder / name, text) for name, text in texts.items()]
