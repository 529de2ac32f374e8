"""Strategies that leave the optimizer to a worker: quiet steps need no parameters."""

from __future__ import annotations

from random import Random

import pytest
import torch
from torch import Tensor

from geo_ray.strategies.base import Strategy
from geo_ray.strategies.registry import STRATEGIES
from geo_ray.strategies.state import Outgoing, RegionState, Reply
from geo_ray.training.parameters import fragments_in

SIZE, STEPS = 64, 80
KINDS = sorted(k for k, each in STRATEGIES.items() if each().traits.region.local_optimizer)


class Watched(RegionState):
    """Counts how often its parameters are used."""

    __slots__ = ("uses", "values_P")

    def __init__(self, strategy: Strategy) -> None:
        self.uses, self.values_P = 0, torch.linspace(-1, 1, SIZE)
        fragments = fragments_in(SIZE, strategy.traits.exchange.fragments, (0, SIZE))
        RegionState.__init__(self, self.values_P, self.step_by, fragments=fragments)

    def step_by(self, grad_P: Tensor) -> None:
        self.values_P.sub_(grad_P, alpha=0.1)

    @property
    def params_P(self) -> Tensor:
        self.uses += 1
        return self.values_P

    @params_P.setter
    def params_P(self, value: Tensor) -> None:
        assert value is self.values_P


def drive(strategy: Strategy, seed: int, *, on_worker: bool) -> tuple[Watched, list[bool]]:
    """The state after some steps and answers, and which of the steps were quiet."""
    draw, noise = Random(seed), torch.Generator().manual_seed(seed)
    region, quiet = Watched(strategy), []
    answer: tuple[int, Reply] | None = None  # steps until it comes

    def arrive() -> None:
        nonlocal answer
        assert answer is not None
        region.link_busy = False
        strategy.on_reply(region, answer[1])
        answer = None

    for _ in range(STEPS):
        if answer is not None and answer[0] <= 0:
            arrive()
        grad_P = torch.randn(SIZE, generator=noise)
        region.step, region.since_send = region.step + 1, region.since_send + 1
        strategy.on_gradient(region, None if on_worker else grad_P)
        if on_worker:
            region.step_by(grad_P)
        is_quiet, region.uses = strategy.is_quiet(region), 0
        out = strategy.after_step(region)
        quiet.append(is_quiet)
        assert not is_quiet or (out is None and region.uses == 0)
        if answer is not None:
            answer = answer[0] - 1, answer[1]
            if out is not None and not isinstance(out, Outgoing):  # it waits for the answer
                arrive()
                out = strategy.after_step(region)
        if isinstance(out, Outgoing):
            region.link_busy, region.since_send = True, 0
            payload_P = torch.randn(out.payload_P.shape, generator=noise) * 0.01
            reply = Reply("a", payload_P, 8, fragment=out.fragment, own_weight=0.5)
            answer = 0 if out.wait else draw.randrange(3), reply
            if out.wait:
                arrive()
    return region, quiet


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", KINDS)
def test_steps_may_be_made_elsewhere(kind: str, seed: int) -> None:
    strategy = STRATEGIES[kind]()
    own, quiet = drive(strategy, seed, on_worker=True)
    servers, _ = drive(strategy, seed, on_worker=False)
    assert torch.equal(own.values_P, servers.values_P)
    assert own.memory.keys() == servers.memory.keys() and own.numbers == servers.numbers
    for name, value in own.memory.items():
        assert torch.equal(value, servers.memory[name]), name
    assert any(quiet) and not all(quiet)


@pytest.mark.parametrize("kind", sorted(STRATEGIES.keys() - set(KINDS)))
def test_other_strategies_are_never_quiet_before_they_send(kind: str) -> None:
    strategy = STRATEGIES[kind]()
    assert not strategy.traits.region.local_optimizer
    region = Watched(strategy)
    region.since_send = 10**6
    assert not strategy.is_quiet(region)
