"""Codecs in simulated runs: same bits where nothing is lost, fewer bytes, equal ends, resume."""

from __future__ import annotations

import pytest
import torch

from geo_ray.codecs.fp16 import Fp16
from geo_ray.simulator.network import FRAME_BYTES
from geo_ray.strategies.registry import STRATEGIES
from tests.support.world_support import BASE, Run, experiment, of_kind

IDENTITY = {"kind": "identity"}
LOSSY = [{"kind": "fp16"}, {"kind": "int8"}, {"kind": "topk", "ratio": 0.1}]
POWER = {"kind": "powersgd", "rank": 1}
ROUNDS = ["bsp", "sma"]
TRAIN = BASE["train"] | {"steps": 9}
TASK = {"use": "digits", "options": {"width": 8}}  # has matrices that low rank makes smaller
LEARNING = {
    "task": TASK,
    "data": BASE["data"] | {"batch_size": 16},
    "optimizer": {"kind": "momentum", "lr": 0.05},
    "train": {"steps": 120, "eval_every": 0},
}
PLAIN = ["bsp", "asgd", "asgd_ga", "ama", "sma"]
# One of each shape of exchange; the others differ in arithmetic, which the contract test looks at.
SHAPES = [*PLAIN, "diloco_streaming", "nbsync", "decoupled", "async_local_sgd", "halos", "fedat"]


def name_of(codec) -> str:
    return codec["kind"]


def both_ways(codec) -> dict:
    return {"up": codec, "down": codec}


@pytest.mark.parametrize("kind", [*PLAIN, "diloco_streaming", "halos"])
def test_identity_is_no_codec_to_the_bit(simulated, kind):
    sections = of_kind(kind, train=TRAIN) | {"codec": {}}
    as_fp32 = simulated(**sections)
    for codec in (both_ways(IDENTITY), {"up": IDENTITY}):
        coded = simulated(**sections | {"codec": codec})
        assert coded.digests() == as_fp32.digests()
        assert coded.result.sent_bytes == as_fp32.result.sent_bytes
        assert [e.fields for e in coded.of("exchange")] == [
            e.fields for e in as_fp32.of("exchange")
        ]


@pytest.mark.parametrize(
    ("kind", "codec"),
    [(kind, LOSSY[2]) for kind in STRATEGIES]
    + [(kind, codec) for kind in PLAIN for codec in (LOSSY[0], LOSSY[1], POWER)]
    + [("diloco", POWER), ("async_local_sgd", LOSSY[1]), ("diloco_streaming", LOSSY[1])],
    ids=lambda value: value if isinstance(value, str) else value["kind"],
)
def test_all_regions_end_with_one_model(simulated, kind, codec):
    """Everything owed is paid with the final update; rounds merge the same bits every time."""
    sections = of_kind(kind, train=TRAIN | {"steps": 21}, task=TASK) | {"codec": {}}
    if kind == "sparseloco":
        sections["codec"] = {"up": IDENTITY}
    as_fp32 = simulated(**sections)
    sections["codec"] = both_ways(codec)
    run = simulated(**sections)
    a_P, b_P = run.result.params_P.values()
    traits = STRATEGIES[kind]().traits
    if not traits.in_rounds and traits.sends == "change":
        assert torch.allclose(a_P, b_P, rtol=0, atol=1e-5)
    else:
        assert torch.equal(a_P, b_P)
    assert run.digests() == simulated(**sections).digests()
    assert run.digests() != as_fp32.digests()


@pytest.mark.parametrize("shards", [3])
@pytest.mark.parametrize("kind", SHAPES)
def test_shards_of_the_server_give_the_same_bits(simulated, kind, shards):
    regions = [{"name": "a", "ps_shards": shards}, {"name": "b"}]
    sections = of_kind(kind, train=TRAIN) | {"codec": both_ways(LOSSY[2])}
    assert simulated(**sections, regions=regions).digests() == simulated(**sections).digests()


def test_fewer_bytes_take_less_time_and_are_counted_as_they_are(simulated):
    sections = {"strategy": {"kind": "bsp"}, "train": TRAIN}
    as_fp32, run = simulated(**sections), simulated(**sections, codec=both_ways(LOSSY[0]))
    size_bytes = Fp16().encode(torch.zeros(run.num_params), {}, 0).size_bytes
    assert 2 * run.num_params < size_bytes < 2.1 * run.num_params
    assert {e["bytes_sent"] for e in run.of("exchange")} == {size_bytes}
    assert {e["bytes_received"] for e in run.of("exchange")} == {size_bytes}
    assert {e["bytes_before"] for e in run.of("exchange")} == {4 * run.num_params}
    assert run.result.sent_bytes["b", "a"] == {"update": 9 * (size_bytes + FRAME_BYTES)}
    saved_bytes = 2 * 9 * (4 * run.num_params - size_bytes)  # both ways, 9 rounds
    assert as_fp32.result.seconds - run.result.seconds == pytest.approx(saved_bytes * 8e-6 / 10)


@pytest.mark.parametrize("codec", [*LOSSY, POWER], ids=name_of)
@pytest.mark.parametrize("kind", ROUNDS)
@pytest.mark.parametrize("when_s", [0.9, 3.1])
def test_a_resumed_run_has_the_bits_of_an_undisturbed_one(data_dir, kind, codec, when_s):
    sections = {"strategy": {"kind": kind}, "train": TRAIN | {"steps": 11}, "task": TASK}
    config = experiment(**sections, codec=both_ways(codec))
    undisturbed = Run(config, data_dir).go()
    killed = Run(config, data_dir)
    killed.world.checkpoint_at(when_s, 1)
    assert killed.go().digests() == undisturbed.digests()  # saving changes nothing
    resumed = Run(config, data_dir)
    resumed.world.restore(killed.world.checkpoints[1])
    assert resumed.go().digests() == undisturbed.digests()
    steps = [e["step"] for e in resumed.of("step", "a")]
    assert 1 not in steps and steps[-1] == 11


@pytest.mark.parametrize("kind", ["asgd", "asgd_ga", "ama"])
def test_asynchronous_regions_resume_with_what_they_owe(data_dir, kind):
    config = experiment(
        strategy={"kind": kind}, train=TRAIN | {"steps": 11}, codec=both_ways(LOSSY[2])
    )
    killed = Run(config, data_dir)
    killed.world.checkpoint_at(4.8, 1)
    killed.go()
    ends = []
    for _ in range(2):
        resumed = Run(config, data_dir)
        resumed.world.restore(killed.world.checkpoints[1])
        wires = [region.server.wire for region in resumed.world.regions.values()]
        assert any(wire.tensors() for wire in wires)
        ends.append(resumed.go())
    assert ends[0].digests() == ends[1].digests()
    a_P, b_P = ends[0].result.params_P.values()
    assert torch.allclose(a_P, b_P, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["bsp", "sma", "asgd_ga", "ama", "diloco_streaming", "halos"])
def test_strategies_learn_the_digits_through_a_codec(simulated, kind):
    run = simulated(**of_kind(kind, **LEARNING) | {"codec": both_ways(LOSSY[2])})
    (last,) = [e for e in run.of("eval") if e["region"] is None]
    assert last["metrics"]["accuracy"] >= 0.88
