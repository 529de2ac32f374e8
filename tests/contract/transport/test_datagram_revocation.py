"""A revoked certificate ends the datagrams of its region as it ends the connection."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from geo_ray.base.errors import GeoRayError
from geo_ray.codecs.dgt import Dgt
from geo_ray.runtime.exchange.differential import Differential, EndpointSite
from geo_ray.training.membership import AveragerLeader
from geo_ray.training.messages import UpdateMessage
from geo_ray.transport.security import cert_store
from geo_ray.transport.udp import LossyLoad
from tests.support.wan_support import Node, leaving_nothing_behind, running, until

BLOCK_BYTES = 1152


@dataclass
class LeaderPath:
    """What a stage asks of its path; here nothing fails."""

    leader: AveragerLeader = field(default_factory=lambda: AveragerLeader("us", 1))

    def refuse(self, update: UpdateMessage, error: GeoRayError) -> None:
        raise error

    def fail(self, error: Exception, what: str) -> None:
        raise error


class Bridge:
    """A region's endpoint and its stage, which send real datagrams."""

    def __init__(self, leader: Path, region: str) -> None:
        certificate = cert_store.files_of(leader, region)
        self.node = Node(region, certificate=certificate, tls="required")
        self.address = self.node.endpoint.listen()
        site = EndpointSite(self.node.endpoint, self.address, 0.0, {})
        self.stage = Differential(Dgt(), 1000, site, LeaderPath(), {})
        self.node.handler = self._route

    def _route(self, message: object) -> None:
        peer = "us" if self.node.region == "eu" else "eu"
        self.stage.routes()[message.kind](peer, message)

    @property
    def strange(self) -> int:
        return self.stage._channel.counts.strange

    @property
    def taken(self) -> int:
        return self.stage._channel.counts.datagrams


def load(seq: int) -> LossyLoad:
    return LossyLoad(1, seq, (0, 1), memoryview(bytes(2 * BLOCK_BYTES)), BLOCK_BYTES, 4)


@pytest.fixture
def leader(tmp_path: Path) -> Path:
    cert_store.init(tmp_path)
    for region in ("eu", "us"):
        cert_store.issue(tmp_path, region)
    return tmp_path


@contextmanager
def sending(leader: Path) -> Iterator[tuple[Bridge, Bridge]]:
    """eu, whose lossy blocks arrive at us."""
    with leaving_nothing_behind():
        eu, us = Bridge(leader, "eu"), Bridge(leader, "us")
        with running(eu.node, us.node):
            eu.node.join(us.node, us.address)
            eu.stage.on_address("us", us.address)
            until(lambda: eu.stage._sender._target is not None)
            eu.stage._sender.follow(load(1))
            until(lambda: us.taken >= 1)
            yield eu, us
            for bridge in (eu, us):
                bridge.stage.close()


@pytest.mark.parametrize("is_linked", [True, False])
def test_datagrams_of_a_revoked_region_are_strangers(leader: Path, is_linked: bool) -> None:
    """Also where its connection had ended before its certificate was revoked."""
    with sending(leader) as (eu, us):
        if not is_linked:
            eu.node.endpoint.close(1.0)
            until(lambda: not us.node.about("eu")["connected"])
        cert_store.revoke(leader, "eu")
        until(lambda: us.node.endpoint.is_revoked("eu"))
        until(lambda: not us.node.about("eu")["connected"])
        eu.stage._sender.recall()
        before, strange = us.taken, us.strange
        eu.stage._sender.follow(load(2))
        until(lambda: us.strange > strange)
        assert us.taken == before and not us.stage._channel._sessions


def test_nothing_more_is_sent_to_a_revoked_leader(leader: Path) -> None:
    with sending(leader) as (eu, us):
        cert_store.revoke(leader, "us")
        until(lambda: eu.node.endpoint.is_revoked("us"))
        eu.stage._sender.recall()
        before, counts = us.taken, eu.stage._sender.sender.counts
        sealed = counts.blocks
        eu.stage._sender.follow(load(2))
        until(lambda: counts.blocks >= sealed + 2)
        eu.stage._channel.send(b"x", ("127.0.0.1", us.stage._channel.port))
        until(lambda: us.strange >= 1)  # it came after whatever was sent before
        assert us.taken == before


def test_a_region_that_comes_back_with_another_key_may_send_again(leader: Path) -> None:
    with sending(leader) as (eu, us):
        cert_store.revoke(leader, "eu")
        until(lambda: us.node.endpoint.is_revoked("eu"))
        cert_store.issue(leader, "eu", force=True)
        us.node.endpoint.wait_connected(["eu"], 60.0)
        assert not us.node.endpoint.is_revoked("eu")
        eu.stage._sender._ask()
        until(lambda: us.stage._channel._sessions)
        eu.stage._sender.recall()
        before = us.taken

        def arrives() -> bool:
            eu.stage._sender.recall()
            eu.stage._sender.follow(load(3))
            return us.taken > before

        until(arrives)
