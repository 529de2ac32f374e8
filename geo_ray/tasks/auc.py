"""Area under the ROC curve from score histograms, which add over batches and regions.

Exact but for ties: two rows whose scores fall into one bin count as half ordered. With p and n the
shares of positives and negatives in a bin, the error is at most half the sum of p * n over the
bins (`auc_error_bound`), and each histogram is `BINS` numbers however many rows there are.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]

BINS = 2000
_LIMIT = 10.0  # logits beyond it (probability 4.5e-5 from 0 or 1) share the outermost bins


def score_histograms(
    logits_N: npt.NDArray[np.floating], labels_N: npt.NDArray[np.integer]
) -> tuple[Vector, Vector]:
    """Return the histograms (BINS,) of the positives' and of the negatives' scores.

    Args:
        logits_N: scores in log-odds; bins are 0.01 wide, from -10 to 10. NaN counts as 0: the loss
            of such a row is no number either, and tells of it.
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

    None if there are no positives or no negatives: it is not defined then.
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
