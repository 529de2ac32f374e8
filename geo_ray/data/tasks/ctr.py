"""Built-in task: click-through rate on generated clicks whose best possible AUC is known.

Clicks follow a logistic model with pairwise interactions. The model is DeepFM: a factorisation
machine and a small network with shared embeddings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field
from torch import nn
from torch.nn import functional as F  # noqa: N812  (torch's own convention)

from geo_ray.base.model import StrictModel
from geo_ray.base.random_state import seeded
from geo_ray.data.tasks.base import Columns, Dataset, Stats
from geo_ray.data.tasks.classification import (
    Labelled,
    auc,
    auc_error_bound,
    count_of,
    score_histograms,
    to_tensor,
)

_FACTORS = 4
_SINGLE_STD = 0.6
_PAIR_STD = 1.2  # of the summed interactions; large enough that a linear model is clearly worse
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
    """Draw a true model and rows from it, determined by the arguments.

    A field's values are skewed like real ones: value v has weight 1 / (v + 1). A click has
    log-odds offset + sum of the fields' own effects + sum over pairs of fields of the dot product
    of their values' hidden vectors.

    Args:
        seed: seed of the true model and of the rows.
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


_INIT_STD = 0.05


class DeepFM(nn.Module):
    """Maps values of F categorical fields (N, F) int64 to click log-odds (N,)."""

    offsets: torch.Tensor

    def __init__(self, fields: int, vocabulary: int, dim: int, hidden: int) -> None:
        super().__init__()
        # One table for all fields; a constant, so it is not part of the trained state.
        self.register_buffer("offsets", torch.arange(fields) * vocabulary, persistent=False)
        self.bias = nn.Parameter(torch.zeros(()))
        self.single = nn.Embedding(fields * vocabulary, 1)
        self.embed = nn.Embedding(fields * vocabulary, dim)
        self.deep = nn.Sequential(
            nn.Linear(fields * dim, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, 1),
        )
        nn.init.zeros_(self.single.weight)
        nn.init.normal_(self.embed.weight, std=_INIT_STD)

    def forward(self, fields_NF: torch.Tensor) -> torch.Tensor:
        """Return log-odds (N,)."""
        rows_NF = fields_NF + self.offsets
        hidden_NFD = self.embed(rows_NF)
        # The sum over pairs is half of (square of the sum - sum of the squares).
        pair_ND = hidden_NFD.sum(dim=1).square() - hidden_NFD.square().sum(dim=1)
        single_N = self.single(rows_NF).sum(dim=(1, 2))
        deep_N = self.deep(hidden_NFD.flatten(1)).squeeze(1)
        logits_N: torch.Tensor = self.bias + single_N + pair_ND.sum(dim=1) / 2 + deep_N
        return logits_N


class Ctr:
    """Binary classification of categorical rows with a DeepFM."""

    class Options(StrictModel):
        """Options of `ctr`."""

        rows: int = Field(default=40_000, ge=10, description="Rows to train on.")
        heldout_rows: int = Field(default=10_000, ge=10, description="Rows held out.")
        fields: int = Field(default=8, ge=2, le=64, description="Categorical fields of a row.")
        vocabulary: int = Field(default=20, ge=2, description="Values that a field can have.")
        dim: int = Field(default=8, ge=1, description="Width of a value's embedding.")
        hidden: int = Field(default=32, ge=1, description="Width of the two hidden layers.")

    label_column: str | None = "label"

    def __init__(self, options: Options) -> None:
        self._options = options
        self.columns: Mapping[str, str] = {"fields": f"int64[{options.fields}]", "label": "int64"}

    def model(self, seed: int) -> nn.Module:
        """Return the DeepFM: fields (N, F) int64 -> log-odds (N,)."""
        o = self._options
        with seeded(seed):
            return DeepFM(o.fields, o.vocabulary, o.dim, o.hidden)

    def collate(self, columns: Columns, device: torch.device) -> Labelled:
        """Return fields (N, F) and labels (N,), both int64."""
        return Labelled(to_tensor(columns["fields"], device), to_tensor(columns["label"], device))

    def loss(self, model: nn.Module, batch: Labelled) -> torch.Tensor:
        """Return the mean logistic loss in nats."""
        logits_N: torch.Tensor = model(batch.inputs)
        return F.binary_cross_entropy_with_logits(logits_N, batch.labels.to(logits_N.dtype))

    def evaluate(self, model: nn.Module, batch: Labelled) -> Stats:
        """Return {"rows", "loss" (summed nats)}, each (1,), and two score histograms (BINS,)."""
        with torch.no_grad():
            logits_N: torch.Tensor = model(batch.inputs)
            losses_N = F.binary_cross_entropy_with_logits(
                logits_N, batch.labels.to(logits_N.dtype), reduction="none"
            )
        positives_K, negatives_K = score_histograms(
            logits_N.double().cpu().numpy(), batch.labels.cpu().numpy()
        )
        return {
            "rows": np.array([len(losses_N)], np.float64),
            "loss": np.array([losses_N.double().sum().item()], np.float64),
            "positives": positives_K,
            "negatives": negatives_K,
        }

    def metrics(self, stats: Stats) -> dict[str, float]:
        """Return loss (nats), auc and auc_error, a bound of the auc's error by binning.

        Both auc numbers are absent if all rows have the same label.
        """
        metrics = {"loss": stats["loss"].item() / count_of(stats, "rows")}
        area = auc(stats["positives"], stats["negatives"])
        error = auc_error_bound(stats["positives"], stats["negatives"])
        if area is not None and error is not None:
            metrics |= {"auc": area, "auc_error": error}
        return metrics

    def dataset(self, seed: int) -> Dataset:
        """Return rows drawn from the true model of `seed`."""
        clicks, rows = self._clicks(seed), self._options.rows
        return Dataset(
            train={"fields": clicks.fields[:rows], "label": clicks.labels[:rows]},
            heldout={"fields": clicks.fields[rows:], "label": clicks.labels[rows:]},
        )

    def bayes_auc(self, seed: int) -> float | None:
        """Return the AUC of the true log-odds on the held-out rows of `dataset(seed)`.

        No model has a higher one in expectation. On the drawn labels a model may exceed it by
        chance, by about ``1 / sqrt(clicks)``. None if all held-out rows have the same label.
        """
        clicks, rows = self._clicks(seed), self._options.rows
        return auc(*score_histograms(clicks.logits[rows:], clicks.labels[rows:]))

    def _clicks(self, seed: int) -> Clicks:
        o = self._options
        return generate_clicks(seed, o.rows + o.heldout_rows, o.fields, o.vocabulary)
