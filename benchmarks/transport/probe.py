"""How true `geo-ray probe` is: two hosts of the WAN lab, links that are known. Needs root.

  goodput   over what payload can be at most: rate x 1448/1500, as the lab's rate counts IP bytes
  rtt       median of the idle link over twice its delay
  loss      that of the UDP train less what is set, in points

Both directions of every link count as runs. The transport's own way of filling a link is part of
the first figure, the machine's other work as well: a run whose relay was late is taken again.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import support
from benchmarks.common.lab_runs import judged, lab_runs
from geo_ray.lab.lab import Lab
from geo_ray.lab.stats import LabStats
from geo_ray.lab.topology import DefaultLink, LabRegionConfig, Topology
from geo_ray.transport.links import LinkRecord, load_links

GOODPUT_SHARE = 1448 / 1500
PROBE = [sys.executable, "-m", "geo_ray.cli.main", "probe"]


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of link; queues hold one round trip."""

    name: str
    rate_mbps: float
    delay_s: float
    loss: float

    def topology(self, control: str) -> Topology:
        """A lab of two regions with that link."""
        queue_bytes = int(self.rate_mbps * 125_000 * 2 * self.delay_s)
        link = DefaultLink(
            rate_mbps=self.rate_mbps,
            delay_s=self.delay_s,
            loss=self.loss,
            queue_bytes=max(65536, queue_bytes),
        )
        regions = (LabRegionConfig(name="A"), LabRegionConfig(name="B"))
        return Topology(congestion_control=control, link=link, regions=regions)  # type: ignore[arg-type]


CASES = [
    Case("100 Mbit/s 50 ms", 100.0, 0.05, 0.0),
    Case("100 Mbit/s 50 ms 1 %", 100.0, 0.05, 0.01),
    Case("10 Mbit/s 300 ms 1 %", 10.0, 0.3, 0.01),
]


def main() -> None:
    options = support.parse(__doc__)
    machine = support.hardware()
    figures: list[support.Figure] = []
    os.environ["GEO_RAY_PROBE_KEY"] = "known to everybody"
    duration_s = 2.0 if options.quick else 5.0
    with lab_runs(options.out) as runs:
        for case in CASES[:1] if options.quick else CASES:
            records: list[LinkRecord] = []
            for control in ("bbr",) if options.quick else ("cubic", "bbr"):
                name = f"{case.name}, {control}"
                support.say(name)
                measure = partial(probed, case.topology(control), duration_s)
                records += runs.take(name, measure, revived) or []
            limit_mbps = case.rate_mbps * GOODPUT_SHARE
            goodputs = [record.goodput_mbps / limit_mbps for record in records]
            rtts = [record.rtt_s / (2 * case.delay_s) for record in records]
            losses = [100 * (r.loss - case.loss) for r in records if r.loss is not None]
            figures += [
                support.median(f"goodput, {case.name}", goodputs, "of limit"),
                support.median(f"rtt, {case.name}", rtts, "of set"),
                support.median(f"loss less set, {case.name}", losses, "points"),
            ]
        support.finish("probe", machine, figures, options.out, runs.finish())


def probed(topology: Topology, duration_s: float) -> tuple[list[dict[str, Any]], LabStats]:
    """Both directions."""
    with Lab(topology) as lab:
        records, stats = judged(lab, partial(probe_once, lab, duration_s))
    return [record.model_dump(mode="json") for record in records], stats


def revived(records: list[dict[str, Any]]) -> list[LinkRecord]:
    return [LinkRecord.model_validate(record) for record in records]


def probe_once(lab: Lab, duration_s: float) -> list[LinkRecord]:
    address = f"{lab.addresses['B']}:8476"
    listen = [*PROBE, "--listen", "--once", "--region", "B", "--bind", address]
    with (
        tempfile.TemporaryDirectory() as name,
        lab.popen("B", listen, stdout=subprocess.PIPE, text=True) as listener,
    ):
        try:
            assert listener.stdout is not None
            listener.stdout.readline()
            out = Path(name, "links.json")
            dial = [*PROBE, address, "--region", "A", "--duration", str(duration_s)]
            subprocess.run(
                lab.argv_in("A", [*dial, "--out", str(out)]), check=True, stdout=subprocess.DEVNULL
            )
            listener.wait(60.0)
            return list(load_links(out).links)
        finally:
            listener.kill()


if __name__ == "__main__":
    main()
