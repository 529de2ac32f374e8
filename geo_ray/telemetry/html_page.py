"""Self-contained HTML pages: style, sections and tables, and the page that plots plans.

Nothing in a page is fetched or executed, whatever text it contains. Colours are those of Okabe
and Ito, which colour-blind readers can distinguish.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

import numpy as np

from geo_ray.base.files import save_text
from geo_ray.base.text import duration_text
from geo_ray.telemetry.charts import ALL, Curve, curves_chart

STYLE = """
:root { color-scheme: light dark;
  --back: #fafafa; --card: #fff; --ink: #1b1f24; --soft: #5c6670; --rule: #e1e4e8;
  --c0: #0072b2; --c1: #d55e00; --c2: #009e73; --c3: #cc79a7; --c4: #56a4d9; --c5: #c98a00;
  --c6: #6b6b6b; --none: #eef0f2; --warn: #fff1d6; --warn-ink: #6b4700; }
@media (prefers-color-scheme: dark) { :root {
  --back: #14171a; --card: #1c2025; --ink: #e4e7ea; --soft: #9aa5b0; --rule: #30363d;
  --c0: #4aa8e0; --c1: #f08040; --c2: #2fc79a; --c3: #e39cc6; --c4: #8fcdf5; --c5: #edb832;
  --c6: #b0b0b0; --none: #282d33; --warn: #443413; --warn-ink: #ffdd9b; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 24px 20px 60px; max-width: 1240px; background: var(--back);
  color: var(--ink); font: 14px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 24px; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 34px 0 10px; }
p.sub { color: var(--soft); margin: 2px 0 16px; overflow-wrap: anywhere; }
p.note { color: var(--soft); margin: -4px 0 10px; }
p.none { color: var(--soft); font-style: italic; margin: 8px 0; }
p.warn { background: var(--warn); color: var(--warn-ink); padding: 8px 12px; border-radius: 6px; }
.tag { font-size: 12px; font-weight: 600; padding: 2px 8px; border-radius: 10px; color: var(--card);
  background: var(--c0); vertical-align: middle; margin-left: 8px; white-space: nowrap; }
.tag.cut { background: var(--c1); } .tag.done { background: var(--c2); }
.ended { background: var(--warn); color: var(--warn-ink); border-left: 4px solid var(--c1);
  border-radius: 6px; padding: 4px 16px 10px; margin: 12px 0 16px; overflow-wrap: anywhere; }
.ended.going { border-color: var(--c0); padding-bottom: 4px; } .ended p { margin: 8px 0; }
.ended p.cause { font-weight: 600; }
.ended dl { display: grid; grid-template-columns: max-content 1fr; gap: 3px 18px; }
.ended dt { opacity: 0.8; } .ended dd { margin: 0; }
.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(150px, 1fr)); gap: 10px; }
.facts div { background: var(--card); border: 1px solid var(--rule); border-radius: 6px;
  padding: 8px 12px; overflow-wrap: anywhere; }
.facts dt { color: var(--soft); font-size: 12px; } .facts dd { margin: 0; font-size: 17px; }
dl { margin: 0; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr));
  gap: 14px; align-items: start; }
figure { margin: 0 0 14px; background: var(--card); border: 1px solid var(--rule);
  border-radius: 6px; padding: 12px 14px; min-width: 0; }
.charts figure { margin: 0; }
figcaption { font-weight: 600; margin-bottom: 4px; }
svg.plot { display: block; overflow: visible; margin-top: 10px; margin-bottom: 42px; }
svg.whole { overflow: visible; } svg.cut { overflow: hidden; }
svg text { fill: var(--soft); font-size: 12px; } svg text.label { fill: var(--ink); }
ul.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 2px 16px; margin: 0 0 6px;
  padding: 0; color: var(--soft); font-size: 13px; max-height: 104px; overflow-y: auto; }
ul.legend svg { margin-right: 6px; vertical-align: middle; }
polyline, svg line[class^="l"] { fill: none; stroke-width: 1.8; stroke-linejoin: round;
  vector-effect: non-scaling-stroke; }
.many polyline:not(.l-all) { stroke-width: 1; opacity: 0.5; }
.many polyline, .many svg line { stroke-dasharray: none; }
.many polyline:not(.l-all):hover { stroke-width: 3; opacity: 1; }
.faint { stroke-width: 1; opacity: 0.28; }
.mark { stroke: var(--ink); stroke-dasharray: 4 3; opacity: 0.6; }
.grid { stroke: var(--rule); } .axis { stroke: var(--soft); }
.l0 { stroke: var(--c0); } .l1 { stroke: var(--c1); } .l2 { stroke: var(--c2); }
.l3 { stroke: var(--c3); } .l4 { stroke: var(--c4); } .l5 { stroke: var(--c5); }
.l6 { stroke: var(--c6); }
.b0 { fill: var(--c0); } .b1 { fill: var(--c1); } .b2 { fill: var(--c2); } .b3 { fill: var(--c3); }
.b4 { fill: var(--c4); } .b5 { fill: var(--c5); } .b6 { fill: var(--c6); }
.views > .over { color: var(--soft); } .views > input { margin: 0 4px 0 14px; }
.views > label { cursor: pointer; } .views > input:checked + label { font-weight: 600; }
.views { margin-top: 34px; } .views > section > h2 { margin-top: 16px; } .view { display: none; }
.x-time:checked ~ section .view.x-time, .x-steps:checked ~ section .view.x-steps,
.x-samples:checked ~ section .view.x-samples, .x-wan:checked ~ section .view.x-wan
  { display: block; min-width: 0; }
.l-all { stroke: var(--ink); stroke-width: 2.6; } .b-all { fill: var(--ink); }
.t-compute { fill: var(--c0); } .t-wait { fill: var(--c5); opacity: 0.75; }
.t-transfer { fill: var(--c2); } .t-none { fill: var(--none); }
.m-member { fill: var(--c2); } .m-lost { fill: var(--c1); } .m-left { fill: var(--none); }
.m-paused { fill: var(--c5); } .m-done { fill: var(--c0); }
.pan { overflow-x: auto; }
svg.map { display: block; width: 100%; min-width: 600px; max-height: 620px; }
svg.map text { font-size: 15px; }
svg.map path, ul.legend path { fill: none; stroke-linecap: round; }
svg.map g:hover path { stroke: var(--ink); } svg.map text.k { font-size: 12px;
  paint-order: stroke; stroke: var(--card); stroke-width: 4px; }
.k-idle { stroke: var(--rule); } .k-load { stroke: var(--c4); opacity: 0.75; }
.k-full { stroke: var(--c1); } .node { stroke: var(--card); stroke-width: 2; }
.leader { fill: none; stroke: var(--ink); stroke-width: 2; }
.scroll { overflow-x: auto; background: var(--card); border: 1px solid var(--rule);
  border-radius: 6px; width: fit-content; max-width: 100%; }
.tall { max-height: 640px; overflow-y: auto; }
.tall thead th { position: sticky; top: 0; z-index: 1; background: var(--card); }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 6px 16px; border-bottom: 1px solid var(--rule);
  vertical-align: top; }
td:first-child, th:first-child { position: sticky; left: 0; background: var(--card); }
thead th { color: var(--soft); font-weight: 500; font-size: 13px; white-space: nowrap; }
tbody tr:last-child > * { border-bottom: 0; } tbody th { font-weight: 500; }
.n { text-align: right; white-space: nowrap; } .wide th, .wide td { padding: 6px 9px; }
.range { color: var(--soft); font-size: 12px; white-space: normal; }
table.bars th, table.bars td { border: 0; padding: 4px 8px 4px 0; vertical-align: middle; }
table.bars th { white-space: nowrap; } td.bar { width: 75%; } td.bar svg { display: block; }
svg.histogram { display: block; overflow: visible; margin-left: auto; }
svg.histogram text { font-size: 10px; }
details { background: var(--card); border: 1px solid var(--rule); border-radius: 6px;
  padding: 8px 14px; margin-bottom: 10px; }
summary { cursor: pointer; font-weight: 600; }
pre { overflow-x: auto; font: 12.5px/1.45 ui-monospace, Menlo, Consolas, monospace; }
code { font: 12.5px ui-monospace, Menlo, Consolas, monospace; }
@media (max-width: 900px) { th, td { padding: 5px 9px; } body { padding: 16px 12px 40px; }
  thead th { white-space: normal; vertical-align: bottom; } }
@media (max-width: 520px) { svg text.odd { display: none; } }
@media print { details { display: none; } .tall { max-height: none; } }
"""


_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def html_page(title: str, body: str) -> str:
    """Return a complete page.

    Args:
        title: plain text.
        body: HTML.
    """
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)} - geo_ray</title><style>{STYLE}</style></head><body>"
        f"{body}</body></html>\n"
    )


def write_html(page: str, path: Path) -> Path:
    """Write a page atomically; return its path.

    Raises:
        RunDirectoryError: the file cannot be written.
    """
    return save_text(path, page)


TALL_ROWS = 25  # larger tables scroll
WIDE_COLUMNS = 9  # wider tables are denser


def section(title: str, body: str, note: str = "") -> str:
    """Give a heading, a line below it if there is one, and ``body`` (HTML)."""
    note = f'<p class="note">{escape(note)}</p>' if note else ""
    return f"<section><h2>{escape(title)}</h2>{note}{body}</section>"


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Give a table; cells are HTML.

    Args:
        headings: plain text.
        rows: as many cells each.
        left: number of left columns that hold words; the others hold numbers.
    """
    head = "".join(
        f"<th{'' if index < left else ' class=n'}>{escape(heading)}</th>"
        for index, heading in enumerate(headings)
    )
    body = "".join(
        "<tr>"
        + "".join(
            f"<td{'' if index < left else ' class=n'}>{cell}</td>" for index, cell in enumerate(row)
        )
        + "</tr>"
        for row in rows
    )
    kind = "scroll tall" if len(rows) > TALL_ROWS else "scroll"
    if len(headings) > WIDE_COLUMNS:
        kind += " wide"
    return (
        f'<div class="{kind}"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
        "</div>"
    )


def empty_note(text: str) -> str:
    """Give a note in place of missing content."""
    return f'<p class="none">{escape(text)}</p>'


def write_plan_page(
    name: str,
    points: Sequence[tuple[float, float, str, str]],
    chosen: tuple[float, float],
    path: Path,
) -> Path:
    """Write a self-contained HTML page of plans.

    Args:
        name: name of the job.
        points: seconds, cost, machines and reason of each plan, from fast to cheap.
        chosen: seconds and cost of the chosen plan.
        path: output file.

    Raises:
        RunDirectoryError: the file cannot be written.
    """
    seconds = np.array([point[0] for point in points])
    dollars = np.array([point[1] for point in points])
    front = Curve("Pareto front", seconds, dollars, 0)
    mark = Curve("chosen", np.array([chosen[0]] * 2), np.array([0.0, chosen[1]]), ALL)
    chart = curves_chart("Time and cost", [front, mark], x_label="time", x_time=True, zero=True)
    rows = [
        [duration_text(seconds), f"{usd:.2f}", escape(machines), escape(reason)]
        for seconds, usd, machines, reason in points
    ]
    title = f"Plans for {name}"
    body = (
        f"<header><h1>{escape(title)}</h1></header>"
        + section(
            "Time against USD",
            chart,
            "Each corner is a plan; the vertical line marks the chosen one.",
        )
        + section("Plans", table(("time", "USD", "machines", "why"), rows, left=0))
    )
    return write_html(html_page(title, body), path)
