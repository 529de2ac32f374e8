"""A region's side of strategies that train apart from a common point, the *anchor*.

The anchor is the region's copy of the averager's (outer) parameters. What the region did since is
``Delta = anchor - params``; an answer says by how much the anchor moves. Payloads are changes both
ways, to be subtracted, so any codec with error feedback fits.

Shape legend: P = parameters of the model, or of one shard's slice.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from geo_ray.strategies.base import Outgoing, RegionState, Reply

ANCHOR = "anchor"
_PIECE: Final = 2**16  # elements; a few vectors of so many stay in a core's cache


def step(region: RegionState, grad_P: Tensor | None) -> None:
    """One step of the inner optimizer; remembers where the region stood before its first."""
    anchor(region)
    if grad_P is not None:
        region.apply_gradient(grad_P)


def anchor(region: RegionState) -> Tensor:
    """The outer parameters as the region knows them, live (P,)."""
    if ANCHOR not in region.memory:
        region.memory[ANCHOR] = region.params_P.clone()
    return region.memory[ANCHOR]


def delta(region: RegionState) -> Tensor:
    """What the region did since the anchor, as what is to be subtracted, a new (P,)."""
    return anchor(region) - region.params_P


def outgoing(region: RegionState, *, wait: bool = True) -> Outgoing:
    """Send `delta`, made where it is sent from."""
    anchor_P = anchor(region)
    if anchor_P.device.type != "cpu":
        return Outgoing(delta(region), wait)
    room_P = region.room(anchor_P.numel())
    return Outgoing(torch.sub(anchor_P, region.params_P, out=room_P), wait)


def outgoing_when_due(region: RegionState, interval: int) -> Outgoing | None:
    """Send `delta` and stand still, after ``interval`` steps or as many as the averager said."""
    return outgoing(region) if region.is_due(interval) else None


def final_update(region: RegionState) -> Outgoing | None:
    """The last exchange; none if the region stands on its anchor anyway."""
    return None if region.since_send == 0 else outgoing(region)


def adopt(region: RegionState, reply: Reply) -> None:
    """Move the anchor and go on from it."""
    vectors = (anchor(region), region.params_P, reply.payload_P)
    # Each goes through memory once.
    pieces = (torch.split(vector_P, _PIECE) for vector_P in vectors)
    for outer, params, change in zip(*pieces, strict=True):
        params.copy_(outer.sub_(change))
