"""Events for the tests of observe: a small run of two regions, as a list of (kind, t_s, fields)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from geo_ray.telemetry.event_log import EventLog
from geo_ray.telemetry.events import Event, conform

REGIONS = ["east", "west"]
Row = tuple[str, float, dict[str, Any]]


def started(**changes: Any) -> Row:
    fields: dict[str, Any] = {
        "run": "trial",
        "digest": "c0ffee",
        "strategy": "diloco",
        "regions": REGIONS,
        "task": "digits",
        "seed": 7,
        "simulated": False,
    }
    return ("run_started", 0.0, fields | changes)


def step(region: str, number: int, t_s: float, **changes: Any) -> Row:
    fields = {
        "region": region,
        "step": number,
        "samples": 32,
        "loss": 2.0 / number,
        "compute_s": 0.5,
        "wait_s": 0.25,
        "start_s": t_s - 0.5,
    }
    return ("step", t_s, fields | changes)


def exchange(region: str, seq: int, t_s: float, **changes: Any) -> Row:
    fields = {
        "region": region,
        "seq": seq,
        "start_s": t_s - 0.25,
        "bytes_sent": 1000,
        "bytes_received": 1200,
        "blocking": True,
        "staleness": 0,
        "round": seq,
    }
    return ("exchange", t_s, fields | changes)


def noise(region: str | None, step: int, grad_sq: float, trace: float, rows: int) -> Row:
    fields = {"region": region, "step": step, "grad_sq": grad_sq, "trace": trace, "rows": rows}
    return ("noise", float(step), fields | {"workers": 2, "count": 1})


def evaluation(at_step: int, t_s: float, region: str | None = None, **metrics: float) -> Row:
    return (
        "eval",
        t_s,
        {"step": at_step, "region": region, "metrics": metrics, "samples": 90},
    )


def wan(src: str, dst: str, t_s: float, **bytes_by_class: int) -> Row:
    return ("wan", t_s, {"src": src, "dst": dst, "bytes_by_class": bytes_by_class})


def small_run(steps: int = 4) -> list[Row]:
    rows = [started()]
    for number in range(1, steps + 1):
        rows += [step(region, number, float(number)) for region in REGIONS]
        if number % 2 == 0:
            now_s = number + 0.5
            rows += [exchange(region, number // 2, now_s) for region in REGIONS]
            rows.append(wan("west", "east", now_s, update=500 * number, control=10))
            rows.append(wan("east", "west", now_s, reply=500 * number))
            rows.append(evaluation(number, now_s, accuracy=number / 10, loss=2.0 / number))
            rows.append(evaluation(number, now_s, "east", accuracy=number / 10))
    return rows


def events(rows: Iterable[Row]) -> list[Event]:
    return [conform(kind, t_s, fields) for kind, t_s, fields in rows]


def write(path: Path, rows: Iterable[Row]) -> Path:
    with EventLog(path) as log:
        for kind, t_s, fields in rows:
            log.write(kind, t_s, **fields)
    return path
