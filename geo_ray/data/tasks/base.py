"""The Task protocol: a model, its columns, a loss and additive evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

Columns: TypeAlias = Mapping[str, Any]
"""Column name -> array (N,), array (N, length), or `geo_ray.Ragged` of N rows."""

Batch: TypeAlias = Any
"""The result of a task's `collate`, passed unchanged to `loss` and `evaluate`."""

Stats: TypeAlias = dict[str, npt.NDArray[np.float64]]
"""Additive statistics: name -> float64 (K,). Sums over rows, which can be added over regions."""


@runtime_checkable
class Task(Protocol):
    """A model to train. Any class with these members is a task; no base class is needed.

    A task class also has a nested ``Options`` (derived from `geo_ray.Options`) and is
    built as ``Class(Options(...))``. It may have `model_buffers`, rules for values of the model
    other than trained parameters (`geo_ray.data.tasks.model_buffers`), `groups(model)`, groups of
    parameters with separate rates and decays (`geo_ray.data.tasks.groups`), hooks for its own
    optimizers and steps (`geo_ray.training.task_steps`), `parallelize(model, mesh)`, which
    distributes the model over a process group (docs/guides/groups.md), `tokenizer`, a
    tokenizer of transformers that exports contain (`geo_ray.runs.model_export`), and
    `tokens_per_row` and `flops_per_row`, the size of a row (`geo_ray.data.tasks.checked_calls`).
    Each worker sets its ``region`` and ``rank``.
    """

    @property
    def columns(self) -> Mapping[str, str]:
        """Schema of the shards: column -> "int64", "float32[64]", "string", "list<int32>"."""

    @property
    def label_column(self) -> str | None:
        """Integer column for label histograms and label-skew splits; None if there is none."""

    def model(self, seed: int) -> nn.Module:
        """Return a fresh module on the CPU, initialised from `seed` only."""

    def collate(self, columns: Columns, device: torch.device) -> Batch:
        """Turn rows (N >= 1 of each column) into a batch on `device`."""

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the mean loss over the batch: scalar, floating, differentiable."""

    def evaluate(self, model: nn.Module, batch: Batch) -> Stats:
        """Return sums over the rows of this batch, each float64 (K,)."""

    def metrics(self, stats: Stats) -> dict[str, float]:
        """Turn summed statistics into numbers such as ``{"loss": ..., "accuracy": ...}``."""


@dataclass(frozen=True)
class Dataset:
    """Training rows and held-out rows, both with the task's columns.

    A column of texts, bytes or lists of numbers is a `geo_ray.Ragged` or a Python list.
    """

    train: Columns
    heldout: Columns


@runtime_checkable
class SelfContained(Protocol):
    """A task that includes or generates its data, so that a run needs no prepared shards."""

    def dataset(self, seed: int) -> Dataset:
        """Return the data, which depends only on seed and options."""


def num_rows(columns: Columns) -> int:
    """Return N, the number of rows of a table of columns (0 without columns)."""
    return next((len(column) for column in columns.values()), 0)
