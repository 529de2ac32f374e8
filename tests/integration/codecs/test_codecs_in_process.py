"""Codecs over real sockets: the simulator's bits, true sizes, drops and lost references."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from geo_ray.experiment.experiment import Experiment
from geo_ray.simulator.world import World
from geo_ray.strategies.registry import STRATEGIES
from geo_ray.training.messages import UpdateMessage
from geo_ray.training.parameters import digest
from geo_ray.training.payload_encoding import AveragerWire
from tests.support.region_support import InProcess, Site, experiment_of

TOPK = {"kind": "topk", "ratio": 0.1}
CODECS = [{"kind": "identity"}, {"kind": "fp16"}, {"kind": "int8"}, TOPK]
PLAIN = ("asgd", "asgd_ga", "ama")
POWER = {"kind": "powersgd", "rank": 1}
REGIONS = [{"name": "us-east", "workers": 2, "ps_shards": 2}, {"name": "eu-west", "workers": 2}]
TRAIN = {"steps": 8, "eval_every": 0}


def coded(strategy: dict[str, Any], codec: dict[str, Any] | None) -> Experiment:
    return experiment_of(
        strategy=strategy,
        codec={"up": codec, "down": codec},
        regions=REGIONS,
        train=TRAIN,
        emulate={"step_s": 0.01},
        task={"use": "digits", "options": {"width": 8}},  # has matrices for low rank
    )


def params_of(site: Site) -> torch.Tensor:
    return torch.cat([shard.params_S for shard in site.shards])


def exchanges(world: InProcess) -> list[dict[str, Any]]:
    return [
        event
        for site in world.sites.values()
        for event in site.event_buffer.take(100_000)
        if event["kind"] == "exchange"
    ]


WITHOUT_ROUNDS = [kind for kind, each in STRATEGIES.items() if not each().traits.in_rounds]


@pytest.mark.parametrize("codec", [*CODECS, POWER], ids=lambda codec: codec["kind"])
@pytest.mark.parametrize("kind", ["bsp", "sma"])
def test_sockets_and_simulator_give_the_same_bits(tmp_path: Path, kind: str, codec: Any) -> None:
    strategy = {"kind": kind} if kind == "bsp" else {"kind": kind, "interval": 3}
    config = coded(strategy, codec)
    with InProcess(config, tmp_path) as world:
        digests = world.run()
        world.check_books()
        sizes = {event["bytes_sent"] for event in exchanges(world)}
        events: list[dict[str, Any]] = []

        def emit(kind: str, t_s: float, **fields: Any) -> Any:
            events.append({"kind": kind, **fields})

        result = World(config, world.task, world.manifest, emit).run()
    assert digests == [digest(params_P) for params_P in result.params_P.values()]
    assert len(set(digests)) == 1
    assert sizes == {event["bytes_sent"] for event in events if event["kind"] == "exchange"}


@pytest.mark.parametrize(
    ("kind", "codec"),
    [(kind, codec) for kind in PLAIN for codec in CODECS[1:]]
    + [
        (kind, TOPK)
        for kind, s in STRATEGIES.items()
        if not s().traits.in_rounds and kind not in PLAIN
    ],
    ids=lambda value: value if isinstance(value, str) else value["kind"],
)
def test_asynchronous_regions_end_equal(tmp_path: Path, kind: str, codec: Any) -> None:
    strategy: dict[str, Any] = {"kind": kind} if kind == "asgd" else {"kind": kind, "interval": 2}
    with InProcess(coded(strategy, codec), tmp_path) as world:
        world.run()
        world.check_books()
        a_P, b_P = map(params_of, world.sites.values())
        assert torch.allclose(a_P, b_P, rtol=0, atol=1e-5)
        assert any(e["bytes_sent"] < 0.6 * e["bytes_before"] for e in exchanges(world))


@pytest.mark.parametrize("kind", ["sma", "ama"])
def test_a_lost_reference_is_noticed_and_training_goes_on(tmp_path: Path, kind: str) -> None:
    with InProcess(coded({"kind": kind, "interval": 1}, TOPK), tmp_path) as world:
        averager, bridge = world.averager, world.sites["us-east"].bridge
        assert averager is not None and bridge is not None
        path, forgot = bridge.path, []
        take_in = path._take_in

        def forgets_once(update: UpdateMessage) -> None:
            with path._local._lock:  # every region sends at least two updates, the last included
                if update.seq >= 2 and not forgot:
                    averager.wire = AveragerWire(averager.wire.plan)
                    forgot.append(update.seq)
            take_in(update)

        path._take_in = forgets_once  # type: ignore[method-assign]
        digests = world.run()
        assert forgot and len(set(digests)) == 1
        world.check_books()
