"""Plain PyTorch DiLoCo with several workers per region, each with its own AdamW.

Written from `docs/guides/workers.md`: workers of a region train apart until the exchange; their
mean by rows is the region's model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from geo_ray.data.tasks.base import Columns, Task

Read = Callable[[int, int], Columns]  # first row, number of rows


def flat(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


class PlainWorker:
    """A model and its optimizer."""

    def __init__(self, task: Task, seed: int, **adamw: Any) -> None:
        self.task, self.module = task, task.model(seed)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), **adamw)

    def step(self, columns: Columns) -> None:
        self.optimizer.zero_grad()
        batch = self.task.collate(columns, torch.device("cpu"))
        self.task.loss(self.module.train(), batch).backward()
        self.optimizer.step()

    def load(self, params_P: Tensor) -> None:
        nn.utils.vector_to_parameters(params_P.clone(), self.module.parameters())


def plain_diloco(
    task: Task,
    seed: int,
    readers: Mapping[str, Read],
    rows: Sequence[int],
    *,
    steps: int,
    interval: int,
    outer_lr: float,
    momentum: float,
    **adamw: Any,
) -> Tensor:
    """The model after ``steps`` steps; ``rows`` are those of a worker's step, by rank."""
    outer_P = flat(task.model(seed))
    momentum_P = torch.zeros_like(outer_P)
    regions = {name: [PlainWorker(task, seed, **adamw) for _ in rows] for name in readers}
    shares = [count / sum(rows) for count in rows]
    at = 0
    for step in range(1, steps + 1):
        for name, workers in regions.items():
            first = at
            for worker, count in zip(workers, rows, strict=True):
                worker.step(readers[name](first, count))
                first += count
        at += sum(rows)
        if step % interval and step < steps:
            continue
        changes = []
        for workers in regions.values():
            pairs = zip(workers, shares, strict=True)
            changes.append(outer_P - sum(share * flat(w.module) for w, share in pairs))
        mean_P = sum(changes) / len(changes)
        momentum_P = momentum * momentum_P + mean_P
        outer_P = outer_P - outer_lr * (mean_P + momentum * momentum_P)
        for workers in regions.values():
            for worker in workers:
                worker.load(outer_P)
    return outer_P
