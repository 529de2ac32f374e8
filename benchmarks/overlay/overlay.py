"""Synchronisation time of a round over different overlays, between regions with capped lines.

One light process per region with the product's own endpoint and overlay, random vectors, no Ray;
in the WAN lab (needs root), or with --emulated in one process whose messages are shaped. A round's
time runs from all regions having their vector until all have the mean.

  equal_N_*      N regions, up and down capped alike: star, rack and binary (whole messages, as
                 their papers have them, and in segments), ring, tsengine, netstorm.
  ratio_N_*      others' time over that of tsengine and netstorm, which both send segments; the
                 published TSEngine sends whole messages and gains less.
  uneven_*       every pair has a rate of its own, drawn anew every few rounds: the median time, and
                 the rounds that tsengine and netstorm need after a redraw until they are within a
                 fifth of what they settle to.
  cores_*        of all regions' processes together while a round is under way.

TLS is off; the seconds between two rounds stand for computation.
"""

from __future__ import annotations

import argparse
import base64
import json
import random
import secrets
import statistics
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from benchmarks.common import support
from benchmarks.common.lab_runs import LabRuns, lab_runs
from benchmarks.common.node_process import NodeProcess
from benchmarks.overlay.overlay_emulated import EmulatedNet
from geo_ray.lab.lab import Lab
from geo_ray.lab.stats import LabStats
from geo_ray.lab.topology import Topology

NODE = Path(__file__).with_name("overlay_node.py")
PORT = 4710
TRANSPORT: dict[str, Any] = {}
CAP_MBPS = 20.0
UNEVEN_MBPS = (3.0, 24.0)  # 1 : 8, as 20 to 155
DELAY_S = 0.005
COMPUTE_S = 1.0
NEAR = 1.2  # of what a kind settles to: adapted
SETTLED_ROUNDS = 3
WHOLE = ("star", "rack", "binary")
LEARN = ("tsengine", "netstorm")


class Net(Protocol):
    """Regions that run rounds."""

    def ask(self, region: str, do: str, **order: Any) -> dict[str, Any]:
        """Have a region's node do something; its answer."""

    def pair(self, src: str, dst: str, mbps: float) -> None:
        """Change the rate of an ordered pair."""

    def stats(self) -> LabStats | None:
        """The lab's counters; None if there is no lab."""


class LabNet:
    """Processes in namespaces of the WAN lab."""

    def __init__(self, lab: Lab, hellos: Mapping[str, dict[str, Any]]) -> None:
        self.lab = lab
        self.nodes = {
            region: NodeProcess(NODE, region, hello, lab) for region, hello in hellos.items()
        }

    def ask(self, region: str, do: str, **order: Any) -> dict[str, Any]:
        """See `Net`."""
        return self.nodes[region].ask(do, **order)

    def pair(self, src: str, dst: str, mbps: float) -> None:
        """See `Net`."""
        self.lab.set(src, dst, rate_mbps=mbps)

    def stats(self) -> LabStats | None:
        """See `Net`."""
        return self.lab.stats()

    def end(self) -> None:
        """Leave no process behind."""
        for node in self.nodes.values():
            node.end()


@contextmanager
def network(count: int, overlay: dict[str, Any], num_params: int, emulated: bool) -> Iterator[Any]:
    """Regions that are connected; their network and their names, the hub first."""
    regions = [f"n{i}" for i in range(count)]
    common = {
        "regions": regions,
        "hub": regions[0],
        "overlay": overlay,
        "num_params": num_params,
        "port": 0 if emulated else PORT,
        "key": base64.b64encode(secrets.token_bytes(32)).decode(),
        "transport": {"tls": "off"} | TRANSPORT,
    }
    hellos = {region: common | {"region": region} for region in regions}
    if emulated:
        net: Any = EmulatedNet(hellos, CAP_MBPS, DELAY_S)
        try:
            with ThreadPoolExecutor(count) as pool:
                bound = list(pool.map(lambda r: net.ask(r, "listen", host="127.0.0.1"), regions))
                addresses = {r: b["address"] for r, b in zip(regions, bound, strict=True)}
                list(pool.map(lambda r: net.ask(r, "connect", addresses=addresses), regions))
            yield net, regions
        finally:
            net.end()
        return
    line = {"rate_mbps": CAP_MBPS}
    topology = {
        "regions": [{"name": region} for region in regions],
        "link": {"delay_s": DELAY_S},
        "up": line,
        "down": line,
    }
    with Lab(Topology.model_validate_json(json.dumps(topology))) as lab:
        net = LabNet(lab, hellos)
        try:
            addresses = {region: [lab.addresses[region], PORT] for region in regions}
            with ThreadPoolExecutor(count) as pool:
                list(pool.map(lambda r: net.ask(r, "listen", host=addresses[r][0]), regions))
                list(pool.map(lambda r: net.ask(r, "connect", addresses=addresses), regions))
            yield net, regions
            with ThreadPoolExecutor(count) as pool:
                list(pool.map(lambda r: net.ask(r, "stop"), regions))
        finally:
            net.end()


def one_round(net: Net, regions: list[str]) -> tuple[float, float]:
    """How long a round took, and how many cores it used."""
    at_s = time.monotonic() + COMPUTE_S
    with ThreadPoolExecutor(len(regions)) as pool:
        answers = list(pool.map(lambda r: net.ask(r, "round", at_s=at_s), regions))
    if len({answer["sum"] for answer in answers}) != 1:
        raise RuntimeError("the regions do not have the same result")
    lasted_s = max(answer["done_s"] for answer in answers) - at_s
    return lasted_s, sum(answer["cpu_s"] for answer in answers) / (lasted_s + COMPUTE_S)


def overlay_of(kind: str, size_bytes: int, segment_bytes: int) -> dict[str, Any]:
    """The configuration of a kind; ``_whole`` sends whole messages."""
    whole = kind.endswith("_whole")
    kind = kind.removesuffix("_whole")
    if kind == "star":
        return {"kind": "star"}
    transfer = {"segment_bytes": size_bytes if whole else segment_bytes}
    return {"kind": kind, "transfer": transfer}


class Plan:
    """How much is done.

    Args:
        quick: as a smoke check.
    """

    def __init__(self, quick: bool) -> None:
        self.size_bytes = 1_000_000 if quick else 3_000_000
        self.segment_bytes = 64 * 1024  # smaller ones make two cores the bottleneck
        self.counts = (8,) if quick else (8, 9)
        self.rounds = 1 if quick else 3
        self.redraws = 1 if quick else 3
        self.per_redraw = 5 if quick else 9
        self.uneven = LEARN if quick else ("binary", *LEARN)


def equal_rounds(
    plan: Plan, count: int, kind: str, emulated: bool
) -> tuple[list[tuple[float, float]], LabStats | None]:
    """Rounds between regions with equal caps, after the first."""
    overlay = overlay_of(kind, plan.size_bytes, plan.segment_bytes)
    with network(count, overlay, plan.size_bytes // 4, emulated) as (net, regions):
        found = [one_round(net, regions) for _ in range(1 + plan.rounds)]
        return found[1:], net.stats()


def equal(runs: LabRuns, plan: Plan, emulated: bool) -> list[support.Figure]:
    """Equal caps."""
    figures = []
    kinds = ["star", *(f"{k}_whole" for k in WHOLE[1:]), *WHOLE[1:], "ring", *LEARN]
    for count in plan.counts:
        times: dict[str, list[float]] = {}
        cores: dict[str, list[float]] = {}
        for kind in kinds:
            measure = partial(equal_rounds, plan, count, kind, emulated)
            found: list[tuple[float, float]] = runs.need(f"equal_{count}_{kind}", measure)
            times[kind], cores[kind] = [t for t, _ in found], [used for _, used in found]
            said = ", ".join(f"{t:.2f}" for t in times[kind])
            support.say(f"{count} regions: {kind} {said} s")
        for kind in kinds:
            figures.append(support.median(f"equal_{count}_{kind}", times[kind], "s"))
        for ours in LEARN:
            for other in kinds[: kinds.index("ring") + 1]:
                target = ">= 1.95" if ours == "tsengine" and other != "ring" else None
                name = f"ratio_{count}_{other}_over_{ours}"
                figures.append(support.ratio(name, times[other], times[ours], target))
        for kind in LEARN:
            figures.append(support.median(f"cores_{count}_{kind}", cores[kind], "cores", "<= 1.6"))
    return figures


def uneven_rounds(
    plan: Plan, kind: str, emulated: bool
) -> tuple[list[list[float]], LabStats | None]:
    """Times of the rounds after each draw of the pairs' rates."""
    overlay = overlay_of(kind, plan.size_bytes, plan.segment_bytes)
    draw = random.Random(0)
    found = []
    with network(8, overlay, plan.size_bytes // 4, emulated) as (net, regions):
        for number in range(plan.redraws):
            for src in regions:
                for dst in regions:
                    if src != dst:
                        net.pair(src, dst, draw.uniform(*UNEVEN_MBPS))
            rounds = plan.per_redraw if kind in LEARN else plan.rounds
            found.append([one_round(net, regions)[0] for _ in range(rounds)])
            said = ", ".join(f"{t:.1f}" for t in found[-1])
            support.say(f"uneven, draw {number}: {kind} {said} s")
        return found, net.stats()


def uneven(runs: LabRuns, plan: Plan, emulated: bool) -> list[support.Figure]:
    """Every pair with a rate of its own, redrawn."""
    figures = []
    medians: dict[str, list[float]] = {}
    for kind in plan.uneven:
        adapted: list[float] = []
        settled: list[float] = []
        found: list[list[float]] = runs.need(
            f"uneven_8_{kind}", partial(uneven_rounds, plan, kind, emulated)
        )
        for number, times in enumerate(found):
            late = statistics.median(times[-SETTLED_ROUNDS:])
            settled.append(late)
            if number > 0 or plan.redraws == 1:
                near = (i for i, t in enumerate(times) if t <= NEAR * late)
                adapted.append(float(next(near)))
        medians[kind] = settled
        figures.append(support.median(f"uneven_8_{kind}", settled, "s"))
        if kind in LEARN:
            name = f"uneven_8_{kind}_rounds_to_adapt"
            figures.append(support.median(name, adapted, "rounds", "<= 5"))
    for ours in LEARN:
        for other in plan.uneven[: -len(LEARN)]:
            name = f"uneven_8_{other}_over_{ours}"
            figures.append(support.ratio(name, medians[other], medians[ours], ">= 1.95"))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a smoke check, under 3 minutes")
    parser.add_argument("--emulated", action="store_true", help="without root, in one process")
    parser.add_argument("--only", choices=("equal", "uneven"), help="one of the two parts")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json", help="the result")
    options = parser.parse_args()
    machine = support.hardware()
    plan = Plan(options.quick)
    figures = []
    name = "overlay_emulated" if options.emulated else "overlay"
    with lab_runs(options.out) as runs:
        if options.only != "uneven":
            figures += equal(runs, plan, options.emulated)
        if options.only != "equal":
            figures += uneven(runs, plan, options.emulated)
        support.finish(name, machine, figures, options.out, runs.finish())


if __name__ == "__main__":
    main()
