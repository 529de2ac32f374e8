"""A decoder-only transformer over bytes: pre-LayerNorm, learned positions, tied embedding."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  (torch's own convention)

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
                # What is added to the residual stream shrinks with depth, as in GPT-2.
                residual = name.endswith(("out.weight", "down.weight"))
                scale = 1 / math.sqrt(2 * layers) if residual else 1.0
                nn.init.normal_(parameter, std=_INIT_STD * scale)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Return logits (B, T, 256)."""
        hidden_BTD = self.embed(tokens_BT) + self.position[: tokens_BT.shape[1]]
        for block in self.blocks:
            hidden_BTD = block(hidden_BTD)
        # Tied by use, not by a second parameter: nothing is counted or sent twice.
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
