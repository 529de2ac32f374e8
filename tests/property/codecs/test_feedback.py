"""The books of error feedback: what was taken in and what is owed is what was produced."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from geo_ray.codecs.base import Codec
from geo_ray.codecs.int8 import Int8
from geo_ray.codecs.topk import TopK
from geo_ray.training.messages import ReplyMessage, UpdateMessage
from geo_ray.training.payload_encoding import AveragerWire, RegionWire, WirePlan
from tests.support.codec_toys import TOYS

NUM = 6
CODECS = st.sampled_from([*TOYS, TopK(ratio=0.2), Int8()])
FATES = st.sampled_from(
    ["taken", "taken", "dropped", "refused", "part lost", "saved", "final update"]
)
EVENTS = st.lists(st.tuples(FATES, st.integers(0, 2**16)), max_size=25)


def vector(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(NUM, generator=generator) * 10.0 ** (seed % 5 - 2)


def owed(wire: RegionWire | AveragerWire) -> Tensor:
    encoders = [wire._encoder] if isinstance(wire, RegionWire) else wire._encoders.values()
    debts = [e.residual_P for e in encoders if e.residual_P is not None]
    return torch.stack(debts).double().sum(0) if debts else torch.zeros(NUM).double()


def balanced(produced: Tensor, taken: Tensor, debt: Tensor, most: float) -> bool:
    return torch.allclose(taken + debt, produced, rtol=0, atol=1e-6 * (1 + most))


@settings(deadline=None, max_examples=150)
@given(codec=CODECS, events=EVENTS)
def test_nothing_of_an_update_is_lost(codec: Codec | None, events: list[tuple[str, int]]) -> None:
    plan = WirePlan(up=codec)
    wire, hub = RegionWire(plan, "a", NUM), AveragerWire(plan)
    produced, taken, most = torch.zeros(NUM).double(), torch.zeros(NUM).double(), 0.0
    for seq, (fate, seed) in enumerate(events, start=1):
        payload_P = vector(seed)
        final = fate == "final update"
        update = wire.encode(UpdateMessage("a", 1, seq, 0, 8, payload_P.clone(), final))
        produced += payload_P
        most += float(payload_P.abs().max())
        if fate == "dropped":
            assert wire.dropped(seq).num_samples == 8
        elif fate == "refused":  # the sender is told only after it was on its way
            again = wire.in_full(update)
            assert torch.equal(again.payload_P, hub.decode(update, NUM).payload_P)
            taken += hub.decode(again, NUM).payload_P
        else:
            taken += hub.decode(update, NUM).payload_P
        if final:
            assert not owed(wire).any()
        if fate == "part lost" and update.coded is not None and codec is not None:
            lost_P = torch.zeros(NUM)
            lost_P[seed % NUM] = codec.decode(update.coded)[seed % NUM]
            taken -= lost_P
            wire._encoder.put_back(lost_P)
        if fate == "saved":
            again = RegionWire(plan, "a", NUM)
            again.restore(wire.tensors(), wire.export())
            wire = again
        assert balanced(produced, taken, owed(wire), most)


@settings(deadline=None, max_examples=150)
@given(codec=CODECS, events=EVENTS, in_rounds=st.booleans())
def test_nothing_of_an_answer_is_lost(
    codec: Codec | None, events: list[tuple[str, int]], in_rounds: bool
) -> None:
    plan = WirePlan(down=codec, in_rounds=in_rounds)
    hub, wires = AveragerWire(plan), {name: RegionWire(plan, name, NUM) for name in ("a", "b")}
    produced, taken, most = torch.zeros(NUM).double(), torch.zeros(NUM).double(), 0.0
    for version, (fate, seed) in enumerate(events, start=1):
        final = fate == "final update"
        for name in wires:
            hub.decode(
                UpdateMessage(name, 1, version, version - 1, 8, torch.zeros(NUM), final), NUM
            )
        payload_P = vector(seed)
        answers = [ReplyMessage(name, version, version, 16, payload_P, final) for name in wires]
        sent = hub.encode(answers)
        merged = [wires[reply.to].decode(reply).payload_P for reply in sent]
        if in_rounds:
            assert torch.equal(*merged) and sent[0].coded is sent[1].coded
        factor = 1 if in_rounds else 2  # one book for all, or one for each
        produced += factor * payload_P
        taken += merged[0].double() + (0 if in_rounds else merged[1].double())
        most += factor * float(payload_P.abs().max())
        if fate == "saved":
            again = AveragerWire(plan)
            again.restore(*hub.export())
            hub = again
        assert balanced(produced, taken, owed(hub), most)


@settings(deadline=None, max_examples=100)
@given(
    up=CODECS, down=CODECS, in_rounds=st.booleans(), seeds=st.lists(st.integers(0, 99), max_size=12)
)
def test_models_arrive_as_differences_from_what_both_know(
    up: Codec | None, down: Codec | None, in_rounds: bool, seeds: list[int]
) -> None:
    """Whatever is lost, both ends speak of the same reference, and the final update is exact."""
    plan = WirePlan(up, down, "model", in_rounds)
    hub, wire = AveragerWire(plan), RegionWire(plan, "a", NUM)
    model_P, version = vector(1), 0
    for seq, seed in enumerate([*seeds, 7], start=1):
        final = seq > len(seeds)
        model_P = model_P + 0.1 * vector(seed)
        before_P = wire._encoder.residual_P
        update = hub.decode(
            wire.encode(UpdateMessage("a", 1, seq, version, 8, model_P.clone(), final)), NUM
        )
        if final and plan.is_lossy(up):
            whole_P = model_P if before_P is None else model_P + before_P
            assert torch.equal(update.payload_P, whole_P)
        (reply,) = hub.encode([ReplyMessage("a", seq, seq, 8, update.payload_P.clone(), final)])
        merged = wire.decode(reply)
        model_P, version = merged.payload_P, reply.version
        if plan.keeps_reference:
            assert torch.equal(wire._reference_P, hub._references["*" if in_rounds else "a"])
            assert torch.equal(wire._reference_P, model_P)
