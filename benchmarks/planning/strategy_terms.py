"""What a plan says of time and egress against the simulator, for every strategy.

Three regions with one machine each, the third's three times as slow, or all alike; a link on which
exchanges are hidden, and one on which they are not. Each plan is followed by a simulation with real
gradients and messages. Strategies whose regions take unequal numbers of steps are refused by the
planner, by name.

  time_KIND     largest deviation of the simulated from the planned seconds, of the four settings;
                in the record all four, in the order of `SETTINGS`
  egress_KIND   the same for dollars of egress
  refused       strategies that cannot be planned
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import geo_ray
from benchmarks.common import support
from geo_ray.api.plan import PlanInputs
from geo_ray.base.errors import ConfigError
from geo_ray.telemetry.summary import TOTAL, load_cost

STRATEGIES = {
    "bsp": "{kind: bsp}",
    "asgd": "{kind: asgd}",
    "asgd_ga": "{kind: asgd_ga, interval: 8}",
    "ama": "{kind: ama, interval: 8}",
    "sma": "{kind: sma, interval: 8}",
    "fedavg": "{kind: fedavg, interval: 8}",
    "fedssgd": "{kind: fedssgd, accumulate: 4}",
    "esync": "{kind: esync, slowest_steps: 4}",
    "hfa": "{kind: hfa, k1: 2, k2: 4}",
    "nbsync": "{kind: nbsync, max_local_steps: 16}",
    "diloco": "{kind: diloco, interval: 8}",
    "diloco_streaming": "{kind: diloco_streaming, interval: 16, fragments: 2, tau: 2}",
    "muloco": "{kind: muloco, interval: 8}",
    "cocodc": "{kind: cocodc, interval: 16, fragments: 2, tau: 2}",
    "diloco_eager": "{kind: diloco_eager, interval: 8}",
    "one_step_delay": "{kind: one_step_delay, interval: 8}",
    "decoupled": "{kind: decoupled, interval: 8, fragments: 2}",
    "fedasync": "{kind: fedasync, interval: 8}",
    "fedat": "{kind: fedat, interval: 8, tiers: 2}",
    "fedgsync": "{kind: fedgsync, interval: 8}",
    "async_local_sgd": "{kind: async_local_sgd, interval: 8}",
    "halos": "{kind: halos, local_steps: 2, interval: 4}",
    "dc_asgd": "{kind: dc_asgd, interval: 2}",
    "gaia": "{kind: gaia}",
    "sparseloco": "{kind: sparseloco, interval: 8}",
    "demo": "{kind: demo}",
}
"""Every strategy of the library, with options that make some 20 exchanges of a short run."""

CODEC = {"sparseloco": "chunked_topk"}
OPTIMIZER = {"muloco": "{kind: muon, lr: 0.005}"}
SETTINGS = tuple((mbps, slower) for mbps in (4.0, 100.0) for slower in (3.0, 1.0))
"""Mbit/s of every link, and how much longer the third region's steps take."""


def config(kind: str, mbps: float, slower: float, steps: int = 160) -> str:
    """A configuration; a step takes 0.1 s on the faster machines."""
    codec = CODEC.get(kind)
    places = {"us": "us-east-1", "eu": "eu-central-1", "asia": "ap-northeast-1"}
    speeds = {"us": 20.0, "eu": 20.0, "asia": 20.0 / slower}
    offers = "\n".join(
        f"    {name}: {{cloud: aws, at: {at}, rows: 128, machines: "
        f"[{{type: g5.xlarge, cap: 1, count: 1, rows_per_s: {speeds[name]}}}]}}"
        for name, at in places.items()
    )
    return f"""
name: terms
task: {{use: digits, options: {{width: 24}}}}
data: {{generate: {{rows_per_shard: 128}}, batch_size: 2}}
regions: [{{name: us}}, {{name: eu}}, {{name: asia}}]
strategy: {STRATEGIES[kind]}
codec: {f"{{up: {{kind: {codec}}}}}" if codec else "{}"}
optimizer: {OPTIMIZER.get(kind, "{kind: sgd, lr: 0.05}")}
train: {{steps: {steps}, eval_every: 0}}
emulate: {{link: {{rate_mbps: {mbps}, delay_s: 0.05}}}}
checkpoint: {{every_s: null}}
plan:
  startup_s: 0
  loss_budget: 10
  codecs: [{codec or "null"}]
  regions:
{offers}
"""


def deviations(kind: str, mbps: float, slower: float, place: Path) -> tuple[float, float]:
    """Time and egress of a simulation over those of its plan, less 1.

    Args:
        kind: the strategy.
        mbps: of every link.
        slower: how much longer the third region's steps take.
        place: where the run leaves its files.

    Raises:
        ConfigError: it cannot be planned.
    """
    path = place / f"{kind}.yaml"
    path.write_text(config(kind, mbps, slower))
    runs = [f"run.dir={place / 'runs'}"]
    made = geo_ray.plan(path, runs, policy="fixed", inputs=PlanInputs(prices=[]))
    run = geo_ray.simulate(path, runs, plan=made)
    rows = {(row.unit, row.term): row for row in load_cost(run.path).rows}
    time, egress = rows["s", TOTAL], rows["USD", "egress"]
    assert time.actual is not None and egress.actual is not None
    return time.actual / time.estimated - 1, egress.actual / egress.estimated - 1


def main() -> None:
    parser = support.parser(__doc__)
    parser.add_argument("--cases", help="only these strategies, separated by commas")
    options = parser.parse_args()
    kinds = options.cases.split(",") if options.cases else list(STRATEGIES)
    machine = support.hardware()
    os.environ.pop("GEO_RAY_PRICES", None)
    figures, refused = [], 0
    for kind in kinds:
        with tempfile.TemporaryDirectory() as scratch:
            try:
                settings = SETTINGS[:1] if options.quick else SETTINGS
                found = [deviations(kind, *each, Path(scratch)) for each in settings]
            except ConfigError:
                refused += 1
                continue
        for name, values in zip(("time", "egress"), zip(*found, strict=True), strict=True):
            worst = max(values, key=abs)
            figures.append(support.Figure(f"{name}_{kind}", worst, "share", None, None, values))
    figures.append(support.Figure("refused", refused, ""))
    support.finish("strategy_terms", machine, figures, options.out)


if __name__ == "__main__":
    main()
