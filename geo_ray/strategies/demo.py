"""DeMo: momentum stays in the region; its largest frequency components cross the WAN.

Idea: every region has its own momentum. At each step the largest components of the momentum, in the
frequency domain of short chunks, are removed from it, sent, and summed over the regions. Every
region steps by the sign of that sum. The rest stays in the momentum and may be sent later.

Rule: ``m <- beta m + g``; ``c = top-k of DCT(m)`` per chunk; ``m <- m - IDCT(c)``; ``w <- w - lr
sign(IDCT(mean_i c_i))``. The inner optimizer applies the sign as its gradient: use ``sgd``.

When: every step shall send a message, and the link carries a few percent of a gradient. Set
``codec.up`` and ``codec.down`` to ``{kind: nonzeros}``, else zeros are sent as numbers. Use one
parameter server shard per region: chunks must not depend on how the model is sharded.

Source: DeMo (arXiv 2411.19870), reconstructed from a summary. Its chunks follow each tensor's shape
and are two-dimensional; here they are runs of the flat parameters.

Shape legend: P = parameters of the model, N = chunks, C = elements of a chunk.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from geo_ray.strategies.base import GradientRounds
from geo_ray.strategies.state import Outgoing, RegionState, Reply
from geo_ray.strategies.traits import ExchangeTraits, RegionTraits, Traits

_MOMENTUM, _REFUSED = "momentum", "refused"


class DeMo(GradientRounds):
    """Configuration and rule of `demo`."""

    kind: Literal["demo"] = "demo"
    beta: float = Field(0.999, ge=0, lt=1, description="fraction of the momentum retained per step")
    chunk: int = Field(64, ge=2, le=4096, description="elements of a chunk")
    top: int = Field(8, ge=1, description="components that are sent per chunk")

    @property
    def traits(self) -> Traits:
        """See `geo_ray.strategies.traits`."""
        return Traits(
            in_rounds=True,
            sends="change",
            exchange=ExchangeTraits(blocking="always", every=1, last="never"),
            region=RegionTraits(whole_model=True, unsent=(_MOMENTUM,)),
        )

    def on_gradient(self, region: RegionState, grad_P: Tensor | None) -> None:
        """Add the gradient to the momentum; parameters change only by answers."""
        momentum_P = region.memory.setdefault(_MOMENTUM, torch.zeros_like(region.params_P))
        region.numbers[_REFUSED] = float(grad_P is None)
        if grad_P is not None:
            momentum_P.mul_(self.beta).add_(grad_P)

    def after_step(self, region: RegionState) -> Outgoing | None:
        """Take the largest components out of the momentum, send them and wait."""
        momentum_P = region.memory[_MOMENTUM]
        if region.numbers[_REFUSED]:  # it has no weight in the round: remove nothing for it
            return Outgoing(torch.zeros_like(momentum_P), wait=True)
        parts_NC = _chunks(momentum_P, self.chunk) @ dct(self.chunk, momentum_P.device).T
        places = parts_NC.abs().topk(min(self.top, self.chunk), dim=1).indices
        sent_NC = torch.zeros_like(parts_NC).scatter_(1, places, parts_NC.gather(1, places))
        momentum_P.sub_(self.decoded(sent_NC.reshape(-1)[: momentum_P.numel()]))
        return Outgoing(sent_NC.reshape(-1)[: momentum_P.numel()].clone(), wait=True)

    def on_reply(self, region: RegionState, reply: Reply) -> None:
        """Step by the sign of the sum over all regions."""
        if reply.num_samples > 0:
            region.apply_gradient(self.decoded(reply.payload_P).sign_())

    def decoded(self, parts_P: Tensor) -> Tensor:
        """Transform components to parameters, a new (P,)."""
        parts_NC = _chunks(parts_P, self.chunk)
        return (parts_NC @ dct(self.chunk, parts_P.device)).reshape(-1)[: parts_P.numel()]


def _chunks(vector_P: Tensor, size: int) -> Tensor:
    """Return the vector as rows (N, C), the last one padded with zeros."""
    return torch.nn.functional.pad(vector_P, (0, -vector_P.numel() % size)).reshape(-1, size)


@cache
def dct(size: int, device: torch.device) -> Tensor:
    """Return the orthonormal DCT-II as a matrix (C, C): row k is the k-th cosine."""
    k_C1 = torch.arange(size, dtype=torch.float64).reshape(-1, 1)
    n_1C = torch.arange(size, dtype=torch.float64).reshape(1, -1)
    matrix_CC = torch.cos(math.pi / size * (n_1C + 0.5) * k_C1) * math.sqrt(2.0 / size)
    matrix_CC[0] /= math.sqrt(2.0)
    return matrix_CC.to(torch.float32).to(device)
