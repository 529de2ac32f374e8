"""Alerts for Prometheus: what one should be woken for, with what to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

from geo_ray.observe.dashboards.queries import grown, per_second, scraped

_STEP: Final = scraped("geo_ray_step_index")
_SAVED: Final = scraped("geo_ray_checkpoint_step_index")
_LOSS: Final = scraped("geo_ray_loss_value")
_STALE: Final = scraped("geo_ray_staleness_updates")


@dataclass(frozen=True, slots=True)
class AlertSpec:
    """One rule.

    Attributes:
        name: of the alert.
        query: true where it is to fire.
        lasts: for how long that must be so, in Prometheus's words.
        severity: ``critical`` wakes people.
        told: what is the matter, with the labels of what fires.
        advice: what to do.
    """

    name: str
    query: str
    lasts: str
    severity: Literal["critical", "warning"]
    told: str
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
        "Run {{ $labels.run }} has taken no step for a quarter of an hour.",
        "`geo-ray status RUN` says whether its driver lives and whom it waits for.",
    ),
    AlertSpec(
        "GeoRayRegionStands",
        f"(max by (run, region) (changes({_STEP}[10m])) == 0) "
        f"and on (run) (max by (run) (changes({_STEP}[10m])) > 0)",
        "5m",
        "warning",
        "Region {{ $labels.region }} of {{ $labels.run }} stands still while others train.",
        "`geo-ray watch RUN` shows whether it is lost, waits for its link or has left.",
    ),
    AlertSpec(
        "GeoRayWorkersLost",
        f"{grown('geo_ray_workers_lost_count', '30m')} > 2",
        "0m",
        "warning",
        "Region {{ $labels.region }} of {{ $labels.run }} has lost {{ $value }} workers.",
        "The causes are in the run's events; memory that runs out is the usual one.",
    ),
    AlertSpec(
        "GeoRayWorkersMissing",
        f"{grown('geo_ray_workers_lost_count', '1h')} "
        f"- {grown('geo_ray_workers_replaced_count', '1h')} > 0",
        "15m",
        "critical",
        "Region {{ $labels.region }} of {{ $labels.run }} lacks workers that nobody replaces.",
        "It wants machines: look at its nodes, or at the autoscaler.",
    ),
    AlertSpec(
        "GeoRayStepsRefused",
        f"{grown('geo_ray_steps_refused_count', '10m')} > 0",
        "0m",
        "warning",
        "Steps of region {{ $labels.region }} of {{ $labels.run }} were not finite.",
        "Lower the rate of learning, or look for broken rows in its data.",
    ),
    AlertSpec(
        "GeoRayLossRises",
        f"avg by (run, region) (avg_over_time({_LOSS}[10m])) "
        f"> 1.5 * avg by (run, region) (avg_over_time({_LOSS}[10m] offset 1h))",
        "10m",
        "warning",
        "The loss of region {{ $labels.region }} of {{ $labels.run }} is far above an hour ago.",
        "`geo-ray train --resume RUN` goes on from the newest healthy checkpoint.",
    ),
    AlertSpec(
        "GeoRayMostlyWaiting",
        _busy(),
        "15m",
        "warning",
        "Region {{ $labels.region }} of {{ $labels.run }} waits for most of its time.",
        "A longer interval, a codec or a strategy that does not wait: `geo-ray plan`, `compare`.",
    ),
    AlertSpec(
        "GeoRayStale",
        f"min by (run, region) (min_over_time({_STALE}[10m])) > 20",
        "5m",
        "warning",
        "Updates of region {{ $labels.region }} of {{ $labels.run }} are more than 20 behind.",
        "Its link or its machines are slower than the others': see docs/strategies.md.",
    ),
    AlertSpec(
        "GeoRayNotSaved",
        f"(max by (run) (changes({_SAVED}[1h])) == 0) "
        f"and on (run) (max by (run) (changes({_STEP}[1h])) > 0)",
        "10m",
        "critical",
        "Run {{ $labels.run }} trains, and has saved nothing for an hour.",
        "`geo-ray status RUN`; what it says of checkpoints that failed.",
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
                        "annotations": {"summary": each.told, "description": each.advice},
                    }
                    for each in ALERTS
                ],
            }
        ]
    }
