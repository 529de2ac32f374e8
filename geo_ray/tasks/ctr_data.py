"""Generated clicks with a known truth: a logistic model with pairwise interactions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_FACTORS = 4
_SINGLE_STD = 0.6
_PAIR_STD = 1.2  # of the summed interactions, so that a linear model is clearly not enough
_OFFSET = -1.5  # fewer clicks than non-clicks, as in advertising


@dataclass(frozen=True)
class Clicks:
    """Generated rows.

    Attributes:
        fields: values (N, F).
        labels: (N,) 0 or 1.
        logits: (N,) true log-odds of a click.
    """

    fields: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    logits: npt.NDArray[np.float64]


def generate_clicks(seed: int, rows: int, fields: int, vocabulary: int) -> Clicks:
    """Draw a truth and rows from it; everything follows from the arguments.

    A field's values are skewed as real ones are: value v has weight 1 / (v + 1). A click has
    log-odds offset + sum of the fields' own effects + sum over pairs of fields of the dot product
    of their values' hidden vectors.

    Args:
        seed: of the truth and of the rows.
        rows: N.
        fields: F, at least 2.
        vocabulary: values 0 .. vocabulary - 1 of each field.
    """
    rng = np.random.default_rng([seed, 0xC71C])
    single_FV = rng.normal(0, _SINGLE_STD / np.sqrt(fields), (fields, vocabulary))
    pairs = fields * (fields - 1) / 2
    hidden_std = (_PAIR_STD**2 / (pairs * _FACTORS)) ** 0.25
    hidden_FVK = rng.normal(0, hidden_std, (fields, vocabulary, _FACTORS))
    weight_V = 1 / np.arange(1, vocabulary + 1)
    drawn_NF = rng.choice(vocabulary, size=(rows, fields), p=weight_V / weight_V.sum())
    fields_NF = drawn_NF.astype(np.int64)
    field_F = np.arange(fields)
    hidden_NFK = hidden_FVK[field_F, fields_NF]
    # The sum over pairs is half of (square of the sum - sum of the squares).
    pair_N = (hidden_NFK.sum(axis=1) ** 2 - (hidden_NFK**2).sum(axis=1)).sum(axis=1) / 2
    logit_N = _OFFSET + single_FV[field_F, fields_NF].sum(axis=1) + pair_N
    label_N = (rng.random(rows) < 1 / (1 + np.exp(-logit_N))).astype(np.int64)
    return Clicks(fields_NF, label_N, logit_N)
