"""Both ends of a coded exchange: references, final updates, refusals, drops, repetitions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from geo_ray.base.errors import (
    ConfigChangedError,
    FrameError,
    InvariantError,
    NonFiniteError,
    ReferenceLostError,
)
from geo_ray.codecs.base import CodecTraits, Coded
from geo_ray.codecs.dgt import Dgt
from geo_ray.strategies.ama import Ama
from geo_ray.strategies.asgd_ga import AsgdGa
from geo_ray.strategies.bsp import Bsp
from geo_ray.strategies.sma import Sma
from geo_ray.strategies.state import AveragerState, Reply, Update
from geo_ray.training.averager import Averager
from geo_ray.training.messages import ReplyMessage, UpdateMessage
from geo_ray.training.payload_encoding import AveragerWire, RegionWire, WirePlan
from tests.support.codec_toys import Dice, Exact, Habit, TopOne

NUM = 3


class Pair:
    """An averager over two regions, and the regions' ends."""

    def __init__(self, strategy, up=None, down=None, num=NUM) -> None:
        self.plan = WirePlan(up, down, strategy.traits.sends, strategy.traits.in_rounds)
        self.state = Averager(
            strategy, num, AveragerState(("a", "b")), wire=AveragerWire(self.plan)
        )
        self.ends = {name: RegionWire(self.plan, name, num) for name in ("a", "b")}
        self.versions = {"a": 0, "b": 0}
        self.seqs = {"a": 0, "b": 0}
        self.merged: dict[str, list[Tensor]] = {"a": [], "b": []}

    def say(
        self, name: str, *values: float, samples: int = 8, final: bool = False
    ) -> UpdateMessage:
        self.seqs[name] += 1
        payload_P = torch.tensor(values)
        return self.ends[name].encode(
            UpdateMessage(name, 1, self.seqs[name], self.versions[name], samples, payload_P, final)
        )

    def send(self, update: UpdateMessage) -> list[ReplyMessage]:
        replies = self.state.on_update(update)
        for reply in replies:
            self.versions[reply.to] = reply.version
            self.merged[reply.to].append(self.ends[reply.to].decode(reply).payload_P)
        return replies

    def round(self, a: tuple[float, ...], b: tuple[float, ...], **options) -> list[ReplyMessage]:
        assert self.send(self.say("a", *a, **options)) == []
        return self.send(self.say("b", *b, **options))


def owed(end: RegionWire) -> Tensor:
    debt_P = end._encoder.residual_P
    return torch.zeros(end.num_params) if debt_P is None else debt_P


# ------------------------------------------------------------------ what goes on its way


def test_changes_go_coded_from_the_first_on() -> None:
    pair = Pair(Bsp(), TopOne(), TopOne())
    update = pair.say("a", 1.0, 5.0, 2.0)
    assert update.coded is not None and update.payload_P.numel() == 0 and update.size_bytes == 8
    pair.send(update)
    replies = pair.send(pair.say("b", 4.0, 0.0, 0.0))
    assert torch.equal(pair.merged["a"][0], torch.tensor([0.0, 2.5, 0.0]))  # of (2.0, 2.5, 0.0)
    assert [reply.size_bytes for reply in replies] == [8, 8]
    assert torch.equal(owed(pair.ends["a"]), torch.tensor([1.0, 0.0, 2.0]))
    pair.round((0.0, 0.0, 0.0), (0.0, 0.0, 0.0))
    assert torch.equal(pair.merged["a"][1], torch.tensor([2.0, 0.0, 0.0]))  # it was owed


def test_a_model_goes_in_full_first_then_as_a_difference() -> None:
    pair = Pair(Sma(), TopOne(), TopOne())
    first = pair.round((1.0, 2.0, 3.0), (3.0, 2.0, 1.0))
    assert all(reply.coded is None and reply.size_bytes == 12 for reply in first)
    update = pair.say("a", 2.0, 2.0, 2.5)
    assert update.against == 1 and update.size_bytes == 8
    pair.send(update)
    (reply, _) = pair.send(pair.say("b", 2.0, 4.0, 2.0))
    assert reply.against == 1 and reply.size_bytes == 8
    # a says (0, 0, .5), b says (0, 2, 0); of their mean (0, 1, .25) the largest comes back
    assert [m[1].tolist() for m in pair.merged.values()] == [[2.0, 3.0, 2.0]] * 2


def test_a_lossless_codec_is_given_the_model_itself() -> None:
    """A difference would be rounded: the bits would not be those without a codec."""
    pair, as_fp32 = Pair(Sma(), Exact(), Exact()), Pair(Sma())
    for each in (pair, as_fp32):
        each.round((0.1, 1e8, 3.0), (0.7, 1.0, 1.0))
        each.round((0.3, 1e-8, 3.0), (0.7, 1.0, 1.0))
    for mine, yours in zip(pair.merged["a"], as_fp32.merged["a"], strict=True):
        assert torch.equal(mine, yours)
    assert pair.say("a", 1.0, 1.0, 1.0).against is None


def test_the_final_update_pays_all_debts() -> None:
    pair = Pair(AsgdGa(combine="sum"), TopOne(), TopOne())
    pair.send(pair.say("a", 1.0, 5.0, 2.0))
    pair.send(pair.say("b", 0.0, 3.0, 4.0))
    for name in ("a", "b"):
        pair.send(pair.say(name, 0.0, 0.0, 0.0, final=True))
    assert torch.allclose(sum(pair.merged["b"]), torch.tensor([1.0, 5.0, 2.0]))
    assert torch.allclose(sum(pair.merged["a"]), torch.tensor([0.0, 3.0, 4.0]))
    assert not owed(pair.ends["a"]).any()


def test_the_last_mean_of_asynchronous_models_is_the_same_everywhere() -> None:
    pair = Pair(Ama(), TopOne(), TopOne())
    for values in ((1.0, 2.0, 3.0), (1.5, 2.5, 3.5), (2.0, 2.0, 2.0)):
        pair.send(pair.say("a", *values))
        pair.send(pair.say("b", *values[::-1]))
    for name in ("a", "b"):
        pair.send(pair.say(name, 0.0, 1.0, 2.0, final=True))
    assert torch.equal(pair.merged["a"][-1], pair.merged["b"][-1])


def test_a_round_that_is_open_at_a_checkpoint_ends_with_the_same_bits() -> None:
    whole, saved = (Pair(Sma(), TopOne(), TopOne()) for _ in range(2))
    for pair in (whole, saved):
        pair.round((1.0, 2.0, 3.0), (3.0, 2.0, 1.0))
        pair.round((1.0, 1.0, 1.0), (2.0, 0.0, 2.0))
        pair.send(pair.say("a", 5.0, 6.0, 7.0))
    saved.state.begin_checkpoint(1, halt=False)
    (snapshot,) = saved.state.snapshots
    again = Pair(Sma(), TopOne(), TopOne())
    again.state.restore(snapshot.tensors, snapshot.control)
    last = [pair.say("b", 4.0, 6.0, 9.0) for pair in (whole, saved)]
    expected, found = whole.state.on_update(last[0]), again.state.on_update(last[1])
    assert [r.version for r in found] == [r.version for r in expected] == [3, 3]
    for one, other in zip(expected, found, strict=True):
        assert one.against == other.against and one.coded is not None and other.coded is not None
        assert torch.equal(one.coded.data_B, other.coded.data_B)


def test_the_answer_of_a_round_is_encoded_once() -> None:
    @dataclass(frozen=True)
    class Counting(TopOne):
        calls: ClassVar[list[int]] = []

        def encode(self, x_P: Tensor, memory: dict[str, Tensor], seed: int) -> Coded:
            self.calls.append(seed)
            return super().encode(x_P, memory, seed)

    pair = Pair(Bsp(), None, Counting())
    for _ in range(3):
        replies = pair.round((1.0, 2.0, 3.0), (3.0, 2.0, 1.0))
        assert replies[0].coded is replies[1].coded
    assert len(Counting.calls) == len(set(Counting.calls)) == 3
    assert len(pair.state.wire._encoders) == 1


def test_regions_that_answer_alone_have_books_of_their_own() -> None:
    pair = Pair(AsgdGa(combine="sum"), None, TopOne())
    pair.send(pair.say("a", 1.0, 5.0, 2.0))
    pair.send(pair.say("b", 7.0, 0.0, 6.0))
    pair.send(pair.say("a", 0.0, 0.0, 0.0))
    assert set(pair.state.wire._encoders) == {"a", "b"}
    debts = {name: e.residual_P.tolist() for name, e in pair.state.wire._encoders.items()}
    assert debts == {"a": [0.0, 0.0, 6.0], "b": [1.0, 0.0, 2.0]}


# ------------------------------------------------------------------ seeds


def test_random_choices_depend_on_seed_region_and_number() -> None:
    def bits(seed: int, region: str, seq: int) -> bytes:
        wire = RegionWire(WirePlan(Dice(), seed=seed), region, 64)
        payload_P = torch.linspace(-1, 1, 64)
        coded = wire.encode(UpdateMessage(region, 1, seq, 0, 8, payload_P)).coded
        assert coded is not None
        return coded.data_B.numpy().tobytes()

    assert bits(0, "a", 1) == bits(0, "a", 1)
    assert len({bits(0, "a", 1), bits(1, "a", 1), bits(0, "b", 1), bits(0, "a", 2)}) == 4


# ------------------------------------------------------------------ what has no weight


def test_a_refused_gradient_does_not_take_debts_with_it() -> None:
    """The averager leaves out an update without rows, so nothing owed may be in it."""
    pair = Pair(Bsp(), TopOne(), TopOne())
    pair.round((1.0, 5.0, 2.0), (6.0, 1.0, 2.0))
    before = owed(pair.ends["a"]).clone()
    hub_debt = pair.state.wire._encoders["*"].residual_P.clone()
    assert before.any() and hub_debt.any()
    pair.round((0.0, 0.0, 0.0), (0.0, 0.0, 0.0), samples=0)
    assert torch.equal(owed(pair.ends["a"]), before)
    assert torch.equal(pair.state.wire._encoders["*"].residual_P, hub_debt)


def test_what_is_not_finite_goes_as_it_is_and_changes_no_debts() -> None:
    pair = Pair(AsgdGa(), TopOne())
    pair.send(pair.say("a", 1.0, 5.0, 2.0))
    before = owed(pair.ends["a"]).clone()
    update = pair.say("a", 1.0, float("nan"), 2.0)
    assert update.coded is None
    with pytest.raises(NonFiniteError, match="region 'a' is not finite"):
        pair.state.on_update(update)
    assert torch.equal(owed(pair.ends["a"]), before)


def test_what_a_codec_cannot_hold_goes_as_it_is() -> None:
    @dataclass(frozen=True)
    class Overflows(Exact):
        traits: ClassVar[CodecTraits] = CodecTraits(lossy=True, bits_per_value=32)

        def decode(self, coded: Coded) -> Tensor:
            x_P = super().decode(coded)
            return torch.where(x_P > 10.0, float("inf"), x_P)

    for strategy in (AsgdGa(combine="sum"), Sma()):
        pair = Pair(strategy, Overflows())
        if strategy.traits.in_rounds:
            pair.round((1.0, 2.0, 3.0), (1.0, 2.0, 3.0))
        update = pair.say("a", 1.0, 200.0, 2.0)
        assert update.coded is None
        assert torch.equal(update.payload_P, torch.tensor([1.0, 200.0, 2.0]))
        assert not owed(pair.ends["a"]).any()


# ------------------------------------------------------------------ repetitions, refusals


def test_a_repetition_is_not_decoded_and_gets_the_very_answer() -> None:
    pair = Pair(AsgdGa(combine="sum"), TopOne(), TopOne())
    pair.send(pair.say("b", 1.0, 5.0, 2.0))
    update = pair.say("a", 4.0, 0.0, 1.0)
    first = pair.state.on_update(update)
    tensors, control = pair.state.export()
    broken = Coded("top_one", NUM, torch.empty(0, dtype=torch.uint8))
    assert pair.state.on_update(replace(update, coded=broken)) == first
    again, control_again = pair.state.export()
    assert control_again == control
    assert all(torch.equal(again[name], value) for name, value in tensors.items())


def test_an_answer_that_was_given_before_a_checkpoint_is_the_same_to_the_byte_after_it() -> None:
    pair = Pair(AsgdGa(combine="sum"), TopOne(), TopOne())
    pair.send(pair.say("b", 3.0, 4.0, 9.0))
    update = pair.say("a", 1.0, 5.0, 2.0)
    (answer,) = pair.state.on_update(update)
    pair.state.begin_checkpoint(7, halt=False)
    (snapshot,) = pair.state.snapshots
    again = Pair(AsgdGa(combine="sum"), TopOne(), TopOne())
    again.state.restore(snapshot.tensors, snapshot.control)
    (reply,) = again.state.on_update(update)
    assert torch.equal(reply.coded.data_B, answer.coded.data_B) and reply.seq == answer.seq


@pytest.mark.parametrize(
    "coded",
    [
        Coded("exact", NUM, torch.zeros(12, dtype=torch.uint8)),
        Coded("top_one", NUM + 1, torch.zeros(8, dtype=torch.uint8)),
        Coded("top_one", NUM, torch.zeros(9, dtype=torch.uint8)),
        Coded("top_one", NUM, torch.full((8,), 255, dtype=torch.uint8)),
    ],
    ids=["another codec", "another size", "too long", "no such element"],
)
def test_what_makes_no_sense_is_refused_and_changes_nothing(coded: Coded) -> None:
    pair = Pair(AsgdGa(combine="sum"), TopOne())
    update = pair.say("a", 1.0, 5.0, 2.0)
    with pytest.raises(FrameError, match=coded.kind):
        pair.state.on_update(replace(update, coded=coded))
    assert pair.state.state.version == 0 and not pair.state.state.memory
    assert pair.send(update)  # the number was not used up


def test_coded_bytes_in_a_run_without_codecs_are_refused() -> None:
    with pytest.raises(FrameError, match="no codec was expected"):
        Pair(AsgdGa()).state.on_update(Pair(AsgdGa(), TopOne()).say("a", 1.0, 5.0, 2.0))


# ------------------------------------------------------------------ lost references


@pytest.mark.parametrize("strategy", [Sma(), Ama()], ids=lambda s: s.kind)
def test_an_averager_without_the_reference_says_so_and_is_told_in_full(strategy) -> None:
    pair = Pair(strategy, TopOne(), TopOne())
    for values in ((1.0, 2.0, 3.0), (2.0, 2.0, 3.0)):
        pair.send(pair.say("a", *values))
        pair.send(pair.say("b", *values))
    update = pair.say("a", 2.5, 2.0, 3.0)
    expected_P = pair.state.wire.decode(update, NUM).payload_P
    pair.state.wire = AveragerWire(pair.plan)  # another averager
    version = pair.state.state.version
    with pytest.raises(ReferenceLostError, match=f"region 'a'.*version {update.against}"):
        pair.state.on_update(update)
    assert pair.state.state.version == version
    whole = pair.ends["a"].in_full(update)
    assert (whole.seq, whole.coded, whole.against) == (update.seq, None, None)
    assert torch.equal(whole.payload_P, expected_P)
    replies = pair.send(whole)
    if strategy.traits.in_rounds:
        replies = pair.send(pair.ends["b"].in_full(pair.say("b", 2.5, 2.0, 3.0)))
    assert all(reply.coded is None for reply in replies)  # it has no reference for them either
    pair.send(pair.say("a", 2.5, 2.0, 3.5))  # and from then on as ever
    (reply, *_) = pair.send(pair.say("b", 2.5, 2.0, 3.5)) if strategy.traits.in_rounds else [None]
    assert reply is None or reply.against is not None


def test_a_region_that_lost_an_answer_gets_the_next_in_full() -> None:
    pair = Pair(Ama(), None, TopOne())
    for values in ((1.0, 2.0, 3.0), (2.0, 2.0, 3.0)):
        pair.send(pair.say("a", *values))
    pair.versions["a"] = 1  # it was restored from an older state, say
    (reply,) = pair.state.on_update(pair.say("a", 9.0, 9.0, 9.0))
    assert reply.coded is None and torch.equal(reply.payload_P, torch.full((NUM,), 9.0))


def test_a_difference_from_something_else_is_never_merged() -> None:
    pair = Pair(Sma(), TopOne(), TopOne())
    pair.round((1.0, 2.0, 3.0), (3.0, 2.0, 1.0))
    pair.send(pair.say("a", 1.0, 2.0, 3.0))
    (reply, _) = pair.state.on_update(pair.say("b", 1.0, 2.0, 3.0))
    with pytest.raises(InvariantError, match="version 1 as reference, not 5"):
        pair.ends["a"].decode(replace(reply, against=5))


# ------------------------------------------------------------------ dropped updates


def test_a_dropped_change_goes_with_the_next() -> None:
    for up in (None, Exact(), TopOne(), Habit()):
        pair = Pair(AsgdGa(combine="sum"), up)
        pair.say("a", 1.0, 5.0, 2.0, samples=3)
        assert pair.ends["a"].dropped(1).num_samples == 3
        pair.send(pair.say("a", 1.0, 0.0, 0.0))
        pair.send(pair.say("a", 0.0, 0.0, 0.0, final=True))
        pair.send(pair.say("b", 0.0, 0.0, 0.0, final=True))
        assert torch.allclose(sum(pair.merged["b"]), torch.tensor([2.0, 5.0, 2.0]))


def test_a_dropped_model_leaves_debts_as_they_were() -> None:
    """Its content is in the next model anyway, and must not be there twice."""
    pair, calm = Pair(Ama(), TopOne()), Pair(Ama(), TopOne())
    for each in (pair, calm):
        each.send(each.say("a", 1.0, 2.0, 3.0))
        each.send(each.say("a", 2.0, 5.0, 4.0))
    before = owed(pair.ends["a"]).clone()
    pair.say("a", 4.0, 6.0, 9.0)
    pair.ends["a"].dropped(3)
    assert before.any() and torch.equal(owed(pair.ends["a"]), before)
    mine, yours = pair.say("a", 4.0, 7.0, 9.0), calm.say("a", 4.0, 7.0, 9.0)
    assert torch.equal(mine.coded.data_B, yours.coded.data_B)


class Forgetful(Ama):
    """A strategy as a user may write one: it sends models, and drops every other one."""

    def on_update(self, averager: AveragerState, update: Update) -> list[Reply]:
        said = averager.numbers.get("said", 0.0) + 1.0
        averager.numbers["said"] = said
        if said % 2:
            return super().on_update(averager, update)
        return [Reply(update.region, torch.zeros(NUM), dropped=True)]


def test_a_strategy_of_ones_own_may_drop_models() -> None:
    """Nothing is owed for one that was dropped: the next model says it all again."""
    pair = Pair(Forgetful(), up=TopOne())
    for values in ((4.0, 0.0, 0.0), (4.0, 3.0, 1.0)):
        pair.send(pair.say("a", *values))
    pair.send(pair.say("a", 4.0, 3.0, 2.0))
    before = owed(pair.ends["a"]).clone()
    pair.send(pair.say("a", 9.0, 9.0, 9.0))
    assert before.any() and torch.equal(owed(pair.ends["a"]), before)


def test_only_the_open_update_can_be_dropped_and_none_of_a_round() -> None:
    pair = Pair(AsgdGa(), TopOne())
    update = pair.say("a", 1.0, 5.0, 2.0)
    with pytest.raises(InvariantError, match="not open"):
        pair.ends["a"].dropped(2)
    pair.send(update)
    with pytest.raises(InvariantError, match="not open"):
        pair.ends["a"].dropped(1)
    rounds = Pair(Bsp(), TopOne())
    rounds.say("a", 1.0, 5.0, 2.0)
    with pytest.raises(InvariantError, match="from a round"):
        rounds.ends["a"].dropped(1)


def test_blocks_that_were_lost_on_the_way_are_owed_again() -> None:
    num = 12
    codec = Dgt(block_bytes=8, reliable_fraction=0.5)
    pair = Pair(Bsp(), codec, num=num)
    values = [float(i + 1) for i in range(num)]
    update = pair.say("a", *values)
    lossy = update.coded.lossy
    assert lossy.ids_L.numel() == 3
    arrived = codec.subset(update.coded, torch.tensor([1]))
    here = replace(update, coded=replace(update.coded, lossy=arrived.lossy))
    pair.ends["a"].put_back(codec.subset(update.coded, torch.tensor([0, 2])))
    taken_P = pair.state.wire.decode(here, num).payload_P
    assert int((taken_P == 0).sum()) == 4
    assert torch.equal(taken_P + owed(pair.ends["a"]), torch.tensor(values))


# ------------------------------------------------------------------ checkpoints


@pytest.mark.parametrize("other", [(None, None), (TopOne(), Dice()), (Dice(), TopOne())], ids=str)
def test_state_of_other_codecs_is_refused(other) -> None:
    pair = Pair(Sma(), TopOne(), TopOne())
    pair.round((1.0, 2.0, 3.0), (3.0, 2.0, 1.0))
    changed = Pair(Sma(), *other)
    with pytest.raises(ConfigChangedError, match=r"codec\.(up|down)"):
        changed.state.restore(*pair.state.export())
    end = pair.ends["a"]
    with pytest.raises(ConfigChangedError, match=r"codec\.(up|down)"):
        changed.ends["a"].restore(end.tensors(), end.export())


def test_a_checkpoint_of_an_earlier_release_has_no_codecs() -> None:
    pair = Pair(AsgdGa())
    tensors, control = pair.state.export()
    del control["wire"]
    Pair(AsgdGa()).state.restore(tensors, control)
    with pytest.raises(ConfigChangedError):
        Pair(AsgdGa(), TopOne()).state.restore(tensors, control)
    with pytest.raises(ConfigChangedError):
        Pair(AsgdGa(), TopOne()).ends["a"].restore({}, {})
