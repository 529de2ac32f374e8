"""Loss, statistics and metrics of classification tasks, both built-in and user-defined.

Statistics are counts and sums over rows, so the sum over several regions equals the statistics of
all their rows. With two classes they include score histograms, from which the AUC is
computed. The AUC is exact except for ties: two rows with scores in one bin count as half ordered,
so its error is at most half the sum of p * n over the bins (`auc_error_bound`), where p and n are
the fractions of all positives and negatives in a bin.

Shape legend: N = rows, C = classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  (torch's own convention)

from geo_ray.base.errors import TaskOutputError
from geo_ray.data.tasks.base import Stats


def to_tensor(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Copy an array (any shape and numeric dtype) to a tensor on `device`.

    Always a copy: columns read from a shard are read-only views of its buffer.
    """
    return torch.from_numpy(np.array(array)).to(device)


Vector = npt.NDArray[np.float64]

BINS = 2000
_LIMIT = 10.0  # logits beyond it (probability 4.5e-5 from 0 or 1) share the outermost bins


def score_histograms(
    logits_N: npt.NDArray[np.floating], labels_N: npt.NDArray[np.integer]
) -> tuple[Vector, Vector]:
    """Return the histograms (BINS,) of the positives' and of the negatives' scores.

    Args:
        logits_N: scores in log-odds; bins are 0.01 wide, from -10 to 10. NaN counts as 0: the loss
            of such a row is NaN too, which reports the problem.
        labels_N: 0 or 1.
    """
    scaled_N = (np.clip(np.nan_to_num(logits_N), -_LIMIT, _LIMIT) + _LIMIT) * (BINS / (2 * _LIMIT))
    bins_N = np.minimum(scaled_N.astype(np.int64), BINS - 1)
    positive_N = labels_N > 0
    return (
        np.bincount(bins_N[positive_N], minlength=BINS).astype(np.float64),
        np.bincount(bins_N[~positive_N], minlength=BINS).astype(np.float64),
    )


def auc(positives_K: Vector, negatives_K: Vector) -> float | None:
    """Return the probability that a positive scores above a negative (ties count half).

    None if it is undefined because there are no positives or no negatives.
    """
    total = float(positives_K.sum() * negatives_K.sum())
    if total == 0:
        return None
    below_K = np.cumsum(negatives_K) - negatives_K
    return float(positives_K @ (below_K + negatives_K / 2)) / total


def auc_error_bound(positives_K: Vector, negatives_K: Vector) -> float | None:
    """Return the largest possible |auc - exact AUC|; None where the AUC is not defined."""
    total = float(positives_K.sum() * negatives_K.sum())
    return None if total == 0 else float(positives_K @ negatives_K) / (2 * total)


MOST_RECALLS: Final = 8
"""Maximum number of classes for which each class's recall is a metric."""


class Labelled(NamedTuple):
    """A batch: inputs (N, ...) and labels int64 (N,)."""

    inputs: torch.Tensor
    labels: torch.Tensor


def balanced_weights(rows_per_class: Sequence[int]) -> list[float]:
    """Return class weights that give every class equal weight, and a row the average weight 1.

    Args:
        rows_per_class: rows of all regions by class, as in the manifest.

    Raises:
        TaskOutputError: a class has no rows.
    """
    if not rows_per_class or min(rows_per_class) <= 0:
        raise TaskOutputError(
            f"balanced weights of classes with {list(rows_per_class)} rows are not defined",
            fix="Remove classes without rows.",
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
        class_weights: a factor per class for the losses of its rows; None for all 1. The sum is
            divided by the number of rows, not by the sum of their weights, so that the mean over
            the batches of all regions equals that over all rows. See `balanced_weights`.
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
        (C,) correctly classified rows by label; with two classes "positives" and
        "negatives", the histograms of their scores.

    Args:
        model: the model, in evaluation mode.
        batch: the rows.
        class_weights: as for `classification_loss`; they affect only the loss.
    """
    with torch.no_grad():
        logits_NC = model(batch.inputs)
        losses_N = _losses(logits_NC, batch.labels, class_weights)
        is_hit_N = logits_NC.argmax(dim=1) == batch.labels
    classes = logits_NC.shape[1]
    is_label_N = (batch.labels >= 0) & (batch.labels < classes)  # the loss ignores other labels
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
    - "accuracy": fraction of rows that are classified correctly.
    - "base_rate": fraction of the most frequent label, the accuracy of always predicting it.
    - "auc", "auc_error": see `geo_ray.data.tasks.classification`; absent if all rows have one
      label.
    - "recall_0", ...: fraction of a class's rows that are classified correctly; absent for classes
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
        TaskOutputError: the count is zero, so that the mean is undefined.
    """
    count = float(stats[key].item())
    if count <= 0:
        raise TaskOutputError(
            f"evaluation statistics have no {key}", fix="Give the regions held-out rows."
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
