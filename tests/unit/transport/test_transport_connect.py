"""TCP connects over a path that swallows requests, and what is left of them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from geo_ray.transport.wire import sockets
from geo_ray.transport.wire.sockets import Address, SocketTarget, resolve
from tests.support.wan_support import WAIT_S, leaving_nothing_behind


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    with leaving_nothing_behind():
        yield


class Hole:
    """A listener whose queue is full: the kernel swallows further requests, as in an outage."""

    def __init__(self, stack: ExitStack) -> None:
        self._listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        self.address: Address = self._listener.getsockname()
        self._stack = stack
        self._inside = stack.enter_context(socket.create_connection(self.address))

    def heal(self) -> None:
        self._stack.enter_context(self._listener.accept()[0])


@pytest.fixture
def hole() -> Iterator[Hole]:
    with ExitStack() as stack:
        yield Hole(stack)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[SocketTarget]:
    """The targets of all requests."""
    found, new = [], sockets.new_socket

    def remember(target: SocketTarget, buffer_bytes: int = 0) -> socket.socket:
        found.append(target)
        return new(target, buffer_bytes)

    monkeypatch.setattr(sockets, "new_socket", remember)
    return found


def test_more_requests_are_sent_while_answers_are_missing(
    hole: Hole, asked: list[SocketTarget]
) -> None:
    with pytest.raises(TimeoutError):
        sockets.dial(hole.address, 2.5)
    assert len(asked) == 3


def test_a_path_that_is_back_is_used(hole: Hole, asked: list[SocketTarget]) -> None:
    def is_closed() -> bool:  # asked before every request
        if len(asked) == 2 and not healed.is_set():
            healed.set()
            hole.heal()
        return False

    healed = threading.Event()
    targets = resolve(hole.address)
    with sockets.connect_first(targets, 0, WAIT_S, is_closed) as sock:
        assert sock.getpeername() == hole.address and sock.gettimeout() is None


def test_another_address_is_tried_after_a_timeout_or_at_once_after_a_refusal(
    hole: Hole, asked: list[SocketTarget]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        refusing = resolve(gone.getsockname())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        silent, good = resolve(hole.address), resolve(listener.getsockname())
        with sockets.connect_first(refusing + silent + good, 0, WAIT_S, lambda: False) as sock:
            assert sock.getpeername() == listener.getsockname()
    assert asked == refusing + silent + good


def test_when_all_refuse_or_the_caller_is_closed_nothing_is_waited_for(
    hole: Hole, asked: list[SocketTarget]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        refusing = resolve(gone.getsockname())
    with pytest.raises(ConnectionRefusedError):
        sockets.connect_first(refusing, 0, WAIT_S, lambda: False)
    with pytest.raises(TimeoutError):
        sockets.connect_first(resolve(hole.address), 0, WAIT_S, lambda: len(asked) > 1)
    with pytest.raises(OSError):
        sockets.connect_first([], 0, WAIT_S, lambda: False)
