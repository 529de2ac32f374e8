"""How long each party of a step waits: who knows more about a cause gives up first.

The bridge waits ``train.step_timeout_s`` for the averager, the primary shard a little longer for
the bridge, and a worker longest: for its own region's step and then for an exchange. So the error
that ends a run names the region and the phase, and not just a silent socket.
"""

from __future__ import annotations

from typing import Final

from geo_ray.training.config import TrainConfig

_SLACK_S: Final = 5.0
_LEAST_S: Final = 300.0
_SLOWEST_MBPS: Final = 4.0


def step_timeout_s(train: TrainConfig, num_params: int) -> float:
    """How long a bridge waits for the averager, seconds: as configured, or by the model's size.

    A model of 50 M parameters needs minutes over a slow link; that is no reason to end a run.
    """
    if train.step_timeout_s is not None:
        return train.step_timeout_s
    return _LEAST_S + 2 * 32e-6 * num_params / _SLOWEST_MBPS


def exchange_s(step_timeout_s: float) -> float:
    """How long a primary shard waits for its bridge, seconds."""
    return step_timeout_s + _SLACK_S


def answer_s(step_timeout_s: float) -> float:
    """How long a worker waits for its primary shard, seconds."""
    return step_timeout_s + exchange_s(step_timeout_s) + _SLACK_S
