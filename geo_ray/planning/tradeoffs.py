"""What rounds and codecs cost in loss, and what codecs save in bytes: the advisor's assumptions.

The loss of long rounds is interpolated between a few points over the logarithm of H. Points and
codec losses are rough: how much a task loses is the task's own, and `geo-ray compare` measures it.

Source of the points for H: the bounds that this project tests its `diloco` against (docs/results);
losses of codecs with error feedback after published ablations (4 bits nearly free, sparse 2 bits a
little less so), reconstructed.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Final

LOSS_BY_INTERVAL: Final = ((1, 0.0), (25, 0.01), (100, 0.025), (500, 0.05))
"""(H, relative loss against H = 1), ascending."""

BITS_PER_PARAM: Final = {
    None: (32.0, 32.0),
    "fp16": (16.0, 16.0),
    "int8": (8.01, 8.01),
    "int4": (4.25, 4.25),
    "chunked_topk": (0.25, 32.0),
}
"""Codec -> bits per parameter up and down; one that is for updates only sends answers whole."""

LOSS_BY_CODEC: Final = {
    None: 0.0,
    "fp16": 0.0002,
    "int8": 0.001,
    "int4": 0.003,
    "chunked_topk": 0.015,
}
"""Codec -> relative loss, with error feedback."""

LOSS_OF_DELAY: Final = 0.005
"""Of merging a round's answer one round late."""

LOSS_OF_ASYNCHRONY: Final = 0.01
"""Of updates that come one by one."""


def loss_of_interval(steps: int) -> float:
    """Relative loss of rounds that are ``steps`` local steps long."""
    last = LOSS_BY_INTERVAL[-1]
    for (low, loss), (high, more) in pairwise(LOSS_BY_INTERVAL):
        if steps <= high:
            share = math.log(max(steps, low) / low) / math.log(high / low)
            return loss + share * (more - loss)
    return last[1] * math.log(steps) / math.log(last[0])
