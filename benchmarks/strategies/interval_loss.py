"""What long rounds cost in loss: H = 25, 100, 500 local steps against H = 1, with tuned outer rate.

A byte-level language model on the text that ships with the task, two regions, the same number of
tokens for every H; simulated, since time is of no interest here. The inner rate is that of H = 1;
the outer learning rate and momentum of `diloco` are chosen per H on one grid, on a seed that
does not count.

  loss_H*      held-out loss at the end, median of the seeds
  penalty_H*   relative to H = 1 (pairs of equal seed)
"""

from __future__ import annotations

import statistics

from benchmarks.common import support
from benchmarks.common.compared import compared, finals, of

INTERVALS = {25: "<= 0.01", 100: "<= 0.025", 500: "<= 0.05"}
TUNING_SEED = 100
OUTER = (
    "sgd:outer.lr=1.0",
    "nesterov:outer.lr=0.7:outer.momentum=0.3",
    "nesterov:outer.lr=0.7:outer.momentum=0.6",
)


def config(steps: int) -> str:
    """The workload."""
    return f"""
name: interval_loss
task: {{use: bytelm, options: {{size: 0.1M, context: 32, max_bytes: 400000}}}}
data: {{generate: {{rows_per_shard: 512}}, batch_size: 16}}
regions: [{{name: a}}, {{name: b}}]
strategy: {{kind: bsp}}
optimizer: {{kind: adamw, lr: 0.0015}}
train: {{steps: {steps}, eval_every: 0}}
emulate: {{link: {{rate_mbps: 100, delay_s: 0.03}}, step_s: 0.1}}
checkpoint: {{every_s: null}}
"""


def variant(interval: int, outer: str) -> str:
    """`diloco` with an interval and an outer optimizer."""
    kind, _, rest = outer.partition(":")
    return f"diloco:interval={interval}:outer.kind={kind}:{rest}"


def main() -> None:
    options = support.parse(__doc__)
    machine = support.hardware()
    steps, seeds = (100, 1) if options.quick else (2000, 3)
    intervals = [25] if options.quick else list(INTERVALS)
    tuned = compared(
        config(steps), [variant(h, o) for h in intervals for o in OUTER], (1.0,), 1, TUNING_SEED
    )
    best = {
        h: min(
            (variant(h, outer) for outer in OUTER),
            key=lambda label: statistics.median(finals(of(tuned, label), "loss")),
        )
        for h in intervals
    }
    comparison = compared(config(steps), ["bsp", *best.values()], (1.0,), seeds)
    plain = finals(of(comparison, "bsp"), "loss")
    figures = [support.median("loss_H1", plain, "nats")]
    for h, label in best.items():
        losses = finals(of(comparison, label), "loss")
        support.say(f"H = {h}: {label}")
        figures.append(support.median(f"loss_H{h}", losses, "nats"))
        penalty = [ours / base - 1 for ours, base in zip(losses, plain, strict=True)]
        figures.append(support.median(f"penalty_H{h}", penalty, "share", INTERVALS[h]))
    support.finish("interval_loss", machine, figures, options.out)


if __name__ == "__main__":
    main()
