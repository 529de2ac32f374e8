"""Groups of sites with like data, from what their updates look like. No data leaves a site.

The updates of one round, all from the same parameters, are projected to a few hundred numbers each
(signs and buckets drawn from a seed: a count sketch, which keeps angles), made unit vectors,
reduced to their principal components, and clustered by K-means; the number of groups is the one
with the best silhouette. With fewer than four sites there is one group.

Updates tell of labels, so grouping is as private as sending updates is, and not more.

Source: FedGSync's abstract (gradient principal components, approximate K-means groups); the rest is
reconstructed.

Shape legend: P = parameters of the model; N = sites; D = numbers of a sketch; Q = components.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

_SKETCH: Final = 512
_FEWEST: Final = 4
_MOST_COMPONENTS: Final = 8
_VARIANCE: Final = 0.9
_RESTARTS: Final = 10
_TOLERABLE: Final = 0.1  # a silhouette below that says that there are no groups


def sketch(change_P: Tensor, seed: int) -> Tensor:
    """A vector's count sketch: fp32 (D,), the same for the same seed and P."""
    generator = torch.Generator().manual_seed(seed)
    buckets_P = torch.randint(_SKETCH, change_P.shape, generator=generator)
    signs_P = torch.randint(2, change_P.shape, generator=generator) * 2 - 1
    return torch.zeros(_SKETCH).index_add_(0, buckets_P, change_P * signs_P)


def group(sketches: Sequence[Tensor], most: int, seed: int) -> list[int]:
    """A group number for each site; numbers go from 0 in the order of appearance.

    Args:
        sketches: of the sites' updates, (D,) each.
        most: groups at most.
        seed: of K-means.
    """
    if len(sketches) < _FEWEST:
        return [0] * len(sketches)
    # Here, since it takes as long to import as torch, and every command imports every strategy.
    from sklearn.cluster import k_means
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.metrics import silhouette_score

    components_NQ = principal_components(torch.stack(list(sketches)).double())
    best, labels = _TOLERABLE, np.zeros(len(sketches), dtype=int)
    for count in range(2, min(most, len(sketches) // 2) + 1):
        with warnings.catch_warnings():  # fewer distinct sites than groups: no such grouping
            warnings.simplefilter("ignore", ConvergenceWarning)
            _, found, _ = k_means(components_NQ, count, n_init=_RESTARTS, random_state=seed)
        if len(set(found)) < count:
            continue
        score = float(silhouette_score(components_NQ, found))
        if score > best:
            best, labels = score, found
    order = list(dict.fromkeys(labels.tolist()))
    return [order.index(label) for label in labels.tolist()]


def matched(before: Sequence[int], now: Sequence[int]) -> list[int]:
    """The groups of ``now`` under numbers of ``before``: as many sites as can be keep theirs.

    A group that has no counterpart gets the lowest number that is free.

    Args:
        before: a group number for each site.
        now: the same, of another grouping of the same sites.
    """
    from scipy.optimize import linear_sum_assignment  # slow to import, as above

    shared = np.zeros((max(now) + 1, max(before) + 1))
    for new, old in zip(now, before, strict=True):
        shared[new, old] += 1
    pairs = zip(*linear_sum_assignment(shared, maximize=True), strict=True)
    numbers = {int(new): int(old) for new, old in pairs if shared[new, old] > 0}
    free = (number for number in range(len(now) + max(before) + 1) if number not in before)
    return [numbers[new] if new in numbers else numbers.setdefault(new, next(free)) for new in now]


def principal_components(rows_ND: Tensor) -> np.ndarray:
    """Unit rows in as few principal directions as hold most of their variance (N, Q)."""
    norms_N1 = torch.linalg.vector_norm(rows_ND, dim=1, keepdim=True).clamp_min(1e-30)
    unit_ND = rows_ND / norms_N1
    centred_ND = unit_ND - unit_ND.mean(dim=0)
    u_NN, s_N, _ = torch.linalg.svd(centred_ND, full_matrices=False)
    share_N = torch.cumsum(s_N**2, 0) / (s_N**2).sum().clamp_min(1e-30)
    count = int((share_N < _VARIANCE).sum()) + 1
    count = min(count, _MOST_COMPONENTS, len(rows_ND) - 1)
    return np.asarray((u_NN[:, :count] * s_N[:count]).numpy())
