"""Endpoints that record their callbacks, for tests of the transport."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from geo_ray.transport.config import TransportConfig
from geo_ray.transport.endpoint import Endpoint
from geo_ray.transport.wire.message import DATA, EndpointIdentity, Message, PeerStats
from geo_ray.transport.wire.sockets import Address

KEY = b"k" * 32
WAIT_S = 240.0  # never reached when all is well


class Node:
    """An endpoint, its received messages and the events of its peers."""

    def __init__(self, region: str, attempt: int = 1, **options: Any) -> None:
        own = {name: options.pop(name) for name in ("certificate", "shaping") if name in options}
        run_id = options.pop("run_id", "run")
        self.region = region
        self.handler: Callable[[Message], None] = lambda _: None
        self.got: list[tuple[str, Message]] = []
        self.peers: list[tuple[str, int, bool]] = []
        self._changed = threading.Condition()
        quick = {"heartbeat_s": 0.05, "reconnect_min_s": 0.01, "reconnect_max_s": 0.1} | options
        self.endpoint = Endpoint(
            EndpointIdentity(run_id, region, attempt, KEY),
            self._on_message,
            TransportConfig(**quick),
            on_peer=self._on_peer,
            **own,
        )

    def _on_message(self, peer: str, message: Message) -> None:
        self.handler(message)
        with self._changed:
            self.got.append((peer, message))
            self._changed.notify_all()

    def _on_peer(self, region: str, attempt: int, up: bool) -> None:
        with self._changed:
            self.peers.append((region, attempt, up))
            self._changed.notify_all()

    def wait(self, condition: Callable[[], bool]) -> None:
        """Wait for something that a message or a peer's coming or going makes true."""
        with self._changed:
            assert self._changed.wait_for(condition, WAIT_S), (self.got[-3:], self.peers[-3:])

    def wait_messages(self, count: int) -> list[Message]:
        """The messages, as soon as there are so many."""
        self.wait(lambda: len(self.got) >= count)
        return [message for _, message in self.got]

    def say(self, peer: str, n: int, payload: bytes | memoryview = b"", lane: int = DATA) -> None:
        """Send a message."""
        self.endpoint.send(peer, Message("test", {"n": n}, payload, "update", lane), WAIT_S)

    def about(self, peer: str) -> PeerStats:
        """Counters of a peer."""
        return self.endpoint.stats()[peer]

    def dial(self, listener: Node, host: str = "127.0.0.1") -> Address:
        """Let ``listener`` listen and connect to it."""
        address = listener.endpoint.listen(host)
        self.join(listener, address)
        return address

    def join(self, listener: Node, address: Address) -> None:
        """Connect to one that listens already, or to what leads there."""
        self.endpoint.connect(listener.region, address)
        self.endpoint.wait_connected([listener.region], WAIT_S)
        listener.endpoint.wait_connected([self.region], WAIT_S)


def numbers_of(messages: list[Message]) -> list[int]:
    """What the messages of `Node.say` are numbered."""
    return [int(str(message.meta["n"])) for message in messages]


@contextmanager
def running(*nodes: Node) -> Iterator[None]:
    """Close the nodes at the end."""
    with ExitStack() as stack:
        for node in nodes:
            stack.callback(node.endpoint.close, 1.0)
        yield


def until(done: Callable[[], bool]) -> None:
    """Wait for a condition that is not announced."""
    deadline_s = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < deadline_s, "it never came"
        time.sleep(0.002)


@contextmanager
def leaving_nothing_behind() -> Iterator[None]:
    """Fail if threads or file descriptors are left at the end.

    What others in this process had open before, and close meanwhile, is theirs.
    """
    before, threads = open_files(), set(threading.enumerate())
    yield
    started = set(threading.enumerate()) - threads
    for thread in started:
        if type(thread).__module__ == "rich.live":  # told to stop, and not waited for
            thread.join(WAIT_S)
    started = {thread for thread in started if thread.is_alive()}
    assert not started, started
    left = open_files() - before
    assert not left, left


def open_files() -> Counter[str]:
    """What the file descriptors of this process stand for; a socket by its number."""
    found: Counter[str] = Counter()
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the one that lists them
            found[str(path.readlink())] += 1
    return found
