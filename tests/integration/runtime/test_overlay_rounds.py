"""Rounds over overlays of every kind, between real bridges over real sockets."""

from __future__ import annotations

import threading
import time
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch

from geo_ray.base.errors import LinkDownError
from geo_ray.experiment.experiment import Experiment
from geo_ray.runs.directory import RunDirectory
from geo_ray.transport.links import LinkRecord, LinkTable, save_links
from geo_ray.transport.overlay.messages import CONTROL_MESSAGE, PART
from geo_ray.transport.wire.message import Message
from tests.support.region_support import InProcess, Site, eventually, experiment_of

NAMES = ("us-east", "eu-west", "ap-south", "sa-east", "af-south")
SMALL = {"transfer": {"segment_bytes": 128}}  # some twenty segments
IMPATIENT = {"transfer": {"segment_bytes": 128, "stall_s": 0.5}}
SMA = {"kind": "sma", "interval": 2}
OVERLAYS: list[dict[str, Any]] = [
    {"kind": "binary"} | SMALL,
    {"kind": "rack"} | SMALL,
    {"kind": "ring"} | SMALL,
    {"kind": "tsengine", "buckets": 2, "settle_s": 0.0} | SMALL,
    {"kind": "netstorm"} | SMALL,
]
# A link that sums take, and that does not end at the averager; regions are numbered by their names.
CUTS = {"binary": ("eu-west", "af-south")}
CUT = ("eu-west", "ap-south")


def experiment(overlay: dict[str, Any], **changes: Any) -> Experiment:
    sections: dict[str, Any] = {
        "regions": [{"name": name} for name in NAMES],
        "strategy": SMA,
        "optimizer": {"kind": "sgd", "lr": 0.05},
        "train": {"steps": 8, "eval_every": 0},
        "overlay": overlay,
    }
    return experiment_of(**(sections | changes))


def params_of(world: InProcess, name: str) -> torch.Tensor:
    return torch.cat([shard.params_S for shard in world.sites[name].shards])


@pytest.mark.parametrize(
    ("overlay", "strategy"),
    [(overlay, SMA) for overlay in OVERLAYS] + [(OVERLAYS[3], {"kind": "bsp"})],
    ids=lambda section: section["kind"],
)
def test_training_comes_to_the_same_as_over_a_star(
    tmp_path: Path, overlay: dict[str, Any], strategy: dict[str, Any]
) -> None:
    with InProcess(experiment({"kind": "star"}, strategy=strategy), tmp_path / "star") as world:
        world.run()
        expected = params_of(world, NAMES[0])
    with InProcess(experiment(overlay, strategy=strategy), tmp_path / "overlay") as world:
        assert len(set(world.run())) == 1, "all regions end with the same bits"
        torch.testing.assert_close(params_of(world, NAMES[0]), expected, rtol=1e-4, atol=1e-5)
        world.check_books()
        status = world.sites[NAMES[0]].bridge.status()["overlay"]
        assert status["restarts"] == status["clashes"] == 0
        assert status["rounds"] >= 4


def test_most_parts_do_not_pass_the_averagers_region(tmp_path: Path) -> None:
    passed = dict.fromkeys(NAMES, 0)
    with InProcess(experiment(OVERLAYS[3]), tmp_path) as world:
        world.run()
        for name, site in world.sites.items():
            links = site.endpoint.stats().values()
            passed[name] = sum(sum(link["bytes_sent"].values()) for link in links)
    leader = world.experiment.averager_region
    # in a star it sends half of all bytes; here every region hands on about as much as it gets
    assert passed[leader] < 0.35 * sum(passed.values())


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda o: o["kind"])
def test_a_link_between_two_regions_that_carries_nothing_is_gone_round(
    tmp_path: Path, overlay: dict[str, Any]
) -> None:
    """Neither end is the averager's, and both stay reachable from there."""
    one, other = CUTS.get(overlay["kind"], CUT)
    with InProcess(experiment(overlay | IMPATIENT), tmp_path) as world:
        deaf(world.sites[one], other)
        deaf(world.sites[other], one)
        assert len(set(world.run())) == 1
        world.check_books()
        status = world.sites[world.experiment.averager_region].bridge.status()["overlay"]
        if overlay["kind"] not in ("tsengine", "netstorm"):  # these may take another way at once
            assert status["restarts"] >= 1


def deaf(site: Site, to: str) -> None:
    """Drop all messages to a region from another, as if the route was broken one hop further."""
    assert site.bridge is not None
    for kind in (PART, CONTROL_MESSAGE):
        route = site.bridge._routes[kind]

        def filtered(peer: str, message: Message, route=route) -> None:
            if peer != to:
                route(peer, message)

        site.bridge._routes[kind] = filtered


def test_waits_for_a_round_end_when_a_bridge_closes(tmp_path: Path) -> None:
    with InProcess(experiment(OVERLAYS[3]), tmp_path) as world:
        worker = world.sites["ap-south"].start(0)  # alone: its round cannot end
        node = world.sites["ap-south"].bridge.path.vectors._node
        eventually(lambda: node._rounds[1].contributed if node._rounds else False)
        world.sites["ap-south"].bridge.close()
        with pytest.raises(LinkDownError, match="closing"):
            worker.result()
    assert not [t for t in threading.enumerate() if t.name == "overlay"]


def test_links_are_measured_on_the_way(tmp_path: Path) -> None:
    with InProcess(experiment(OVERLAYS[3]), tmp_path) as world:
        world.run()
        leader = world.sites[world.experiment.averager_region]
        measured = leader.bridge.path.vectors.links_mbps()
    assert measured and all(mbps > 0 for mbps in measured.values())


def test_earlier_measurements_apply_from_the_first_round(tmp_path: Path) -> None:
    records = [
        LinkRecord(
            src=a, dst=b, goodput_mbps=i + 1.0, rtt_s=0.1, samples=3, measured_at_unix_s=time.time()
        )
        for i, (a, b) in enumerate(permutations(NAMES, 2))
    ]
    save_links(LinkTable(links=tuple(records)), RunDirectory(tmp_path, tmp_path).links)
    with InProcess(experiment(OVERLAYS[3]), tmp_path) as world:
        leader = world.sites[world.experiment.averager_region]
        known = leader.bridge.path.vectors.links_mbps()
    assert known == {record.pair: record.goodput_mbps for record in records}
