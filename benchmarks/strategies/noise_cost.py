"""Gradient noise: what measuring it adds to a step.

A step is what one worker computes, since a region's workers compute at the same time, and what the
parameter server does with the gradients of two: it takes their mean and applies it. Measuring adds

  worker  the squared norm in short pieces, in place of the norm that the check for what is not
          finite takes anyway; every step, and zero if it is as fast
  server  one pass over the mean gradient, every NOISE_EVERY-th step

One process, one thread of torch, few rows per worker, since with more of them a step is longer and
the share smaller. Times are the core's (user and kernel), so that other programs disturb them less.
The parts are timed by themselves: the difference of two whole steps would be lost in their noise.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.common import support
from geo_ray.base.types import Span
from geo_ray.data.tasks.bytelm import ByteLM
from geo_ray.strategies.bsp import Bsp
from geo_ray.training.noise import NOISE_EVERY
from geo_ray.training.optimizers import Momentum
from geo_ray.training.parameters import count_parameters, square_norm
from geo_ray.training.shard import Contribution, Shard
from geo_ray.training.worker import Worker

SIZES = ("0.1M", "10M")
WORKERS = 2
ROWS = 8  # of one worker
PASSES = 5  # over the gradient in one timing: one alone is short
TARGET = "<= 0.01"


def main() -> None:
    options = support.parse(__doc__)
    machine = support.hardware()
    torch.set_num_threads(1)
    figures = []
    for size in SIZES:
        support.say(f"bytelm {size}")
        figures += cost(size, rounds=2 if options.quick else 15)
    support.finish("noise_cost", machine, figures, options.out)


def cost(size: str, rounds: int) -> list[support.Figure]:
    """Seconds of a step and of measuring, and their ratio."""
    task = ByteLM(ByteLM.Options(size=size, max_bytes=200_000))
    columns = {name: column[:ROWS] for name, column in task.dataset(0).train.items()}
    num_params = count_parameters(task.model(0))
    workers = [Worker(task, *buffers(num_params), region="here", seed=0) for _ in range(WORKERS)]
    shard = Shard(torch.zeros(num_params), Momentum(), Bsp(), alone=True)
    parts = [Contribution(rank, ROWS) for rank in range(WORKERS)]
    mean_P = torch.zeros(num_params)
    found: dict[str, list[float]] = {}

    def note(name: str, action: Callable[[], object], times: int = 1) -> None:
        began_s = time.thread_time()
        for _ in range(times):
            action()
        found.setdefault(name, []).append((time.thread_time() - began_s) / times)

    for number in range(-1, rounds):
        for worker in workers:
            note("compute", lambda w=worker, n=number: w.step(columns, Span((n + 1) * ROWS, ROWS)))
        for rank, worker in enumerate(workers):
            shard.put(rank, worker.grad_P)
        note("apply", lambda: shard.apply(parts))
        grad_P = workers[0].grad_P
        mean_P.copy_(grad_P)  # somewhere else in memory
        note("norm", lambda g=grad_P: float(torch.linalg.vector_norm(g)), PASSES)
        note("square", lambda g=grad_P: square_norm(g), PASSES)
        note("mean", lambda: square_norm(mean_P), PASSES)
    return _figures(size.lower(), {name: times_s[1:] for name, times_s in found.items()})


def buffers(num_params: int) -> tuple[Any, Any]:
    """Parameters that a model can start from, and room for its gradient, fp32 (P,) each."""
    random = torch.Generator().manual_seed(0)
    return 0.02 * torch.randn(num_params, generator=random), torch.zeros(num_params)


def _figures(size: str, found: dict[str, list[float]]) -> list[support.Figure]:
    middle = {name: statistics.median(times_s) for name, times_s in found.items()}
    step_s = middle["compute"] + middle["apply"]
    worker_s = max(0.0, middle["square"] - middle["norm"])
    server_s = middle["mean"] / NOISE_EVERY
    return [
        support.Figure(f"{size}_step", step_s, "s"),
        support.Figure(f"{size}_worker", worker_s, "s"),
        support.Figure(f"{size}_server", server_s, "s"),
        support.Figure(
            f"{size}_share", (worker_s + server_s) / step_s, "ratio", TARGET, baseline=step_s
        ),
    ]


if __name__ == "__main__":
    main()
