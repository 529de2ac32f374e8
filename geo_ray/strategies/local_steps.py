"""Region side of strategies that train locally from a common point, the *anchor*.

The anchor is the region's copy of the averager's (outer) parameters. The local change is ``Delta
= anchor - params``; a reply moves the anchor. Payloads are changes in both directions, to be
subtracted, so any codec with error feedback fits. `add_gradient` and `take_mean` accumulate
gradients instead.

Overlapped strategies train while an exchange of all regions is in flight. The *mark* is the
region's position at its last message. A reply is stored until the next step has ended; then the
region *turns*: it sends its change since the mark, and continues from the new outer model.
``merge`` determines the change being sent, which the new outer model does not contain yet:
``overwrite`` drops it until the next reply returns it as part of the mean; ``correct`` retains it,
``x <- anchor
- Delta``, so that the region never steps back.

Shape legend: P = parameters of the model, or of one shard's slice.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from geo_ray.strategies.state import Outgoing, RegionState, Reply

ANCHOR = "anchor"


def step(region: RegionState, grad_P: Tensor | None) -> None:
    """Make one step of the inner optimizer; stores the parameters before the first one."""
    anchor(region)
    if grad_P is not None:
        region.apply_gradient(grad_P)


def anchor(region: RegionState) -> Tensor:
    """Return the region's copy of the outer parameters, live (P,)."""
    if ANCHOR not in region.memory:
        region.memory[ANCHOR] = region.snapshot()
    return region.memory[ANCHOR]


def delta(region: RegionState) -> Tensor:
    """Return the change since the anchor, to be subtracted, a new (P,)."""
    return anchor(region) - region.params_P


def outgoing(region: RegionState, *, wait: bool = True) -> Outgoing:
    """Send `delta`, computed in the memory that it is sent from."""
    return Outgoing(region.change_since(anchor(region)), wait)


def outgoing_when_due(region: RegionState, interval: int) -> Outgoing | None:
    """Send `delta` and wait, after ``interval`` steps or as many as the averager asked for."""
    return outgoing(region) if region.is_due(interval) else None


def final_update(region: RegionState) -> Outgoing | None:
    """Return the final update; None if the region equals its anchor."""
    return None if region.since_send == 0 else outgoing(region)


def adopt(region: RegionState, reply: Reply) -> None:
    """Move the anchor and continue from it."""
    region.adopt(anchor(region), reply.payload_P)


Merge = Literal["overwrite", "correct"]
_MARK, _PENDING, _LAST = "mark", "pending", "last"


def overlapped_step(region: RegionState, grad_P: Tensor | None) -> None:
    """Make one step of the inner optimizer."""
    if region.numbers.pop(_LAST, 0.0):
        region.memory[_MARK] = region.params_P.clone()
    step(region, grad_P)


def keep_reply(region: RegionState, reply: Reply) -> None:
    """Hold an answer until the next turn; the one to the final update is merged at once."""
    if region.numbers.get(_LAST):
        adopt(region, reply)
        if reply.continues:  # another final update follows
            del region.numbers[_LAST]
            region.memory[_MARK] = region.params_P.clone()
    else:
        region.memory[_PENDING] = region.stored(reply.payload_P)


def turn(region: RegionState, merge: Merge, *, wait: bool = False) -> Outgoing:
    """Send the change since the mark; merge the stored answer, if there is one."""
    anchor_P = anchor(region)
    has_answer = _PENDING in region.memory
    mark_P = region.memory.pop(_MARK, None)
    if has_answer and mark_P is None:
        mark_P = anchor_P.clone()
    if has_answer:
        anchor_P.sub_(region.memory.pop(_PENDING))
    change_P = region.change_since(anchor_P if mark_P is None else mark_P)
    if has_answer:
        region.continue_from(anchor_P)
        if merge == "correct":
            region.params_P.sub_(change_P)
    if mark_P is None:
        mark_P = region.snapshot()
    else:
        is_outer = has_answer and merge == "overwrite"
        mark_P.copy_(anchor_P if is_outer else region.params_P)
    region.memory[_MARK] = mark_P
    return Outgoing(change_P, wait)


def last_turn(region: RegionState, merge: Merge) -> Outgoing | None:
    """Return the final update, once, also if a checkpoint had it answered early."""
    if region.numbers.get(_LAST):
        return None
    region.numbers[_LAST] = 1.0
    return turn(region, merge, wait=True)


_SUM, _COUNT = "sum", "count"


def add_gradient(region: RegionState, grad_P: Tensor | None) -> None:
    """Add a gradient; a refused one (None) does not count."""
    if grad_P is None:
        return
    if _SUM in region.memory:
        region.memory[_SUM].add_(grad_P)
    else:
        region.memory[_SUM] = grad_P.clone()
    region.numbers[_COUNT] = region.numbers.get(_COUNT, 0.0) + 1.0


def take_mean(region: RegionState) -> Tensor:
    """Return the mean of the gradients since the last call, or zero, as a new tensor (P,)."""
    count = region.numbers.pop(_COUNT, 0.0)
    sum_P = region.memory.pop(_SUM, None)
    return torch.zeros_like(region.params_P) if sum_P is None else sum_P.div_(count)
