"""DeepFM: a factorisation machine and a small network that share their embeddings."""

from __future__ import annotations

import torch
from torch import nn

_INIT_STD = 0.05


class DeepFM(nn.Module):
    """Maps values of F categorical fields (N, F) int64 to click log-odds (N,)."""

    offsets: torch.Tensor

    def __init__(self, fields: int, vocabulary: int, dim: int, hidden: int) -> None:
        super().__init__()
        # One table for all fields; a constant, so it is no part of the state that is trained.
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
