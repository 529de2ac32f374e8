"""Slices in several processes: a round commits in all of them or in none, in every interleaving."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from geo_ray.base.errors import FrameError, GeoRayError, ModelMismatchError
from geo_ray.joining.holder import Holders, SliceHolder
from geo_ray.joining.layout import (
    Layout,
    Ranges,
    holder_starts,
    positions,
    put,
    slices_of,
    taken,
)
from geo_ray.joining.link import UNREACHED
from geo_ray.joining.protocol import (
    ADDRESSEE,
    SERVER,
    Hello,
    Outbound,
    Welcome,
    holder_name,
    payload_of,
    rank_name,
)
from geo_ray.joining.rank import JoinedModel, RankExchange, SliceWire
from geo_ray.joining.server import Absences
from geo_ray.joining.service import JoinService, Stage
from geo_ray.joining.slices import (
    FinishOrder,
    IntervalOrder,
    LeaveOrder,
    WakeOrder,
    order_json,
    read_order,
)
from geo_ray.training.payload_encoding import RegionWire
from geo_ray.training.wire_format import (
    as_tensor,
    payload_bytes,
    read_refusal,
    read_reply,
    update_meta,
)
from geo_ray.transport.wire.message import CONTROL, Message
from tests.support.join_support import terms

LAYOUT = Layout.of(nn.Linear(5, 2))
P = LAYOUT.size
WHOLE: Ranges = ((0, P),)
SHARES: dict[str, Sequence[Ranges]] = {"eu": [WHOLE], "us": [((0, 6),), ((6, P),)]}
HOLDERS, STEPS = 3, 4
Key = tuple[str, str, int]


class Vector:
    """A rank's share in memory, in place of a module."""

    def __init__(self, size: int) -> None:
        self.params_S, self.size = torch.zeros(size), size

    def read(self) -> Tensor:
        return self.params_S.clone()

    def part(self, ranges: Ranges) -> Tensor:
        return taken(self.params_S, ranges).clone()

    def write(self, params_S: Tensor) -> None:
        self.params_S.copy_(params_S)

    def release(self) -> bool:
        return False


class Rank:
    """A rank whose every step adds a number to its parameters."""

    def __init__(self, net: Net, region: str, rank: int, share: Ranges) -> None:
        self.net, self.region, self.share = net, region, share
        self.name, self.move = rank_name(region, rank), 1.0 if region == "eu" else 3.0
        self.vector = Vector(sum(b - a for a, b in share))
        self.exchange: RankExchange | None = None
        self.awaited: set[int] = set()  # initial parameters
        self.replies: dict[int | None, Message] = {}
        self.merged = 0
        self.early: list[Message] = []  # of holders, before the welcome
        self.refused: str | None = None
        self.is_over = False

    def holder_of(self, ranges: Ranges) -> str:
        starts = holder_starts(LAYOUT, self.net.run.holders)
        return holder_name(max(i for i, start in enumerate(starts) if start <= ranges[0][0]))

    def on_message(self, peer: str, message: Message) -> list[Outbound]:
        if peer != SERVER:
            assert message.meta[ADDRESSEE] == 1
        if message.kind == "refused":
            self.refused = read_refusal({k: v for k, v in message.meta.items() if k != "attempt"})[
                1
            ].code
            return []
        if self.refused:
            return []
        if self.exchange is None and message.kind != "welcome":
            assert peer != SERVER
            self.early.append(message)
            return []
        handler: Callable[[Message], list[Outbound]] = getattr(self, f"on_{message.kind}")
        return handler(message)

    def on_welcome(self, message: Message) -> list[Outbound]:
        welcome, run = Welcome.read(message), self.net.run
        assert len(welcome.holders) == run.holders - 1
        model = JoinedModel(run.strategy, self.vector, run.bounds_in(self.share, P))
        slices = [
            SliceWire(
                index,
                ranges,
                positions(ranges, self.share),
                RegionWire(run.wire_plan(LAYOUT, ranges), self.region, size_of(ranges)),
            )
            for index, ranges in sorted(welcome.slices.items())
        ]
        self.exchange = RankExchange(run.server_plan(self.region, 1), model, slices=slices)
        if welcome.is_source:
            model.start()
            return self.states() + self.train()
        self.awaited = set(welcome.slices)
        return [each for early in self.early for each in self.on_state(early)]

    def states(self) -> list[Outbound]:
        assert self.exchange is not None
        return [
            Outbound(
                self.holder_of(each.ranges),
                Message(
                    "state",
                    {"slice": each.index, "start": 0},
                    payload_of(taken(self.vector.read(), each.places).clone()),
                    "transfer",
                ),
            )
            for each in self.exchange.slices
        ]

    def on_state(self, message: Message) -> list[Outbound]:
        assert self.exchange is not None
        (own,) = [e for e in self.exchange.slices if e.index == message.meta["slice"]]
        put(self.vector.params_S, own.places, as_tensor(memoryview(message.payload)))
        self.awaited.discard(own.index)
        if self.awaited:
            return []
        self.exchange.model.start()
        return self.train()

    def train(self) -> list[Outbound]:
        exchange = self.exchange
        assert exchange is not None
        sent = exchange.advance()
        while not sent and not exchange.is_done:
            self.vector.params_S += self.move
            sent = exchange.step(4, 0.1)
        if not sent:
            return [Outbound(SERVER, Message("finished", {}, b"", "control", CONTROL))]
        (effect,) = sent
        found = []
        for each, part in zip(exchange.slices, exchange.encoded(effect.update), strict=True):
            meta = {**update_meta(part), "rank_rows": 4, "slice": each.index}
            message = Message("update", meta, bytes(payload_bytes(part)), "update")
            found.append(Outbound(self.holder_of(each.ranges), message))
        if SERVER not in {each.peer for each in found}:
            meta = {**update_meta(effect.update), "rank_rows": 4, "slice": None}
            found.append(Outbound(SERVER, Message("update", meta, b"", "update")))
        return found

    def on_reply(self, message: Message) -> list[Outbound]:
        exchange = self.exchange
        assert exchange is not None
        index = message.meta["slice"]
        assert index not in self.replies
        self.replies[index] = message  # type: ignore[index]
        is_local = any(self.holder_of(each.ranges) == SERVER for each in exchange.slices)
        if len(self.replies) < len(exchange.slices) + (not is_local):
            return []
        marks = ("slice", ADDRESSEE)
        read = {
            i: read_reply({k: v for k, v in m.meta.items() if k not in marks}, m.payload)
            for i, m in self.replies.items()
        }
        self.replies = {}
        version = max(each.version for each in read.values())
        assert all(v >= version for v in self.net.versions()), "an answer left too early"
        self.merged = version
        exchange.on_replies([e.wire.decode(read[e.index]) for e in exchange.slices], 0.1)
        return self.train()

    def on_collect(self, _: Message) -> list[Outbound]:
        return self.states()

    def on_over(self, _: Message) -> list[Outbound]:
        self.is_over = True
        return []


def size_of(ranges: Ranges) -> int:
    return sum(b - a for a, b in ranges)


class Net:
    """A service, holders and ranks.

    A link delivers the messages of each lane in order, and a message never before an earlier one of
    a lower lane.
    """

    def __init__(self, holders: int = HOLDERS) -> None:
        strategy = {"kind": "sma", "interval": 1, "weights": "uniform"}
        self.run = terms(sorted(SHARES), STEPS, strategy=strategy, holders=holders)
        self.service = JoinService(self.run, lambda: 0.0)
        self.holders = {h: SliceHolder(self.run, h) for h in range(1, holders)}
        self.lost: set[int] = set()
        self.links: dict[Key, deque[tuple[int, Message]]] = {}  # with the time of sending
        self.sent = 0
        self.ranks = {}
        for region, shares in SHARES.items():
            for rank, share in enumerate(shares):
                each = Rank(self, region, rank, share)
                self.ranks[each.name] = each
                hello = Hello(region, rank, len(shares), 1, LAYOUT, share)
                self.send(each.name, [Outbound(SERVER, hello.message())])
        for h in self.holders:
            meta = {"host": "127.0.0.1", "port": h}
            here = Message("holder", meta, b"", "control", CONTROL)  # type: ignore[arg-type]
            self.send(holder_name(h), [Outbound(SERVER, here)])

    def versions(self) -> list[int]:
        """Commits of the service and of each holder, those included that are lost."""
        return [
            self.service.version,
            *(each.averagers.version for each in self.holders.values()),
        ]

    def send(self, source: str, found: list[Outbound]) -> None:
        for each in found:
            key = (source, each.peer, each.message.lane)
            self.sent += 1
            self.links.setdefault(key, deque()).append((self.sent, each.message))

    @property
    def ready(self) -> list[Key]:
        gone = {holder_name(h) for h in self.lost}
        found = [k for k, v in self.links.items() if v and not gone & set(k[:2])]
        first = {k: self.links[k][0][0] for k in found}

        def is_next(key: Key) -> bool:
            lower = (first.get((*key[:2], lane), first[key]) for lane in range(key[2]))
            return all(sent >= first[key] for sent in lower)

        return sorted(filter(is_next, found))

    def deliver(self, key: Key) -> None:
        source, to, _ = key
        _, message = self.links[key].popleft()
        if to == SERVER:
            self.send(to, self.service.on_message(source, message))
        elif to in self.ranks:
            self.send(to, self.ranks[to].on_message(source, message))
        else:
            holder = int(to.partition("#")[2])
            self.send(to, self.holders[holder].on_message(source, message))

    def lose(self, holder: int) -> None:
        self.lost.add(holder)
        self.send(SERVER, self.service.on_holder_lost(holder, "killed"))

    def model(self) -> Tensor:
        parts = [self.service.averagers, *(each.averagers for each in self.holders.values())]
        return torch.cat([each.model_H for each in parts])


def test_the_result_is_that_of_one_process() -> None:
    found = []
    for holders in (1, 2, HOLDERS, P):
        net = Net(holders)
        while ready := net.ready:
            net.deliver(ready[0])
        assert net.service.stage is Stage.DONE
        assert all(each.is_over for each in net.ranks.values())
        found.append(net.model())
    expected = torch.full((P,), 2.0 * STEPS)  # the mean of 1 and 3 in each step
    assert all(torch.equal(each, expected) for each in found)


@given(st.data())
def test_every_interleaving_ends_with_equal_parameters(data: st.DataObject) -> None:
    net = Net()
    while ready := net.ready:
        net.deliver(data.draw(st.sampled_from(ready)))
    assert net.service.stage is Stage.DONE
    expected = torch.full((P,), 2.0 * STEPS)
    assert torch.equal(net.model(), expected)
    for each in net.ranks.values():
        assert torch.equal(each.vector.params_S, expected[: each.vector.size])
    exchanges = [each for each in net.service.news() if each["kind"] == "exchange"]
    assert [each["bytes_received"] for each in exchanges] == [4 * P] * 2 * STEPS


@given(st.data(), st.integers(1, HOLDERS - 1), st.integers(0, 150))
def test_no_slice_commits_what_a_lost_holder_has_not_taken_in(
    data: st.DataObject, holder: int, after: int
) -> None:
    net = Net()
    while (ready := net.ready) and after:
        after -= 1
        net.deliver(data.draw(st.sampled_from(ready)))
    was_done = net.service.stage is Stage.DONE
    taken_in = min(net.versions())
    net.lose(holder)
    while ready := net.ready:
        net.deliver(data.draw(st.sampled_from(ready)))
    assert all(each.merged <= taken_in for each in net.ranks.values())
    if not was_done:
        assert net.service.failure is not None
        assert net.service.failure.code == "REGION_LOST"  # the run continues from a checkpoint
        told = {name: each.refused for name, each in net.ranks.items()}
        assert set(told.values()) == {"SERVER_LOST"}, told


def test_the_loss_of_a_holder_after_another_slice_was_acknowledged() -> None:
    net = Net()

    def deliver_but(*stopped: str) -> None:
        while ready := [k for k in net.ready if not set(stopped) & set(k[:2])]:
            net.deliver(ready[0])

    deliver_but("us#0", "us#1")  # eu's first update is staged, and us has not begun
    deliver_but(holder_name(2))  # all slices but those of holder 2 are staged and acknowledged
    assert net.versions() == [0, 0, 0]
    net.lose(2)
    deliver_but()
    assert net.versions() == [0, 0, 0]
    assert {each.merged for each in net.ranks.values()} == {0}
    assert {each.refused for each in net.ranks.values()} == {"SERVER_LOST"}


def test_a_bad_slice_ends_only_its_region() -> None:
    net = Net()
    net.ranks["us#1"].move = float("inf")
    while ready := net.ready:
        net.deliver(ready[0])
    assert net.ranks["us#0"].refused == net.ranks["us#1"].refused == "NON_FINITE"
    assert net.service.stage is Stage.DONE
    assert net.service.averagers.view.members == ("eu",)
    assert {each.averagers.view.members for each in net.holders.values()} == {("eu",)}
    assert torch.equal(net.ranks["eu#0"].vector.params_S, net.model())


def test_a_holder_that_breaks_ends_the_run() -> None:
    net = Net()
    order = Message("order", {"order": 7}, order_json(FinishOrder()), "control", CONTROL)
    net.send(SERVER, [Outbound(holder_name(1), order)])
    while ready := net.ready:
        net.deliver(ready[0])
    assert "'order' 7 after order 0" in str(net.service.failure)


def test_a_rank_reports_holders_that_it_does_not_reach() -> None:
    net = Net()
    assert net.service.unreached() == {}

    def report(rank: str, holders: list[int], causes: list[str]) -> list[Outbound]:
        meta = {"holders": holders, "causes": causes}
        return net.service.on_message(rank, Message(UNREACHED, meta, b"", "control", CONTROL))

    while net.service.stage is not Stage.TRAINING:
        net.deliver(net.ready[0])
    report("us#1", [1, 2], ["refused", ""])
    report("eu#0", [2], ["no route"])
    assert net.service.unreached() == {
        ("us#1", 1): "averager process 2 at 127.0.0.1:1 (refused)",
        ("us#1", 2): "averager process 3 at 127.0.0.1:2",
        ("eu#0", 2): "averager process 3 at 127.0.0.1:2 (no route)",
    }
    report("us#1", [1], ["refused"])
    report("eu#0", [], [])
    assert set(net.service.unreached()) == {("us#1", 1)}
    report("asia#0", [1], [""])  # takes no part
    net.send(SERVER, net.service.lose("us", "late"))
    assert net.service.unreached() == {}
    for holders, causes in (([HOLDERS], [""]), ([0], [""]), ([1], [])):
        with pytest.raises(FrameError, match="misses holders"):
            net.service._on_unreached("eu#0", {"holders": holders, "causes": causes})


def test_a_connection_is_late_after_its_time_without_a_break() -> None:
    absences = Absences(10.0)
    first, second = ("us#0", 0), ("us#0", 1)
    assert absences.late({first}, 0.0) == []
    assert absences.late({first, second}, 6.0) == []
    assert absences.late({second}, 10.0) == []  # the first one is there
    assert absences.late({first, second}, 16.5) == [second]
    assert absences.late({first, second}, 20.5) == []
    assert absences.late({first, second}, 26.9) == [first]
    assert absences.late({first, second}, 31.0) == [second]  # its time had begun again


def test_orders_and_reports_are_in_turn() -> None:
    leave, interval = LeaveOrder(region="eu", now_s=0.5), IntervalOrder(steps=3)
    for order in (FinishOrder(), WakeOrder(now_s=0.5), leave, interval):
        assert read_order(order_json(order)) == order
    with pytest.raises(FrameError, match="cannot be read"):
        read_order(b'{"kind": "nonsense"}')
    holders = Holders(2)
    assert holders.add(1, ("10.0.0.1", 7448))
    assert not holders.add(1, ("10.0.0.1", 7448))
    with pytest.raises(FrameError, match="no holder 2"):
        holders.add(2, ("10.0.0.1", 7449))
    holders.order(FinishOrder())
    with pytest.raises(FrameError, match="out of turn"):
        holders.on_executed(1, 2)


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=4), st.data())
def test_each_holder_has_one_range(shapes: list[tuple[int, int]], data: st.DataObject) -> None:
    layout = Layout.of(nn.ModuleList([nn.Linear(a, b) for a, b in shapes]))
    count = data.draw(st.integers(1, layout.size))
    starts = holder_starts(layout, count)
    assert starts[0] == 0 and len(starts) == count
    assert all(a < b for a, b in zip(starts, (*starts[1:], layout.size), strict=True))
    half = layout.size // 2
    shares = {"eu": [((0, layout.size),)], "us": [((0, half),), ((half, layout.size),)]}
    slices = slices_of(layout, shares, starts)
    stops = (*starts[1:], layout.size)
    for each in slices:
        start, stop = starts[each.holder], stops[each.holder]
        assert all(start <= a < b <= stop for a, b in each.ranges)
    assert sorted(pair for each in slices for pair in each.ranges)[0][0] == 0
    assert sum(each.size for each in slices) == layout.size
    with pytest.raises(ModelMismatchError) as caught:
        holder_starts(layout, layout.size + 1)
    assert isinstance(caught.value, GeoRayError) and "serve.holders" in str(caught.value)
