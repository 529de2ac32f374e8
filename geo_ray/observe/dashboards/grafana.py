"""Dashboards for Grafana, as the values of their JSON files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from geo_ray.observe.dashboards.queries import (
    REGION,
    RUN,
    gauge,
    grown,
    per_second,
    scraped,
    wait_share,
)

_SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
_WIDE, _HIGH = 12, 8  # of a panel, in Grafana's grid of 24 columns
_PAIR: Final = "run, region, peer"
_OUT: Final = f'{REGION},direction="out"'


@dataclass(frozen=True, slots=True)
class PanelSpec:
    """A panel of curves.

    Attributes:
        title: above it.
        queries: what is drawn, each with the legend of its curves.
        unit: as Grafana calls it.
        told: what one sees there.
    """

    title: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    told: str = ""


_EACH: Final = "{{region}}"
_LINK: Final = "{{region}} to {{peer}}"

TRAINING: Final = (
    PanelSpec("Training loss", ((gauge("geo_ray_loss_value"), _EACH),)),
    PanelSpec(
        "Evaluation",
        ((gauge("geo_ray_eval_value", RUN, "run, region, metric"), "{{metric}} of {{region}}"),),
        told="`all` is all regions together.",
    ),
    PanelSpec("Step", ((gauge("geo_ray_step_index"), _EACH),)),
    PanelSpec("Samples per second", ((gauge("geo_ray_samples_per_second"), _EACH),)),
    PanelSpec(
        "Samples per second, counted",
        ((per_second("geo_ray_samples_count"), _EACH),),
        told="Those repeated after a resumption count again.",
    ),
    PanelSpec("Share of the time spent waiting", ((wait_share(), _EACH),), "percentunit"),
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
        told="A line that does not rise: nothing has been saved.",
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
    PanelSpec("Staleness", ((gauge("geo_ray_staleness_updates"), _EACH),), told="In updates."),
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
        "description": panel.told,
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
