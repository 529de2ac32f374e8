"""A region that is gone is neither dialed nor waited for, unless it comes back."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from geo_ray.transport.session import Session
from tests.support.flaky_proxy import FlakyProxy
from tests.support.wan_support import (
    WAIT_S,
    Node,
    leaving_nothing_behind,
    numbers_of,
    running,
    until,
)


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    with leaving_nothing_behind():
        yield


def keepers(peer: str) -> list[str]:
    return [t.name for t in threading.enumerate() if t.name == f"wan-{peer}"]


def test_the_end_does_not_wait_for_forgotten_peers(caplog: pytest.LogCaptureFixture) -> None:
    us, eu = Node("us"), Node("eu")
    with running(us, eu):
        eu.dial(us)
        eu.endpoint.close(0.0)
        us.wait(lambda: ("eu", 1, False) in us.peers)
        us.say("eu", 1, b"never heard")
        us.endpoint.forget("eu")
        us.endpoint.forget("who was never there")
        us.endpoint.close(WAIT_S)
    assert "has not acknowledged" not in caplog.text
    assert us.about("eu")["outbox_messages"] == 1


def test_the_end_warns_of_messages_that_are_lost(caplog: pytest.LogCaptureFixture) -> None:
    us, eu = Node("us"), Node("eu")
    with running(us, eu):
        eu.dial(us)
        eu.endpoint.close(0.0)
        us.wait(lambda: ("eu", 1, False) in us.peers)
        us.say("eu", 1, b"never heard")
        us.endpoint.close(0.0)
    assert "region eu has not acknowledged 1 message(s)" in caplog.text


def test_the_end_warns_of_no_message_where_only_an_acknowledgement_is_owed(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    us, eu = Node("us"), Node("eu")
    with running(us, eu):
        eu.dial(us)
        monkeypatch.setattr(Session, "flush", lambda *_: False)
        eu.endpoint.close(0.0)
    assert "has not acknowledged" not in caplog.text


def test_a_forgotten_peer_is_not_dialed_until_requested() -> None:
    us, eu, again = Node("us"), Node("eu"), Node("eu", 2)
    with running(us, eu, again):
        us.dial(eu)
        assert len(keepers("eu")) == 1
        us.endpoint.forget("eu")
        assert us.about("eu")["connected"], "it may have something to say still"
        eu.endpoint.close(0.0)
        until(lambda: not keepers("eu"))
        us.join(again, again.endpoint.listen())
        us.say("eu", 2)
        assert numbers_of(again.wait_messages(1)) == [2]


def test_a_returning_peer_receives_waiting_messages() -> None:
    us, eu = Node("us"), Node("eu")
    with running(us, eu), FlakyProxy(us.endpoint.listen()) as proxy:
        eu.join(us, proxy.address)
        proxy.refusing = True
        proxy.cut()
        us.wait(lambda: ("eu", 1, False) in us.peers)
        us.endpoint.forget("eu")
        us.say("eu", 3)
        proxy.refusing = False
        assert numbers_of(eu.wait_messages(1)) == [3]
        assert not us.endpoint._sessions["eu"].is_forgotten
