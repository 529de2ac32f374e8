"""A transformer layer, for models whose memory is counted."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional


class Block(nn.Module):
    """A transformer layer.

    Args:
        width: elements per token.
        head_width: elements of an attention head.
    """

    def __init__(self, width: int, head_width: int = 128) -> None:
        super().__init__()
        self.heads = max(1, width // head_width)
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output (N, T, D)."""
        rows, length, width = x.shape
        parts = self.qkv(self.norm_1(x)).view(rows, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        found = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(found.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(functional.gelu(self.up(self.norm_2(x))))
