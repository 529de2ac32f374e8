"""What every strategy promises, each as a check of one sentence.

The checks run a strategy with its options as they are, so give it a short interval; those that need
an exchange take as many steps as it says that it needs.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from geo_ray.contract.findings import Checks, check_options, expect
from geo_ray.contract.fleet import LAG, NUM_PARAMS, PLAIN, Fleet, gradients, start
from geo_ray.contract.honesty import HONESTY
from geo_ray.strategies.base import Strategy
from geo_ray.training.compute.flat import digest
from geo_ray.training.compute.optimizers import AdamW, Momentum

_STEPS: Final = 9
_OPTIMIZERS: Final = (PLAIN, Momentum(lr=0.05, nesterov=True), AdamW(lr=0.01))
_NEAR: Final = 1e-5


def _steps_of(strategy: Strategy) -> int:
    """Enough for two exchanges of every fragment."""
    exchange = strategy.traits.exchange
    return max(_STEPS, math.ceil(2 * exchange.every * exchange.fragments) + 1)


def _is_exact(strategy: Strategy) -> bool:
    """Whether all regions merge the same payload at the end, and not portions of their own."""
    return strategy.traits.in_rounds or strategy.traits.sends == "model"


def _expect_equal(strategy: Strategy, fleet: Fleet, when: str) -> None:
    first, *others = [region.params_P for region in fleet.regions.values()]
    for other_P in others:
        far = float((first - other_P).abs().max())
        near = 0.0 if _is_exact(strategy) else _NEAR
        expect(far <= near, f"{when} regions are {far:g} apart")


def the_end_leaves_all_regions_equal(strategy: Strategy) -> None:
    """After the last exchange; and training has moved them."""
    steps = _steps_of(strategy)
    for optimizer in _OPTIMIZERS:
        fleet = Fleet(strategy, optimizer).run(gradients(steps), range(steps))
        fleet.finish()
        _expect_equal(strategy, fleet, "after the last exchange")
        moved = not torch.equal(fleet.regions["a"].params_P, start())
        expect(moved, "training has not moved the parameters")


def regions_may_end_at_other_times(strategy: Strategy) -> None:
    """Without rounds; where steps are unequal, regions end together."""
    traits, steps = strategy.traits, _steps_of(strategy)
    if traits.in_rounds or traits.region.ends_together:
        return
    fleet, grads = Fleet(strategy), gradients(steps)
    fleet.run(grads, range(4))
    fleet.run({"b": grads["b"]}, range(4, steps))
    fleet.finish()
    _expect_equal(strategy, fleet, "when one ended before the other")


def messages_are_the_carriers_once_answered(strategy: Strategy) -> None:
    """Whoever carried one may overwrite it."""
    steps = _steps_of(strategy)
    fleets = [
        Fleet(strategy, spoil=spoil).run(gradients(steps), range(steps)) for spoil in (False, True)
    ]
    for fleet in fleets:
        fleet.finish()
    same = fleets[0].digests() == fleets[1].digests()
    expect(same, "what an answered message is overwritten with comes back")


def everything_lies_in_the_states(strategy: Strategy) -> None:
    """Two runs side by side with one object do not disturb each other, nor chance."""
    steps, seen = _steps_of(strategy), []
    torch.manual_seed(1)
    before = torch.get_rng_state()
    alone = [whole_run(strategy, seed) for seed in (1, 2)]
    fleets, grads = [Fleet(strategy), Fleet(strategy)], [gradients(steps, seed=s) for s in (1, 2)]
    for t in range(steps):
        for fleet, each in zip(fleets, grads, strict=True):
            fleet.run(each, range(t, t + 1))
    for fleet in fleets:
        fleet.finish()
        seen.append(fleet.digests())
    expect(torch.equal(torch.get_rng_state(), before), "the program's random numbers moved")
    expect(seen == alone, "it remembers something outside of the states that it is given")


def whole_run(strategy: Strategy, seed: int) -> list[str]:
    """Digests of the parameters after a run of two regions."""
    steps = _steps_of(strategy)
    fleet = Fleet(strategy).run(gradients(steps, seed=seed), range(steps))
    fleet.finish()
    return fleet.digests()


def the_same_run_gives_the_same_bits(strategy: Strategy) -> None:
    """Twice."""
    expect(
        whole_run(strategy, 1) == whole_run(strategy, 1),
        "two runs with the same gradients end with different bits",
    )


def a_refused_gradient_changes_nothing(strategy: Strategy) -> None:
    """Neither parameters nor the optimizer."""
    for optimizer in _OPTIMIZERS:
        fleet = Fleet(strategy, optimizer).run(gradients(_STEPS), range(4))
        fleet.settle()
        for region in fleet.regions.values():
            before_P, (state, _) = region.params_P, region.shards[0].export()
            fleet.apply(region, None)
            expect(torch.equal(region.params_P, before_P), "parameters moved")
            after, _ = region.shards[0].export()
            moved = [
                k for k, v in state.items() if k.startswith("optimizer/") and not v.equal(after[k])
            ]
            expect(not moved, f"the optimizer's {moved} moved")


def rounds_of_refused_gradients_change_no_region(strategy: Strategy) -> None:
    """Although the optimizer has momentum."""
    steps = _steps_of(strategy)
    for optimizer in _OPTIMIZERS:
        fleet = Fleet(strategy, optimizer)
        for region in fleet.regions.values():
            for shard in region.shards:
                shard.state.apply_gradient(torch.ones(NUM_PARAMS))
        before_P = fleet.regions["a"].params_P
        fleet.run({"a": [None] * steps, "b": [None] * steps}, range(steps)).finish()
        for region in fleet.regions.values():
            expect(torch.equal(region.params_P, before_P), "parameters moved")


def what_was_saved_goes_on_with_the_same_bits(strategy: Strategy) -> None:
    """From checkpoints at several moments."""
    shards = 1 if strategy.traits.region.whole_model else 2
    steps = _steps_of(strategy)
    grads, other = gradients(steps), gradients(steps, seed=9)
    for optimizer in _OPTIMIZERS:
        for after in (1, 4, 5, steps - 1):
            fleet = Fleet(strategy, optimizer, shards).run(grads, range(after))
            fleet.settle()
            again = Fleet(strategy, optimizer, shards).run(other, range(2))  # of no use
            again.settle()
            again.restore(fleet)
            for each in (fleet, again):
                each.run(grads, range(after, steps)).finish()
            same = fleet.digests() == again.digests()
            expect(same, f"resumed after {after} of {steps} steps, it ends with other bits")


def shards_give_the_bits_of_one(strategy: Strategy) -> None:
    """However a region's model is cut, unless it says that it must not be."""
    if strategy.traits.region.whole_model:
        return
    steps = _steps_of(strategy)
    for optimizer in _OPTIMIZERS:
        results = []
        for num_shards in (1, 2, 3):
            fleet = Fleet(strategy, optimizer, num_shards).run(gradients(steps), range(steps))
            fleet.finish()
            results.append(fleet.digests())
        same = all(result == results[0] for result in results)
        expect(same, "with 2 or 3 shards the model ends with other bits: see whole_model")


def rounds_do_not_depend_on_who_comes_first(strategy: Strategy) -> None:
    """Members join a round in any order; without rounds, they agree at the end."""
    steps, names = _steps_of(strategy), ("a", "b", "c")
    results = []
    for order in (names, names[::-1], ("b", "c", "a")):
        grads = gradients(steps, names)
        fleet = Fleet(strategy, names=names)
        fleet.run({name: grads[name] for name in order}, range(steps)).finish()
        _expect_equal(strategy, fleet, f"speaking in the order {', '.join(order)}")
        results.append(digest(fleet.regions["a"].params_P))
    if strategy.traits.in_rounds:
        expect(len(set(results)) == 1, "a round's result depends on the order of arrival")


def more_regions_come_to_one_model_too(strategy: Strategy) -> None:
    """Four and five of them."""
    steps = _steps_of(strategy)
    for names in ("abcd", "abcde"):
        fleet = Fleet(strategy, names=tuple(names))
        fleet.run(gradients(steps, tuple(names)), range(steps)).finish()
        _expect_equal(strategy, fleet, f"after a run of {len(names)} regions")


def nobody_waits_for_a_region_that_left(strategy: Strategy) -> None:
    """It never spoke, or spoke before; the others finish and agree."""
    steps, names = _steps_of(strategy), ("a", "b", "c")
    for after in (0, 3, steps // 2):
        fleet, grads = Fleet(strategy, names=names), gradients(steps, names)
        fleet.run(grads, range(after))
        fleet.run({name: grads[name] for name in ("a", "b")}, range(after, min(after + 3, steps)))
        fleet.leave("c")
        fleet.run(grads, range(min(after + 3, steps), steps))
        fleet.finish()
        _expect_equal(strategy, fleet, f"after a region left in step {after + 3}")


def a_checkpoint_holds_nobody_up(strategy: Strategy) -> None:
    """The run goes on as it would have without: same rounds, and the same models to the bit."""
    steps = _steps_of(strategy)
    saved, whole, grads = Fleet(strategy), Fleet(strategy), gradients(2 * steps + LAG)
    for fleet in (saved, whole):
        fleet.run(grads, range(4))
        if fleet is saved:
            expect(fleet.averager.begin_checkpoint(1, halt=False), "a checkpoint was refused")
        fleet.run(grads, range(4, 2 * steps))
        fleet.finish()
        _expect_equal(strategy, fleet, "after a checkpoint in mid-run")
    versions = [fleet.averager.state.version for fleet in (saved, whole)]
    expect(versions[0] == versions[1], f"{versions[0]} commits, {versions[1]} without a checkpoint")
    same = all(
        torch.equal(saved.regions[name].params_P, whole.regions[name].params_P)
        for name in saved.regions
    )
    expect(same, "a checkpoint in mid-run has changed the final model")


def finite_gradients_give_finite_models(strategy: Strategy) -> None:
    """Also ones of zero, tiny ones, and ones that are ten times as large."""
    steps = _steps_of(strategy)
    for scale in (0.0, 1e-20, 10.0):
        grads: dict[str, list[Tensor]] = {
            name: [scale * grad_P for grad_P in each] for name, each in gradients(steps).items()
        }
        fleet = Fleet(strategy).run(grads, range(steps))
        fleet.finish()
        for region in fleet.regions.values():
            finite = bool(region.params_P.isfinite().all())
            expect(finite, f"gradients of about {scale:g} make parameters that are not finite")
        payloads = [reply.payload_P for reply in fleet.replies]
        expect(all(bool(p.isfinite().all()) for p in payloads), "an answer is not finite")


def a_repeated_update_changes_nothing(strategy: Strategy) -> None:
    """It is answered as before, and nothing is counted twice."""
    steps = _steps_of(strategy)
    fleet = Fleet(strategy).run(gradients(steps), range(steps))
    before = fleet.averager.export()
    if fleet.updates:
        fleet.averager.on_update(replace(fleet.updates[-1]))
    after = fleet.averager.export()
    same = all(torch.equal(value, after[0][key]) for key, value in before[0].items())
    expect(same and before[1] == after[1], "an update that came twice counts twice")


CHECKS: Final[Checks[Strategy]] = {
    "its options are frozen and strict": check_options,
    "after the last exchange all regions are equal": the_end_leaves_all_regions_equal,
    "regions without rounds may end at other times": regions_may_end_at_other_times,
    "an answered message may be overwritten": messages_are_the_carriers_once_answered,
    "it remembers nothing outside of its states": everything_lies_in_the_states,
    "the same run gives the same bits": the_same_run_gives_the_same_bits,
    "a refused gradient changes nothing": a_refused_gradient_changes_nothing,
    "rounds of refused gradients change no region": rounds_of_refused_gradients_change_no_region,
    "a resumed run goes on with the same bits": what_was_saved_goes_on_with_the_same_bits,
    "several shards give the bits of one": shards_give_the_bits_of_one,
    "rounds do not depend on who comes first": rounds_do_not_depend_on_who_comes_first,
    "four and five regions come to one model, too": more_regions_come_to_one_model_too,
    "nobody waits for a region that left": nobody_waits_for_a_region_that_left,
    "a checkpoint holds nobody up": a_checkpoint_holds_nobody_up,
    "finite gradients give finite models": finite_gradients_give_finite_models,
    "an update that comes twice counts once": a_repeated_update_changes_nothing,
    **HONESTY,
}
"""All promises of strategies."""
