"""A byte-level language model on the source text of Python's standard library."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import nn
from torch.nn import functional as F  # noqa: N812  (torch's own convention)

from geo_ray.config.base import StrictModel
from geo_ray.errors import TaskLoadError
from geo_ray.tasks.base import Columns, Dataset, Stats
from geo_ray.tasks.bytelm_text import cut, stdlib_texts
from geo_ray.tasks.classification import count_of
from geo_ray.tasks.groups import ParameterGroup, undecayed
from geo_ray.tasks.models.bytelm import VOCABULARY, ByteTransformer
from geo_ray.tasks.seeding import seeded
from geo_ray.tasks.tensors import to_tensor


class Shape(NamedTuple):
    """Size of a transformer: width, blocks, heads, and context in bytes."""

    dim: int
    layers: int
    heads: int
    context: int


PRESETS: Mapping[str, Shape] = {
    "0.1M": Shape(dim=64, layers=2, heads=4, context=64),
    "1M": Shape(dim=128, layers=5, heads=4, context=128),
    "10M": Shape(dim=320, layers=8, heads=5, context=256),
    "50M": Shape(dim=640, layers=10, heads=10, context=256),
}
"""Named sizes, by their rough number of parameters."""


class ByteLM:
    """Next-byte prediction with a small GPT."""

    class Options(StrictModel):
        """Options of `bytelm`; a number given by itself overrides that of the preset."""

        size: Literal["0.1M", "1M", "10M", "50M"] = Field(
            default="1M", description="Preset by rough number of parameters."
        )
        dim: int | None = Field(default=None, ge=1, description="Width of the residual stream.")
        layers: int | None = Field(default=None, ge=1, description="Transformer blocks.")
        heads: int | None = Field(default=None, ge=1, description="Attention heads; divide dim.")
        context: int | None = Field(default=None, ge=1, description="Bytes seen at once.")
        decay: Literal["all", "matrices"] = Field(
            default="all",
            description="Which parameters `optimizer.weight_decay` is for; matrices: not biases and"
            " norms.",
        )
        max_bytes: int = Field(
            default=2_000_000, ge=1000, description="Cap of the text, a tenth of it held out."
        )

    label_column: str | None = None

    def __init__(self, options: Options) -> None:
        preset = PRESETS[options.size]
        given = {key: getattr(options, key) for key in Shape._fields}
        self.shape = preset._replace(**{key: n for key, n in given.items() if n is not None})
        self._max_bytes = options.max_bytes
        self._decay = options.decay
        if self.shape.dim % self.shape.heads:
            raise TaskLoadError(
                f"option 'heads' of task bytelm: {self.shape.heads} does not divide"
                f" dim {self.shape.dim}",
                fix="Choose a dim that is a multiple of heads.",
            )
        self.columns: Mapping[str, str] = {"tokens": f"uint8[{self.shape.context + 1}]"}

    def model(self, seed: int) -> nn.Module:
        """Return the transformer: bytes (B, T) int64 -> logits (B, T, 256)."""
        with seeded(seed):
            return ByteTransformer(*self.shape)

    def groups(self, model: nn.Module) -> list[ParameterGroup]:
        """Return biases and norms apart if they are to have no decay."""
        return [undecayed(model)] if self._decay == "matrices" else []

    def collate(self, columns: Columns, device: torch.device) -> torch.Tensor:
        """Return tokens (B, context + 1) int64."""
        return to_tensor(columns["tokens"], device).long()

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy in nats per byte."""
        logits_BTV = model(batch[:, :-1])
        return F.cross_entropy(logits_BTV.reshape(-1, VOCABULARY), batch[:, 1:].reshape(-1))

    def evaluate(self, model: nn.Module, batch: torch.Tensor) -> Stats:
        """Return {"bytes", "loss" (summed nats), "correct"}, each (1,)."""
        targets_M = batch[:, 1:].reshape(-1)
        with torch.no_grad():
            logits_MV = model(batch[:, :-1]).reshape(-1, VOCABULARY)
            losses_M = F.cross_entropy(logits_MV, targets_M, reduction="none")
            correct = (logits_MV.argmax(dim=1) == targets_M).sum()
        return {
            "bytes": np.array([len(targets_M)], np.float64),
            "loss": np.array([losses_M.double().sum().item()], np.float64),
            "correct": np.array([correct.item()], np.float64),
        }

    def metrics(self, stats: Stats) -> dict[str, float]:
        """Return loss (nats per byte), bits_per_byte and accuracy of the next byte."""
        count = count_of(stats, "bytes")
        loss = stats["loss"].item() / count
        return {
            "loss": loss,
            "bits_per_byte": loss / math.log(2),
            "accuracy": stats["correct"].item() / count,
        }

    def dataset(self, seed: int) -> Dataset:
        """Return sequences of the library's text, whatever the seed; held-out files are others.

        Raises:
            TaskLoadError: no library sources, or fewer bytes than one sequence.
        """
        train, heldout = (cut(t, self.shape.context) for t in stdlib_texts(self._max_bytes))
        if not len(train) or not len(heldout):
            raise TaskLoadError(
                f"option 'max_bytes' of task bytelm: {self._max_bytes} bytes are too few for"
                f" sequences of {self.shape.context + 1} bytes",
                fix="Raise max_bytes or lower context.",
            )
        return Dataset(train={"tokens": train}, heldout={"tokens": heldout})
