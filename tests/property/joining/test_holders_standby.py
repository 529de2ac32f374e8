"""Slices in several processes, and a standby of the server, which is lost at every point."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from geo_ray.joining.link import RECEIVED, REPLACED, RESUME
from geo_ray.joining.numbering import HAVE, INCARNATION, ReceivedCounts, UnconfirmedMessages
from geo_ray.joining.protocol import SERVER, Outbound
from geo_ray.joining.replication import (
    ENTRY,
    EndSave,
    LoseHolder,
    Received,
    ReplicatedService,
    RequestStop,
    ServiceEntry,
    SetInterval,
)
from geo_ray.joining.server import STANDBY
from geo_ray.joining.service import JoinService, Stage
from geo_ray.transport.wire.message import CONTROL, Message
from tests.property.joining.test_holders import HOLDERS, STEPS, Key, Net, P

Choice = Callable[[list[Key]], Key]


class End:
    """A rank's or holder's end of its connection to the server; see `geo_ray.joining.link`."""

    def __init__(self) -> None:
        self.sent, self.received = UnconfirmedMessages(), ReceivedCounts()

    @property
    def about(self) -> dict[str, Any]:
        return {INCARNATION: 1, HAVE: [*self.received.counts]}

    def numbered(self, message: Message) -> Message:
        meta = {**message.meta, **self.about}
        own = Message(message.kind, meta, bytes(message.payload), message.traffic, message.lane)
        return self.sent.add(own)

    def again(self) -> list[Outbound]:
        """What another server gets first."""
        meta = {**self.about, "sent": [*self.sent.confirmed]}
        resume = Message(RESUME, meta, b"", "control", CONTROL)
        return [Outbound(SERVER, each) for each in (resume, *self.sent.unconfirmed)]


class StandbyNet(Net):
    """A replicated service, its standby, holders and ranks."""

    def __init__(self, holders: int = HOLDERS, steps: int = STEPS) -> None:
        self.ends: dict[str, End] = {}
        self.standby: ReplicatedService | None = None
        Net.__init__(self, holders, steps)
        self.follow()

    def serve(self) -> JoinService:
        self.log = ReplicatedService.new(self.run, None, 1, keeps=True)
        return self.log.service

    def follow(self) -> None:
        """Start a standby, in another process."""
        self.standby = pickle.loads(pickle.dumps(self.log.begin_snapshot()))
        self._confirm(self.standby.number)

    def _confirm(self, number: int) -> None:
        Net.send(self, STANDBY, [Outbound(SERVER, Message("ack", {"entry": number}, b"", "x"))])

    def send(self, source: str, found: list[Outbound]) -> None:
        """Send messages; those to the server get numbers."""
        end = self.ends.setdefault(source, End())
        Net.send(
            self,
            source,
            [
                Outbound(SERVER, end.numbered(each.message)) if each.peer == SERVER else each
                for each in found
            ],
        )

    def handle(self, source: str, to: str, message: Message) -> None:
        assert message.kind != REPLACED
        if to == STANDBY:
            if self.standby is not None:
                entry = ServiceEntry.read(message)
                self.standby.follow(entry)
                self._confirm(entry.number)
        elif source == STANDBY:
            self._advance(*self.log.on_ack(message.meta["entry"]))  # type: ignore[arg-type]
        elif message.kind == RESUME:
            Net.send(self, SERVER, self.log.resume(source, message))
        elif to == SERVER:
            if self.log.accepts(source, message):
                self.offer(Received(source, message))
        elif source != SERVER:
            Net.handle(self, source, to, message)
        elif message.kind == RECEIVED:
            self.ends[to].sent.confirm(message.meta[HAVE])  # type: ignore[arg-type]
        elif (taken := self.ends[to].received.take(message)) is not None:
            Net.handle(self, source, to, taken)

    def offer(self, op: Any) -> None:
        self._advance(*self.log.offer(op, 0.0))

    def _advance(self, entries: list[ServiceEntry], found: list[Outbound]) -> None:
        shipped = [Outbound(STANDBY, each.to_message()) for each in entries]
        assert all(each.message.kind == ENTRY for each in shipped)
        Net.send(self, SERVER, shipped + found)

    @property
    def may_lose_server(self) -> bool:
        return self.standby is not None and self.standby.is_attached

    def lose_server(self, arrived: int = 0) -> None:
        """Lose the server, with its messages on the way but for some entries of the log."""
        assert self.standby is not None
        for key, messages in self.links.items():
            if key[:2] == (SERVER, STANDBY):
                for _, message in list(messages)[:arrived]:
                    self.standby.follow(ServiceEntry.read(message))
            if {SERVER, STANDBY} & set(key[:2]):
                messages.clear()
        self.standby.become_server()
        self.log, self.standby = self.standby, None
        self.service = self.log.service
        for name, end in self.ends.items():
            Net.send(self, name, end.again())

    def lose(self, holder: int) -> None:
        self.lost.add(holder)
        self.offer(LoseHolder(holder, "killed"))

    def check_end(self) -> None:
        """Everything has happened once."""
        assert self.service.stage is Stage.DONE and self.service.failure is None
        assert all(each.is_over for each in self.ranks.values())
        steps = self.run.steps
        expected = torch.full((P,), 2.0 * steps)  # the mean of 1 and 3 in each step
        assert torch.equal(self.model(), expected)
        for rank in self.ranks.values():
            assert torch.equal(rank.vector.params_S, expected[: rank.vector.size])
        assert self.versions() == [steps] * self.run.holders
        newest = self.service._holders.newest
        assert {each._executed for each in self.holders.values()} == {newest}
        assert self.service.steps == dict.fromkeys(("eu", "us"), steps)
        events = self.log.events(0)
        exchanges = [each for each in events if each["kind"] == "exchange"]
        assert len({(each["region"], each["seq"]) for each in exchanges}) == 2 * steps
        assert [each["bytes_received"] for each in exchanges] == [4 * P] * 2 * steps


def first(ready: list[Key]) -> Key:
    return ready[0]


def last(ready: list[Key]) -> Key:
    return ready[-1]


def finished(net: StandbyNet, choose: Choice, longest: int | None = None) -> int:
    """Deliver messages until there are none, or so many; returns their number."""
    count = 0
    while count != longest and (ready := net.ready):
        net.deliver(choose(ready))
        count += 1
    return count


@pytest.mark.parametrize("choose", [first, last])
def test_the_server_is_lost_at_each_point(choose: Choice) -> None:
    whole = StandbyNet(2, 2)
    count = finished(whole, choose)
    whole.check_end()
    lost = 0
    for point in range(count):
        net = StandbyNet(2, 2)
        finished(net, choose, point)
        if net.may_lose_server:
            lost += 1
            net.lose_server(point % 3)
            finished(net, choose)
            net.check_end()
    assert lost > count // 2


@settings(max_examples=20)  # each delivers hundreds of messages
@given(st.data(), st.lists(st.tuples(st.integers(1, 120), st.integers(0, 3)), max_size=4))
def test_servers_are_lost_one_after_the_other(
    data: st.DataObject, losses: list[tuple[int, int]]
) -> None:
    """In every interleaving; each has another standby, which begins at any point."""
    net = StandbyNet(HOLDERS, 2)

    def choose(ready: list[Key]) -> Key:
        return data.draw(st.sampled_from(ready))

    for point, arrived in losses:
        finished(net, choose, point)
        if net.may_lose_server:
            net.lose_server(arrived)
            finished(net, choose, point // 2)
            net.follow()
    finished(net, choose)
    net.check_end()


@settings(max_examples=20)  # each delivers hundreds of messages
@given(st.data(), st.integers(1, HOLDERS - 1), st.integers(0, 150), st.booleans())
def test_a_holder_is_lost_although_the_server_has_a_standby(
    data: st.DataObject, holder: int, after: int, loses_server: bool
) -> None:
    """The run ends, and continues from its newest checkpoint."""
    net = StandbyNet(HOLDERS, 2)

    def choose(ready: list[Key]) -> Key:
        return data.draw(st.sampled_from(ready))

    finished(net, choose, after)
    was_done = net.service.stage is Stage.DONE
    taken_in = net.holders[holder].averagers.version
    net.lose(holder)
    if loses_server and net.may_lose_server:
        net.lose_server(1 << 20)  # the standby knows of the loss
    finished(net, choose)
    assert all(each.merged <= taken_in for each in net.ranks.values())
    if not was_done and net.service.stage is not Stage.DONE:
        assert net.service.failure is not None and net.service.failure.code == "REGION_LOST"
        assert {each.refused for each in net.ranks.values()} == {"SERVER_LOST"}


@pytest.mark.parametrize("op", [RequestStop(), SetInterval(2), EndSave(None)])
def test_a_request_before_the_holders_are_there_changes_nothing(op: Any) -> None:
    net = StandbyNet(2, 2)
    net.offer(op)
    finished(net, first)
    net.check_end()


def test_an_order_that_a_holder_has_executed_is_not_executed_again() -> None:
    """Its report was lost with the server, and so was the order to the other holder."""
    net = StandbyNet()
    while net.service.version == 0:
        net.deliver(first(net.ready))
    first_holder, other = net.holders[1], net.holders[2]
    key = next(k for k in net.links if k[:2] == (SERVER, "geo-ray-server#1") and net.links[k])
    while first_holder.averagers.version == 0:
        net.deliver(key)
    assert (first_holder.averagers.version, other.averagers.version) == (1, 0)
    assert {each.merged for each in net.ranks.values()} == {0}
    executed: deque[int] = deque()
    execute = first_holder.averagers.execute

    def counted(order: Any) -> Any:
        executed.append(first_holder._executed)
        return execute(order)

    first_holder.averagers.execute = counted  # type: ignore[method-assign]
    assert net.may_lose_server
    net.lose_server()
    finished(net, first)
    net.check_end()
    assert len(executed) == len(set(executed))
