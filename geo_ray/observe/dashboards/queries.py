"""Metrics as Prometheus scrapes them from Ray, and queries of them."""

from __future__ import annotations

from typing import Final

from geo_ray.observe.metrics.metrics import METRICS

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


def wait_share(select: str = REGION, over: str = "2m") -> str:
    """Query the part of its time that a region waits."""
    wait = per_second("geo_ray_wait_seconds", select, over=over)
    compute = per_second("geo_ray_compute_seconds", select, over=over)
    return f"{wait} / ({wait} + {compute})"
