"""Base of strategies whose changes add up: `asgd`, `asgd_ga` and `gaia`.

Rule: a region stores the parameters at its last message (``base``); its change since then is
``base - params``, so no accumulator is updated at every step. The averager has one outbox per
region, the sum of the others' changes since that region's last answer, so that a slow link gets one
larger message and never a queue.

With ``combine: mean`` the region's own change must count 1/M, too. The averager answers with
``(sum of others) / M``, and the region takes back ``(1 - 1/M)`` of its own change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final, Literal

import torch
from pydantic import Field
from torch import Tensor

from geo_ray.strategies.global_model import OneByOne
from geo_ray.strategies.state import AveragerState, Outgoing, RegionState, Reply, Update, Wait
from geo_ray.strategies.traits import Blocking, Combine

WaitRule = Literal["always", "when_busy", "never"]
BLOCKING: Final[Mapping[WaitRule, Blocking]] = {
    "always": "always",
    "when_busy": "when_late",
    "never": "never",
}
"""Name of each rule in a strategy's traits."""


class Additive(OneByOne):
    """Region and averager side of these strategies, which differ in what they send, and when."""

    combine: Combine = Field(
        "mean", description="total weight of a gradient over all regions: mean is 1/M, sum is 1"
    )

    def on_gradient(self, region: RegionState, grad_P: Tensor | None) -> None:
        """Take a local optimizer step."""
        step(region, grad_P)

    def on_reply(self, region: RegionState, reply: Reply) -> None:
        """Apply the others' changes."""
        merge(region, reply)

    def on_finish(self, region: RegionState) -> Outgoing | None:
        """Send the rest; the answer comes when all regions have, and then all replicas agree."""
        return take(region, wait=True)

    def on_update(self, averager: AveragerState, update: Update) -> list[Reply]:
        """Add the change to every other region's outbox; answer with the sender's."""
        weight = self.staleness.factor(update.lag)
        take_in(averager, update, self.combine, weight)
        return self.answers(averager, update)

    def answer(self, averager: AveragerState, update: Update) -> Reply:
        """Answer with the content of the sender's outbox."""
        return answer(averager, update)


def step(region: RegionState, grad_P: Tensor | None) -> None:
    """Make one local optimizer step; stores the parameters before the first one."""
    if "base" not in region.memory:
        region.memory["base"] = region.params_P.clone()
    if grad_P is not None:
        region.apply_gradient(grad_P)


def outgoing(region: RegionState, interval: int, wait: WaitRule) -> Outgoing | Wait | None:
    """The message of this step, if one is due under ``interval`` and ``wait``."""
    if not region.is_due(interval):
        return None
    if region.link_busy:
        return None if wait == "never" else Wait()
    return take(region, wait=wait == "always")


def take(region: RegionState, *, wait: bool) -> Outgoing:
    """Return the change since the last message, to be subtracted from parameters (P,)."""
    base_P = region.memory.setdefault("base", region.params_P.clone())
    change_P = base_P - region.params_P
    base_P.copy_(region.params_P)
    return Outgoing(change_P, wait)


def merge(region: RegionState, reply: Reply) -> None:
    """Subtract an answer from the parameters and from the base.

    The base moves too, or the others' changes would be sent back to them as our own.
    """
    region.params_P.sub_(reply.payload_P)
    region.memory["base"].sub_(reply.payload_P)


def take_in(averager: AveragerState, update: Update, combine: Combine, weight: float = 1.0) -> None:
    """Add one change to every region's outbox.

    Args:
        averager: the averager's state.
        update: the change.
        combine: see the module's docstring.
        weight: how much less it counts because it is old.
    """
    averager.version += 1
    fraction = weight / len(averager.members) if combine == "mean" else weight
    for region in averager.members:
        # The region has applied its change in full: the outbox corrects it to its weight.
        factor = fraction - 1.0 if region == update.region else fraction
        if factor != 0.0:
            _add(averager.memory, f"outbox/{region}", update.payload_P, factor)


def relay_sum(
    averager: AveragerState, parts: Sequence[Update], total_P: Tensor, combine: Combine
) -> list[Reply]:
    """Apply several changes of which only the sum is known; answer every sender.

    Every outbox gets the sum, also those of the senders: the averager does not know the parts.
    But each sender knows its own part and removes it, because the averager marks these
    answers. In an outbox of `take_in` the own change counts ``fraction - 1``; here it counts
    ``fraction``, and the sender subtracts 1: the same.

    Args:
        averager: the averager's state.
        parts: the updates, without their payloads; none is final.
        total_P: the sum of their payloads.
        combine: as in `take_in`.

    Returns:
        Answers in the order of ``parts``; equal payloads are one tensor.
    """
    averager.version += len(parts)
    fraction = 1.0 / len(averager.members) if combine == "mean" else 1.0
    for region in averager.members:
        _add(averager.memory, f"outbox/{region}", total_P, fraction)
    replies: list[Reply] = []
    for part in parts:
        reply = answer(averager, part)
        equal = next((r for r in replies if torch.equal(r.payload_P, reply.payload_P)), reply)
        replies.append(replace(reply, payload_P=equal.payload_P))
    return replies


def refresh(averager: AveragerState, update: Update, num_params: int) -> Reply:
    """Answer an update that is not applied with the content of its sender's outbox.

    Args:
        averager: the averager's state.
        update: the one that is not applied; its payload may be missing.
        num_params: P.
    """
    outbox_P = averager.memory.pop(f"outbox/{update.region}", None)
    payload_P = torch.zeros(num_params) if outbox_P is None else outbox_P
    return Reply(update.region, payload_P, dropped=True)


def answer(averager: AveragerState, update: Update) -> Reply:
    """Return the content of the sender's outbox; of the update's payload only the size counts."""
    outbox_P = averager.memory.pop(f"outbox/{update.region}", None)
    payload_P = torch.zeros(update.payload_P.shape) if outbox_P is None else outbox_P
    return Reply.answering(update, payload_P)


def _add(memory: dict[str, Tensor], key: str, payload_P: Tensor, factor: float) -> None:
    if key in memory:
        memory[key].add_(payload_P, alpha=factor)
    else:
        memory[key] = torch.mul(payload_P, factor)
