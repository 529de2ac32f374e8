"""A standby replaces the server while regions train, with real sockets in one process."""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from geo_ray.joining import server as server_module
from geo_ray.joining.credentials import JoinCredentials
from geo_ray.joining.endpoints import EndpointList, SignedEndpoints
from geo_ray.joining.protocol import SERVER, JoinTerms, Outbound
from geo_ray.joining.replication import ServiceEntry
from geo_ray.joining.server import STANDBY, HolderServer, JoinServer, JoinStandby
from geo_ray.joining.service import Stage
from geo_ray.transport.config import TransportConfig
from geo_ray.transport.endpoint import Endpoint
from geo_ray.transport.security.certs import Authority
from geo_ray.transport.wire.message import EndpointIdentity, Message
from tests.support.join_support import WAIT_S, Loop, serving, terms, train_all
from tests.support.train_support import eventually

REGIONS = ("eu", "us")
STEPS = 12
QUICK = TransportConfig(reconnect_min_s=0.05, reconnect_max_s=0.2)


class Service:
    """The servers of a run, one after the other."""

    def __init__(self, run: JoinTerms, folder: Path) -> None:
        self.run, self.folder, self.term, self.version = run, folder, 0, 0
        self.authority, key = Authority.create("test"), secrets.token_bytes(32)
        for name in (*run.regions, SERVER, STANDBY):
            own = JoinCredentials(name, "run", key, self.authority.issue(name))
            own.write(folder / f"{name}.pem")
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            self.next: tuple[str, int] = taken.getsockname()
        self.servers: list[JoinServer] = []
        self.holders: list[HolderServer] = []
        self.start(0)
        server, own = self.servers[0], JoinCredentials.read(folder / f"{SERVER}.pem")
        self.holders = [
            HolderServer(run, number, own, server.address, transport=QUICK)
            for number in range(1, run.holders)
        ]
        self.publish([server.address, self.next])

    def start(self, port: int, **values: Any) -> JoinServer:
        """Start a server with a standby."""
        self.term += 1
        own = JoinCredentials.read(self.folder / f"{SERVER}.pem")
        server = JoinServer(
            self.run, own, port=port, transport=QUICK, term=self.term, has_standby=True, **values
        )
        self.servers.append(server)
        self.publish([server.address, self.next])
        self.follow()
        return server

    def publish(self, addresses: Sequence[tuple[str, int]]) -> None:
        self.version += 1
        found = EndpointList(
            run_id="run", version=self.version, term=self.term, addresses=tuple(addresses)
        )
        signed = SignedEndpoints.sign(found, self.authority)
        self.servers[-1].publish(signed)
        for holder in self.holders:
            holder.learn(signed)

    def follow(self) -> None:
        own, server = JoinCredentials.read(self.folder / f"{STANDBY}.pem"), self.servers[-1]
        self.standby = JoinStandby(own, server.address, QUICK)
        eventually(lambda: server._snapshot is not None, "the standby is connected")
        snapshot = server.take_snapshot()
        assert snapshot is not None
        self.standby.restore(snapshot)
        eventually(lambda: self.standby.is_ready, "the standby is ready")

    def promote(self) -> JoinServer:
        """Let the standby replace the server."""
        port, promoted = self.next[1], self.standby.promote()
        self.next = self.servers[-1].address
        return self.start(port, promoted=promoted)

    @property
    def address(self) -> str:
        return "geo-ray://{}:{}".format(*self.servers[0].address)

    def close(self) -> None:
        self.standby.close()
        for server in self.servers:
            server.close()
        for holder in self.holders:
            holder.close()

    def model(self) -> Tensor:
        """The final parameters, of all holders."""
        parts = [each.holder.averagers.model_H for each in self.holders]
        return torch.cat([self.servers[-1].service.model_P, *parts])


def trained(service: Service, each: dict[str, Callable[[Any], None]] | None = None) -> Any:
    loops = {name: Loop(service.address, name, service.folder) for name in REGIONS}
    calls = {
        name: (lambda n=name, o=own: o.run((each or {}).get(n))) for name, own in loops.items()
    }
    return train_all(calls)


def expected(run: JoinTerms, folder: Path) -> Any:
    with serving(run, folder) as (server, address):
        found = train_all({name: Loop(address, name, folder).run for name in REGIONS})
        return found, server.service.averagers.averagers[0].samples


def is_kind(op: Any, kind: str) -> bool:
    """Return whether an input of the log is a message of a kind."""
    return getattr(getattr(op, "message", None), "kind", "") == kind


@contextmanager
def during(service: Service, call: Callable[[], None]) -> Iterator[None]:
    """Make a call in another thread, which ends with the block; then close the service."""
    thread = threading.Thread(target=call)
    thread.start()
    try:
        yield
        thread.join()
    finally:
        service.close()


def check(found: Any, wanted: Any) -> None:
    for name in REGIONS:
        assert not isinstance(found[name], Exception), found[name]
        assert torch.equal(found[name][0], wanted[name][0])
        assert found[name][1] == wanted[name][1]


class Dies:
    """Ends a server at one point of the handling of a region's update."""

    def __init__(self, server: JoinServer, where: str, at_version: int) -> None:
        self.server, self.where, self.at_version = server, where, at_version
        self.over, self.post = threading.Event(), server._post
        self.advance = server._advance
        server._advance = self.on_advance  # type: ignore[method-assign]
        server._post = self.on_post  # type: ignore[method-assign]

    def on_advance(self, found: tuple[Sequence[ServiceEntry], Sequence[Outbound]]) -> None:
        is_due = self.server.service.version >= self.at_version
        is_update = any(is_kind(each.op, "update") for each in found[0])
        if is_due and is_update and self.where == "before the standby":
            self.die()
        self.advance(found)
        if is_due and is_update and self.where == "after the standby":
            self.die()

    def on_post(self, found: Sequence[Outbound]) -> None:
        if self.over.is_set():
            return
        replies = [each for each in found if each.message.kind == "reply"]
        is_due = self.server.service.version > self.at_version and replies
        if is_due and self.where == "before the answers":
            self.die()
            return
        if is_due and self.where == "between the answers":
            self.post([each for each in found if each.peer == replies[0].peer])
            self.die()
            return
        self.post(found)

    def die(self) -> None:
        self.server._fence("killed by the test")
        self.over.set()


WHERE = ("before the standby", "after the standby", "before the answers", "between the answers")


@pytest.mark.parametrize("holders", [1, 3])
@pytest.mark.parametrize("where", WHERE)
def test_a_server_that_is_lost_in_a_commit_is_replaced(
    tmp_path: Path, where: str, holders: int
) -> None:
    run = terms(REGIONS, STEPS, strategy={"kind": "diloco", "interval": 2}, holders=holders)
    wanted, samples = expected(run, tmp_path)
    service = Service(run, tmp_path)
    dies = Dies(service.servers[0], where, 2)

    def replace() -> None:
        dies.over.wait(60.0)
        service.promote()

    with during(service, replace):
        found = trained(service)
    check(found, wanted)
    assert len(service.servers) == 2
    last = service.servers[-1].service
    assert torch.equal(service.model(), found["eu"][0])
    assert last.averagers.averagers[0].samples == samples
    assert last.steps == dict.fromkeys(REGIONS, STEPS)


def test_a_server_that_lives_cannot_continue_without_its_standby(tmp_path: Path) -> None:
    run = terms(REGIONS, STEPS, strategy={"kind": "diloco", "interval": 2})
    wanted, _ = expected(run, tmp_path)
    service = Service(run, tmp_path)
    promoted = threading.Event()

    def each(sync: Any) -> None:
        if sync.steps == 5 and not promoted.is_set():
            promoted.set()
            service.promote()

    try:
        first = service.servers[0]
        found = trained(service, {"eu": each})
        check(found, wanted)
        assert first.is_fenced and first.service.version < service.servers[-1].service.version
        listed = SignedEndpoints.load(
            (tmp_path / "eu.endpoints.json").read_bytes(),
            "run",
            JoinCredentials.read(tmp_path / "eu.pem").certificate.ca_pem,
        ).list
        assert (listed.term, listed.version) == (2, 3)
        assert listed.addresses[0] == service.servers[-1].address
    finally:
        service.close()


def test_the_end_reaches_ranks_although_the_standby_does_not_answer(tmp_path: Path) -> None:
    run = terms(REGIONS, STEPS, strategy={"kind": "diloco", "interval": 2})
    wanted, _ = expected(run, tmp_path)
    service = Service(run, tmp_path)
    server, ends, is_deaf = service.servers[0], threading.Event(), threading.Event()
    offer, on_standby = server._offer, server._on_standby

    def offered(op: Any) -> None:
        is_last = server.service.stage is Stage.ENDING and is_kind(op, "state")
        if is_last:
            is_deaf.set()
        offer(op)
        if is_last:
            ends.set()

    def of_standby(message: Message) -> None:
        if not is_deaf.is_set():
            on_standby(message)

    server._offer = offered  # type: ignore[method-assign]
    server._on_standby = of_standby  # type: ignore[method-assign]

    def close() -> None:
        assert ends.wait(60.0)
        assert server.service.stage is not Stage.DONE
        server.close()

    with during(service, close):
        check(trained(service), wanted)


def test_ranks_hear_the_end_from_a_standby_that_has_replaced_the_server_and_closes_at_once(
    tmp_path: Path,
) -> None:
    run = terms(REGIONS, STEPS, strategy={"kind": "diloco", "interval": 2})
    wanted, _ = expected(run, tmp_path)
    service = Service(run, tmp_path)
    server, died = service.servers[0], threading.Event()
    post = server._post

    def posted(found: Sequence[Outbound]) -> None:
        if any(each.message.kind == "over" for each in found):
            server._fence("killed by the test")
            died.set()
        elif not died.is_set():
            post(found)

    server._post = posted  # type: ignore[method-assign]

    def replace() -> None:
        assert died.wait(60.0)
        own, port = JoinCredentials.read(tmp_path / f"{SERVER}.pem"), service.next[1]
        promoted = service.standby.promote()
        assert promoted.service.stage is Stage.DONE
        other = JoinServer(
            run, own, port=port, transport=QUICK, term=2, has_standby=True, promoted=promoted
        )
        other.close()

    with during(service, replace):
        check(trained(service), wanted)


@pytest.mark.parametrize("peer", ["us#0", STANDBY])
def test_the_end_does_not_wait_for_peers_that_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, peer: str
) -> None:
    """Their messages stay in the outbox for good."""
    monkeypatch.setattr(server_module, "_DRAIN_S", 10 * WAIT_S)
    run = terms(REGIONS, STEPS, strategy={"kind": "diloco", "interval": 2})
    with serving(run, tmp_path) as (server, _):
        own = JoinCredentials.read(tmp_path / "us.pem")
        identity = EndpointIdentity(own.run_id, peer, 1, own.key)
        gone = Endpoint(identity, lambda *_: None, QUICK, certificate=own.certificate)
        gone.connect(SERVER, server.address)
        eventually(lambda: peer in server.links(), "it is connected")
        gone.close(0.0)
        eventually(lambda: not server.links()[peer]["connected"], "it is gone")
        with server.lock:
            last = Message("refused", {}, b"x", "control")
            server._post([Outbound(peer, last)])
        eventually(lambda: server.links()[peer]["outbox_messages"] > 0, "the message waits")
        closing = threading.Thread(target=server.close, daemon=True)
        closing.start()
        closing.join(WAIT_S)
        assert not closing.is_alive()
