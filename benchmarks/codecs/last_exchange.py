"""What it does to the final model, and to the bytes, that the last exchange is coded.

Digits in two regions on emulated links of 50 Mbit/s, simulated; every pair of runs differs in
`codec.last_error` alone: as configured by default, and 0, which is full precision.

  loss_shift_*  by how much the coded end changes the final loss, over the spread (largest less
                smallest) of the losses of seeds in full precision; median over pairs of equal seed
  bytes_*       bytes between regions in the whole run, coded over full
  saved_mb_*    the difference; one model in full precision both ways is twice its size
"""

from __future__ import annotations

from benchmarks.common import support
from benchmarks.common.compared import compared, finals, of

STRATEGIES = {
    "bsp": "bsp",
    "sma": "sma:interval=8",
    "diloco": "diloco:interval=8:outer.momentum=0.3",
    "asgd_ga": "asgd_ga:interval=8",
    "async_local_sgd": "async_local_sgd:interval=8:outer.momentum=0.5",
}
CODECS = {"int8": "int8", "int4": "int4", "topk": "topk:codec.up.ratio=0.05:codec.down.ratio=0.05"}
STEPS = 96
CONFIG = f"""
name: last_exchange
task: {{use: digits, options: {{width: 8}}}}
data: {{generate: {{rows_per_shard: 512}}, batch_size: 16}}
regions: [{{name: a}}, {{name: b}}]
strategy: {{kind: bsp}}
optimizer: {{kind: momentum, lr: 0.02}}
train: {{steps: {STEPS}, eval_every: 0}}
emulate: {{link: {{rate_mbps: 50, delay_s: 0.03}}, step_s: 0.1}}
checkpoint: {{every_s: null}}
"""


def main() -> None:
    options = support.parse(__doc__)
    machine = support.hardware()
    seeds = 2 if options.quick else 5
    names = ["sma"] if options.quick else list(STRATEGIES)
    figures = []
    for name in names:
        labels = {
            (codec, full): f"{STRATEGIES[name]}:codec={keys}" + full
            for codec, keys in CODECS.items()
            for full in ("", ":codec.last_error=0")
        }
        comparison = compared(CONFIG, list(labels.values()), (1.0,), seeds)
        for codec in CODECS:
            coded = of(comparison, labels[codec, ""])
            whole = of(comparison, labels[codec, ":codec.last_error=0"])
            losses = finals(coded, "loss"), finals(whole, "loss")
            spread = max(losses[1]) - min(losses[1])
            shift = [abs(a - b) / spread for a, b in zip(*losses, strict=True)]
            what = f"{name}_{codec}"
            support.say(f"{what}: losses {losses[0]} coded, {losses[1]} full")
            figures.append(support.median(f"loss_shift_{what}", shift, "ratio", "<= 1"))
            sizes = [float(run.wan_bytes) for run in coded], [float(run.wan_bytes) for run in whole]
            figures.append(support.ratio(f"bytes_{what}", *sizes))
            saved = [b - a for a, b in zip(*sizes, strict=True)]
            figures.append(support.median(f"saved_mb_{what}", [s / 1e6 for s in saved], "MB"))
    support.finish("last_exchange", machine, figures, options.out)


if __name__ == "__main__":
    main()
