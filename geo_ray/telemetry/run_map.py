"""The map of a run: its regions on a ring, and the links between them with their load.

`map_of_record` gives the map of a finished run: its regions at the end, and the mean load of its
links.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from html import escape
from operator import attrgetter
from typing import Final

from geo_ray.base.text import bytes_text, number_text
from geo_ray.telemetry.charts import figure
from geo_ray.telemetry.columns import RunRecord
from geo_ray.telemetry.html_page import empty_note
from geo_ray.telemetry.participation import participation_of
from geo_ray.telemetry.view import MapLink, MapRegion, MapView

MOST_LINKS: Final = 400
_WIDTH: Final = 1000
_NAMED: Final = 40  # above this number, names of regions are shown only under the pointer
_WRITTEN: Final = 10  # above this number, loads of links are shown only under the pointer
_FEW: Final = 60  # above this number, links are drawn thin
_BUSY: Final = 0.8  # fraction of a link's capacity
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
    ("m-member", "computing, member"),
    ("m-paused", "waiting, starting"),
    ("m-done", "done"),
    ("m-lost", "lost"),
    ("m-left", "left, stopped"),
)

Place = tuple[float, float]


def places_of(view: MapView) -> dict[str, Place]:
    """Give the position of each region: evenly on a ring, the first one on the left.

    A region to which most others send, such as the averager's, is in the middle.
    """
    names = [region.name for region in view.regions]
    middle = (_WIDTH / 2, _height(len(names)) / 2)
    center = _center(view)
    ring = [name for name in names if name != center]
    ring_x, ring_y = middle[0] - 150, middle[1] - 56
    places = {} if center is None else {center: middle}
    for number, name in enumerate(ring):
        angle = math.pi + 2 * math.pi * number / len(ring)
        x, y = middle[0] + ring_x * math.cos(angle), middle[1] + ring_y * math.sin(angle)
        places[name] = (round(x, 1), round(y, 1))
    return places


def _center(view: MapView) -> str | None:
    """Return the region with links to most others, if links are sparse."""
    count = len(view.regions)
    if count == 1:
        return view.regions[0].name
    links = {frozenset((link.src, link.dst)) for link in view.links}
    if count < 4 or len(links) > 1.5 * count:
        return None
    degrees = Counter(name for link in links for name in link)
    leader = next((region.name for region in view.regions if region.is_leader), None)
    if not degrees:
        return leader
    names = {region.name for region in view.regions}
    center, degree = max(degrees.items(), key=lambda item: (item[1], item[0] == leader, item[0]))
    return center if degree > count / 2 and center in names else None


def map_figure(view: MapView, *, now: bool) -> str:
    """Draw the map.

    Args:
        view: regions and links.
        now: whether loads are current; otherwise they are means of the run.
    """
    if not view.regions:
        return figure("regions and links", "", empty_note("no regions are known yet"))
    places = places_of(view)
    most = max((link.mbps for link in view.links), default=0.0)
    links = [link for link in view.links[:MOST_LINKS] if {link.src, link.dst} <= places.keys()]
    written = len(links) <= _WRITTEN
    named = len(view.regions) <= _NAMED
    wide = 5.0 if len(links) <= _FEW else 2.0
    scale = wide / most if most > 0 else 0.0
    drawn = "".join(_link(link, places, scale, written=written) for link in reversed(links))
    drawn += "".join(_region(each, places[each.name], named=named) for each in view.regions)
    rest = ""
    if len(view.links) > len(links):
        rest = f" (the {len(links)} busiest of {len(view.links):,} links)"
    height = _height(len(view.regions))
    load = "now" if now else "averaged over the run"
    svg = (
        f'<div class="pan"><svg class="map" viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'aria-label="regions and links">{drawn}</svg></div>'
    )
    title = f"regions and links, load {load}{rest}"
    return figure(title, _legend(view), svg)


def _height(count: int) -> int:
    return 300 if count <= 2 else 460 if count <= _NAMED else 620


def _link(link: MapLink, places: Mapping[str, Place], scale: float, *, written: bool) -> str:
    """Draw a link as an arc to the right of its direction; its width shows its load."""
    (x1, y1), (x2, y2) = places[link.src], places[link.dst]
    length = math.hypot(x2 - x1, y2 - y1) or 1.0
    bow = min(46.0, 10 + 0.09 * length)
    across_x, across_y = -(y2 - y1) / length, (x2 - x1) / length
    middle_x, middle_y = (x1 + x2) / 2 + bow * across_x, (y1 + y2) / 2 + bow * across_y
    width = 1.0 + scale * link.mbps
    kind = "k-idle" if link.mbps <= 0 else "k-load"
    if link.fraction is not None and link.fraction >= _BUSY:
        kind = "k-full"
    load = f"{number_text(round(link.mbps, 2))} Mb/s"
    limit = "" if link.limit_mbps is None else f" of {number_text(link.limit_mbps)}"
    title = f"{link.src} to {link.dst}: {load}{limit}, {bytes_text(link.bytes)} so far"
    text = ""
    if written and link.mbps > 0:
        x, y = (x1 + x2) / 2 + 0.85 * bow * across_x, (y1 + y2) / 2 + 0.85 * bow * across_y
        text = f'<text class="k" x="{x:.1f}" y="{y + 4:.1f}" text-anchor="middle">{load}</text>'
    return (
        f'<g><title>{escape(title)}</title><path class="{kind}" stroke-width="{width:.1f}" '
        f'd="M{x1:.1f} {y1:.1f}Q{middle_x + bow * across_x / 2:.1f} '
        f'{middle_y + bow * across_y / 2:.1f} {x2:.1f} {y2:.1f}"/>{text}</g>'
    )


def _region(region: MapRegion, place: Place, *, named: bool) -> str:
    x, y = place
    size = 13 if named else 6
    kind = _STATES.get(region.state, "m-left")
    leader = ", averager" if region.is_leader else ""
    more = f", {region.detail}" if region.detail else ""
    title = f"{region.name}: {region.state}{leader}{more}"
    ring = f'<circle class="leader" cx="{x}" cy="{y}" r="{size + 5}"/>' if region.is_leader else ""
    text = ""
    if named or region.is_leader:
        # Outside the ring, away from the links; above and below it in the middle.
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
        f'<g><title>{escape(title)}</title>{ring}<circle class="{kind} node" cx="{x}" cy="{y}" '
        f'r="{size}"/>{text}</g>'
    )


def _legend(view: MapView) -> str:
    present = {_STATES.get(region.state, "m-left") for region in view.regions}
    swatch = '<svg width="14" height="12"><circle class="{}" cx="7" cy="6" r="5"/></svg>'
    items = [f"<li>{swatch.format(kind)}{text}</li>" for kind, text in _LEGEND if kind in present]
    if any(region.is_leader for region in view.regions):
        ring = '<svg width="16" height="14"><circle class="leader" cx="8" cy="7" r="6"/></svg>'
        items.append(f"<li>{ring}averager</li>")
    if any(link.fraction is not None and link.fraction >= _BUSY for link in view.links):
        line = (
            '<svg width="22" height="8"><path class="k-full" stroke-width="4" d="M0 4H22"/></svg>'
        )
        items.append(f"<li>{line}nearly full link</li>")
    return f'<ul class="legend">{"".join(items)}</ul>'


def map_of_record(run: RunRecord) -> MapView:
    """Create the map of a run's regions and links."""
    totals = run.totals
    ranges = participation_of(run.changes).until(totals.elapsed_s)
    leader = None if totals.started is None else totals.started.fields.get("averager")
    for event in run.changes:
        if event.kind == "averager_moved":
            leader = event["region"]
    regions = [
        MapRegion(
            name,
            ranges[name][-1].state if ranges.get(name) else "member",
            name == leader and len(totals.regions) > 1,
            f"{region.steps.step:,} steps, loss {number_text(region.steps.end_loss())}",
        )
        for name, region in totals.regions.items()
    ]
    seconds = totals.elapsed_s
    links = [
        MapLink(src, dst, 8e-6 * count / seconds if seconds > 0 else 0.0, count)
        for (src, dst), count in totals.wan.by_link().items()
        if count
    ]
    links.sort(key=attrgetter("bytes"), reverse=True)
    return MapView(tuple(regions), tuple(links))
