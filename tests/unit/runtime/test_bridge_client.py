"""An update lies in memory that region and bridge share, and its answer takes its place."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from geo_ray.base.errors import FrameError, InvariantError
from geo_ray.codecs.base import Coded
from geo_ray.runtime.bridge import AskedOnce, BridgeClient, PlacedReplies
from geo_ray.training.messages import ReplyMessage, UpdateMessage
from geo_ray.transport.config import LanConfig
from geo_ray.transport.lan import LanClient, LanConnection, LanServer
from geo_ray.transport.wire.fields import Meta

KEY = b"k" * 32
SIZE = 1000
WAIT_S = 30.0


class FakeAverager:
    """The bridge's side: answers twice the update, as `Bridge` does it."""

    def __init__(self) -> None:
        self.placed = PlacedReplies()
        self.on_socket: list[int] = []  # bytes of payloads that crossed the socket, both ways
        self.coded: Coded | None = None
        self.seen_P = torch.empty(0)

    def handle(
        self, conn: LanConnection, meta: Meta, payload: memoryview | None
    ) -> tuple[Meta, memoryview | None]:
        self._count(payload)
        if meta["op"] == "fetch":
            answer, out = self.placed.fetch(conn, meta)
        else:
            update = self.placed.read(conn, meta, payload)
            self.seen_P = update.payload_P.clone()
            reply = ReplyMessage(
                "eu", update.seq, 1, 8, 2 * update.payload_P, coded=self.coded,
                buffers_E=update.buffers_E, buffers_weight=0.25,
            )  # fmt: skip
            answer, out = self.placed.tell(conn, meta, reply)
        self._count(out)
        return answer, out

    def _count(self, payload: memoryview | None) -> None:
        if payload is not None:
            self.on_socket.append(payload.nbytes)


@pytest.fixture
def averager() -> FakeAverager:
    return FakeAverager()


@pytest.fixture
def bridge(averager: FakeAverager, request: pytest.FixtureRequest) -> Iterator[BridgeClient]:
    shared_bytes = getattr(request, "param", 4 * SIZE)
    with (
        LanServer("127.0.0.1", KEY, averager.handle) as server,
        LanClient(server.address, KEY, {"peer": "eu/primary"}, shared_bytes=shared_bytes) as client,
    ):
        yield BridgeClient(client)


def update(size: int = SIZE, **fields: Any) -> UpdateMessage:
    return UpdateMessage("eu", 1, 3, 0, 8, torch.arange(size, dtype=torch.float32), **fields)


def test_neither_payload_crosses_the_socket(bridge: BridgeClient, averager: FakeAverager) -> None:
    asked = update()
    placed = bridge.place(asked)
    assert bridge.is_shared(placed.payload_P) and not bridge.is_shared(asked.payload_P)
    answer = bridge.ask(placed, WAIT_S)
    assert answer.waits and not answer.reply.payload_P.numel()
    assert torch.equal(placed.payload_P, asked.payload_P)  # until it is fetched
    reply = bridge.fetch(answer, WAIT_S, in_place=True)
    assert torch.equal(reply.payload_P, 2 * asked.payload_P)
    assert torch.equal(averager.seen_P, asked.payload_P)
    assert reply.payload_P.data_ptr() == placed.payload_P.data_ptr()
    assert averager.on_socket == []


@pytest.mark.parametrize("bridge", [0, 4 * SIZE], indirect=True)
def test_model_buffers_cross_the_socket(bridge: BridgeClient, averager: FakeAverager) -> None:
    buffers_E = torch.arange(24, dtype=torch.uint8)
    placed = bridge.place(update(buffers_E=buffers_E))
    answer = bridge.ask(placed, WAIT_S)
    reply = bridge.fetch(answer, WAIT_S, in_place=True)
    assert torch.equal(averager.seen_P, update().payload_P)
    assert torch.equal(reply.payload_P, 2 * update().payload_P)
    assert torch.equal(reply.buffers_E, buffers_E) and reply.buffers_weight == 0.25
    assert averager.on_socket == ([24, 24] if answer.waits else [4 * SIZE + 24] * 2)


def test_an_answer_may_leave_the_update_where_it_is(
    bridge: BridgeClient, averager: FakeAverager
) -> None:
    placed = bridge.place(update())
    reply = bridge.fetch(bridge.ask(placed, WAIT_S), WAIT_S, in_place=False)
    assert torch.equal(placed.payload_P, update().payload_P)
    assert torch.equal(reply.payload_P, 2 * update().payload_P)
    assert averager.on_socket == [4 * SIZE]


@pytest.mark.parametrize("bridge", [0, 4 * SIZE - 4], indirect=True)
def test_without_room_payloads_go_with_the_request(
    bridge: BridgeClient, averager: FakeAverager
) -> None:
    placed = bridge.place(update())
    answer = bridge.ask(placed, WAIT_S)
    assert not answer.waits
    reply = bridge.fetch(answer, WAIT_S, in_place=True)
    assert torch.equal(reply.payload_P, 2 * update().payload_P)
    assert averager.on_socket == [4 * SIZE, 4 * SIZE]


def test_encoded_payloads_go_with_the_request(bridge: BridgeClient, averager: FakeAverager) -> None:
    averager.coded = Coded("int8", 16, torch.arange(16, dtype=torch.uint8))
    answer = bridge.ask(bridge.place(update()), WAIT_S)
    assert not answer.waits and answer.reply.coded is not None
    assert averager.on_socket == [16]
    coded = update(0, coded=averager.coded)
    assert bridge.place(coded) is coded


def test_payloads_of_other_sizes_follow_each_other(bridge: BridgeClient) -> None:
    for size in (SIZE, 10, 700):
        placed = bridge.place(update(size))
        reply = bridge.fetch(bridge.ask(placed, WAIT_S), WAIT_S, in_place=True)
        assert torch.equal(reply.payload_P, 2 * update(size).payload_P)


def test_nothing_is_fetched_that_does_not_wait(bridge: BridgeClient) -> None:
    with pytest.raises(FrameError, match="no answer to fetch"):
        bridge.request({"op": "fetch", "in_place": True}, WAIT_S)


def test_an_update_cannot_lie_beyond_the_memory(bridge: BridgeClient) -> None:
    with pytest.raises((FrameError, InvariantError), match="is not in shared memory"):
        bridge.request({"op": "update", "placed": 4 * SIZE + 4}, WAIT_S)


def test_an_answer_of_another_host_s_configuration_still_comes() -> None:
    averager = FakeAverager()
    config = LanConfig(shared_memory=False)
    with (
        LanServer("127.0.0.1", KEY, averager.handle, config=config) as server,
        LanClient(server.address, KEY, {"peer": "eu/primary"}, shared_bytes=4 * SIZE) as client,
    ):
        up = BridgeClient(client)
        reply = up.fetch(up.ask(up.place(update()), WAIT_S), WAIT_S, in_place=True)
        assert np.array_equal(reply.payload_P, 2 * update().payload_P)


def test_a_repeated_update_is_sent_once() -> None:
    asked, seen, going = AskedOnce(), [], threading.Event()

    def exchange(given: UpdateMessage) -> ReplyMessage:
        seen.append(given.seq)
        assert going.wait(WAIT_S)
        return ReplyMessage("eu", given.seq, 1, 8, torch.zeros(1))

    answer: list[ReplyMessage] = []
    threads = [
        threading.Thread(target=lambda: answer.append(asked.ask(update(), exchange)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    going.set()
    for thread in threads:
        thread.join(WAIT_S)
    answer.append(asked.ask(update(), exchange))  # its answer may have been lost
    assert seen == [3] and len(answer) == 4 and all(each is answer[0] for each in answer)


def test_an_update_that_was_refused_is_asked_again() -> None:
    asked, answers = (
        AskedOnce(),
        [FrameError("not now"), ReplyMessage("eu", 3, 1, 8, torch.zeros(1))],
    )

    def exchange(_: UpdateMessage) -> ReplyMessage:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    with pytest.raises(FrameError, match="not now"):
        asked.ask(update(), exchange)
    assert asked.ask(update(), exchange).seq == 3
