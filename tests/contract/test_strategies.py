"""Every strategy keeps the same promises; new ones join through the registry."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from geo_ray.sync.base import HubState, Outgoing, Reply, Strategy, Update, Wait
from geo_ray.sync.registry import STRATEGIES, AnyStrategy
from geo_ray.training.averager import Averager
from geo_ray.training.flat import digest, split_sizes
from geo_ray.training.model import RegionModel
from geo_ray.training.optimizers import AdamW, Momentum, Sgd
from geo_ray.training.shard import Contribution, Shard

NUM_PARAMS = 67  # no multiple of a vector's length, and enough for three shards
STEPS = 9
LAG = 2  # steps until the answer is there, for those who do not wait
OPTIMIZERS = (Sgd(lr=0.1), Momentum(lr=0.05, nesterov=True), AdamW(lr=0.01))
MORE_OPTIONS = {
    "bsp": [{"weights": "uniform"}],
    "asgd": [{"wait": "when_busy", "combine": "mean"}, {"combine": "sum"}],
    "asgd_ga": [
        {"interval": 2, "wait": "always", "combine": "sum"},
        {"interval": 3, "wait": "when_busy", "combine": "mean"},
        {"interval": 1, "wait": "never", "combine": "mean"},
    ],
    "ama": [{"interval": 2, "alpha": 0.5}],
    "sma": [{"interval": 3, "weights": "uniform"}],
}
CASES = [
    pytest.param(kind, options, id=f"{kind}-{i}")
    for kind in STRATEGIES
    for i, options in enumerate([{}, *MORE_OPTIONS.get(kind, [])])
]
ADDITIVE = {"asgd", "asgd_ga"}  # sums in another order in each region: equal to rounding


def build(kind: str, options: dict) -> Strategy:
    return TypeAdapter(AnyStrategy).validate_python({"kind": kind, **options})


def start() -> Tensor:
    return torch.randn(NUM_PARAMS, generator=torch.Generator().manual_seed(0))


def gradients(seed: int = 1) -> dict[str, list[Tensor]]:
    """One per region and step; far from each other, so that replicas drift apart."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: [torch.randn(NUM_PARAMS, generator=generator) for _ in range(STEPS)]
        for name in ("a", "b")
    }


@dataclass
class Region:
    """A region's shards, and what a lead would count for them."""

    name: str
    shards: list[Shard]
    samples: int
    seq: int = 0
    version: int = 0
    since: int = 0
    sent: Update | None = None
    waiting: bool = False
    age: int = 0
    inbox: list[Reply] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = RegionModel(self.shards, NUM_PARAMS)

    @property
    def params_P(self) -> Tensor:
        return torch.cat([shard.params_S for shard in self.shards])

    def storages(self) -> set[int]:
        """Where this region's live tensors are."""
        tensors = [t for s in self.shards for t in (s.params_S, *s.state.memory.values())]
        return {t.untyped_storage().data_ptr() for t in tensors if t.numel()}


class Fleet:
    """Two regions step in turn; who does not wait gets its answer two steps later."""

    def __init__(self, strategy, optimizer=OPTIMIZERS[0], num_shards=1, spoil=False) -> None:
        start_P = start()
        slices = split_sizes(NUM_PARAMS, num_shards)
        self.regions = {
            name: Region(
                name,
                [Shard(start_P[i:j].clone(), optimizer, strategy) for i, j in slices],
                samples,
            )
            for name, samples in (("a", 16), ("b", 8))
        }
        self.hub = Averager(strategy, NUM_PARAMS, HubState(tuple(self.regions)))
        self.spoil = spoil
        self.payloads: list[tuple[Tensor, Tensor]] = []

    def step(self, grads: dict[str, Tensor | None]) -> None:
        for region in self.regions.values():
            if region.name not in grads:
                continue
            grad_P = grads[region.name]
            self.apply(region, grad_P)
            region.age += 1
            if region.age >= LAG:
                self.merge(region)
            out = region.model.speak()
            if isinstance(out, Wait):  # for the answer that this harness would deliver later
                assert self.merge(region)
                out = region.model.speak()
            assert not isinstance(out, Wait)
            if out is not None:
                self.send(region, out)
        assert not any(region.waiting for region in self.regions.values())

    def apply(self, region: Region, grad_P: Tensor | None) -> None:
        if grad_P is not None:
            pairs = zip(region.shards, split_sizes(NUM_PARAMS, len(region.shards)), strict=True)
            for shard, (i, j) in pairs:
                shard.put(0, grad_P[i:j].clone())
        samples = 0 if grad_P is None else region.samples
        region.since += samples
        region.model.apply([Contribution(0, samples)])

    def send(self, region: Region, out: Outgoing, *, final: bool = False) -> None:
        assert region.sent is None, "one request is open already"
        own = region.storages() | {
            t.untyped_storage().data_ptr() for t in self.hub.hub.memory.values()
        }
        assert out.payload_P.untyped_storage().data_ptr() not in own
        self.payloads.append((out.payload_P, out.payload_P.clone()))
        region.seq += 1
        update = Update(
            region.name, 1, region.seq, region.version, region.since, out.payload_P, final
        )
        region.since, region.sent, region.waiting, region.age = 0, update, out.wait, 0
        for reply in self.hub.on_update(update):
            self.regions[reply.to].inbox.append(reply)
            if self.spoil:  # an answered message is the carrier's again
                self.regions[reply.to].sent.payload_P.fill_(float("nan"))
        for other in self.regions.values():
            if other.waiting:
                self.merge(other)

    def merge(self, region: Region) -> bool:
        if not region.inbox:
            return False
        reply = region.inbox.pop()
        assert region.sent is not None and reply.seq == region.sent.seq
        region.model.merge(reply)
        held = region.storages()
        held |= {t.untyped_storage().data_ptr() for t in self.hub.hub.memory.values()}
        assert reply.payload_P.untyped_storage().data_ptr() not in held
        region.version, region.sent, region.waiting = reply.version, None, False
        return True

    def settle(self) -> None:
        for region in self.regions.values():
            self.merge(region)

    def finish(self) -> None:
        self.settle()
        for region in self.regions.values():
            out = region.model.finish()
            if out is not None:
                self.send(region, out, final=True)
        assert all(region.sent is None for region in self.regions.values())

    def run(self, grads: dict[str, list[Tensor]], steps: range = range(STEPS)) -> Fleet:
        for t in steps:
            self.step({name: g[t] for name, g in grads.items()})
        return self

    def digests(self) -> list[str]:
        return [digest(region.params_P) for region in self.regions.values()]


@pytest.mark.parametrize("kind", STRATEGIES)
def test_a_strategy_is_a_frozen_configuration(kind):
    cls = STRATEGIES[kind]
    assert type(build(kind, {})) is cls and cls().kind == kind
    assert isinstance(cls.in_rounds, bool)
    with pytest.raises(ValidationError, match="frozen"):
        cls().kind = "other"
    with pytest.raises(ValidationError, match="nonsense"):
        cls(nonsense=1)
    with pytest.raises(ValidationError):
        build(kind, {"interval": 0, "weights": "none", "combine": "none"})


@pytest.mark.parametrize(("kind", "options"), CASES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: o.kind)
def test_the_end_leaves_all_regions_equal(kind, options, optimizer):
    fleet = Fleet(build(kind, options), optimizer).run(gradients())
    fleet.finish()
    a_P, b_P = (region.params_P for region in fleet.regions.values())
    assert not torch.equal(a_P, start())
    if kind in ADDITIVE:
        assert torch.allclose(a_P, b_P, rtol=0, atol=1e-5)
    else:
        assert torch.equal(a_P, b_P)


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_regions_that_end_at_other_times_are_equal_too(kind, options):
    strategy = build(kind, options)
    if strategy.in_rounds:
        return  # rounds need the same number of steps everywhere; Experiment refuses others
    fleet = Fleet(strategy)
    grads = gradients()
    fleet.run(grads, range(4))
    fleet.run({"b": grads["b"]}, range(4, STEPS))
    fleet.finish()
    a_P, b_P = (region.params_P for region in fleet.regions.values())
    assert torch.allclose(a_P, b_P, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_messages_are_never_live_state(kind, options):
    """`Fleet` looks at every message's storage; here, what was said stays said."""
    fleet = Fleet(build(kind, options)).run(gradients())
    fleet.finish()
    assert fleet.payloads
    assert all(torch.equal(payload_P, then_P) for payload_P, then_P in fleet.payloads)


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_an_answered_message_may_be_overwritten(kind, options):
    fleets = [Fleet(build(kind, options), spoil=spoil).run(gradients()) for spoil in (False, True)]
    for fleet in fleets:
        fleet.finish()
    assert fleets[0].digests() == fleets[1].digests()


@pytest.mark.parametrize(("kind", "options"), CASES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: o.kind)
def test_a_refused_gradient_changes_nothing(kind, options, optimizer):
    fleet = Fleet(build(kind, options), optimizer).run(gradients(), range(4))
    fleet.settle()
    for region in fleet.regions.values():
        before_P, (state, _) = region.params_P, region.shards[0].export()
        fleet.apply(region, None)
        assert torch.equal(region.params_P, before_P)
        after, _ = region.shards[0].export()
        moved = [
            k for k, v in state.items() if k.startswith("optimizer/") and not v.equal(after[k])
        ]
        assert not moved


@pytest.mark.parametrize(("kind", "options"), CASES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: o.kind)
def test_a_round_of_refused_gradients_changes_no_region(kind, options, optimizer):
    fleet = Fleet(build(kind, options), optimizer)
    for region in fleet.regions.values():  # replicas are equal, optimizers have momentum
        for shard in region.shards:
            shard._optimizer.apply(torch.ones(NUM_PARAMS))
    before_P = fleet.regions["a"].params_P
    for _ in range(STEPS):
        fleet.step({"a": None, "b": None})
    fleet.finish()
    for region in fleet.regions.values():
        assert torch.equal(region.params_P, before_P)


@pytest.mark.parametrize("weights", ["samples", "uniform"])
def test_a_refused_gradient_is_none_and_not_one_of_zero(weights):
    fleet, grad_P = Fleet(build("bsp", {"weights": weights}), Sgd(lr=1.0)), gradients()["b"][0]
    fleet.step({"a": None, "b": grad_P})
    for region in fleet.regions.values():
        assert torch.equal(region.params_P, start() - grad_P)


@pytest.mark.parametrize(("kind", "options"), CASES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: o.kind)
@pytest.mark.parametrize("after", [1, 4, 5])
def test_a_restored_fleet_goes_on_with_the_same_bits(kind, options, optimizer, after):
    strategy = build(kind, options)
    fleet = Fleet(strategy, optimizer, num_shards=2).run(gradients(), range(after))
    fleet.settle()
    again = Fleet(strategy, optimizer, num_shards=2).run(gradients(seed=9), range(2))  # of no use
    again.settle()
    again.hub.restore(*fleet.hub.export())
    for name, region in fleet.regions.items():
        for shard, twin in zip(region.shards, again.regions[name].shards, strict=True):
            twin.restore(*shard.export())
            assert twin.state.step == after
        other = again.regions[name]
        other.seq, other.version, other.since = region.seq, region.version, region.since
    for each in (fleet, again):
        each.run(gradients(), range(after, STEPS)).finish()
    assert fleet.digests() == again.digests()


def test_restoring_a_shard_forgets_its_own_optimizer():
    strategy = STRATEGIES["sma"]()
    fresh = Shard(start(), OPTIMIZERS[1], strategy)
    used = Shard(start(), OPTIMIZERS[1], strategy)
    used._optimizer.apply(torch.ones(NUM_PARAMS))
    used.restore(*fresh.export())
    for shard in (fresh, used):
        shard._optimizer.apply(torch.ones(NUM_PARAMS))
    assert torch.equal(used.params_S, fresh.params_S)


@pytest.mark.parametrize(("kind", "options"), CASES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: o.kind)
def test_shards_give_the_bits_of_one(kind, options, optimizer):
    results = set()
    for num_shards in (1, 2, 3):
        fleet = Fleet(build(kind, options), optimizer, num_shards).run(gradients())
        fleet.finish()
        results.add(tuple(fleet.digests()))
    assert len(results) == 1


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: o.kind)
@pytest.mark.parametrize("num_params", [1, 2, 15, 33, 1000, 4099])
def test_any_cut_of_the_optimizer_gives_the_same_bits(optimizer, num_params):
    for num_shards in (2, 5, 7):
        slices = split_sizes(num_params, num_shards)
        assert slices[0][0] == 0 and slices[-1][1] == num_params
        assert all(i <= j for i, j in slices)
        if num_params < 16 * num_shards:
            continue  # slices shorter than a vector: equal to rounding only
        params_P = torch.randn(num_params, generator=torch.Generator().manual_seed(2))
        whole = Shard(params_P.clone(), optimizer, STRATEGIES["sma"](), alone=True)
        parts = [Shard(params_P[i:j].clone(), optimizer, whole._strategy) for i, j in slices]
        for seed in range(6):
            grad_P = torch.randn(num_params, generator=torch.Generator().manual_seed(seed))
            whole._optimizer.apply(grad_P)
            for part, (i, j) in zip(parts, slices, strict=True):
                part._optimizer.apply(grad_P[i:j])
        assert torch.equal(whole.params_S, torch.cat([p.params_S for p in parts]))


# ------------------------------------------------------------------ golden traces
# Plain SGD by the formulae of the strategies' docstrings, in float64, two regions with 2:1 samples.
# Each gives the parameters after every step, and once more after the end.

LR = 0.1
Trace = list[dict[str, Tensor]]


def golden_bsp(grads, strategy) -> Trace:
    q = {"a": 2 / 3, "b": 1 / 3} if strategy.weights == "samples" else {"a": 0.5, "b": 0.5}
    w, trace = start().double(), []
    for t in range(STEPS):
        w = w - LR * sum(q[i] * grads[i][t] for i in q)
        trace.append({"a": w, "b": w})
    return [*trace, trace[-1]]


def golden_sma(grads, strategy) -> Trace:
    q = {"a": 2 / 3, "b": 1 / 3} if strategy.weights == "samples" else {"a": 0.5, "b": 0.5}
    w, trace = {i: start().double() for i in q}, []
    for t in range(STEPS):
        w = {i: w[i] - LR * grads[i][t] for i in q}
        if (t + 1) % strategy.interval == 0:
            w = dict.fromkeys(q, sum(q[i] * w[i] for i in q))
        trace.append(w)
    return [*trace, dict.fromkeys(q, sum(q[i] * w[i] for i in q))]


def golden_additive(grads, interval, wait, combine) -> Trace:
    share = 0.5 if combine == "mean" else 1.0
    zero_P = torch.zeros(NUM_PARAMS, dtype=torch.float64)
    w, total = {i: start().double() for i in "ab"}, dict.fromkeys("ab", zero_P)  # total: A_i
    outbox, answer = dict.fromkeys("ab", zero_P), {}
    since, age, trace = dict.fromkeys("ab", 0), dict.fromkeys("ab", 0), []

    def speak(i):
        j = "b" if i == "a" else "a"
        outbox[j] = outbox[j] + share * total[i]
        outbox[i] = outbox[i] - (1 - share) * total[i]  # at home it counted in full
        total[i], since[i] = zero_P, 0

    def hear(i):
        w[i] = w[i] - answer.pop(i, zero_P)

    for t in range(STEPS):
        for i in "ab":
            w[i], total[i] = w[i] - LR * grads[i][t], total[i] + LR * grads[i][t]
            since[i], age[i] = since[i] + 1, age[i] + 1
            due = since[i] >= interval
            if age[i] >= LAG or (due and wait == "when_busy"):
                hear(i)
            if due and i not in answer:
                speak(i)
                answer[i], outbox[i], age[i] = outbox[i], zero_P, 0
                if wait == "always":
                    hear(i)
        trace.append(dict(w))
    for i in "ab":
        hear(i)
        speak(i)
    for i in "ab":
        w[i] = w[i] - outbox[i]
    return [*trace, w]


def golden_asgd(grads, strategy) -> Trace:
    return golden_additive(grads, 1, strategy.wait, strategy.combine)


def golden_asgd_ga(grads, strategy) -> Trace:
    return golden_additive(grads, strategy.interval, strategy.wait, strategy.combine)


def golden_ama(grads, strategy) -> Trace:
    w, snapshot, newest, answer = {i: start().double() for i in "ab"}, {}, {}, {}
    since, age, trace = dict.fromkeys("ab", 0), dict.fromkeys("ab", 0), []

    def hear(i):
        if i in answer:
            w[i] = w[i] + strategy.alpha * (answer.pop(i) - snapshot[i])

    for t in range(STEPS):
        for i in "ab":
            w[i] = w[i] - LR * grads[i][t]
            since[i], age[i] = since[i] + 1, age[i] + 1
            if age[i] >= LAG:
                hear(i)
            if since[i] >= strategy.interval and i not in answer:
                snapshot[i] = newest[i] = w[i]
                answer[i] = sum(newest.values()) / len(newest)
                since[i] = age[i] = 0
        trace.append(dict(w))
    for i in "ab":
        hear(i)
    return [*trace, dict.fromkeys("ab", (w["a"] + w["b"]) / 2)]


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_the_rule_is_that_of_the_docstring(kind, options):
    strategy, grads = build(kind, options), gradients()
    name = f"golden_{kind}"
    assert name in globals(), f"write {name}: the rule of {kind} in plain tensors"
    expected = globals()[name]({i: [g.double() for g in grads[i]] for i in grads}, strategy)
    fleet, seen = Fleet(strategy, Sgd(lr=LR)), []
    for t in range(STEPS):
        fleet.step({i: grads[i][t] for i in grads})
        seen.append({i: region.params_P for i, region in fleet.regions.items()})
    fleet.finish()
    seen.append({i: region.params_P for i, region in fleet.regions.items()})
    for t, (ours, theirs) in enumerate(zip(seen, expected, strict=True)):
        for i in "ab":
            assert torch.allclose(ours[i].double(), theirs[i], rtol=0, atol=2e-6), (t, i)
