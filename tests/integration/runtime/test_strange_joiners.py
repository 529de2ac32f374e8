"""Joining regions that do not fit are refused by name over real sockets, without harm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from geo_ray.base.errors import (
    CheckpointCorruptError,
    FrameError,
    GeoRayError,
    InvariantError,
    LinkDownError,
    NonFiniteError,
    RegionLostError,
)
from geo_ray.runs.build import build_shard
from geo_ray.runtime.bridge import Bridge, open_bridge
from geo_ray.storage.folders import LocalFolder
from geo_ray.storage.parts import read_part, write_part
from geo_ray.training.membership import shard_state
from geo_ray.training.messages import UpdateMessage
from geo_ray.transport.security.certs import Authority
from geo_ray.transport.wire.message import EndpointIdentity
from tests.support.region_support import KEY, InProcess, experiment_of

HOME, FAR = "us-east", "eu-west"


def config(**changes: Any) -> Any:
    sections = {"regions": [{"name": HOME}, {"name": FAR}], "train": {"steps": 6, "eval_every": 0}}
    return experiment_of(**sections | changes)


def first(world: InProcess, **fields: Any) -> UpdateMessage:
    """What the far region says first."""
    payload_P = fields.pop("payload_P", torch.zeros(world.params_P.numel()))
    return UpdateMessage(FAR, 1, 1, 0, 8, payload_P, **fields)


def other_codec(world: InProcess, _: Path) -> UpdateMessage:
    codec = config(codec={"up": {"kind": "int8"}}).codec.up
    coded = codec.encode(torch.ones(world.params_P.numel()), {}, 0)
    return first(world, payload_P=torch.empty(0), coded=coded)


STRANGE: dict[str, tuple[Callable[[InProcess, Path], UpdateMessage], type[GeoRayError], str]] = {
    "another model": (
        lambda w, _: first(w, payload_P=torch.zeros(w.params_P.numel() + 1)),
        InvariantError,
        "update 1 of region 'eu-west'",
    ),
    "another codec": (other_codec, FrameError, "no codec was expected"),
    "a model with more buffers": (
        lambda w, _: first(w, buffers_E=torch.zeros(3, dtype=torch.uint8)),
        GeoRayError,
        "model buffers",
    ),
    "what cannot be read": (
        lambda w, _: first(w, buffers_E=torch.zeros(3)),  # three values, and not their bytes
        FrameError,
        "payload of",
    ),
    "no numbers": (
        lambda w, _: first(w, payload_P=torch.full((w.params_P.numel(),), torch.nan)),
        NonFiniteError,
        "update 1 of region 'eu-west'",
    ),
    "a view that is over": (lambda w, _: first(w, view=1), RegionLostError, "sent this in view 1"),
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    with InProcess(config(), tmp_path_factory.mktemp("undisturbed")) as world:
        return world.run()


@pytest.mark.parametrize("what", sorted(STRANGE))
def test_invalid_input_is_refused_and_changes_nothing(
    what: str, undisturbed: list[str], tmp_path: Path
) -> None:
    make, kind, words = STRANGE[what]
    with InProcess(config(), tmp_path / "run") as world:
        averager, bridge = world.averager, world.sites[FAR].bridge
        assert averager is not None and bridge is not None
        if what == "a view that is over":
            averager.view = replace(averager.view, generation=3, since=((FAR, 3),))
        with pytest.raises(kind, match=words):
            bridge.path.exchange(make(world, tmp_path))
        assert averager.failure is None and averager.last(FAR) == (0, 0)
        if what == "a view that is over":
            averager.view = replace(averager.view, generation=1, since=())
        assert world.run() == undisturbed
        world.check_books()


def test_unreadable_messages_are_refused_with_a_standby(tmp_path: Path) -> None:
    third = "ap-south"
    asked = config(
        regions=[{"name": name} for name in (HOME, third, FAR)],
        averager={"region": HOME, "standby": third},
    )
    with InProcess(asked, tmp_path / "undisturbed") as world:
        undisturbed = world.run()
    with InProcess(asked, tmp_path / "run") as world:
        bridge = world.sites[FAR].bridge
        assert bridge is not None
        with pytest.raises(FrameError, match="payload of"):
            bridge.path.exchange(first(world, buffers_E=torch.zeros(3)))
        assert world.run() == undisturbed
        world.check_books()


@pytest.mark.parametrize("options", [{"width": 3}, {"width": 4}])
def test_a_copy_of_another_model_is_refused(options: dict[str, int], tmp_path: Path) -> None:
    with InProcess(config(), tmp_path / "run") as world:
        tensors, numbers = world.sites[HOME].shards[0].export()
        folder = LocalFolder(tmp_path / "parts")
        (tmp_path / "parts").mkdir()
        part = write_part(folder, "us-east-ps0", dict(tensors), {"counters": numbers})
        found, meta = read_part(folder, part)
    other = config(task={"use": "digits", "options": options})
    with InProcess(other, tmp_path / "other") as stranger:
        shard = build_shard(other, stranger.sites[FAR].region, 0, stranger.start)
        state = shard_state((dict(found), meta["counters"]), other.strategy.traits)  # type: ignore[arg-type]
        with pytest.raises(CheckpointCorruptError, match="the shard has"):
            shard.restore(*state)


# ------------------------------------------------------------------ certificates


class Newcomer:
    """A bridge that dials a run's averager, with a certificate and a key of its own."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._authority = Authority.create("the run's CA")
        self._worlds: list[InProcess] = []
        self._bridges: list[Bridge] = []

    def bridge(self, region: str, certificate: Any, key: bytes = KEY) -> Bridge:
        world = InProcess(config(), self._directory / f"{region}-{len(self._worlds)}")
        self._worlds.append(world)
        secured = config(transport={"tls": "required"})
        setting = replace(world.sites[region]._path_setting(), experiment=secured)
        identity = EndpointIdentity("test-run", region, 2, key)
        self._bridges.append(open_bridge(identity, setting, certificate=certificate))
        return self._bridges[-1]

    def good(self, region: str) -> Any:
        return self._authority.issue(region)

    def end(self) -> None:
        for bridge in self._bridges:
            bridge.close()
            bridge.endpoint.close(0.0)
        for world in self._worlds:
            world.__exit__()


@pytest.fixture
def newcomer(tmp_path: Path) -> Iterator[Newcomer]:
    made = Newcomer(tmp_path)
    yield made
    made.end()


@pytest.mark.parametrize("wrong", ["another CA", "another region", "another key", "nothing"])
def test_an_unlinked_region_reports_the_reason_before_admission(
    wrong: str, newcomer: Newcomer
) -> None:
    leader = newcomer.bridge(HOME, newcomer.good(HOME))
    leader.expect(FAR)
    certificate, key = newcomer.good(FAR), KEY
    if wrong == "another CA":
        certificate = Authority.create("a stranger's CA").issue(FAR)
    elif wrong == "another region":
        certificate = newcomer.good("ap-south")
    elif wrong == "another key":
        key = b"x" * 32
    bridge = newcomer.bridge(FAR, certificate, key)
    bridge.connect(HOME, leader.endpoint.advertised)
    if wrong == "nothing":
        bridge.await_link(HOME, 20.0)
        return
    with pytest.raises(
        LinkDownError, match=rf"not connected within 1.0 s: {HOME} \(.*PEER_REFUSED"
    ) as told:
        bridge.await_link(HOME, 1.0)
    assert "never heard of" not in told.value.message
