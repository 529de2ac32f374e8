"""The map of a run that is over: who was there at its end, and what links carried in the mean."""

from __future__ import annotations

from geo_ray.observe.events.columns import RunRecord
from geo_ray.observe.picture.view import MapLink, MapRegion, MapView
from geo_ray.observe.report.presence import presence_of
from geo_ray.observe.text import number_text


def map_of_record(run: RunRecord) -> MapView:
    """Put regions and links of a run on a map."""
    totals = run.totals
    bands = presence_of(run.changes).until(totals.elapsed_s)
    home = None if totals.started is None else totals.started.fields.get("averager")
    for event in run.changes:
        if event.kind == "hub_moved":
            home = event["region"]
    regions = [
        MapRegion(
            name,
            bands[name][-1].state if bands.get(name) else "member",
            name == home and len(totals.regions) > 1,
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
    links.sort(key=lambda link: -link.bytes)
    return MapView(tuple(regions), tuple(links))
