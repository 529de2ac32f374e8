"""The averager's side of strategies that answer regions one by one: who has heard what.

The averager keeps the sum of all changes that it made (``moved``), and per region how much of it
that region was told (``seen/region``). An answer is the difference. It costs two vectors per
answer, however many regions there are, and a region that was away for long gets one message.

Models that are sent in fragments have books of their own for each.

Shape legend: P = parameters of the model, or of the fragment that is exchanged.
"""

from __future__ import annotations

import torch
from torch import Tensor

from geo_ray.strategies.base import AveragerState, Reply, Update


def publish(averager: AveragerState, change_P: Tensor, fragment: int = 0) -> None:
    """Subtract ``change_P`` from the outer parameters: a new version."""
    moved = _moved(fragment)
    if moved in averager.memory:
        averager.memory[moved].add_(change_P)
    else:
        averager.memory[moved] = change_P.clone()
    averager.version += 1


def move_to(averager: AveragerState, distance_P: Tensor) -> None:
    """Set the sum of all changes to ``distance_P``: a new version."""
    averager.memory[_moved(0)] = distance_P
    averager.version += 1


def told(averager: AveragerState, update: Update) -> Tensor:
    """The sum of changes that the sender knew when it was last answered, a copy (P,)."""
    seen_P = averager.memory.get(_seen(update))
    return torch.zeros(update.payload_P.shape) if seen_P is None else seen_P.clone()


def unheard(averager: AveragerState, update: Update) -> Tensor:
    """What was published since the last answer to the sender, a new (P,)."""
    moved_P = averager.memory.get(_moved(update.fragment))
    known_P = told(averager, update)
    return known_P.neg_() if moved_P is None else known_P.neg_().add_(moved_P)


def answer(averager: AveragerState, update: Update, steps: int | None = None) -> Reply:
    """Tell the sender of ``update`` what it has not heard.

    Args:
        averager: the averager's state.
        update: the request; of its payload only the size counts.
        steps: local steps that the region is to take next; None: as configured.
    """
    payload_P = unheard(averager, update)
    moved_P = averager.memory.get(_moved(update.fragment))
    if moved_P is not None:
        averager.memory[_seen(update)] = moved_P.clone()
    return Reply(
        update.region,
        update.seq,
        averager.version,
        update.num_samples,
        payload_P,
        update.final,
        fragment=update.fragment,
        steps=steps,
    )


def _moved(fragment: int) -> str:
    return f"moved{fragment}"


def _seen(update: Update) -> str:
    return f"seen{update.fragment}/{update.region}"
