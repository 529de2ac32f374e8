"""What the transport makes of a WAN link, in network namespaces behind a userspace relay.

Two processes with the product's own `Endpoint`, TLS on, in two namespaces of the WAN lab; real
TCP with the congestion control that the figure names. Needs root.

  goodput_*     64 MB over 100 Mbit/s, 50 ms one way, as a share of what TCP payload can reach there
                (rate x 1448/1500); a message's time without the one-way delay; after warm-up
                messages, as a round of training would find it. `one_stream_*` beside it is a plain
                TCP connection in the same lab.
  cold_*        the first message of a connection.
  warm_*        a message after a pause: its time over (bytes at the limit + one-way delay).
  flow_cap      every flow capped at 20 Mbit/s on a link of 200.
  heartbeat     99th percentile of round trips while 64 MB are under way, over the idle one.
  tls_cost      goodput lost to encryption at 200 Mbit/s.
  cores         of one endpoint that sends and receives 200 Mbit/s at the same time.

Every message is a run of its own: one during which the relay was late is repeated, not those beside
it. The same command resumes an interrupted benchmark.
"""

from __future__ import annotations

import argparse
import base64
import json
import secrets
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import support
from benchmarks.common.lab_runs import LabRuns, judged, lab_runs
from benchmarks.common.node_process import NodeProcess
from geo_ray.lab.lab import Lab
from geo_ray.lab.stats import LabStats
from geo_ray.lab.topology import Topology
from geo_ray.transport.security.certs import issue_for_run

DELAY_S = 0.05
PAYLOAD_SHARE = 1448 / 1500
NODE = Path(__file__).with_name("wan_node.py")
MB = 10**6
Order = Mapping[str, Any]
PORT = 4700


@contextmanager
def linked(
    rate_mbps: float, loss: float, control: str, kind: str = "ours", **extra: Any
) -> Iterator[tuple[NodeProcess, NodeProcess, Lab]]:
    """Two nodes over one link, A connected to B; whoever measures judges the lab's counters."""
    flow_mbps = extra.pop("flow_mbps", None)
    config = {"congestion_control": control, **extra}
    topology = {
        "congestion_control": control,
        "regions": [{"name": "A"}, {"name": "B"}],
        "link": {
            "rate_mbps": rate_mbps,
            "delay_s": DELAY_S,
            "loss": loss,
            "flow_rate_mbps": flow_mbps,
        },
    }
    certificates = issue_for_run("bench", ["A", "B"])
    key = base64.b64encode(secrets.token_bytes(32)).decode()

    def hello(region: str, peer: str) -> dict[str, Any]:
        own = certificates[region]
        pem = [base64.b64encode(part).decode() for part in (own.ca_pem, own.cert_pem, own.key_pem)]
        return {
            "kind": kind, "region": region, "peer": peer, "port": PORT, "key": key,
            "certificate": pem, "config": config,
        }  # fmt: skip

    with Lab(Topology.model_validate_json(json.dumps(topology))) as lab:
        sites = [NodeProcess(NODE, a, hello(a, b), lab) for a, b in (("A", "B"), ("B", "A"))]
        try:
            sites[1].ask("listen", host=lab.addresses["B"])
            sites[0].ask("connect", host=lab.addresses["B"])
            yield sites[0], sites[1], lab
            for site in sites:
                site.ask("stop")
        finally:
            for site in sites:
                site.end()


def limit_bytes_per_s(rate_mbps: float) -> float:
    return rate_mbps * 1e6 / 8 * PAYLOAD_SHARE


def shares(times_s: list[float], size_bytes: int, rate_mbps: float) -> list[float]:
    """Goodput over the limit, message by message."""
    return [size_bytes / (t - DELAY_S) / limit_bytes_per_s(rate_mbps) for t in times_s]


@dataclass(frozen=True)
class Case:
    """A link and the nodes on it; `name` is part of the names of its runs."""

    name: str
    rate_mbps: float
    loss: float
    control: str
    extra: Mapping[str, Any] = field(default_factory=dict)

    def linked(self) -> AbstractContextManager[tuple[NodeProcess, NodeProcess, Lab]]:
        """The nodes, up and connected."""
        return linked(self.rate_mbps, self.loss, self.control, **self.extra)


def cold_send(runs: LabRuns, case: Case, order: Order) -> dict[str, Any]:
    """What a node saw in the first message of a connection."""

    def measure() -> tuple[dict[str, Any], LabStats]:
        with case.linked() as (a, _, lab):
            return judged(lab, partial(a.ask, "send", **order, count=1))

    return runs.take(f"{case.name}/cold", measure) or {}


def sends(
    runs: LabRuns, case: Case, warm: Sequence[Order], order: Order, count: int
) -> dict[str, list[Any]]:
    """What a node saw in messages after the warm-up; lists of all of them together."""
    names = [f"{case.name}/{number}" for number in range(count)]
    if not all(runs.has(name) for name in names):
        with case.linked() as (a, _, lab):
            for each in warm:
                a.ask("send", **each)
            for name in names:
                runs.take(name, partial(judged, lab, partial(a.ask, "send", **order, count=1)))
    return combined([runs.take(name, never) for name in names if runs.has(name)])


def never() -> tuple[Any, LabStats]:
    raise AssertionError("the run is there")


def combined(answers: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """One list for each key of a node's answers."""
    found: dict[str, list[Any]] = defaultdict(list)
    for answer in answers:
        for key, value in answer.items():
            found[key] += value if isinstance(value, list) else [value]
    return found


def goodput(runs: LabRuns, quick: bool) -> list[support.Figure]:
    figures = []
    warm, count = (1, 1) if quick else (3, 3)
    targets = {0.0: ">= 0.95", 0.001: ">= 0.9", 0.01: ">= 0.8"}
    order = {"size_bytes": 64 * MB, "pause_s": 0.5}
    for control in ("cubic", "bbr"):
        for loss, target in targets.items():
            name = f"{control}_loss_{loss:g}"
            support.say(f"goodput, {name}")
            case = Case(f"goodput_{name}", 100, loss, control)
            cold_s = cold_send(runs, case, order).get("times_s", [])
            got = sends(runs, case, [order | {"count": 1 + warm}], order, count)
            reached = shares(got["times_s"], 64 * MB, 100)
            figures += [
                support.median(f"goodput_{name}", reached, "share", target),
                support.median(f"cold_{name}", shares(cold_s, 64 * MB, 100), "share"),
                support.median(f"streams_{name}", got["streams"][-1:], "streams"),
            ]
            if loss == 0.0 and got["rtts_s"]:
                base_s = min(got["rtt_min_s"])
                p99s = [quantile(got["rtts_s"], 0.99) / base_s]
                figures.append(
                    support.Figure(f"heartbeat_p99_{control}", p99s[0], "RTT", "<= 2", base_s, p99s)
                )
            case = Case(f"one_stream_{name}", 100, loss, control, {"kind": "plain"})
            first = {"size_bytes": 64 * MB, "count": 1, "longest_s": 5.0}
            one = sends(runs, case, [first], {"size_bytes": 64 * MB, "longest_s": 10.0}, count)
            rates = [rate / limit_bytes_per_s(100) for rate in one["bytes_per_s"]]
            figures.append(support.median(f"one_stream_{name}", rates, "share"))
    return figures


def warm_updates(runs: LabRuns, quick: bool) -> list[support.Figure]:
    figures = []
    for control in ("cubic", "bbr"):
        for size in (1 * MB, 20 * MB):
            name = f"warm_{size // MB}_mb_{control}"
            support.say(f"warm update of {size // MB} MB, {control}")
            warm = {"size_bytes": size, "count": 2 if quick else 24, "pause_s": 0.6}
            order = {"size_bytes": size, "pause_s": 1.0}
            got = sends(runs, Case(name, 100, 0.0, control), [warm], order, 3 if quick else 7)
            ideal_s = size / limit_bytes_per_s(100) + DELAY_S
            ratios = support.median(name, [t / ideal_s for t in got["times_s"]], "ratio", "<= 1.15")
            figures.append(replace(ratios, baseline=ideal_s))
    return figures


def capped_flows(runs: LabRuns, quick: bool) -> list[support.Figure]:
    support.say("flows capped at 20 Mbit/s on a link of 200")
    order = {"size_bytes": 64 * MB, "pause_s": 0.5}
    count = 2 if quick else 3
    case = Case("flow_cap", 200, 0.0, "cubic", {"flow_mbps": 20.0})
    got = sends(runs, case, [order | {"count": count}], order, count)
    return [
        support.median("flow_cap", shares(got["times_s"], 64 * MB, 200), "share", ">= 0.9"),
        support.median("streams_flow_cap", got["streams"][-1:], "streams"),
    ]


def encryption(runs: LabRuns, quick: bool) -> list[support.Figure]:
    lost = []
    order = {"size_bytes": 64 * MB, "pause_s": 0.5}
    for number in range(1 if quick else 3):
        rates = {}
        for mode in ("required", "off"):
            support.say(f"200 Mbit/s, TLS {mode}")
            case = Case(f"tls_{mode}_{number}", 200, 0.0, "bbr", {"tls": mode})
            got = sends(runs, case, [order | {"count": 2}], order, 2)
            assert set(got["encrypted"]) <= {mode == "required"}
            rates[mode] = support.median("", shares(got["times_s"], 64 * MB, 200), "share").value
        if rates["required"] is not None and rates["off"] is not None:
            lost.append(1.0 - rates["required"] / rates["off"])
    return [support.median("tls_cost", lost, "share", "<= 0.05")]


def both_ways(runs: LabRuns, quick: bool) -> list[support.Figure]:
    support.say("200 Mbit/s both ways")

    def measure() -> tuple[list[dict[str, Any]], LabStats]:
        with linked(200, 0.0, "bbr") as (a, b, lab), ThreadPoolExecutor(2) as pool:
            list(pool.map(partial(loaded, 1), (a, b)))
            action = partial(loaded, 2 if quick else 4)
            return judged(lab, lambda: list(pool.map(action, (a, b))))

    cores, reached = [], []
    for number in range(1 if quick else 3):
        got = runs.take(f"both_ways/{number}", measure)
        if got is not None:
            cores.append(max(each["cores"] for each in got))
            reached += [s for each in got for s in shares(each["times_s"], 64 * MB, 200)]
    return [
        support.median("cores_both_ways", cores, "cores", "<= 0.5"),
        support.median("goodput_both_ways", reached, "share"),
    ]


def loaded(count: int, site: NodeProcess) -> dict[str, Any]:
    return site.ask("send", size_bytes=64 * MB, count=count, pause_s=0.0)


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


PARTS = {
    "goodput": goodput,
    "warm": warm_updates,
    "flow_cap": capped_flows,
    "tls": encryption,
    "both_ways": both_ways,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a smoke check, under 5 minutes")
    parser.add_argument("--only", choices=PARTS, help="one of the parts")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json", help="the result")
    options = parser.parse_args()
    machine = support.hardware()
    parts = [PARTS[options.only]] if options.only else list(PARTS.values())
    with lab_runs(options.out) as runs:
        figures = [figure for part in parts for figure in part(runs, options.quick)]
        support.finish("wan", machine, figures, options.out, runs.finish())


if __name__ == "__main__":
    main()
