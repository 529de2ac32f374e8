"""Built-in task: a byte-level language model trained on the source text of the standard library.

The model is a decoder-only transformer with pre-LayerNorm, learned positions and tied embeddings.
"""

from __future__ import annotations

import hashlib
import math
import os
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field
from torch import nn
from torch.nn import functional as F  # noqa: N812  (torch's own convention)

from geo_ray.base.errors import TaskLoadError
from geo_ray.base.model import StrictModel
from geo_ray.base.random_state import seeded
from geo_ray.data.tasks.base import Columns, Dataset, Stats
from geo_ray.data.tasks.classification import count_of, to_tensor
from geo_ray.data.tasks.groups import ParameterGroup, undecayed

_SKIPPED = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "encodings"}
)
# Excluded because tests are large and unusual, and encodings are tables.
_HELDOUT_ONE_IN = 10


def stdlib_texts(max_bytes: int) -> tuple[bytes, bytes]:
    """Return (training text, held-out text) from distinct files.

    Digests of the file names determine each file's part and order. They are fixed for
    one release of Python, and also a small `max_bytes` samples the whole library.

    Args:
        max_bytes: maximum size of both texts together; a tenth of it is held-out text.

    Raises:
        TaskLoadError: the interpreter has no library sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    names = {path.relative_to(root).as_posix(): path for path in _sources(root)}
    parts: tuple[list[Path], list[Path]] = ([], [])
    for digest, name in sorted((_digest(name), name) for name in names):
        parts[digest % _HELDOUT_ONE_IN == 0].append(names[name])
    heldout_bytes = max_bytes // _HELDOUT_ONE_IN
    train, heldout = (
        _read(parts[0], max_bytes - heldout_bytes),
        _read(parts[1], heldout_bytes),
    )
    if not train or not heldout:
        raise TaskLoadError(
            f"the standard library at {root} has no .py sources to train on",
            fix="Use a Python whose library is installed as files.",
        )
    return train, heldout


def cut(text: bytes, context: int) -> npt.NDArray[np.uint8]:
    """Cut text into rows uint8 (N, context + 1); adjacent rows share a byte.

    The shared byte is input to one row and target of the other, so each byte is predicted once. A
    short tail is dropped.
    """
    tokens = np.frombuffer(text, np.uint8)
    rows = max(0, (len(tokens) - 1) // context)
    starts_N = np.arange(rows)[:, None] * context
    rows_NT: npt.NDArray[np.uint8] = tokens[starts_N + np.arange(context + 1)]
    return rows_NT


def _sources(root: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        # Do not walk skipped folders: `site-packages` may have a hundred thousand files.
        folders[:] = [name for name in folders if name not in _SKIPPED]
        yield from (Path(folder, name) for name in files if name.endswith(".py"))


def _read(paths: Sequence[Path], max_bytes: int) -> bytes:
    pieces: list[bytes] = []
    left = max_bytes
    for path in paths:
        if left <= 0:
            break
        pieces.append(path.read_bytes()[:left])
        left -= len(pieces[-1])
    return b"".join(pieces)


def _digest(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


VOCABULARY = 256
_INIT_STD = 0.02


class ByteTransformer(nn.Module):
    """Maps bytes (B, T) int64, T <= context, to next-byte logits (B, T, 256)."""

    def __init__(self, dim: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, dim)
        self.position = nn.Parameter(torch.empty(context, dim))
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        nn.init.normal_(self.position, std=_INIT_STD)
        for name, parameter in self.named_parameters():
            if name.endswith("weight") and parameter.ndim == 2:
                # As in GPT-2, additions to the residual stream shrink with depth.
                residual = name.endswith(("out.weight", "down.weight"))
                scale = 1 / math.sqrt(2 * layers) if residual else 1.0
                nn.init.normal_(parameter, std=_INIT_STD * scale)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Return logits (B, T, 256)."""
        hidden_BTD = self.embed(tokens_BT) + self.position[: tokens_BT.shape[1]]
        for block in self.blocks:
            hidden_BTD = block(hidden_BTD)
        # Uses the same parameter twice, so that it is counted and sent once.
        return F.linear(self.norm(hidden_BTD), self.embed.weight)


class Block(nn.Module):
    """Causal self-attention and a four times wider feed-forward layer, each with a residual."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.norm_attention = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.norm_mlp = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)
        for layer in (self.qkv, self.out, self.up, self.down):
            nn.init.zeros_(layer.bias)

    def forward(self, hidden_BTD: torch.Tensor) -> torch.Tensor:
        """Return the block's output (B, T, D)."""
        hidden_BTD = hidden_BTD + self._attend(self.norm_attention(hidden_BTD))
        added_BTD: torch.Tensor = self.down(F.gelu(self.up(self.norm_mlp(hidden_BTD))))
        return hidden_BTD + added_BTD

    def _attend(self, hidden_BTD: torch.Tensor) -> torch.Tensor:
        batch, length, dim = hidden_BTD.shape
        split = (batch, length, 3, self._heads, dim // self._heads)
        query, key, value = self.qkv(hidden_BTD).view(split).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, dim))
        return out


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
"""Named sizes by approximate number of parameters."""


class ByteLM:
    """Next-byte prediction with a small GPT."""

    class Options(StrictModel):
        """Options of `bytelm`; a single number overrides that of the preset."""

        size: Literal["0.1M", "1M", "10M", "50M"] = Field(
            default="1M", description="Preset by approximate number of parameters."
        )
        dim: int | None = Field(default=None, ge=1, description="Width of the residual stream.")
        layers: int | None = Field(default=None, ge=1, description="Transformer blocks.")
        heads: int | None = Field(
            default=None, ge=1, description="Attention heads; dim must be a multiple."
        )
        context: int | None = Field(
            default=None, ge=1, description="Length of the context in bytes."
        )
        decay: Literal["all", "matrices"] = Field(
            default="all",
            description="Parameters with `optimizer.weight_decay`; matrices: all except biases and"
            " norms.",
        )
        max_bytes: int = Field(
            default=2_000_000,
            ge=1000,
            description="Maximum size of the text, of which a tenth is held out.",
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
        self.tokens_per_row = self.shape.context

    def model(self, seed: int) -> nn.Module:
        """Return the transformer: bytes (B, T) int64 -> logits (B, T, 256)."""
        with seeded(seed):
            return ByteTransformer(*self.shape)

    def groups(self, model: nn.Module) -> list[ParameterGroup]:
        """Return a group of biases and norms if they have no weight decay."""
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
        """Return sequences of the library's text for any seed; held-out files are separate files.

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
