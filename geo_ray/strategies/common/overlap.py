"""A region's side of strategies that train on while an exchange of all regions is on its way.

The anchor (`geo_ray.strategies.common.local`) is the newest outer model that the region knows; the
*mark* is where the region stood when it last sent. An answer is kept until the next step has ended,
and then the region *turns*: it sends what it did since the mark, and goes on from the new outer
model.

``merge`` says what becomes of what is being sent, which the new outer model does not contain yet:
``overwrite`` drops it here until the next answer brings it back as part of the mean; ``correct``
keeps it, ``x <- anchor - Delta``, so that the region never steps back.

Shape legend: P = parameters of the model, or of one shard's slice.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from geo_ray.strategies.base import Outgoing, RegionState, Reply
from geo_ray.strategies.common import local

Merge = Literal["overwrite", "correct"]
_MARK, _PENDING, _LAST = "mark", "pending", "last"


def step(region: RegionState, grad_P: Tensor | None) -> None:
    """One step of the inner optimizer.

    After the last word it is the first of a run that was saved at its end and goes on after all:
    there will be another last word, about what is done from here.
    """
    if region.numbers.pop(_LAST, 0.0):
        region.memory[_MARK] = region.params_P.clone()
    local.step(region, grad_P)


def keep(region: RegionState, reply: Reply) -> None:
    """Hold an answer until the next turn; that to the last word is merged at once."""
    if region.numbers.get(_LAST):
        local.adopt(region, reply)
        if reply.border is not None:  # there will be another last word
            del region.numbers[_LAST]
            region.memory[_MARK] = region.params_P.clone()
    else:
        region.memory[_PENDING] = reply.payload_P.clone()


def turn(region: RegionState, merge: Merge, *, wait: bool = False) -> Outgoing:
    """Send what was done since the mark; merge the answer that is held, if there is one."""
    anchor_P = local.anchor(region)
    change_P = region.memory.get(_MARK, anchor_P) - region.params_P
    pending_P = region.memory.pop(_PENDING, None)
    if pending_P is not None:
        anchor_P.sub_(pending_P)
        region.params_P.copy_(anchor_P)
        if merge == "correct":
            region.params_P.sub_(change_P)
    region.memory[_MARK] = region.params_P.clone()
    return Outgoing(change_P, wait)


def last_turn(region: RegionState, merge: Merge) -> Outgoing | None:
    """The last word: once, also if a checkpoint came between and had it answered early."""
    if region.numbers.get(_LAST):
        return None
    region.numbers[_LAST] = 1.0
    return turn(region, merge, wait=True)
