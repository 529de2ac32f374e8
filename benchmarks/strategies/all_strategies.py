"""Every strategy on one workload: the measured row of each in docs/reference/strategies.md.

Three regions, the third's steps three times as long; 30 k parameters (120 kB), of which a link of
10 Mbit/s and 50 ms carries one copy in 1.5 of the first regions' steps. Every strategy sees the
same number of rows and has its learning rate chosen on the same grid, on a seed that does not
count; its own knobs are as written here, and not tuned. On the virtual clock, with real gradients.

  time_*      virtual seconds to the target accuracy, median of the seeds; the whole run if missed
  speed_*     of bsp's time over this one's, pairs of equal seed
  reached_*   share of the seeds that reached the target
  mb_*        megabytes over the WAN in the whole run
  idle_*      share of the regions' time not spent computing
  accuracy_*  at the end
"""

from __future__ import annotations

import statistics

from benchmarks.common import support
from benchmarks.common.compared import compared, finals, of, to_target_s

OUTER = "outer.kind=nesterov:outer.lr=0.7:outer.momentum=0.5"
PLAIN = "local.lr=1.0:local.momentum=0.0:local.period=1"
ASYNC = "outer.lr=1.0:outer.momentum=0.3"
VARIANTS = {
    "bsp": "bsp",
    "asgd": "asgd",
    "asgd_ga": "asgd_ga:interval=8",
    "ama": "ama:interval=8",
    "sma": "sma:interval=8",
    "fedavg": "fedavg:interval=8",
    "fedssgd": "fedssgd:accumulate=4",
    "esync": "esync:slowest_steps=4",
    "hfa": "hfa:k1=4:k2=2",
    "nbsync": "nbsync:merge=correct:max_local_steps=16",
    "diloco": f"diloco:interval=8:{OUTER}",
    "diloco_int4": f"diloco:interval=8:codec=int4:{OUTER}",
    "diloco_streaming": "diloco_streaming:interval=8:fragments=2:tau=2:outer.kind=sgd",
    "muloco": f"muloco:interval=8:optimizer.kind=muon:{OUTER}",
    "cocodc": "cocodc:interval=8:fragments=2:tau=1:outer.kind=sgd",
    "diloco_eager": "diloco_eager:interval=8:outer.kind=sgd",
    "one_step_delay": "one_step_delay:interval=8:merge=correct:outer.kind=sgd",
    "decoupled": "decoupled:interval=8:fragments=2:outer.kind=sgd",
    "fedasync": "fedasync:interval=8",
    "fedat": "fedat:interval=8:tiers=2",
    "fedgsync": "fedgsync:interval=8",
    "async_local_sgd": f"async_local_sgd:interval=8:{ASYNC}",
    "halos": f"halos:local_steps=2:interval=4:{PLAIN}:{ASYNC}",
    "dc_asgd": "dc_asgd:interval=2",
    "gaia": "gaia:codec=nonzeros",
    "sparseloco": "sparseloco:interval=8:codec=chunked_topk",
    "demo": "demo",
}
BASE = "bsp"


def config(steps: int) -> str:
    """The workload."""
    return f"""
name: all_strategies
task: {{use: digits, options: {{width: 16}}}}
data: {{generate: {{rows_per_shard: 128}}, batch_size: 16}}
regions: [{{name: east}}, {{name: west}}, {{name: south}}]
strategy: {{kind: bsp}}
optimizer: {{kind: sgd, lr: 0.1}}
train:
  steps: {steps}
  count: total
  eval_every: 8
  target: {{metric: accuracy, value: 0.93, direction: at_least}}
emulate:
  link: {{rate_mbps: 10, delay_s: 0.05}}
  step_s: 0.1
  step_s_by_region: {{south: 0.3}}
checkpoint: {{every_s: null}}
"""


def main() -> None:
    parser = support.parser(__doc__)
    parser.add_argument("--cases", help="only these strategies beside bsp, separated by commas")
    options = parser.parse_args()
    machine = support.hardware()
    cases = {BASE, *(options.cases.split(",") if options.cases else VARIANTS)}
    variants = {name: label for name, label in VARIANTS.items() if name in cases}
    seeds, rates = (1, (1.0,)) if options.quick else (3, (0.3, 1.0, 3.0))
    labels = list(variants.values())
    comparison = compared(config(24 if options.quick else 160), labels, rates, seeds)
    plain_s = to_target_s(of(comparison, VARIANTS[BASE]))
    figures = []
    for name, label in variants.items():
        runs = of(comparison, label)
        times_s = to_target_s(runs)
        reached = statistics.mean(run.time_to_target_s is not None for run in runs)
        wan_mb = [run.wan_bytes * 1e-6 for run in runs]
        figures += [
            support.median(f"time_{name}", times_s, "s"),
            support.ratio(f"speed_{name}", plain_s, times_s),
            support.Figure(f"reached_{name}", reached, "share"),
            support.median(f"mb_{name}", wan_mb, "MB"),
            support.median(f"idle_{name}", [run.idle_fraction or 0.0 for run in runs], "share"),
            support.median(f"accuracy_{name}", finals(runs, "accuracy"), "share"),
        ]
    support.finish("all_strategies", machine, figures, options.out)


if __name__ == "__main__":
    main()
