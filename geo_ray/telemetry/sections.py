"""Sections of report and live page: regions, traffic, exchanges, incidents, machines, cost."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from operator import itemgetter
from typing import Final

import numpy as np

from geo_ray.base.errors import InterruptedRunError
from geo_ray.base.text import age_text, bytes_text, duration_text, number_text
from geo_ray.telemetry.charts import (
    Curve,
    Floats,
    bars_chart,
    curves_chart,
    histogram,
    last_of_each,
)
from geo_ray.telemetry.columns import RegionRecord, RunRecord
from geo_ray.telemetry.events import Event
from geo_ray.telemetry.html_page import empty_note, section, table
from geo_ray.telemetry.summary import TOTAL, Cost, CostRow, error_text, value_text
from geo_ray.telemetry.throughput import Throughput, memory_text, mfu_text
from geo_ray.telemetry.view import MachinesView

MAX_ROWS = 200  # of a table of single events or links
_MFU_ESTIMATED: Final = (
    "MFU is estimated: 6 operations per parameter and token, 4 for frozen parameters. "
)


def _mfu_note(throughput: Throughput) -> str:
    """Say what MFU relates to."""
    peaks = ", ".join(f"{n} {flops / 1e12:,.0f} TFLOP/s" for n, flops in throughput.peaks().items())
    assumed = f"MFU relates to assumed peaks in 16 bits: {peaks}. Compare them with the data sheet."
    return escape((_MFU_ESTIMATED if throughput.estimated else "") + assumed)


def regions_section(run: RunRecord) -> str:
    """Give a row of totals per region; speeds are means over its compute and waiting."""
    rows = []
    throughput, regions = run.totals.throughput, run.totals.regions
    busy = {name: each.compute_s + each.wait_s for name, each in regions.items()}
    speeds = {n: regions[n].steps.samples / busy_s for n, busy_s in busy.items() if busy_s > 0}
    utilised = {name: throughput.mfu({name: each}) for name, each in speeds.items()}
    has_tokens = throughput.tokens_per_row is not None
    has_mfu = any(each is not None for each in utilised.values())
    has_memory = any(throughput.memory(name) is not None for name in regions)
    for name, region in regions.items():
        busy_s = busy[name]
        tokens_per_s = throughput.tokens_per_s(speeds[name]) if name in speeds else None
        rows.append(
            [
                escape(name),
                f"{region.steps.step:,}",
                f"{region.steps.samples:,}",
                number_text(region.steps.end_loss()),
                duration_text(region.compute_s),
                duration_text(region.wait_s),
                f"{region.wait_s / busy_s:.0%}" if busy_s > 0 else "-",
                *([number_text(tokens_per_s and round(tokens_per_s, 1))] * has_tokens),
                *([mfu_text(utilised.get(name))] * has_mfu),
                *([memory_text(throughput.memory(name))] * has_memory),
                bytes_text(run.totals.wan.bytes_sent(name)),
                bytes_text(run.totals.wan.bytes_received(name)),
                f"{region.fault_count:,}",
            ]
        )
    headings = ["region", "steps", "samples", "loss at the end", "compute", "waiting"]
    headings += ["time waiting", *["tokens/s"] * has_tokens]
    headings += ["MFU"] * has_mfu + ["GPU memory"] * has_memory
    note = _mfu_note(throughput) if has_mfu else ""
    return section("Regions", table([*headings, "WAN sent", "WAN received", "faults"], rows), note)


def wan_section(run: RunRecord) -> str:
    """Draw the bytes between regions: by class, over time, and by link."""
    counted = run.totals.wan.by_class()
    by_class = dict(sorted(counted.items(), key=itemgetter(1), reverse=True))
    if not any(by_class.values()):
        return section("Bytes between regions", empty_note("no traffic recorded"))
    bars = bars_chart("by class", by_class, bytes_text)
    names = list(by_class)
    curves = []
    for name, columns in run.wan.items():
        t_s, total = last_of_each(columns["t_s"], columns["bytes"])
        zero = (np.concatenate([[0.0], t_s]), np.concatenate([[0.0], total]))
        curves.append(Curve(name, *zero, names.index(name)))
    lines = curves_chart(
        "so far", curves, x_label="time", x_time=True, y_text=bytes_text, zero=True
    )
    links = sorted(run.totals.wan.by_link().items(), key=itemgetter(1), reverse=True)
    rows = [[escape(src), escape(dst), bytes_text(n)] for (src, dst), n in links[:MAX_ROWS]]
    note = ""
    if len(links) > MAX_ROWS:
        note = f'<p class="note">The {MAX_ROWS} busiest of {len(links):,} links.</p>'
    body = f'<div class="charts">{bars}{lines}</div><p></p>{note}'
    return section("Bytes between regions", body + table(["from", "to", "bytes"], rows, left=2))


def exchanges_section(run: RunRecord) -> str:
    """Give a row of statistics on exchanges per region."""
    rows = [_exchange_row(name, region) for name, region in run.regions.items() if region.exchanges]
    if not rows:
        return section("Exchanges", empty_note("no exchange completed"))
    headings = ["region", "exchanges", "blocking", "mean time", "95th percentile", "bytes sent"]
    headings += ["bytes received", "mean staleness", "staleness histogram"]
    note = "Time and bytes are per exchange, from sending an update to merging its answer."
    return section("Exchanges", table(headings, rows), note)


def _exchange_row(name: str, region: RegionRecord) -> list[str]:
    columns = region.exchanges
    took_s = _finite(columns["t_s"] - columns["start_s"])
    stale = _finite(columns["staleness"])
    return [
        escape(name),
        f"{len(columns):,}",
        f"{np.mean(columns['blocking']):.0%}",
        duration_text(float(np.mean(took_s)) if len(took_s) else None),
        duration_text(float(np.percentile(took_s, 95)) if len(took_s) else None),
        bytes_text(float(np.mean(columns["bytes_sent"]))),
        bytes_text(float(np.mean(columns["bytes_received"]))),
        number_text(round(float(np.mean(stale)), 2) if len(stale) else None),
        histogram(stale),
    ]


def _finite(values: Floats) -> Floats:
    return values[np.isfinite(values)]


def incidents_section(run: RunRecord) -> str:
    """List faults and checkpoints."""
    faults = [
        [
            duration_text(event.t_s),
            escape(_incident(event)),
            escape(str(event.fields.get("region", ""))),
            escape(_details(event)),
        ]
        for event in run.incidents
    ]
    saved = [
        [
            duration_text(event.t_s),
            escape(str(event["id"])),
            f"{event['step']:,}",
            bytes_text(event["bytes"]),
        ]
        for event in run.checkpoints
    ]
    body = _listed("Faults and repairs", ["time", "what", "region", "details"], faults, left=4)
    body += _listed("Checkpoints", ["time", "id", "step", "size"], saved, left=2)
    return body


def _listed(title: str, headings: Sequence[str], rows: list[list[str]], left: int) -> str:
    if not rows:
        return section(title, empty_note("none"))
    note = f"The last {MAX_ROWS} of {len(rows):,}." if len(rows) > MAX_ROWS else ""
    return section(title, table(headings, rows[-MAX_ROWS:], left), note)


def _incident(event: Event) -> str:
    if event.kind == "run_failed" and event["code"] == InterruptedRunError.code:
        return "stopped on request"
    return "resumed" if event.kind == "run_started" else event.kind.replace("_", " ")


def _details(event: Event) -> str:
    if event.kind == "run_failed":
        return f"{event['code']}: {event['message']}"
    names = ("worker", "step", "attempt", "cause")
    return ", ".join(f"{name} {event[name]}" for name in names if name in event.fields)


_MOST_ROWS: Final = 200


def machines_section(view: MachinesView | None) -> str:
    """Give the table; empty if no machines are known."""
    if view is None or not view.rows:
        return ""
    rows = [
        [
            escape(row.region),
            escape(row.machine),
            escape(row.type),
            escape(row.state),
            "-" if row.usd_per_hour is None else number_text(row.usd_per_hour),
            "-" if row.age_s is None else age_text(row.age_s),
            escape(row.note),
        ]
        for row in view.rows[:_MOST_ROWS]
    ]
    note = machines_note(view)
    if len(view.rows) > _MOST_ROWS:
        note += f" The first {_MOST_ROWS} of {len(view.rows):,}."
    headings = ["region", "machine", "type", "state", "USD/h", "age", "note"]
    return section("Machines", table(headings, rows, left=4), note)


def machines_note(view: MachinesView) -> str:
    """Give the source of the table and the total cost."""
    each = f"{number_text(view.usd_per_hour)} USD/h in total"
    if view.source == "plan":
        return f"According to the plan: {each}."
    paid = "" if view.paid_usd is None else f", {number_text(view.paid_usd)} USD paid so far"
    return f"According to the autoscaler's journal: {each}{paid}."


def cost_section(cost: Cost | None) -> str:
    """Give a row per term of time and cost; empty for a run without a plan."""
    if cost is None:
        return ""
    headings = ["term", "estimated", "actual", "difference"]
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in cost.notes)
    return section("Plan and run", table(headings, [_cells(row) for row in cost.rows]) + notes)


def _cells(row: CostRow) -> list[str]:
    what = "time" if row.unit == "s" else "cost"
    return [
        escape(f"total {what}" if row.term == TOTAL else f"{what}: {row.term}"),
        escape(value_text(row.estimated, row.unit)),
        escape("unknown" if row.actual is None else value_text(row.actual, row.unit)),
        escape(error_text(row)),
    ]
