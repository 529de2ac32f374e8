"""One region's share of the work of `peers.py`, whatever synchronises it: model, rows, clock.

Runs in the peers' own environment: it may import geo_ray's tasks, which need torch, numpy and
pydantic, and nothing that needs Ray.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TextIO

import numpy as np
import torch
from torch import nn

from benchmarks.peers.peers_task import PeersTask


@dataclass(frozen=True, slots=True)
class Workload:
    """What every system trains, and how long.

    Attributes:
        steps: local steps of every region.
        interval: local steps between two synchronisations.
        batch_size: rows per region and step.
        step_s: what a step is padded to; an evaluation before it counts into it.
        lr: of the inner AdamW.
        outer_lr: of the outer optimizer, where the system has one.
        outer_momentum: of the same.
        rounds_per_eval: synchronisations between two evaluations.
        heldout_rows: of all regions together.
        max_bytes: text to train on.
        dim: width of the model.
        layers: its blocks.
        context: bytes that it sees at once.
    """

    steps: int
    interval: int
    batch_size: int
    step_s: float
    lr: float
    outer_lr: float
    outer_momentum: float
    rounds_per_eval: int
    heldout_rows: int
    max_bytes: int
    dim: int
    layers: int
    context: int

    @property
    def task_options(self) -> dict[str, Any]:
        """Options of `PeersTask`."""
        return {
            "dim": self.dim,
            "layers": self.layers,
            "heads": 4,
            "context": self.context,
            "max_bytes": self.max_bytes,
            "heldout_rows": self.heldout_rows,
        }

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


class Region:
    """A region's model and rows.

    Args:
        workload: what to train.
        index: which of the regions this is.
        regions: how many there are.
        seed: of the model and the order of the rows.
    """

    def __init__(self, workload: Workload, index: int, regions: int, seed: int) -> None:
        self.workload = workload
        self.task = PeersTask(PeersTask.Options(**workload.task_options))
        self.model: nn.Module = self.task.model(seed)  # alike in all regions
        rows = self.task.dataset(seed)
        self._train = rows.train["tokens"][index::regions]
        self._heldout = rows.heldout["tokens"][index::regions]
        self._random = np.random.default_rng((seed, index))
        self._evals: list[tuple[int, int, float, float, float]] = []

    def train(
        self,
        optimizer: Any,
        rounds: Callable[[], int],
        beyond: int = 0,
    ) -> dict[str, Any]:
        """Train all steps, and evaluate just after rounds: regions agree best then.

        Args:
            optimizer: has `zero_grad` and `step`.
            rounds: synchronisations of the whole model so far.
            beyond: steps after the end that count nowhere; others may need this region for them.

        Returns:
            When it began and ended, and every evaluation: round, step, time of day, summed loss,
            bytes.
        """
        work = self.workload
        began_s, next_round = time.time(), work.rounds_per_eval
        for step, tokens in zip(range(work.steps + beyond), self._batches(), strict=False):
            until_s = time.monotonic() + work.step_s
            if step == work.steps:
                ended_s = self._evaluate(rounds(), step)
            elif step < work.steps and rounds() >= next_round:
                self._evaluate(rounds(), step)
                next_round = rounds() + work.rounds_per_eval
            optimizer.zero_grad()
            loss = self.task.loss(self.model, tokens)
            loss.backward()  # type: ignore[no-untyped-call]
            # As in geo_ray the gradient is padded; the optimizer's step, and what it waits for,
            # come on top.
            time.sleep(max(0.0, until_s - time.monotonic()))
            optimizer.step()
        if not beyond:
            ended_s = self._evaluate(rounds(), work.steps)
        return {
            "began_unix_s": began_s,
            "ended_unix_s": ended_s,
            "evals": self._evals,
            "rounds": rounds(),
        }

    def _batches(self) -> Iterator[torch.Tensor]:
        size, device = self.workload.batch_size, torch.device("cpu")
        while True:
            order = self._random.permutation(len(self._train))
            for start in range(0, len(order) - size + 1, size):
                picked = self._train[order[start : start + size]]
                yield self.task.collate({"tokens": picked}, device)

    def _evaluate(self, number: int, step: int) -> float:
        tokens = self.task.collate({"tokens": self._heldout}, torch.device("cpu"))
        stats = self.task.evaluate(self.model, tokens)
        now_s = time.time()
        self._evals.append((number, step, now_s, stats["loss"].item(), stats["bytes"].item()))
        return now_s


class Node(Protocol):
    """What takes orders in a region's process."""

    def open(self) -> dict[str, Any]:
        """Listen; say where."""

    def connect(self, address: Any) -> dict[str, Any]:
        """Find the others, where the first region listens."""

    def train(self) -> dict[str, Any]:
        """Train; say how it went."""

    def close(self) -> dict[str, Any]:
        """Leave nothing behind."""


def serve(make: Callable[[Mapping[str, Any]], Node]) -> None:
    """Read who this is, then orders, from standard input; answer each with a line."""
    answers = _own_output()
    torch.set_num_threads(1)
    node = make(json.loads(sys.stdin.readline()))
    for line in sys.stdin:
        order = json.loads(line)
        answer = getattr(node, order.pop("do"))(**order)
        print(json.dumps(answer), file=answers, flush=True)


def _own_output() -> TextIO:
    """Standard output for answers alone; what libraries print goes to standard error."""
    own = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return own
