"""Click-through rate on generated clicks whose best possible AUC is known."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from pydantic import Field
from torch import nn
from torch.nn import functional as F  # noqa: N812  (torch's own convention)

from geo_ray.config.base import StrictModel
from geo_ray.tasks.auc import auc, auc_error_bound, score_histograms
from geo_ray.tasks.base import Columns, Dataset, Stats
from geo_ray.tasks.classification import Labelled, count_of
from geo_ray.tasks.ctr_data import Clicks, generate_clicks
from geo_ray.tasks.models.ctr import DeepFM
from geo_ray.tasks.seeding import seeded
from geo_ray.tasks.tensors import to_tensor


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

        Both auc numbers are left out when all rows have the same label.
        """
        metrics = {"loss": stats["loss"].item() / count_of(stats, "rows")}
        area = auc(stats["positives"], stats["negatives"])
        error = auc_error_bound(stats["positives"], stats["negatives"])
        if area is not None and error is not None:
            metrics |= {"auc": area, "auc_error": error}
        return metrics

    def dataset(self, seed: int) -> Dataset:
        """Return rows drawn from the truth that `seed` fixes."""
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
