"""What a strategy may say of itself beyond its protocol, and what holds if it is silent.

==================  =======  ====================================================================
``fragments``       1        parts of the model that it sends one at a time
``equal_steps``     True     whether regions may end after so many steps each; if not, the run ends
                             when they have seen enough rows together
``worker_steps``    0        local steps of each worker's own optimizer between two pushes; what a
                             worker pushes then is its change, not a gradient. 0: gradients
``eval_params``     None     the tensor of `RegionState.memory` that is evaluated, if not the
                             region's parameters: those that the averager knows
``whole_model``     False    whether a region's model must not be cut into shards
``rate_key``        -        where the configuration has the learning rate that it trains with;
                             ``optimizer.lr`` if it does not say
``mean_gradient``   False    whether every update is the gradient of one step, of the same model in
                             all regions, and every answer their mean by rows
``staleness``       -        `geo_ray.strategies.common.staleness.Staleness`, of asynchronous
strategies
``on_release``      -        answer everybody who waits, with what is there
``on_wake``         -        do what is due: the time that it asked for (`HubState.wake_s`) has come
==================  =======  ====================================================================
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from geo_ray.strategies.base import AveragerState, Reply, Strategy


@runtime_checkable
class Holding(Protocol):
    """A strategy that may leave some regions without an answer while it answers others."""

    def on_release(self, averager: AveragerState) -> list[Reply]:
        """Close what is open with those who are in it, and answer everybody who waits.

        Called when a region has left, and, after every update, while a checkpoint is open or the
        run ends: a checkpoint holds whoever has its answer until all have theirs.
        """


@runtime_checkable
class Timed(Protocol):
    """A strategy that goes by the averager's clock."""

    def on_wake(self, averager: AveragerState) -> list[Reply]:
        """The time `AveragerState.wake_s` that it asked for has come, and is cleared."""


def fragments_of(strategy: Strategy) -> int:
    """Parts of the model that are sent one at a time."""
    return int(getattr(strategy, "fragments", 1))


def has_equal_steps(strategy: Strategy) -> bool:
    """Whether each region may end after a number of steps of its own."""
    return bool(getattr(strategy, "equal_steps", True))


def worker_steps(strategy: Strategy) -> int:
    """Local steps of each worker between two pushes; 0 if it pushes gradients."""
    return int(getattr(strategy, "worker_steps", 0))


def eval_params(strategy: Strategy) -> str | None:
    """Which memory of a region is evaluated in place of its parameters."""
    name = getattr(strategy, "eval_params", None)
    return None if name is None else str(name)


def keeps_time(strategy: Strategy) -> bool:
    """Whether it asks the averager's clock to wake it."""
    return isinstance(strategy, Timed)


def has_bound(strategy: Strategy) -> bool:
    """Whether a region may have to wait for the slowest although no round does."""
    return getattr(getattr(strategy, "staleness", None), "bound", None) is not None


def needs_whole_model(strategy: Strategy) -> bool:
    """Whether a region's parameter server must be one shard."""
    return bool(getattr(strategy, "whole_model", False))


def averages_gradients(strategy: Strategy) -> bool:
    """Whether regions send gradients of the same model and get their mean by rows."""
    return bool(getattr(strategy, "mean_gradient", False))


def rate_key(strategy: Strategy) -> str:
    """Where the configuration has the learning rate that a strategy trains with."""
    return str(getattr(strategy, "rate_key", "optimizer.lr"))
