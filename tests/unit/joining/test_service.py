"""The served side, without sockets: who may join, what commits, and who is told."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from geo_ray.base.errors import AveragerFailedError, FrameError
from geo_ray.data.tasks.model_buffers import BufferEntry
from geo_ray.joining.holder import Holders
from geo_ray.joining.layout import Layout, Ranges, positions, taken
from geo_ray.joining.protocol import (
    Hello,
    Outbound,
    Welcome,
    holder_name,
    payload_of,
    rank_name,
)
from geo_ray.joining.rank import JoinedModel, RankExchange, SliceWire
from geo_ray.joining.regions import MOST_OPEN
from geo_ray.joining.save_round import SaveStage
from geo_ray.joining.service import JoinService, Stage
from geo_ray.training.messages import ReplyMessage
from geo_ray.training.payload_encoding import RegionWire
from geo_ray.training.wire_format import (
    payload_bytes,
    read_refusal,
    read_reply,
    refusal_meta,
    stats_message,
    update_meta,
)
from geo_ray.transport.wire.message import Message
from tests.support.join_support import terms

LAYOUT = Layout.of(nn.Linear(5, 2))
P = LAYOUT.size
WHOLE: Ranges = ((0, P),)
HALVES: tuple[Ranges, ...] = (((0, 6),), ((6, P),))
INTERVAL = 2


class Memory:
    """A rank's share in memory, in place of a module."""

    def __init__(self, size: int) -> None:
        self.params_S, self.size, self.reads, self.writes = torch.zeros(size), size, 0, 0

    def read(self) -> Tensor:
        self.reads += 1
        return self.params_S.clone()

    def write(self, params_S: Tensor) -> None:
        self.writes += 1
        self.params_S.copy_(params_S)

    def release(self) -> None:
        pass


class World:
    """A service, and ranks that train by adding a number to their parameters."""

    def __init__(
        self, shares: dict[str, Sequence[Ranges]], *, least: int = 1, **sections: Any
    ) -> None:
        self.now_s = 0.0
        strategy = {"kind": "sma", "interval": INTERVAL, "weights": "uniform"}
        strategy = sections.pop("strategy", strategy)
        self.run = terms(sorted(shares), 60, strategy=strategy, **sections)
        self.service = JoinService(self.run, lambda: self.now_s, least=least)
        self.shares = shares
        self.inbox: dict[str, list[Message]] = {}
        self.ranks: dict[str, RankExchange] = {}
        self.memories: dict[str, Memory] = {}

    def hello(self, region: str, rank: int, attempt: int = 1, **changes: Any) -> list[Outbound]:
        ranks = self.shares.get(region, [WHOLE])
        values = {"world_size": len(ranks), "layout": LAYOUT, "share": ranks[rank]} | changes
        hello = Hello(region, rank, attempt=attempt, **values)
        return self.deliver(rank_name(region, rank), hello.message())

    def deliver(self, peer: str, message: Message) -> list[Outbound]:
        found = self.service.on_message(peer, message)
        for each in found:
            self.inbox.setdefault(each.peer, []).append(each.message)
        return found

    def start(self) -> None:
        """Let all ranks join, and exchange the initial parameters."""
        for region, ranks in self.shares.items():
            for rank in range(len(ranks)):
                self.hello(region, rank)
        for region, ranks in self.shares.items():
            for rank, share in enumerate(ranks):
                self._start_rank(region, rank, share)
        assert self.service.stage is Stage.TRAINING

    def _start_rank(self, region: str, rank: int, share: Ranges) -> None:
        name = rank_name(region, rank)
        welcome = Welcome.read(self.inbox[name].pop(0))
        memory = self.memories[name] = Memory(sum(b - a for a, b in share))
        model = JoinedModel(self.run.strategy, memory, self.run.bounds_in(share, P))
        slices = [
            SliceWire(
                index,
                ranges,
                positions(ranges, share),
                RegionWire(
                    self.run.wire_plan(LAYOUT, ranges), region, sum(b - a for a, b in ranges)
                ),
            )
            for index, ranges in sorted(welcome.slices.items())
        ]
        if welcome.is_source:
            for each in slices:
                payload = payload_of(taken(memory.params_S, each.places).clone())
                self.deliver(
                    name, Message("state", {"slice": each.index, "start": 0}, payload, "transfer")
                )
        model.start()
        plan = self.run.server_plan(region, 1)
        self.ranks[name] = RankExchange(plan, model, slices=slices)

    def step(self, name: str, move: float, rows: int = 4) -> list[Message]:
        """Train one step; returns the messages of an update that is due."""
        rank = self.ranks[name]
        self.memories[name].params_S += move
        found = []
        for sent in rank.step(rows, 0.1):
            for each, part in zip(rank.slices, rank.encoded(sent.update), strict=True):
                meta = {**update_meta(part), "rank_rows": rows * INTERVAL, "slice": each.index}
                found.append(Message("update", meta, bytes(payload_bytes(part)), "update"))
        return found

    def merge(self, name: str, took_s: float = 0.1) -> list[ReplyMessage]:
        """Merge the answers that have arrived; none if they are incomplete."""
        rank = self.ranks[name]
        messages = [each for each in self.inbox.get(name, []) if each.kind == "reply"]
        if len(messages) < len(rank.slices):
            return []
        self.inbox[name] = [each for each in self.inbox[name] if each.kind != "reply"]
        by_slice = {
            int(str(each.meta["slice"])): read_reply(
                {k: v for k, v in each.meta.items() if k != "slice"}, each.payload
            )
            for each in messages
        }
        replies = [each.wire.decode(by_slice[each.index]) for each in rank.slices]
        rank.on_replies(replies, took_s)
        return replies

    def refusals(self, name: str) -> list[str]:
        return [
            read_refusal(each.meta)[1].code
            for each in self.inbox.get(name, [])
            if each.kind == "refused"
        ]


def test_a_round_commits_when_all_ranks_have_sent_all_slices() -> None:
    world = World({"eu": [WHOLE], "us": HALVES})
    world.start()
    assert len(world.service.averagers.slices) == 2
    updates = {}
    for name in world.ranks:
        world.step(name, 1.0 if name.startswith("eu") else 3.0)
        updates[name] = world.step(name, 0.0)
    for message in updates["eu#0"]:
        world.deliver("eu#0", message)
    world.deliver("us#0", updates["us#0"][0])
    assert world.service.version == 0
    assert not world.merge("us#0")  # its own slice is there, the other is not
    world.deliver("us#1", updates["us#1"][0])
    assert world.service.version == 1
    for name in world.ranks:
        assert world.merge(name)
        assert torch.equal(
            world.memories[name].params_S, torch.full((world.memories[name].size,), 2.0)
        )


def test_nothing_is_read_or_written_between_exchanges() -> None:
    world = World({"eu": [WHOLE], "us": [WHOLE]}, strategy={"kind": "sma", "interval": 50})
    world.start()
    memory = world.memories["eu#0"]
    before = memory.reads
    for _ in range(49):
        world.step("eu#0", 1.0)
    assert (memory.reads, memory.writes) == (before, 0)
    assert world.step("eu#0", 1.0)
    assert memory.reads == before + 1


def test_a_repeated_update_counts_once() -> None:
    world = World({"eu": [WHOLE], "us": [WHOLE]})
    world.start()
    world.step("eu#0", 1.0)
    (message,) = world.step("eu#0", 0.0)
    world.deliver("eu#0", message)
    world.deliver("eu#0", message)
    world.step("us#0", 1.0)
    (other,) = world.step("us#0", 0.0)
    world.deliver("us#0", other)
    assert world.service.version == 1
    assert world.service.averagers.averagers[0].samples == 2 * 4 * INTERVAL


@pytest.mark.parametrize(("field", "value"), [("steps", 3), ("seq", 2), ("final", True)])
def test_ranks_that_decide_differently_end_their_region(field: str, value: object) -> None:
    world = World({"eu": [WHOLE], "us": HALVES})
    world.start()
    for name in ("us#0", "us#1"):
        world.step(name, 1.0)
    (first,), (second,) = (world.step(name, 0.0) for name in ("us#0", "us#1"))
    world.deliver("us#0", first)
    changed = Message(second.kind, {**second.meta, field: value}, second.payload, second.traffic)
    world.deliver("us#1", changed)
    assert world.refusals("us#0") == world.refusals("us#1") == ["RANKS_DISAGREE"]
    assert world.refusals("eu#0") == []


def test_a_rank_that_hangs_ends_its_region_and_frees_the_others() -> None:
    world = World({"eu": [WHOLE], "us": HALVES})
    world.start()
    for name in world.ranks:
        world.step(name, 1.0)
    updates = {name: world.step(name, 0.0) for name in world.ranks}
    world.deliver("eu#0", updates["eu#0"][0])
    world.deliver("eu#0", updates["eu#0"][1])
    world.deliver("us#0", updates["us#0"][0])
    world.now_s = 29.0
    assert world.service.check_late(30.0) == []
    world.now_s = 30.0
    for each in world.service.check_late(30.0):
        world.inbox.setdefault(each.peer, []).append(each.message)
    assert world.refusals("us#0") == world.refusals("us#1") == ["RANKS_DISAGREE"]
    assert world.merge("eu#0")  # the round is closed without us
    kinds = [each["kind"] for each in world.service.news()]
    assert "region_lost" in kinds


def test_the_last_region_ends_the_run() -> None:
    world = World({"eu": [WHOLE]})
    world.start()
    world.deliver(
        "eu#0", Message("failed", {"cause": "out of memory", "attempt": 1}, b"", "control")
    )
    assert "out of memory" in str(world.service.failure)


OTHER_DTYPE = Layout(tuple(replace(each, dtype="bfloat16") for each in LAYOUT.parameters))


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"region": "mars"}, "JOIN_REFUSED"),
        ({"layout": Layout.of(nn.Linear(4, 2))}, "MODEL_MISMATCH"),
        ({"layout": OTHER_DTYPE}, "MODEL_MISMATCH"),
        ({"same": {"vocabulary": "other"}}, "MODEL_MISMATCH"),
        ({"world_size": 3}, "RANKS_DISAGREE"),
        ({"attempt": 0}, "JOIN_REFUSED"),
    ],
)
def test_who_may_not_join(changes: dict[str, Any], code: str) -> None:
    world = World({"eu": [WHOLE], "us": HALVES})
    world.hello("us", 0)
    region = changes.pop("region", "us")
    rank = 1 if region == "us" else 0
    world.hello(region, rank, **({"attempt": 1} | changes))
    assert world.refusals(rank_name(region, rank)) == [code]
    assert world.service.stage is Stage.GATHERING


def test_a_restarted_process_group_replaces_the_one_before_the_start() -> None:
    world = World({"eu": [WHOLE], "us": HALVES})
    world.hello("us", 0, attempt=1)
    world.hello("us", 0, attempt=2)
    assert world.service.missing() == {"eu": "not there", "us": "1 of 2 ranks"}
    world.hello("us", 1, attempt=1)  # left over from the first
    assert world.refusals("us#1") == ["JOIN_REFUSED"]


def test_averager_processes_that_are_missing_are_named_in_words() -> None:
    holders = Holders(3)
    assert holders.missing() == {
        "averager process 2": "not there",
        "averager process 3": "not there",
    }
    holders.add(1, ("10.0.0.1", 7448))
    assert holders.missing() == {"averager process 3": "not there"}


def test_a_holder_of_an_earlier_start_of_the_run_is_ignored() -> None:
    """It has survived; this start waits for its own holder."""
    world = World({"eu": [WHOLE]}, holders=2)
    world.hello("eu", 0)
    refused = Message("refused", {"peer": "eu#0", "attempt": 1}, b"", "control")
    for kind in ("broken", "executed", "arrived", "copied", "staged", "unknown"):
        about = Message(kind, refusal_meta(0, FrameError("an order is missing")), b"", "control")
        assert world.deliver(holder_name(1), about) == []
    assert world.deliver(holder_name(1), refused) == []
    assert world.service.failure is None and world.inbox == {}
    own = Message("holder", {"host": "10.0.0.1", "port": 7448}, b"", "control")
    world.deliver(holder_name(1), own)
    assert world.service.stage is Stage.STARTING and world.service.failure is None


@pytest.mark.parametrize("trains", [False, True])
def test_a_region_that_comes_after_the_end_is_refused(trains: bool) -> None:
    world = World({"eu": [WHOLE], "us": [WHOLE]})
    if trains:
        world.start()
        world.service.on_lost("us", "killed")
        world.inbox.clear()
    else:
        world.hello("eu", 0)
    assert [each.peer for each in world.service.on_end("it was stopped")] == ["eu#0"]
    world.hello("us", 0, attempt=2)
    assert [each.kind for each in world.inbox["us#0"]] == ["refused"]
    assert world.refusals("us#0") == ["JOIN_REFUSED"]


@pytest.mark.parametrize("strategy", ["sma", "asgd_ga"])
def test_after_the_refusal_nothing_is_answered(strategy: str) -> None:
    """Updates, lost regions and requests that come after the end of a run."""
    world = World({"eu": [WHOLE], "us": [WHOLE]}, strategy={"kind": strategy, "interval": INTERVAL})
    world.start()
    sent = _updates(world)
    world.inbox.clear()
    version, executed = world.service.version, world.service.averagers.version
    assert {each.peer for each in world.service.on_end("it was stopped")} == {"eu#0", "us#0"}
    for name, messages in sent.items():
        for each in messages:
            assert world.deliver(name, each) == []
    _end(world, "eu#0", "us#0")
    assert world.inbox == {}
    assert world.service.request_stop() == world.service.on_wake() == []
    world.now_s = 1e6
    assert world.service.check_late(1.0) == []
    assert world.service.on_lost("us", "it has left") == []
    assert not world.service.is_awaited("us#0") and world.service.is_awaited("eu#0")
    assert (world.service.version, world.service.averagers.version) == (version, executed)
    assert world.service.stage is Stage.TRAINING


def test_a_holder_that_comes_after_the_end_of_a_run_does_not_start_it() -> None:
    world = World({"eu": [WHOLE]}, holders=2)
    world.hello("eu", 0)
    assert {each.peer for each in world.service.on_end("it was stopped")} == {"eu#0"}
    world.inbox.clear()
    own = Message("holder", {"host": "10.0.0.1", "port": 7448}, b"", "control")
    assert world.deliver(holder_name(1), own) == []
    assert world.service.stage is Stage.GATHERING and world.inbox == {}


def test_ranks_that_were_told_to_leave_get_nothing_else() -> None:
    world = World({"eu": [WHOLE], "us": [WHOLE]})
    world.start()
    (first, *_) = _updates(world)["eu#0"]
    _end(world, "eu#0", "us#0")
    _state(world, "eu#0", 1.0)
    assert world.service.stage is Stage.DONE
    assert world.deliver("eu#0", first) == []
    assert world.service.lose("eu", "it has left") == []
    assert world.refusals("eu#0") == []


def test_a_gap_between_shares_is_refused() -> None:
    world = World({"eu": [WHOLE], "us": (((0, 6),), ((7, P),))})
    world.hello("eu", 0)
    world.hello("us", 0)
    world.hello("us", 1)
    assert world.refusals("us#1") == ["MODEL_MISMATCH"]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_slice_that_is_not_finite_commits_nowhere(bad: float) -> None:
    world = World({"eu": [WHOLE], "us": HALVES})
    world.start()
    for name in world.ranks:
        world.step(name, 1.0)
    world.memories["us#1"].params_S[0] = bad
    updates = {name: world.step(name, 0.0) for name in world.ranks}
    for message in updates["us#0"] + updates["us#1"]:
        world.deliver(rank_name("us", int(str(message.meta["slice"]))), message)
    assert world.service.version == 0
    assert world.refusals("us#0") == world.refusals("us#1") == ["NON_FINITE"]
    for message in updates["eu#0"]:  # us is lost, whether it ends or not
        world.deliver("eu#0", message)
    assert world.merge("eu#0")
    assert torch.equal(world.memories["eu#0"].params_S, torch.ones(P))
    assert world.service.averagers.view.members == ("eu",)


def test_messages_that_are_not_for_the_sender() -> None:
    world = World({"eu": [WHOLE], "us": HALVES})
    world.start()
    for name in ("us#0", "us#1"):
        world.step(name, 1.0)
    (message,) = world.step("us#0", 0.0)
    world.deliver("us#1", message)  # the slice of another rank
    assert world.refusals("us#1") == ["FRAME_INVALID"]
    world.deliver("eu#0", message)  # an update of another region
    assert world.refusals("eu#0") == ["FRAME_INVALID"]
    world.deliver("eu#0", Message("nonsense", {}, b"", "control"))
    assert world.refusals("eu#0")[-1] == "FRAME_INVALID"


def _change(message: Message, **meta: Any) -> Message:
    payload = meta.pop("payload", message.payload)
    return Message(message.kind, {**message.meta, **meta}, payload, message.traffic)


def _updates(world: World, move: float = 1.0) -> dict[str, list[Message]]:
    for name in world.ranks:
        world.step(name, move)
    return {name: world.step(name, 0.0) for name in world.ranks}


@pytest.mark.parametrize(
    ("codec", "changes", "code"),
    [
        ({}, {"payload": bytes(4)}, "INVARIANT"),
        ({}, {"payload": b""}, "INVARIANT"),
        ({"up": {"kind": "fp16"}}, {"payload": b"\xff" * 20}, "NON_FINITE"),
        ({"up": {"kind": "fp16"}}, {"payload": bytes(10)}, "FRAME_INVALID"),
        ({"up": {"kind": "fp16"}}, {"payload": bytes(10), "data_bytes": 10}, "FRAME_INVALID"),
        ({"up": {"kind": "fp16"}}, {"coded": "int8"}, "FRAME_INVALID"),
    ],
)
def test_an_update_with_a_damaged_slice_commits_in_no_slice(
    codec: dict[str, Any], changes: dict[str, Any], code: str
) -> None:
    world = World({"eu": [WHOLE], "us": HALVES}, codec=codec)
    world.start()
    _round(world)  # the next updates are differences
    updates = _updates(world)
    world.deliver("us#0", updates["us#0"][0])
    world.deliver("us#1", _change(updates["us#1"][0], **changes))
    assert world.refusals("us#1") == [code]
    assert all(
        averager.last("us")[1] == 1 for averager in world.service.averagers.averagers.values()
    )
    assert world.service.version == 1


def _end(world: World, *names: str) -> None:
    for name in names:
        world.deliver(name, Message("finished", {}, b"", "control"))


def _state(world: World, name: str, value: float) -> None:
    for each in world.ranks[name].slices:
        size = sum(b - a for a, b in each.places)
        payload = payload_of(torch.full((size,), value))
        world.deliver(
            name, Message("state", {"slice": each.index, "start": 0}, payload, "transfer")
        )


def test_only_the_rank_that_was_asked_gives_the_final_parameters() -> None:
    world = World({"eu": HALVES, "us": [WHOLE]})
    world.start()
    _end(world, "eu#0", "eu#1", "us#0")
    _state(world, "us#0", 5.0)
    assert world.refusals("us#0")[0] == "FRAME_INVALID"
    assert world.service.stage is Stage.ENDING
    _state(world, "eu#0", 1.0)
    _state(world, "eu#1", 1.0)
    assert world.service.stage is Stage.DONE
    assert torch.equal(world.service.model_P, torch.ones(P))


def test_ranks_leave_after_the_last_checkpoint_and_not_after_an_earlier_one() -> None:
    """An earlier checkpoint may still be written when the run ends."""
    world = World({"eu": [WHOLE], "us": [WHOLE]}, saves_at_end=True)
    for region in world.shares:
        world.hello(region, 0, saved=())
    for region in world.shares:
        world._start_rank(region, 0, WHOLE)
    world.service.begin_save(3, [], 60.0)
    for _ in range(INTERVAL):
        updates = {name: world.step(name, 1.0) for name in ("eu#0", "us#0")}
    for name, messages in updates.items():
        for each in messages:
            world.deliver(name, each)
    _end(world, "eu#0", "us#0")
    _state(world, "eu#0", 1.0)
    earlier = world.service.save
    assert world.service.stage is Stage.DONE and earlier is not None and earlier.id == 3
    assert world.service.end_save(3) == []
    (first, second) = world.service.begin_save(3, [3], 60.0)
    assert (first.message.kind, second.message.kind) == ("save", "save")
    assert world.service.end_save(4) == []
    assert {(each.peer, each.message.kind) for each in world.service.end_save(None)} == {
        ("eu#0", "over"),
        ("us#0", "over"),
    }


def test_a_checkpoint_for_which_no_round_is_left_does_not_delay_the_last_one() -> None:
    """Regions that have finished exchange no more, so they cannot meet for it."""
    world = World({"eu": [WHOLE], "us": [WHOLE]}, saves_at_end=True)
    for region in world.shares:
        world.hello(region, 0, saved=())
    for region in world.shares:
        world._start_rank(region, 0, WHOLE)
    for _ in range(INTERVAL):
        updates = {name: world.step(name, 1.0) for name in ("eu#0", "us#0")}
    for name, messages in updates.items():
        for each in messages:
            world.deliver(name, each)
    world.service.begin_save(3, [], 60.0)
    earlier = world.service.save
    assert earlier is not None and earlier.stage is SaveStage.MEETING
    _end(world, "eu#0", "us#0")
    _state(world, "eu#0", 1.0)
    world.service.check_save()
    assert world.service.stage is Stage.DONE and world.service.save is None
    (first, second) = world.service.begin_save(3, [], 60.0)
    assert (first.message.kind, second.message.kind) == ("save", "save")


@pytest.mark.parametrize("saves_at_end", [False, True])
def test_ranks_that_write_no_checkpoints_are_told_once_that_they_may_leave(
    saves_at_end: bool,
) -> None:
    """A rank leaves when it is told: it would never confirm a second message."""
    world = World({"eu": [WHOLE], "us": [WHOLE]}, saves_at_end=saves_at_end)
    world.start()
    _end(world, "eu#0", "us#0")
    _state(world, "eu#0", 1.0)
    assert world.service.stage is Stage.DONE
    found = [each for each in world.service.end_save(None) if each.message.kind == "over"]
    told = [[each.kind for each in world.inbox[name]].count("over") for name in ("eu#0", "us#0")]
    assert (found, told) == ([], [1, 1])


def test_all_are_told_that_the_region_with_the_initial_parameters_is_lost() -> None:
    world = World({"eu": [WHOLE], "us": HALVES})
    for region, ranks in world.shares.items():
        for rank in range(len(ranks)):
            world.hello(region, rank)
    assert world.service.stage is Stage.STARTING
    for each in world.service.on_lost("eu", "power cut"):
        world.inbox.setdefault(each.peer, []).append(each.message)
    assert "power cut" in str(world.service.failure)
    assert world.refusals("us#0") == world.refusals("us#1") == ["REGION_LOST"]


def test_another_region_gives_the_final_parameters_if_the_first_is_lost() -> None:
    world = World({"eu": HALVES, "us": [WHOLE]})
    world.start()
    _end(world, "eu#0", "eu#1", "us#0")
    _state(world, "eu#0", 1.0)
    assert all(each.kind != "over" for each in world.inbox["us#0"])
    (asked,) = world.service.on_lost("eu", "power cut")
    assert (asked.peer, asked.message.kind) == ("us#0", "collect")
    _state(world, "us#0", 2.0)
    assert world.service.stage is Stage.DONE
    assert torch.equal(world.service.model_P, torch.full((P,), 2.0))


def test_a_rank_that_does_not_exist() -> None:
    world = World({"eu": HALVES, "us": [WHOLE]})
    world.start()
    _end(world, "eu#0", "eu#2", "us#0")
    assert world.refusals("eu#2") == ["FRAME_INVALID"]
    assert world.service.stage is Stage.TRAINING


def test_a_region_lost_during_the_start() -> None:
    world = World({"eu": [WHOLE], "us": [WHOLE]})
    world.hello("eu", 0)
    world.hello("us", 0)
    assert world.service.stage is Stage.STARTING
    world.service.on_lost("us", "power cut")
    assert world.service.averagers.view.members == ("eu",)
    world.service.on_lost("eu", "power cut")
    assert "power cut" in str(world.service.failure)


def test_the_source_lost_during_the_start_ends_the_run() -> None:
    world = World({"eu": [WHOLE], "us": [WHOLE]})
    world.hello("eu", 0)
    world.hello("us", 0)
    world.service.on_lost("eu", "power cut")
    assert "initial parameters" in str(world.service.failure)


def _rejoin(world: World, attempt: int = 2) -> None:
    world.service.on_lost("us", "power cut")
    for rank in range(len(world.shares["us"])):
        world.hello("us", rank, attempt)
        world.ranks.pop(rank_name("us", rank), None)


def _round(world: World) -> None:
    for name, messages in _updates(world).items():
        for message in messages:
            world.deliver(name, message)
    for name in world.ranks:
        world.merge(name)


SHARES: dict[str, Sequence[Ranges]] = {"eu": [WHOLE], "in": [WHOLE], "us": HALVES}


def test_a_region_lost_while_it_waits_to_join_does_not_join() -> None:
    world = World(SHARES)
    world.start()
    _rejoin(world)
    assert world.service.waiting == ("us",)
    failed = Message("failed", {"cause": "power cut", "attempt": 1}, b"", "control")
    world.deliver("us#1", failed)  # late, of the process group before
    assert world.service.waiting == ("us",)
    world.deliver("us#1", _change(failed, attempt=2))
    assert world.service.waiting == ()
    _round(world)
    assert world.service.averagers.view.members == ("eu", "in")
    _round(world)
    assert world.service.version == 2


def test_a_region_that_starts_again_while_it_waits_joins_when_it_is_complete() -> None:
    world = World(SHARES)
    world.start()
    _rejoin(world)
    world.hello("us", 0, attempt=3)
    _round(world)
    assert world.service.averagers.view.members == ("eu", "in")
    world.hello("us", 1, attempt=3)
    _round(world)
    assert world.service.averagers.view.joining == ("us",)


def test_a_region_whose_donor_is_lost_is_refused_and_the_others_continue() -> None:
    world = World(SHARES)
    world.start()
    _rejoin(world)
    _round(world)
    (donor,) = (name for name, rank in world.ranks.items() if rank.is_donor)
    for each in world.service.on_lost(donor.partition("#")[0], "power cut"):
        world.inbox.setdefault(each.peer, []).append(each.message)
    assert world.refusals("us#0") == world.refusals("us#1") == ["REGION_LOST"]
    del world.ranks[donor]
    assert world.service.averagers.view.members == tuple(n[:2] for n in world.ranks)
    _round(world)
    assert world.service.version == 2


@pytest.mark.parametrize("rank", [1, 5])
def test_a_rank_that_cannot_be_while_its_region_joins(rank: int) -> None:
    world = World({"eu": [WHOLE], "us": [WHOLE]})
    world.start()
    world.service.on_lost("us", "power cut")
    peer = rank_name("us", rank)
    hello = Hello("us", rank, 1, 2, LAYOUT, WHOLE)
    world.deliver(peer, hello.message())
    assert world.refusals(peer) == ["RANKS_DISAGREE"]


def test_evaluations_that_will_not_be_complete_are_forgotten() -> None:
    world = World({"eu": [WHOLE], "us": [WHOLE]})
    world.start()
    for step in range(1, 9):
        for name in ("eu#0", "us#0") if step == 8 else ("eu#0",):
            meta, payload = stats_message(step, {"loss": np.ones(1)}, 4, final=False)
            world.deliver(name, Message("evaluation", meta, bytes(payload), "control"))
    assert not world.service._evaluations.num_open


def _evaluate(world: World, peer: str, loss: float, step: int = 2) -> None:
    meta, payload = stats_message(step, {"loss": np.array([loss])}, 4, final=False)
    world.deliver(peer, Message("evaluation", meta, bytes(payload), "control"))


def test_evaluations_of_a_region_that_is_alone_with_them_do_not_accumulate() -> None:
    world = World({"eu": [WHOLE], "us": [WHOLE]})
    world.start()
    last = MOST_OPEN + 50
    for step in range(1, last + 1):
        _evaluate(world, "eu#0", float(step), step)
    assert world.service._evaluations.num_open == MOST_OPEN
    world.service.news()
    for step in (1, last):  # the first one was dropped, and is the newest again
        _evaluate(world, "us#0", 1.0, step)
    assert world.service._evaluations.num_open <= MOST_OPEN
    events = [each for each in world.service.news() if each["kind"] == "eval"]
    totals = {each["step"]: each["metrics"] for each in events if each["region"] is None}
    assert totals == {last: {"loss": (last + 1.0) / 8}}
    assert [each["step"] for each in events if each["region"] == "us"] == [1, last]


@pytest.mark.parametrize("has_reported", [True, False])
def test_the_total_of_an_evaluation_does_not_wait_for_lost_regions(has_reported: bool) -> None:
    world = World(SHARES)
    world.start()
    _evaluate(world, "eu#0", 8.0)
    _evaluate(world, "in#0", 4.0)
    _evaluate(world, "us#0", 100.0)
    if has_reported:
        _evaluate(world, "in#0", 4.0, step=4)
    world.service.on_lost("us", "power cut")
    if has_reported:
        _evaluate(world, "eu#0", 4.0, step=4)
    events = [each for each in world.service.news() if each["kind"] == "eval"]
    totals = [(each["step"], each["metrics"]) for each in events if each["region"] is None]
    expected = [(2, {"loss": 12.0 / 8}), (4, {"loss": 1.0})]
    assert totals == expected[: 1 + has_reported]


def test_a_region_that_cannot_return_frees_the_others_and_all_its_ranks_are_told() -> None:
    """Its ranks lack a part of the model: the others continue without it."""
    world = World({"eu": [WHOLE], "us": HALVES})
    world.start()
    for name in world.ranks:
        world.step(name, 1.0)
    for message in world.step("eu#0", 0.0):
        world.deliver("eu#0", message)
    other: tuple[Ranges, ...] = (((0, 5),), ((6, P),))
    for rank, share in enumerate(other):
        world.hello("us", rank, 2, share=share)
    assert world.refusals("us#0") == world.refusals("us#1") == ["MODEL_MISMATCH"]
    assert world.merge("eu#0")
    assert world.service.waiting == ()


def test_a_rank_left_over_from_an_earlier_process_group_ends_nothing() -> None:
    world = World({"eu": [WHOLE], "us": HALVES})
    world.start()
    world.service.on_lost("us", "power cut")
    world.hello("us", 0, 3)
    world.hello("us", 1, 2)
    assert world.refusals("us#1") == ["JOIN_REFUSED"]
    assert world.refusals("us#0") == []
    world.hello("us", 1, 3)
    assert world.service.waiting == ("us",)


def test_a_region_that_waits_to_join_is_refused_at_the_end() -> None:
    world = World({"eu": [WHOLE], "us": [WHOLE]})
    world.start()
    _rejoin(world)
    _end(world, "eu#0")
    assert world.service.stage is Stage.ENDING
    assert world.refusals("us#0") == ["JOIN_REFUSED"]
    assert world.service.waiting == ()


@pytest.mark.parametrize("strategy", ["sma", "one_step_delay"])
def test_too_few_regions_wait_for_a_lost_one(strategy: str) -> None:
    world = World(SHARES, least=3, strategy={"kind": strategy, "interval": INTERVAL})
    world.start()
    _round(world)
    world.service.on_lost("us", "power cut")
    for name in ("us#0", "us#1"):
        del world.ranks[name]
    for name, messages in _updates(world).items():
        for message in messages:
            world.deliver(name, message)
    assert not world.merge("eu#0")
    assert not world.merge("in#0")
    world.now_s = 99.0
    assert world.service.check_held(100.0) == []
    world.hello("us", 0, 2)
    assert not world.merge("eu#0")
    world.hello("us", 1, 2)
    assert world.merge("eu#0")
    assert world.merge("in#0")
    assert world.service.check_held(0.0) == []
    for _ in range(2):  # with a delay, the barrier needs another round
        if not world.service.averagers.view.joining:
            _round(world)
    assert world.service.averagers.view.joining == ("us",)


@pytest.mark.parametrize("at_wake", [False, True])
def test_a_strategy_that_fails_ends_the_run_in_all_regions(
    at_wake: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No region waits for an answer that cannot come."""
    world = World(SHARES)
    world.start()

    def fails(*_: Any) -> Any:
        raise ZeroDivisionError("in the strategy")

    kind = type(world.run.strategy)
    monkeypatch.setattr(kind, "on_wake" if at_wake else "on_round", fails)
    if at_wake:
        for averager in world.service.averagers.averagers.values():
            averager.state.wake_s = 5.0
        world.now_s = 6.0
        for each in world.service.on_wake():
            world.inbox.setdefault(each.peer, []).append(each.message)
    else:
        for name, messages in _updates(world).items():
            for message in messages:
                world.deliver(name, message)
    assert isinstance(world.service.failure, AveragerFailedError)
    assert "ZeroDivisionError: in the strategy" in world.service.failure.message
    for name in world.ranks:
        assert world.refusals(name) == ["AVERAGER_FAILED"]
    assert world.service.on_lost("us", "its loop has ended") == []
    assert world.service.on_wake() == []


def test_regions_that_others_wait_for_are_known() -> None:
    world = World(SHARES, least=3)
    world.start()
    assert world.service.awaited() == {}
    sent = _updates(world)
    world.now_s = 7.0
    for message in sent["eu#0"]:
        world.deliver("eu#0", message)
    world.now_s = 9.0
    assert world.service.awaited() == {"us": (7.0, None), "in": (7.0, None)}
    for message in sent["in#0"]:
        world.deliver("in#0", message)
    assert world.service.awaited() == {"us": (7.0, None)}
    world.service.on_lost("us", "power cut")
    assert world.service.awaited() == {"us": (9.0, "power cut")}
    paused = [each for each in world.service.news() if each["kind"] == "run_paused"]
    assert [each["cause"] for each in paused] == ["2 regions take part, members.min is 3; lost: us"]
    for rank in (0, 1):
        world.hello("us", rank, 2)
    assert world.service.awaited() == {}
    assert [e["kind"] for e in world.service.news()].count("run_resumed") == 1


def test_a_run_with_too_few_regions_ends() -> None:
    world = World({"eu": [WHOLE], "us": [WHOLE]}, least=2)
    world.start()
    world.service.on_lost("us", "power cut")
    world.now_s = 100.0
    for each in world.service.check_held(100.0):
        world.inbox.setdefault(each.peer, []).append(each.message)
    assert "fewer than members.min = 2 regions" in str(world.service.failure)
    assert "power cut" in str(world.service.failure)
    assert world.refusals("eu#0") == ["REGION_LOST"]


def test_a_run_with_too_few_regions_can_be_stopped() -> None:
    world = World({"eu": [WHOLE], "us": [WHOLE]}, least=2)
    world.start()
    world.service.on_lost("us", "power cut")
    world.step("eu#0", 1.0)
    for message in world.step("eu#0", 0.0):
        world.deliver("eu#0", message)
    found = world.service.request_stop()
    assert [(each.peer, each.message.kind) for each in found] == [("eu#0", "reply")]
    assert found[0].message.meta["stop"]


def test_an_adaptive_interval_is_the_same_in_all_slices() -> None:
    """Times are those of the slowest rank of a region, so that all averagers decide alike."""
    strategy = {"kind": "diloco", "interval": INTERVAL, "compute_fraction": 0.5}
    world = World({"eu": [WHOLE], "us": HALVES}, strategy=strategy)
    world.start()
    for _ in range(5):
        for name, messages in _updates(world).items():
            rank = int(name.partition("#")[2])
            for message in messages:
                times = {"step_s": 0.1 * (1 + rank), "exchange_s": 2.0 * (1 + rank)}
                world.deliver(name, _change(message, **times))
        steps = {reply.steps for name in world.ranks for reply in world.merge(name)}
        assert len(steps) == 1
        if steps == {32}:
            break
    # 4 s of an exchange and 0.1 to 0.2 s of a step: 20 steps take as long, the next power is 32
    assert steps == {32}


def test_time_for_which_others_are_awaited_is_not_that_of_an_exchange() -> None:
    """Otherwise an adaptive interval would grow without end where a region is slower."""
    strategy = {"kind": "diloco", "interval": INTERVAL, "compute_fraction": 0.5}
    world = World({"eu": [WHOLE], "us": HALVES}, strategy=strategy)
    world.start()
    for _ in range(8):
        updates = _updates(world)
        for name, waits_s in (("eu#0", 0.0), ("us#0", 100.0), ("us#1", 7.0)):
            world.now_s += waits_s
            for message in updates[name]:
                world.deliver(name, _change(message, step_s=0.1))
        for name, held_s in (("eu#0", 107.0), ("us#0", 0.0), ("us#1", 0.0)):
            replies = world.merge(name, took_s=held_s + 0.15)
            assert {(reply.held_s, reply.steps) for reply in replies} == {(held_s, INTERVAL)}


def test_time_without_a_lost_region_is_not_that_of_an_exchange() -> None:
    world = World({"eu": [WHOLE], "us": [WHOLE]})
    world.start()
    for message in _updates(world)["eu#0"]:
        world.deliver("eu#0", message)
    world.now_s = 20.0
    for each in world.service.lose("us", "it is gone"):
        world.inbox.setdefault(each.peer, []).append(each.message)
    assert [reply.held_s for reply in world.merge("eu#0")] == [20.0]


@pytest.mark.parametrize("is_lost", [False, True])
def test_an_interval_changes_in_all_regions_and_slices_with_the_same_round(is_lost: bool) -> None:
    """It changes while one region waits for the other, which may then be lost."""
    world = World({"eu": [WHOLE], "us": HALVES})
    world.start()
    assert world.service.averagers.interval is None
    updates, names = _updates(world), list(world.ranks)
    for message in updates["eu#0"]:
        world.deliver("eu#0", message)
    assert world.service.set_interval(3) == []
    assert world.service.averagers.interval == 3
    if is_lost:
        names = ["eu#0"]
        for each in world.service.lose("us", "it is gone"):
            world.inbox.setdefault(each.peer, []).append(each.message)
    for name in names[1:]:
        for message in updates[name]:
            world.deliver(name, message)
    assert {reply.steps for name in names for reply in world.merge(name)} == {3}
    for name in names:
        assert [bool(world.step(name, 1.0)) for _ in range(3)] == [False, False, True]


@pytest.mark.parametrize("kind", ["ama", "asgd_ga", "async_local_sgd", "halos"])
def test_without_rounds_an_interval_changes_with_the_next_answer_to_a_region(kind: str) -> None:
    own = {"by_speed": False} if kind == "async_local_sgd" else {}
    strategy = {"kind": kind, "interval": INTERVAL, **own}
    world = World({"eu": [WHOLE], "us": HALVES}, strategy=strategy)
    world.start()
    updates = _updates(world)
    steps = []
    for names in (("eu#0",), ("us#0", "us#1")):
        for name in names:
            for message in updates[name]:
                world.deliver(name, message)
        steps.append({reply.steps for name in names for reply in world.merge(name)})
        world.service.set_interval(3)
    assert steps == [{None}, {3}]


def test_an_interval_does_not_change_before_the_run_trains() -> None:
    world = World({"eu": [WHOLE], "us": HALVES})
    assert world.service.set_interval(3) == []
    world.start()
    assert world.service.averagers.interval is None


def test_the_first_region_may_correct_its_model() -> None:
    world = World({"eu": [WHOLE], "us": [WHOLE]})
    world.hello("eu", 0, 1, layout=Layout.of(nn.Linear(4, 2)))
    world.hello("us", 0)
    assert world.refusals("us#0") == ["MODEL_MISMATCH"]
    world.hello("eu", 0, 2)
    world.hello("us", 0)
    assert world.service.stage is Stage.STARTING


def test_a_strategy_is_woken_at_its_time() -> None:
    strategy = {"kind": "decoupled", "interval": 4, "fragments": 2, "quorum": 1, "grace_s": 5.0}
    world = World({"eu": [WHOLE], "us": HALVES}, strategy=strategy)
    world.start()
    messages: list[Message] = []
    while not messages:
        messages = world.step("eu#0", 1.0)
    for message in messages:
        world.deliver("eu#0", message)
    world.inbox["eu#0"].clear()
    world.now_s = 4.9
    assert world.service.on_wake() == []
    assert world.service.version == 0
    world.now_s = 5.0
    world.service.on_wake()
    assert world.service.version == 1
    assert {averager.state.version for averager in world.service.averagers.averagers.values()} == {
        1
    }


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[" * 100_000,
        b'{"layout": "[]", "share": [[1e400, 1]]}',
        *(
            json.dumps({"layout": LAYOUT.to_json(), "share": WHOLE, "buffers": [each]}).encode()
            for each in (
                [],
                ["a", [2], "load", "region", None],
                ["a", [2], "complex64", "mean", None],
                ["a", [-2], "float32", "mean", None],
                ["a", [2], "float32", "mean", "b"],
            )
        ),
    ],
)
def test_a_description_that_cannot_be_read_is_refused(body: bytes) -> None:
    world = World({"eu": [WHOLE], "us": [WHOLE]})
    hello = Hello("eu", 0, 1, 1, LAYOUT, WHOLE).message()
    world.deliver("eu#0", _change(hello, payload=body))
    assert world.refusals("eu#0") == ["FRAME_INVALID"]


def test_an_update_without_its_model_buffers_is_refused() -> None:
    world = _with_buffers(bytes(64))
    assert world.service.stage is Stage.TRAINING
    world.step("eu#0", 1.0)
    (message,) = world.step("eu#0", 0.0)
    world.deliver("eu#0", message)
    assert world.refusals("eu#0") == ["FRAME_INVALID"]
    assert world.service.averagers.view.members == ("us",)


@pytest.mark.parametrize(
    ("payload", "code"),
    [(b"", "FRAME_INVALID"), (bytes(12), "FRAME_INVALID"), (b"\xff" * 64, "NON_FINITE")],
)
def test_initial_model_buffers_that_are_wrong_are_refused(payload: bytes, code: str) -> None:
    world = _with_buffers(payload)
    assert world.refusals("eu#0") == [code]
    assert "initial parameters" in str(world.service.failure)


def _with_buffers(payload: bytes) -> World:
    """A world with model buffers, whose first region has sent their initial values."""
    entries = (BufferEntry("norm.running_mean", (3,), "float32", "mean"),)
    world = World({"eu": [WHOLE], "us": [WHOLE]})
    for name in world.shares:
        world.hello(name, 0, buffers=entries)
    for name in world.shares:
        world._start_rank(name, 0, WHOLE)
    assert world.service.stage is Stage.STARTING
    world.deliver("eu#0", Message("buffers", {}, payload, "transfer"))
    return world


@pytest.mark.parametrize("peer", ["eu", "eu#", "eu#x", "eu#" + "9" * 5000])
def test_an_endpoint_that_is_no_rank_is_refused(peer: str) -> None:
    world = World({"eu": [WHOLE], "us": [WHOLE]})
    world.start()
    world.deliver(peer, Message("finished", {}, b"", "control"))
    assert world.refusals(peer) == ["FRAME_INVALID"]
