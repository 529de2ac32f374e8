"""Loss, statistics and metrics of classification tasks, those of the library and of users.

Statistics are counts and sums over rows, so adding those of several regions gives exactly the
counts of all their rows. With two classes they include two histograms of scores, from which the AUC
is computed; `geo_ray.tasks.auc` documents the bins and the bound of the error.

Shape legend: N = rows, C = classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  (torch's own convention)

from geo_ray.errors import TaskOutputError
from geo_ray.tasks.auc import auc, auc_error_bound, score_histograms
from geo_ray.tasks.base import Stats

MOST_RECALLS: Final = 8
"""Up to how many classes each one's recall is a metric."""


class Labelled(NamedTuple):
    """A batch: inputs (N, ...) and labels int64 (N,)."""

    inputs: torch.Tensor
    labels: torch.Tensor


def balanced_weights(rows_per_class: Sequence[int]) -> list[float]:
    """Return class weights with which every class counts alike, and a row counts 1 on average.

    Args:
        rows_per_class: of all regions together, as the manifest says.

    Raises:
        TaskOutputError: a class has no rows.
    """
    if not rows_per_class or min(rows_per_class) <= 0:
        raise TaskOutputError(
            f"balanced weights of classes with {list(rows_per_class)} rows are not defined",
            fix="Leave classes without rows out.",
        )
    total = sum(rows_per_class)
    return [total / (len(rows_per_class) * rows) for rows in rows_per_class]


def classification_loss(
    model: nn.Module, batch: Labelled, class_weights: Sequence[float] | None = None
) -> torch.Tensor:
    """Return the mean cross-entropy in nats; `model` maps inputs to logits (N, C).

    Args:
        model: the model.
        batch: the rows.
        class_weights: a factor per class for the losses of its rows; None: all 1. The sum is
            divided by the number of rows, and not by the sum of their weights, so that the mean
            over the batches of all regions is that over all rows. `balanced_weights` gives some.
    """
    logits_NC = model(batch.inputs)
    if class_weights is None:
        return F.cross_entropy(logits_NC, batch.labels)
    return _losses(logits_NC, batch.labels, class_weights).mean()


def classification_stats(
    model: nn.Module, batch: Labelled, class_weights: Sequence[float] | None = None
) -> Stats:
    """Return the sums over a batch that `classification_metrics` needs.

    Returns:
        "rows" (1,), "loss" (1,) summed nats, "correct" (1,), "labels" (C,) rows by label, "hits"
        (C,) those of them that are classified correctly; with two classes "positives" and
        "negatives", the histograms of their scores.

    Args:
        model: the model, in evaluation mode.
        batch: the rows.
        class_weights: as for `classification_loss`; they count in the loss alone.
    """
    with torch.no_grad():
        logits_NC = model(batch.inputs)
        losses_N = _losses(logits_NC, batch.labels, class_weights)
        is_hit_N = logits_NC.argmax(dim=1) == batch.labels
    classes = logits_NC.shape[1]
    is_label_N = (batch.labels >= 0) & (batch.labels < classes)  # others are left out of the loss
    labels_N = batch.labels[is_label_N]
    stats = {
        "rows": np.array([len(batch.labels)], np.float64),
        "loss": np.array([losses_N.double().sum().item()], np.float64),
        "correct": np.array([is_hit_N.sum().item()], np.float64),
        "labels": _counts(labels_N, classes),
        "hits": _counts(batch.labels[is_label_N & is_hit_N], classes),
    }
    if classes == 2:
        scores_N = (logits_NC[:, 1] - logits_NC[:, 0])[is_label_N].double()
        stats["positives"], stats["negatives"] = score_histograms(
            scores_N.cpu().numpy(), labels_N.cpu().numpy()
        )
    return stats


def classification_metrics(stats: Stats) -> dict[str, float]:
    """Return loss, accuracy, base_rate, recalls, and with two classes auc and auc_error.

    - "loss": nats per row.
    - "accuracy": share of rows that are classified correctly.
    - "base_rate": share of the most frequent label, the accuracy of always answering it.
    - "auc", "auc_error": see `geo_ray.tasks.auc`; left out where all rows have one label.
    - "recall_0", ...: share of a class's rows that are classified correctly; left out for classes
      without rows. With more than `MOST_RECALLS` classes "recall_mean" and "recall_least" instead.
    """
    rows = count_of(stats, "rows")
    metrics = {"loss": stats["loss"].item() / rows, "accuracy": stats["correct"].item() / rows}
    labels_C, hits_C = stats["labels"], stats["hits"]
    present = [number for number, count in enumerate(labels_C) if count > 0]
    if not present:
        return metrics
    metrics["base_rate"] = float(labels_C.max() / labels_C.sum())
    bounds = {}
    if "positives" in stats:
        area = auc(stats["positives"], stats["negatives"])
        error = auc_error_bound(stats["positives"], stats["negatives"])
        if area is not None and error is not None:
            metrics["auc"], bounds["auc_error"] = area, error
    recalls = {number: float(hits_C[number] / labels_C[number]) for number in present}
    if len(labels_C) <= MOST_RECALLS:
        metrics |= {f"recall_{number}": recall for number, recall in recalls.items()}
    else:
        metrics["recall_mean"] = sum(recalls.values()) / len(recalls)
        metrics["recall_least"] = min(recalls.values())
    return metrics | bounds


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


def _losses(
    logits_NC: torch.Tensor, labels_N: torch.Tensor, class_weights: Sequence[float] | None
) -> torch.Tensor:
    weights_C = None
    if class_weights is not None:
        weights_C = torch.tensor(class_weights, dtype=logits_NC.dtype, device=logits_NC.device)
    return F.cross_entropy(logits_NC, labels_N, weight=weights_C, reduction="none")


def _counts(labels_N: torch.Tensor, classes: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return torch.bincount(labels_N.flatten(), minlength=classes).double().cpu().numpy()
