"""Every strategy keeps the same promises; new ones join through the registry."""

from __future__ import annotations

from dataclasses import dataclass, field

import golden_async
import golden_plain
import golden_rounds
import pytest
import torch
from golden_rounds import LAG, LR
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from geo_ray.strategies.base import AveragerState, Outgoing, Reply, Strategy, Update, Wait
from geo_ray.strategies.registry import STRATEGIES, AnyStrategy
from geo_ray.strategies.traits import Holding, fragments_of, has_equal_steps, needs_whole_model
from geo_ray.training.averager.averager import Averager
from geo_ray.training.compute.flat import digest, split_sizes
from geo_ray.training.compute.optimizers import AdamW, Momentum, Sgd
from geo_ray.training.server.region_model import RegionModel
from geo_ray.training.server.shard import Contribution, Shard

NUM_PARAMS = 67  # no multiple of a vector's length, and enough for three shards
STEPS = 9
OPTIMIZERS = (Sgd(lr=0.1), Momentum(lr=0.05, nesterov=True), AdamW(lr=0.01))
MORE_OPTIONS = {
    "bsp": [{"weights": "uniform"}],
    "asgd": [{"wait": "when_busy", "combine": "mean"}, {"combine": "sum"}],
    "asgd_ga": [
        {"interval": 2, "wait": "always", "combine": "sum"},
        {"interval": 3, "wait": "when_busy", "combine": "mean"},
        {"interval": 1, "wait": "never", "combine": "mean"},
    ],
    "ama": [{"interval": 2, "alpha": 0.5}, {"staleness": {"weight": "inverse", "bound": 1}}],
    "sma": [{"interval": 3, "weights": "uniform"}],
    "fedavg": [{"interval": 2, "fraction": 0.5}, {"interval": 1, "outer": {"kind": "adam"}}],
    "fedssgd": [{"accumulate": 3, "weights": "uniform"}],
    "esync": [{"slowest_steps": 2, "weights": "samples", "outer": {"kind": "nesterov"}}],
    "hfa": [{"k1": 1, "k2": 2}],
    "nbsync": [{"merge": "correct"}, {"max_local_steps": 1, "weights": "samples"}],
    "diloco": [{"interval": 2}, {"interval": 1, "outer": {"kind": "sgd"}}],
    "diloco_streaming": [
        {"interval": 4, "fragments": 2, "tau": 1},
        {"interval": 8, "fragments": 2, "tau": 3, "merge": "correct"},
    ],
    "diloco_eager": [{"interval": 2}],
    "one_step_delay": [{"interval": 2, "merge": "correct"}, {"interval": 3}],
    "decoupled": [
        {"interval": 4, "fragments": 2, "merge": "rda"},
        {"interval": 2, "fragments": 2, "quorum": 2, "alpha": 0.5},
    ],
    "fedasync": [{"interval": 2, "staleness": {"weight": "hinge", "bound": 1}}],
    "fedat": [{"interval": 2, "tiers": 1}, {"interval": 1, "retier_every": 1}],
    "fedgsync": [{"interval": 2}, {"interval": 1, "outer": {"kind": "nesterov"}}],
    "async_local_sgd": [{"interval": 2, "by_speed": False}, {"interval": 1, "weights": "uniform"}],
    "halos": [
        {"interval": 2, "in_flight": "paper"},
        {"interval": 1, "local": {"lr": 1.0, "momentum": 0.0, "period": 1}},
    ],
    "dc_asgd": [{"interval": 2, "adaptive": True}, {"compensation": 0.0}],
    "gaia": [{"threshold": 10.0}, {"threshold": 0.0, "interval": 2, "combine": "sum"}],
    "sparseloco": [{"interval": 2, "clip": False}, {"interval": 3}],
    "demo": [{"chunk": 16, "top": 2}],
}
CASES = [
    pytest.param(kind, options, id=f"{kind}-{i}")
    for kind in STRATEGIES
    for i, options in enumerate([{}, *MORE_OPTIONS.get(kind, [])])
]
# Each region is told in portions of its own what adds up to the same: equal to rounding.
TO_ROUNDING = {
    "asgd",
    "asgd_ga",
    "async_local_sgd",
    "dc_asgd",
    "decoupled",
    "fedasync",
    "fedat",
    "fedavg",
    "fedgsync",
    "gaia",
    "halos",
}


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
    fragments: int = 1

    def __post_init__(self) -> None:
        self.model = RegionModel(self.shards, NUM_PARAMS, self.fragments)

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
                [Shard.cut(start_P, piece, optimizer, strategy) for piece in slices],
                samples,
                fragments=fragments_of(strategy),
            )
            for name, samples in (("a", 16), ("b", 8))
        }
        self.state = Averager(strategy, NUM_PARAMS, AveragerState(tuple(self.regions)))
        self.spoil = spoil
        self.payloads: list[tuple[Tensor, Tensor]] = []

    def step(self, grads: dict[str, Tensor | None]) -> None:
        for region in self.regions.values():
            if region.name not in grads or region.waiting:
                continue
            grad_P = grads[region.name]
            self.apply(region, grad_P)
            region.age += 1
            if region.age >= LAG:
                self.merge(region)
            out = region.model.outgoing()
            if isinstance(out, Wait):  # for the answer that this harness would deliver later
                assert self.merge(region)
                out = region.model.outgoing()
            assert not isinstance(out, Wait)
            if out is not None:
                self.send(region, out)
        if not isinstance(self.state.strategy, Holding):
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
            t.untyped_storage().data_ptr() for t in self.state.state.memory.values()
        }
        assert out.payload_P.untyped_storage().data_ptr() not in own
        self.payloads.append((out.payload_P, out.payload_P.clone()))
        region.seq += 1
        update = Update(
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
        for reply in self.state.on_update(update):
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
        held |= {t.untyped_storage().data_ptr() for t in self.state.state.memory.values()}
        assert reply.payload_P.untyped_storage().data_ptr() not in held
        region.version, region.sent, region.waiting = reply.version, None, False
        return True

    def settle(self) -> None:
        for reply in self.state._release_waiting():  # as before a checkpoint
            self.regions[reply.to].inbox.append(reply)
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
    if kind in TO_ROUNDING:
        assert torch.allclose(a_P, b_P, rtol=0, atol=1e-5)
    else:
        assert torch.equal(a_P, b_P)


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_regions_that_end_at_other_times_are_equal_too(kind, options):
    strategy = build(kind, options)
    if strategy.in_rounds or not has_equal_steps(strategy):
        return  # regions end together: Experiment refuses anything else
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
    shards = 1 if needs_whole_model(strategy) else 2
    fleet = Fleet(strategy, optimizer, shards).run(gradients(), range(after))
    fleet.settle()
    again = Fleet(strategy, optimizer, shards).run(gradients(seed=9), range(2))  # of no use
    again.settle()
    again.state.restore(*fleet.state.export())
    for name, region in fleet.regions.items():
        for shard, twin in zip(region.shards, again.regions[name].shards, strict=True):
            twin.restore(*shard.export())
            assert twin.state.step == shard.state.step > 0
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
    if needs_whole_model(build(kind, options)):
        return  # Experiment refuses several shards
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

GOLDEN = vars(golden_plain) | vars(golden_rounds) | vars(golden_async)


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_the_rule_is_that_of_the_docstring(kind, options):
    strategy, grads = build(kind, options), gradients()
    name = f"golden_{kind}"
    assert name in GOLDEN, f"write {name}: the rule of {kind} in plain tensors"
    doubles = {i: [g.double() for g in grads[i]] for i in grads}
    expected = GOLDEN[name](start().double(), doubles, strategy)
    fleet, seen = Fleet(strategy, Sgd(lr=LR)), []
    for t in range(STEPS):
        fleet.step({i: grads[i][t] for i in grads})
        seen.append({i: region.params_P for i, region in fleet.regions.items()})
    fleet.finish()
    seen.append({i: region.params_P for i, region in fleet.regions.items()})
    for t, (ours, theirs) in enumerate(zip(seen, expected, strict=True)):
        for i in "ab":
            assert torch.allclose(ours[i].double(), theirs[i], rtol=0, atol=2e-6), (t, i)
