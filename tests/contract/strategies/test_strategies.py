"""Every strategy keeps the same promises; new ones join through the registry."""

from __future__ import annotations

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from geo_ray.strategies.base import Strategy
from geo_ray.strategies.config import AnyStrategy
from geo_ray.strategies.registry import STRATEGIES
from geo_ray.strategies.traits import Traits
from geo_ray.testing.strategies import CHECKS, Fleet, gradients, start
from geo_ray.training.optimizers import AdamW, Momentum, Sgd
from geo_ray.training.parameters import split_sizes
from geo_ray.training.shard import Shard
from tests.support import golden_async, golden_plain, golden_rounds
from tests.support.golden_rounds import LR

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
    "fedavg": [
        {"interval": 2, "fraction": 0.5, "weights": "samples"},
        {"interval": 1, "outer": {"kind": "adam"}},
    ],
    "fedssgd": [{"accumulate": 3, "weights": "uniform"}],
    "esync": [{"slowest_steps": 2, "weights": "samples", "outer": {"kind": "nesterov"}}],
    "hfa": [{"k1": 1, "k2": 2}],
    "nbsync": [{"merge": "correct"}, {"max_local_steps": 1, "weights": "samples"}],
    "diloco": [{"interval": 2}, {"interval": 1, "outer": {"kind": "sgd"}}],
    "diloco_streaming": [
        {"interval": 4, "fragments": 2, "tau": 1},
        {"interval": 8, "fragments": 2, "tau": 3, "merge": "correct"},
    ],
    "muloco": [{"interval": 2}, {"interval": 1, "outer": {"kind": "sgd"}}],
    "cocodc": [
        {"interval": 6, "fragments": 2, "tau": 1, "utilization": 0.5},
        {"interval": 4, "fragments": 2, "tau": 1, "compensation": 0.0},
        {"interval": 10, "fragments": 2, "tau": 1, "utilization": 0.9, "compensation": 2.0},
    ],
    "diloco_eager": [{"interval": 2}],
    "one_step_delay": [{"interval": 2, "merge": "correct"}, {"interval": 3}],
    "decoupled": [
        {"interval": 4, "fragments": 2, "merge": "rda"},
        {"interval": 2, "fragments": 2, "quorum": 2, "alpha": 0.5},
    ],
    "fedasync": [{"interval": 2, "staleness": {"weight": "hinge", "bound": 1}}],
    "fedat": [{"interval": 2, "tiers": 1}, {"interval": 1, "weights": "samples"}],
    "fedgsync": [{"interval": 2, "max_lag": 1}, {"interval": 1, "outer": {"kind": "nesterov"}}],
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


def build(kind: str, options: dict) -> Strategy:
    return TypeAdapter(AnyStrategy).validate_python({"kind": kind, **options})


@pytest.mark.parametrize("kind", STRATEGIES)
def test_a_strategy_is_a_frozen_configuration(kind):
    cls = STRATEGIES[kind]
    assert type(build(kind, {})) is cls and cls().kind == kind
    assert isinstance(cls().traits, Traits)
    with pytest.raises(ValidationError, match="frozen"):
        cls().kind = "other"
    with pytest.raises(ValidationError, match="nonsense"):
        cls(nonsense=1)
    with pytest.raises(ValidationError):
        build(kind, {"interval": 0, "weights": "none", "combine": "none"})


@pytest.mark.parametrize("promise", CHECKS)
@pytest.mark.parametrize(("kind", "options"), CASES)
def test_every_promise_is_kept(kind, options, promise):
    CHECKS[promise](build(kind, options))


@pytest.mark.parametrize("weights", ["samples", "uniform"])
def test_a_refused_gradient_is_none_and_not_one_of_zero(weights):
    fleet, grad_P = Fleet(build("bsp", {"weights": weights}), Sgd(lr=1.0)), gradients(STEPS)["b"][0]
    fleet.step({"a": None, "b": grad_P})
    for region in fleet.regions.values():
        assert torch.equal(region.params_P, start() - grad_P)


def test_restoring_a_shard_forgets_its_own_optimizer():
    strategy = STRATEGIES["sma"]()
    fresh = Shard(start(), OPTIMIZERS[1], strategy)
    used = Shard(start(), OPTIMIZERS[1], strategy)
    used._optimizer.apply(torch.ones_like(start()))
    used.restore(*fresh.export())
    for shard in (fresh, used):
        shard._optimizer.apply(torch.ones_like(start()))
    assert torch.equal(used.params_S, fresh.params_S)


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
    strategy, grads = build(kind, options), gradients(STEPS)
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
