"""Means of changes that point in different directions.

Changes of several regions over many steps are nearly orthogonal, so that their plain mean is only
``1/sqrt(M)`` as long as they are. The mean by direction has their mean direction and mean length.

Source: RDA of Decoupled DiLoCo, from secondary summaries; reconstructed.

Shape legend: P = parameters of the model, or of a fragment.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

_CANCELLED: Final = 1e-5  # of unit directions' weighted sum


def combined(changes: Sequence[Tensor], weights: Sequence[float], *, by_direction: bool) -> Tensor:
    """The weighted mean of changes, plain or by direction.

    Args:
        changes: at least one, fp32 (P,) each; they stay as they are.
        weights: at least one of them above 0.
        by_direction: changes that are zero then have no direction; if all are, or if they cancel
            out, it is the plain mean.

    Returns:
        A new fp32 tensor (P,).
    """
    shares = [weight / sum(weights) for weight in weights]
    norms = [float(torch.linalg.vector_norm(change_P)) for change_P in changes]
    total_P = torch.zeros_like(changes[0])
    for change_P, share, norm in zip(changes, shares, norms, strict=True):
        if not by_direction:
            total_P.add_(change_P, alpha=share)
        elif norm > 0:
            total_P.add_(change_P, alpha=share / norm)
    length = float(torch.linalg.vector_norm(total_P))
    if by_direction and length < _CANCELLED:  # no direction: rounding would be blown up
        return combined(changes, weights, by_direction=False)
    if by_direction:
        mean_norm = sum(share * norm for share, norm in zip(shares, norms, strict=True))
        total_P.mul_(mean_norm / length)
    return total_P
