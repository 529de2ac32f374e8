"""A standby that follows the server's log: the server is lost at every point of a run."""

from __future__ import annotations

import pickle
import random
from collections import deque
from collections.abc import Generator
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from geo_ray.base.errors import EndpointListError, FrameError, InvariantError
from geo_ray.joining.credentials import JoinCredentials
from geo_ray.joining.endpoints import EndpointBook, EndpointList, SignedEndpoints
from geo_ray.joining.layout import Layout, Ranges, positions, put, taken
from geo_ray.joining.link import RECEIVED, REPLACED, ServerLink
from geo_ray.joining.numbering import HAVE, INCARNATION, ReceivedCounts, UnconfirmedMessages
from geo_ray.joining.protocol import (
    Hello,
    Outbound,
    Welcome,
    holder_name,
    payload_of,
    rank_name,
)
from geo_ray.joining.rank import STRATEGIES, JoinedModel, RankExchange, SliceWire
from geo_ray.joining.replication import (
    BeginSave,
    EndSave,
    LoseRegion,
    Received,
    ReplicatedService,
    RequestStop,
    ServiceEntry,
    SetInterval,
    Tick,
)
from geo_ray.joining.save_round import SaveStage
from geo_ray.joining.service import Stage
from geo_ray.training.payload_encoding import RegionWire
from geo_ray.training.wire_format import as_tensor, payload_bytes, read_reply, update_meta
from geo_ray.transport.endpoint import Endpoint
from geo_ray.transport.security.certs import Authority
from geo_ray.transport.wire.message import CONTROL, DATA, LANES, Message
from tests.support.join_support import WAIT_S, terms

LAYOUT = Layout.of(nn.Linear(5, 2))
P = LAYOUT.size
WHOLE: Ranges = ((0, P),)
HALVES: tuple[Ranges, ...] = (((0, 6),), ((6, P),))
STEPS = 6
ROWS = 4


class Memory:
    """A rank's share in memory, in place of a module."""

    def __init__(self, size: int) -> None:
        self.params_S, self.size = torch.arange(float(size)), size

    def read(self) -> Tensor:
        return self.params_S.clone()

    def write(self, params_S: Tensor) -> None:
        self.params_S.copy_(params_S)

    def release(self) -> bool:
        return False


class Rank:
    """A rank whose link to the server follows `geo_ray.joining.link`, without a network."""

    def __init__(self, world: World, region: str, rank: int, shares: tuple[Ranges, ...]) -> None:
        self.world, self.region, self.name = world, region, rank_name(region, rank)
        self.hello = Hello(region, rank, len(shares), 1, LAYOUT, shares[rank])
        self.sent, self.received = UnconfirmedMessages(), ReceivedCounts()
        self.memory = Memory(sum(b - a for a, b in shares[rank]))
        self.is_over, self.replies = False, 0
        self.program = self.run()
        next(self.program)

    def send(self, message: Message) -> None:
        meta = {**message.meta, INCARNATION: 1, HAVE: [*self.received.counts]}
        message = Message(message.kind, meta, bytes(message.payload), message.traffic, message.lane)
        self.world.to_server.append((self.name, self.sent.add(message)))

    def resume(self) -> None:
        """Continue with another server."""
        meta = {INCARNATION: 1, HAVE: [*self.received.counts], "sent": [*self.sent.confirmed]}
        for each in self.world.server.resume(self.name, Message("resume", meta, b"", "control")):
            self.world.to_ranks.append((each.peer, each.message))
        self.world.to_server += [(self.name, each) for each in self.sent.unconfirmed]

    def deliver(self, message: Message) -> None:
        assert message.kind != REPLACED
        if message.kind == RECEIVED:
            self.sent.confirm(message.meta[HAVE])
        elif (found := self.received.take(message)) is not None and not self.is_over:
            try:
                self.program.send(found)
            except StopIteration:
                self.is_over = True

    def run(self) -> Generator[None, Message, None]:
        run, share = self.world.run, self.hello.share
        self.send(self.hello.message())
        message = yield
        welcome = Welcome.read(message)
        slices = []
        for index, ranges in sorted(welcome.slices.items()):
            size = sum(b - a for a, b in ranges)
            wire = RegionWire(run.wire_plan(LAYOUT, ranges), self.region, size)
            slices.append(SliceWire(index, ranges, positions(ranges, share), wire))
        if welcome.is_source:
            self.send_params(slices)
        else:
            for _ in slices:
                message = yield
                values = as_tensor(memoryview(message.payload))
                (own,) = [each for each in slices if each.index == message.meta["slice"]]
                put(self.memory.params_S, own.places, values)
        model = JoinedModel(run.strategy, self.memory, run.bounds_in(share, P))
        model.start()
        exchange = RankExchange(run.server_plan(self.region, 1), model, slices=slices)
        while not exchange.is_done:
            self.memory.params_S += len(self.region) + exchange.version
            sent = exchange.step(ROWS, 0.1)
            while sent:
                for update in sent:
                    parts = exchange.encoded(update.update)
                    for each, part in zip(exchange.slices, parts, strict=True):
                        meta = {**update_meta(part), "rank_rows": ROWS, "slice": each.index}
                        payload = bytes(payload_bytes(part))
                        self.send(Message("update", meta, payload, "update"))
                replies: dict[object, Any] = {}
                while len(replies) < len(slices):
                    message = yield
                    assert message.kind == "reply"
                    own_meta = {k: v for k, v in message.meta.items() if k != "slice"}
                    replies[message.meta["slice"]] = read_reply(own_meta, message.payload)
                self.replies += 1
                found = [each.wire.decode(replies[each.index]) for each in exchange.slices]
                exchange.on_replies(found, 0.1)
                sent = exchange.advance()
        self.send(Message("finished", {}, b"", "control", CONTROL))
        while (message := (yield)).kind == "collect":
            self.send_params(exchange.slices)
        assert message.kind == "over"

    def send_params(self, slices: Any) -> None:
        for each in slices:
            payload = payload_of(taken(self.memory.params_S, each.places).clone())
            self.send(Message("state", {"slice": each.index, "start": 0}, payload, "transfer"))


class World:
    """A server, its standby and ranks, whose messages arrive in random order where they may."""

    def __init__(
        self, seed: int, *, has_standby: bool = True, kind: str = "sma", **sections: Any
    ) -> None:
        self.random, self.now_s = random.Random(seed), 0.0
        own = {"nbsync": {}, "hfa": {"k1": 1, "k2": 2}}.get(kind, {"interval": 2})
        own |= {"interval": 4, "fragments": 2, "tau": 1} if kind == "diloco_streaming" else {}
        strategy = {"kind": kind, **own}
        self.run = terms(["eu", "usa"], STEPS, strategy=strategy, **sections)
        self.server = ReplicatedService.new(self.run, None, 1, keeps=has_standby)
        self.standby: ReplicatedService | None = None
        self.to_server: list[tuple[str, Message]] = []
        self.to_ranks: list[tuple[str, Message]] = []
        self.to_standby: deque[Message] = deque()
        self.acks: deque[int] = deque()
        self.delivered = 0
        if has_standby:
            self.follow()
        shares = {"eu": (WHOLE,), "usa": HALVES}
        ranks = [Rank(self, name, n, own) for name, own in shares.items() for n in range(len(own))]
        self.ranks = {rank.name: rank for rank in ranks}

    def follow(self) -> None:
        """Start a standby."""
        self.to_standby.clear()
        self.acks.clear()
        self.standby = self.server.begin_snapshot()
        self.acks.append(self.standby.number)

    def lose_server(self) -> None:
        """Lose the server with all messages on the way; continue with the standby."""
        assert self.standby is not None
        for message in self.to_standby if self.random.random() < 0.5 else ():
            self.standby.follow(ServiceEntry.read(message))  # it had arrived
        for queue in (self.to_server, self.to_ranks, self.to_standby, self.acks):
            queue.clear()
        assert self.standby.is_attached
        self.standby.become_server()
        self.server, self.standby = self.standby, None
        for rank in self.ranks.values():
            rank.resume()

    def deliver(self) -> None:
        """Deliver a message that may be next."""
        self.delivered += 1
        self.now_s += 0.01
        choices = ("to_server", "to_ranks", "to_standby", "acks")
        kind = self.random.choice([kind for kind in choices if getattr(self, kind)])
        if kind == "to_standby" and self.standby is not None:
            entry = ServiceEntry.read(self.to_standby.popleft())
            self.standby.follow(entry)
            self.acks.append(entry.number)
        elif kind == "acks":
            self.advance(*self.server.on_ack(self.acks.popleft()))
        elif kind == "to_server":
            peer, message = self._next(self.to_server)
            self.offer(Received(peer, message))
            if self.random.random() < 0.2:
                self.offer(Tick(600.0, 0))
        else:
            peer, message = self._next(self.to_ranks)
            self.ranks[peer].deliver(message)

    def _next(self, queue: list[tuple[str, Message]]) -> tuple[str, Message]:
        """Take a message of one peer; those of lower lanes overtake others, and nothing else."""
        peer, message = self.random.choice(queue)
        own = [
            n for n, (name, each) in enumerate(queue) if name == peer and each.lane <= message.lane
        ]
        return queue.pop(min(own, key=lambda n: (queue[n][1].lane, n)))

    def offer(self, op: Any) -> None:
        self.advance(*self.server.offer(op, self.now_s))

    def advance(self, entries: list[ServiceEntry], outbound: list[Outbound]) -> None:
        self.to_standby += [each.to_message() for each in entries]
        self.to_ranks += [(each.peer, each.message) for each in outbound]

    def finish(self) -> dict[str, Any]:
        """Deliver all messages; returns what must not depend on losses."""
        while self.to_server or self.to_ranks or self.to_standby or self.acks:
            self.deliver()
        assert all(rank.is_over for rank in self.ranks.values())
        service = self.server.service
        assert service.stage is Stage.DONE
        counted = [(e["kind"], e.get("region"), e.get("step")) for e in self.server.events(0)]
        return {
            "model": service.model_P.tolist(),
            "ranks": {n: rank.memory.params_S.tolist() for n, rank in self.ranks.items()},
            "replies": {n: rank.replies for n, rank in self.ranks.items()},
            "version": service.version,
            "samples": service.averagers.averagers[0].samples,
            "steps": service.steps,
            "events": sorted(counted, key=str),
        }


@pytest.mark.parametrize("kind", ["sma", "diloco", "async_local_sgd"])
def test_a_lost_server_changes_nothing(kind: str) -> None:
    expected = World(0, has_standby=False, kind=kind).finish()
    world = World(0, kind=kind)
    whole = world.finish()
    assert whole == expected or kind == "async_local_sgd"  # whose order of updates differs
    lost = 0
    for point in range(1, world.delivered):
        world = World(0, kind=kind)
        for _ in range(point):
            world.deliver()
        if world.standby is None or not world.standby.is_attached:
            continue  # the run begins
        world.lose_server()
        lost += 1
        found = world.finish()
        counts = ("replies", "version", "samples", "steps")
        same = counts if kind == "async_local_sgd" else tuple(expected)
        assert {key: found[key] for key in same} == {key: expected[key] for key in same}, point
        assert found["ranks"]["eu#0"] == found["model"] or kind == "async_local_sgd"
    assert lost > 50


def test_a_changed_interval_survives_the_server() -> None:
    """It is an entry of the log. If that is lost, the run loop asks again."""

    def finish(point: int) -> dict[str, Any]:
        world, is_asked = World(0), False
        while not all(rank.is_over for rank in world.ranks.values()):
            service = world.server.service
            if service.version >= 1 and not is_asked:
                is_asked = True
                world.offer(SetInterval(1))
            is_ready = world.standby is not None and world.standby.is_attached
            if world.delivered >= point and is_ready:
                world.lose_server()
                is_asked = world.server.service.averagers.interval == 1
            world.deliver()
        return world.finish()

    whole = finish(1000)
    steps = {step for kind, _, step in whole["events"] if kind == "step"}
    assert steps == {2, 4, 5, 6}  # the interval is 2 until the answer to the second exchange
    for point in range(60, 150, 3):
        assert finish(point) == whole, point


@pytest.mark.parametrize("seed", range(12))
def test_servers_are_lost_one_after_the_other(seed: int) -> None:
    expected = World(seed, has_standby=False).finish()
    world, chance = World(seed), random.Random(seed)
    while not all(rank.is_over for rank in world.ranks.values()):
        if world.to_server or world.to_ranks or world.to_standby or world.acks:
            world.deliver()
        is_ready = world.standby is not None and world.standby.is_attached
        if chance.random() < 0.1 and is_ready:
            world.lose_server()
            world.follow()
        elif chance.random() < 0.05 and world.standby is not None:
            world.standby = None  # it is lost
            world.to_standby.clear()
            world.acks.clear()
            world.advance([], world.server.release())
            world.follow()
    assert world.finish() == expected


def test_a_server_executes_nothing_without_its_standby() -> None:
    world = World(0)
    while world.standby is not None and not world.standby.is_attached:
        world.deliver()
    standby, world.standby = world.standby, None
    assert standby is not None
    world.to_standby.clear()
    while world.acks:
        world.advance(*world.server.on_ack(world.acks.popleft()))
    executed, version = world.server.executed, world.server.service.version
    world.to_ranks.clear()
    while world.to_server:
        world.deliver()
        world.to_standby.clear()
    assert (world.server.executed, world.server.service.version) == (executed, version)
    assert not world.to_ranks and world.server.number > executed
    world.advance([], world.server.release())
    assert world.server.executed == world.server.number and world.to_ranks


@pytest.mark.parametrize("way", ["release", "confirm"])
def test_an_invalid_message_keeps_back_no_others(way: str) -> None:
    """Entries wait for the standby, an invalid message of a rank among them."""
    world = World(0)
    while world.standby is None or not world.standby.is_attached or not world.to_server:
        world.deliver()
    world.standby = None
    for queue in (world.to_standby, world.acks, world.to_ranks):
        queue.clear()
    invalid = Message("update", {INCARNATION: 1, HAVE: [0, 0]}, b"", "update")
    for op in [*(Received(*each) for each in world.to_server), Received("usa#1", invalid)]:
        world.offer(op)
    log = world.server
    found = log.release() if way == "release" else log.on_ack(log.number)[1]
    assert found and log.executed == log.number and not log._pending


def test_a_standby_that_misses_an_entry_is_refused() -> None:
    world = World(0)
    replica = world.server.begin_snapshot()
    number = replica.number
    replica.follow(ServiceEntry(number, 1.0, RequestStop()))  # known
    assert replica.number == number
    with pytest.raises(InvariantError, match="follows"):
        replica.follow(ServiceEntry(number + 2, 1.0, RequestStop()))
    with pytest.raises(FrameError, match="the log ends"):
        world.server.on_ack(world.server.number + 1)


@pytest.mark.parametrize(
    "op",
    [
        Received("eu#0", Message("update", {"a": 1, "b": [1.5, None], "c": b"x"}, b"12", "update")),
        Received("eu#0", Message("finished", {}, b"", "control", CONTROL)),
        Tick(600.0, 7),
        LoseRegion("eu", "why"),
        RequestStop(),
        SetInterval(8),
        BeginSave(3, (1, 2), 60.0),
        EndSave(3),
        EndSave(None),
    ],
)
def test_entries_are_read_as_they_were_written(op: Any) -> None:
    entry = ServiceEntry(5, 1.25, op)
    assert ServiceEntry.read(entry.to_message()) == entry


def test_a_window_drops_duplicates_and_messages_that_came_too_early() -> None:
    sent, received = UnconfirmedMessages(), ReceivedCounts()
    first, second = (sent.add(Message("a", {"n": n}, b"", "data")) for n in (1, 2))
    control = sent.add(Message("b", {}, b"", "control", CONTROL))
    assert received.take(second) is None
    assert [received.take(each).meta for each in (control, first)] == [{}, {"n": 1}]  # type: ignore[union-attr]
    assert received.take(first) is None
    counts = [0] * LANES
    counts[DATA], counts[CONTROL] = 1, 1
    assert received.counts == counts
    sent.confirm(received.counts)
    assert sent.unconfirmed == [second]
    with pytest.raises(FrameError):
        sent.confirm([9] * LANES)
    sent.withdraw(second)
    assert sent.unconfirmed == []
    assert received.take(sent.add(Message("c", {}, b"", "data"))) is not None


# ---------------------------------------------------------------------- endpoint lists

AUTHORITY = Authority.create("test")
GIVEN = ("10.0.0.1", 7447)


def signed(version: int = 1, authority: Authority = AUTHORITY, **values: Any) -> SignedEndpoints:
    own = {"run_id": "run", "term": 1, "addresses": (("10.0.0.2", 1), ("10.0.0.3", 2))} | values
    return SignedEndpoints.sign(EndpointList(version=version, **own), authority)


def test_the_newest_list_is_kept_and_tried_in_order(tmp_path: Any) -> None:
    path = tmp_path / "eu.endpoints.json"
    book = EndpointBook("run", AUTHORITY.cert_pem, GIVEN, path)
    assert (book.addresses(), book.term) == ((GIVEN,), 0)
    assert book.take(signed(2, term=2).dump())
    assert not book.take(signed(2, term=2).dump())
    again = EndpointBook("run", AUTHORITY.cert_pem, GIVEN, path)  # of another process
    for each in (book, again):
        assert each.term == 2
        assert each.addresses() == (("10.0.0.2", 1), ("10.0.0.3", 2), GIVEN)
        assert each.addresses([("10.0.0.3", 2)])[0] == ("10.0.0.3", 2)
    path.write_text("nonsense")
    assert EndpointBook("run", AUTHORITY.cert_pem, GIVEN, path).addresses() == (GIVEN,)


def changed(found: SignedEndpoints) -> bytes:
    return found.dump().replace(b"10.0.0.2", b"10.0.0.9")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (signed(1).dump(), "not newer"),
        (signed(2, addresses=(GIVEN,)).dump(), "not newer"),
        (signed(3, Authority.create("other")).dump(), "not signed"),
        (changed(signed(3)), "not signed"),
        (signed(3, run_id="other").dump(), "of run"),
        (b"{}", "cannot be read"),
        (b"\xff", "cannot be read"),
    ],
)
def test_other_lists_are_refused(data: bytes, message: str) -> None:
    book = EndpointBook("run", AUTHORITY.cert_pem, GIVEN)
    book.take(signed(2).dump())
    with pytest.raises(EndpointListError, match=message):
        book.take(data)
    assert book.newest == signed(2).list


class Link(ServerLink):
    """A link whose missing connections are given, and whose messages are kept."""

    def __init__(self) -> None:
        self.away: dict[int, str] = {}
        self.kept: SimpleQueue[Message] = SimpleQueue()
        own = JoinCredentials("eu", "run", bytes(32), AUTHORITY.issue("eu"))
        book = EndpointBook("run", AUTHORITY.cert_pem, GIVEN)
        ServerLink.__init__(self, "eu#0", 1, own, book, lambda *_: None, None)

    @property
    def lacking(self) -> dict[int, str]:
        return self.away

    def send(self, message: Message, deadline_s: float | None = None) -> None:
        self.kept.put(message)


def test_a_training_begins_with_a_report_of_missing_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its server may have the report of a connection that has returned since."""
    for name in ("connect", "wait_connected"):
        monkeypatch.setattr(Endpoint, name, lambda *_: None)
    link = Link()
    try:
        link.away = {1: "refused"}
        link._on_server(holder_name(1), 1, False)
        assert link.kept.get(timeout=WAIT_S).meta["holders"] == [1]
        link.away = {}
        link.connect_holders([GIVEN], WAIT_S)
        assert link.kept.get(timeout=WAIT_S).meta["holders"] == []
    finally:
        link.close(0.0)


@pytest.mark.parametrize("kind", ["sma", "diloco"])
def test_a_standby_begins_while_a_checkpoint_is_made(kind: str) -> None:
    """Also after it, when the averager has not changed since."""
    world = World(1, has_standby=False, kind=kind)
    service = world.server.service
    while service.stage is not Stage.TRAINING:
        world.deliver()
    for region in service._regions.values():
        region.hellos = {rank: replace(each, saved=()) for rank, each in region.hellos.items()}
    world.offer(BeginSave(0, (), 600.0))
    while service.save is not None and service.save.stage is SaveStage.MEETING:
        world.deliver()
    assert service.save is not None
    saved = service.saved_run
    copy = pickle.loads(pickle.dumps(world.server.begin_snapshot())).service
    for own, other in zip(saved.slices, copy.saved_run.slices, strict=True):
        assert own.ranges == other.ranges and own.control == other.control
        assert own.tensors.keys() == other.tensors.keys()
        assert all(torch.equal(own.tensors[name], other.tensors[name]) for name in own.tensors)
    world.offer(EndSave(service.save.id - 1))
    assert service.save is not None
    world.offer(EndSave(service.save.id))
    assert service.save is None
    after = pickle.loads(pickle.dumps(world.server.begin_snapshot())).service
    assert after.save is None and after.version == service.version


@pytest.mark.parametrize("kind", STRATEGIES)
def test_a_standby_in_another_process_continues_any_strategy(kind: str) -> None:
    """A snapshot is serialized in the middle of the run; then the server is lost."""
    rows = {"rows": 60} if kind == "nbsync" else {}
    expected = World(1, kind=kind, **rows)
    expected.finish()
    world = World(1, kind=kind, **rows)
    for _ in range(expected.delivered // 2):
        world.deliver()
    world.standby = None
    world.to_standby.clear()
    world.acks.clear()
    world.advance([], world.server.release())
    world.standby = pickle.loads(pickle.dumps(world.server.begin_snapshot()))
    world.acks.append(world.standby.number)
    while not world.standby.is_attached:
        world.deliver()
    world.lose_server()
    found = world.finish()
    assert found["model"] == found["ranks"]["eu#0"]
    assert sum(found["steps"].values()) == sum(expected.server.service.steps.values())
