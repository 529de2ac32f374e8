"""The strategy contract, one check per sentence.

The checks cover messages, state and the end of a run, and whether a strategy behaves as its traits
state. They run a few regions and an averager without clock and network.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import torch
from pydantic import BaseModel
from torch import Tensor

from geo_ray.strategies.base import Strategy
from geo_ray.strategies.state import AveragerState, Outgoing, Reply, Update, Wait
from geo_ray.testing.checks import Checks, check_options, expect
from geo_ray.training.averager import Averager
from geo_ray.training.messages import ReplyMessage, UpdateMessage
from geo_ray.training.optimizers import AdamW, Momentum, OneOptimizer, Sgd
from geo_ray.training.parameters import digest, fragment_bounds, split_sizes
from geo_ray.training.shard import Contribution, RegionModel, Shard

NUM_PARAMS = 67
"""Not a multiple of a vector's length, and enough for three shards."""

SAMPLES: Mapping[str, int] = {"a": 16, "b": 8, "c": 4, "d": 2, "e": 12}
"""Rows behind a step, by region."""

DATA_ROWS: Mapping[str, float] = {"a": 100.0, "b": 300.0, "c": 200.0}
"""Rows of each region's training data; not in proportion to `SAMPLES`."""

LAG = 2
"""Steps until an answer arrives that no region is blocked by."""

PLAIN = Sgd(lr=0.1)


def start() -> Tensor:
    """Initial parameters of all regions, fp32 (P,)."""
    return torch.randn(NUM_PARAMS, generator=torch.Generator().manual_seed(0))


def gradients(steps: int, names: Sequence[str] = "ab", seed: int = 1) -> dict[str, list[Tensor]]:
    """Return gradients per region and step, (P,) each; very different, so that replicas diverge."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: [torch.randn(NUM_PARAMS, generator=generator) for _ in range(steps)] for name in names
    }


@dataclass(slots=True)
class FleetRegion:
    """A region's shards, and the counters of its server."""

    name: str
    shards: list[Shard]
    samples: int
    fragments: int
    seq: int = 0
    version: int = 0
    since: int = 0
    steps: int = 0
    age: int = 0
    waiting: bool = False
    stalled: bool = False  # blocked by an answer before it may send again
    sent: UpdateMessage | None = None
    inbox: list[ReplyMessage] = field(default_factory=list)
    model: RegionModel = field(init=False)

    def __post_init__(self) -> None:
        self.model = RegionModel(self.shards, NUM_PARAMS, self.fragments)

    @property
    def params_P(self) -> Tensor:
        """A copy of the region's parameters (P,)."""
        return torch.cat([shard.params_S for shard in self.shards])

    def storages(self) -> set[int]:
        """Storages of this region's live tensors."""
        tensors = [t for s in self.shards for t in (s.params_S, *s.state.memory.values())]
        return _storages(tensors)


class Fleet:
    """A few regions and an averager without clock and network, which check a strategy's messages.

    Regions step in turn, and a region that is not blocked gets its answer some steps later. Rules
    for all messages are checked on the way: they are never live state, one request is open at a
    time, and no region waits without reason.

    Shape legend: P = parameters of the model; S = slice of one shard.

    Args:
        strategy: the checked strategy.
        optimizer: optimizer of every region.
        num_shards: shards of every region.
        names: the regions, from `SAMPLES`.
        lag: steps until an answer arrives.
        spoil: overwrite every answered message, because its memory is reused.
    """

    def __init__(
        self,
        strategy: Strategy,
        optimizer: OneOptimizer = PLAIN,
        num_shards: int = 1,
        *,
        names: Sequence[str] = "ab",
        lag: int = LAG,
        spoil: bool = False,
    ) -> None:
        start_P, parts = start(), strategy.traits.exchange.fragments
        slices = split_sizes(NUM_PARAMS, num_shards)
        self.regions = {
            name: FleetRegion(
                name,
                [Shard.from_slice(start_P, piece, optimizer, strategy) for piece in slices],
                SAMPLES[name],
                parts,
            )
            for name in names
        }
        state = AveragerState(tuple(sorted(names)), data_rows=DATA_ROWS)
        self.averager = Averager(strategy, NUM_PARAMS, state)
        self.updates: list[UpdateMessage] = []
        self.replies: list[ReplyMessage] = []
        self.waits: set[str] = set()  # regions that were blocked by a late answer
        self.stood_still: list[bool] = []  # for every request but the last
        self.answered: list[set[str]] = []  # for every request
        self._said: list[tuple[Tensor, Tensor]] = []
        self._strategy = strategy
        self._lag = lag
        self._spoil = spoil

    def step(self, grads: Mapping[str, Tensor | None]) -> None:
        """Run one step of every named region that is not blocked, in the order of the names."""
        for name, grad_P in grads.items():
            region = self.regions[name]
            if region.waiting:
                continue
            self.apply(region, grad_P)
            region.age += 1
            if region.age >= self._lag:
                self.merge(region)
            self._speak(region)
        if not self._strategy.traits.averager.releases and grads.keys() == self.regions.keys():
            left = [region.name for region in self.regions.values() if region.waiting]
            expect(
                not left,
                f"regions {left} are not answered, but its traits state that it never `releases`",
            )

    def apply(self, region: FleetRegion, grad_P: Tensor | None) -> None:
        """Run the server's part of a step; None is a refused gradient."""
        if grad_P is not None:
            pairs = zip(region.shards, split_sizes(NUM_PARAMS, len(region.shards)), strict=True)
            for shard, (i, j) in pairs:
                shard.put(0, grad_P[i:j].clone())
        samples = 0 if grad_P is None else region.samples
        region.since += samples
        region.steps += 1
        region.model.apply([Contribution(0, samples)])

    def send(self, region: FleetRegion, out: Outgoing, *, final: bool = False) -> None:
        """Pass a message to the averager, and its answers to their regions."""
        expect(region.sent is None, "a region sends while its last request is open")
        own = region.storages() | _storages(self.averager.state.memory.values())
        expect(not _storages([out.payload_P]) & own, "a message is live state instead of a copy")
        self._said.append((out.payload_P, out.payload_P.clone()))
        region.seq += 1
        update = UpdateMessage(
            region.name,
            1,
            region.seq,
            region.version,
            region.since,
            out.payload_P,
            final,
            fragment=out.fragment,
            steps=1,
        )
        region.since, region.sent, region.waiting, region.age = 0, update, out.wait, 0
        self.updates.append(update)
        if not final:
            self.stood_still.append(out.wait)
        replies = self.averager.on_update(update)
        self.answered.append({reply.to for reply in replies})
        self._take(replies)
        self._deliver()

    def merge(self, region: FleetRegion) -> bool:
        """Merge the answer, if it has arrived."""
        if not region.inbox:
            return False
        reply = region.inbox.pop()
        expect(
            region.sent is not None and reply.seq == region.sent.seq,
            "an answer belongs to another request than the open one",
        )
        before_P = reply.payload_P.clone()
        region.model.merge(reply)
        expect(torch.equal(reply.payload_P, before_P), "on_reply changes the answer's payload")
        held = region.storages() | _storages(self.averager.state.memory.values())
        expect(not _storages([reply.payload_P]) & held, "an answer's payload becomes live state")
        region.version, region.sent = reply.version, None
        region.waiting = region.stalled = False
        return True

    def settle(self) -> None:
        """Answer all regions, as before a checkpoint."""
        self._release()
        for region in self.regions.values():
            self.merge(region)

    def finish(self) -> None:
        """Run the last exchange."""
        self.settle()
        for region in self.regions.values():
            out = region.model.finish()
            if out is not None:
                self.send(region, out, final=True)
        open_ = [region.name for region in self.regions.values() if region.sent is not None]
        expect(not open_, f"regions {open_} are not answered at the end")
        changed = [said for said, then in self._said if not torch.equal(said, then)]
        expect(self._spoil or not changed, "a message changed after it was sent")

    def leave(self, name: str) -> None:
        """Continue without a region."""
        del self.regions[name]
        self._take(self.averager.leave(name))
        self._deliver()

    def run(self, grads: Mapping[str, Sequence[Tensor | None]], steps: range) -> Fleet:
        """Some steps."""
        for t in steps:
            self.step({name: g[t] for name, g in grads.items() if name in self.regions})
        return self

    def restore(self, other: Fleet) -> None:
        """Restore the state of another fleet from its checkpoint."""
        self.averager.restore(*other.averager.export())
        for name, region in self.regions.items():
            other_region = other.regions[name]
            for shard, theirs in zip(region.shards, other_region.shards, strict=True):
                shard.restore(*theirs.export())
            region.seq, region.version, region.since = (
                other_region.seq,
                other_region.version,
                other_region.since,
            )

    def digests(self) -> list[str]:
        """Return digests of the regions' parameters."""
        return [digest(region.params_P) for region in self.regions.values()]

    def _speak(self, region: FleetRegion) -> None:
        out = region.model.outgoing()
        if isinstance(out, Wait):
            expect(region.sent is not None, "a region is blocked without an open request")
            self.waits.add(region.name)
            if not self.merge(region):
                region.waiting = region.stalled = True
                return
            out = region.model.outgoing()
            expect(not isinstance(out, Wait), "a region is blocked although it has its answer")
        if isinstance(out, Outgoing):
            self.send(region, out)

    def _deliver(self) -> None:
        """Deliver answers to blocked regions, and let regions send that could not before."""
        for region in list(self.regions.values()):
            stalled = region.stalled
            if region.waiting and self.merge(region) and stalled:
                self._speak(region)

    def _release(self) -> None:
        if not self._strategy.traits.averager.releases:
            return
        self._take(self.averager.release_waiting())
        left = sorted(self.averager.state.waiting)
        expect(not left, f"after on_release regions {left} still wait")

    def _take(self, replies: Sequence[ReplyMessage]) -> None:
        for reply in replies:
            self.replies.append(reply)
            region = self.regions[reply.to]
            region.inbox.append(reply)
            if self._spoil and region.sent is not None:
                region.sent.payload_P.fill_(float("nan"))


def _storages(tensors: Iterable[Tensor]) -> set[int]:
    return {t.untyped_storage().data_ptr() for t in tensors if t.numel()}


_LEAST: Final = 9
_NEAR: Final = 1e-5


def _run(strategy: Strategy) -> Fleet:
    """Run two exchanges of every fragment and more, with answers at the next step, and the end."""
    exchange = strategy.traits.exchange
    steps = max(_LEAST, math.ceil(2 * exchange.every * exchange.fragments))
    fleet = Fleet(strategy, lag=1).run(gradients(steps), range(steps))
    fleet.finish()
    return fleet


def _sent(fleet: Fleet, name: str) -> list[UpdateMessage]:
    return [update for update in fleet.updates if update.region == name]


def exchanges_are_as_many_as_it_says(strategy: Strategy) -> None:
    """The number of exchanges matches the traits after every step, and after the end."""
    exchange = strategy.traits.exchange
    tolerance = 0 if float(exchange.every).is_integer() else 1
    steps = max(_LEAST, math.ceil(2 * exchange.every * exchange.fragments)) + 1
    fleet, grads = Fleet(strategy, lag=1), gradients(steps)
    for t in range(steps):
        fleet.run(grads, range(t, t + 1))
        _expect_count(fleet, exchange.within, tolerance)
    fleet.finish()
    _expect_count(fleet, exchange.count, tolerance)


def _expect_count(fleet: Fleet, expected: Callable[[int], int], tolerance: int) -> None:
    for name, region in fleet.regions.items():
        found, wanted = len(_sent(fleet, name)), expected(region.steps)
        expect(
            abs(wanted - found) <= tolerance,
            f"in {region.steps} steps region {name} sent {found} times; its traits state {wanted}",
        )


def payloads_are_as_large_as_it_says(strategy: Strategy) -> None:
    """Payloads cover one fragment each, in turn if stated; the last one covers the whole model."""
    exchange, fleet = strategy.traits.exchange, _run(strategy)
    cuts = fragment_bounds(NUM_PARAMS, exchange.fragments)
    for name in fleet.regions:
        ordinary = [update for update in _sent(fleet, name) if not update.final]
        for update in _sent(fleet, name):
            start_, stop = cuts[update.fragment]
            size = update.payload_P.numel()
            expect(
                size == stop - start_,
                f"a payload has {size} values, but its fragment has another size",
            )
            whole = not update.final or size == NUM_PARAMS
            expect(whole, "the last exchange does not cover the whole model")
        if not exchange.in_turn:
            continue
        full = len(ordinary) // exchange.fragments * exchange.fragments
        sent = 4 * sum(update.payload_P.numel() for update in ordinary[:full])
        expected = full * exchange.payload_bytes(NUM_PARAMS)
        expect(
            abs(sent - expected) < 1,
            f"{full} exchanges sent {sent} bytes; its traits state {expected}",
        )
    sizes = {(reply.to, reply.seq): reply.payload_P.numel() for reply in fleet.replies}
    asked = {(update.region, update.seq): update.payload_P.numel() for update in fleet.updates}
    expect(sizes == {key: asked[key] for key in sizes}, "an answer differs in size from its update")


def regions_stand_still_as_it_says(strategy: Strategy) -> None:
    """Regions are blocked by every exchange, by late ones, or by none."""
    expected = strategy.traits.exchange.blocking
    fleet = Fleet(strategy, lag=3)
    exchange = strategy.traits.exchange
    steps = max(_LEAST, math.ceil(2 * exchange.every * exchange.fragments))
    fleet.run(gradients(steps), range(steps)).finish()
    if expected == "always":
        expect(all(fleet.stood_still), "a region trains on while its request is open")
    else:
        expect(
            not any(fleet.stood_still), f"a region is blocked at once; its traits state {expected}"
        )
    if expected == "never":
        expect(not fleet.waits, "a region is blocked by a late answer; its traits state never")


def payloads_mean_what_it_says(strategy: Strategy) -> None:
    """Models are those of the region; changes are zero without a step."""
    steps = max(_LEAST, math.ceil(2 * strategy.traits.exchange.every))
    fleet = Fleet(strategy, lag=1).run({"a": [None] * steps, "b": [None] * steps}, range(steps))
    fleet.finish()
    for update in fleet.updates:
        if strategy.traits.sends == "model":
            same = torch.equal(update.payload_P, start())
            expect(same, "its traits state that it sends models, but a payload is not a model")
        else:
            zero = not update.payload_P.any()
            expect(
                zero,
                "its traits state that it sends changes, but without a change a payload is not "
                "zero",
            )


def rounds_answer_all_or_nobody(strategy: Strategy) -> None:
    """Rounds answer all regions or none; without rounds, answers precede the last update."""
    steps = max(_LEAST, math.ceil(2 * strategy.traits.exchange.every))
    fleet = Fleet(strategy, names=("a", "b", "c"), lag=1)
    fleet.run(gradients(steps, ("a", "b", "c")), range(steps)).finish()
    if strategy.traits.in_rounds:
        odd = [sorted(to) for to in fleet.answered if len(to) not in (0, 3)]
        expect(not odd, f"its traits state rounds, but only {odd[:1]} were answered")


def the_named_memory_is_a_model(strategy: Strategy) -> None:
    """The evaluated memory has the size of the parameters."""
    name, fleet = strategy.traits.region.eval_params, _run(strategy)
    if name is None:
        return
    for region in fleet.regions.values():
        found = region.shards[0].state.memory.get(name)
        expect(found is not None, f"no memory {name!r} to evaluate")
        expect(found is None or found.shape == (NUM_PARAMS,), f"memory {name!r} is not a model")


def the_rate_is_where_it_says(strategy: Strategy) -> None:
    """The learning rate is an option of the optimizer or of the strategy."""
    section, *keys = strategy.traits.region.rate_key.split(".")
    if section == "optimizer":
        expect(keys == ["lr"], "the rate of the optimizer is optimizer.lr")
        return
    expect(section == "strategy", "the rate must be in `optimizer` or `strategy`")
    value: object = strategy
    for key in keys:
        fields = dict(value) if isinstance(value, BaseModel) else {}
        expect(key in fields, f"no option {strategy.traits.region.rate_key}")
        value = fields[key]
    expect(isinstance(value, float), f"{strategy.traits.region.rate_key} is not a rate")


def workers_push_what_it_says(strategy: Strategy) -> None:
    """With worker_steps, pushes are changes, so the region's optimizer is unused."""
    if not strategy.traits.region.worker_steps:
        return
    fleet = Fleet(strategy)
    calls: list[Tensor] = []
    for region in fleet.regions.values():
        region.shards[0].state.apply_gradient = calls.append
    steps = max(_LEAST, math.ceil(2 * strategy.traits.exchange.every))
    fleet.run(gradients(steps), range(steps))
    expect(not calls, "workers push changes, but the region's optimizer uses them as gradients")


def the_clock_is_asked_for_as_it_says(strategy: Strategy) -> None:
    """A strategy that requests a wake-up states that in its traits."""
    if not strategy.traits.averager.wakes:
        woken = _run(strategy).averager.state.wake_s
        expect(woken is None, "it requests a wake-up, but its traits do not state `wakes`")


def rounds_may_be_summed_as_it_says(strategy: Strategy) -> None:
    """A weighted mean sent for every region gives the same answers."""
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
        gap = float((wanted[0].payload_P - found[0].payload_P).abs().max())
        expect(gap <= _NEAR, f"the answer to summed updates with rows {rows} differs by {gap:g}")
        if mean.is_answer:
            gap = float((found[0].payload_P - mean_P).abs().max())
            expect(gap <= _NEAR, f"its answer differs from the mean by {gap:g}")


def _round(
    strategy: Strategy, state: AveragerState, payloads: Mapping[str, Tensor], rows: tuple[int, ...]
) -> list[Reply]:
    replies: list[Reply] = []
    for (name, payload_P), count in zip(payloads.items(), rows, strict=True):
        replies = strategy.on_update(state, Update(name, payload_P.clone(), count))
    expect(len(replies) == len(payloads), "a whole round was not answered")
    return replies


def updates_add_up_as_it_says(strategy: Strategy) -> None:
    """A sum of updates has the same effect as the separate updates."""
    if strategy.traits.averager.adds_up is None:
        return
    payloads = torch.randn(2, NUM_PARAMS, generator=torch.Generator().manual_seed(4))
    updates = [
        UpdateMessage(name, 1, 1, 0, SAMPLES[name], payload_P)
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
        replies += averager.on_update(UpdateMessage("c", 1, 1, 2, 4, torch.zeros(NUM_PARAMS)))
        replies += averager.on_update(UpdateMessage("a", 1, 2, 2, 4, torch.zeros(NUM_PARAMS)))
        for reply in replies:
            models[reply.to] -= reply.payload_P
            if reply.own:
                models[reply.to] += payloads["ab".index(reply.to)]
        ends.append(torch.stack([models[name] for name in "ac"]))
    gap = float((ends[0] - ends[1]).abs().max())
    expect(gap <= _NEAR, f"a sum of updates differs by {gap:g} from the separate updates")


def mean_gradients_are_such(strategy: Strategy) -> None:
    """Updates are gradients, and answers their mean weighted by rows."""
    if not strategy.traits.averager.mean_gradient:
        return
    grads = gradients(1)
    fleet = Fleet(strategy).run(grads, range(1))
    for update in fleet.updates:
        same = torch.equal(update.payload_P, grads[update.region][0])
        expect(same, "its traits state that updates are gradients")
    total = sum(SAMPLES[name] for name in grads)
    mean_P = sum((SAMPLES[n] / total * each[0] for n, each in grads.items()), torch.zeros(()))
    gap = float((fleet.replies[0].payload_P - mean_P).abs().max())
    expect(gap <= _NEAR, "its traits state that answers are the mean by rows")


HONESTY: Final[Checks[Strategy]] = {
    "traits: the number of exchanges": exchanges_are_as_many_as_it_says,
    "traits: the size of payloads": payloads_are_as_large_as_it_says,
    "traits: blocking of regions": regions_stand_still_as_it_says,
    "traits: the meaning of payloads": payloads_mean_what_it_says,
    "traits: rounds answer all regions or none": rounds_answer_all_or_nobody,
    "traits: the evaluated memory is a model": the_named_memory_is_a_model,
    "traits: the key of the learning rate": the_rate_is_where_it_says,
    "traits: the meaning of pushes": workers_push_what_it_says,
    "traits: wake-ups": the_clock_is_asked_for_as_it_says,
    "traits: rounds can be summed": rounds_may_be_summed_as_it_says,
    "traits: updates can be summed": updates_add_up_as_it_says,
    "traits: answers are mean gradients": mean_gradients_are_such,
}
"""Checks of the traits."""


_STEPS: Final = 9
_OPTIMIZERS: Final = (PLAIN, Momentum(lr=0.05, nesterov=True), AdamW(lr=0.01))


def _steps_of(strategy: Strategy) -> int:
    """Return enough steps for two exchanges of every fragment."""
    exchange = strategy.traits.exchange
    return max(_STEPS, math.ceil(2 * exchange.every * exchange.fragments) + 1)


def _is_exact(strategy: Strategy) -> bool:
    """Return whether all regions merge the same payload at the end."""
    return strategy.traits.in_rounds or strategy.traits.sends == "model"


def _expect_equal(strategy: Strategy, fleet: Fleet, when: str) -> None:
    first, *others = [region.params_P for region in fleet.regions.values()]
    for other_P in others:
        gap = float((first - other_P).abs().max())
        near = 0.0 if _is_exact(strategy) else _NEAR
        expect(gap <= near, f"{when} regions are {gap:g} apart")


def the_end_leaves_all_regions_equal(strategy: Strategy) -> None:
    """All regions are equal after the last exchange, and training has changed them."""
    steps = _steps_of(strategy)
    for optimizer in _OPTIMIZERS:
        fleet = Fleet(strategy, optimizer).run(gradients(steps), range(steps))
        fleet.finish()
        _expect_equal(strategy, fleet, "after the last exchange")
        moved = not torch.equal(fleet.regions["a"].params_P, start())
        expect(moved, "training has not changed the parameters")


def regions_may_end_at_other_times(strategy: Strategy) -> None:
    """Without rounds, regions may end at different times."""
    traits, steps = strategy.traits, _steps_of(strategy)
    if traits.in_rounds or traits.region.ends_by_total_rows:
        return
    fleet, grads = Fleet(strategy), gradients(steps)
    fleet.run(grads, range(4))
    fleet.run({"b": grads["b"]}, range(4, steps))
    fleet.finish()
    _expect_equal(strategy, fleet, "when one ended before the other")


def messages_are_the_carriers_once_answered(strategy: Strategy) -> None:
    """An answered message may be overwritten."""
    steps = _steps_of(strategy)
    fleets = [
        Fleet(strategy, spoil=spoil).run(gradients(steps), range(steps)) for spoil in (False, True)
    ]
    for fleet in fleets:
        fleet.finish()
    same = fleets[0].digests() == fleets[1].digests()
    expect(same, "the content of an overwritten message has an effect")


def everything_lies_in_the_states(strategy: Strategy) -> None:
    """Interleaved runs with one object are independent, and keep the random state unchanged."""
    steps, found = _steps_of(strategy), []
    torch.manual_seed(1)
    before = torch.get_rng_state()
    alone = [whole_run(strategy, seed) for seed in (1, 2)]
    fleets, grads = [Fleet(strategy), Fleet(strategy)], [gradients(steps, seed=s) for s in (1, 2)]
    for t in range(steps):
        for fleet, each in zip(fleets, grads, strict=True):
            fleet.run(each, range(t, t + 1))
    for fleet in fleets:
        fleet.finish()
        found.append(fleet.digests())
    expect(torch.equal(torch.get_rng_state(), before), "the global random state changed")
    expect(found == alone, "it has state outside of its state objects")


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
    """A refused gradient changes neither parameters nor optimizer state."""
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
            expect(not moved, f"the optimizer's {moved} changed")


def rounds_of_refused_gradients_change_no_region(strategy: Strategy) -> None:
    """Rounds of refused gradients change no region, even with momentum."""
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
    """Resuming from checkpoints at several steps gives the same bits."""
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
    """Any number of shards gives the same bits, unless the traits require one."""
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
    """The order of updates in a round has no effect; without rounds, regions agree at the end."""
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
    """Four and five regions end with one model."""
    steps = _steps_of(strategy)
    for names in ("abcd", "abcde"):
        fleet = Fleet(strategy, names=tuple(names))
        fleet.run(gradients(steps, tuple(names)), range(steps)).finish()
        _expect_equal(strategy, fleet, f"after a run of {len(names)} regions")


def nobody_waits_for_a_region_that_left(strategy: Strategy) -> None:
    """The others finish and agree after a region has left, before or after its first update."""
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
    """A checkpoint changes neither rounds nor models."""
    steps = _steps_of(strategy)
    saved, whole, grads = Fleet(strategy), Fleet(strategy), gradients(2 * steps + LAG)
    for fleet in (saved, whole):
        fleet.run(grads, range(4))
        if fleet is saved:
            expect(fleet.averager.begin_checkpoint(1, halt=False), "a checkpoint was rejected")
        fleet.run(grads, range(4, 2 * steps))
        fleet.finish()
        _expect_equal(strategy, fleet, "after a checkpoint during the run")
    versions = [fleet.averager.state.version for fleet in (saved, whole)]
    expect(versions[0] == versions[1], f"{versions[0]} commits, {versions[1]} without a checkpoint")
    same = all(
        torch.equal(saved.regions[name].params_P, whole.regions[name].params_P)
        for name in saved.regions
    )
    expect(same, "a checkpoint during the run has changed the final model")


def finite_gradients_give_finite_models(strategy: Strategy) -> None:
    """Finite gradients give finite models: zero, tiny, and ten times as large ones."""
    steps = _steps_of(strategy)
    for scale in (0.0, 1e-20, 10.0):
        grads: dict[str, list[Tensor]] = {
            name: [scale * grad_P for grad_P in each] for name, each in gradients(steps).items()
        }
        fleet = Fleet(strategy).run(grads, range(steps))
        fleet.finish()
        for region in fleet.regions.values():
            finite = bool(region.params_P.isfinite().all())
            expect(finite, f"gradients of about {scale:g} give non-finite parameters")
        payloads = [reply.payload_P for reply in fleet.replies]
        expect(all(bool(p.isfinite().all()) for p in payloads), "an answer is not finite")


def a_repeated_update_changes_nothing(strategy: Strategy) -> None:
    """A repeated update gets the same answer, and is not counted twice."""
    steps = _steps_of(strategy)
    fleet = Fleet(strategy).run(gradients(steps), range(steps))
    before = fleet.averager.export()
    if fleet.updates:
        fleet.averager.on_update(replace(fleet.updates[-1]))
    after = fleet.averager.export()
    same = all(torch.equal(value, after[0][key]) for key, value in before[0].items())
    expect(same and before[1] == after[1], "a repeated update counts twice")


CHECKS: Final[Checks[Strategy]] = {
    "its options are frozen and strict": check_options,
    "after the last exchange all regions are equal": the_end_leaves_all_regions_equal,
    "regions without rounds may end at different times": regions_may_end_at_other_times,
    "an answered message may be overwritten": messages_are_the_carriers_once_answered,
    "it has no state outside of its state objects": everything_lies_in_the_states,
    "the same run gives the same bits": the_same_run_gives_the_same_bits,
    "a refused gradient changes nothing": a_refused_gradient_changes_nothing,
    "rounds of refused gradients change no region": rounds_of_refused_gradients_change_no_region,
    "a resumed run continues with the same bits": what_was_saved_goes_on_with_the_same_bits,
    "several shards give the bits of a single one": shards_give_the_bits_of_one,
    "rounds do not depend on the order of updates": rounds_do_not_depend_on_who_comes_first,
    "four and five regions end with one model": more_regions_come_to_one_model_too,
    "no region waits for one that left": nobody_waits_for_a_region_that_left,
    "a checkpoint changes no result": a_checkpoint_holds_nobody_up,
    "finite gradients give finite models": finite_gradients_give_finite_models,
    "a repeated update counts once": a_repeated_update_changes_nothing,
    **HONESTY,
}
"""All contract checks of strategies."""
