"""What traits say in numbers; that strategies keep to them is the contract's."""

from __future__ import annotations

import pytest
from pydantic import TypeAdapter

from geo_ray.codecs.registry import CODECS, sections_of
from geo_ray.planner.loss import BITS_PER_PARAM, LOSS_BY_CODEC
from geo_ray.strategies.config import AnyStrategy
from geo_ray.strategies.registry import STRATEGIES
from geo_ray.strategies.traits import ExchangeTraits, RoundMean

BLOCKING = {
    "always": "bsp asgd sma fedavg fedssgd esync hfa diloco muloco sparseloco demo fedasync fedat "
    "fedgsync async_local_sgd dc_asgd",
    "when_late": "nbsync diloco_streaming cocodc diloco_eager one_step_delay",
    "never": "asgd_ga ama decoupled halos gaia",
}


def traits_of(kind: str, **options):
    return TypeAdapter(AnyStrategy).validate_python({"kind": kind, **options}).traits


def test_whether_regions_stand_still_by_default():
    found: dict[str, set[str]] = {}
    for kind, each in STRATEGIES.items():
        found.setdefault(each().traits.exchange.blocking, set()).add(kind)
    assert found == {told: set(kinds.split()) for told, kinds in BLOCKING.items()}


def test_options_change_what_a_strategy_says():
    waits = {wait: traits_of("asgd_ga", wait=wait).exchange.blocking
             for wait in ("always", "when_busy", "never")}  # fmt: skip
    assert waits == {"always": "always", "when_busy": "when_late", "never": "never"}
    assert traits_of("diloco").averager.round_mean is not None
    assert traits_of("diloco", compute_fraction=0.8).averager.round_mean is None
    assert traits_of("hfa", k1=3, k2=5).region.worker_steps == 3
    assert traits_of("gaia", staleness={"bound": None}).averager.bound is None
    assert traits_of("bsp").averager.mean_gradient
    assert not traits_of("bsp", weights="uniform").averager.mean_gradient


@pytest.mark.parametrize(
    ("every", "last", "steps", "count"),
    [
        (4, "always", 8, 3),
        (4, "rest", 8, 2),
        (4, "rest", 9, 3),
        (4, "never", 11, 2),
        (49, "never", 49, 1),
        (10 / 3, "never", 10, 3),
        (1, "rest", 5, 5),
    ],
)
def test_exchanges_of_so_many_steps(every, last, steps, count):
    assert ExchangeTraits(blocking="always", every=every, last=last).count(steps) == count


def test_bytes_each_way_are_those_of_a_fragment():
    assert traits_of("sma").exchange.payload_bytes(1000) == 4000
    assert traits_of("diloco_streaming", fragments=4).exchange.payload_bytes(1000) == 1000


def test_weights_of_a_round_that_is_summed_on_the_way():
    by_rows, alike = RoundMean(weights="samples"), RoundMean(weights="uniform")
    assert by_rows.weight_of(16) == 16 and alike.weight_of(16) == alike.weight_of(0) == 1
    assert 0 < by_rows.weight_of(0) < 1e-9
    gradients = RoundMean(weights="uniform", skips_refused=True)
    assert 0 < gradients.weight_of(0) < 1e-9 and gradients.weight_of(3) == 1


def test_the_planner_proposes_what_has_an_expected_loss():
    assert list(BITS_PER_PARAM) == [None, "fp16", "int8", "int4", "chunked_topk"]
    assert BITS_PER_PARAM.keys() == LOSS_BY_CODEC.keys()
    assert BITS_PER_PARAM["int4"] == (4.5, 4.5) and BITS_PER_PARAM["chunked_topk"][1] == 32
    assert sections_of(None) == {} and set(sections_of("int8")) == {"up", "down"}
    assert [kind for kind in CODECS if set(sections_of(kind)) == {"up"}] == [
        "chunked_topk", "bisparse", "dgt"
    ]  # fmt: skip
