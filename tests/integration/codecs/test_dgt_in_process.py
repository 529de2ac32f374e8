"""Differential transmission between whole regions over real sockets, and lossy emulated links."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from geo_ray.experiment.experiment import Experiment
from tests.support.region_support import Gate, InProcess, Site, eventually, experiment_of

SMALL = {"kind": "dgt", "block_bytes": 64, "reliable_fraction": 0.4}
REGIONS = [{"name": "us-east"}, {"name": "eu-west"}, {"name": "ap-south", "ps_shards": 2}]
LINK = {"rate_mbps": 20.0, "delay_s": 0.005}


def config(
    strategy: dict[str, Any], link: dict[str, Any] | None = None, **codec: Any
) -> Experiment:
    emulate = {"step_s": 0.03} | ({} if link is None else {"link": LINK | link})
    return experiment_of(
        strategy=strategy,
        regions=REGIONS,
        codec={"up": {**SMALL, **codec}},
        train={"steps": 12, "eval_every": 0},
        emulate=emulate,
    )


def params_of(site: Site) -> torch.Tensor:
    return torch.cat([shard.params_S for shard in site.shards])


def counts(world: InProcess) -> dict[str, int]:
    bridge = world.sites["us-east"].bridge
    assert bridge is not None
    return bridge.status()["loose"]["blocks"]


def sent(world: InProcess) -> int:
    return sum(
        site.bridge.status()["loose"]["sent"]["blocks"]
        for name, site in world.sites.items()
        if name != "us-east" and site.bridge is not None
    )


@pytest.mark.parametrize("kind", ["asgd", "asgd_ga"])
@pytest.mark.parametrize("loss", [0.0, 0.2])
def test_asynchronous_regions_end_equal_whatever_was_lost(
    tmp_path: Path, kind: str, loss: float
) -> None:
    with InProcess(config({"kind": kind}, {"loss": loss}), tmp_path) as world:
        world.run()
        world.check_books()
        first_P, *others = map(params_of, world.sites.values())
        for other_P in others:
            assert torch.allclose(first_P, other_P, rtol=0, atol=1e-5)


def test_rounds_end_equal_to_the_bit_and_late_blocks_are_merged(tmp_path: Path) -> None:
    with InProcess(config({"kind": "bsp"}), tmp_path) as world:
        assert len(set(world.run())) == 1
        world.check_books()
        found = counts(world)
        assert found["late"] > 0 and found["refused"] == 0
        assert found["late"] + found["on_time"] <= sent(world)


def test_all_reliable_is_the_same_training_as_no_codec(tmp_path: Path) -> None:
    digests = []
    for codec in ({"up": {**SMALL, "loose": "reliable"}}, {}):
        plain = config({"kind": "bsp"}).model_dump(mode="json") | {"codec": codec}
        with InProcess(Experiment.model_validate(plain, strict=False), tmp_path) as world:
            digests += world.run()
    assert len(set(digests)) == 1


@pytest.mark.parametrize("late", ["put_back", "merge"])
def test_dropped_at_the_sender_nothing_flows(tmp_path: Path, late: str) -> None:
    with InProcess(config({"kind": "bsp"}, loose="drop", late=late), tmp_path) as world:
        assert len(set(world.run())) == 1
        assert sent(world) == 0 and counts(world)["late"] == 0


def test_with_grace_blocks_are_on_time(tmp_path: Path) -> None:
    experiment = config({"kind": "bsp"}, grace_s=20.0)
    with InProcess(experiment, tmp_path) as world:
        assert len(set(world.run())) == 1
        found = counts(world)
        assert found["on_time"] == sent(world) > 0 and found["late"] == 0


def test_grace_ends(tmp_path: Path) -> None:
    experiment = config({"kind": "bsp"}, {"loss": 0.5}, grace_s=0.05)
    with InProcess(experiment, tmp_path) as world:
        assert len(set(world.run())) == 1
        found = counts(world)
        assert 0 < found["on_time"] < sent(world)


def test_quarter_bytes_and_random_order(tmp_path: Path) -> None:
    experiment = config(
        {"kind": "asgd"}, order="random", values="fp16", loose_values="int4", block_bytes=68
    )
    with InProcess(experiment, tmp_path) as world:
        world.run()
        first_P, *others = map(params_of, world.sites.values())
        for other_P in others:
            assert torch.allclose(first_P, other_P, rtol=0, atol=1e-4)


def test_bytes_of_datagrams_are_counted(tmp_path: Path) -> None:
    gate = Gate(6)
    with InProcess(config({"kind": "asgd"}), tmp_path, gate=gate) as world:
        workers = [site.start(0) for site in world.sites.values()]
        bridges = {name: site.bridge for name, site in world.sites.items()}

        def sent_bytes(name: str) -> int:
            return bridges[name].status()["links"]["us-east"]["bytes_sent"]["loose"]

        # Blocks leave while the next update is computed: a fast run has no time for any.
        eventually(lambda: sent_bytes("eu-west") and sent_bytes("ap-south"), "datagrams")
        gate.open()
        for worker in workers:
            worker.result()
        leader = bridges["us-east"]
        assert leader is not None
        for name in ("eu-west", "ap-south"):
            out = sent_bytes(name)
            eventually(
                lambda n=name, b=out: leader.status()["links"][n]["bytes_received"]["loose"] == b
            )
