"""Training 51.2 M parameters over 1000, 100, 50 and 10 Mbit/s, round trip 20 ms. Needs root.

Two regions of the WAN lab, a Ray node in each, `geo-ray train` unmodified: every byte crosses real
TCP over TUN devices and a relay that keeps rate and delay. Exchange, codec, outer optimizer and
inner optimizer are real and of full size, 204.8 MB in fp32; only the gradient is not that of a
transformer (`slow_links_task.py`), and each step is padded to STEP_S, for two cores cannot compute
it. STEP_S is what torchft's published test with a model of that size comes to: its 37.4, 32.0 and
27.4 thousand tokens/s at 1000, 100 and 50 Mbit/s with H = 100 fit a step of 0.85 s and a ring of
fp32 for which all stand still (our inference; it does not say). At 10 Mbit/s that test did not
finish. At 1000 Mbit/s codecs, TLS and the relay on two cores are slower than the link.

All strategies exchange every H = 100 steps. `diloco` stands still for it; `diloco_streaming` sends
a quarter of the model every 25 steps and takes the answer `tau` steps later: 5, or as many as the
link needs. int4 has blocks of 256, 26.4 MB each way. AdamW would only add its own work to a step;
the inner optimizer is SGD.

  share_RATE_CASE     tokens/s over those of the same regions without any exchange: H times the
                      step before any exchange began (the median of the first ones, in the same
                      run, so it holds what a step costs beside STEP_S), over the time from the
                      first step of a round to the first of the next; the slower region's. Its runs
                      are the rounds of one training.
  padded_RATE_CASE    the same against STEP_S alone
  exchange_s_...      median seconds from an update's coding to the answer's decoding (in
                      `streaming` of a quarter of the model; 5 to 20 steps may hide it)
  mb_per_round_...    payload each way of the region that is not the averager's
  last_s_...          streaming only: its last exchange, once per training, goes in full precision
                      and nothing hides it. It is not in `share`.
  cpu_share_...       of the machine's two cores while training; above 0.8 the figure is that of
                      the machine. The relay, which would not be there, is in it.
  finished_10         whether the trainings at 10 Mbit/s ended with a model
  late_share_...      packets that the relay handled too late for the link
  (docs/guides/wan-lab.md); a run
                      that is rejected for it is repeated alone
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.common import support
from benchmarks.common.command import Run, geo_ray
from benchmarks.common.lab_runs import lab_runs
from benchmarks.strategies.sync_cloudless import CpuMeter
from geo_ray.lab.lab import Lab, start_ray
from geo_ray.lab.stats import LabStats
from geo_ray.lab.topology import DefaultLink, LabRegionConfig, Topology

TASK = Path(__file__).with_name("slow_links_task.py")
HUB, FAR = "A", "B"
DELAY_S = 0.01
STEP_S = 0.85
INTERVAL = 100
FRAGMENTS = 4
TABLES = 800
INT4 = "{up: {kind: int4, block: 256}, down: {kind: int4, block: 256}}"
CONFIG = f"""
name: slow
task: {{use: '{TASK}:Tables', options: {{tables: {TABLES}}}}}
data: {{generate: {{rows_per_shard: 4096}}, batch_size: 16}}
regions: [{{name: {HUB}}}, {{name: {FAR}}}]
strategy: {{kind: diloco, interval: {INTERVAL}}}
optimizer: {{kind: sgd, lr: 1.0e-5}}
train: {{steps: {INTERVAL}, eval_every: 0}}
averager: {{region: {HUB}}}
emulate: {{step_s: {STEP_S}}}
cluster: {{kind: existing, connect_timeout_s: 120}}
checkpoint: {{every_s: null}}
"""


@dataclass(frozen=True, slots=True)
class Case:
    """One training.

    Attributes:
        rate_mbps: of the link, each way.
        strategy: ``diloco`` or ``streaming``.
        codec: ``int4`` or ``fp32``.
        rounds: to train.
        tau: steps that hide an exchange, of ``streaming``.
        target: for the share.
    """

    rate_mbps: int
    strategy: str
    codec: str
    rounds: int = 2
    tau: int = 5
    target: str | None = None

    @property
    def name(self) -> str:
        """Part of the figures' names."""
        return f"{self.rate_mbps}_{self.strategy}_{self.codec}"

    def sets(self, interval: int) -> dict[str, object]:
        """Changes of the configuration."""
        kind = "diloco"
        if self.strategy == "streaming":
            kind = f"diloco_streaming, fragments: {FRAGMENTS}, tau: {self.tau}"
        sets = {
            "strategy": f"{{kind: {kind}, interval: {interval}}}",
            "train.steps": self.rounds * interval,
        }
        return {**sets, "codec": INT4} if self.codec == "int4" else sets


CASES = (
    Case(1000, "streaming", "int4"),
    Case(1000, "diloco", "int4", rounds=1),
    Case(1000, "diloco", "fp32"),
    Case(100, "streaming", "int4"),
    Case(100, "diloco", "int4", rounds=1),
    Case(100, "diloco", "fp32"),
    Case(50, "streaming", "int4", target=">= 0.9"),
    Case(50, "diloco", "int4"),
    Case(50, "streaming", "fp32", tau=24),
    Case(50, "diloco", "fp32"),
    Case(10, "streaming", "int4", tau=20),
    Case(10, "diloco", "int4", rounds=1),
    Case(10, "diloco", "fp32", rounds=1),
)


@dataclass(frozen=True, slots=True)
class Timed:
    """What one training came to; see the module's docstring."""

    alone_s: float
    rounds_s: list[float]
    exchanges_s: list[float]
    last_s: list[float]
    mb_per_round: float
    cpu_fraction: float
    late_fraction: float


def main() -> None:
    parser = support.parser(__doc__)
    parser.add_argument("--cases", help="only these, by the names in the figures, with commas")
    options = parser.parse_args()
    machine = support.hardware()
    wanted = None if options.cases is None else options.cases.split(",")
    cases = tuple(case for case in CASES if wanted is None or case.name in wanted)
    interval: int = INTERVAL
    sets: dict[str, object] = {}
    if options.quick:  # an eighth of the model, and a fifth of the interval
        cases = (Case(100, "streaming", "int4", tau=4),)
        interval, sets = 20, {"task.options.tables": TABLES // 8}
    figures: list[support.Figure] = []
    finished: list[float] = []
    with lab_runs(options.out) as runs:
        for number, case in enumerate(cases, 1):
            support.say(f"{number}/{len(cases)} {case.name}")
            timed = None
            try:
                train = partial(measure, case, interval, sets)
                timed = runs.take(case.name, train, lambda value: Timed(**value), attempts=3)
            except RuntimeError as error:
                support.say(f"{case.name} has no result: {error}")
            if timed is None:
                figures.append(support.Figure(f"share_{case.name}", None, "share", case.target))
                finished += [0.0] * (case.rate_mbps == 10)
                continue
            finished += [1.0] * (case.rate_mbps == 10)
            found = figures_of(case, timed, interval)
            figures += found
            support.say(", ".join(f"{each.name} {each.value:.3f}" for each in found))
        if finished:
            figures.append(
                support.Figure(
                    "finished_10", statistics.mean(finished), "share", ">= 1", None, finished
                )
            )
        support.finish("slow_links", machine, figures, options.out, runs.finish())


def measure(case: Case, interval: int, sets: dict[str, object]) -> tuple[dict[str, Any], LabStats]:
    """One training in a lab of its own.

    Raises:
        RuntimeError: the training did not end well.
    """
    topology = Topology(
        link=DefaultLink(rate_mbps=case.rate_mbps, delay_s=DELAY_S),
        regions=(LabRegionConfig(name=HUB), LabRegionConfig(name=FAR)),
    )
    with tempfile.TemporaryDirectory() as scratch, Lab(topology) as lab, CpuMeter() as meter:
        config = Path(scratch) / "slow.yaml"
        config.write_text(CONFIG, "utf-8")
        environment = start_ray(lab)
        lab.reset()
        run = geo_ray(
            "train",
            config,
            {**case.sets(interval), **sets},
            Path(scratch) / "runs",
            environment=environment,
            timeout_s=3600.0,
            popen=partial(lab.popen, HUB),
        )
        stats = lab.stats()
        return asdict(timed_of(run, interval, meter, stats.late_fraction)), stats


def timed_of(run: Run, interval: int, meter: CpuMeter, late_fraction: float) -> Timed:
    """Fold a run's step and exchange events."""
    exchanges = list(run.events("exchange"))
    whole = max(e["bytes_before"] for e in exchanges)
    # What streams goes in fragments; only its last word is about the whole model.
    in_parts = min(e["bytes_before"] for e in exchanges) < whole / 2
    last = [e for e in exchanges if in_parts and e["bytes_before"] == whole]
    usual = [e for e in exchanges if e not in last]
    first_s = min(e["start_s"] for e in usual)
    sites = []
    for region in (HUB, FAR):
        own = [step for step in run.events("step") if step["region"] == region]
        waits = [e["t_s"] for e in usual if e["region"] == region and e["blocking"]]
        sites.append(site_of(own, max([own[-1]["t_s"], *waits]), interval, first_s))
    of_far = [e for e in usual if e["region"] == FAR]
    rounds_s = [max(pair) for pair in zip(*(site.rounds_s for site in sites), strict=True)]
    return Timed(
        alone_s=max(site.alone_s for site in sites),
        rounds_s=rounds_s,
        exchanges_s=[e["t_s"] - e["start_s"] for e in of_far],
        last_s=[e["t_s"] - e["start_s"] for e in last if e["region"] == FAR],
        mb_per_round=sum(e["bytes_sent"] for e in of_far) / 1e6 / len(rounds_s),
        cpu_fraction=meter.share(
            run.origin_unix_s + min(site.began_s for site in sites),
            run.origin_unix_s + max(site.ended_s for site in sites),
        ),
        late_fraction=late_fraction,
    )


@dataclass(frozen=True, slots=True)
class Site:
    """One region's steps.

    Attributes:
        began_s: when the first began.
        ended_s: when the last was over, and what it waited for.
        alone_s: of a step before there was any exchange.
        rounds_s: of every round.
    """

    began_s: float
    ended_s: float
    alone_s: float
    rounds_s: list[float]


def site_of(
    steps: Sequence[Mapping[str, Any]], ended_s: float, interval: int, first_exchange_s: float
) -> Site:
    """Fold a region's step events."""
    starts_s = [step["start_s"] for step in steps]
    periods_s = [
        later - start for start, later in pairwise(starts_s) if later < first_exchange_s
    ]  # a step begins when the one before is taken in: none of these has waited
    borders_s = [*starts_s[::interval], ended_s]
    return Site(
        starts_s[0],
        ended_s,
        statistics.median(periods_s[1:]),  # without the first, which touches memory first
        [later - start for start, later in pairwise(borders_s)],
    )


def figures_of(case: Case, timed: Timed, interval: int) -> list[support.Figure]:
    """What is published of one training."""
    name = case.name
    alone = [interval * timed.alone_s / seconds for seconds in timed.rounds_s]
    padded = [interval * STEP_S / seconds for seconds in timed.rounds_s]
    figures = [
        support.median(f"share_{name}", alone, "share", case.target),
        support.median(f"padded_{name}", padded, "share"),
        support.median(f"exchange_s_{name}", timed.exchanges_s, "s"),
        support.Figure(f"mb_per_round_{name}", timed.mb_per_round, "MB"),
        support.Figure(f"cpu_share_{name}", timed.cpu_fraction, "share", "<= 0.8"),
        support.Figure(f"late_share_{name}", timed.late_fraction, "share"),
    ]
    if timed.last_s:
        figures.append(support.median(f"last_s_{name}", timed.last_s, "s"))
    return figures


if __name__ == "__main__":
    main()
