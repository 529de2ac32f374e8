"""Loss, statistics and metrics that the classification tasks share."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  (torch's own convention)

from geo_ray.errors import TaskOutputError
from geo_ray.tasks.base import Stats


class Labelled(NamedTuple):
    """A batch: inputs (N, ...) and labels int64 (N,)."""

    inputs: torch.Tensor
    labels: torch.Tensor


def classification_loss(model: nn.Module, batch: Labelled) -> torch.Tensor:
    """Return the mean cross-entropy in nats; `model` maps inputs to logits (N, classes)."""
    return F.cross_entropy(model(batch.inputs), batch.labels)


def classification_stats(model: nn.Module, batch: Labelled) -> Stats:
    """Return {"rows": (1,), "loss": (1,) summed nats, "correct": (1,)}."""
    with torch.no_grad():
        logits_NC = model(batch.inputs)
        losses_N = F.cross_entropy(logits_NC, batch.labels, reduction="none")
        correct = (logits_NC.argmax(dim=1) == batch.labels).sum()
    return {
        "rows": np.array([len(batch.labels)], np.float64),
        "loss": np.array([losses_N.double().sum().item()], np.float64),
        "correct": np.array([correct.item()], np.float64),
    }


def classification_metrics(stats: Stats) -> dict[str, float]:
    """Return {"loss": nats per row, "accuracy": in [0, 1]}."""
    rows = count_of(stats, "rows")
    return {"loss": stats["loss"].item() / rows, "accuracy": stats["correct"].item() / rows}


def count_of(stats: Stats, key: str) -> float:
    """Return the count stored under `key`.

    Raises:
        TaskOutputError: the count is zero, so there is nothing to take a mean of.
    """
    count = float(stats[key].item())
    if count <= 0:
        raise TaskOutputError(
            f"evaluation statistics count no {key}", fix="Give the regions held-out rows."
        )
    return count
