"""Tables of `geo-ray lab`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE_HEAD

from geo_ray.lab.lab import Lab
from geo_ray.lab.relay.stats import LabStats
from geo_ray.lab.teardown import is_alive
from geo_ray.lab.topology import CapConfig
from geo_ray.observe.fitted_table import FittedTable


def labs_table(records: Mapping[str, Mapping[str, Any]]) -> FittedTable:
    """All labs of this machine.

    Args:
        records: by lab id.
    """
    table = FittedTable("lab", "topology", "regions", "relay", "up for", box=SIMPLE_HEAD)
    for lab_id, record in records.items():
        alive = is_alive(record.get("relay"))
        minutes = (time.time() - float(record.get("began_unix_s", time.time()))) / 60
        table.add_row(
            lab_id,
            str(record.get("name", "?")),
            str(len(record.get("namespaces", []))),
            "up" if alive else "gone",
            f"{minutes:.0f} min",
        )
    return table


def regions_table(lab: Lab) -> FittedTable:
    """The regions of a lab that is up, as its topology has them."""
    table = FittedTable("region", "address", "IPv6", "TCP", "up", "down", box=SIMPLE_HEAD)
    by_name = {region.name: region for region in lab.topology.regions}
    for name, address in lab.addresses.items():
        region = by_name[name]
        table.add_row(
            name,
            address,
            lab.addresses6.get(name, "-"),
            lab.congestion_control(name),
            _cap(region.up or lab.topology.up),
            _cap(region.down or lab.topology.down),
        )
    return table


def links_table(stats: LabStats) -> FittedTable:
    """What every link is set to and has carried."""
    table = FittedTable(
        "from", "to", "Mbit/s", "delay", "loss", "packets", "lost", "dropped", "queue", "",
        box=SIMPLE_HEAD,
    )  # fmt: skip
    for (src, dst), link in stats.links.items():
        dropped = link.queue_drops + link.cap_drops + link.cut_drops + link.device_drops
        table.add_row(
            src,
            dst,
            "-" if link.rate_mbps is None else f"{link.rate_mbps:g}",
            f"{link.delay_s * 1e3:g} ms",
            f"{link.loss:.2%}" if link.loss else "0",
            str(link.in_packets),
            str(link.lost),
            str(dropped),
            f"{link.queue_bytes / 1e3:.0f} kB",
            "cut" if link.is_cut else "",
        )
    return table


def relay_line(stats: LabStats) -> str:
    """The relay's load, and whether it is in time."""
    verdict = "in time"
    if stats.was_late:
        verdict = "LATE, figures taken now do not count: " + "; ".join(stats.verdict.why)
    priority = "" if stats.realtime else ", without real-time priority"
    return (
        f"relay: {stats.cpu_share:.0%} of a core{priority}, {verdict} "
        f"(at most {stats.late_share:.2%} of a link's packets late); {stats.relay}"
    )


def _cap(config: CapConfig) -> str:
    if config.trace is not None:
        return f"{config.trace.kind} trace"
    return "-" if config.rate_mbps is None else f"{config.rate_mbps:g} Mbit/s"
