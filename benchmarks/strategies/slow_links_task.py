"""51.2 M parameters whose gradient costs next to nothing: what `slow_links.py` trains.

800 tables of 64,000 numbers, as an embedding has them. A row names one table and a number that the
sum over it, with fixed signs, shall have. So a batch touches a few tables only and its gradient is
a few hundred kB of work, while the parameters that strategies, codecs and links have to carry are
204.8 MB. After some hundred steps every table has moved in every region.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from geo_ray.base.model import StrictModel
from geo_ray.base.random_state import seeded
from geo_ray.data.tasks.base import Columns, Dataset, Stats
from geo_ray.data.tasks.classification import to_tensor

LENGTH = 64_000
ROWS, HELDOUT_ROWS = 16_384, 64


class Rows(NamedTuple):
    """Which tables, and what they shall give: (N,) each."""

    tables_N: Tensor
    targets_N: Tensor


class Tables:
    """Regression on sums over tables."""

    class Options(StrictModel):
        """Options of `Tables`."""

        tables: int = Field(800, ge=1, description="How many; each has 64,000 parameters.")

    columns: Mapping[str, str] = {"table": "int64", "target": "float32"}
    label_column: str | None = None

    def __init__(self, options: Options) -> None:
        self._tables = options.tables
        self._signs_L = torch.ones(LENGTH)
        self._signs_L[1::2] = -1.0

    def model(self, seed: int) -> nn.Module:
        """Return the tables."""
        with seeded(seed):
            return nn.ParameterList(torch.randn(LENGTH) / LENGTH for _ in range(self._tables))

    def collate(self, columns: Columns, device: torch.device) -> Rows:
        """Return numbers of tables (N,) int64 and targets (N,) float32."""
        return Rows(to_tensor(columns["table"], device), to_tensor(columns["target"], device))

    def loss(self, model: nn.Module, batch: Rows) -> Tensor:
        """Return the mean squared error."""
        return self._errors(model, batch).square().mean()

    def evaluate(self, model: nn.Module, batch: Rows) -> Stats:
        """Return the count of rows and the sum of squared errors."""
        errors_N = self._errors(model, batch)
        return {
            "rows": np.array([len(errors_N)], np.float64),
            "loss": np.array([errors_N.square().sum().item()], np.float64),
        }

    def metrics(self, stats: Stats) -> dict[str, float]:
        """Return the mean squared error as loss."""
        return {"loss": stats["loss"].item() / stats["rows"].item()}

    def dataset(self, seed: int) -> Dataset:
        """Return rows about all tables in turn."""
        draw = np.random.default_rng(seed)
        targets_T = draw.standard_normal(self._tables).astype(np.float32)

        def rows(count: int) -> Columns:
            tables_N = np.arange(count, dtype=np.int64) % self._tables
            return {"table": tables_N, "target": targets_T[tables_N]}

        return Dataset(train=rows(ROWS), heldout=rows(HELDOUT_ROWS))

    def _errors(self, model: nn.Module, batch: Rows) -> Tensor:
        assert isinstance(model, nn.ParameterList)
        sums = [(model[int(i)] * self._signs_L).sum() for i in batch.tables_N]
        return torch.stack(sums) - batch.targets_N
