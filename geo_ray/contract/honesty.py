"""Whether a strategy does what its traits say, in short runs without a slow link."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

import torch
from pydantic import BaseModel
from torch import Tensor

from geo_ray.contract.findings import Checks, expect
from geo_ray.contract.fleet import NUM_PARAMS, SAMPLES, Fleet, gradients, start
from geo_ray.strategies.base import AveragerState, Reply, Strategy, Update
from geo_ray.training.averager.averager import Averager
from geo_ray.training.compute.flat import fragment_cuts

_LEAST: Final = 9
_NEAR: Final = 1e-5


def _run(strategy: Strategy) -> Fleet:
    """Two exchanges of every fragment and a bit, with answers at the next step; and the end."""
    exchange = strategy.traits.exchange
    steps = max(_LEAST, math.ceil(2 * exchange.every * exchange.fragments))
    fleet = Fleet(strategy, lag=1).run(gradients(steps), range(steps))
    fleet.finish()
    return fleet


def _sent(fleet: Fleet, name: str) -> list[Update]:
    return [update for update in fleet.updates if update.region == name]


def exchanges_are_as_many_as_it_says(strategy: Strategy) -> None:
    """After every step, and after the end; off by one where `every` is not whole."""
    exchange = strategy.traits.exchange
    room = 0 if float(exchange.every).is_integer() else 1
    steps = max(_LEAST, math.ceil(2 * exchange.every * exchange.fragments)) + 1
    fleet, grads = Fleet(strategy, lag=1), gradients(steps)
    for t in range(steps):
        fleet.run(grads, range(t, t + 1))
        _expect_count(fleet, exchange.within, room)
    fleet.finish()
    _expect_count(fleet, exchange.count, room)


def _expect_count(fleet: Fleet, told: Callable[[int], int], room: int) -> None:
    for name, region in fleet.regions.items():
        found, wanted = len(_sent(fleet, name)), told(region.steps)
        expect(
            abs(wanted - found) <= room,
            f"in {region.steps} steps region {name} spoke {found} times; its traits say {wanted}",
        )


def payloads_are_as_large_as_it_says(strategy: Strategy) -> None:
    """Each of one fragment, in turn; the last one of the whole model."""
    exchange, fleet = strategy.traits.exchange, _run(strategy)
    cuts = fragment_cuts(NUM_PARAMS, exchange.fragments)
    for name in fleet.regions:
        ordinary = [update for update in _sent(fleet, name) if not update.final]
        for update in _sent(fleet, name):
            start_, stop = cuts[update.fragment]
            size = update.payload_P.numel()
            expect(size == stop - start_, f"a payload has {size} values, its fragment not")
            whole = not update.final or size == NUM_PARAMS
            expect(whole, "the last exchange is not of the whole model")
        full = len(ordinary) // exchange.fragments * exchange.fragments
        sent = 4 * sum(update.payload_P.numel() for update in ordinary[:full])
        told = full * exchange.payload_bytes(NUM_PARAMS)
        expect(abs(sent - told) < 1, f"{full} exchanges sent {sent} bytes; its traits say {told}")
    sizes = {(reply.to, reply.seq): reply.payload_P.numel() for reply in fleet.replies}
    asked = {(update.region, update.seq): update.payload_P.numel() for update in fleet.updates}
    expect(sizes == {key: asked[key] for key in sizes}, "an answer is not as long as its update")


def regions_stand_still_as_it_says(strategy: Strategy) -> None:
    """For every exchange, for those that are late, or for none."""
    told = strategy.traits.exchange.stands_still
    fleet = Fleet(strategy, lag=3)
    exchange = strategy.traits.exchange
    steps = max(_LEAST, math.ceil(2 * exchange.every * exchange.fragments))
    fleet.run(gradients(steps), range(steps)).finish()
    if told == "always":
        expect(all(fleet.stood_still), "a region trains on while its request is open")
    else:
        expect(not any(fleet.stood_still), f"a region stands still at once; its traits say {told}")
    if told == "never":
        expect(not fleet.waits, "a region stands still for a late answer; its traits say never")


def payloads_mean_what_it_says(strategy: Strategy) -> None:
    """Models are those of the region; changes are zero where nothing was done."""
    steps = max(_LEAST, math.ceil(2 * strategy.traits.exchange.every))
    fleet = Fleet(strategy, lag=1).run({"a": [None] * steps, "b": [None] * steps}, range(steps))
    fleet.finish()
    for update in fleet.updates:
        if strategy.traits.sends == "model":
            same = torch.equal(update.payload_P, start())
            expect(same, "its traits say that it sends models, but a payload is none")
        else:
            zero = not update.payload_P.any()
            expect(zero, "its traits say that it sends changes, but without one it sends something")


def rounds_answer_all_or_nobody(strategy: Strategy) -> None:
    """Rounds do; and who has none answers somebody before all have spoken."""
    steps = max(_LEAST, math.ceil(2 * strategy.traits.exchange.every))
    fleet = Fleet(strategy, names=("a", "b", "c"), lag=1)
    fleet.run(gradients(steps, ("a", "b", "c")), range(steps)).finish()
    if strategy.traits.in_rounds:
        odd = [sorted(to) for to in fleet.answered if len(to) not in (0, 3)]
        expect(not odd, f"its traits say rounds, but {odd[:1]} alone were answered")


def the_named_memory_is_a_model(strategy: Strategy) -> None:
    """What is evaluated has the size of the parameters."""
    name, fleet = strategy.traits.region.eval_params, _run(strategy)
    if name is None:
        return
    for region in fleet.regions.values():
        found = region.shards[0].state.memory.get(name)
        expect(found is not None, f"there is no memory {name!r} to evaluate")
        expect(found is None or found.shape == (NUM_PARAMS,), f"memory {name!r} is no model")


def the_rate_is_where_it_says(strategy: Strategy) -> None:
    """In the optimizer, or in an option of the strategy."""
    section, *keys = strategy.traits.region.rate_key.split(".")
    if section == "optimizer":
        expect(keys == ["lr"], "the optimizer's rate is optimizer.lr")
        return
    expect(section == "strategy", "a rate is in `optimizer` or in `strategy`")
    value: object = strategy
    for key in keys:
        fields = dict(value) if isinstance(value, BaseModel) else {}
        expect(key in fields, f"there is no option {strategy.traits.region.rate_key}")
        value = fields[key]
    expect(isinstance(value, float), f"{strategy.traits.region.rate_key} is no rate")


def workers_push_what_it_says(strategy: Strategy) -> None:
    """With worker_steps pushes are changes: the region's optimizer has nothing to do."""
    if not strategy.traits.region.worker_steps:
        return
    fleet = Fleet(strategy)
    calls: list[Tensor] = []
    for region in fleet.regions.values():
        region.shards[0].state.apply_gradient = calls.append
    steps = max(_LEAST, math.ceil(2 * strategy.traits.exchange.every))
    fleet.run(gradients(steps), range(steps))
    expect(not calls, "workers push changes, but the region's optimizer takes them for gradients")


def the_clock_is_asked_for_as_it_says(strategy: Strategy) -> None:
    """Whoever wants to be woken has on_wake."""
    if strategy.traits.averager.on_wake is None:
        woken = _run(strategy).averager.state.wake_s
        expect(woken is None, "it asks to be woken, and there is no on_wake")


def rounds_may_be_summed_as_it_says(strategy: Strategy) -> None:
    """A weighted mean in the name of every region gives the same answers."""
    mean = strategy.traits.averager.round_mean
    if mean is None:
        return
    for rows in ((16, 8, 4), (16, 0, 4)):
        plain, summed = (AveragerState(("a", "b", "c")) for _ in range(2))
        payloads = torch.randn(3, NUM_PARAMS, generator=torch.Generator().manual_seed(3))
        weights = torch.tensor([mean.weight_of(count) for count in rows])
        mean_P = (weights[:, None] * payloads).sum(0) / weights.sum()
        wanted = _round(strategy, plain, dict(zip("abc", payloads, strict=True)), rows)
        found = _round(strategy, summed, dict.fromkeys("abc", mean_P), rows)
        far = float((wanted[0].payload_P - found[0].payload_P).abs().max())
        expect(far <= _NEAR, f"the answer to summed updates with rows {rows} is {far:g} off")
        if mean.is_answer:
            far = float((found[0].payload_P - mean_P).abs().max())
            expect(far <= _NEAR, f"its answer is not the mean, but {far:g} off")


def _round(
    strategy: Strategy, state: AveragerState, payloads: Mapping[str, Tensor], rows: tuple[int, ...]
) -> list[Reply]:
    replies: list[Reply] = []
    for (name, payload_P), count in zip(payloads.items(), rows, strict=True):
        replies = strategy.on_update(state, Update(name, 1, 1, 0, count, payload_P.clone()))
    expect(len(replies) == len(payloads), "a whole round was not answered")
    return replies


def updates_add_up_as_it_says(strategy: Strategy) -> None:
    """A sum of updates leaves everybody where the updates by themselves do."""
    if strategy.traits.averager.adds_up is None:
        return
    payloads = torch.randn(2, NUM_PARAMS, generator=torch.Generator().manual_seed(4))
    updates = [
        Update(name, 1, 1, 0, SAMPLES[name], payload_P)
        for name, payload_P in zip("ab", payloads, strict=True)
    ]
    ends = []
    for as_sum in (False, True):
        averager = Averager(strategy, NUM_PARAMS, AveragerState(("a", "b", "c")))
        models = {name: torch.zeros(NUM_PARAMS) for name in "abc"}
        for update in updates:
            models[update.region] -= update.payload_P
        if as_sum:
            parts = [replace(update, payload_P=torch.empty(NUM_PARAMS)) for update in updates]
            replies = averager.on_sum(parts, payloads.sum(0)) or []
        else:
            replies = [reply for update in updates for reply in averager.on_update(update)]
        replies += averager.on_update(Update("c", 1, 1, 2, 4, torch.zeros(NUM_PARAMS)))
        replies += averager.on_update(Update("a", 1, 2, 2, 4, torch.zeros(NUM_PARAMS)))
        for reply in replies:
            models[reply.to] -= reply.payload_P
            if reply.own:
                models[reply.to] += payloads["ab".index(reply.to)]
        ends.append(torch.stack([models[name] for name in "ac"]))
    far = float((ends[0] - ends[1]).abs().max())
    expect(far <= _NEAR, f"a sum of updates leaves regions {far:g} from where the updates do")


def mean_gradients_are_such(strategy: Strategy) -> None:
    """Updates are gradients, and answers their mean by rows."""
    if not strategy.traits.averager.mean_gradient:
        return
    grads = gradients(1)
    fleet = Fleet(strategy).run(grads, range(1))
    for update in fleet.updates:
        same = torch.equal(update.payload_P, grads[update.region][0])
        expect(same, "its traits say that updates are gradients")
    total = sum(SAMPLES[name] for name in grads)
    mean_P = sum((SAMPLES[n] / total * each[0] for n, each in grads.items()), torch.zeros(()))
    far = float((fleet.replies[0].payload_P - mean_P).abs().max())
    expect(far <= _NEAR, "its traits say that answers are the mean by rows")


HONESTY: Final[Checks[Strategy]] = {
    "traits: exchanges are as many as it says": exchanges_are_as_many_as_it_says,
    "traits: payloads are as large as it says": payloads_are_as_large_as_it_says,
    "traits: regions stand still as it says": regions_stand_still_as_it_says,
    "traits: payloads mean what it says": payloads_mean_what_it_says,
    "traits: rounds answer all or nobody": rounds_answer_all_or_nobody,
    "traits: what is evaluated is a model": the_named_memory_is_a_model,
    "traits: the rate is where it says": the_rate_is_where_it_says,
    "traits: workers push what it says": workers_push_what_it_says,
    "traits: the clock is asked for as it says": the_clock_is_asked_for_as_it_says,
    "traits: rounds may be summed as it says": rounds_may_be_summed_as_it_says,
    "traits: updates add up as it says": updates_add_up_as_it_says,
    "traits: mean gradients are such": mean_gradients_are_such,
}
"""What traits say, each as a check."""
