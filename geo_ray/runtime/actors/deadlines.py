"""How long each party of a step waits.

A wait for other regions, or for other workers, has no end of its own: how long it takes is up to
their training. It ends when the averager has failed, when the controller sees that nobody who is
waited for can make progress (`geo_ray.training.averager.stalled`), or when somebody is gone: the
bridge sees that the averager's region is out of reach, sockets see that a process or a host of the
own region is gone, and the controller sees that an actor is dead.

With ``train.step_timeout_s`` it has one after all. Then who knows more about a cause gives up
first: the bridge waits that long for the averager, the primary shard a little longer for the
bridge, and a worker longest: for its own region's step and then for an exchange. So the error that
ends a run names the region and the phase, and not just a silent socket.
"""

from __future__ import annotations

from typing import Final

from geo_ray.training.config import TrainConfig

UNREACHABLE_S: Final = 300.0
"""How long a region may be out of reach before whoever waits for it gives up."""

_SLACK_S: Final = 5.0
_LEAST_S: Final = 300.0
_SLOWEST_MBPS: Final = 4.0
_FOREVER_S: Final = 365 * 86400.0  # what sockets and locks still take for a number of seconds


def wait_limit_s(train: TrainConfig) -> float:
    """How long others' training may be waited for, seconds; a year if nothing is configured."""
    return _FOREVER_S if train.step_timeout_s is None else train.step_timeout_s


def operation_s(train: TrainConfig, num_params: int) -> float:
    """How long one operation on a shard may take, seconds: nobody's training is in it."""
    if train.step_timeout_s is not None:
        return train.step_timeout_s
    return _LEAST_S + 2 * 32e-6 * num_params / _SLOWEST_MBPS


def exchange_s(limit_s: float) -> float:
    """How long a primary shard waits for its bridge, seconds."""
    return limit_s + _SLACK_S


def answer_s(limit_s: float) -> float:
    """How long a worker waits for its primary shard, seconds."""
    return limit_s + exchange_s(limit_s) + _SLACK_S
