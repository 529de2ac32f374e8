"""The map of a run: its regions on a ring, and the links between them with their load."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Final

from geo_ray.observe.picture.view import MapLink, MapRegion, MapView
from geo_ray.observe.report.charts import figure
from geo_ray.observe.report.sections import none
from geo_ray.observe.text import bytes_text, number_text

MOST_LINKS: Final = 400
_WIDTH: Final = 1000
_NAMED: Final = 40  # more regions than this have their names under the pointer only
_WRITTEN: Final = 10  # more links than this have their load under the pointer only
_BUSY: Final = 0.8  # share of what a link can carry
_STATES: Final = {
    "computing": "m-member",
    "member": "m-member",
    "done": "m-done",
    "waiting": "m-paused",
    "starting": "m-paused",
    "lost": "m-lost",
    "left": "m-left",
    "stopped": "m-left",
}
_LEGEND: Final = (
    ("m-member", "computing"),
    ("m-paused", "waiting, starting"),
    ("m-done", "done"),
    ("m-lost", "lost"),
    ("m-left", "left, stopped"),
)

Place = tuple[float, float]


def places_of(regions: Sequence[MapRegion]) -> dict[str, Place]:
    """Give where each region is drawn: evenly on a ring, the first one on its left.

    Two regions lie side by side, one in the middle.
    """
    count = len(regions)
    half_height = _height(count) / 2
    ring_x, ring_y = _WIDTH / 2 - 150, half_height - 56
    if count == 1:
        return {regions[0].name: (_WIDTH / 2, half_height)}
    places = {}
    for number, region in enumerate(regions):
        angle = math.pi + 2 * math.pi * number / count
        x, y = _WIDTH / 2 + ring_x * math.cos(angle), half_height + ring_y * math.sin(angle)
        places[region.name] = (round(x, 1), round(y, 1))
    return places


def map_figure(view: MapView, *, now: bool) -> str:
    """Draw the map.

    Args:
        view: what is on it.
        now: whether loads are those of this moment; else they are means of the run.
    """
    if not view.regions:
        return figure("regions and links", "", none("no region is known yet"))
    places = places_of(view.regions)
    most = max((link.mbps for link in view.links), default=0.0)
    links = [link for link in view.links[:MOST_LINKS] if {link.src, link.dst} <= places.keys()]
    written = len(links) <= _WRITTEN
    named = len(view.regions) <= _NAMED
    drawn = "".join(_link(link, places, most, written=written) for link in reversed(links))
    drawn += "".join(_region(each, places[each.name], named=named) for each in view.regions)
    rest = ""
    if len(view.links) > len(links):
        rest = f" (the {len(links)} busiest of {len(view.links):,} links)"
    height = _height(len(view.regions))
    load = "now" if now else "in the mean of the run"
    svg = (
        f'<svg class="map" viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'aria-label="regions and links">{drawn}</svg>'
    )
    title = f"regions and links, load {load}{rest}"
    return figure(title, _legend(view), svg)


def _height(count: int) -> int:
    return 300 if count <= 2 else 460 if count <= _NAMED else 620


def _link(link: MapLink, places: Mapping[str, Place], most: float, *, written: bool) -> str:
    """A bow to the right of its way, so that both directions are seen."""
    (x1, y1), (x2, y2) = places[link.src], places[link.dst]
    length = math.hypot(x2 - x1, y2 - y1) or 1.0
    bow = min(46.0, 10 + 0.09 * length)
    across_x, across_y = -(y2 - y1) / length, (x2 - x1) / length
    middle_x, middle_y = (x1 + x2) / 2 + bow * across_x, (y1 + y2) / 2 + bow * across_y
    width = 1.0 + 5.0 * (link.mbps / most if most > 0 else 0.0)
    kind = "k-idle" if link.mbps <= 0 else "k-load"
    if link.share is not None and link.share >= _BUSY:
        kind = "k-full"
    load = f"{number_text(round(link.mbps, 2))} Mb/s"
    limit = "" if link.limit_mbps is None else f" of {number_text(link.limit_mbps)}"
    told = f"{link.src} to {link.dst}: {load}{limit}, {bytes_text(link.bytes)} so far"
    text = ""
    if written and link.mbps > 0:
        x, y = (x1 + x2) / 2 + 0.85 * bow * across_x, (y1 + y2) / 2 + 0.85 * bow * across_y
        text = f'<text class="k" x="{x:.1f}" y="{y + 4:.1f}" text-anchor="middle">{load}</text>'
    return (
        f'<g><title>{escape(told)}</title><path class="{kind}" stroke-width="{width:.1f}" '
        f'd="M{x1:.1f} {y1:.1f}Q{middle_x + bow * across_x / 2:.1f} '
        f'{middle_y + bow * across_y / 2:.1f} {x2:.1f} {y2:.1f}"/>{text}</g>'
    )


def _region(region: MapRegion, place: Place, *, named: bool) -> str:
    x, y = place
    size = 13 if named else 6
    kind = _STATES.get(region.state, "m-left")
    home = ", home of the averager" if region.is_home else ""
    more = f", {region.told}" if region.told else ""
    told = f"{region.name}: {region.state}{home}{more}"
    ring = f'<circle class="home" cx="{x}" cy="{y}" r="{size + 5}"/>' if region.is_home else ""
    text = ""
    if named or region.is_home:
        # Beside the ring, away from its links; above and below it in the middle.
        side = (x - _WIDTH / 2) / (_WIDTH / 2)
        anchor = "middle" if abs(side) < 0.15 else "end" if side < 0 else "start"
        shift = 0 if anchor == "middle" else math.copysign(size + 11, side)
        down = 5 if anchor != "middle" else -(size + 12) if y < 240 else size + 24
        short = region.name if len(region.name) <= 16 else region.name[:15] + "…"
        text = (
            f'<text class="label" x="{x + shift:.1f}" y="{y + down:.1f}" '
            f'text-anchor="{anchor}">{escape(short)}</text>'
        )
    return (
        f'<g><title>{escape(told)}</title>{ring}<circle class="{kind} node" cx="{x}" cy="{y}" '
        f'r="{size}"/>{text}</g>'
    )


def _legend(view: MapView) -> str:
    present = {_STATES.get(region.state, "m-left") for region in view.regions}
    swatch = '<svg width="14" height="12"><circle class="{}" cx="7" cy="6" r="5"/></svg>'
    items = [f"<li>{swatch.format(kind)}{text}</li>" for kind, text in _LEGEND if kind in present]
    if any(region.is_home for region in view.regions):
        ring = '<svg width="16" height="14"><circle class="home" cx="8" cy="7" r="6"/></svg>'
        items.append(f"<li>{ring}averager</li>")
    if any(link.share is not None and link.share >= _BUSY for link in view.links):
        line = (
            '<svg width="22" height="8"><path class="k-full" stroke-width="4" d="M0 4H22"/></svg>'
        )
        items.append(f"<li>{line}nearly full link</li>")
    return f'<ul class="legend">{"".join(items)}</ul>'
