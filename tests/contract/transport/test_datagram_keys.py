"""The key of datagrams between two regions: derived by both ends, renewed, and never sent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from geo_ray.base.clock import SystemClock
from geo_ray.codecs.dgt import Dgt
from geo_ray.runtime.exchange import differential
from geo_ray.runtime.exchange.differential import DifferentialReceiver, DifferentialSender
from geo_ray.transport.datagrams import Secret
from geo_ray.transport.udp import LossyLoad, UdpChannel
from geo_ray.transport.wire.message import Message
from tests.support.wan_support import Node, leaving_nothing_behind, running, until

CODEC = Dgt()


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    with leaving_nothing_behind():
        yield


class Ends:
    """us, which takes datagrams in, and eu, which sends them; both note every message."""

    def __init__(self) -> None:
        self.eu, self.us = Node("eu", tls="off"), Node("us", tls="off")
        self.messages: list[Message] = []
        self.groups: list[Any] = []
        self.secrets: list[Secret] = []

    @contextmanager
    def linked(self) -> Iterator[DifferentialSender]:
        eu, us, clock = self.eu, self.us, SystemClock()
        with running(eu, us):
            address = us.endpoint.listen()
            eu.join(us, address)
            channels = [
                UdpChannel(("127.0.0.1", 0), lambda _, g: self.groups.append(g), self._seen, clock)
                for _ in range(2)
            ]
            taker = DifferentialReceiver(CODEC, 1000, us.endpoint, lambda *_: None, {})
            us.handler = lambda message: self._on_ask(taker, channels[0], message)
            offers: list[Message] = []
            eu.handler = lambda message: (offers.append(message), self._on_offer(message))[0]
            self._sender = None
            sender = DifferentialSender(CODEC, eu.endpoint, channels[1], "us", address, clock)
            self._sender = sender
            for offer in list(offers):  # it came before the sender was there
                sender.on_offer(offer)
            try:
                yield sender
            finally:
                sender.close()
                taker.close()
                for channel in channels:
                    channel.close()

    def _seen(self, *_: Any) -> None:
        pass

    def _on_ask(self, taker: DifferentialReceiver, channel: UdpChannel, message: Message) -> None:
        self.messages.append(message)
        taker.on_ask("eu", channel)
        self.secrets += [each.secret for each in channel._sessions.values()]

    def _on_offer(self, message: Message) -> None:
        self.messages.append(message)
        if self._sender is not None:
            self._sender.on_offer(message)


def _load(seq: int) -> LossyLoad:
    return LossyLoad(1, seq, (0, 1), memoryview(bytes(2 * 1152)), 1152, 4)


def test_the_key_is_in_no_message_and_another_one_serves_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends = Ends()
    with ends.linked() as sender:
        sender.follow(_load(1))
        until(lambda: len(ends.groups) >= 1)
        (first,) = ends.secrets
        monkeypatch.setattr(differential, "MOST_UNDER_ONE_KEY", 0)
        sender.recall()
        sender.follow(_load(2))  # it has sealed more than that: another session is agreed on
        until(lambda: len(ends.secrets) >= 2)
        second = ends.secrets[-1]
        assert second.session != first.session and second.key != first.key
        until(lambda: sender.sender._session == second.session)
        monkeypatch.undo()  # or yet another session may come while these blocks are on their way
        count = len(ends.groups)
        sender.recall()
        sender.follow(_load(3))
        until(lambda: len(ends.groups) > count)
    kinds = [message.kind for message in ends.messages]
    assert "loose_ask" in kinds and "loose_offer" in kinds
    for message in ends.messages:
        for secret in ends.secrets:
            assert secret.key not in message.meta.values()


def test_an_offer_for_a_closed_connection_is_requested_again() -> None:
    ends = Ends()
    with ends.linked() as sender:
        until(lambda: len(ends.secrets) >= 1)
        until(lambda: any(message.kind == "loose_offer" for message in ends.messages))
        (old,) = [message for message in ends.messages if message.kind == "loose_offer"]
        ends.eu.endpoint._sessions["us"]._connection.end("a test cuts it")
        until(lambda: ends.eu.about("us")["reconnects"] == 1)
        until(lambda: ends.us.about("eu")["connected"])
        sender.on_offer(old)
        until(lambda: len(ends.secrets) >= 2)
        until(lambda: sender.sender._session == ends.secrets[-1].session)
        sender.follow(_load(1))
        until(lambda: len(ends.groups) >= 1)
